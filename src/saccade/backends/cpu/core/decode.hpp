// Decode: few query rows against many keys. Each key is read once for all query heads of its group; a task owns one chunk
// of keys and writes (m, l, sum of p v) per row, and a second pass folds the chunks in order.
#pragma once
#include "items.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
SACCADE_INLINE T add_lanes(vec<T> x) {
  T part[lanes<T>];
  store(part, x);
  for (int n = lanes<T> / 2; n; n /= 2)
    for (int l = 0; l < n; ++l) part[l] += part[l + n];
  return part[0];
}

template <class T>
struct Decode {
  static constexpr int N = lanes<T>;
  const Call& c;
  int64_t rows, ld, ldv;  // rows: query heads of the group times Tq
  T *q, *s, *kt, *vt, *turned, *acc;
  T *m, *l;
  TileMask<T>* masks;

  Decode(const Call& call, Bump& bump)
      : c(call), rows(call.G * call.Tq), ld(round_up(call.D, N)), ldv(round_up(call.Dv, N)) {
    q = bump.take<T>(rows * ld);
    s = bump.take<T>(rows * TILE_K);
    kt = bump.take<T>(TILE_K * ld);
    vt = bump.take<T>(TILE_K * ldv);
    turned = bump.take<T>(TILE_K * TILE_Q);
    acc = bump.take<T>(rows * ldv);
    m = bump.take<T>(rows);
    l = bump.take<T>(rows);
    masks = bump.take<TileMask<T>>(c.G);
  }

  // rows of keys in the compute type, in place where they already are
  const T* keys(const Array& a, int64_t b, int64_t hk, int64_t first, int64_t n, int64_t width, int64_t padded, T* tile,
                int64_t* stride, bool check, bool* finite) {
    const bool same = a.dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64);
    if (same && !c.block_table && !check && width == padded) {
      *stride = a.stride[1];
      return reinterpret_cast<const T*>(a.data) + key_offset(c, a, b, hk, first);
    }
    *finite = load_rows({c, a, b, hk, first, 1, n, width}, tile, padded, check);
    *stride = padded;
    return tile;
  }

  void prefetch(const Array& a, int64_t b, int64_t hk, int64_t j, int64_t end, int64_t width) const {
    if (j < end) prefetch_row(a, key_offset(c, a, b, hk, j), width);
  }

  template <int R>
  void dots(int64_t row, int64_t n, const T* k, int64_t stride) {
    for (int64_t j = 0; j < n; j += 2) {
      const T* k0 = k + j * stride;
      const T* k1 = j + 1 < n ? k0 + stride : k0;
      vec<T> a[R], b[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) a[r] = b[r] = vec<T>{};
      for (int64_t d = 0; d < ld; d += N) {
        const vec<T> x = load(k0 + d), y = load(k1 + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const vec<T> w = load(q + (row + r) * ld + d);
          a[r] += w * x;
          b[r] += w * y;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        s[(row + r) * TILE_K + j] = add_lanes<T>(a[r]);
        if (j + 1 < n) s[(row + r) * TILE_K + j + 1] = add_lanes<T>(b[r]);
      }
    }
  }

  // mask, bias and the rest speak of tiles with queries as lanes: turn, apply, turn back
  void extras(Scorer<T>& x, int64_t g, int64_t first, int64_t n, bool partial, bool weights) {
    for (int64_t r = 0; r < n; ++r)
      for (int64_t t = 0; t < x.width; ++t) turned[r * TILE_Q + t] = t < c.Tq ? s[(g * c.Tq + t) * TILE_K + r] : T(0);
    if (weights)
      x.dropout(turned, nullptr, first, n);
    else
      x.scores(turned, first, n, partial, nullptr);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t t = 0; t < c.Tq; ++t) s[(g * c.Tq + t) * TILE_K + r] = turned[r * TILE_Q + t];
  }

  void softmax(int64_t r, int64_t n) {
    T* p = s + r * TILE_K;
    const int64_t padded = round_up(n, N);
    for (int64_t j = n; j < padded; ++j) p[j] = Low<T>::masked;
    vec<T> top = splat(m[r]);
    for (int64_t j = 0; j < padded; j += N) top = vmax<T>(top, load(p + j));
    T best = m[r];
    for (int i = 0; i < N; ++i) best = top[i] > best ? top[i] : best;
    const T fix = exp2v(splat(m[r] - best))[0];
    vec<T> sum = {};
    for (int64_t j = 0; j < padded; j += N) {
      const vec<T> e = exp2v(load(p + j) - best);
      sum += e;
      store(p + j, e);
    }
    l[r] = l[r] * fix + add_lanes<T>(sum);
    m[r] = best;
    if (fix != T(1))
      for (int64_t d = 0; d < ldv; d += N) store(acc + r * ldv + d, load(acc + r * ldv + d) * fix);
  }

  void step(Scorer<T>* x, int64_t b, int64_t hk, int64_t first, int64_t n, int64_t end, bool partial) {
    bool finite = true;
    int64_t stride = 0;
    const T* k = keys(c.k, b, hk, first, n, c.D, ld, kt, &stride, false, &finite);
    for (int64_t j = 0; j < n; ++j) prefetch(c.v, b, hk, first + j, end, c.Dv);
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) dots<4>(row, n, k, stride);
    for (; row < rows; ++row) dots<1>(row, n, k, stride);
    for (int64_t j = 0; j < n; ++j) prefetch(c.k, b, hk, first + n + j, end, c.D);
    const bool more = partial || !x[0].plain();
    for (int64_t g = 0; more && g < c.G; ++g) extras(x[g], g, first, n, partial, false);
    for (int64_t r = 0; r < rows; ++r) softmax(r, n);
    for (int64_t g = 0; c.drop_below && g < c.G; ++g) extras(x[g], g, first, n, partial, true);
    finite = true;
    const bool check = partial || x[0].masked_by_bias();
    const T* v = keys(c.v, b, hk, first, n, c.Dv, ldv, vt, &stride, check, &finite);
    if (finite || !check)
      mm<Plain<T>>(rows, ldv, n, v, stride, s, TILE_K, 1, acc, ldv, true);
    else
      values_one_by_one(x, first, n, partial);
  }

  void values_one_by_one(Scorer<T>* x, int64_t first, int64_t n, bool partial) {
    for (int64_t g = 0; g < c.G; ++g)
      for (int64_t j = 0; j < n; ++j)
        for (int64_t t = 0; t < c.Tq; ++t) {
          if (partial) x[g].prepare();
          if (!x[g].allowed(static_cast<int>(t / N * N), first + j, partial)[t % N]) continue;
          const int64_t r = g * c.Tq + t;
          for (int64_t d = 0; d < c.Dv; ++d) acc[r * ldv + d] += s[r * TILE_K + j] * vt[j * ldv + d];
        }
  }

  static int64_t scratch_bytes(const Call& c) {
    Bump bump{nullptr};
    Decode measure(c, bump);
    return bump.used + round_up(c.G * static_cast<int64_t>(sizeof(Item<T>) + sizeof(Scorer<T>)), 64);
  }

  // partial results of one chunk: rows of [Dv] sums, then m, then l
  static void task(const Call& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    Decode f(c, bump);
    Scorer<T>* x = bump.take<Scorer<T>>(c.G);
    const int64_t chunk = task % c.n_chunks, hk = task / c.n_chunks % c.Hk, b = task / c.n_chunks / c.Hk;
    const TaskIndex index{b, hk, 0, 0, 0};
    Item<T> it;
    for (int64_t g = 0; g < c.G; ++g) {
      it.place(c, index, g, 0, f.masks + g);
      x[g] = it.s;
      load_queries(c.q, b, hk * c.G + g, 0, 1, c.Tq, c.Tq, c.D, f.q + g * c.Tq * f.ld, f.ld);
    }
    const T pre = static_cast<T>(c.scale) * (x[0].plain() ? LOG2E<T> : T(1));
    for (int64_t i = 0; i < f.rows * f.ld; ++i) f.q[i] *= pre;
    for (int64_t i = 0; i < f.rows * f.ldv; ++i) f.acc[i] = T(0);
    for (int64_t r = 0; r < f.rows; ++r) f.m[r] = Low<T>::start, f.l[r] = T(0);
    const int64_t begin = chunk * c.split_keys, end = begin + c.split_keys;
    for (const int32_t* seg = it.seg; seg < it.seg_end; seg += 3) {
      const int64_t last = min64(seg[1], end);
      for (int64_t k = max64(seg[0], begin); k < last; k += TILE_K)
        f.step(x, b, hk, k, min64(TILE_K, last - k), last, seg[2] == PARTIAL);
    }
    T* out = static_cast<T*>(c.partial) + task * f.rows * (c.Dv + 2);
    for (int64_t r = 0; r < f.rows; ++r, out += c.Dv + 2) {
      for (int64_t d = 0; d < c.Dv; ++d) out[d] = f.acc[r * f.ldv + d];
      out[c.Dv] = f.m[r], out[c.Dv + 1] = f.l[r];
    }
  }

  // one (batch, key head): chunks in ascending order, then the sink
  static void combine(const Call& c, int64_t task) {
    const int64_t rows = c.G * c.Tq, hk = task % c.Hk, b = task / c.Hk, width = c.Dv + 2;
    const T* part = static_cast<const T*>(c.partial) + task * c.n_chunks * rows * width;
    T row[1024];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = hk * c.G + r / c.Tq, t = r % c.Tq;
      T top = Low<T>::start, sum = 0;
      for (int64_t n = 0; n < c.n_chunks; ++n) top = vmax_scalar(part[(n * rows + r) * width + c.Dv], top);
      for (int64_t d = 0; d < c.Dv; ++d) row[d] = T(0);
      for (int64_t n = 0; n < c.n_chunks; ++n) {
        const T* p = part + (n * rows + r) * width;
        if (p[c.Dv + 1] == T(0)) continue;
        const T w = static_cast<T>(__builtin_exp2(p[c.Dv] - top));
        sum += p[c.Dv + 1] * w;
        for (int64_t d = 0; d < c.Dv; ++d) row[d] += p[d] * w;
      }
      T lse = sum == T(0) ? Low<T>::masked : (top + static_cast<T>(__builtin_log2(sum))) * LN2<T>;
      T scale = sum == T(0) ? T(0) : T(1) / sum;
      if (c.sinks) {
        const T sink = static_cast<T>(c.sinks[h]), high = sink > lse ? sink : lse;
        const T total = high + static_cast<T>(__builtin_log1p(__builtin_exp(-__builtin_fabs(sink - lse))));
        if (sum != T(0)) scale *= static_cast<T>(__builtin_exp(lse - total));
        lse = total;
      }
      for (int64_t d = 0; d < c.Dv; ++d) row[d] *= scale;
      static_cast<T*>(c.lse)[(b * c.Tq + t) * c.Hq + h] = lse;
      write_row(c.o, b * c.o.stride[0] + t * c.o.stride[1] + h * c.o.stride[2], c.Dv, row);
    }
  }
  static T vmax_scalar(T a, T b) { return a > b ? a : b; }
};

}  // namespace saccade::SACCADE_ISA
