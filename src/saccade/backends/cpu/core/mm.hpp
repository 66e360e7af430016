// The one matrix product: C[r][w] (+)= sum_k B(r, k) * A[k][w]. Vectors lie along w; B is read as broadcast scalars.
// All products of attention, forward and backward, have this shape when queries (or head dimensions) lie along w.
#pragma once
#include "pairs.hpp"

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

#if SACCADE_REGISTERS == 32
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

// Up to 16 rows of B, whose addresses are sums that a load can compute, of three pointers and multiples of two distances.
// With a register for each row, compilers move addresses through vector registers in the inner loop.
template <class X>
struct RowsOf {
  X *row0, *row2, *row7;
  int64_t one, three;

  RowsOf(X* B, int64_t distance)
      : row0(B), row2(B + 2 * distance), row7(B + 7 * distance), one(distance), three(3 * distance) {
    // so that the compiler does not compute one from the other
    asm("" : "+r"(row2), "+r"(row7), "+r"(three));
  }
  template <int R>
  X* at() const {
    static_assert(R < 16);
    if constexpr (R == 0) return row0;
    if constexpr (R == 1 || R == 2 || R == 4 || R == 8) return row0 + R * one;
    if constexpr (R == 3 || R == 6 || R == 12) return row0 + R / 3 * three;
    if constexpr (R == 5 || R == 14) return row2 + (R - 2) / 3 * three;
    if constexpr (R == 7) return row7;
    if constexpr (R == 9 || R == 11 || R == 15) return row7 + (R - 7) * one;
    if constexpr (R == 10 || R == 13) return row7 + (R - 7) / 3 * three;
  }
  void move(int64_t step) { row0 += step, row2 += step, row7 += step; }
};

// f(r, address of row r) for the first R rows
template <int R, class X, class F>
SACCADE_INLINE void each_row(const RowsOf<X>& rows, F f) {
  [&]<size_t... r>(std::index_sequence<r...>) __attribute__((always_inline)) {
    (f(static_cast<int>(r), rows.template at<static_cast<int>(r)>()), ...);
  }(std::make_index_sequence<R>());
}

// what a product does with each of its steps: nothing, or fetch memory that is needed later, `bytes` each time
struct Alone {
  void step() {}
};
struct Ahead {
  const char* at = nullptr;
  int64_t bytes = 0;
  void step() {
    __builtin_prefetch(at, 0, 2);
    at += bytes;
  }
};

template <class K, int R, int NV, class Side>
static inline void micro(int64_t n, const typename K::left* A, int64_t lda, const typename K::num* B, int64_t b_row,
                         int64_t b_step, typename K::sum* C, int64_t ldc, bool add, Side& side) {
  using T = typename K::sum;
  constexpr int N = lanes<T>;
  vec<T> acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = vec<T>{};
  RowsOf<const typename K::num> rows(B, b_row);
  Side also = side;
  for (int64_t k = 0; k < n; ++k) {
    vec<T> a[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) a[v] = K::load_a(A + v * N);
    each_row<R>(rows, [&](int r, const typename K::num* b) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = K::mul_add(a[v], b, acc[r][v]);
    });
    also.step();
    A += lda;
    rows.move(b_step);
  }
  side = also;
  each_row<R>(RowsOf<T>(C, ldc), [&](int r, T* c) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(c + v * N, add ? load(c + v * N) + acc[r][v] : acc[r][v]);
  });
}

template <class K, int R, int NV, class Side>
static void micro_tail(int64_t rows, int64_t n, const typename K::left* A, int64_t lda, const typename K::num* B,
                       int64_t b_row, int64_t b_step, typename K::sum* C, int64_t ldc, bool add, Side& side) {
  if (rows == R)
    micro<K, R, NV>(n, A, lda, B, b_row, b_step, C, ldc, add, side);
  else if constexpr (R > 1)
    micro_tail<K, R - 1, NV>(rows, n, A, lda, B, b_row, b_step, C, ldc, add, side);
}

template <class K, int NV, class Side>
static void mm_columns(int64_t rows, int64_t n, const typename K::left* A, int64_t lda, const typename K::num* B,
                       int64_t b_row, int64_t b_step, typename K::sum* C, int64_t ldc, bool add, Side& side) {
  constexpr int R = MAX_R<NV>;
  for (; rows >= R; rows -= R, B += R * b_row, C += R * ldc)
    micro<K, R, NV>(n, A, lda, B, b_row, b_step, C, ldc, add, side);
  if (rows > 0) micro_tail<K, R - 1, NV>(rows, n, A, lda, B, b_row, b_step, C, ldc, add, side);
}

template <class K, class Side>
static void mm_rows(int64_t rows, int64_t width, int64_t n, const typename K::left* A, int64_t lda,
                    const typename K::num* B, int64_t b_row, int64_t b_step, typename K::sum* C, int64_t ldc, bool add,
                    Side& side) {
  constexpr int N = lanes<typename K::sum>;
  for (int64_t w = width / N; w > 0;) {
    if (w >= MAX_NV) {
      mm_columns<K, MAX_NV>(rows, n, A, lda, B, b_row, b_step, C, ldc, add, side);
      w -= MAX_NV, A += MAX_NV * N, C += MAX_NV * N;
    } else {
      if (w == 1) mm_columns<K, 1>(rows, n, A, lda, B, b_row, b_step, C, ldc, add, side);
#if SACCADE_REGISTERS == 32
      if (w == 2) mm_columns<K, 2>(rows, n, A, lda, B, b_row, b_step, C, ldc, add, side);
      if (w == 3) mm_columns<K, 3>(rows, n, A, lda, B, b_row, b_step, C, ldc, add, side);
#endif
      w = 0;
    }
  }
}

// width is in lanes of K::sum, a multiple of the vector length. The rounding error of a running sum grows with its
// length, so sums of more than `chain` terms are taken in pieces.
template <class K, class Side = Alone>
static void mm(int64_t rows, int64_t width, int64_t n, const typename K::left* A, int64_t lda, const typename K::num* B,
               int64_t b_row, int64_t b_step, typename K::sum* C, int64_t ldc, bool add, int64_t chain = CHAIN,
               Side&& side = {}) {
  for (int64_t k = 0; k == 0 || k < n; k += chain) {
    const int64_t terms = n - k < chain ? n - k : chain;
    mm_rows<K>(rows, width, terms, A + k * lda, lda, B + k * b_step, b_row, b_step, C, ldc, add || k > 0, side);
  }
}

// the steps of a product
template <class T>
static int64_t steps(int64_t rows, int64_t width, int64_t n) {
  constexpr int64_t most[] = {1, MAX_R<1>, MAX_R<2>, MAX_R<3>, MAX_R<4>};
  const int64_t vectors = width / lanes<T>, rest = vectors % MAX_NV;
  const auto blocks = [&](int64_t v) { return (rows + most[v] - 1) / most[v]; };
  return n * (vectors / MAX_NV * blocks(MAX_NV) + (rest ? blocks(rest) : 0));
}

}  // namespace saccade::SACCADE_ISA
