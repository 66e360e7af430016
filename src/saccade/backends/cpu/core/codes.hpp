// Keys and values stored as codes and scales (quantised.py): decoding as they are loaded.
#pragma once
#include <type_traits>

#include "mm.hpp"

namespace saccade::SACCADE_ISA {

// Bytes to integers of T's width. Without an instruction for it, the width is doubled step by step, because compilers
// make scalar code of a conversion in one step.
template <class T, class Byte>
SACCADE_INLINE ivec<T> widen_bytes(const uint8_t* p) {
  constexpr bool SIGNED = Byte(-1) < Byte(0);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return reinterpret_cast<ivec<T>>(SIGNED ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return reinterpret_cast<ivec<T>>(SIGNED ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
  }
#endif
  using Half = std::conditional_t<SIGNED, int16_t, uint16_t>;
  using Word = std::conditional_t<SIGNED, int32_t, uint32_t>;
  typedef Byte bytes __attribute__((vector_size(lanes<T>), aligned(1)));
  typedef Half halves __attribute__((vector_size(lanes<T> * 2)));
  typedef Word words __attribute__((vector_size(lanes<T> * 4)));
  const words x = __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const bytes*>(p), halves), words);
  return __builtin_convertvector(x, ivec<T>);
}

#if defined(__AVX512F__)
SACCADE_INLINE vec<float> fours(ivec<float> x, bool high) {
  // the permutation uses only the low four bits of an index
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return reinterpret_cast<vec<float>>(
      _mm512_permutexvar_ps(_mm512_srl_epi32(reinterpret_cast<__m512i>(x), _mm_cvtsi32_si128(high ? 4 : 0)), table));
}
// e4m3 by way of halves with an exponent that is 8 greater, which is exact for subnormal numbers too
SACCADE_INLINE vec<float> eights(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), seven = _mm_set1_epi8(127);
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7), _mm256_set1_epi16(-0x4001));
  const __mmask16 number = _mm_cmpneq_epi8_mask(_mm_and_si128(x, seven), seven);
  const __m512 nan = _mm512_set1_ps(__builtin_nanf(""));
  return reinterpret_cast<vec<float>>(_mm512_mask_mul_ps(nan, number, _mm512_cvtph_ps(half), _mm512_set1_ps(256)));
}
#endif

template <class T, Code CODE>
SACCADE_INLINE vec<T> numbers(const uint8_t* p, bool high) {
#if defined(__AVX512F__)
  if constexpr (CODE == Code::i4 && sizeof(T) == 4) return fours(widen_bytes<T, uint8_t>(p), high);
  if constexpr (CODE == Code::f8 && sizeof(T) == 4) return eights(p);
#endif
  if constexpr (CODE == Code::i8) return __builtin_convertvector(widen_bytes<T, int8_t>(p), vec<T>);
  const ivec<T> x = widen_bytes<T, uint8_t>(p);
  if constexpr (CODE == Code::i4) return __builtin_convertvector((high ? x >> 4 : x & 15) - 8, vec<T>);
  // e4m3: moves the exponent to its place in T; subnormal numbers are converted as integers
  constexpr int MANTISSA = sizeof(T) == 4 ? 23 : 52, BIAS = sizeof(T) == 4 ? 127 : 1023;
  const ivec<T> body = x & 127, sign = (x & 128) << (8 * sizeof(T) - 8);
  const ivec<T> normal = (body << (MANTISSA - 3)) + isplat<T>(int64_t{BIAS - 7} << MANTISSA);
  const ivec<T> small = reinterpret_cast<ivec<T>>(__builtin_convertvector(body, vec<T>) * T(0.001953125));
  const ivec<T> nan = isplat<T>(int64_t{2 * BIAS + 1} << MANTISSA) | 1;
  return reinterpret_cast<vec<T>>((body < 8 ? small : body == 127 ? nan : normal) | sign);
}

// numbers [begin, end) of one row, in groups of V vectors
template <class T, Code CODE, int V, bool HIGH>
SACCADE_INLINE void decode_groups(const uint8_t* p, const uint16_t* scale, int64_t begin, int64_t end, T* out) {
  constexpr int N = lanes<T>;
  for (int64_t d = begin; d < end; d += V * N, ++scale) {
    const T factor = static_cast<T>(from_bf16(*scale));
#pragma GCC unroll 4
    for (int v = 0; v < V * N; v += N) store(out + d + v, numbers<T, CODE>(p + d + v, HIGH) * factor);
  }
}
template <class T, Code CODE, int V>
SACCADE_INLINE bool decode_whole(const uint8_t* p, const uint16_t* scale, int64_t group, int64_t n, T* out) {
  const int64_t half = CODE == Code::i4 ? n / 2 : n;
  if (group != V * lanes<T> || half % group != 0) return false;
  decode_groups<T, CODE, V, false>(p, scale, 0, half, out);
  decode_groups<T, CODE, V, true>(p - half, scale + half / group, half, n, out);
  return true;
}

// n numbers of one row; a vector may be cut short at the end of a group or of a half
template <class T, Code CODE>
SACCADE_INLINE void decode_row(const uint8_t* p, const uint16_t* scale, int64_t group, int64_t n, T* out) {
  constexpr int N = lanes<T>;
  if (decode_whole<T, CODE, 2>(p, scale, group, n, out) || decode_whole<T, CODE, 4>(p, scale, group, n, out)) return;
  const int64_t half = CODE == Code::i4 ? n / 2 : n;
  for (int64_t d = 0, next = group; d < n;) {
    const bool high = d >= half;
    const int64_t end = high ? n : half, stop = next < end ? next : end;
    const T factor = static_cast<T>(from_bf16(*scale));
    const uint8_t* from = p - (high ? half : 0);
    for (; d + N <= stop; d += N) store(out + d, numbers<T, CODE>(from + d, high) * factor);
    if (d < stop) {
      uint8_t rest[N] = {};
      T some[N];
      __builtin_memcpy(rest, from + d, static_cast<size_t>(stop - d));
      store(some, numbers<T, CODE>(rest, high) * factor);
      for (int64_t i = d; i < stop; ++i) out[i] = some[i - d];
      d = stop;
    }
    if (d == next) ++scale, next += group;
  }
}

template <class T>
static void decode_row(const Array& a, int64_t at, const uint16_t* scale, int64_t n, T* out) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(a.data) + at;
  if (a.code == Code::i8) return decode_row<T, Code::i8>(p, scale, a.group, n, out);
  if (a.code == Code::i4) return decode_row<T, Code::i4>(p, scale, a.group, n, out);
  decode_row<T, Code::f8>(p, scale, a.group, n, out);
}

// A pointer to a row of codes that knows their kind. int4 codes from index `half` on are in the high halves of bytes.
template <Code CODE>
struct Codes {
  const uint8_t* p;
  int64_t half;
  Codes operator+(int64_t rows) const { return {p + rows, half}; }
  template <class T>
  SACCADE_INLINE vec<T> at(Codes row, int64_t d) {
    const bool high = CODE == Code::i4 && d >= row.half;
    return numbers<T, CODE>(row.p + (high ? d - row.half : d), high);
  }
};

// a product whose left side is rows of codes; for int4, those in the low or in the high halves of the bytes
template <class T, Code CODE, bool HIGH = false>
struct Coded : Plain<T> {
  using left = uint8_t;
  SACCADE_INLINE vec<T> load_a(const uint8_t* p) { return numbers<T, CODE>(p, HIGH); }
};

// a product in float32 whose left side is bf16
struct Widened : Plain<float> {
  using left = uint16_t;
  SACCADE_INLINE vec<float> load_a(const uint16_t* p) { return widen_bf16(p); }
};

// whether a row of n numbers has one scale and consists of whole vectors
template <class T>
SACCADE_INLINE bool whole_rows(const Array& a, int64_t n) {
  const int64_t piece = a.code == Code::i4 ? n / 2 : n;
  return a.dtype == DType::codes && a.group >= n && piece % lanes<T> == 0;
}

}  // namespace saccade::SACCADE_ISA
