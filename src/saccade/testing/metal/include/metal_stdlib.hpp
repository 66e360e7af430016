// The part of Metal's standard library that kernels here use, on top of emulator.hpp.
//
// It is stricter than Metal where that finds bugs: 16-bit floats convert only by explicit casts, all lanes of a
// SIMD-group must execute its operations, and the places of matrix elements in lanes are random for each launch.
#pragma once
#include <cmath>
#include <limits>
#include <type_traits>

#include "emulator.hpp"

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;

// a float of 16 bits that rounds to nearest even
template <class Format> struct Small {
  uint16_t bits;
  Small() = default;
  explicit Small(float x) : bits(Format::rounded(x)) {}
  explicit Small(double x) : Small(static_cast<float>(x)) {}
  explicit Small(int x) : Small(static_cast<float>(x)) {}
  template <class Other> explicit Small(Small<Other> x) : Small(static_cast<float>(x)) {}
  explicit operator float() const { return Format::widened(bits); }
};
struct Binary16 {
  static float widened(uint16_t bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return static_cast<float>(x);
  }
  static uint16_t rounded(float x) {
    const _Float16 y = static_cast<_Float16>(x);
    uint16_t bits;
    memcpy(&bits, &y, 2);
    return bits;
  }
};
struct Brain {
  static float widened(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
  }
  static uint16_t rounded(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if (x != x) return uint16_t(wide >> 16 | 0x40);
    return uint16_t((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
  }
};
typedef Small<Binary16> half;
typedef Small<Brain> bfloat;
#define SMALL_OPERATION(op)                                                                                            \
  template <class F> inline Small<F> operator op(Small<F> a, Small<F> b) {                                               \
    return Small<F>(static_cast<float>(a) op static_cast<float>(b));                                                   \
  }
SMALL_OPERATION(+);
SMALL_OPERATION(-);
SMALL_OPERATION(*);
SMALL_OPERATION(/);

namespace metal {

template <class T> struct same {
  using type = T;
};
// T of the first argument, for numbers together with a vector
template <class T> using given = typename same<T>::type;

template <class T, int N> struct vec {
  T e[N];
  vec() = default;
  explicit vec(T x) {
    for (T& y : e) y = x;
  }
  template <class... U, class = std::enable_if_t<sizeof...(U) == N && (N > 1)>> vec(U... x) : e{T(x)...} {}
  T& operator[](uint i) { return e[i]; }
  const T& operator[](uint i) const { return e[i]; }
};
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  explicit vec(T a) : x(a), y(a) {}
  vec(T a, T b) : x(a), y(b) {}
  T& operator[](uint i) { return (&x)[i]; }
  const T& operator[](uint i) const { return (&x)[i]; }
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  explicit vec(T a) : x(a), y(a), z(a) {}
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
  T& operator[](uint i) { return (&x)[i]; }
  const T& operator[](uint i) const { return (&x)[i]; }
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  explicit vec(T a) : x(a), y(a), z(a), w(a) {}
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  T& operator[](uint i) { return (&x)[i]; }
  const T& operator[](uint i) const { return (&x)[i]; }
};
#define VECTOR_OPERATION(op)                                                                                           \
  template <class T, int N> inline vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {                                   \
    for (int i = 0; i < N; i++) a[i] = a[i] op b[i];                                                                   \
    return a;                                                                                                          \
  }                                                                                                                    \
  template <class T, int N> inline vec<T, N> operator op(vec<T, N> a, given<T> b) { return a op vec<T, N>(b); }        \
  template <class T, int N> inline vec<T, N> operator op(given<T> a, vec<T, N> b) { return vec<T, N>(a) op b; }        \
  template <class T, int N> inline vec<T, N>& operator op##=(vec<T, N>& a, vec<T, N> b) { return a = a op b; }         \
  template <class T, int N> inline vec<T, N>& operator op##=(vec<T, N>& a, given<T> b) { return a = a op b; }
VECTOR_OPERATION(+);
VECTOR_OPERATION(-);
VECTOR_OPERATION(*);
VECTOR_OPERATION(/);
#define VECTOR_NAMES(T)                                                                                                \
  typedef vec<T, 2> T##2;                                                                                              \
  typedef vec<T, 3> T##3;                                                                                              \
  typedef vec<T, 4> T##4;
VECTOR_NAMES(float);
VECTOR_NAMES(half);
VECTOR_NAMES(bfloat);
VECTOR_NAMES(int);
VECTOR_NAMES(uint);
VECTOR_NAMES(ulong);
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}

template <class T, class S> inline T as_type(S x) {
  static_assert(sizeof(T) == sizeof(S), "as_type between sizes");
  T y;
  memcpy(&y, &x, sizeof y);
  return y;
}

#define NUMBERS(T)                                                                                                     \
  inline T max(T a, T b) { return a > b ? a : b; }                                                                     \
  inline T min(T a, T b) { return a < b ? a : b; }                                                                     \
  inline T clamp(T x, T a, T b) { return min(max(x, a), b); }
NUMBERS(int);
NUMBERS(uint);
NUMBERS(long);
NUMBERS(ulong);
// of a NaN and a number these give the number, as fmax does
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float clamp(float x, float a, float b) { return min(max(x, a), b); }
inline int abs(int x) { return x < 0 ? -x : x; }
template <class T> inline T select(T a, T b, bool second) { return second ? b : a; }
inline uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }

#define FUNCTION(name, f)                                                                                              \
  inline float name(float x) { return f(x); }
#define FUNCTIONS                                                                                                      \
  FUNCTION(exp, std::exp)                                                                                              \
  FUNCTION(exp2, std::exp2)                                                                                            \
  FUNCTION(log, std::log)                                                                                              \
  FUNCTION(log2, std::log2)                                                                                            \
  FUNCTION(tanh, std::tanh)                                                                                            \
  FUNCTION(sin, std::sin)                                                                                              \
  FUNCTION(cos, std::cos)                                                                                              \
  FUNCTION(sqrt, std::sqrt)                                                                                            \
  FUNCTION(round, std::round)                                                                                          \
  FUNCTION(rint, std::nearbyint)                                                                                       \
  FUNCTION(floor, std::floor)                                                                                          \
  FUNCTION(fabs, std::fabs)                                                                                            \
  FUNCTION(abs, std::fabs)                                                                                             \
  inline float pow(float a, float b) { return std::pow(a, b); }                                                        \
  inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }                                                          \
  inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
FUNCTIONS;
namespace precise {
FUNCTIONS;
}
namespace fast {
FUNCTIONS;
}
inline bool isnan(float x) { return std::isnan(x); }
inline bool isfinite(float x) { return std::isfinite(x); }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3 };
inline void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) {
  emulator::wait_for(emulator::Wait::THREADGROUP, line);
}
inline void simdgroup_barrier(mem_flags, int line = __builtin_LINE()) {
  emulator::wait_for(emulator::Wait::SIMDGROUP, line);
}

// sums of pairs, of pairs of pairs, and so on
template <class T, class F> inline T reduced(T x, int line, F f) {
  const auto shown = emulator::exchange(x, line);
  T all[emulator::WIDTH];
  for (int i = 0; i < emulator::WIDTH; i++) all[i] = shown.at(i);
  for (int n = 1; n < emulator::WIDTH; n *= 2)
    for (int i = 0; i < emulator::WIDTH; i += 2 * n) all[i] = f(all[i], all[i + n]);
  return all[0];
}
template <class T> inline T simd_sum(T x, int line = __builtin_LINE()) {
  return reduced(x, line, [](T a, T b) { return a + b; });
}
template <class T> inline T simd_max(T x, int line = __builtin_LINE()) {
  return reduced(x, line, [](T a, T b) { return max(a, b); });
}
template <class T> inline T simd_min(T x, int line = __builtin_LINE()) {
  return reduced(x, line, [](T a, T b) { return min(a, b); });
}
inline bool simd_any(bool x, int line = __builtin_LINE()) {
  return reduced(x, line, [](bool a, bool b) { return a || b; });
}
inline bool simd_all(bool x, int line = __builtin_LINE()) {
  return reduced(x, line, [](bool a, bool b) { return a && b; });
}
template <class T> inline T simd_shuffle(T x, ushort lane, int line = __builtin_LINE()) {
  return emulator::exchange(x, line).at(lane);
}
template <class T> inline T simd_broadcast(T x, ushort lane, int line = __builtin_LINE()) {
  return emulator::exchange(x, line).at(lane);
}
template <class T> inline T simd_shuffle_xor(T x, ushort mask, int line = __builtin_LINE()) {
  return emulator::exchange(x, line).at(emulator::running->current->lane ^ mask);
}

// 8 x 8 elements, two in every lane
template <class T, int ROWS, int COLUMNS> struct simdgroup_matrix {
  vec<T, 2> elements;
  simdgroup_matrix() { memset(static_cast<void*>(&elements), emulator::POISON, sizeof elements); }
  explicit simdgroup_matrix(T x) : elements(x) {}
  vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int ROWS, int COLUMNS> inline simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, ROWS, COLUMNS>(x);
}

// where one element of this lane lies in memory
inline ulong element_at(int slot, ulong per_row, ulong2 origin, bool transpose) {
  const uint lane = emulator::running->current->lane;
  const ulong row = emulator::fragment.row[lane][slot], column = emulator::fragment.column[lane][slot];
  return transpose ? (origin.y + column) * per_row + origin.x + row : (origin.y + row) * per_row + origin.x + column;
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const T* from, ulong per_row = 8, ulong2 origin = ulong2(0, 0),
                           bool transpose = false) {
  for (int slot = 0; slot < 2; slot++) {
    const T* at = from + element_at(slot, per_row, origin, transpose);
#ifdef EMULATOR_THREAD
    __tsan_read_range(const_cast<T*>(at), sizeof(T));
#endif
    to.elements[slot] = *at;
  }
}
template <class T>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> from, T* to, ulong per_row = 8, ulong2 origin = ulong2(0, 0),
                            bool transpose = false) {
  for (int slot = 0; slot < 2; slot++) {
    T* at = to + element_at(slot, per_row, origin, transpose);
#ifdef EMULATOR_THREAD
    __tsan_write_range(at, sizeof(T));
#endif
    *at = from.elements[slot];
  }
}
template <class A, class B> struct Operands {
  A a[2];
  B b[2];
};
// d = a b + c, products of a row in their order
template <class D, class A, class B, class C>
UNWATCHED inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                                    simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c,
                                                    int line = __builtin_LINE()) {
  using namespace emulator;
  const Operands<A, B> mine{{a.elements[0], a.elements[1]}, {b.elements[0], b.elements[1]}};
  const auto shown = exchange(mine, line);
  const Lane& lane = *running->current;
  const auto of = [&](uint n) {
    return reinterpret_cast<const Operands<A, B>*>(shown.simdgroup->posted[shown.buffer][n]);
  };
  for (int slot = 0; slot < 2; slot++) {
    const int row = fragment.row[lane.lane][slot], column = fragment.column[lane.lane][slot];
    float sum = static_cast<float>(c.elements[slot]);
    for (int k = 0; k < 8; k++) {
      const A x = of(fragment.lane[row][k])->a[fragment.slot[row][k]];
      const B y = of(fragment.lane[k][column])->b[fragment.slot[k][column]];
      sum += static_cast<float>(x) * static_cast<float>(y);
    }
    d.elements[slot] = static_cast<D>(sum);
  }
  running->counts.products += lane.lane == 0;
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                               int line = __builtin_LINE()) {
  simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<D, 8, 8>(D(0)), line);
}

} // namespace metal

// after every header of C++: words of Metal that it does not have, and the declaration of a threadgroup array
#define SHARED(T, name, ...)                                                                                           \
  typedef T type_of_##name __VA_ARGS__;                                                                                \
  type_of_##name& name = *static_cast<type_of_##name*>(emulator::shared(sizeof(type_of_##name)))
#undef INFINITY
#define INFINITY __builtin_inff()
#undef NAN
#define NAN __builtin_nanf("")
#define device
#define constant
#define thread
#define threadgroup
