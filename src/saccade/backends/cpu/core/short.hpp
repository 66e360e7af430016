// Forward of few tokens: vectors lie along the head dimension, and rows are read where they are. Transposing them, as for
// more tokens, would cost more than the products.
#pragma once
#include "scores.hpp"

namespace saccade::SACCADE_ISA {

// one head; X: what q, k and v are stored in
template <class T, class X>
struct Short {
  static constexpr int N = lanes<T>;
  static constexpr int R = N < 4 ? N : 4, KEYS = N / R;  // rows and keys whose scores are summed at once
  static constexpr int MANY = SACCADE_REGISTERS == 32 ? 4 : 2;

  struct Range {
    int64_t begin, end;
  };

  const Call& c;
  const int32_t* band;
  const X *q, *k, *v;
  int64_t out, first_lse;  // where o and lse of the first row are
  T* rows;                 // [R][Dv], unless o has the compute type
  T s[R][SHORT], shares[R];
  Finite<T> finite;

  Short(const Call& call, int64_t b, int64_t h, char* scratch)
      : c(call),
        band(c.part->masks[c.part->head[h]].bands),
        q(of(c.q, b, h)),
        k(of(c.k, b, h / c.G)),
        v(of(c.v, b, h / c.G)),
        out(b * c.o.stride[0] + h * c.o.stride[2]),
        first_lse(b * c.Tq * c.Hq + h),
        rows(reinterpret_cast<T*>(scratch)) {
    band += b * c.part->masks[c.part->head[h]].batch_stride;
  }

  // false if some results are not finite; then the forward of more tokens computes the head again
  bool run() {
    for (int64_t t = 0; t < c.Tq; t += R) some(t, min64(R, c.Tq - t));
    return finite.all();
  }

 private:
  static const X* of(const Array& a, int64_t b, int64_t head) {
    return reinterpret_cast<const X*>(a.data) + b * a.stride[0] + head * a.stride[2];
  }
  SACCADE_INLINE vec<T> wide(const T* p) { return load(p); }
  SACCADE_INLINE vec<float> wide(const uint16_t* p) { return widen_bf16(p); }

  // the keys that row t sees
  Range seen(int64_t t) const {
    if (t < band[Q_LO] || t >= band[Q_HI]) return {0, 0};
    const int64_t begin = max64(0, max64(band[K_LO], t - band[D_HI]));
    return {begin, max64(begin, min64(min64(band[K_HI], c.Tk), t - band[D_LO] + 1))};
  }

  // n <= R rows from t on
  void some(int64_t t, int64_t n) {
    Range own[R], all{c.Tk, 0};
    for (int64_t r = 0; r < n; ++r) {
      own[r] = seen(t + r);
      if (own[r].begin < own[r].end) all = {min64(all.begin, own[r].begin), max64(all.end, own[r].end)};
    }
    for (int64_t j = all.begin; j < all.end; j += N) products(t, j, all);
    for (int64_t r = 0; r < n; ++r) softmax(r, {own[r].begin - all.begin, own[r].end - all.begin}, all, t + r);
    int64_t d = 0;
    for (; d + MANY * N <= c.Dv; d += MANY * N) values<MANY>(t, n, all, d);
    for (; d < c.Dv; d += N) values<1>(t, n, all, d);
    for (int64_t r = 0; !in_place() && r < n; ++r) write_row(c.o, out + (t + r) * c.o.stride[1], c.Dv, rows + r * c.Dv);
  }
  bool in_place() const { return c.o.dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64); }

  // log2 scores of R rows from t on and N keys from j on
  [[gnu::always_inline]] void products(int64_t t, int64_t j, Range all) {
    const T factor = static_cast<T>(c.scale * LOG2E<double>);
    const X* of_row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) of_row[r] = q + min64(t + r, c.Tq - 1) * c.q.stride[1];
    vec<T> parts[R];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) parts[i] = vec<T>{};
    const int64_t n = min64(R, (all.end - j + KEYS - 1) / KEYS);
    for (int64_t i = 0; i < n; ++i) parts[i] = sums_of_products(of_row, j + i * KEYS, all.end) * factor;
    // the keys of a row side by side: a vector cannot be loaded soon after parts of it were stored
    transpose_parts(parts);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(s[r] + (j - all.begin), parts[r]);
  }
  // of R rows and KEYS keys from j on, row by row
  [[gnu::always_inline]] vec<T> sums_of_products(const X* const* of_row, int64_t j, int64_t end) {
    const X* of_key[KEYS];
#pragma GCC unroll 4
    for (int i = 0; i < KEYS; ++i) of_key[i] = k + min64(j + i, end - 1) * c.k.stride[1];
    vec<T> sums[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) sums[i] = vec<T>{};
    for (int64_t d = 0; d < c.D; d += N) {
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

  // replaces the scores of row t by weights, and keeps the reciprocal of their sum, or 0
  [[gnu::always_inline]] void softmax(int64_t r, Range own, Range all, int64_t t) {
    T* p = s[r];
    const ivec<T> begin = isplat<T>(own.begin), end = isplat<T>(own.end);
    vec<T> top = splat(Low<T>::start), sum = {};
    for (int64_t j = 0; j < all.end - all.begin; j += N) {
      const ivec<T> at = iota<T>() + isplat<T>(j);
      const vec<T> x = ((at >= begin) & (at < end)) ? load(p + j) : splat(Low<T>::masked);
      store(p + j, x);
      top = vmax<T>(top, x);
    }
    const T best = max_lanes<T>(top);
    for (int64_t j = 0; j < all.end - all.begin; j += N) {
      const vec<T> e = exp2v(load(p + j) - best);
      sum += e;
      store(p + j, e);
    }
    const T l = add_lanes<T>(sum);
    if (!c.lse_unread) static_cast<T*>(c.lse)[first_lse + t * c.Hq] = static_cast<T>(lse_of<T>(c, best, l));
    shares[r] = l == 0 ? T(0) : 1 / l;
  }

  // numbers d to d + NV * N of n rows of the output
  template <int NV>
  [[gnu::always_inline]] void values(int64_t t, int64_t n, Range all, int64_t d) {
    vec<T> sums[R][NV];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) sums[r][i] = vec<T>{};
    const X* of_key = v + all.begin * c.v.stride[1] + d;
    for (int64_t j = 0; j < all.end - all.begin; ++j, of_key += c.v.stride[1]) {
      vec<T> x[NV];
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) x[i] = wide(of_key + i * N);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < NV; ++i) sums[r][i] += x[i] * s[r][j];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (r == n) return;
      T* to = in_place() ? reinterpret_cast<T*>(c.o.data) + out + (t + r) * c.o.stride[1] : rows + r * c.Dv;
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) {
        const vec<T> x = (sums[r][i] + T(0)) * shares[r];  // no -0
        finite.see(x);
        store(to + d + i * N, x);
      }
    }
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
  const bool all = p.ptr[1] > 0 && p.seg[2] == FULL;
  return max64(c.Tq, c.Tk) <= (wide ? SHORT : SHORT / 4) / (all ? 2 : 1);
}
template <class T>
SACCADE_INLINE bool short_head(const Call& c, int64_t b, int64_t h, char* scratch) {
  if constexpr (sizeof(T) == 4)
    if (c.q.dtype == DType::bf16) return Short<T, uint16_t>(c, b, h, scratch).run();
  return Short<T, T>(c, b, h, scratch).run();
}

}  // namespace saccade::SACCADE_ISA
