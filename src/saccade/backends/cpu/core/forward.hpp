// Forward: online softmax over key tiles (Milakov and Gimelshein, 2018), vectors along queries.
//   S = K Q^T   m' = max(m, S)   P = 2^(S - m')   l = l 2^(m - m') + sum P   O^T = O^T 2^(m - m') + V^T P   o = O / l
#pragma once
#include "late.hpp"
#include "short.hpp"

namespace saccade::SACCADE_ISA {

// the sum of two partial results x and y with factors: one expression, since compilers contract it to fused operations
template <class T>
SACCADE_INLINE vec<T> folded(vec<T> x, vec<T> of_x, vec<T> y, vec<T> of_y) {
  const vec<T> second = y * of_y;
  return x * of_x + second;
}

template <class K>
struct Forward {
  using T = typename K::sum;
  using Num = typename K::num;
  static constexpr int N = lanes<T>;

  struct State : Item<T> {
    Num* qt;  // [depth(D)][width of the item]
    T* ot;    // [Dv rounded up][width of the item]
    T m[TILE_Q], l[TILE_Q];
    T u[TILE_Q];      // sum of P (S - m), in log2 units, for the entropy
    T least[TILE_Q];  // where maxima start
    // of all ranges of keys before the current one, where results are merged from fixed ranges
    T* whole;  // like ot
    T whole_m[TILE_Q], whole_l[TILE_Q];
    int64_t range;
    LateWeights<Num> late;
  };

  const Call& c;
  const MatrixRegisters registers;
  int64_t ld, ldv;  // row lengths rounded up to vectors
  T mul;            // scores = mul * products; in log2 units when plain
  Num *kt, *vt, *p;
  Num* v_loaded;  // the value tile before its numbers that are not finite were replaced by 0
  Late<K> late;
  T *s, *rows, *transposed;
  State* items;
  TileMask<T>* masks;
  const T slack;  // how far scores may exceed the maximum that their sums assume, in log2 units
  bool values_finite = true;
  const Num* k_rows = nullptr;  // of the key tile, k_step apart
  int64_t k_step = 0;
  Keys keys{0, 1, 0};
  Needed<T> needed;

  Forward(const Call& call, Bump& bump, int64_t n_items)
      : c(call),
        registers(c.matrix && bump.base),
        ld(round_up(c.D, N)),
        ldv(round_up(c.Dv, N)),
        slack(c.matrix && !c.max ? T(8) : T(0)) {
    using S = Store<K>;
    kt = bump.take<Num>(TILE_K * S::depth(c.D));
    vt = bump.take<Num>((TILE_K / S::per + 1) * ldv);
    v_loaded = bump.take<Num>((TILE_K / S::per + 1) * ldv);
    late.values = bump.take<Num>(c.matrix ? Late<K>::ALL * ldv : 0), late.ldv = ldv;
    s = bump.take<T>((TILE_K + 2) * TILE_Q);
    p = S::per == 1 ? reinterpret_cast<Num*>(s) : bump.take<Num>((TILE_K / S::per + 1) * TILE_Q);
    rows = bump.take<T>(TILE_Q * max64(ld, ldv));
    transposed = bump.take<T>(TILE_Q * max64(ld, ldv));
    items = bump.take<State>(n_items);
    masks = bump.take<TileMask<T>>(n_items);
    const int64_t widest = widest_item<T>(c);
    Num* qt = bump.take<Num>(n_items * S::depth(ld) * widest);
    T* ot = bump.take<T>(n_items * ldv * widest);
    T* whole = bump.take<T>(c.range ? n_items * ldv * widest : 0);
    Num* weights = bump.take<Num>(c.matrix ? n_items * Late<K>::ALL * widest : 0);
    if (!bump.base) return;
    for (int64_t i = 0; i < n_items; ++i) {
      items[i].whole = whole + i * ldv * widest;
      items[i].late = {weights + i * Late<K>::ALL * widest, 0, 0};
      items[i].qt = qt + i * S::depth(ld) * widest;
      items[i].ot = ot + i * ldv * widest;
    }
  }

  void start(State& it) {
    const Scorer<T>& x = it.s;
    const double pre = c.scale * (x.plain() ? LOG2E<double> : 1);
    mul = it.s.scale_by(pre, Store<K>::per == 1);
    load_queries(c.q, x, x.width, c.D, rows, ld);
    Store<K>::turn(rows, ld, x.width, c.D, pre, transposed, it.qt);
    for (int64_t w = 0; w < it.s.width; ++w) it.least[w] = Low<T>::start;
    start_sums(it);
  }

  void start_sums(State& it) {
    for (int64_t i = 0; i < ldv * it.s.width; i += N) store(it.ot + i, vec<T>{});
    for (int64_t w = 0; w < it.s.width; ++w) it.m[w] = it.least[w], it.l[w] = it.u[w] = T(0);
    if (!c.range) return;
    it.range = 0;
    for (int64_t i = 0; i < ldv * it.s.width; i += N) store(it.whole + i, vec<T>{});
    for (int64_t w = 0; w < it.s.width; ++w) it.whole_m[w] = it.least[w], it.whole_l[w] = T(0);
  }

  // Merges the sums of a range with those of all ranges before it, and starts the next one. Merging an empty range, or
  // with no range before it, changes no bit, so a row may share its tile with rows that see other ranges.
  void fold(State& it) {
    for (int64_t w = 0; w < it.s.width; w += N) {
      const vec<T> before = load(it.whole_m + w), m = load(it.m + w), top = vmax<T>(before, m);
      const vec<T> of_whole = exp2v(before - top), of_range = exp2v(m - top);
      store(it.whole_m + w, top);
      store(it.whole_l + w, folded<T>(load(it.whole_l + w), of_whole, load(it.l + w), of_range));
      store(it.l + w, vec<T>{});
      store(it.m + w, load(it.least + w));
      for (int64_t d = 0; d < c.Dv; ++d) {
        T *whole = it.whole + d * it.s.width + w, *o = it.ot + d * it.s.width + w;
        store(whole, folded<T>(load(whole), of_whole, load(o), of_range));
        store(o, vec<T>{});
      }
    }
  }

  void step(State& it, int64_t first, int64_t n, bool partial, int64_t at) {
    // pairs of bf16 must start at an even key: an odd start includes the key before it, with weight zero
    const int64_t odd = Store<K>::per == 2 ? at & 1 : 0, width = it.s.width;
    if (c.range && first / c.range != it.range) fold(it), it.range = first / c.range;
    T* scores = s + odd * width;
    needed.find(it.s, first, n, partial && Store<K>::per == 1);
    needed.each([&](int64_t w, int64_t columns, const auto& of) {
      product<K>(of.end - of.begin, columns, Store<K>::depth(c.D), it.qt + w, width,
                 deep_rows(k_rows + (at + of.begin) * k_step, k_step, c.matrix), scores + of.begin * width + w, width,
                 false, c.chain());
    });
    it.s.scores(scores, first, n, partial, nullptr);
    c.entropy ? softmax<true>(it, scores) : softmax<false>(it, scores);
    it.s.dropout(scores, nullptr, first, n);
    if (!values_finite) add_infinite_values(it, scores, first, n, partial, at);
    const int64_t steps = Store<K>::depth(n + odd), from = (at - odd) / Store<K>::per;
    if constexpr (Store<K>::per == 2) {
      if (odd)
        for (int w = 0; w < width; w += N) store(s + w, vec<T>{});
      const bool whole = c.matrix && n == TILE_K;
      Store<K>::pair_rows(s, width, n + odd, width, whole ? late.weights(it.late, width, true) : p);
      if (c.matrix && !whole) late.add(it.late, width, p, steps, from);
      if (c.matrix) return;
    }
    needed.each([&](int64_t w, int64_t columns, const auto& of) {
      const int64_t end = Store<K>::per == 1 ? of.end : steps;
      mm<K>(c.Dv, columns, end - of.begin, p + of.begin * width + w, width, vt + (from + of.begin) * ldv, 1, ldv,
            it.ot + w, width, true);
    });
  }

  template <int NV, bool ENTROPY>
  void softmax_columns(State& it, T* scores, int64_t w, ivec<T>& moved) {
    const auto [begin, end] = needed.of[w / Needed<T>::PAIR];
    vec<T> mx[NV], sum[NV], fix[NV], logs[NV], rise[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) mx[v] = splat(Low<T>::masked), sum[v] = logs[v] = vec<T>{};
    for (int64_t r = begin; r < end; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) mx[v] = vmax<T>(mx[v], load(scores + r * it.s.width + w + v * N));
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const vec<T> old = load(it.m + w + v * N);
      mx[v] = vmax<T>(mx[v] * mul, old);
      // sums whose maximum rises by little stay as they are: weights are at most 2^8, and few steps rescale the sums
      if constexpr (Store<K>::per == 2 && !ENTROPY) mx[v] = mx[v] > old + slack ? mx[v] : old;
      fix[v] = exp2v(old - mx[v]);
      if constexpr (ENTROPY) rise[v] = finite_log<T>(old - mx[v]);
      store(it.m + w + v * N, mx[v]);
    }
    for (int64_t r = begin; r < end; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        T* x = scores + r * it.s.width + w + v * N;
        const vec<T> log = load(x) * mul - mx[v], e = exp2v(log);
        sum[v] += e;
        if constexpr (ENTROPY) logs[v] += e * finite_log<T>(log);
        store(x, e);
      }
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      T* l = it.l + w + v * N;
      T* u = it.u + w + v * N;
      if constexpr (ENTROPY) store(u, (load(u) + load(l) * rise[v]) * fix[v] + logs[v]);
      store(l, load(l) * fix[v] + sum[v]);
      store(transposed + w + v * N, fix[v]);
      moved |= fix[v] != T(1);
    }
  }

  // replaces scores by weights, and rescales the accumulator where the maximum rose
  template <bool ENTROPY>
  void softmax(State& it, T* scores) {
    ivec<T> moved = {};
    int64_t w = 0;
    for (; w + 2 * N <= it.s.width; w += 2 * N) softmax_columns<2, ENTROPY>(it, scores, w, moved);
    for (; w < it.s.width; w += N) softmax_columns<1, ENTROPY>(it, scores, w, moved);
    if (!any(moved)) return;
    if constexpr (Store<K>::per == 2) late.multiply(it.late, it.s.width, it.ot);
    for (int64_t d = 0; d < c.Dv; ++d)
      for (w = 0; w < it.s.width; w += N) {
        T* o = it.ot + d * it.s.width + w;
        store(o, load(o) * load(transposed + w));
      }
  }

  // adds the NaN and infinities of a tile, which the product leaves out, to the rows that may see their keys
  void add_infinite_values(State& it, const T* weights, int64_t first, int64_t n, bool partial, int64_t at) {
    if (partial) it.s.prepare();
    for (int64_t r = 0; r < n; ++r)
      for (int64_t d = 0; d < c.Dv; ++d) {
        const T value = Store<K>::across(v_loaded, ldv, at + r, d);
        if (value * 0 == 0) continue;
        for (int64_t w = 0; w < it.s.width; w += N) {
          T* o = it.ot + d * it.s.width + w;
          const ivec<T> ok = it.s.allowed(static_cast<int>(w), it.s.key(first + r), partial);
          const vec<T> add = load(weights + r * it.s.width + w) * value;
          store(o, load(o) + (ok ? add : vec<T>{}));
        }
      }
  }

  bool load_values(const Span& span) {
    const bool finite = Store<K>::load_across(span, vt, ldv);
    if (!finite) {
      const int64_t numbers = (span.n + Store<K>::per - 1) / Store<K>::per * ldv;
      __builtin_memcpy(v_loaded, vt, static_cast<size_t>(numbers) * sizeof(Num));
      Store<K>::drop_infinite(vt, numbers);
    }
    if constexpr (Store<K>::per == 2)
      if (c.matrix) late.load(vt, span.n);
    return finite;
  }

  // keys of a list that only one tile of queries reads stay where they are
  void load_keys(const Span& span, bool once) {
    const Num* there = nullptr;
    if constexpr (Store<K>::per == 1) there = once && keys.list ? span.template in_place<Num>() : nullptr;
    k_rows = there ? there : kt, k_step = there ? c.k.stride[1] : Store<K>::depth(c.D);
    if (!there) Store<K>::load_deep(span, kt, false);
  }

  void visit(const TaskIndex& x, State* some, int64_t n) {
    walk(
        keys.total, c.range > 0, some, n,
        [&](int64_t first, int64_t count) {
          if (c.matrix && !late.next()) multiply_late(some, n);
          load_keys({c, c.k, x.b, x.hk, keys, first, count, c.D}, n == 1);
          values_finite = load_values({c, c.v, x.b, x.hk, keys, first, count, c.Dv});
        },
        [&](State& it, int64_t first, int64_t count, int kind, int64_t at) {
          step(it, first, count, kind == PARTIAL, at);
        });
    if (c.matrix) multiply_late(some, n);
    for (int64_t i = 0; c.range && i < n; ++i) take_whole(some[i]);
  }

  void multiply_late(State* some, int64_t n) {
    if constexpr (Store<K>::per == 2)
      for (int64_t i = 0; i < n; ++i) late.multiply(some[i].late, some[i].s.width, some[i].ot);
  }

  // all ranges become the sums of the tile
  void take_whole(State& it) {
    fold(it);
    T* sums = it.ot;
    it.ot = it.whole, it.whole = sums;
    for (int64_t w = 0; w < it.s.width; ++w) it.m[w] = it.whole_m[w], it.l[w] = it.whole_l[w];
  }

  static T quotient(double share, T l) { return l == 0 ? T(0) : static_cast<T>(share / static_cast<double>(l)); }

  // multiplies the sums by share / l; out has rows [width][ldv]
  void quotients(State& it, const double* share, T* out) {
    const Scorer<T>& x = it.s;
    T own[TILE_Q];
    for (int64_t r = 0; r < x.width; ++r) own[r] = r >= x.rows ? T(0) : quotient(share[r], it.l[r]);
    for (int64_t d = 0; d < c.Dv; ++d)
      for (int64_t w = 0; w < x.width; w += N)
        store(it.ot + d * x.width + w, (load(it.ot + d * x.width + w) + T(0)) * load(own + w));  // no -0
    transpose(ldv, x.width, it.ot, x.width, out, ldv);
  }

  // Sums of large values may overflow where their mean does not. Such rows are computed again with maxima so large that
  // l is at most 1, and replaced where the new result is finite.
  void again(State& it, const TaskIndex& x, const double* share) {
    const auto lost = [&](int64_t r) { return it.l[r] * 0 == 0 && !all_finite(rows + r * ldv, ldv); };
    uint64_t wanted = 0;
    for (int64_t r = 0; r < it.s.rows; ++r) wanted |= static_cast<uint64_t>(lost(r)) << r;
    if (!wanted) return;
    for (int64_t r = 0; r < it.s.rows; ++r) {
      it.least[r] = it.m[r];
      if (it.l[r] > 1) it.least[r] += static_cast<T>(__builtin_ceil(__builtin_log2(static_cast<double>(it.l[r]))));
    }
    start_sums(it);
    it.seg = it.first_seg;
    visit(x, &it, 1);
    quotients(it, share, transposed);
    for (int64_t r = 0; r < it.s.rows; ++r)
      if (wanted >> r & 1 && all_finite(transposed + r * ldv, ldv))
        __builtin_memcpy(rows + r * ldv, transposed + r * ldv, static_cast<size_t>(ldv) * sizeof(T));
  }

  void add_entropy(int64_t at, int64_t r, const State& it, const Shares& shares) {
    const double l = static_cast<double>(it.l[r]), u = static_cast<double>(it.u[r]);
    T& out = static_cast<T*>(c.entropy)[at];
    double sum = share_entropy(shares.here, LN2<double> * (__builtin_log2(l) - u / l)) + share_entropy(shares.sink, 0);
    if (c.merge) sum += share_entropy(shares.before, static_cast<double>(out));
    out = static_cast<T>(sum);
  }

  void finish(State& it, const TaskIndex& task) {
    const Scorer<T>& x = it.s;
    T *lse = static_cast<T*>(c.lse), *max = static_cast<T*>(c.max);
    double share[TILE_Q];
    T before[TILE_Q];
    for (int64_t r = 0; r < x.rows; ++r) {
      const int64_t at = (x.b * c.Tq + x.row(r)) * c.Hq + x.head(r);
      const double l = static_cast<double>(it.l[r]);
      const double sink = c.last && c.sinks ? c.sinks[x.head(r)] : -__builtin_inf();
      const Shares shares = shares_of(c, it.m[r], it.l[r], sink, c.rows ? c.rows + 2 * at : nullptr);
      share[r] = shares.here;
      before[r] = static_cast<T>(shares.before);
      if (c.max) {
        // NaN where lse is
        const double top = l == 0 ? -__builtin_inf() : from_log2<T>(c, static_cast<double>(it.m[r])) + l * 0;
        if (!c.merge || !(max[at] >= top)) max[at] = static_cast<T>(top);
      }
      if (c.entropy) add_entropy(at, r, it, shares);
      lse[at] = static_cast<T>(shares.lse);
    }
    quotients(it, share, rows);
    again(it, task, share);
    for (int64_t r = 0; r < x.rows; ++r) {
      const int64_t at = x.at(c.o, r);
      T* row = rows + r * ldv;
      if (c.merge && before[r] != T(0))
        for (int64_t d = 0; d < c.Dv; ++d) row[d] += before[r] * read1<T>(c.o, at + d);
      write_row(c.o, at, c.Dv, row);
    }
  }

  // query tiles per task, which share each loaded key tile: as many as fit the L2 cache
  static int64_t wanted(const Call& c) {
    const int64_t state = TILE_Q * (c.D + c.Dv) * static_cast<int64_t>(sizeof(T));
    return max64(4, min64(16, (1 << 20) / state));
  }
  static int64_t tasks(const Call& c) {
    if (short_rows<T>(c)) return c.B * c.Hq;
    if (!c.selection.lists) return Grouping(c, wanted(c)).tasks(c);
    const int64_t each = groups_of(c);
    return c.B * c.Hk * ((c.selection.groups + each - 1) / each);
  }
  static int64_t scratch_bytes(const Call& c) {
    Bump bump{nullptr};
    const Grouping g(c, wanted(c));
    const int64_t groups = c.selection.lists ? groups_of(c) : 0;
    Forward measure(c, bump, groups ? max64(groups, wanted(c)) : g.heads * g.tiles);
    if (groups) Selected(c, bump, groups);
    return bump.used;
  }
  static int64_t groups_of(const Call& c) {
    return Selected::groups_of<T>(c, c.D + c.Dv, c.B * c.Hk * c.selection.groups / (int64_t{4} * c.threads));
  }
  static void selected_task(const Call& c, int64_t task, char* scratch) {
    const int64_t each = groups_of(c), sets = (c.selection.groups + each - 1) / each, most = max64(each, wanted(c));
    const int64_t first = (sets - 1 - task % sets) * each;
    TaskIndex x{task / sets / c.Hk, task / sets % c.Hk, 0, first, 0};
    Bump bump{scratch};
    Forward f(c, bump, most);
    Selected selected(c, bump, each);
    selected.place(c, x, each, f.items, most, f.masks, [&](int64_t n) {
      f.keys = selected.keys;
      for (int64_t i = 0; i < n; ++i) f.start(f.items[i]);
      f.visit(x, f.items, n);
      for (int64_t i = 0; i < n; ++i) f.finish(f.items[i], x);
    });
  }
  static void task(const Call& c, int64_t task, char* scratch) {
    if (c.selection.lists) return selected_task(c, task, scratch);
    if (!short_rows<T>(c)) {
      const Grouping g(c, wanted(c));
      return group(c, g, g.at(c, task), scratch);
    }
    const int64_t b = task / c.Hq, h = task - b * c.Hq;
    if (!short_head<T>(c, b, h, scratch)) group(c, {1, 1, c.G, 1}, {b, h / c.G, 0, 0, h % c.G}, scratch);
  }
  static void group(const Call& c, const Grouping& g, const TaskIndex& x, char* scratch) {
    Bump bump{scratch};
    Forward f(c, bump, g.heads * g.tiles);
    f.keys = keys_of(*c.part, x.cls);
    const int64_t n = g.start_all(c, x, f);
    f.visit(x, f.items, n);
    for (int64_t i = 0; i < n; ++i) f.finish(f.items[i], x);
  }
};

}  // namespace saccade::SACCADE_ISA
