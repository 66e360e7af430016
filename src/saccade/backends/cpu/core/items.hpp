// The walk of one task over query tiles (heads of one group, or neighbouring tiles) that share every loaded key tile.
#pragma once
#include "matrix.hpp"
#include "scores.hpp"
#include "selected.hpp"

namespace saccade::SACCADE_ISA {

// how the query tiles of a call are grouped into tasks; results do not depend on it
struct Grouping {
  int64_t heads, tiles, chunks, blocks;

  Grouping(int64_t heads, int64_t tiles, int64_t chunks, int64_t blocks)
      : heads(heads), tiles(tiles), chunks(chunks), blocks(blocks) {}
  Grouping(const Call& c, int64_t wanted) {
    heads = min64(c.G, wanted);
    chunks = (c.G + heads - 1) / heads;
    tiles = max64(1, wanted / heads);
    const int64_t all = entries(c) * c.Hk * chunks * c.part->classes;
    while (tiles > 1 && all * c.part->n_tiles / tiles < int64_t{4} * c.threads) tiles /= 2;
    blocks = (c.part->n_tiles + tiles - 1) / tiles;
  }
  static int64_t entries(const Call& c) { return c.part->entry ? 1 : c.B; }
  int64_t tasks(const Call& c) const { return entries(c) * c.Hk * c.part->classes * chunks * blocks; }
  // later query blocks come first: under a causal mask they take longest
  TaskIndex at(const Call& c, int64_t task) const {
    TaskIndex x;
    const int64_t outer = entries(c) * c.Hk * chunks * c.part->classes;
    x.block = blocks - 1 - task / outer;
    task %= outer;
    x.cls = task % c.part->classes, task /= c.part->classes;
    x.chunk = task % chunks, task /= chunks;
    x.hk = task % c.Hk, x.b = c.part->entry ? c.part->entry[x.cls] : task / c.Hk;
    return x;
  }
  // places and starts the tiles of a task, and returns how many there are
  template <class Pass>
  int64_t start_all(const Call& c, const TaskIndex& x, Pass& f) const {
    int64_t n = 0;
    for (int64_t head = x.chunk * heads; head < min64(c.G, (x.chunk + 1) * heads); ++head)
      for (int64_t tile = x.block * tiles; tile < (x.block + 1) * tiles; ++tile)
        if (f.items[n].place(c, x, head, tile, f.masks + n)) f.start(f.items[n++]);
    return n;
  }
};

SACCADE_INLINE Keys keys_of(const Part& p, int64_t cls) { return {p.k_start[cls], p.step, p.nk[cls]}; }

// the most lanes of a query tile
template <class T>
SACCADE_INLINE int64_t widest_item(const Call& c) {
  return c.selection.lists ? min64(TILE_Q, round_up(c.selection.rows * c.G, lanes<T>)) : TILE_Q;
}

// one query tile of one head, and its position in the list of key segments
template <class T>
struct Item {
  Scorer<T> s;
  const int32_t *seg = nullptr, *seg_end = nullptr, *first_seg = nullptr;

  // false when the tile has no rows
  bool place(const Call& c, const TaskIndex& x, int64_t g, int64_t tile, TileMask<T>* lanes_mask) {
    const Part& p = *c.part;
    const int64_t row = tile * TILE_Q;
    if (tile >= p.n_tiles || row >= p.nq[x.cls]) return false;
    const int64_t rows = min64(TILE_Q, p.nq[x.cls] - row);
    set(c, {x.b, x.hk * c.G + g, p.q_start[x.cls] + row * p.step, p.step, rows}, keys_of(p, x.cls), lanes_mask);
    const int64_t m = p.head[s.h];
    s.mask = p.masks + m;
    const int64_t batch = p.mask_batches > 1 ? x.b : 0;
    const int64_t at = ((x.cls * p.n_masks + m) * p.mask_batches + batch) * p.n_tiles + tile;
    seg = first_seg = p.seg + 3 * static_cast<int64_t>(p.ptr[at]);
    seg_end = p.seg + 3 * static_cast<int64_t>(p.ptr[at + 1]);
    return true;
  }

  // tile of a group of rows with selected keys; its lanes are the rows, in each row the query heads of the key head
  bool place(const Call& c, const TaskIndex& x, int64_t tile, const Selected& of, int64_t place,
             TileMask<T>* lanes_mask) {
    const int64_t lane = tile * TILE_Q, t0 = x.block * c.selection.rows;
    const int64_t rows = min64(TILE_Q, min64(c.selection.rows, c.Tq - t0) * c.G - lane);
    if (rows <= 0) return false;
    set(c, {x.b, x.hk * c.G, t0, 1, rows, c.G, lane}, of.keys, lanes_mask);
    s.mask = c.part->masks;
    seg = first_seg = of.seg(place), seg_end = of.seg_end(place);
    return true;
  }

  // The last of the segments that are one piece, from key `begin` of the tile that ends before key `stop`: with `whole`,
  // all of the tile. Otherwise few keys that all rows see join the edge after them, since a piece costs more than tests.
  const int32_t* piece(int64_t begin, int64_t stop, bool whole) const {
    constexpr int64_t FEW_KEYS = 16;
    const int32_t* last = seg;
    const auto more = [&] { return last[1] < stop && last + 3 < seg_end && last[3] < stop; };
    while (whole && more()) last += 3;
    const bool few = !whole && last[1] - begin < FEW_KEYS && more();
    return few && last[1] == last[3] && last[5] == PARTIAL ? last + 3 : last;
  }

 private:
  void set(const Call& c, const QueryRows& rows, const Keys& keys, TileMask<T>* lanes_mask) {
    static_cast<QueryRows&>(s) = rows;
    s.c = &c;
    s.width = round_up(rows.rows, lanes<T>);
    s.keys = keys;
    s.lanes_mask = lanes_mask;
    s.prepared = false;
    s.factor = T(1);
  }
};

// Of a piece, for each pair of vectors of rows: only products with keys begin to end are needed, 0 to n where the mask
// does not tell. It tells for one band of keys, where the edge crosses the piece.
template <class T>
struct Needed {
  static constexpr int64_t PAIR = 2 * lanes<T>;
  struct Range {
    int64_t begin, end;
  } of[TILE_Q / PAIR];
  int64_t width;    // of the item
  int64_t columns;  // that have the same range: PAIR or all

  void find(Scorer<T>& s, int64_t first, int64_t n, bool tell) {
    for (Range& x : of) x = {0, n};
    width = columns = s.width;
    if (!tell || s.keys.list || s.keys.step != 1) return;
    s.prepare();
    if (!s.mask->one_band) return;
    columns = PAIR;
    for (int64_t w = 0; w < width; w += PAIR) {
      Range& x = of[w / PAIR];
      s.lanes_mask->sees(s.row(w), s.row(min64(w + PAIR, s.rows) - 1), &x.begin, &x.end);
      x.begin = min64(n, max64(0, x.begin - s.keys.start - first));
      x.end = max64(x.begin, min64(n, x.end - s.keys.start - first));
    }
  }
  // f(w, how many columns, range) for columns that have the same range
  template <class F>
  void each(F f) const {
    for (int64_t w = 0; w < width; w += columns) f(w, min64(columns, width - w), of[w / PAIR]);
  }
  // the rows that need some of the keys `begin` to `end` of the piece
  Range rows(int64_t begin, int64_t end) const {
    Range some{width, 0};
    each([&](int64_t w, int64_t n, const Range& keys) {
      if (keys.begin < end && begin < keys.end) some = {min64(some.begin, w), w + n};
    });
    return some;
  }
};

// Visits key tiles in ascending order. Calls `load(first, n)` once per tile that any item needs, and
// `step(item, first, n, kind, at)` for each piece, where `at` counts from the tile's first key. With `whole`, an item
// has one piece per tile, so that no sum depends on where the segments of its neighbouring rows end.
template <class It, class Load, class Step>
SACCADE_INLINE void walk(int64_t n_keys, bool whole, It* items, int64_t n_items, Load load, Step step) {
  for (;;) {
    int64_t k0 = INT64_MAX;
    for (int64_t i = 0; i < n_items; ++i)
      if (items[i].seg < items[i].seg_end) k0 = min64(k0, items[i].seg[0]);
    if (k0 == INT64_MAX) return;
    // key tiles start at multiples of their size, so no bit of a result depends on which items share a task
    k0 -= k0 % TILE_K;
    for (bool any = true; any; k0 += TILE_K) {
      any = false;
      check_stop();
      bool loaded = false;
      const int64_t k1 = k0 + TILE_K;
      for (int64_t i = 0; i < n_items; ++i) {
        It& it = items[i];
        while (it.seg < it.seg_end && it.seg[0] < k1) {
          const int64_t begin = max64(it.seg[0], k0);
          const int32_t* last = it.piece(begin, k1, whole);
          const int kind = last == it.seg ? it.seg[2] : PARTIAL;
          it.seg = last;
          const int64_t end = min64(it.seg[1], k1);
          if (begin < end) {
            if (!loaded) load(k0, min64(TILE_K, n_keys - k0));
            loaded = true;
            step(it, begin, end - begin, kind, begin - k0);
          }
          if (it.seg[1] > k1) {
            any = true;
            break;
          }
          it.seg += 3;
        }
      }
    }
  }
}

}  // namespace saccade::SACCADE_ISA
