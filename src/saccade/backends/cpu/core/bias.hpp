// Gradient of an additive bias: dBias = dS summed over the dimensions that the bias is broadcast in, or along diagonals
// for a bias by distance. The owner of each element recomputes the scores, over batch entries and heads in ascending
// order.
#pragma once
#include "backward.hpp"

namespace saccade::SACCADE_ISA {

template <class K>
struct BiasGradient {
  using T = typename K::sum;

  // To is double where many scores share an element: a sum in float would lose the last digits
  template <class To>
  static void add(const Array& a, int64_t t, const Scorer<T>& x, const T* ds, int64_t first, int64_t n) {
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < x.rows; ++w)
        reinterpret_cast<To*>(a.data)[x.pair_at(a, t + x.step * w, x.key(first + r))] +=
            static_cast<To>(ds[r * x.width + w]);
  }

  static void tile(const Call& c, Backward<K>& f, int64_t b, int64_t h, int64_t cls, int64_t tile, bool of_distances) {
    const TaskIndex x{b, h / c.G, cls, 0, 0};
    if (c.part->entry && c.part->entry[cls] != b) return;
    if (!f.items[0].place(c, x, h % c.G, tile, f.masks)) return;
    f.start(f.items[0], h % c.G);
    f.keys = keys_of(*c.part, cls);
    walk(
        f.keys.total, c.range > 0, f.items, 1, [&](int64_t first, int64_t count) { f.load_tile(x, first, count); },
        [&](typename Backward<K>::State& it, int64_t first, int64_t count, int kind, int64_t at) {
          f.recompute(it, first, count, kind == PARTIAL, at);
          if (of_distances)
            add<double>(c.ddistances, it.s.t0 + it.s.offset(), it.s, f.s, first, count);
          else if (c.dbias.dtype == DType::f64)
            add<double>(c.dbias, it.s.t0, it.s, f.s, first, count);
          else
            add<float>(c.dbias, it.s.t0, it.s, f.s, first, count);
        });
  }

  // one task per (bias batch, head) of distances
  static void distances(const Call& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    Backward<K> f(c, bump, Backward<K>::wanted(c));
    const int64_t each = c.ddistances.stride[0] != 0, h = task % c.Hq, bb = task / c.Hq;
    for (int64_t b = bb; b < (each ? bb + 1 : c.B); ++b)
      for (int64_t cls = 0; cls < c.part->classes; ++cls)
        for (int64_t t = 0; t < c.part->n_tiles; ++t) tile(c, f, b, h, cls, t, true);
  }

  // one task per (bias batch, bias head), and per query tile where the bias has rows
  static void task(const Call& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    Backward<K> f(c, bump, Backward<K>::wanted(c));
    const Part& part = *c.part;
    const int64_t tiles = c.bias_t ? part.n_tiles : 1;
    const int64_t own_tile = task % tiles, bh = c.bias_h ? c.Hq : 1;
    const int64_t hh = task / tiles % bh, bb = task / tiles / bh;
    for (int64_t b = c.bias_b ? bb : 0; b < (c.bias_b ? bb + 1 : c.B); ++b)
      for (int64_t h = c.bias_h ? hh : 0; h < (c.bias_h ? hh + 1 : c.Hq); ++h)
        for (int64_t cls = 0; cls < part.classes; ++cls)
          for (int64_t t = c.bias_t ? own_tile : 0; t < (c.bias_t ? own_tile + 1 : part.n_tiles); ++t)
            tile(c, f, b, h, cls, t, false);
  }
};

}  // namespace saccade::SACCADE_ISA
