// Selected keys: what groups of rows visit, for all rows of a group and all query heads of the key head, which fill the
// lanes of its query tiles. Large blocks are segments of all keys, so that groups share loaded tiles; the keys of small
// blocks are gathered into a list, for one group at a time.
#pragma once
#include "tile.hpp"

namespace saccade::SACCADE_ISA {

struct Selected {
  static constexpr int64_t LARGE = 16;
  Keys keys{0, 1, 0};

  // for `places` groups
  Selected(const Call& c, Bump& bump, int64_t places) {
    const Selection& s = c.selection;
    const int64_t blocks = count(c);
    most_ = min64(s.n, blocks);
    if (s.block < LARGE) list_ = bump.take<int32_t>(min64(most_ * s.block, c.Tk));
    seg_ = bump.take<int32_t>(places * 3 * most_);
    ends_of_ = bump.take<int32_t*>(places);
    bits_ = bump.take<uint64_t>((blocks + 63) / 64);
    tiles_ = bump.take<const int32_t*>(s.rows / TILE_Q + 2);
  }

  // how many groups share key tiles, at most `most`. Their state, of `numbers` per lane, may exceed the L2 cache: a step
  // reads less of it than of a key tile that no other group shares.
  template <class T>
  static int64_t groups_of(const Call& c, int64_t numbers, int64_t most) {
    const int64_t state = round_up(c.selection.rows * c.G, lanes<T>) * numbers * static_cast<int64_t>(sizeof(T));
    return c.selection.block < LARGE ? 1 : max64(1, min64(min64(512, (8 << 20) / state), most));
  }

  // places the items of `each` groups from x.block on, and calls `run` for at most `most` of them at a time
  template <class It, class Masks, class Run>
  void place(const Call& c, TaskIndex& x, int64_t each, It* items, int64_t most, Masks* masks, Run run) {
    const int64_t first = x.block;
    int64_t n = 0;
    for (; x.block < min64(first + each, c.selection.groups); ++x.block) {
      gather(c, x.b, x.hk, x.block, x.block - first);
      for (int64_t tile = 0; items[n].place(c, x, tile, *this, x.block - first, masks + n); ++tile)
        if (++n == most) run(n), n = 0;
    }
    if (n) run(n);
  }

  int32_t* seg(int64_t place) const { return seg_ + place * 3 * most_; }
  const int32_t* seg_end(int64_t place) const { return ends_of_[place]; }

  // the blocks of a list in ascending order, without those that no row may see by the other masks
  void gather(const Call& c, int64_t b, int64_t hk, int64_t group, int64_t place) {
    const Selection& s = c.selection;
    const int64_t blocks = count(c), words = (blocks + 63) / 64;
    const int32_t* entries = s.lists + b * s.batch_stride + (hk * s.groups + group) * s.n;
    for (int64_t i = 0; i < words; ++i) bits_[i] = 0;
    for (int64_t i = 0; i < s.n; ++i)
      if (entries[i] >= 0 && entries[i] < blocks) bits_[entries[i] / 64] |= uint64_t{1} << (entries[i] % 64);
    const Part& p = *c.part;
    const int64_t t0 = group * s.rows, tile = t0 / TILE_Q;
    n_tiles_ = (t0 + min64(s.rows, c.Tq - t0) - 1) / TILE_Q - tile + 1;
    ends_ = p.ptr + (p.mask_batches > 1 ? b : 0) * p.n_tiles + tile;
    for (int64_t i = 0; i < n_tiles_; ++i) tiles_[i] = p.seg + 3 * static_cast<int64_t>(ends_[i]);
    keys = {0, 1, list_ ? 0 : c.Tk, list_};
    int32_t* last = seg(place);
    for (int64_t i = 0; i < words; ++i)
      for (uint64_t left = bits_[i]; left; left &= left - 1)
        add(p, (i * 64 + __builtin_ctzll(left)) * s.block, s.block, c.Tk, seg(place), last);
    ends_of_[place] = last;
  }

 private:
  int64_t most_;  // blocks of a list
  int32_t *list_ = nullptr, *seg_, **ends_of_;
  uint64_t* bits_;
  const int32_t** tiles_;  // for each plan tile of the group's rows, the first segment that is not over
  const int32_t* ends_ = nullptr;
  int64_t n_tiles_ = 0;

  static int64_t count(const Call& c) { return (c.Tk + c.selection.block - 1) / c.selection.block; }

  void add(const Part& p, int64_t begin, int64_t block, int64_t Tk, const int32_t* seg, int32_t*& last) {
    const int64_t end = min64(begin + block, Tk);
    const int kind = kind_of(p, begin, end);
    if (kind == EMPTY) return;
    const auto first = static_cast<int32_t>(list_ ? keys.total : begin);
    for (int64_t j = begin; list_ && j < end; ++j) list_[keys.total++] = static_cast<int32_t>(j);
    if (last == seg || last[-1] != kind || last[-2] != first) last += 3, last[-3] = first, last[-1] = kind;
    last[-2] = static_cast<int32_t>(list_ ? keys.total : end);
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
