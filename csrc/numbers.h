// Common to the native sources: processors, and numbers of two bytes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(EVERY_CPU)
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif !defined(EVERY_CPU)  // else the compiler's command line chose one processor
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

namespace {

template <class To, class From>
INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

INLINE void store(float x, float& out) { out = x; }
INLINE void store(float x, uint16_t& out) {  // bf16, to nearest even
  const uint32_t u = bits<uint32_t>(x);
  out = uint16_t(x != x ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace
