// Products in the matrix registers of AMX: 16 rows of 16 pairs of bfloat16 at a time, with float32 sums.
#pragma once
#include "mm.hpp"

namespace saccade::SACCADE_ISA {

// The left rows of a product: B(r, k) = at[r * row + k * step]. Matrix registers read the same numbers from `deep`, where
// the steps of a row follow each other and rows are `deep_row` apart; null where they are not used.
template <class Num>
struct LeftRows {
  const Num* at;
  int64_t row, step;
  const Num* deep = nullptr;
  int64_t deep_row = 0;
};
// rows whose steps follow each other
template <class Num>
static LeftRows<Num> deep_rows(const Num* at, int64_t row, bool matrix) {
  return {at, row, 1, matrix ? at : nullptr, row};
}

#if defined(__AMX_BF16__)
constexpr int64_t SIDE = 16;

// Matrix registers hold nothing before a thread says which shape they have, so whatever computes products owns one of
// these. Others that use the registers in this thread set a shape of their own.
class MatrixRegisters {
 public:
  explicit MatrixRegisters(bool used) : used_(used) {
    alignas(64) static constexpr struct {
      uint8_t palette = 1, other[15] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    } shape;
    if (used_) _tile_loadconfig(&shape);
  }
  ~MatrixRegisters() {
    if (used_) _tile_release();
  }
  MatrixRegisters(const MatrixRegisters&) = delete;

 private:
  const bool used_;
};

// C (+)= B A for R * 16 rows of B, W * 16 columns of A and `blocks` * 16 steps
template <int R, int W>
static void matrix_block(int64_t blocks, const uint32_t* A, int64_t lda, const uint32_t* B, int64_t b_row, float* C,
                         int64_t ldc, bool add) {
  float* const low = C + SIDE * ldc;
  // gcc does not know that the instructions read and write memory
  asm volatile("" ::: "memory");
  if (add) {
    _tile_loadd(0, C, ldc * 4);
    if constexpr (W > 1) _tile_loadd(1, C + SIDE, ldc * 4);
    if constexpr (R > 1) _tile_loadd(2, low, ldc * 4);
    if constexpr (R > 1 && W > 1) _tile_loadd(3, low + SIDE, ldc * 4);
  } else {
    _tile_zero(0);
    if constexpr (W > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R > 1 && W > 1) _tile_zero(3);
  }
  for (int64_t k = 0; k < blocks; ++k, B += SIDE, A += SIDE * lda) {
    _tile_loadd(4, B, b_row * 4);
    _tile_loadd(6, A, lda * 4);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (W > 1) {
      _tile_loadd(7, A + SIDE, lda * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, B + SIDE * b_row, b_row * 4);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (W > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, C, ldc * 4);
  if constexpr (W > 1) _tile_stored(1, C + SIDE, ldc * 4);
  if constexpr (R > 1) _tile_stored(2, low, ldc * 4);
  if constexpr (R > 1 && W > 1) _tile_stored(3, low + SIDE, ldc * 4);
  asm volatile("" ::: "memory");
}

template <int R>
static void matrix_rows(int64_t width, int64_t blocks, const uint32_t* A, int64_t lda, const uint32_t* B, int64_t b_row,
                        float* C, int64_t ldc, bool add) {
  int64_t w = 0;
  for (; w + 2 * SIDE <= width; w += 2 * SIDE) matrix_block<R, 2>(blocks, A + w, lda, B, b_row, C + w, ldc, add);
  if (w < width) matrix_block<R, 1>(blocks, A + w, lda, B, b_row, C + w, ldc, add);
}

// rows, width and steps n are multiples of 16
static void matrix_product(int64_t rows, int64_t width, int64_t n, const uint32_t* A, int64_t lda, const uint32_t* B,
                           int64_t b_row, float* C, int64_t ldc, bool add) {
  int64_t r = 0;
  for (; r + 2 * SIDE <= rows; r += 2 * SIDE)
    matrix_rows<2>(width, n / SIDE, A, lda, B + r * b_row, b_row, C + r * ldc, ldc, add);
  if (r < rows) matrix_rows<1>(width, n / SIDE, A, lda, B + r * b_row, b_row, C + r * ldc, ldc, add);
}
#else
struct MatrixRegisters {
  explicit MatrixRegisters(bool) {}
};
#endif

// C (+)= B A as `mm` computes it. Matrix registers take the rows and steps that fill them, vectors the others.
template <class K>
static void product(int64_t rows, int64_t width, int64_t n, const typename K::left* A, int64_t lda,
                    const LeftRows<typename K::num>& B, typename K::sum* C, int64_t ldc, bool add,
                    int64_t chain = CHAIN) {
#if defined(__AMX_BF16__)
  const int64_t filled = rows / SIDE * SIDE, steps = n / SIDE * SIDE;
  if (B.deep && filled && steps) {
    matrix_product(filled, width, steps, A, lda, B.deep, B.deep_row, C, ldc, add);
    if (steps < n)
      mm<K>(filled, width, n - steps, A + steps * lda, lda, B.at + steps * B.step, B.row, B.step, C, ldc, true, chain);
    if (filled < rows)
      mm<K>(rows - filled, width, n, A, lda, B.at + filled * B.row, B.row, B.step, C + filled * ldc, ldc, add, chain);
    return;
  }
#endif
  mm<K>(rows, width, n, A, lda, B.at, B.row, B.step, C, ldc, add, chain);
}

}  // namespace saccade::SACCADE_ISA
