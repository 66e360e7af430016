// Products of weights and values that are computed for several key tiles at once, for matrix registers: these would
// spend most of their time on loading and storing the sums of each tile.
#pragma once
#include "items.hpp"

namespace saccade::SACCADE_ISA {

// what a tile of queries has not yet multiplied: its weights for the tiles [begin, end)
template <class Num>
struct LateWeights {
  Num* pairs;  // [Late::ALL][width of the item]
  int64_t begin, end;
};

template <class K>
struct Late {
  using Num = typename K::num;
  using T = typename K::sum;
  // key tiles of one product, and the pairs of keys in one tile and in all of them
  static constexpr int64_t TILES = 2, PAIRS = TILE_K / Store<K>::per, ALL = TILES * PAIRS;

  Num* values = nullptr;  // [ldv][ALL]
  int64_t ldv = 0, tile = -1;

  // moves to the next tile; false if the weights of all items must be multiplied first
  bool next() {
    if (++tile < TILES) return true;
    tile = 0;
    return false;
  }

  // the values of n keys, in pairs of rows
  void load(Num* rows, int64_t n) {
    const int64_t begin = Store<K>::depth(n);
    for (Num* x = rows + begin * ldv; x < rows + PAIRS * ldv; ++x) *x = 0;
    Store<K>::turn_tile(rows, ldv, TILE_K, values + tile * PAIRS, ALL);
  }

  // where the weights of this tile are stored. Tiles between the last one and this one get weight 0, and this one, too,
  // if not all of it is written.
  Num* weights(LateWeights<Num>& of, int64_t width, bool whole) const {
    if (of.begin == of.end) of.begin = of.end = tile;
    if (of.end <= tile) {
      Num *first = of.pairs + of.end * PAIRS * width, *last = of.pairs + (tile + !whole) * PAIRS * width;
      __builtin_memset(first, 0, static_cast<size_t>(last - first) * sizeof(Num));
      of.end = tile + 1;
    }
    return of.pairs + tile * PAIRS * width;
  }

  // n pairs of weights from pair `from` on; another piece may have half of the first or the last one
  void add(LateWeights<Num>& of, int64_t width, const Num* pairs, int64_t n, int64_t from) const {
    Num* out = weights(of, width, false) + from * width;
    for (int64_t i = 0; i < n * width; ++i) out[i] |= pairs[i];
  }

  void multiply(LateWeights<Num>& of, int64_t width, T* sums) const {
    if (of.begin == of.end) return;
    const Num *v = values + of.begin * PAIRS, *w = of.pairs + of.begin * PAIRS * width;
    product<K>(ldv, width, (of.end - of.begin) * PAIRS, w, width, deep_rows(v, ALL, true), sums, width, true);
    of.begin = of.end;
  }
};

}  // namespace saccade::SACCADE_ISA
