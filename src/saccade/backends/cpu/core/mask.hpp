// The element test of a lowered mask, for one key against a vector of query rows.
#pragma once
#include "tile.hpp"

namespace saccade::SACCADE_ISA {

SACCADE_INLINE int64_t floor_mod(int64_t a, int64_t s) {
  const int64_t r = a % s;
  return r < 0 ? r + s : r;
}

// what the test needs to know about the rows of one query tile, read once
template <class T>
struct TileMask {
  using I = typename Vec<T>::i;
  const Mask* mask;
  int64_t batch;
  I t[TILE_Q];                     // row numbers in the whole problem
  I lo[8][TILE_Q], hi[8][TILE_Q];  // query-side intervals
  I residue[8][TILE_Q];            // t mod stride, of bands with a stride test

  const int32_t* bands() const { return mask->bands + (mask->batch_stride ? batch * mask->batch_stride : 0); }

  void prepare(const Mask& m, const QueryRows& x) {
    const int64_t b = x.b;
    mask = &m;
    batch = b;
    const int width = static_cast<int>(round_up(x.rows, lanes<T>));
    for (int w = 0; w < width; ++w) t[w] = static_cast<I>(x.row(min64(w, x.rows - 1)));
    for (int n = 0; n < m.n_rows; ++n) {
      const Rows& r = m.rows[n];
      if (r.on_keys) continue;
      const int64_t at = b * r.batch_stride;
      for (int w = 0; w < width; ++w) lo[n][w] = r.lo[at + t[w]], hi[n][w] = r.hi[at + t[w]];
    }
    for (int n = 0; n < m.n_bands; ++n) {
      const int64_t s = bands()[n * BAND_FIELDS + STRIDE];
      if (s == 1) continue;
      for (int w = 0; w < width; ++w) residue[n][w] = static_cast<I>(floor_mod(t[w], s < 0 ? -s : s));
    }
  }

  // the rows of the whole problem that may see key j, first <= t < stop; only for a mask of one band
  void seen_by(int64_t j, int64_t* first, int64_t* stop) const {
    const int32_t* f = bands();
    *first = f[Q_LO] > j + f[D_LO] ? f[Q_LO] : j + f[D_LO];
    *stop = f[Q_HI] < j + f[D_HI] + 1 ? f[Q_HI] : j + f[D_HI] + 1;
    if (j < f[K_LO] || j >= f[K_HI]) *stop = *first;
  }

  // the keys of the whole problem that some row from `top` to `last` may see, first <= j < stop; only for one band
  void sees(int64_t top, int64_t last, int64_t* first, int64_t* stop) const {
    const int32_t* f = bands();
    *first = max64(f[K_LO], max64(top, f[Q_LO]) - f[D_HI]);
    *stop = min64(f[K_HI], min64(last, int64_t{f[Q_HI]} - 1) - f[D_LO] + 1);
  }

  SACCADE_INLINE ivec<T> at(const I* p, int w) { return *reinterpret_cast<const typename Vec<T>::mu*>(p + w); }

  ivec<T> rows_test(int n, int w, int64_t j) const {
    const Rows& r = mask->rows[n];
    if (r.on_keys) {
      const int64_t at_j = batch * r.batch_stride + j;
      const ivec<T> tv = at(t, w);
      return (tv >= isplat<T>(r.lo[at_j])) & (tv < isplat<T>(r.hi[at_j]));
    }
    return (at(lo[n], w) <= isplat<T>(j)) & (at(hi[n], w) > isplat<T>(j));
  }

  ivec<T> grid_test(int n, int w, int64_t j) const {
    const Grid& g = mask->grids[n];
    const uint8_t* row = g.bits + batch * g.batch_stride + (j / g.block_k) * g.row_stride;
    // rows may be strided, repeated, or cut off at the end
    const I first = t[w], last = t[w + lanes<T> - 1];
    if (g.block_q == 1 && t[w + 1] == first + 1 && last == first + lanes<T> - 1) {
      uint32_t word;
      __builtin_memcpy(&word, row + (first >> 3), 4);
      return -((isplat<T>(word >> (first & 7)) >> iota<T>()) & isplat<T>(1));
    }
    ivec<T> r = {};
    for (int l = 0; l < lanes<T>; ++l) {
      const I at = t[w + l] / g.block_q;
      r[l] = -(row[at >> 3] >> (at & 7) & 1);
    }
    return r;
  }

  // which of lanes w .. w + N - 1 may see key j
  ivec<T> allowed(int w, int64_t j) const {
    const ivec<T> tv = at(t, w);
    const ivec<T> d = tv - isplat<T>(j);
    ivec<T> any = {};
    for (int n = 0; n < mask->n_bands; ++n) {
      const int32_t* f = bands() + n * BAND_FIELDS;
      if (j < f[K_LO] || j >= f[K_HI]) continue;
      ivec<T> ok = (d >= isplat<T>(f[D_LO])) & (d <= isplat<T>(f[D_HI]));
      ok &= (tv >= isplat<T>(f[Q_LO])) & (tv < isplat<T>(f[Q_HI]));
      const int64_t s = f[STRIDE];
      if (s > 1) ok &= at(residue[n], w) == isplat<T>(floor_mod(j + f[PHASE], s));
      if (s < -1) ok &= at(residue[n], w) != isplat<T>(floor_mod(j + f[PHASE], -s));
      const int32_t* use = mask->uses + n * USE_FIELDS;
      for (int k = 0; k < mask->n_rows; ++k) {
        if (use[ROWS_IN] >> k & 1) ok &= rows_test(k, w, j);
        if (use[ROWS_OUT] >> k & 1) ok &= ~rows_test(k, w, j);
      }
      for (int k = 0; k < mask->n_grids; ++k) {
        if (use[GRIDS_IN] >> k & 1) ok &= grid_test(k, w, j);
        if (use[GRIDS_OUT] >> k & 1) ok &= ~grid_test(k, w, j);
      }
      any |= ok;
    }
    return any;
  }
};

}  // namespace saccade::SACCADE_ISA
