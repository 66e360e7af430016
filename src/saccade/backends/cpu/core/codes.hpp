// Keys and values as codes and scales (quantised.py): numbers again as they are loaded.
#pragma once
#include "vec.hpp"

namespace saccade::SACCADE_ISA {

template <class T, Code CODE>
SACCADE_INLINE vec<T> numbers(const uint8_t* p, bool high) {
  typedef int8_t i8 __attribute__((vector_size(lanes<T>), aligned(1)));
  typedef uint8_t u8 __attribute__((vector_size(lanes<T>), aligned(1)));
  // through integers of T's width: straight to floats compilers go by single lanes
  if constexpr (CODE == Code::i8)
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const i8*>(p), ivec<T>), vec<T>);
  const ivec<T> x = __builtin_convertvector(*reinterpret_cast<const u8*>(p), ivec<T>);
  if constexpr (CODE == Code::i4) return __builtin_convertvector((high ? x >> 4 : x & 15) - 8, vec<T>);
  // e4m3: the exponent moves to where T has it, but for numbers below the first power of two
  constexpr int MANTISSA = sizeof(T) == 4 ? 23 : 52, BIAS = sizeof(T) == 4 ? 127 : 1023;
  const ivec<T> body = x & 127, sign = (x & 128) << (8 * sizeof(T) - 8);
  const ivec<T> normal = (body << (MANTISSA - 3)) + isplat<T>(int64_t{BIAS - 7} << MANTISSA);
  const ivec<T> small = reinterpret_cast<ivec<T>>(__builtin_convertvector(body, vec<T>) * T(0.001953125));
  const ivec<T> nan = isplat<T>(int64_t{2 * BIAS + 1} << MANTISSA) | 1;
  return reinterpret_cast<vec<T>>((body < 8 ? small : body == 127 ? nan : normal) | sign);
}

// n numbers of one row; the end of a group or of a half may cut a vector short
template <class T, Code CODE>
SACCADE_INLINE void decode_row(const uint8_t* p, const uint16_t* scale, int64_t group, int64_t n, T* out) {
  constexpr int N = lanes<T>;
  const int64_t half = CODE == Code::i4 ? n / 2 : n;
  for (int64_t d = 0, stop = 0; d < n; d = stop) {
    const bool high = d >= half;
    stop = (d / group + 1) * group;
    stop = stop < n ? stop : n;
    if (!high && stop > half) stop = half;
    const T factor = static_cast<T>(from_bf16(scale[d / group]));
    const uint8_t* from = p - (high ? half : 0);
    for (; d + N <= stop; d += N) store(out + d, numbers<T, CODE>(from + d, high) * factor);
    if (d == stop) continue;
    uint8_t rest[N] = {};
    T some[N];
    __builtin_memcpy(rest, from + d, static_cast<size_t>(stop - d));
    store(some, numbers<T, CODE>(rest, high) * factor);
    for (int64_t i = d; i < stop; ++i) out[i] = some[i - d];
  }
}

template <class T>
static void decode_row(const Array& a, int64_t at, const uint16_t* scale, int64_t n, T* out) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(a.data) + at;
  if (a.code == Code::i8) return decode_row<T, Code::i8>(p, scale, a.group, n, out);
  if (a.code == Code::i4) return decode_row<T, Code::i4>(p, scale, a.group, n, out);
  decode_row<T, Code::f8>(p, scale, a.group, n, out);
}

}  // namespace saccade::SACCADE_ISA
