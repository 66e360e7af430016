// Decode where the query rows of a key head fill vectors, such as many heads over a latent cache: rows are the lanes of
// scores, as in the forward, so that products read keys as broadcast numbers, in place.
#pragma once
#include "decode.hpp"

namespace saccade::SACCADE_ISA {

template <class K>
struct WideDecode : Decode<K, TILE_K> {
  using Base = Decode<K, TILE_K>;
  using typename Base::Head;
  using typename Base::T;
  using Num = typename K::num;
  using S = Store<K>;
  using Base::acc, Base::ahead, Base::all, Base::c, Base::coming_k, Base::coming_v, Base::kt, Base::l, Base::ld,
      Base::ldv, Base::m, Base::rows, Base::s, Base::u, Base::vt, Base::weights;
  static constexpr int64_t N = lanes<T>, PAIRS_OF_KEYS = TILE_K / S::per;

  int64_t width;            // rows, rounded up to vectors
  T mul = T(1);             // log2 scores = mul * products, when plain
  T *loaded, *scratch;      // of the queries, [width][ld]
  T* fix;                   // [width]
  Num* queries;             // [heads][depth(ld)][width]
  Num* transposed_weights;  // weights for matrix registers, [width][pairs of keys]
  const MatrixRegisters registers;

  // whether at least three quarters of the lanes would have rows; matrix registers are faster even if half are empty
  static bool suits(const Call& c) {
    const int64_t rows = c.G * c.Tq;
    return rows >= N && (c.matrix || 4 * rows >= 3 * round_up(rows, N));
  }

  WideDecode(const Call& call, Bump& bump)
      : Base(call, bump), width(round_up(rows, N)), registers(c.matrix && bump.base) {
    Base::s_row = 1, Base::s_key = width;
    loaded = bump.take<T>(width * ld), scratch = bump.take<T>(width * ld);
    fix = bump.take<T>(width);
    queries = bump.take<Num>(Base::n_heads * width * S::depth(ld));
    transposed_weights = bump.take<Num>(c.matrix ? width * PAIRS_OF_KEYS : 0);
  }

  Item<T> start(Head& h, int64_t b, int64_t hk, TileMask<T>* mask) {
    h.q = reinterpret_cast<T*>(queries + (&h - Base::heads) * width * S::depth(ld));
    const Item<T> it = Base::place(h, b, hk, 0, mask, loaded, width);
    const double factor = c.scale * (it.s.plain() ? LOG2E<double> : 1);
    mul = S::per == 1 ? T(1) : static_cast<T>(factor);
    S::turn(loaded, ld, width, c.D, factor, scratch, reinterpret_cast<Num*>(h.q));
    Base::start_sums(h);
    return it;
  }

  // scores [n][width]
  void scores(const Head& h, int64_t first, int64_t n) {
    int64_t step = S::depth(c.D);
    const Num* keys = Base::in_place(h, first, n, &step);
    if (!keys) {
      Num* tile = reinterpret_cast<Num*>(kt);
      S::load_deep({c, c.k, h.b, h.hk, all, first, n, c.D, false}, tile, false);
      keys = tile;
    }
    const Num* queries_of = reinterpret_cast<const Num*>(h.q);
    const int64_t depth = S::depth(c.D);
    if (c.matrix)
      return SACCADE_ISA::product<K>(n, width, depth, queries_of, width, deep_rows(keys, step, true), s, width, false,
                                     c.chain());
    const int64_t to_scores = Base::n_heads * steps<T>(n, width, depth),
                  to_sums = Base::n_heads * steps<T>(rows, ldv, S::depth(n));
    ahead.k.bytes = Base::share(coming_k, Base::shared() ? to_scores + to_sums : to_scores);
    ahead.v.bytes = Base::share(coming_v, to_sums);
    mm<K>(n, width, depth, queries_of, width, keys, step, 1, s, width, false, c.chain(), ahead.k);
  }

  void softmax(int64_t n) { c.entropy ? softmax_of<true>(n) : softmax_of<false>(n); }
  template <bool ENTROPY>
  void softmax_of(int64_t n) {
    for (int64_t w = 0; w < width; w += N) {
      vec<T> top = splat(Low<T>::masked), sum = {}, logs = {};
      for (int64_t r = 0; r < n; ++r) top = vmax<T>(top, load(s + r * width + w));
      const vec<T> before = load(m + w);
      top = vmax<T>(top * mul, before);
      for (int64_t r = 0; r < n; ++r) {
        const vec<T> log = load(s + r * width + w) * mul - top, e = exp2v(log);
        sum += e;
        if constexpr (ENTROPY) logs += e * finite_log<T>(log);
        store(s + r * width + w, e);
      }
      const vec<T> share = exp2v(before - top);
      if constexpr (ENTROPY) store(u + w, (load(u + w) + load(l + w) * finite_log<T>(before - top)) * share + logs);
      store(l + w, load(l + w) * share + sum);
      store(m + w, top);
      store(fix + w, share);
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; fix[r] != T(1) && d < ldv; d += N) store(acc + r * ldv + d, load(acc + r * ldv + d) * fix[r]);
  }

  // what is fetched during the products with values: the rest of the keys if those are the values
  Ahead& during_values() { return Base::shared() ? ahead.k : ahead.v; }
  void product(const T* v, int64_t stride, int64_t n) {
    mm<Plain<T>>(rows, ldv, n, v, stride, s, 1, width, acc, ldv, true, CHAIN, during_values());
  }

  void add_values(const Head& h, int64_t first, int64_t n) {
    if constexpr (S::per == 2) {
      Num* tile = reinterpret_cast<Num*>(vt);
      S::load_across({c, c.v, h.b, h.hk, all, first, n, c.Dv, false}, tile, ldv);
      S::pair_rows(s, width, n, width, weights);
      if (c.matrix) {
        S::turn_tile(weights, width, n, transposed_weights, PAIRS_OF_KEYS);
        return SACCADE_ISA::product<K>(rows, ldv, S::depth(n), tile, ldv,
                                       deep_rows(transposed_weights, PAIRS_OF_KEYS, true), acc, ldv, true);
      }
      mm<K>(rows, ldv, S::depth(n), tile, ldv, weights, 1, width, acc, ldv, true, CHAIN, during_values());
    } else {
      int64_t stride = 0;
      const T* v = Base::values(h, first, n, &stride, false, nullptr);
      product(v, stride, n);
    }
  }

  static int64_t scratch_bytes(const Call& c) {
    Bump bump{nullptr};
    WideDecode measure(c, bump);
    return bump.used;
  }
  static void task(const Call& c, int64_t task, char* scratch) { Base::template run<WideDecode>(c, task, scratch); }
};

}  // namespace saccade::SACCADE_ISA
