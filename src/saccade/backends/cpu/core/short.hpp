// Forward of few tokens: vectors lie along the head dimension, and rows are read where they are. Transposing them, as for
// more tokens, would cost more than the products.
#pragma once
#include "scores.hpp"

namespace saccade::SACCADE_ISA {

// what forward and backward of one head share; X: what its arrays are stored in
template <class T, class X>
struct ShortRows {
  static constexpr int N = lanes<T>;
  static constexpr int R = N < 4 ? N : 4, KEYS = N / R;  // rows and keys whose scores are summed at once
  static constexpr int MANY = SACCADE_REGISTERS == 32 ? 4 : 2;

  struct Range {
    int64_t begin, end;
  };
  // rows of one head
  struct Side {
    const X* first;
    int64_t step, width;
    Side(const Array& a, int64_t b, int64_t head, int64_t width)
        : first(reinterpret_cast<const X*>(a.data) + b * a.stride[0] + head * a.stride[2]),
          step(a.stride[1]),
          width(width) {}
    const X* row(int64_t t) const { return first + t * step; }
  };

  const Call& c;
  const int64_t b, h;
  const int32_t* band;
  const Side q, k, v;
  Finite<T> finite;         // of results
  Range all{0, 0}, own[R];  // the keys that some of the current rows see, and each of them, from all.begin on

  ShortRows(const Call& call, int64_t b, int64_t h)
      : c(call), b(b), h(h), q(c.q, b, h, c.D), k(c.k, b, h / c.G, c.D), v(c.v, b, h / c.G, c.Dv) {
    const Mask& mask = c.part->masks[c.part->head[h]];
    band = mask.bands + b * mask.batch_stride;
  }

  SACCADE_INLINE vec<T> wide(const T* p) { return load(p); }
  SACCADE_INLINE vec<float> wide(const uint16_t* p) { return widen_bf16(p); }

  // calls some(t, n) for n <= R rows from t on; false if some results are not finite: then the kernel of more tokens
  // computes the head again
  template <class F>
  bool each_rows(F some) {
    for (int64_t t = 0; t < c.Tq; t += R) some(t, min64(R, c.Tq - t));
    return finite.all();
  }

  // the keys that row t sees
  Range seen(int64_t t) const {
    if (t < band[Q_LO] || t >= band[Q_HI]) return {0, 0};
    const int64_t begin = max64(0, max64(band[K_LO], t - band[D_HI]));
    return {begin, max64(begin, min64(min64(band[K_HI], c.Tk), t - band[D_LO] + 1))};
  }
  // of n rows from t on
  void find_keys(int64_t t, int64_t n) {
    all = {c.Tk, 0};
    for (int64_t r = 0; r < n; ++r) {
      own[r] = seen(t + r);
      if (own[r].begin < own[r].end) all = {min64(all.begin, own[r].begin), max64(all.end, own[r].end)};
    }
    for (int64_t r = 0; r < n; ++r) own[r] = {own[r].begin - all.begin, own[r].end - all.begin};
  }
  int64_t keys() const { return all.end - all.begin; }
  // which of N keys from the j-th of `all` on row r of these sees
  [[gnu::always_inline]] ivec<T> sees(int64_t r, int64_t j) const {
    const ivec<T> key = iota<T>() + isplat<T>(j);
    return (key >= isplat<T>(own[r].begin)) & (key < isplat<T>(own[r].end));
  }

  // products of R rows from t on with all keys, times a factor
  [[gnu::always_inline]] void products(const Side rows, const Side others, int64_t t, T factor, T (*out)[SHORT]) {
    const Range all = this->all;
    const X* of_row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) of_row[r] = rows.row(min64(t + r, c.Tq - 1));
    for (int64_t j = all.begin; j < all.end; j += N) {
      vec<T> parts[R];
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) parts[i] = vec<T>{};
      const int64_t n = min64(R, (all.end - j + KEYS - 1) / KEYS);
      for (int64_t i = 0; i < n; ++i) parts[i] = sums_of_products(of_row, others, j + i * KEYS, all.end) * factor;
      // the keys of a row side by side: a vector cannot be loaded soon after parts of it were stored
      transpose_parts(parts);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) store(out[r] + (j - all.begin), parts[r]);
    }
  }
  // of R rows and KEYS keys from j on, row by row
  [[gnu::always_inline]] vec<T> sums_of_products(const X* const* of_row, const Side& others, int64_t j, int64_t end) {
    const X* of_key[KEYS];
#pragma GCC unroll 4
    for (int i = 0; i < KEYS; ++i) of_key[i] = others.row(min64(j + i, end - 1));
    vec<T> sums[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) sums[i] = vec<T>{};
    for (int64_t d = 0; d < others.width; d += N) {
      vec<T> w[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) w[r] = wide(of_row[r] + d);
#pragma GCC unroll 4
      for (int i = 0; i < KEYS; ++i) {
        const vec<T> x = wide(of_key[i] + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r * KEYS + i] += x * w[r];
      }
    }
    return fold_lanes<T, N>(sums);
  }
  // part i of row r becomes part r of row i
  template <int FROM>
  struct WovenParts {
    static constexpr int of(int l) { return (FROM + l / KEYS / 2) * KEYS + (l / KEYS % 2) * N + l % KEYS; }
  };
  SACCADE_INLINE void transpose_parts(vec<T>* a) {
    vec<T> b[R];
#pragma GCC unroll 2
    for (int round = 1; round < R; round *= 2) {
#pragma GCC unroll 2
      for (int i = 0; i < R / 2; ++i) {
        b[2 * i] = shuffle<T, WovenParts<0>>(a[i], a[i + R / 2]);
        b[2 * i + 1] = shuffle<T, WovenParts<R / 2>>(a[i], a[i + R / 2]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) a[i] = b[i];
    }
  }

  // calls f<NV>(d) for NV vectors from d on: MANY at a time, then one
  template <class F>
  [[gnu::always_inline]] void each_block(int64_t width, F f) {
    int64_t d = 0;
    for (; d + MANY * N <= width; d += MANY * N) f.template operator()<MANY>(d);
    for (; d < width; d += N) f.template operator()<1>(d);
  }
  // for each of n <= R rows, the sum of the other side's rows by weights: put(r, i, vector i of the numbers from d on)
  template <int NV, class F>
  [[gnu::always_inline]] void weighted(const T (*weights)[SHORT], const Side& others, int64_t d, int64_t n, F put) {
    vec<T> sums[R][NV];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) sums[r][i] = vec<T>{};
    const X* of_key = others.row(all.begin) + d;
    for (int64_t j = 0, end = keys(), step = others.step; j < end; ++j, of_key += step) {
      vec<T> x[NV];
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) x[i] = wide(of_key + i * N);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < NV; ++i) sums[r][i] += x[i] * weights[r][j];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (r == n) return;
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) put(r, i, sums[r][i]);
    }
  }
};

// one head
template <class T, class X>
struct Short : ShortRows<T, X> {
  using Rows = ShortRows<T, X>;
  using Rows::c, Rows::b, Rows::h, Rows::q, Rows::k, Rows::v, Rows::keys, Rows::finite, Rows::N, Rows::R;
  T* rows;  // [R][Dv], unless o has the compute type
  T s[R][SHORT], shares[R];

  Short(const Call& call, int64_t b, int64_t h, char* scratch)
      : Rows(call, b, h), rows(reinterpret_cast<T*>(scratch)) {}

  bool run() {
    return Rows::each_rows([&](int64_t t, int64_t n) { some(t, n); });
  }

 private:
  // n <= R rows from t on
  void some(int64_t t, int64_t n) {
    Rows::find_keys(t, n);
    Rows::products(q, k, t, static_cast<T>(c.scale * LOG2E<double>), s);
    for (int64_t r = 0; r < n; ++r) softmax(r, t + r);
    const bool in_place = c.o.dtype == same_dtype<T>;
    const int64_t out = b * c.o.stride[0] + t * c.o.stride[1] + h * c.o.stride[2];
    T* const to = in_place ? reinterpret_cast<T*>(c.o.data) + out : rows;
    const int64_t step = in_place ? c.o.stride[1] : c.Dv;
    Rows::each_block(c.Dv, [&]<int NV>(int64_t d) __attribute__((always_inline)) {
      Rows::template weighted<NV>(s, v, d, n, [&](int r, int i, vec<T> sum) __attribute__((always_inline)) {
        const vec<T> x = (sum + T(0)) * shares[r];  // no -0
        finite.see(x);
        store(to + r * step + d + i * N, x);
      });
    });
    for (int64_t r = 0; !in_place && r < n; ++r) write_row(c.o, out + r * c.o.stride[1], c.Dv, rows + r * c.Dv);
  }

  // replaces the scores of row t by weights, and keeps the reciprocal of their sum, or 0
  [[gnu::always_inline]] void softmax(int64_t r, int64_t t) {
    T* p = s[r];
    const int64_t n = keys();
    vec<T> top = splat(Low<T>::start), sum = {};
    for (int64_t j = 0; j < n; j += N) {
      const vec<T> x = Rows::sees(r, j) ? load(p + j) : splat(Low<T>::masked);
      store(p + j, x);
      top = vmax<T>(top, x);
    }
    const T best = max_lanes<T>(top);
    for (int64_t j = 0; j < n; j += N) {
      const vec<T> e = exp2v(load(p + j) - best);
      sum += e;
      store(p + j, e);
    }
    const T l = add_lanes<T>(sum);
    if (!c.lse_unread) static_cast<T*>(c.lse)[(b * c.Tq + t) * c.Hq + h] = static_cast<T>(lse_of<T>(c, best, l));
    shares[r] = l == 0 ? T(0) : 1 / l;
  }
};

// Whether the tokens are few, and only products, a softmax and one band of keys per row are asked for, of numbers that
// vectors can load.
template <class T>
SACCADE_INLINE bool short_rows(const Call& c) {
  if (c.Tq > SHORT || c.Tk > SHORT) return false;
  const Part& p = *c.part;
  const auto whole = [&](const Array& a, int64_t width) { return a.dtype == c.q.dtype && width % lanes<T> == 0; };
  const bool wide = c.q.dtype == DType::f32 || c.q.dtype == DType::f64;
  if (!(wide || c.q.dtype == DType::bf16) || !whole(c.k, c.D) || !whole(c.v, c.Dv) || !c.plain()) return false;
  if (c.drop_below || c.sinks || c.merge || !c.last || c.wants_more() || c.range) return false;
  if (c.block_table || c.selection.lists || p.classes != 1 || p.step != 1 || p.entry || !p.one_bands) return false;
  // the forward of more tokens has products of pairs of bf16, but takes as long for pairs that a mask excludes
  const bool all = p.n_tiles > 0 && p.ptr[1] > 0 && p.seg[2] == FULL;
  return max64(c.Tq, c.Tk) <= (wide ? SHORT : SHORT / 4) / (all ? 2 : 1);
}
template <class T>
SACCADE_INLINE bool short_head(const Call& c, int64_t b, int64_t h, char* scratch) {
  if constexpr (sizeof(T) == 4)
    if (c.q.dtype == DType::bf16) return Short<T, uint16_t>(c, b, h, scratch).run();
  return Short<T, T>(c, b, h, scratch).run();
}

}  // namespace saccade::SACCADE_ISA
