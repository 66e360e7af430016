// Selected keys: the list of keys that one group of rows visits. A task gathers it once for all rows of the group and
// all query heads of the key head, which fill the lanes of its query tiles.
#pragma once
#include "tile.hpp"

namespace saccade::SACCADE_ISA {

struct Selected {
  Keys keys{0, 1, 0};
  int32_t *list, *seg;
  const int32_t* seg_end = nullptr;
  int64_t rows = 0;  // of the group

  Selected(const Call& c, Bump& bump) {
    const Selection& s = c.selection;
    const int64_t blocks = count(c), most = min64(s.n, blocks);
    list = bump.take<int32_t>(min64(most * s.block, c.Tk));
    seg = bump.take<int32_t>(3 * most);
    bits_ = bump.take<uint64_t>((blocks + 63) / 64);
    tiles_ = bump.take<const int32_t*>(s.rows / TILE_Q + 2);
  }

  // the blocks of a list in ascending order, without those that no row may see by the other masks
  void gather(const Call& c, int64_t b, int64_t hk, int64_t group) {
    const Selection& s = c.selection;
    const int64_t blocks = count(c), words = (blocks + 63) / 64;
    const int32_t* entries = s.lists + b * s.batch_stride + (hk * s.groups + group) * s.n;
    for (int64_t i = 0; i < words; ++i) bits_[i] = 0;
    for (int64_t i = 0; i < s.n; ++i)
      if (entries[i] >= 0 && entries[i] < blocks) bits_[entries[i] / 64] |= uint64_t{1} << (entries[i] % 64);
    const Part& p = *c.part;
    const int64_t t0 = group * s.rows, tile = t0 / TILE_Q;
    rows = min64(s.rows, c.Tq - t0);
    n_tiles_ = (t0 + rows - 1) / TILE_Q - tile + 1;
    ends_ = p.ptr + (p.mask_batches > 1 ? b : 0) * p.n_tiles + tile;
    for (int64_t i = 0; i < n_tiles_; ++i) tiles_[i] = p.seg + 3 * static_cast<int64_t>(ends_[i]);
    keys = {0, 1, 0, list};
    int32_t* last = seg;
    for (int64_t i = 0; i < words; ++i)
      for (uint64_t left = bits_[i]; left; left &= left - 1)
        add(p, (i * 64 + __builtin_ctzll(left)) * s.block, s.block, c.Tk, last);
    seg_end = last;
  }

 private:
  uint64_t* bits_;
  const int32_t** tiles_;  // for each plan tile of the group's rows, the first segment that is not over
  const int32_t* ends_ = nullptr;
  int64_t n_tiles_ = 0;

  static int64_t count(const Call& c) { return (c.Tk + c.selection.block - 1) / c.selection.block; }

  void add(const Part& p, int64_t begin, int64_t block, int64_t Tk, int32_t*& last) {
    const int64_t end = min64(begin + block, Tk);
    const int kind = kind_of(p, begin, end);
    if (kind == EMPTY) return;
    const int32_t first = static_cast<int32_t>(keys.total);
    for (int64_t j = begin; j < end; ++j) list[keys.total++] = static_cast<int32_t>(j);
    if (last == seg || last[-1] != kind) last += 3, last[-3] = first, last[-1] = kind;
    last[-2] = static_cast<int32_t>(keys.total);
  }

  // FULL if all rows of the group see all of the keys, EMPTY if none sees any
  int kind_of(const Part& p, int64_t begin, int64_t end) {
    bool some = false, all = true;
    for (int64_t i = 0; i < n_tiles_; ++i) {
      const int32_t*& at = tiles_[i];
      const int32_t* stop = p.seg + 3 * static_cast<int64_t>(ends_[i + 1]);
      while (at < stop && at[1] <= begin) at += 3;
      const bool met = at < stop && at[0] < end;
      some |= met;
      all &= met && at[0] <= begin && at[1] >= end && at[2] == FULL;
    }
    return !some ? EMPTY : all ? FULL : PARTIAL;
  }
};

}  // namespace saccade::SACCADE_ISA
