// The part of Metal's standard library that kernels here use, declared with address spaces as clang knows them: spaces.py compiles
// the texts against it without making code. What is no pointer of `device`, `constant` or `threadgroup` lies in the thread's own space.
#pragma once

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef signed char int8_t;
typedef _Float16 half;
typedef _Float16 float16_t;
typedef __bf16 bfloat;
typedef __bf16 bfloat16_t;

namespace metal {

template <class T, int N> struct vec {
  T x, y, z, w;
  vec() = default;
  explicit vec(T);
  vec(T, T);
  vec(T, T, T);
  vec(T, T, T, T);
  T& operator[](uint);
  const T& operator[](uint) const;
};
typedef vec<float, 2> float2;
typedef vec<float, 4> float4;
typedef vec<int, 2> int2;
typedef vec<uint, 2> uint2;
typedef vec<uint, 3> uint3;
typedef vec<ulong, 2> ulong2;

template <class T, class S> T as_type(S);
#define NUMBERS(T)                                                                                                     \
  T max(T, T);                                                                                                         \
  T min(T, T);                                                                                                         \
  T clamp(T, T, T);
NUMBERS(int)
NUMBERS(uint)
NUMBERS(long)
NUMBERS(float)
int abs(int);
uint mulhi(uint, uint);
#define FUNCTIONS                                                                                                      \
  float exp(float);                                                                                                    \
  float exp2(float);                                                                                                   \
  float log(float);                                                                                                    \
  float log2(float);                                                                                                   \
  float tanh(float);                                                                                                   \
  float sqrt(float);                                                                                                   \
  float rsqrt(float);                                                                                                  \
  float rint(float);                                                                                                   \
  float floor(float);                                                                                                  \
  float fabs(float);                                                                                                   \
  float abs(float);                                                                                                    \
  float pow(float, float);                                                                                             \
  float fma(float, float, float);
FUNCTIONS
namespace precise {
FUNCTIONS
}
namespace fast {
FUNCTIONS
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T> T simd_sum(T);
template <class T> T simd_max(T);
bool simd_any(bool);
bool simd_all(bool);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_broadcast(T, ushort);

template <class T, int ROWS, int COLUMNS> struct simdgroup_matrix {
  vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int ROWS, int COLUMNS> simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T);
// out of the memory of a threadgroup or of the device, and back
#define MATRICES(space)                                                                                                \
  template <class T>                                                                                                   \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = ulong2(0, 0), bool = false);     \
  template <class T>                                                                                                   \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong2 = ulong2(0, 0), bool = false);
MATRICES(device)
MATRICES(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>,
                                   simdgroup_matrix<C, 8, 8>);

} // namespace metal
