// Vectors of the widest register, exp2, tanh and conversions. Everything is in the namespace of its instruction set, so
// that no function compiled for one machine can be linked into another's path.
#pragma once
#include <cstddef>
#include <utility>

#include "types.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define SACCADE_BYTES 64
#elif defined(__AVX2__)
#define SACCADE_BYTES 32
#else
#define SACCADE_BYTES 16
#endif
// vector registers
#if defined(__AVX512F__) || defined(__aarch64__)
#define SACCADE_REGISTERS 32
#else
#define SACCADE_REGISTERS 16
#endif
#define SACCADE_INLINE static inline __attribute__((always_inline))

namespace saccade::SACCADE_ISA {

template <class T>
struct Vec;
template <>
struct Vec<float> {
  typedef float v __attribute__((vector_size(SACCADE_BYTES)));
  typedef float u __attribute__((vector_size(SACCADE_BYTES), aligned(4)));
  typedef int32_t m __attribute__((vector_size(SACCADE_BYTES)));
  typedef int32_t mu __attribute__((vector_size(SACCADE_BYTES), aligned(4)));
  typedef uint32_t w __attribute__((vector_size(SACCADE_BYTES)));
  using i = int32_t;
  static constexpr int N = SACCADE_BYTES / 4;
};
template <>
struct Vec<double> {
  typedef double v __attribute__((vector_size(SACCADE_BYTES)));
  typedef double u __attribute__((vector_size(SACCADE_BYTES), aligned(8)));
  typedef int64_t m __attribute__((vector_size(SACCADE_BYTES)));
  typedef int64_t mu __attribute__((vector_size(SACCADE_BYTES), aligned(8)));
  typedef uint64_t w __attribute__((vector_size(SACCADE_BYTES)));
  using i = int64_t;
  static constexpr int N = SACCADE_BYTES / 8;
};
template <class T>
using vec = typename Vec<T>::v;
template <class T>
using ivec = typename Vec<T>::m;
// bit patterns, whose sums may wrap around in the lanes that are not used
template <class T>
using wvec = typename Vec<T>::w;
template <class T>
constexpr int lanes = Vec<T>::N;

template <class T>
SACCADE_INLINE vec<T> load(const T* p) {
  return *reinterpret_cast<const typename Vec<T>::u*>(p);
}
template <class T>
SACCADE_INLINE void store(T* p, vec<T> x) {
  *reinterpret_cast<typename Vec<T>::u*>(p) = x;
}
template <class T>
SACCADE_INLINE vec<T> splat(T x) {
  return x - vec<T>{};
}
template <class T>
SACCADE_INLINE ivec<T> isplat(int64_t x) {
  return static_cast<typename Vec<T>::i>(x) - ivec<T>{};
}
template <class T>
SACCADE_INLINE ivec<T> iota() {
  ivec<T> r = {};
  for (int n = 0; n < lanes<T>; ++n) r[n] = n;
  return r;
}
template <class T>
SACCADE_INLINE vec<T> vmax(vec<T> a, vec<T> b) {
  return a > b ? a : b;  // a NaN in b is returned, a NaN in a is not
}

template <class T>
SACCADE_INLINE T larger(T a, T b) {
  return a > b ? a : b;
}

// lane l of the result is lane At::of(l) of a and b together
template <class T, class At>
SACCADE_INLINE vec<T> shuffle(vec<T> a, vec<T> b) {
  return [&]<size_t... l>(std::index_sequence<l...>) __attribute__((always_inline)) {
    return __builtin_shufflevector(a, b, At::of(static_cast<int>(l))...);
  }(std::make_index_sequence<lanes<T>>());
}
template <int N>
struct Across {
  static constexpr int of(int l) { return l ^ N; }
};
// the even lanes, or the odd ones for FIRST = 1
template <int FIRST>
struct EverySecond {
  static constexpr int of(int l) { return 2 * l + FIRST; }
};

// the sum of a vector's lanes
template <class T, int N = lanes<T> / 2>
SACCADE_INLINE T add_lanes(vec<T> x) {
  x += shuffle<T, Across<N>>(x, x);
  if constexpr (N > 1) return add_lanes<T, N / 2>(x);
  return x[0];
}

// the largest of a vector's lanes
template <class T, int N = lanes<T> / 2>
SACCADE_INLINE T max_lanes(vec<T> x) {
  const vec<T> y = shuffle<T, Across<N>>(x, x);
  x = y > x ? y : x;
  if constexpr (N > 1) return max_lanes<T, N / 2>(x);
  return x[0];
}

// a masked score is -inf; the running maximum starts at the lowest finite number, so no inf - inf arises
template <class T>
struct Low {
  static constexpr T masked = -static_cast<T>(__builtin_inf()),
                     start = sizeof(T) == 4 ? T(-__FLT_MAX__) : T(-__DBL_MAX__);
};
template <class M>
SACCADE_INLINE bool any(M lanes_of_bits) {
  const ivec<float> m = reinterpret_cast<ivec<float>>(lanes_of_bits);
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(m), reinterpret_cast<__m512i>(m)) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(m)) != 0;
#else
  int32_t r = 0;
  for (int l = 0; l < lanes<float>; ++l) r |= m[l];
  return r != 0;
#endif
}

// m 2^n for m near 1, where the low bits of t are the whole number n; other lanes, as of NaN, have any result
template <class T>
SACCADE_INLINE vec<T> add_exponent(vec<T> m, vec<T> t) {
  const wvec<T> exponent = reinterpret_cast<wvec<T>>(t) << (sizeof(T) == 4 ? 23 : 52);
  return reinterpret_cast<vec<T>>(reinterpret_cast<wvec<T>>(m) + exponent);
}

// 2^f - 1 for |f| <= 1/2
SACCADE_INLINE vec<float> exp2m1_poly(vec<float> f) {
  vec<float> p = f * 0.00015345811916183706f + 0.0013399931218953942f;
  p = p * f + 0.009618488957449392f;
  p = p * f + 0.0555032877696621f;
  p = p * f + 0.24022646890630905f;
  p = p * f + 0.6931472057372672f;
  return p * f;
}
SACCADE_INLINE vec<float> exp2_poly(vec<float> f) { return exp2m1_poly(f) + 1.0f; }
// 2^x for x <= 0 and slightly above; 0 far below; NaN stays NaN
SACCADE_INLINE vec<float> exp2v(vec<float> x) {
#if defined(__AVX512F__)
  const __m512 c =
      _mm512_max_ps(_mm512_set1_ps(-200.0f), reinterpret_cast<__m512>(x));  // returns a NaN in the second operand
  const __m512 n = _mm512_roundscale_ps(c, 0);
  const vec<float> f = reinterpret_cast<vec<float>>(c) - reinterpret_cast<vec<float>>(n);
  return reinterpret_cast<vec<float>>(_mm512_scalef_ps(reinterpret_cast<__m512>(exp2_poly(f)), n));
#else
  typedef typename Vec<float>::m m;
  const vec<float> low = splat(-126.0f);
  const m tiny = x < low;
  const vec<float> c = tiny ? low : x;
  const vec<float> t = c + 12582912.0f;  // 1.5 * 2^23: moves the integer part into the low bits
  const vec<float> f = c - (t - 12582912.0f);
  const vec<float> y = tiny ? vec<float>{} : add_exponent<float>(exp2_poly(f), t);
  return x == x ? y : x;
#endif
}

SACCADE_INLINE vec<double> exp2m1_poly(vec<double> f) {
  constexpr double k[13] = {1.3691488853904124e-12, 2.5678435993488196e-11, 4.44553827187081e-10,
                            7.054911620801121e-09,  1.0178086009239696e-07, 1.3215486790144305e-06,
                            1.5252733804059838e-05, 0.00015403530393381606, 0.0013333558146428441,
                            0.009618129107628477,   0.055504108664821576,   0.2402265069591007,
                            0.6931471805599453};
  vec<double> p = splat(k[0]);
#pragma GCC unroll 12
  for (int n = 1; n < 13; ++n) p = p * f + k[n];
  return p * f;
}
SACCADE_INLINE vec<double> exp2v(vec<double> x) {
  typedef typename Vec<double>::m m;
  const vec<double> low = splat(-1022.0);
  const m tiny = x < low;
  const vec<double> c = tiny ? low : x;
  const vec<double> t = c + 6755399441055744.0;
  const vec<double> f = c - (t - 6755399441055744.0);
  const vec<double> y = tiny ? vec<double>{} : add_exponent<double>(exp2m1_poly(f) + 1.0, t);
  return x == x ? y : x;
}

// tanh: a polynomial (Cephes) near zero, 1 - 2e / (1 + e) with e = e^-2x elsewhere
template <class T>
SACCADE_INLINE vec<T> tanhv(vec<T> x) {
  const vec<T> a = x < T(0) ? -x : x;
  const vec<T> z = x * x;
  vec<T> small;
  if constexpr (sizeof(T) == 4) {
    vec<T> p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    small = x + x * z * p;
  } else {
    const vec<T> p = (z * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * z - 1.61468768441708447952e3;
    const vec<T> q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3;
    small = x + x * z * (p / q);
  }
  const T top = sizeof(T) == 4 ? T(10) : T(22);
  const vec<T> b = a > top ? splat(top) : a;
  const vec<T> e = exp2v(b * T(-2.885390081777926814720));  // e^-2a
  const vec<T> big = T(1) - T(2) * e / (T(1) + e);
  return a < T(0.625) ? small : (x < T(0) ? -big : big);
}

// derivative of tanh, 4e / (1 + e)^2 with e = e^-2|x|; 1 - tanh^2 would lose its digits where tanh is near 1
template <class T>
SACCADE_INLINE vec<T> tanh_slope(vec<T> x) {
  const vec<T> e = exp2v((x < T(0) ? x : -x) * T(2.885390081777926814720));
  return T(4) * e / ((T(1) + e) * (T(1) + e));
}

SACCADE_INLINE float from_bf16(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
SACCADE_INLINE vec<float> widen_bf16(const uint16_t* p) {
  typedef uint16_t half __attribute__((vector_size(SACCADE_BYTES / 2), aligned(2)));
  typedef uint32_t word __attribute__((vector_size(SACCADE_BYTES)));
  return reinterpret_cast<vec<float>>(__builtin_convertvector(*reinterpret_cast<const half*>(p), word) << 16);
}
SACCADE_INLINE uint16_t to_bf16(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
// IEEE half without needing F16C: exact both ways, round to nearest even
SACCADE_INLINE float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t body = static_cast<uint32_t>(h & 0x7fffu) << 13;
  uint32_t u;
  if (body >= 0x0f800000u) {
    u = sign | (body + 0x70000000u);  // inf, NaN
  } else {
    float f;
    __builtin_memcpy(&f, &body, 4);
    f *= 5.192296858534828e33f;  // 2^112: also correct for subnormal halves
    __builtin_memcpy(&u, &f, 4);
    u |= sign;
  }
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
SACCADE_INLINE uint16_t to_f16(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (u < 0x38800000u) {  // subnormal half: the addition rounds
    float f;
    __builtin_memcpy(&f, &u, 4);
    f += 0.5f;
    __builtin_memcpy(&u, &f, 4);
    return static_cast<uint16_t>(sign | (u - 0x3f000000u));
  }
  u += 0xc8000fffu + ((u >> 13) & 1u);
  return static_cast<uint16_t>(sign | (u >> 13));
}

// of arrays of T
template <class T>
constexpr DType same_dtype = sizeof(T) == 4 ? DType::f32 : DType::f64;

template <class T>
SACCADE_INLINE T read1(const Array& a, int64_t at) {
  switch (a.dtype) {
    case DType::f32:
      return static_cast<T>(reinterpret_cast<const float*>(a.data)[at]);
    case DType::bf16:
      return static_cast<T>(from_bf16(reinterpret_cast<const uint16_t*>(a.data)[at]));
    case DType::f16:
      return static_cast<T>(from_f16(reinterpret_cast<const uint16_t*>(a.data)[at]));
    case DType::f64:
      return static_cast<T>(reinterpret_cast<const double*>(a.data)[at]);
    case DType::codes:
      break;
  }
  return T(0);
}

// whether a number seen so far was NaN or infinite: then x * 0 is not 0
template <class T>
struct Finite {
  ivec<T> bad = {};
  bool tail = false;
  void see(vec<T> x) { bad |= x * T(0) != T(0); }
  void see1(T x) { tail |= x * T(0) != T(0); }
  bool all() const { return !tail && !any(bad); }
};

template <class T>
SACCADE_INLINE bool all_finite(const T* p, int64_t n) {
  Finite<T> finite;
  int64_t d = 0;
  for (; d + lanes<T> <= n; d += lanes<T>) finite.see(load(p + d));
  for (; d < n; ++d) finite.see1(p[d]);
  return finite.all();
}

#if defined(__AVX512F__)
constexpr bool HALVES = true;
SACCADE_INLINE vec<float> widen_f16(const uint16_t* p) {
  return reinterpret_cast<vec<float>>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
#elif defined(__F16C__)
constexpr bool HALVES = true;
SACCADE_INLINE vec<float> widen_f16(const uint16_t* p) {
  return reinterpret_cast<vec<float>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__aarch64__)
constexpr bool HALVES = true;
SACCADE_INLINE vec<float> widen_f16(const uint16_t* p) {
  return reinterpret_cast<vec<float>>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))));
}
#else
constexpr bool HALVES = false;
SACCADE_INLINE vec<float> widen_f16(const uint16_t*) { return vec<float>{}; }
#endif

// whether load_as reads this dtype with vector loads
template <class T>
SACCADE_INLINE bool by_vectors(DType d) {
  if (sizeof(T) == 8) return d == DType::f64;
  return d == DType::f32 || d == DType::bf16 || (HALVES && d == DType::f16);
}
template <class T>
SACCADE_INLINE vec<T> load_as(const Array& a, int64_t at) {
  if constexpr (sizeof(T) == 4) {
    if (a.dtype == DType::bf16) return widen_bf16(reinterpret_cast<const uint16_t*>(a.data) + at);
    if (a.dtype == DType::f16) return widen_f16(reinterpret_cast<const uint16_t*>(a.data) + at);
  }
  return load(reinterpret_cast<const T*>(a.data) + at);
}

// a row of n numbers, converted to the compute type
template <class T>
SACCADE_INLINE void read_row(const Array& a, int64_t at, int64_t n, T* out, Finite<T>* finite = nullptr) {
  const bool vectors = by_vectors<T>(a.dtype);
  int64_t d = 0;
  for (; vectors && d + lanes<T> <= n; d += lanes<T>) {
    const vec<T> x = load_as<T>(a, at + d);
    if (finite) finite->see(x);
    store(out + d, x);
  }
  for (; d < n; ++d) {
    out[d] = read1<T>(a, at + d);
    if (finite) finite->see1(out[d]);
  }
}

template <class T>
SACCADE_INLINE void write_row(const Array& a, int64_t at, int64_t n, const T* in) {
  switch (a.dtype) {
    case DType::f32:
      for (int64_t d = 0; d < n; ++d) reinterpret_cast<float*>(a.data)[at + d] = static_cast<float>(in[d]);
      break;
    case DType::bf16:
      for (int64_t d = 0; d < n; ++d) reinterpret_cast<uint16_t*>(a.data)[at + d] = to_bf16(static_cast<float>(in[d]));
      break;
    case DType::f16:
      for (int64_t d = 0; d < n; ++d) reinterpret_cast<uint16_t*>(a.data)[at + d] = to_f16(static_cast<float>(in[d]));
      break;
    case DType::f64:
      for (int64_t d = 0; d < n; ++d) reinterpret_cast<double*>(a.data)[at + d] = static_cast<double>(in[d]);
      break;
    case DType::codes:
      break;
  }
}

// FROM vectors to one: each fills part of the lanes, in order, with sums of neighbouring lanes; log2 FROM rounds
template <class T, int FROM>
SACCADE_INLINE vec<T> fold_lanes(const vec<T>* a) {
  if constexpr (FROM == 1) {
    return a[0];
  } else {
    const vec<T> x = fold_lanes<T, FROM / 2>(a), y = fold_lanes<T, FROM / 2>(a + FROM / 2);
    return shuffle<T, EverySecond<0>>(x, y) + shuffle<T, EverySecond<1>>(x, y);
  }
}

}  // namespace saccade::SACCADE_ISA
