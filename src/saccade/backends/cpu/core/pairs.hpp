// Products of pairs of bfloat16 with a float32 sum, on chips that have them. A pair is a word, the first number below.
#pragma once
#include "vec.hpp"

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define SACCADE_PAIRS 1

namespace saccade::SACCADE_ISA {

#if defined(__AVX512BF16__)
// c + the product of each pair of a with that of b
SACCADE_INLINE vec<float> dot_pairs(vec<float> a, vec<float> b, vec<float> c) {
  return reinterpret_cast<vec<float>>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(c), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}
// neighbours among the lanes of two vectors, as pairs
SACCADE_INLINE vec<float> pair_neighbours(vec<float> first, vec<float> second) {
  return reinterpret_cast<vec<float>>(
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first)));
}
// lane i of the result holds (low[i], high[i])
SACCADE_INLINE vec<float> pack_pairs(vec<float> low, vec<float> high) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return reinterpret_cast<vec<float>>(
      _mm512_permutexvar_epi16(_mm512_load_si512(order), reinterpret_cast<__m512i>(pair_neighbours(low, high))));
}
// Pairs of the numbers of two rows, 32 at a time, for whole groups of 32 among n. Returns how many it has stored, and
// collects in `finite` whether all were finite. Without a second row, zeros take its place.
SACCADE_INLINE int64_t weave(const uint16_t* low, const uint16_t* high, int64_t n, uint32_t* out, bool* finite) {
  alignas(64) static constexpr uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(order), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  int64_t d = 0;
  __mmask32 bad = 0;
  for (; d + 32 <= n; d += 32) {
    const __m512i a = _mm512_loadu_si512(low + d), b = high ? _mm512_loadu_si512(high + d) : _mm512_setzero_si512();
    bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(a, exponent), exponent);
    bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(b, exponent), exponent);
    _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(a, first, b));
    _mm512_storeu_si512(out + d + 16, _mm512_permutex2var_epi16(a, second, b));
  }
  *finite &= bad == 0;
  return d;
}
// the first n of a vector's numbers of bfloat16, widened to words; 0 beyond them
SACCADE_INLINE ivec<float> load_words(const uint16_t* p, int64_t n) {
  const __mmask16 some = n >= 16 ? 0xffff : static_cast<__mmask16>((1 << (n > 0 ? n : 0)) - 1);
  return reinterpret_cast<ivec<float>>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)));
}
#else
SACCADE_INLINE vec<float> dot_pairs(vec<float> a, vec<float> b, vec<float> c) {
  return reinterpret_cast<vec<float>>(vbfdotq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<bfloat16x8_t>(a),
                                                  reinterpret_cast<bfloat16x8_t>(b)));
}
SACCADE_INLINE vec<float> pair_neighbours(vec<float> first, vec<float> second) {
  const bfloat16x8_t low = vcvtq_low_bf16_f32(reinterpret_cast<float32x4_t>(first));
  return reinterpret_cast<vec<float>>(vcvtq_high_bf16_f32(low, reinterpret_cast<float32x4_t>(second)));
}
SACCADE_INLINE vec<float> pack_pairs(vec<float> low, vec<float> high) {
  const uint16x8_t both = reinterpret_cast<uint16x8_t>(pair_neighbours(low, high));
  return reinterpret_cast<vec<float>>(vzip1q_u16(both, vextq_u16(both, both, 4)));
}
SACCADE_INLINE int64_t weave(const uint16_t*, const uint16_t*, int64_t, uint32_t*, bool*) { return 0; }
SACCADE_INLINE ivec<float> load_words(const uint16_t* p, int64_t n) {
  uint16_t some[4] = {};
  if (n < 4) __builtin_memcpy(some, p, static_cast<size_t>((n > 0 ? n : 0)) * 2);
  return reinterpret_cast<ivec<float>>(vmovl_u16(vld1_u16(n < 4 ? some : p)));
}
#endif

struct Pairs {
  using num = uint32_t;
  using left = uint32_t;
  using sum = float;
  SACCADE_INLINE vec<float> load_a(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
  SACCADE_INLINE vec<float> mul_add(vec<float> a, vec<float> b, vec<float> c) { return dot_pairs(a, b, c); }
  SACCADE_INLINE vec<float> mul_add(vec<float> a, const uint32_t* b, vec<float> c) {
    return dot_pairs(a, reinterpret_cast<vec<float>>(isplat<float>(static_cast<int32_t>(*b))), c);
  }
};

}  // namespace saccade::SACCADE_ISA
#endif
