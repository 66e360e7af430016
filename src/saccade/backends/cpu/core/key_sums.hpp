// Sums of dK and dV: each task of a backward, their owner, has sums of its own, and they are added at the end.
#pragma once
#include "tile.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
struct KeySums {
  static constexpr int N = lanes<T>;

  // size of the sums of one task: dK rows, then dV rows
  static int64_t size(const Call& c) { return c.sum_keys * (round_up(c.D, N) + round_up(c.Dv, N)); }

  // keeps the sums of keys that the stage before has in common with this one
  static void start(const Call& c, T* sums, int64_t width) {
    const int64_t kept = max64(0, c.before.key_end - c.stage.key);
    const T* old = sums + (c.stage.key - c.before.key) * width;
    if (kept) __builtin_memmove(sums, old, static_cast<size_t>(kept * width) * sizeof(T));
    const int64_t fresh = c.stage.key_end - c.stage.key - kept;
    __builtin_memset(sums + kept * width, 0, static_cast<size_t>(fresh * width) * sizeof(T));
  }

  // adds the owners' sums of one (batch, key head) in ascending order, for the keys [begin, end)
  static void finish(const Call& c, int64_t task, int64_t begin, int64_t end) {
    const int64_t ld = round_up(c.D, N), ldv = round_up(c.Dv, N), hk = task % c.Hk, b = task / c.Hk;
    T* first = static_cast<T*>(c.partial) + (task - c.first) * c.splits * size(c);
    // of keys that no tile sees
    T no_dk[1024], no_dv[1024];
    for (int64_t d = 0; d < c.D; ++d) no_dk[d] = T(0) * static_cast<T>(c.scale);
    for (int64_t d = 0; d < c.Dv; ++d) no_dv[d] = T(0);
    for (int64_t j = begin; j < end; ++j) {
      if (j % 256 == 255) check_stop();
      const bool seen = c.stage.key <= j && j < c.stage.key_end;
      const int64_t row = j - c.stage.key;
      T *dk = seen ? first + row * ld : no_dk, *dv = seen ? first + c.sum_keys * ld + row * ldv : no_dv;
      for (int64_t n = 1; seen && n < c.splits; ++n) {
        const T* other = first + n * size(c);
        for (int64_t d = 0; d < c.D; ++d) dk[d] += other[row * ld + d];
        for (int64_t d = 0; d < c.Dv; ++d) dv[d] += other[c.sum_keys * ld + row * ldv + d];
      }
      for (int64_t d = 0; seen && d < c.D; ++d) dk[d] *= static_cast<T>(c.scale);
      write_row(c.dk, b * c.dk.stride[0] + j * c.dk.stride[1] + hk * c.dk.stride[2], c.D, dk);
      write_row(c.dv, b * c.dv.stride[0] + j * c.dv.stride[1] + hk * c.dv.stride[2], c.Dv, dv);
    }
  }
};

}  // namespace saccade::SACCADE_ISA
