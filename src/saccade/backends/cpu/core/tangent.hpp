// Tangents of o and lse, in one pass after the forward; vectors along queries. c.tangent holds the tangents of the inputs.
//   P = 2^(S - lse)   dS = scale (K dQ^T + dK Q^T) + d(terms)   R = sum P (dS - m)   A^T = V^T (P (dS - m)) + dV^T P
//   W = sum P + sink   r = m + (R + sink (dsink - m)) / W   do = A / W - (r - m) o   dlse = r
// Without m, what all dS of a row have in common would be the difference of two large numbers. m is the mean of dS by
// the weights seen so far, until they are half of all; it moves with each tile, and then A^T += (m_old - m) V^T P.
// W is 1 except for the rounding of lse, which thus has no effect.
#pragma once
#include "items.hpp"

namespace saccade::SACCADE_ISA {

template <class K>
struct Tangent {
  using T = typename K::sum;
  using Num = typename K::num;
  using S = Store<K>;
  static constexpr int N = lanes<T>;

  struct State : Item<T> {
    Scorer<T> ds;   // adds the tangents of bias, slopes and gates
    Num *qt, *dqt;  // [depth(D)][width of the item]
    T *at, *ot;     // A^T and V^T P, [Dv rounded up][width of the item]
    T lse[TILE_Q];  // in log2 units
    T m[TILE_Q], weight[TILE_Q], r[TILE_Q], half[TILE_Q];
    bool open;  // m of some row may still move
  };

  // n keys of one key tile, from its place `at` on
  struct Piece {
    int64_t first, n;
    bool partial;
    int64_t at;
  };

  const Call &c, &d;
  int64_t ld, ldv;
  T mul, unit;  // log2 scores = mul * products of q and k, when plain; dS = unit * products of tangents
  bool moved;   // whether any score has a tangent
  Num *kt, *dkt, *vt, *dvt, *pairs;
  T *p, *ds, *cap, *rows, *transposed;
  State* items;
  TileMask<T>* masks;
  bool v_finite = true, dv_finite = true;
  Keys keys{0, 1, 0};

  Tangent(const Call& call, Bump& bump, int64_t n_items)
      : c(call), d(*call.tangent), ld(round_up(call.D, N)), ldv(round_up(call.Dv, N)) {
    constexpr int64_t tile = (TILE_K + 2) * TILE_Q;
    moved = d.q.data || d.k.data || !d.plain();
    kt = bump.take<Num>(TILE_K * S::depth(c.D)), dkt = bump.take<Num>(TILE_K * S::depth(c.D));
    vt = bump.take<Num>((TILE_K / S::per + 1) * ldv), dvt = bump.take<Num>((TILE_K / S::per + 1) * ldv);
    p = bump.take<T>(tile), ds = bump.take<T>(tile), cap = bump.take<T>(tile);
    pairs = S::per == 1 ? nullptr : bump.take<Num>(tile);
    rows = bump.take<T>(TILE_Q * max64(ld, ldv));
    transposed = bump.take<T>(TILE_Q * max64(ld, ldv));
    items = bump.take<State>(n_items);
    masks = bump.take<TileMask<T>>(n_items);
    for (int64_t i = 0; i < n_items; ++i) {
      Num* qt = bump.take<Num>(TILE_Q * S::depth(ld));
      Num* dqt = bump.take<Num>(TILE_Q * S::depth(ld));
      T* at = bump.take<T>(TILE_Q * ldv);
      T* ot = bump.take<T>(TILE_Q * ldv);
      if (bump.base) items[i].qt = qt, items[i].dqt = dqt, items[i].at = at, items[i].ot = ot;
    }
  }

  void start(State& it) {
    const Scorer<T>& x = it.s;
    const double pre = c.scale * (x.plain() ? LOG2E<double> : 1);
    mul = S::per == 1 ? T(1) : static_cast<T>(pre);
    unit = S::per == 2 ? static_cast<T>(c.scale) : x.plain() ? LN2<T> : T(1);
    const auto turn = [&](const Array& a, Num* to) {
      load_queries(a, x, x.width, c.D, rows, ld);
      S::turn(rows, ld, x.width, c.D, pre, transposed, to);
    };
    turn(c.q, it.qt);
    if (d.q.data) turn(d.q, it.dqt);
    it.ds = x, it.ds.c = &d;
    const auto sums = [&](const Array& a, T* to) {
      if (!c.merge) return static_cast<void>(__builtin_memset(to, 0, static_cast<size_t>(ldv * x.width) * sizeof(T)));
      load_queries(a, x, x.width, c.Dv, rows, ldv);
      transpose(x.width, ldv, rows, ldv, to, x.width);
    };
    sums(d.o, it.at), sums(d.do_, it.ot);
    it.open = moved;
    for (int64_t w = 0; w < TILE_Q; ++w) {
      it.m[w] = it.weight[w] = it.r[w] = it.half[w] = T(0);
      // lanes beyond the tile's rows get weight 0
      it.lse[w] = -Low<T>::masked;
      if (w >= x.rows) continue;
      const T lse = static_cast<const T*>(c.lse)[row_at(x, w)];
      it.lse[w] = lse == Low<T>::masked ? T(0) : static_cast<T>(in_log2(c, lse));
      it.half[w] = lse == Low<T>::masked ? T(0) : static_cast<T>((1 - sink_of(it, w)) / 2);
      if (!c.merge) continue;
      const double* row = c.rows + 3 * row_at(x, w);
      it.m[w] = static_cast<T>(row[0]), it.weight[w] = static_cast<T>(row[1]), it.r[w] = static_cast<T>(row[2]);
    }
  }
  // the weight of a row's sink
  double sink_of(const State& it, int64_t w) const {
    if (!c.sinks) return 0;
    return __builtin_exp2(in_log2(c, static_cast<T>(c.sinks[it.s.head(w)])) - static_cast<double>(it.lse[w]));
  }
  int64_t row_at(const Scorer<T>& x, int64_t w) const { return (x.b * c.Tq + x.row(w)) * c.Hq + x.head(w); }

  // P and dS of n keys
  void scores(State& it, T* P, T* dS, const Piece& x) {
    const auto [first, n, partial, at] = x;
    const int64_t width = it.s.width, deep = S::depth(c.D);
    mm<K>(n, width, deep, it.qt, width, kt + at * deep, deep, 1, P, width, false, c.chain());
    if (d.q.data) mm<K>(n, width, deep, it.dqt, width, kt + at * deep, deep, 1, dS, width, false, c.chain());
    if (d.k.data) mm<K>(n, width, deep, it.qt, width, dkt + at * deep, deep, 1, dS, width, d.q.data, c.chain());
    const bool careful = partial || it.s.masked_by_bias(), products = d.q.data || d.k.data;
    it.s.scores(P, first, n, partial, c.softcap != 0 ? cap : nullptr);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < width; w += N) {
        const int64_t i = r * width + w;
        const vec<T> s = load(P + i) * mul;
        vec<T> e = exp2v(s - load(it.lse + w));
        // a row that may see a NaN has lse NaN; the keys that it must not see still get weight 0
        if (careful) e = s == Low<T>::masked ? vec<T>{} : e;
        store(P + i, e);
        if (!moved) continue;
        vec<T> t = {};
        if (products) t = load(dS + i) * unit;
        if (products && c.softcap != 0) t *= load(cap + i);
        if (!d.plain()) t = it.ds.with_terms(t, w, it.s.key(first + r));
        store(dS + i, e == T(0) ? vec<T>{} : t);
      }
  }

  // subtracts m from dS, multiplies it by P, and adds both to the sums of their rows
  void centre(State& it, const T* P, T* dS, int64_t n) {
    const int64_t width = it.s.width;
    bool moves = false, open = false;
    for (int64_t w = 0; w < width; w += N) {
      const vec<T> before = load(it.weight + w);
      vec<T> m = load(it.m + w), weight = {}, r = {};
      for (int64_t i = w; i < n * width; i += width) weight += load(P + i);
      weight += before;
      store(it.weight + w, weight);
      if (!moved) continue;
      if (it.open) {
        for (int64_t i = w; i < n * width; i += width) r += load(P + i) * (load(dS + i) - m);
        const vec<T> half = load(it.half + w);
        const vec<T> shift = ((before < half) & (weight != T(0))) ? -r / weight : vec<T>{};
        m -= shift, r = shift * before;
        store(it.m + w, m), store(transposed + w, shift);
        moves |= any(shift != T(0)), open |= any(weight < half);
      }
      for (int64_t i = w; i < n * width; i += width) {
        const vec<T> t = load(P + i) * (load(dS + i) - m);
        r += t;
        store(dS + i, t);
      }
      store(it.r + w, load(it.r + w) + r);
    }
    it.open = open;
    if (!moves) return;
    for (int64_t i = 0; i < c.Dv * width; i += width)
      for (int64_t w = 0; w < width; w += N)
        store(it.at + i + w, load(it.at + i + w) + load(transposed + w) * load(it.ot + i + w));
  }

  // adds the values of a piece by their weights to `to`
  void add(State& it, T* to, T* weights, const Num* values, bool finite, const Piece& x) {
    const int64_t odd = S::per == 2 ? x.at & 1 : 0, width = it.s.width;
    if (!finite && (x.partial || it.s.masked_by_bias() || S::per == 2))
      return add_one_by_one(it, to, weights, values, x);
    const Num* A;
    if constexpr (S::per == 2) {
      // pairs start at an even key: an odd start includes the key before it, with weight zero
      if (odd)
        for (int64_t w = 0; w < width; w += N) store(weights - width + w, vec<T>{});
      S::pair_rows(weights - odd * width, width, x.n + odd, width, pairs);
      A = pairs;
    } else {
      A = weights;
    }
    mm<K>(c.Dv, width, (x.n + odd + S::per - 1) / S::per, A, width, values + (x.at - odd) / S::per * ldv, 1, ldv, to,
          width, true);
  }

  // for a tile that contains a NaN or an infinity: only rows that may see a key add its value
  void add_one_by_one(State& it, T* to, const T* weights, const Num* values, const Piece& x) {
    if (x.partial) it.s.prepare();
    for (int64_t r = 0; r < x.n; ++r)
      for (int64_t w = 0; w < it.s.width; w += N) {
        const ivec<T> ok = it.s.allowed(static_cast<int>(w), it.s.key(x.first + r), x.partial);
        const vec<T> weight = load(weights + r * it.s.width + w);
        for (int64_t i = 0; i < c.Dv; ++i) {
          T* sum = to + i * it.s.width + w;
          store(sum, load(sum) + (ok ? weight * S::across(values, ldv, x.at + r, i) : vec<T>{}));
        }
      }
  }

  void step(State& it, const Piece& x) {
    const int64_t odd = S::per == 2 ? x.at & 1 : 0;
    T *P = p + odd * it.s.width, *dS = ds + odd * it.s.width;
    scores(it, P, dS, x);
    centre(it, P, dS, x.n);
    it.s.dropout(P, moved ? dS : nullptr, x.first, x.n);
    if (moved) add(it, it.at, dS, vt, v_finite, x);
    if (it.open) add(it, it.ot, P, vt, v_finite, x);
    if (d.v.data) add(it, it.at, P, dvt, dv_finite, x);
  }

  void finish(State& it) {
    const Scorer<T>& x = it.s;
    if (!c.last) {
      write(it, it.ot, d.do_), write(it, it.at, d.o);
      for (int64_t w = 0; w < x.rows; ++w) {
        double* row = c.rows + 3 * row_at(x, w);
        row[0] = it.m[w], row[1] = it.weight[w], row[2] = it.r[w];
      }
      return;
    }
    T share[TILE_Q] = {}, above[TILE_Q] = {};
    for (int64_t w = 0; w < x.rows; ++w) {
      const double m = it.m[w], sink = sink_of(it, w), total = it.weight[w] + sink;
      const double part = total == 0 ? 0 : 1 / total, dsink = d.sinks ? d.sinks[x.head(w)] : 0;
      const double r = (it.r[w] + sink * (dsink - m)) * part;
      static_cast<T*>(d.lse)[row_at(x, w)] = static_cast<T>(m + r);
      share[w] = static_cast<T>(part), above[w] = static_cast<T>(r);
    }
    load_queries(c.o, x, x.width, c.Dv, rows, ldv);
    transpose(x.width, ldv, rows, ldv, it.ot, x.width);
    for (int64_t i = 0; i < ldv * x.width; i += x.width)
      for (int64_t w = 0; w < x.width; w += N)
        store(it.at + i + w, load(it.at + i + w) * load(share + w) - load(above + w) * load(it.ot + i + w));
    write(it, it.at, d.o);
  }
  void write(const State& it, const T* from, const Array& a) {
    transpose(ldv, it.s.width, from, it.s.width, rows, ldv);
    for (int64_t w = 0; w < it.s.rows; ++w) write_row(a, it.s.at(a, w), c.Dv, rows + w * ldv);
  }

  static int64_t wanted(const Call& c) {
    const int64_t state = TILE_Q * 2 * (c.D + c.Dv) * static_cast<int64_t>(sizeof(T));
    return max64(4, min64(16, (1 << 20) / state));
  }
  static int64_t tasks(const Call& c) { return Grouping(c, wanted(c)).tasks(c); }
  static int64_t scratch_bytes(const Call& c) {
    Bump bump{nullptr};
    const Grouping g(c, wanted(c));
    Tangent measure(c, bump, g.heads * g.tiles);
    return bump.used;
  }
  static void task(const Call& c, int64_t task, char* scratch) {
    const Grouping g(c, wanted(c));
    const TaskIndex x = g.at(c, task);
    Bump bump{scratch};
    Tangent f(c, bump, g.heads * g.tiles);
    f.keys = keys_of(*c.part, x.cls);
    const int64_t n = g.start_all(c, x, f);
    const auto load = [&](const Array& a, int64_t first, int64_t count, int64_t width) {
      return Span{c, a, x.b, x.hk, f.keys, first, count, width};
    };
    walk(
        f.keys.total, false, f.items, n,
        [&](int64_t first, int64_t count) {
          S::load_deep(load(c.k, first, count, c.D), f.kt, false);
          if (f.d.k.data) S::load_deep(load(f.d.k, first, count, c.D), f.dkt, false);
          if (f.moved) f.v_finite = S::load_across(load(c.v, first, count, c.Dv), f.vt, f.ldv);
          if (f.d.v.data) f.dv_finite = S::load_across(load(f.d.v, first, count, c.Dv), f.dvt, f.ldv);
        },
        [&](State& it, int64_t first, int64_t count, int kind, int64_t at) {
          f.step(it, {first, count, kind == PARTIAL, at});
        });
    for (int64_t i = 0; i < n; ++i) f.finish(f.items[i]);
  }
};

}  // namespace saccade::SACCADE_ISA
