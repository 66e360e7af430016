// Decode where no bit of a row may depend on the batch, on pages or on which call computes it: every sum has the terms
// and the order that it has in forward.hpp. The keys of a tile are the lanes of its scores, and a task owns one range of
// keys, of the fixed size at which the forward, too, merges partial results.
#pragma once
#include "decode.hpp"
#include "forward.hpp"

namespace saccade::SACCADE_ISA {

template <class K>
struct Ordered : Decode<K, TILE_K> {
  using Base = Decode<K, TILE_K>;
  using typename Base::Head;
  using typename Base::T;
  using Num = typename K::num;
  using S = Store<K>;
  using Base::acc, Base::all, Base::c, Base::kt, Base::l, Base::ld, Base::ldv, Base::m, Base::rows, Base::s, Base::vt;
  static constexpr int64_t N = lanes<T>;

  int64_t width, deep;      // rows, and the numbers of a row of q or k, rounded up to vectors
  T mul = T(1);             // log2 scores = mul * products, when plain
  T *loaded, *q_lanes;      // of the queries, [width][ld]
  Num *queries, *in_lanes;  // [heads][width][deep], and the key tile [deep][TILE_K]

  Ordered(const Call& call, Bump& bump)
      : Base(call, bump), width(round_up(rows, N)), deep(round_up(S::depth(call.D), N)) {
    loaded = bump.take<T>(width * ld), q_lanes = bump.take<T>(width * ld);
    queries = bump.take<Num>(Base::n_heads * width * deep);
    in_lanes = bump.take<Num>(max64(TILE_K, width) * deep);
  }

  Item<T> start(Head& h, int64_t b, int64_t hk, int64_t cls, Num* q, TileMask<T>* mask) {
    h.q = reinterpret_cast<T*>(q);
    const Item<T> it = Base::place(h, b, hk, cls, mask, loaded, width);
    const double pre = c.scale * (it.s.plain() ? LOG2E<double> : 1);
    mul = S::per == 1 ? T(1) : static_cast<T>(pre);
    for (int64_t i = 0; i < width * deep; ++i) in_lanes[i] = Num(0);
    S::turn(loaded, ld, width, c.D, pre, q_lanes, in_lanes);
    transpose(deep, width, reinterpret_cast<T*>(in_lanes), width, h.q, deep);
    Base::start_sums(h);
    return it;
  }

  void load_keys(const Head& h, int64_t key, int64_t n) {
    int64_t stride = deep;
    const bool whole = n % N == 0 && deep * S::per == c.D;
    const T* from = whole ? reinterpret_cast<const T*>(Base::in_place(h, key, n, &stride)) : nullptr;
    if (!from) {
      const Span span{c, c.k, h.b, h.hk, all, key, n, c.D, false};
      if constexpr (S::per == 1) {
        load_rows(span, kt, deep, false);
      } else {
        for (int64_t r = 0; r < n; ++r) {
          __builtin_memset(kt + r * deep, 0, static_cast<size_t>(deep) * sizeof(T));
          __builtin_memcpy(kt + r * deep, S::row(span, r), static_cast<size_t>(c.D) * 2);
        }
      }
      from = kt;
    }
    transpose(round_up(n, N), deep, from, stride, reinterpret_cast<T*>(in_lanes), TILE_K);
  }

  // weights of n keys, then zeros
  void softmax(int64_t r, int64_t n, int64_t odd) {
    T* p = s + r * TILE_K;
    const int64_t padded = S::per == 1 ? round_up(n, N) : min64(TILE_K, round_up(n + odd, 2 * N));
    for (int64_t j = n; j < padded; ++j) p[j] = Low<T>::masked;
    vec<T> top = splat(Low<T>::masked);
    for (int64_t j = 0; j < padded; j += N) top = vmax<T>(top, load(p + j));
    T best = top[0];
    for (int i = 1; i < N; ++i) best = top[i] > best ? top[i] : best;
    best = larger(best * mul, m[r]);
    const T fix = exp2v(splat(m[r] - best))[0];
    for (int64_t j = 0; j < padded; j += N) store(p + j, exp2v(load(p + j) * mul - splat(best)));
    T sum = T(0);
    for (int64_t j = 0; j < n; ++j) sum += p[j];
    l[r] = l[r] * fix + sum;
    m[r] = best;
    if (fix != T(1))
      for (int64_t d = 0; d < ldv; d += N) store(acc + r * ldv + d, load(acc + r * ldv + d) * fix);
    if (odd) __builtin_memmove(p + 1, p, static_cast<size_t>(n) * sizeof(T)), p[0] = T(0);
  }

  void values(const Head& h, int64_t key, int64_t n, int64_t odd) {
    if constexpr (S::per == 1) {
      int64_t stride = 0;
      const T* v = Base::values(h, key, n, &stride, false, nullptr);
      mm<K>(rows, ldv, n, v, stride, s, TILE_K, 1, acc, ldv, true);
    } else {
      Num *tile = reinterpret_cast<Num*>(vt), *weights = Base::weights;
      S::load_across({c, c.v, h.b, h.hk, all, key - odd, n + odd, c.Dv, false}, tile, ldv);
      for (int64_t r = 0; r < rows; ++r) S::pair_lanes(s + r * TILE_K, n + odd, weights + r * TILE_K / 2);
      mm<K>(rows, ldv, S::depth(n + odd), tile, ldv, weights, TILE_K / 2, 1, acc, ldv, true);
    }
  }

  // first: among the keys of the class, the first of which is key `base` of the call
  void step(const Head& h, int64_t base, int64_t first, int64_t n, bool partial) {
    acc = h.acc, m = h.m, l = h.l;
    load_keys(h, base + first, n);
    const Num* q = reinterpret_cast<const Num*>(h.q);
    mm<K>(rows, round_up(n, N), S::depth(c.D), in_lanes, TILE_K, q, deep, 1, s, TILE_K, false, c.chain());
    if (partial || !c.plain())
      for (int64_t g = 0; g < c.G; ++g) Base::extras(h.scorer[g], g, first, n, partial, false);
    const int64_t odd = S::per == 2 ? first & 1 : 0;
    for (int64_t r = 0; r < rows; ++r) softmax(r, n, odd);
    values(h, base + first, n, odd);
  }

  void visit(const Item<T>& it, int64_t begin, int64_t end) {
    const int32_t* seg = it.seg;
    const int64_t base = it.s.keys.start;
    for (int64_t k0 = begin; k0 < end; k0 += TILE_K) {
      const int64_t k1 = k0 + TILE_K;
      while (seg < it.seg_end && seg[1] <= k0) seg += 3;
      if (seg == it.seg_end || seg[0] >= k1) continue;
      const int64_t first = max64(seg[0], k0);
      int kind = seg[2];
      for (; seg[1] < k1 && seg + 3 < it.seg_end && seg[3] < k1; seg += 3) kind = PARTIAL;
      const int64_t n = min64(seg[1], k1) - first;
      check_stop();
      Base::touch(c.k, Base::heads[0], base + first, n, c.D);
      Base::touch(c.v, Base::heads[0], base + first, n, c.Dv);
      for (int64_t i = 0; i < Base::n_heads; ++i) step(Base::heads[i], base, first, n, kind == PARTIAL);
    }
  }

  static int64_t scratch_bytes(const Call& c) {
    Bump bump{nullptr};
    Ordered measure(c, bump);
    return bump.used;
  }

  // a partial result: sums [ldv], then m, then l
  static int64_t row_size(const Call& c) { return round_up(c.Dv, N) + 2; }
  static void task(const Call& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    Ordered f(c, bump);
    const int64_t groups = c.Hk / f.n_heads, range = task % c.n_chunks, b = task / c.n_chunks / groups;
    const int64_t first_head = task / c.n_chunks % groups * f.n_heads, cls = c.part->entry ? b : 0;
    Item<T> it;
    for (int64_t i = 0; i < f.n_heads; ++i) {
      Num* q = f.queries + i * f.width * f.deep;
      it = f.start(f.heads[i], b, first_head + i, cls, q, f.masks + i * c.G);
    }
    f.visit(it, range * c.range, (range + 1) * c.range);
    for (int64_t i = 0; i < f.n_heads; ++i) {
      const int64_t head = b * c.Hk + first_head + i;
      T* out = static_cast<T*>(c.partial) + (head * c.n_chunks + range) * f.rows * row_size(c);
      for (int64_t r = 0; r < f.rows; ++r, out += row_size(c)) {
        __builtin_memcpy(out, f.heads[i].acc + r * f.ldv, static_cast<size_t>(f.ldv) * sizeof(T));
        out[f.ldv] = f.heads[i].m[r], out[f.ldv + 1] = f.heads[i].l[r];
      }
      if (c.n_chunks == 1) combine(c, head);
    }
  }

  // merges the ranges of one (batch, key head) as the forward does, and marks results that are not finite
  static void combine(const Call& c, int64_t task) {
    const int64_t rows = c.G * c.Tq, hk = task % c.Hk, b = task / c.Hk, size = row_size(c), ldv = size - 2;
    const T* part = static_cast<const T*>(c.partial) + task * c.n_chunks * rows * size;
    T whole[1024];
    for (int64_t r = 0; r < rows; ++r) {
      T m = Low<T>::start, l = 0;
      for (int64_t d = 0; d < ldv; ++d) whole[d] = T(0);
      for (int64_t n = 0; n < c.n_chunks; ++n) {
        const T *sums = part + (n * rows + r) * size, top = larger(m, sums[ldv]);
        const vec<T> of_whole = exp2v(splat(m - top)), of_range = exp2v(splat(sums[ldv] - top));
        m = top, l = folded<T>(splat(l), of_whole, splat(sums[ldv + 1]), of_range)[0];
        for (int64_t d = 0; d < ldv; d += N)
          store(whole + d, folded<T>(load(whole + d), of_whole, load(sums + d), of_range));
      }
      const int64_t h = hk * c.G + r / c.Tq, t = r % c.Tq;
      const Shares shares = shares_of(c, m, l, c.sinks ? c.sinks[h] : -__builtin_inf());
      const T own = Forward<K>::quotient(shares.here, l);
      for (int64_t d = 0; d < ldv; ++d) whole[d] = (whole[d] + T(0)) * own;
      if (!all_finite(whole, c.Dv)) c.lost[task] = 1;
      static_cast<T*>(c.lse)[(b * c.Tq + t) * c.Hq + h] = static_cast<T>(shares.lse);
      write_row(c.o, b * c.o.stride[0] + t * c.o.stride[1] + h * c.o.stride[2], c.Dv, whole);
    }
  }
};

}  // namespace saccade::SACCADE_ISA
