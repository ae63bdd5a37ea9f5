// The CPU kernels of rlplus as a plain C library: no torch, no Python; called through ctypes by rlplus/loss/backends/native.py.
//
// A row is one token's V logits in fp32. `statistics` reads a row once; `gradient` then writes the row's gradient, fp32
// or bf16, over a row that is no longer needed. Between the two the caller turns logprobs into slopes with the
// package's one definition of the objectives: (N,) vectors, a thousandth of the time of a chunk's GEMMs.
//
// Compile without -ffast-math: NaN and infinity must come out where they went in.
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float FLOOR = -1e30f;  // stands in for log 0, as in every backend
constexpr int64_t BLOCK = 2048;  // columns at a time: they stay in the first-level cache between max and sum
constexpr int64_t DEPTH = 32;    // bf16 values in a row of an AMX tile

// 2^x for x <= 0 to about 1 ulp; 0 below -126, where fp32 has no normal numbers left. NaN stays NaN.
INLINE float exp2_nonpositive(float x) {
  const float y = x < -126.f ? -126.f : x;
  const float shifted = y + 12582912.f;  // 1.5 * 2^23: the sum's last bits are y rounded to an integer
  const float f = y - (shifted - 12582912.f);
  float p = 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const float scale = bits<float>((bits<uint32_t>(shifted) + 127u) << 23);
  return x < -126.f ? 0.f : p * scale;
}

// cap * tanh(x / cap) and its derivative, sech^2(x / cap): by e^(-2 |x / cap|), which cancels nothing where it is flat.
struct Capped { float value, slope; };
INLINE Capped softcap(float x, float cap) {
  const float y = x / cap, a = std::fabs(y), e = exp2_nonpositive(-2.f * LOG2E * a), y2 = y * y;
  const float series = a * (1.f - y2 * (1 / 3.f - y2 * (2 / 15.f - y2 * (17 / 315.f - y2 * (62 / 2835.f)))));
  const float t = a < 0.25f ? series : (1.f - e) / (1.f + e);
  return {std::copysign(cap * t, y), 4.f * e / ((1.f + e) * (1.f + e))};
}

// What the gradient needs of a row: max of z + bias, capped; rest, the sum of e = exp((z + bias - max) / T), z + bias
// capped, without the largest, a 1 that would take its digits (-1: there is none); logprob and entropy.
struct Row {
  float max, rest, logprob, entropy;
};

// cap is 0 where there is none. Capped logits are finite: -inf is taken for the lowest number.
template <bool BIAS, bool CAP>
INLINE float logit(const float* z, const float* bias, int64_t j) {
  const float x = BIAS ? z[j] + bias[j] : z[j], lowest = std::numeric_limits<float>::lowest();
  return CAP && x < lowest ? lowest : x;
}

template <bool CAP>
INLINE float capped(float x, float cap) {
  return CAP ? softcap(x, cap).value : x;
}

template <bool BIAS, bool CAP>
INLINE void add_terms(const float* __restrict z, const float* __restrict bias, int64_t start, int64_t stop,
                      float origin, float scale, float cap, float* sum, float* moment) {
  float block_sum = 0.f, block_moment = 0.f;
#pragma omp simd reduction(+ : block_sum, block_moment)
  for (int64_t j = start; j < stop; ++j) {
    const float x = (capped<CAP>(logit<BIAS, CAP>(z, bias, j), cap) - origin) * scale;
    const float e = exp2_nonpositive(x);
    block_sum += e;
    block_moment += e * (x < -126.f ? 0.f : x);  // 0 * -inf is no number
  }
  *sum += block_sum;
  *moment += block_moment;
}

template <bool BIAS, bool CAP>
INLINE void statistics_row(const float* __restrict z, const float* __restrict bias, int64_t V, int64_t target,
                           float inv_temperature, float cap, Row* out) {
  const float scale = inv_temperature * LOG2E, none = -std::numeric_limits<float>::infinity();
  // largest_logit, not capped, tells the largest term from those that the cap makes equal to it.
  float largest_logit = none, max = none, rest = -1.f, moment = 0.f;  // moment = sum of e * log2(e)
  for (int64_t start = 0; start < V; start += BLOCK) {
    const int64_t stop = std::min(V, start + BLOCK);
    float block_max = none;
#pragma omp simd reduction(max : block_max)
    for (int64_t j = start; j < stop; ++j) {
      const float x = logit<BIAS, CAP>(z, bias, j);
      block_max = x > block_max ? x : block_max;
    }
    int64_t largest = start;
    if (block_max > largest_logit) {
      const float new_max = capped<CAP>(block_max, cap);
      const float x = (max - new_max) * scale, r = exp2_nonpositive(x), sum = 1.f + rest;
      moment = (moment + (r > 0.f ? sum * x : 0.f)) * r;
      rest = sum * r + (new_max - new_max);  // an infinite logit makes no number of all
      largest_logit = block_max;
      max = new_max;
      while (logit<BIAS, CAP>(z, bias, largest) != largest_logit) ++largest;
      add_terms<BIAS, CAP>(z, bias, start, largest++, max, scale, cap, &rest, &moment);
    }
    const float origin = max == none ? 0.f : max;  // -inf - -inf: no number
    add_terms<BIAS, CAP>(z, bias, largest, stop, origin, scale, cap, &rest, &moment);
  }
  const float log_sum = std::log1p(rest);
  out->max = max;
  out->rest = rest;
  out->entropy = log_sum - moment / (1.f + rest) * LN2;
  const bool known = target >= 0 && target < V;
  const float at_target = capped<CAP>(logit<BIAS, CAP>(z, bias, known ? target : 0), cap);
  const float logprob = (at_target - max) * inv_temperature - log_sum;
  out->logprob = !known ? std::numeric_limits<float>::quiet_NaN() : logprob < FLOOR ? FLOOR : logprob;
}

// dz_j = [c (1[j = target] - p_j) - e p_j (log p_j + entropy)] / T, times the cap's slope, block by block through an
// array: `out` may be the memory of z, and narrower.
template <class T, bool BIAS, bool CAP, bool ENTROPY>
INLINE void gradient_row(const float* z, const float* __restrict bias, int64_t V, int64_t target,
                         float inv_temperature, float cap, const Row& row, float dlogprob, float dentropy, T* out) {
  const float scale = inv_temperature * LOG2E, inv_sum = 1.f / (1.f + row.rest);
  const float c = dlogprob * inv_temperature, e = dentropy * inv_temperature;
  const float offset = row.entropy - std::log1p(row.rest);
  const bool known = target >= 0 && target < V;
  const float target_slope = CAP && known ? softcap(logit<BIAS, CAP>(z, bias, target), cap).slope : 1.f;
  T block[BLOCK];
  for (int64_t start = 0; start < V; start += BLOCK) {
    const int64_t n = std::min(BLOCK, V - start);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      const float raw = logit<BIAS, CAP>(z, bias, start + j);
      const Capped at = CAP ? softcap(raw, cap) : Capped{raw, 1.f};
      float x = (at.value - row.max) * scale;
      const float p = exp2_nonpositive(x) * inv_sum;
      x = x < -126.f ? -126.f : x;
      const float dz = ENTROPY ? -p * (c + e * (x * LN2 + offset)) : -p * c;
      store(CAP ? dz * at.slope : dz, block[j]);
    }
    std::memcpy(out + start, block, n * sizeof(T));
  }
  if (known && dlogprob != 0.f) {
    // -expm1 keeps 1 - p accurate near p = 1.
    const float p = std::exp(row.logprob);
    const float bonus = ENTROPY && p > 0.f ? dentropy * p * (row.logprob + row.entropy) : 0.f;
    store((dlogprob * -std::expm1(row.logprob) - bonus) * inv_temperature * target_slope, out[target]);
  }
}

// What a draw keeps of a row, see rlplus_draw.
struct Kept {
  int32_t* token;
  float *w, *logp, *slope;
  int64_t capacity;
};
struct Drawn {
  int32_t count, flat;
  float variance, square, own_slope;
};
constexpr int64_t LOOK = 256;  // columns whose mass is looked at together: where it passes no multiple, none is kept

// Threshold sampling of the probabilities but the target's: systematic, so `total` is the mass since the last element.
template <bool BIAS, bool CAP>
INLINE bool draw_row(const float* __restrict z, const float* __restrict bias, int64_t V, int64_t target,
                     float inv_temperature, float cap, const Row& row, float uniform, double level, int64_t most,
                     const Kept& kept, Drawn* out) {
  const float scale = inv_temperature * LOG2E, inv_sum = 1.f / (1.f + row.rest), log_sum = std::log1p(row.rest);
  const float small = float(level);
  double total = uniform * level, mass = 0., mass_squares = 0., squares = 0.;
  int64_t count = 0, large = 0;
  float p[LOOK];
  auto keep = [&](int64_t j, float w) __attribute__((always_inline)) {
    if (count < kept.capacity) {
      const float raw = logit<BIAS, CAP>(z, bias, j);
      const Capped at = CAP ? softcap(raw, cap) : Capped{raw, 1.f};
      kept.token[count] = int32_t(j);
      kept.w[count] = w;
      kept.logp[count] = (at.value - row.max) * inv_temperature - log_sum;
      if (CAP) kept.slope[count] = at.slope;
    }
    ++count;
  };
  for (int64_t start = 0; start < V; start += LOOK) {
    const int64_t n = std::min(LOOK, V - start);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j)
      p[j] = exp2_nonpositive((capped<CAP>(logit<BIAS, CAP>(z, bias, start + j), cap) - row.max) * scale) * inv_sum;
    if (target >= start && target < start + n) p[target - start] = 0.f;
    float sum = 0.f, sum_squares = 0.f, largest = 0.f;
#pragma omp simd reduction(+ : sum, sum_squares) reduction(max : largest)
    for (int64_t j = 0; j < n; ++j) {
      sum += p[j];
      sum_squares += p[j] * p[j];
      largest = p[j] > largest ? p[j] : largest;
    }
    squares += sum_squares;
    if (largest < small && total + sum < level) {
      total += sum, mass += sum, mass_squares += sum_squares;
      continue;
    }
    for (int64_t j = 0; j < n; ++j) {
      if (p[j] >= small) {
        keep(start + j, p[j]);
        ++large;
        continue;
      }
      total += p[j], mass += p[j], mass_squares += double(p[j]) * p[j];
      if (total >= level) {
        total -= level;
        keep(start + j, small);
      }
    }
  }
  const float own = row.logprob == row.logprob ? -std::expm1(row.logprob) : 0.f;  // NaN: no target
  out->count = int32_t(count);
  out->variance = float(level * mass - mass_squares);
  out->square = float(squares) + own * own;
  return double(large) + mass / level <= double(most);
}

template <class F>  // f(a, b) with both as constants
INLINE void with_constants(bool a, bool b, const F& f) {
  const std::true_type yes;
  const std::false_type no;
  if (a)
    b ? f(yes, yes) : f(yes, no);
  else
    b ? f(no, yes) : f(no, no);
}

EVERY_CPU void statistics_one(const float* z, const float* bias, int64_t V, int64_t target, float inv_temperature,
                              float cap, Row* out) {
  with_constants(bias, cap != 0.f, [&](auto BIAS, auto CAP) __attribute__((always_inline)) {
    statistics_row<BIAS, CAP>(z, bias, V, target, inv_temperature, cap, out);
  });
}

// out: V floats or, to_bf16, as many bf16.
EVERY_CPU void gradient_one(const float* z, const float* bias, int64_t V, int64_t target, float inv_temperature,
                            float cap, const Row& row, float dlogprob, float dentropy, bool to_bf16, void* out) {
  with_constants(bias, cap != 0.f, [&](auto BIAS, auto CAP) __attribute__((always_inline)) {
    with_constants(to_bf16, dentropy != 0.f, [&](auto BF16, auto ENTROPY) __attribute__((always_inline)) {
      using T = std::conditional_t<BF16, uint16_t, float>;
      gradient_row<T, BIAS, CAP, ENTROPY>(z, bias, V, target, inv_temperature, cap, row, dlogprob, dentropy, (T*)out);
    });
  });
}

// A row that would keep more than `most` has the level 1 / most, where it cannot.
EVERY_CPU void draw_one(const float* z, const float* bias, int64_t V, int64_t target, float inv_temperature, float cap,
                        const Row& row, float uniform, double level, int64_t most, const Kept& kept, Drawn* out) {
  with_constants(bias, cap != 0.f, [&](auto BIAS, auto CAP) __attribute__((always_inline)) {
    const bool known = target >= 0 && target < V;
    const double raised = std::max(level, 1. / double(most));
    const bool fits = draw_row<BIAS, CAP>(z, bias, V, target, inv_temperature, cap, row, uniform, level, most, kept, out);
    out->flat = !fits && raised > level;
    if (out->flat) draw_row<BIAS, CAP>(z, bias, V, target, inv_temperature, cap, row, uniform, raised, most, kept, out);
    out->own_slope = CAP && known ? softcap(logit<BIAS, CAP>(z, bias, target), cap).slope : 1.f;
  });
}

}  // namespace

extern "C" {

// Renamed with every change of a signature below: the package does not load a library of another version.
void rlplus_interface_6() {}

// z (n, V) fp32, bias (V,) or null, target (n,) -> rows (n, 4), see Row; logprob is NaN where the target is no token.
// inv_temperature (n,). cap: z + bias becomes cap * tanh((z + bias) / cap); 0: it does not.
void rlplus_row_statistics(const float* z, const float* bias, const int64_t* target, int64_t n, int64_t V,
                           const float* inv_temperature, float cap, Row* rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < n; ++i) statistics_one(z + i * V, bias, V, target[i], inv_temperature[i], cap, rows + i);
}

// Row s < n of the buffer becomes the gradient of row source[s], fp32 or, in the front half of the row's memory,
// bf16. Each source is its own slot or a row that is no slot, and each slot is its own source or a row that is no
// source, so rows may be done in any order. The arrays behind it are indexed by source; dentropy may be null.
// Zeros follow a bf16 row as far as oneDNN's AMX kernel reads past its end, to multiply what is there by 0: the bits of
// the logits that stood there can be NaN. For V < DEPTH - 1 the row's memory ends first.
void rlplus_row_gradient(const float* z, float* out, const float* bias, const int64_t* source, int64_t n, int64_t V,
                         const int64_t* target, const float* inv_temperature, float cap, const Row* rows,
                         const float* dlogprob, const float* dentropy, int to_bf16, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t s = 0; s < n; ++s) {
    const int64_t i = source[s];
    const float e = dentropy ? dentropy[i] : 0.f;
    float* row = out + s * V;
    gradient_one(z + i * V, bias, V, target[i], inv_temperature[i], cap, rows[i], dlogprob[i], e, to_bf16, row);
    if (to_bf16) std::fill_n((uint16_t*)row + V, std::min(V, DEPTH - 1), uint16_t(0));
  }
}

// Of rows i with on[i], the elements of a sampled backward pass (rlplus/loss/backends/sampled.py) go to token, w, logp
// and, with a cap, slope (n, capacity), and the rest to drawn (n,). uniform (n,) in [0, 1); rows: of row_statistics.
void rlplus_draw(const float* z, const float* bias, const int64_t* target, int64_t n, int64_t V,
                 const float* inv_temperature, float cap, const Row* rows, const uint8_t* on, const float* uniform,
                 double threshold, int64_t most, int64_t capacity, int32_t* token, float* w, float* logp, float* slope,
                 Drawn* drawn, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < n; ++i) {
    drawn[i] = Drawn{0, 0, 0.f, 0.f, 1.f};
    if (!on[i] || !std::isfinite(rows[i].entropy)) continue;
    const int64_t first = i * capacity;
    const Kept kept{token + first, w + first, logp + first, slope ? slope + first : nullptr, capacity};
    draw_one(z + i * V, bias, V, target[i], inv_temperature[i], cap, rows[i], uniform[i], threshold, most, kept, drawn + i);
  }
}

// The contents may be lost and the kernel may take the memory back when it needs it; until then it stays mapped.
void rlplus_may_be_reclaimed(void* start, int64_t bytes) {
#ifdef MADV_FREE
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), end = uintptr_t(start) + bytes;
  const uintptr_t first = (uintptr_t(start) + page - 1) / page * page;
  if (end > first) madvise(reinterpret_cast<void*>(first), (end - first) / page * page, MADV_FREE);  // only advice
#else
  (void)start, (void)bytes;
#endif
}
}
