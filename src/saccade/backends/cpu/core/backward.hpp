// Backward in one pass of five products; P is recomputed from lse. A task owns one key head (or some of its query
// tiles) and its sums of dK and dV; dQ is written once per query tile.
//   P = 2^(S - lse)   dP = V dO^T - dentropy (S - lse)   dS = P (dP - delta)
//   dV += P dO   dK += dS Q scale   dQ^T += K^T dS, scale last
#pragma once
#include "items.hpp"
#include "key_sums.hpp"
#include "row_sums.hpp"
#include "short_backward.hpp"

namespace saccade::SACCADE_ISA {

template <class K>
struct Backward : RowSums<typename K::sum> {
  using T = typename K::sum;
  using Sums = RowSums<T>;
  using Num = typename K::num;
  using S = Store<K>;
  static constexpr int N = lanes<T>;

  struct State : Item<T> {
    Num *qt, *dot;  // deep, transposed: [depth(D | Dv)][width of the item]
    Num *q, *dout;  // across: [TILE_Q / per][width]
    T* dqt;         // [D][width of the item]
    // lse in log2 units and delta, each in two parts: the last bit of lse shows in P, and delta nearly cancels dP
    T lse[TILE_Q], lse_low[TILE_Q], delta[TILE_Q], delta_low[TILE_Q];
    T reference[TILE_Q], dentropy[TILE_Q];  // of the logarithms of P that the entropy's gradient needs, in log2 units
    bool finite;
    bool one_piece;  // all its keys are in one step, which also refines its rows
    bool refines;    // its rows are refined after a pass over its keys
    int64_t g;
    double slope;
  };

  const Call& c;
  const MatrixRegisters registers;
  int64_t ld, ldv;
  T mul;                                // log2 scores = mul * products, when plain
  Num *kt, *vt, *kt_across, *k_turned;  // of one key tile; the last is for matrix registers
  T *s, *dp, *cap, *p, *logs, *rows, *transposed;
  Num *p_lanes, *s_lanes, *s_across;
  State* items;
  TileMask<T>* masks;
  bool keys_finite = true;
  Keys keys{0, 1, 0};
  Needed<T> needed;  // of the current piece
  T *dk = nullptr, *dv = nullptr;
  double* dgates = nullptr;  // [G, Tk] of this task

  Backward(const Call& call, Bump& bump, int64_t n_items)
      : c(call), registers(c.matrix && bump.base), ld(round_up(c.D, N)), ldv(round_up(c.Dv, N)) {
    constexpr int64_t tile = (TILE_K + 2) * TILE_Q;
    kt = bump.take<Num>(TILE_K * S::depth(c.D));
    vt = bump.take<Num>(TILE_K * S::depth(c.Dv));
    kt_across = S::per == 1 ? kt : bump.take<Num>(TILE_K / S::per * c.D);
    k_turned = c.matrix && c.D % N == 0 ? bump.take<Num>(TILE_K / S::per * c.D) : nullptr;
    s = bump.take<T>(tile), dp = bump.take<T>(tile), cap = bump.take<T>(tile), p = bump.take<T>(tile);
    logs = bump.take<T>(c.dentropy ? tile : 0);
    p_lanes = S::per == 1 ? reinterpret_cast<Num*>(p) : bump.take<Num>(tile);
    s_lanes = S::per == 1 ? reinterpret_cast<Num*>(s) : bump.take<Num>(tile);
    s_across = S::per == 1 ? s_lanes : bump.take<Num>(tile);
    rows = bump.take<T>(TILE_Q * max64(ld, ldv));
    transposed = bump.take<T>(TILE_Q * max64(ld, ldv));
    items = bump.take<State>(n_items);
    masks = bump.take<TileMask<T>>(n_items);
    const int64_t widest = widest_item<T>(c);
    for (int64_t i = 0; i < n_items; ++i) {
      Num* qt = bump.take<Num>(widest * S::depth(ld));
      Num* dot = bump.take<Num>(widest * S::depth(ldv));
      Num* q = bump.take<Num>(widest * ld);
      Num* dout = bump.take<Num>(widest * ldv);
      T* dqt = bump.take<T>(widest * ld);
      if (!bump.base) continue;
      State& it = items[i];
      it.qt = qt, it.dot = dot, it.q = q, it.dout = dout, it.dqt = dqt;
    }
  }

  // rows of q or do: transposed for the scores, and as rows for the key gradients; true when all are finite
  bool load_side(const Array& a, const Scorer<T>& x, int64_t width, int64_t stride, double factor, Num* deep,
                 Num* across) {
    load_queries(a, x, x.width, width, rows, stride);
    S::turn(rows, stride, x.width, width, factor, transposed, deep);
    if constexpr (S::per == 1) __builtin_memcpy(across, rows, static_cast<size_t>(x.rows * stride) * sizeof(T));
    if constexpr (S::per == 2) S::pair_rows(rows, stride, x.rows, stride, across);
    return all_finite(rows, x.rows * stride);
  }

  void start(State& it, int64_t g) {
    const Scorer<T>& x = it.s;
    it.g = g, it.one_piece = false, it.slope = 0;
    const double pre = c.scale * (x.plain() ? LOG2E<double> : 1);
    mul = it.s.scale_by(pre, S::per == 1);
    it.finite = load_side(c.q, x, c.D, ld, pre, it.qt, it.q);
    it.finite &= load_side(c.do_, x, c.Dv, ldv, 1, it.dot, it.dout);
    for (int64_t d = 0; d < ld; ++d)
      for (int64_t w = 0; w < x.width; w += N) store(it.dqt + d * it.s.width + w, vec<T>{});
    for (int64_t r = 0; r < x.width; ++r) {
      if (r < x.rows) set_row(it, r);
      // lanes beyond the tile's rows get weight 0
      if (r >= x.rows) it.lse[r] = -Low<T>::masked, it.lse_low[r] = it.delta[r] = it.delta_low[r] = T(0);
      if (r >= x.rows) it.reference[r] = it.dentropy[r] = T(0);
    }
  }
  static int64_t row_at(const Call& c, const Scorer<T>& x, int64_t r) {
    return (x.b * c.Tq + x.row(r)) * c.Hq + x.head(r);
  }
  void set_row(State& it, int64_t r) {
    const double* row = c.rows + 2 * row_at(c, it.s, r);
    it.lse[r] = static_cast<T>(row[0]), it.lse_low[r] = static_cast<T>(row[0] - static_cast<double>(it.lse[r]));
    it.reference[r] = Sums::reference(c, row_at(c, it.s, r));
    it.dentropy[r] = static_cast<T>(Sums::dentropy(c, row_at(c, it.s, r)) * LN2<double>);
    if (c.lse_lost) it.lse_low[r] += static_cast<T>(c.lse_lost[row_at(c, it.s, r)]);
    it.delta[r] = static_cast<T>(row[1]), it.delta_low[r] = static_cast<T>(row[1] - static_cast<double>(it.delta[r]));
  }

  // P in `s`, P after dropout in `p`, and dP
  void weights(State& it, int64_t first, int64_t n, bool partial, int64_t at) {
    const int64_t dim = S::depth(c.D), dim_v = S::depth(c.Dv), width = it.s.width;
    needed.find(it.s, first, n, partial && S::per == 1);
    // the mask replaces scores that are not computed, and a weight of 0 any dP
    needed.each([&](int64_t w, int64_t columns, const auto& of) {
      const int64_t to = of.begin * width + w, keys = of.end - of.begin;
      product<K>(keys, columns, dim, it.qt + w, width, deep_rows(kt + (at + of.begin) * dim, dim, c.matrix), s + to,
                 width, false, c.chain());
      product<K>(keys, columns, dim_v, it.dot + w, width, deep_rows(vt + (at + of.begin) * dim_v, dim_v, c.matrix),
                 dp + to, width, false, c.chain());
    });
    it.s.scores(s, first, n, partial, c.softcap != 0 ? cap : nullptr);
    const bool careful = partial || it.s.masked_by_bias();
    if (c.dentropy) keep_logs(it, n);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < it.s.width; w += N) {
        // the product has one use, so that compilers fuse it with the difference in tested and untested tiles alike
        const vec<T> x = load(s + r * it.s.width + w);
        vec<T> e = exp2v((x * mul - load(it.lse + w)) - load(it.lse_low + w));
        // a row that may see a NaN has lse NaN; the keys that it must not see still get weight 0
        if (careful) e = x == Low<T>::masked ? vec<T>{} : e;
        store(s + r * it.s.width + w, e);
        store(p + r * it.s.width + w, e);
      }
    it.s.dropout(p, dp, first, n);
    // the entropy is that of weights before dropout
    for (int64_t i = 0; c.dentropy && i < n * it.s.width; i += N)
      store(dp + i, load(s + i) == T(0) ? load(dp + i) : load(dp + i) - load(logs + i));
  }

  // the entropy's gradient times log P, for scores in `s`
  void keep_logs(const State& it, int64_t n) {
    for (int64_t r = 0; r < n * it.s.width; r += it.s.width)
      for (int64_t w = 0; w < it.s.width; w += N)
        store(logs + r + w, (load(s + r + w) * mul - load(it.reference + w)) * load(it.dentropy + w));
  }

  // P in `p` (after dropout), dS before the scale in `s`
  void recompute(State& it, int64_t first, int64_t n, bool partial, int64_t at) {
    weights(it, first, n, partial, at);
    if (it.one_piece) refine_piece(it, n);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < it.s.width; w += N) {
        T* x = s + r * it.s.width + w;
        const vec<T> e = load(x);
        const vec<T> ds = e * ((load(dp + r * it.s.width + w) - load(it.delta + w)) - load(it.delta_low + w));
        store(x, e == T(0) ? vec<T>{} : ds);
      }
  }

  // multiplies by the softcap's derivative, and sums the gradient of the ALiBi slope
  void dscores(State& it, int64_t first, int64_t n) {
    for (int64_t r = 0; r < n; ++r) {
      double slope = 0;
      for (int64_t w = 0; w < it.s.width; w += N) {
        T* x = s + r * it.s.width + w;
        vec<T> ds = load(x);
        if (c.dslopes) {
          const vec<T> d = it.s.distance(w, it.s.key(first + r));
          for (int l = 0; l < N; ++l)
            if (w + l < it.s.rows) slope -= static_cast<double>(ds[l]) * static_cast<double>(d[l]);
        }
        // the slope of a masked pair may be NaN
        if (c.softcap != 0) ds = ds == T(0) ? ds : ds * load(cap + r * it.s.width + w);
        store(x, ds);
      }
      it.slope += slope;
    }
  }

  // adds dS of rows, and subtracts dS of keys, at their positions
  void gate_sums(const State& it, int64_t first, int64_t n) {
    double* sums = dgates + it.g * c.Tk;
    double rows[TILE_Q] = {};
    for (int64_t r = 0; r < n; ++r) {
      double keys = 0;
      for (int64_t w = 0; w < it.s.rows; ++w) {
        const double ds = static_cast<double>(s[r * it.s.width + w]);
        rows[w] += ds, keys += ds;
      }
      sums[it.s.key(first + r)] -= keys;
    }
    const int64_t position = it.s.t0 + it.s.offset();
    for (int64_t w = 0; w < it.s.rows; ++w)
      if (position + it.s.step * w >= 0) sums[position + it.s.step * w] += rows[w];
  }

  // adds P and P dP of a piece to the sums of its rows
  void add_sums(State& it, int64_t n) {
    double sum[2][TILE_Q];
    for (int64_t w = 0; w < it.s.width; ++w) sum[0][w] = sum[1][w] = 0;
    needed.each([&](int64_t first, int64_t columns, const auto& of) {
      for (int64_t r = of.begin * it.s.width; r < of.end * it.s.width; r += it.s.width)
        for (int64_t w = first; w < first + columns; ++w) {
          const double e = static_cast<double>(s[r + w]);
          sum[0][w] += e, sum[1][w] += e == 0 ? 0 : e * static_cast<double>(dp[r + w]);
        }
    });
    for (int64_t w = 0; w < it.s.rows; ++w)
      for (int i = 0; i < 2; ++i) c.sums[2 * row_at(c, it.s, w) + i] += sum[i][w];
  }

  void refine_piece(State& it, int64_t n) {
    add_sums(it, n);
    T factor[TILE_Q];
    for (int64_t w = 0; w < it.s.width; ++w) factor[w] = T(1);
    for (int64_t w = 0; w < it.s.rows; ++w) {
      factor[w] = static_cast<T>(Sums::refine(c, row_at(c, it.s, w)));
      set_row(it, w);
    }
    for (int64_t r = 0; r < n * it.s.width; r += it.s.width)
      for (int64_t w = 0; w < it.s.width; w += N) {
        store(s + r + w, load(s + r + w) * load(factor + w));
        store(p + r + w, load(p + r + w) * load(factor + w));
      }
  }

  bool refines_any(const State& it) const {
    for (int64_t r = 0; r < it.s.rows; ++r)
      if (c.refines(row_at(c, it.s, r))) return true;
    return false;
  }

  // whether gradients can be computed now; false if further parts add to the sums first
  bool refined(const TaskIndex& x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      State& it = items[i];
      it.one_piece = !c.only_sums && it.seg < it.seg_end &&
                     it.piece(it.seg[0], round_up(it.seg[0] + 1, TILE_K), c.range > 0) + 3 == it.seg_end &&
                     it.seg[0] / TILE_K == (it.seg_end[-2] - 1) / TILE_K;
      it.refines = !it.one_piece && refines_any(it);
      if (!it.refines) it.seg = it.seg_end;
    }
    walk(
        keys.total, c.range > 0, items, n, [&](int64_t first, int64_t count) { load_tile(x, first, count); },
        [&](State& it, int64_t first, int64_t count, int kind, int64_t at) {
          weights(it, first, count, kind == PARTIAL, at);
          add_sums(it, count);
        });
    for (int64_t i = 0; i < n; ++i) {
      State& it = items[i];
      it.seg = it.first_seg;
      for (int64_t r = 0; r < it.s.rows && it.refines && !c.only_sums; ++r) {
        const int64_t at = row_at(c, it.s, r);
        if (!c.refines(at)) continue;
        Sums::refine(c, at);
        set_row(it, r);
      }
    }
    return !c.only_sums;
  }

  void step(State& it, int64_t first, int64_t n, bool partial, int64_t at) {
    recompute(it, first, n, partial, at);
    if (dgates) gate_sums(it, first, n);
    if (c.softcap != 0 || c.dslopes) dscores(it, first, n);
    const bool careful = partial || it.s.masked_by_bias();
    if (it.finite || !careful) {
      if constexpr (S::per == 2) S::pair_lanes(p, n * it.s.width, p_lanes), S::pair_lanes(s, n * it.s.width, s_lanes);
      for (int64_t r = 0, run; r < n; r += run) {
        run = keys.run(first + r, min64(n - r, needed.columns < it.s.width ? Needed<T>::PAIR : n));
        key_products(it, first, r, run);
      }
    } else {
      keys_one_by_one(it, first, n, partial);
    }
    if (keys_finite || !(careful || S::per == 2))
      query_product(it, n, at);
    else
      queries_one_by_one(it, first, n, partial, at);
  }

  // dK and dV of n neighbouring keys from r on
  void key_products(State& it, int64_t first, int64_t r, int64_t n) {
    const int64_t j = keys.at(first + r) - c.stage.key, step = keys.step, row = it.s.width / S::per;
    const auto [top, bottom] = needed.rows(r, r + n);
    const int64_t stop = (min64(bottom, it.s.rows) + S::per - 1) / S::per;
    // sums of rows have the pieces that they would have from the first row on
    for (int64_t w = top / S::per, end; w < stop; w = end) {
      end = w % (CHAIN / 2) ? min64(stop, round_up(w, CHAIN / 2)) : stop;
      const int64_t at = r * row + w;
      product<K>(n, ldv, end - w, it.dout + w * ldv, ldv, deep_rows(p_lanes + at, row, c.matrix), dv + j * ldv,
                 step * ldv, true, CHAIN / 2);
      product<K>(n, ld, end - w, it.q + w * ld, ld, deep_rows(s_lanes + at, row, c.matrix), dk + j * ld, step * ld,
                 true, CHAIN / 2);
    }
  }

  void query_product(State& it, int64_t n, int64_t at) {
    if constexpr (S::per == 1) {
      needed.each([&](int64_t w, int64_t columns, const auto& of) {
        mm<K>(c.D, columns, of.end - of.begin, s + of.begin * it.s.width + w, it.s.width, kt + (at + of.begin) * c.D, 1,
              c.D, it.dqt + w, it.s.width, true);
      });
    } else {
      // pairs of keys start at even positions: an odd first key is paired with a zero before it
      const int64_t odd = at & 1;
      if (odd) {
        for (int64_t w = 0; w < it.s.width; w += N)
          store(reinterpret_cast<T*>(s_across + w), pack_pairs(vec<T>{}, load(s + w)));
        if (n > 1) S::pair_rows(s + it.s.width, it.s.width, n - 1, it.s.width, s_across + it.s.width);
      } else {
        S::pair_rows(s, it.s.width, n, it.s.width, s_across);
      }
      const LeftRows<Num> k_tile{kt_across + at / 2 * c.D, 1, c.D, k_turned ? k_turned + at / 2 : nullptr, TILE_K / 2};
      product<K>(c.D, it.s.width, (n + odd + 1) / 2, s_across, it.s.width, k_tile, it.dqt, it.s.width, true);
    }
  }

  // operands that contain a NaN or an infinity reach only the rows or keys that the mask allows
  void keys_one_by_one(State& it, int64_t first, int64_t n, bool partial) {
    for (int64_t r = 0; r < n; ++r) {
      const int64_t j = it.s.key(first + r);
      for (int64_t w = 0; w < it.s.rows; ++w) {
        if (!it.s.allowed(static_cast<int>(w / N * N), j, partial)[w % N]) continue;
        const T weight = p[r * it.s.width + w], ds = s[r * it.s.width + w];
        T *dk_row = dk + (j - c.stage.key) * ld, *dv_row = dv + (j - c.stage.key) * ldv;
        for (int64_t d = 0; d < c.Dv; ++d) dv_row[d] += weight * S::across(it.dout, ldv, w, d);
        for (int64_t d = 0; d < c.D; ++d) dk_row[d] += ds * S::across(it.q, ld, w, d);
      }
    }
  }
  void queries_one_by_one(State& it, int64_t first, int64_t n, bool partial, int64_t at) {
    for (int64_t r = 0; r < n; ++r)
      for (int64_t w = 0; w < it.s.width; w += N) {
        const ivec<T> ok = it.s.allowed(static_cast<int>(w), it.s.key(first + r), partial);
        const vec<T> ds = load(s + r * it.s.width + w);
        for (int64_t d = 0; d < c.D; ++d) {
          T* q = it.dqt + d * it.s.width + w;
          store(q, load(q) + (ok ? ds * S::across(kt_across, c.D, at + r, d) : vec<T>{}));
        }
      }
  }

  void finish(State& it, double* slopes) {
    const Scorer<T>& x = it.s;
    const T scale = static_cast<T>(c.scale);
    for (int64_t i = 0; i < ld * x.width; i += N) store(it.dqt + i, load(it.dqt + i) * scale);
    transpose(ld, x.width, it.dqt, x.width, rows, ld);
    for (int64_t r = 0; r < x.rows; ++r) {
      const int64_t at = x.at(c.dq, r);
      T* row = rows + r * ld;
      if (c.accumulate)
        for (int64_t d = 0; d < c.D; ++d) row[d] += read1<T>(c.dq, at + d);
      write_row(c.dq, at, c.D, row);
    }
    if (slopes) slopes[it.g] += it.slope;
  }

  void load_tile(const TaskIndex& x, int64_t first, int64_t count) {
    const Span k{c, c.k, x.b, x.hk, keys, first, count, c.D}, v{c, c.v, x.b, x.hk, keys, first, count, c.Dv};
    keys_finite = S::load_deep(k, kt, true);
    if constexpr (S::per == 2) keys_finite = S::load_across(k, kt_across, c.D);
    if (k_turned) S::turn_tile(kt_across, c.D, count, k_turned, TILE_K / S::per);
    S::load_deep(v, vt, false);
  }

  // the gradients of n placed tiles
  void gradients(const TaskIndex& x, int64_t n, double* slopes) {
    if (c.sums && !refined(x, n)) return;
    walk(
        keys.total, c.range > 0, items, n, [&](int64_t first, int64_t count) { load_tile(x, first, count); },
        [&](State& it, int64_t first, int64_t count, int kind, int64_t at) {
          step(it, first, count, kind == PARTIAL, at);
        });
    for (int64_t i = 0; i < n; ++i) finish(items[i], slopes);
  }

  // the groups of rows with selected keys that one owner of a key head computes
  void of_selected(int64_t b, int64_t hk, int64_t split, Bump& bump) {
    const int64_t each = groups_of(c);
    Selected selected(c, bump, each);
    for (int64_t first = split * each; first < c.selection.groups; first += c.splits * each) {
      TaskIndex x{b, hk, 0, first, 0};
      selected.place(c, x, each, items, wanted(c), masks, [&](int64_t n) {
        keys = selected.keys;
        for (int64_t i = 0; i < n; ++i) start(items[i], 0);
        gradients(x, n, nullptr);
      });
    }
  }

  static int64_t groups_of(const Call& c) {
    return Selected::groups_of<T>(c, 3 * c.D + 2 * c.Dv, c.selection.groups / (4 * c.splits));
  }
  static int64_t wanted(const Call& c) { return c.selection.lists ? max64(4, groups_of(c)) : 4; }
  static int64_t scratch_bytes(const Call& c) {
    Bump bump{nullptr};
    Backward measure(c, bump, wanted(c));
    if (c.selection.lists) Selected(c, bump, groups_of(c));
    return bump.used;
  }

  static void task(const Call& c, int64_t task, char* scratch) {
    const Part& part = *c.part;
    const int64_t split = task % c.splits, hk = task / c.splits % c.Hk, b = task / c.splits / c.Hk;
    const int64_t ld = round_up(c.D, N), ldv = round_up(c.Dv, N);
    T* const dk = static_cast<T*>(c.partial) + (task - c.first * c.splits) * KeySums<T>::size(c);
    T* const dv = dk + c.sum_keys * ld;
    const auto start_sums = [&] { KeySums<T>::start(c, dk, ld), KeySums<T>::start(c, dv, ldv); };
    if (!c.accumulate) start_sums();
    if (short_gradients<T>(c)) {
      if (short_key_head<T>(c, b, hk, dk, dv)) return;
      start_sums();
      for (int64_t t = 0; t < c.Tq; ++t)
        for (int64_t h = hk * c.G; h < (hk + 1) * c.G; ++h) Sums::row(c, (b * c.Tq + t) * c.Hq + h);
    }
    Bump bump{scratch};
    Backward f(c, bump, wanted(c));
    f.dk = dk, f.dv = dv;
    f.dgates = c.dgates ? c.dgates + task * c.G * c.Tk : nullptr;
    double* slopes = c.dslopes ? c.dslopes + task * c.G : nullptr;
    if (c.selection.lists) return f.of_selected(b, hk, split, bump);
    const int64_t heads = min64(c.G, wanted(c)), tiles = wanted(c) / heads;
    for (int64_t cls = 0; cls < part.classes; ++cls)
      for (int64_t block = split; block * tiles < min64(part.n_tiles, c.stage.tile_end); block += c.splits)
        for (int64_t g0 = 0; g0 < c.G; g0 += heads) {
          if (block * tiles < c.stage.tile || (part.entry && part.entry[cls] != b)) continue;
          const TaskIndex x{b, hk, cls, block, 0};
          f.keys = keys_of(part, cls);
          int64_t n = 0;
          for (int64_t g = g0; g < min64(c.G, g0 + heads); ++g)
            for (int64_t tile = block * tiles; tile < (block + 1) * tiles; ++tile)
              if (f.items[n].place(c, x, g, tile, f.masks + n)) f.start(f.items[n++], g);
          f.gradients(x, n, slopes);
        }
  }
};

}  // namespace saccade::SACCADE_ISA
