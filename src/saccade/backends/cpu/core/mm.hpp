// The one matrix product: C[r][w] (+)= sum_k B(r, k) * A[k][w]. Vectors lie along w; B is read as broadcast scalars.
// All products of attention, forward and backward, have this shape when queries (or head dimensions) lie along w.
#pragma once
#include "vec.hpp"

namespace saccade::SACCADE_ISA {

// how one step of the sum multiplies: plain numbers, or pairs of bf16 with an f32 sum
template <class T>
struct Plain {
  using num = T;
  using left = T;  // the element of A
  using sum = T;
  SACCADE_INLINE vec<T> mul_add(vec<T> a, vec<T> b, vec<T> c) { return a * b + c; }
  SACCADE_INLINE vec<T> mul_add(vec<T> a, const T* b, vec<T> c) { return a * *b + c; }
  SACCADE_INLINE vec<T> load_a(const T* p) { return load(p); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using num = uint32_t;
  using left = uint32_t;
  using sum = float;
  SACCADE_INLINE vec<float> load_a(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
  SACCADE_INLINE vec<float> mul_add(vec<float> a, vec<float> b, vec<float> c) {
    return reinterpret_cast<vec<float>>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(c), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }
  SACCADE_INLINE vec<float> mul_add(vec<float> a, const uint32_t* b, vec<float> c) {
    return mul_add(a, reinterpret_cast<vec<float>>(_mm512_set1_epi32(static_cast<int>(*b))), c);
  }
};
#endif

#if SACCADE_BYTES == 64
constexpr int MAX_NV = 4;
template <int NV>
constexpr int MAX_R = NV == 1   ? 16
                      : NV == 2 ? 12
                      : NV == 3 ? 8
                                : 6;
#else
constexpr int MAX_NV = 2;
template <int NV>
constexpr int MAX_R = NV == 1 ? 8 : 6;
#endif

template <class K, int R, int NV>
static inline void micro(int64_t n, const typename K::left* A, int64_t lda, const typename K::num* B, int64_t b_row,
                         int64_t b_step, typename K::sum* C, int64_t ldc, bool add) {
  using T = typename K::sum;
  constexpr int N = lanes<T>;
  vec<T> acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = vec<T>{};
  for (int64_t k = 0; k < n; ++k) {
    vec<T> a[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) a[v] = K::load_a(A + v * N);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = K::mul_add(a[v], B + r * b_row, acc[r][v]);
    A += lda;
    B += b_step;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      T* c = C + r * ldc + v * N;
      store(c, add ? load(c) + acc[r][v] : acc[r][v]);
    }
}

template <class K, int R, int NV>
static void micro_tail(int64_t rows, int64_t n, const typename K::left* A, int64_t lda, const typename K::num* B,
                       int64_t b_row, int64_t b_step, typename K::sum* C, int64_t ldc, bool add) {
  if (rows == R)
    micro<K, R, NV>(n, A, lda, B, b_row, b_step, C, ldc, add);
  else if constexpr (R > 1)
    micro_tail<K, R - 1, NV>(rows, n, A, lda, B, b_row, b_step, C, ldc, add);
}

template <class K, int NV>
static void mm_columns(int64_t rows, int64_t n, const typename K::left* A, int64_t lda, const typename K::num* B,
                       int64_t b_row, int64_t b_step, typename K::sum* C, int64_t ldc, bool add) {
  constexpr int R = MAX_R<NV>;
  for (; rows >= R; rows -= R, B += R * b_row, C += R * ldc) micro<K, R, NV>(n, A, lda, B, b_row, b_step, C, ldc, add);
  if (rows > 0) micro_tail<K, R - 1, NV>(rows, n, A, lda, B, b_row, b_step, C, ldc, add);
}

template <class K>
static void mm_rows(int64_t rows, int64_t width, int64_t n, const typename K::left* A, int64_t lda,
                    const typename K::num* B, int64_t b_row, int64_t b_step, typename K::sum* C, int64_t ldc,
                    bool add) {
  constexpr int N = lanes<typename K::sum>;
  for (int64_t w = width / N; w > 0;) {
    if (w >= MAX_NV) {
      mm_columns<K, MAX_NV>(rows, n, A, lda, B, b_row, b_step, C, ldc, add);
      w -= MAX_NV, A += MAX_NV * N, C += MAX_NV * N;
    } else {
      if (w == 1) mm_columns<K, 1>(rows, n, A, lda, B, b_row, b_step, C, ldc, add);
#if SACCADE_BYTES == 64
      if (w == 2) mm_columns<K, 2>(rows, n, A, lda, B, b_row, b_step, C, ldc, add);
      if (w == 3) mm_columns<K, 3>(rows, n, A, lda, B, b_row, b_step, C, ldc, add);
#endif
      w = 0;
    }
  }
}

// width is in lanes of K::sum, a multiple of the vector length. The rounding error of a running sum grows with its
// length, so sums of more than `chain` terms are taken in pieces.
template <class K>
static void mm(int64_t rows, int64_t width, int64_t n, const typename K::left* A, int64_t lda, const typename K::num* B,
               int64_t b_row, int64_t b_step, typename K::sum* C, int64_t ldc, bool add, int64_t chain = CHAIN) {
  for (int64_t k = 0; k == 0 || k < n; k += chain) {
    const int64_t terms = n - k < chain ? n - k : chain;
    mm_rows<K>(rows, width, terms, A + k * lda, lda, B + k * b_step, b_row, b_step, C, ldc, add || k > 0);
  }
}

}  // namespace saccade::SACCADE_ISA
