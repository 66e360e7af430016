// Plans as arrays of words: the inverse of encoding.py.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "types.hpp"

namespace saccade {

// changes with the order of the words, so that a stored program of another version is refused
constexpr int32_t WORDS_VERSION = 2;

// the parts of a plan, which point into its words
class EncodedPlan {
 public:
  EncodedPlan(const int32_t* words, int64_t n) : at_(words), end_(words + n) {
    if (next() != WORDS_VERSION)
      throw std::invalid_argument("this program was stored by another version of saccade: trace and store it again");
    parts_.resize(next());
    masks_.resize(parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i) read_part(parts_[i], masks_[i]);
  }
  std::vector<const Part*> parts() const {
    std::vector<const Part*> pointers;
    for (const Part& part : parts_) pointers.push_back(&part);
    return pointers;
  }

 private:
  const int32_t* take(int64_t n) {
    if (n < 0 || n > end_ - at_) throw std::invalid_argument("the words of a plan end too early");
    const int32_t* first = at_;
    at_ += n;
    return first;
  }
  int32_t next() { return *take(1); }

  void read_part(Part& p, std::vector<Mask>& masks) {
    p.step = next(), p.classes = next(), p.n_tiles = next(), p.n_masks = next(), p.mask_batches = next();
    p.n_stages = next();
    const int64_t heads = next(), lists = int64_t{p.classes} * p.n_masks * p.mask_batches * p.n_tiles;
    p.q_start = take(p.classes), p.k_start = take(p.classes), p.nq = take(p.classes), p.nk = take(p.classes);
    p.head = take(heads), p.ptr = take(lists + 1), p.seg = take(3 * int64_t{p.ptr[lists]});
    p.stages = take(3 * int64_t{p.n_stages});
    masks.resize(p.n_masks);
    for (Mask& m : masks) read_mask(m);
    p.masks = masks.data();
  }

  void read_mask(Mask& m) {
    const int64_t batch = next();
    m.n_bands = next(), m.n_rows = next(), m.n_grids = next();
    if (m.n_rows > 8 || m.n_grids > 4) throw std::invalid_argument("a mask has more intervals or grids than fit");
    m.batch_stride = batch > 1 ? m.n_bands * BAND_FIELDS : 0;
    m.bands = take(batch * m.n_bands * BAND_FIELDS), m.uses = take(int64_t{m.n_bands} * USE_FIELDS);
    for (int i = 0; i < m.n_rows; ++i) {
      Rows& r = m.rows[i];
      const int64_t batches = next(), length = next();
      r.on_keys = next(), r.batch_stride = batches > 1 ? length : 0;
      r.lo = take(batches * length), r.hi = take(batches * length);
    }
    for (int i = 0; i < m.n_grids; ++i) {
      Grid& g = m.grids[i];
      const int64_t batches = next(), rows = next();
      g.row_stride = next(), g.block_q = next(), g.block_k = next();
      g.batch_stride = batches > 1 ? rows * g.row_stride : 0;
      g.bits = reinterpret_cast<const uint8_t*>(take((batches * rows * g.row_stride + 3) / 4));
    }
  }

  const int32_t *at_, *end_;
  std::vector<Part> parts_;
  std::vector<std::vector<Mask>> masks_;
};

}  // namespace saccade
