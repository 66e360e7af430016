// What recurrences with channels as lanes share: rows of channels, tables transposed into lanes, functions of gates.
#pragma once
#include "diagonal_types.hpp"
#include "scores.hpp"

namespace saccade::SACCADE_ISA {

// a vector of channels; fewer than its lanes at the end of a row
struct Lanes {
  int64_t first, n;
};

// lanes beyond n are 0
template <class T>
SACCADE_INLINE vec<T> get(const Array& a, int64_t at, int64_t n) {
  if (n == lanes<T> && by_vectors<T>(a.dtype)) return load_as<T>(a, at);
  T row[lanes<T>] = {};
  for (int64_t l = 0; l < n; ++l) row[l] = read1<T>(a, at + l);
  return load(row);
}
template <class T>
SACCADE_INLINE void put(const Array& a, int64_t at, int64_t n, vec<T> x) {
  if (n == lanes<T> && a.dtype == same_dtype<T>) return store(reinterpret_cast<T*>(a.data) + at, x);
  T row[lanes<T>];
  store(row, x);
  write_row(a, at, n, row);
}
// the same for a wide array
template <class T>
SACCADE_INLINE vec<T> get(const void* p, int64_t at, int64_t n) {
  const T* from = static_cast<const T*>(p) + at;
  if (n == lanes<T>) return load(from);
  T row[lanes<T>] = {};
  for (int64_t l = 0; l < n; ++l) row[l] = from[l];
  return load(row);
}
template <class T>
SACCADE_INLINE void put(void* p, int64_t at, int64_t n, vec<T> x) {
  T *to = static_cast<T*>(p) + at, row[lanes<T>];
  if (n == lanes<T>) return store(to, x);
  store(row, x);
  for (int64_t l = 0; l < n; ++l) to[l] = row[l];
}

// a table [channels, width] to lanes [width][lanes], through rows [lanes][ld], ld = round_up(width); out is [ld][lanes]
template <class T>
static void table_to_lanes(const Array& a, int64_t at, Lanes x, int64_t width, T* rows, T* out) {
  const int64_t ld = round_up(width, lanes<T>);
  for (int64_t i = 0; i < lanes<T> * ld; ++i) rows[i] = T(0);
  for (int64_t l = 0; l < x.n; ++l) read_row(a, at + (x.first + l) * a.stride[0], width, rows + l * ld);
  transpose(lanes<T>, ld, rows, ld, out, lanes<T>);
}
template <class T>
static Array wide_table(const void* data, int64_t width) {
  Array a;
  a.data = static_cast<char*>(const_cast<void*>(data));
  a.dtype = same_dtype<T>;
  a.stride[0] = width, a.stride[1] = 1;
  return a;
}
// the inverse, to a wide table
template <class T>
static void lanes_to_table(const T* in, Lanes x, int64_t width, T* rows, T* out) {
  const int64_t ld = round_up(width, lanes<T>);
  transpose(ld, lanes<T>, in, lanes<T>, rows, ld);
  for (int64_t l = 0; l < x.n; ++l)
    for (int64_t j = 0; j < width; ++j) out[(x.first + l) * width + j] = rows[l * ld + j];
}

// 2^x for any x; exp2v is not defined beyond the largest power
template <class T>
SACCADE_INLINE vec<T> exp2_any(vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return exp2v(x);
#endif
  return x >= (sizeof(T) == 4 ? T(128) : T(1024)) ? splat(static_cast<T>(__builtin_inf())) : exp2v(x);
}
// m 2^n for whole n and m near 1; 0 or infinity beyond the type's range
SACCADE_INLINE vec<float> times_power(vec<float> m, vec<float> n) {
#if defined(__AVX512F__)
  return reinterpret_cast<vec<float>>(_mm512_scalef_ps(reinterpret_cast<__m512>(m), reinterpret_cast<__m512>(n)));
#else
  const vec<float> y = add_exponent<float>(m, n + 12582912.0f);
  const vec<float> far = n > 0.0f ? splat(__builtin_inff()) : vec<float>{};
  return m == m ? (n > 127.0f || n < -125.0f ? far : y) : m;
#endif
}
SACCADE_INLINE vec<double> times_power(vec<double> m, vec<double> n) {
#if defined(__AVX512F__)
  return reinterpret_cast<vec<double>>(_mm512_scalef_pd(reinterpret_cast<__m512d>(m), reinterpret_cast<__m512d>(n)));
#else
  const vec<double> y = add_exponent<double>(m, n + 6755399441055744.0);
  const vec<double> far = n > 0.0 ? splat(__builtin_inf()) : vec<double>{};
  return m == m ? (n > 1023.0 || n < -1021.0 ? far : y) : m;
#endif
}
// x = n ln 2 + f ln 2 with n whole and |f| <= 1/2; x must not be so low that e^x is 0
template <class T>
SACCADE_INLINE vec<T> fraction(vec<T> x, vec<T>* n) {
  const T shift = sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0);
  // n times the high part is exact
  const T high = sizeof(T) == 4 ? T(0.693359375) : T(0x1.62e42fefap-1);
  const T low = static_cast<T>(sizeof(T) == 4 ? -2.12194440054690583e-4 : 0x1.cf79abc9e3b39803p-40);
  x = vmax<T>(splat(sizeof(T) == 4 ? T(-110) : T(-760)), x);
  *n = (x * LOG2E<T> + shift) - shift;
  return ((x - *n * high) - *n * low) * LOG2E<T>;
}
// e^x within one or two roundings, however large |x| is
template <class T>
SACCADE_INLINE vec<T> exponential(vec<T> x) {
  vec<T> n;
  const vec<T> f = fraction<T>(x, &n);
  return times_power(exp2m1_poly(f) + T(1), n);
}
// 1 - e^x for x <= 0 within one or two roundings, however small |x| is
template <class T>
SACCADE_INLINE vec<T> one_minus_exponential(vec<T> x) {
  vec<T> n;
  const vec<T> m = exp2m1_poly(fraction<T>(x, &n)), power = times_power(splat(T(1)), n);
  return (T(1) - power) - power * m;
}
// log(1 + e) for 0 <= e <= 1: 2 atanh(e / (2 + e))
template <class T>
SACCADE_INLINE vec<T> log1p_unit(vec<T> e) {
  constexpr int terms = sizeof(T) == 4 ? 8 : 18;
  const vec<T> s = e / (T(2) + e), z = s * s;
  vec<T> p = splat(T(2) / T(2 * terms - 1));
#pragma GCC unroll 18
  for (int k = terms - 2; k >= 0; --k) p = p * z + T(2) / T(2 * k + 1);
  return p * s;
}

template <class T>
SACCADE_INLINE vec<T> absolute(vec<T> x) {
  return x < T(0) ? -x : x;
}
// 1 / (1 + e^-x); the same of -x without a subtraction; and the product of both, which is the derivative
template <class T>
struct Sigmoid {
  vec<T> value, other, slope;
  SACCADE_INLINE Sigmoid of(vec<T> x) {
    const vec<T> e = exponential<T>(-absolute<T>(x)), near = T(1) / (T(1) + e), far = e * near;
    return {x < T(0) ? far : near, x < T(0) ? near : far, near * far};
  }
};
template <class T>
SACCADE_INLINE vec<T> sigmoid(vec<T> x) {
  return Sigmoid<T>::of(x).value;
}
template <class T>
SACCADE_INLINE vec<T> softplus(vec<T> x) {
  const vec<T> tail = log1p_unit<T>(exponential<T>(-absolute<T>(x)));
  return (x > T(0) ? x : vec<T>{}) + tail;
}
template <class T>
SACCADE_INLINE vec<T> silu(vec<T> x) {
  // 0 at -inf
  return x < T(-1e4) ? vec<T>{} : x * sigmoid<T>(x);
}
template <class T>
SACCADE_INLINE vec<T> silu_slope(vec<T> x) {
  const Sigmoid<T> s = Sigmoid<T>::of(x);
  return absolute<T>(x) > T(1e4) ? s.value : s.value + x * s.slope;
}
template <class T>
SACCADE_INLINE vec<T> square_root(vec<T> x) {
  T row[lanes<T>];
  store(row, x);
  for (int l = 0; l < lanes<T>; ++l) row[l] = sizeof(T) == 4 ? __builtin_sqrtf(row[l]) : __builtin_sqrt(row[l]);
  return load(row);
}

}  // namespace saccade::SACCADE_ISA
