// GEMMs of bf16 with fp32 results by torch's own routine for one tile: packing, loops and threads. See rows.cpp.
#include "numbers.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int TILE = 16;

#if defined(__GNUC__) && !defined(__clang__)
typedef uint32_t Lanes __attribute__((vector_size(4 * TILE)));

// One of the four steps that transpose a tile: exchange the off-diagonal blocks of size S.
template <unsigned S>
INLINE void exchange(Lanes* r) {
  Lanes low, high;
  for (unsigned j = 0; j < TILE; ++j) {
    low[j] = j & S ? TILE + j - S : j;
    high[j] = j & S ? TILE + j : j + S;
  }
  for (unsigned i = 0; i < TILE; ++i)
    if (!(i & S)) {
      const Lanes a = r[i], b = r[i + S];
      r[i] = __builtin_shuffle(a, b, low);
      r[i + S] = __builtin_shuffle(a, b, high);
    }
}

INLINE void transpose(const uint32_t* w, int64_t stride, uint32_t* out, int64_t out_stride) {
  Lanes r[TILE];
  for (int i = 0; i < TILE; ++i) std::memcpy(&r[i], w + i * stride, sizeof r[i]);
  exchange<1>(r);
  exchange<2>(r);
  exchange<4>(r);
  exchange<8>(r);
  for (int i = 0; i < TILE; ++i) std::memcpy(out + i * out_stride, &r[i], sizeof r[i]);
}

// 2 TILE rows of TILE bf16: as the above, of the pairs that two rows form in every column.
INLINE void transpose_pairs(const uint16_t* x, int64_t stride, uint32_t* out, int64_t out_stride) {
  typedef uint16_t Halves __attribute__((vector_size(2 * TILE)));
  Lanes r[TILE];
  for (int i = 0; i < TILE; ++i) {
    Halves low, high;
    std::memcpy(&low, x + 2 * i * stride, sizeof low);
    std::memcpy(&high, x + (2 * i + 1) * stride, sizeof high);
    r[i] = __builtin_convertvector(low, Lanes) | __builtin_convertvector(high, Lanes) << 16;
  }
  exchange<1>(r);
  exchange<2>(r);
  exchange<4>(r);
  exchange<8>(r);
  for (int i = 0; i < TILE; ++i) std::memcpy(out + i * out_stride, &r[i], sizeof r[i]);
}
#else
INLINE void transpose_pairs(const uint16_t* x, int64_t stride, uint32_t* out, int64_t out_stride) {
  for (int i = 0; i < TILE; ++i)
    for (int j = 0; j < TILE; ++j)
      out[i * out_stride + j] = x[2 * j * stride + i] | uint32_t(x[(2 * j + 1) * stride + i]) << 16;
}

INLINE void transpose(const uint32_t* w, int64_t stride, uint32_t* out, int64_t out_stride) {
  for (int i = 0; i < TILE; ++i)
    for (int j = 0; j < TILE; ++j) out[i * out_stride + j] = w[j * stride + i];
}
#endif

// w (n, pairs) -> out (pairs, n), both of bf16 pairs: the layout in which the CPU multiplies bf16.
EVERY_CPU void pack(const uint32_t* __restrict w, int64_t stride, int64_t n, int64_t pairs, uint32_t* __restrict out) {
  for (int64_t v = 0; v < n; v += TILE)
    for (int64_t k = 0; k < pairs; k += TILE)
      if (v + TILE <= n && k + TILE <= pairs)
        transpose(w + v * stride + k, stride, out + k * n + v, n);
      else
        for (int64_t i = k; i < std::min(pairs, k + TILE); ++i)
          for (int64_t j = v; j < std::min(n, v + TILE); ++j) out[i * n + j] = w[j * stride + i];
}

// dz (n, columns) bf16 -> out (columns, K), K >= n even; 0 from n on.
EVERY_CPU void transpose_rows(const uint16_t* __restrict dz, int64_t stride, int64_t n, int64_t columns, int64_t K,
                              uint16_t* __restrict out) {
  for (int64_t k = 0; k < K; k += 2 * TILE)
    for (int64_t v = 0; v < columns; v += TILE)
      if (k + 2 * TILE <= n && v + TILE <= columns)
        transpose_pairs(dz + k * stride + v, stride, (uint32_t*)(out + v * K + k), K / 2);
      else
        for (int64_t j = v; j < std::min(columns, v + TILE); ++j)
          for (int64_t i = k; i < std::min(K, k + 2 * TILE); ++i) out[j * K + i] = i < n ? dz[i * stride + j] : 0;
}

// h (n, H) bf16 -> out (K / 2, H) of pairs of rows, 0 from n on.
EVERY_CPU void pair_rows(const uint16_t* __restrict h, int64_t n, int64_t H, int64_t k, uint32_t* __restrict out) {
  for (int64_t j = 0; j < H; ++j)
    out[j] = (k < n ? h[k * H + j] : 0u) | (k + 1 < n ? uint32_t(h[(k + 1) * H + j]) << 16 : 0u);
}

EVERY_CPU void round_all(const float* __restrict x, int64_t n, uint16_t* __restrict out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(x[i], out[i]);
}

using Brgemm = void (*)(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add_C,
                        const void* A, const void* B, float* C, bool is_vnni);
using BrgemmRelease = void (*)(bool is_vnni);

}  // namespace

extern "C" {

// 1 if the GEMM can be called. torch's throws where the processor, or what oneDNN's or torch's settings leave of it, has no
// multiplication of bf16, and nothing above a C function could catch that.
int rlplus_gemm_works(Brgemm gemm, BrgemmRelease release) try {
  const uint32_t pair = 0;
  float sum;
  gemm(1, 1, 2, 2, 1, 1, false, &pair, &pair, &sum, true);
  release(true);
  return 1;
} catch (...) {
  return 0;
}

// hidden (n, H), weight (V, H) bf16, H even -> z (n, V) = hidden weight^T in fp32, which torch.mm does not offer on the
// CPU. The caller passes torch's own oneDNN GEMM. columns: of the vocabulary at a time, packed into cache.
void rlplus_logits_bf16(Brgemm gemm, BrgemmRelease release, const uint16_t* hidden, int64_t hidden_stride,
                        const uint16_t* weight, int64_t weight_stride, int64_t n, int64_t H, int64_t V, float* z,
                        int64_t columns, int64_t panel, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint32_t> packed(columns * (H / 2));
#pragma omp for schedule(dynamic)
    for (int64_t v = 0; v < V; v += columns) {
      const int64_t width = std::min(columns, V - v);
      pack((const uint32_t*)(weight + v * weight_stride), weight_stride / 2, width, H / 2, packed.data());
      for (int64_t i = 0; i < n; i += panel)
        gemm(std::min(panel, n - i), width, H, hidden_stride, width, V, false, hidden + i * hidden_stride,
             packed.data(), z + i * V + v, true);
    }
    release(true);
  }
}

// sum (V, H) fp32 += dz^T hidden, for dz (n, V), hidden (n, H) bf16; `first`: sum = it; `last`: out (V, H) bf16 becomes
// the sum instead. K: n rounded up, so that the GEMM, which is compiled at its first use, comes in few shapes. Its tiles
// are (panel, width); `columns` of dz are transposed at a time.
void rlplus_dweight_bf16(Brgemm gemm, BrgemmRelease release, const uint16_t* dz, int64_t stride, const uint16_t* hidden,
                         int64_t n, int64_t K, int64_t H, int64_t V, float* sum, uint16_t* out, int64_t columns,
                         int64_t panel, int64_t width, int first, int last, int threads) {
  std::vector<uint32_t> pairs(K / 2 * H);
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint16_t> across(columns * K);
    std::vector<float> tile(last ? panel * H : 0);
#pragma omp for schedule(static)
    for (int64_t k = 0; k < K; k += 2) pair_rows(hidden, n, H, k, pairs.data() + k / 2 * H);
#pragma omp for schedule(dynamic)
    for (int64_t v = 0; v < V; v += columns) {
      const int64_t m = std::min(columns, V - v);
      transpose_rows(dz + v, stride, n, m, K, across.data());
      for (int64_t i = 0; i < m; i += panel) {
        const int64_t rows = std::min(panel, m - i), start = (v + i) * H;
        float* c = last ? tile.data() : sum + start;
        if (last && !first)
          std::memcpy(c, sum + start, rows * H * sizeof(float));
        else if (!first)
          for (int64_t j = 0; j < rows * H; j += 16) __builtin_prefetch(c + j, 1, 2);
        for (int64_t j = 0; j < H; j += width)
          gemm(rows, std::min(width, H - j), K, K, H, H, !first, across.data() + i * K, pairs.data() + j, c + j, true);
        if (last) round_all(c, rows * H, out + start);
      }
    }
    release(true);
  }
}

}  // extern "C"
