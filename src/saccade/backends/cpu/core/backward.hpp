// Backward in one pass of five products, P recomputed from lse. A task owns one key head (or a share of its query tiles)
// and with it the sums of dK and dV; dQ is written once per query tile.
//   P = 2^(S - lse)   dP = V dO^T   dS = P (dP - delta)   dV += P dO   dK += dS Q scale   dQ^T += K^T dS, scale last
#pragma once
#include "items.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
struct Backward {
  static constexpr int N = lanes<T>;
  using K = Plain<T>;

  struct State : Item<T> {
    T *qt, *dot, *dqt;  // [width][TILE_Q]
    T *q, *dout;        // [TILE_Q][width], q times scale
    T lse[TILE_Q], delta[TILE_Q];
    bool finite;
    int64_t g;
    double slope;
  };

  const Call& c;
  int64_t ld, ldv;
  T *kt, *vt, *s, *dp, *cap, *p, *rows;
  State* items;
  TileMask<T>* masks;
  bool keys_finite = true;
  T *dk = nullptr, *dv = nullptr;

  Backward(const Call& call, Bump& bump, int64_t n_items)
      : c(call), ld(round_up(call.D, N)), ldv(round_up(call.Dv, N)) {
    kt = bump.take<T>(TILE_K * c.D);
    vt = bump.take<T>(TILE_K * c.Dv);
    s = bump.take<T>(TILE_K * TILE_Q);
    dp = bump.take<T>(TILE_K * TILE_Q);
    cap = bump.take<T>(TILE_K * TILE_Q);
    p = bump.take<T>(TILE_K * TILE_Q);
    rows = bump.take<T>(TILE_Q * max64(ld, ldv));
    items = bump.take<State>(n_items);
    masks = bump.take<TileMask<T>>(n_items);
    T* tiles = bump.take<T>(n_items * TILE_Q * (3 * ld + 2 * ldv));
    if (!bump.base) return;
    for (int64_t i = 0; i < n_items; ++i) {
      State& it = items[i];
      it.qt = tiles, it.q = it.qt + TILE_Q * ld, it.dqt = it.q + TILE_Q * ld;
      it.dot = it.dqt + TILE_Q * ld, it.dout = it.dot + TILE_Q * ldv;
      tiles += TILE_Q * (3 * ld + 2 * ldv);
    }
  }

  void start(State& it, int64_t g) {
    const Scorer<T>& x = it.s;
    it.g = g;
    it.slope = 0;
    load_queries(c.q, x.b, x.h, x.t0, x.step, x.rows, x.width, c.D, it.q, ld);
    load_queries(c.do_, x.b, x.h, x.t0, x.step, x.rows, x.width, c.Dv, it.dout, ldv);
    transpose(x.width, ld, it.q, ld, it.qt, TILE_Q);
    transpose(x.width, ldv, it.dout, ldv, it.dot, TILE_Q);
    const T pre = static_cast<T>(c.scale) * (x.plain() ? LOG2E<T> : T(1));
    vec<T> bad = {};
    for (int64_t i = 0; i < x.width * ldv; i += N) bad += load(it.dout + i) * T(0);
    for (int64_t i = 0; i < x.width * ld; i += N) {
      const vec<T> v = load(it.q + i) * static_cast<T>(c.scale);
      bad += v * T(0);
      store(it.q + i, v);
    }
    it.finite = !any(bad != bad);
    for (int64_t i = 0; i < c.D * TILE_Q; i += N) store(it.qt + i, load(it.qt + i) * pre), store(it.dqt + i, vec<T>{});
    for (int64_t r = 0; r < TILE_Q; ++r) {
      const int64_t at = (x.b * c.Tq + x.t0 + x.step * min64(r, x.rows - 1)) * c.Hq + x.h;
      const T lse = static_cast<const T*>(c.lse)[at];
      it.lse[r] = lse == Low<T>::masked ? T(0) : lse * LOG2E<T>;
      it.delta[r] = static_cast<const T*>(c.delta)[at];
    }
  }

  // P in `p` (after dropout), dS before the scale in `s`
  void recompute(State& it, int64_t first, int64_t n, bool partial, int64_t at) {
    mm<K>(n, it.s.width, c.D, it.qt, TILE_Q, kt + at * c.D, c.D, 1, s, TILE_Q, false);
    mm<K>(n, it.s.width, c.Dv, it.dot, TILE_Q, vt + at * c.Dv, c.Dv, 1, dp, TILE_Q, false);
    it.s.scores(s, first, n, partial, c.softcap != 0 ? cap : nullptr);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < it.s.width; w += N) {
        const vec<T> e = exp2v(load(s + r * TILE_Q + w) - load(it.lse + w));
        store(s + r * TILE_Q + w, e);
        store(p + r * TILE_Q + w, e);
      }
    it.s.dropout(p, dp, first, n);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < it.s.width; w += N) {
        T* x = s + r * TILE_Q + w;
        const vec<T> e = load(x);
        const vec<T> ds = e * (load(dp + r * TILE_Q + w) - load(it.delta + w));
        store(x, e == T(0) ? vec<T>{} : ds);
      }
  }

  // the softcap's slope, and the sum that the ALiBi slope wants
  void dscores(State& it, int64_t first, int64_t n) {
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < it.s.width; w += N) {
        T* x = s + r * TILE_Q + w;
        vec<T> ds = load(x);
        if (c.dslopes) {
          const vec<T> d = it.s.distance(w, it.s.key(first + r));
          for (int l = 0; l < N; ++l)
            if (w + l < it.s.rows) it.slope -= static_cast<double>(ds[l]) * static_cast<double>(d[l]);
        }
        if (c.softcap != 0) ds *= load(cap + r * TILE_Q + w);
        store(x, ds);
      }
  }

  void step(State& it, int64_t first, int64_t n, bool partial, int64_t at) {
    recompute(it, first, n, partial, at);
    if (c.softcap != 0 || c.dslopes) dscores(it, first, n);
    const bool careful = partial || it.s.masked_by_bias();
    const int64_t j = it.s.key(first), step = it.s.step;
    if (it.finite || !careful) {
      mm<K>(n, ldv, it.s.rows, it.dout, ldv, p, TILE_Q, 1, dv + j * ldv, step * ldv, true);
      mm<K>(n, ld, it.s.rows, it.q, ld, s, TILE_Q, 1, dk + j * ld, step * ld, true);
    } else {
      keys_one_by_one(it, first, n, partial);
    }
    if (keys_finite || !careful)
      mm<K>(c.D, it.s.width, n, s, TILE_Q, kt + at * c.D, 1, c.D, it.dqt, TILE_Q, true);
    else
      queries_one_by_one(it, first, n, partial, at);
  }

  // operands that hold a NaN or an infinity reach only what the mask lets them reach
  void keys_one_by_one(State& it, int64_t first, int64_t n, bool partial) {
    for (int64_t r = 0; r < n; ++r) {
      const int64_t j = it.s.key(first + r);
      for (int64_t w = 0; w < it.s.rows; ++w) {
        if (!it.s.allowed(static_cast<int>(w / N * N), j, partial)[w % N]) continue;
        const T weight = p[r * TILE_Q + w], ds = s[r * TILE_Q + w];
        for (int64_t d = 0; d < c.Dv; ++d) dv[j * ldv + d] += weight * it.dout[w * ldv + d];
        for (int64_t d = 0; d < c.D; ++d) dk[j * ld + d] += ds * it.q[w * ld + d];
      }
    }
  }
  void queries_one_by_one(State& it, int64_t first, int64_t n, bool partial, int64_t at) {
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < it.s.width; w += N) {
        const ivec<T> ok = it.s.allowed(static_cast<int>(w), it.s.key(first + r), partial);
        const vec<T> ds = load(s + r * TILE_Q + w);
        for (int64_t d = 0; d < c.D; ++d) {
          T* q = it.dqt + d * TILE_Q + w;
          store(q, load(q) + (ok ? ds * kt[(at + r) * c.D + d] : vec<T>{}));
        }
      }
  }

  void finish(State& it, double* slopes) {
    const Scorer<T>& x = it.s;
    const T scale = static_cast<T>(c.scale);
    for (int64_t i = c.D * TILE_Q; i < ld * TILE_Q; ++i) it.dqt[i] = T(0);
    for (int64_t i = 0; i < ld * TILE_Q; i += N) store(it.dqt + i, load(it.dqt + i) * scale);
    transpose(ld, x.width, it.dqt, TILE_Q, rows, ld);
    for (int64_t r = 0; r < x.rows; ++r) {
      const int64_t at = x.b * c.dq.stride[0] + (x.t0 + x.step * r) * c.dq.stride[1] + x.h * c.dq.stride[2];
      T* row = rows + r * ld;
      if (c.accumulate)
        for (int64_t d = 0; d < c.D; ++d) row[d] += read1<T>(c.dq, at + d);
      write_row(c.dq, at, c.D, row);
    }
    if (slopes) slopes[it.g] += it.slope;
  }

  void load_tile(const TaskIndex& x, int64_t first, int64_t count) {
    const Part& part = *c.part;
    const int64_t j = part.k_start[x.cls] + part.step * first;
    keys_finite = load_rows(c, c.k, x.b, x.hk, j, part.step, count, c.D, kt, c.D);
    load_rows(c, c.v, x.b, x.hk, j, part.step, count, c.Dv, vt, c.Dv);
  }

  static int64_t wanted() { return 4; }
  static int64_t scratch_bytes(const Call& c) {
    Bump bump{nullptr};
    Backward measure(c, bump, wanted());
    return bump.used;
  }
  // numbers in the sums of one task: dK rows, then dV rows
  static int64_t sums(const Call& c) { return c.Tk * (round_up(c.D, N) + round_up(c.Dv, N)); }

  static void task(const Call& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    Backward f(c, bump, wanted());
    const Part& part = *c.part;
    f.dk = static_cast<T*>(c.partial) + task * sums(c);
    f.dv = f.dk + c.Tk * f.ld;
    const int64_t split = task % c.splits, hk = task / c.splits % c.Hk, b = task / c.splits / c.Hk;
    double* slopes = c.dslopes ? c.dslopes + task * c.G : nullptr;
    const int64_t heads = min64(c.G, wanted()), tiles = wanted() / heads;
    for (int64_t cls = 0; cls < part.classes; ++cls)
      for (int64_t block = split; block * tiles < part.n_tiles; block += c.splits)
        for (int64_t g0 = 0; g0 < c.G; g0 += heads) {
          const TaskIndex x{b, hk, cls, block, 0};
          int64_t n = 0;
          for (int64_t g = g0; g < min64(c.G, g0 + heads); ++g)
            for (int64_t tile = block * tiles; tile < (block + 1) * tiles; ++tile)
              if (f.items[n].place(c, x, g, tile, f.masks + n)) f.start(f.items[n++], g);
          walk(
              c, cls, f.items, n, [&](int64_t first, int64_t count) { f.load_tile(x, first, count); },
              [&](State& it, int64_t first, int64_t count, int kind, int64_t at) {
                f.step(it, first, count, kind == PARTIAL, at);
              });
          for (int64_t i = 0; i < n; ++i) f.finish(f.items[i], slopes);
        }
  }

  // one (batch, key head): the owners' sums in ascending order
  static void finish_keys(const Call& c, int64_t task) {
    const int64_t ld = round_up(c.D, N), ldv = round_up(c.Dv, N), hk = task % c.Hk, b = task / c.Hk;
    T* first = static_cast<T*>(c.partial) + task * c.splits * sums(c);
    for (int64_t j = 0; j < c.Tk; ++j) {
      T *dk = first + j * ld, *dv = first + c.Tk * ld + j * ldv;
      for (int64_t n = 1; n < c.splits; ++n) {
        const T* other = first + n * sums(c);
        for (int64_t d = 0; d < c.D; ++d) dk[d] += other[j * ld + d];
        for (int64_t d = 0; d < c.Dv; ++d) dv[d] += other[c.Tk * ld + j * ldv + d];
      }
      write_row(c.dk, b * c.dk.stride[0] + j * c.dk.stride[1] + hk * c.dk.stride[2], c.D, dk);
      write_row(c.dv, b * c.dv.stride[0] + j * c.dv.stride[1] + hk * c.dv.stride[2], c.Dv, dv);
    }
  }

  // delta = rowsum(do * o) - dlse for one (batch, row)
  static void delta(const Call& c, int64_t task, const void* dlse, void* out, char* scratch) {
    const int64_t b = task / c.Tq, t = task % c.Tq;
    T *x = reinterpret_cast<T*>(scratch), *y = x + round_up(c.Dv, N);
    for (int64_t h = 0; h < c.Hq; ++h) {
      read_row(c.do_, b * c.do_.stride[0] + t * c.do_.stride[1] + h * c.do_.stride[2], c.Dv, x);
      read_row(c.o, b * c.o.stride[0] + t * c.o.stride[1] + h * c.o.stride[2], c.Dv, y);
      T sum = 0;
      for (int64_t d = 0; d < c.Dv; ++d) sum += x[d] * y[d];
      const int64_t at = task * c.Hq + h;
      static_cast<T*>(out)[at] = sum - (dlse ? static_cast<const T*>(dlse)[at] : T(0));
    }
  }
};

}  // namespace saccade::SACCADE_ISA
