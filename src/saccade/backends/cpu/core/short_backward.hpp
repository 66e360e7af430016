// Backward of few tokens, as in short.hpp: vectors lie along the head dimension, and rows are read where they are.
#pragma once
#include "key_sums.hpp"
#include "row_sums.hpp"
#include "short.hpp"

namespace saccade::SACCADE_ISA {

// one head; adds to the sums of its key head
template <class T>
struct ShortBackward : ShortRows<T, T> {
  using Rows = ShortRows<T, T>;
  using Rows::c, Rows::b, Rows::h, Rows::q, Rows::k, Rows::v, Rows::all, Rows::keys, Rows::finite, Rows::N, Rows::R;
  const typename Rows::Side dout;
  T *dk, *dv;  // [Tk][D], [Tk][Dv]
  T p[R][SHORT], ds[R][SHORT];

  ShortBackward(const Call& call, int64_t b, int64_t h, T* dk, T* dv)
      : Rows(call, b, h), dout(c.do_, b, h, c.Dv), dk(dk), dv(dv) {}

  bool run() {
    return Rows::each_rows([&](int64_t t, int64_t n) { some(t, n); });
  }

 private:
  // n <= R rows from t on
  void some(int64_t t, int64_t n) {
    Rows::find_keys(t, n);
    Rows::products(q, k, t, static_cast<T>(c.scale * LOG2E<double>), p);
    Rows::products(dout, v, t, T(1), ds);
    for (int64_t r = 0; r < n; ++r) gradients(r, (b * c.Tq + t + r) * c.Hq + h);
    for (int64_t r = n; r < R; ++r)
      for (int64_t j = 0; j < keys(); j += N) store(p[r] + j, vec<T>{}), store(ds[r] + j, vec<T>{});
    const T scale = static_cast<T>(c.scale);
    T* const to = reinterpret_cast<T*>(c.dq.data) + b * c.dq.stride[0] + t * c.dq.stride[1] + h * c.dq.stride[2];
    Rows::each_block(c.D, [&]<int NV>(int64_t d) __attribute__((always_inline)) {
      Rows::template weighted<NV>(ds, k, d, n, [&](int r, int i, vec<T> sum) __attribute__((always_inline)) {
        finite.see(sum);
        store(to + r * c.dq.stride[1] + d + i * N, sum * scale);
      });
      add_rows<NV>(ds, q, t, d, dk);
    });
    Rows::each_block(c.Dv, [&]<int NV>(int64_t d) __attribute__((always_inline)) { add_rows<NV>(p, dout, t, d, dv); });
  }

  // P and dS of a row, from scores and dP
  [[gnu::always_inline]] void gradients(int64_t r, int64_t at) {
    double* row = c.rows + 2 * at;
    const T lse = static_cast<T>(row[0]), low = static_cast<T>(row[0] - static_cast<double>(lse));
    Doubles sum_p, sum_pdp;
    for (int64_t j = 0; j < keys(); j += N) {
      const vec<T> e = exp2v((load(p[r] + j) - lse) - low), x = Rows::sees(r, j) ? e : vec<T>{};
      const vec<T> dp = x == T(0) ? vec<T>{} : load(ds[r] + j);
      store(p[r] + j, x), store(ds[r] + j, dp);
      sum_p.add(x, splat(T(1))), sum_pdp.add(x, dp);
    }
    c.sums[2 * at] = sum_p.total(), c.sums[2 * at + 1] = sum_pdp.total();
    const T factor = static_cast<T>(RowSums<T>::refine(c, at));
    const T delta = static_cast<T>(row[1]), delta_low = static_cast<T>(row[1] - static_cast<double>(delta));
    for (int64_t j = 0; j < keys(); j += N) {
      const vec<T> x = load(p[r] + j) * factor, ds_row = x * ((load(ds[r] + j) - delta) - delta_low);
      store(p[r] + j, x), store(ds[r] + j, x == T(0) ? vec<T>{} : ds_row);
    }
  }

  // sums of products of numbers, in double
  struct Doubles {
    static constexpr int PARTS = 8 / sizeof(T), L = N / PARTS;
    typedef T some __attribute__((vector_size(SACCADE_BYTES / PARTS), aligned(sizeof(T))));
    typedef double wide __attribute__((vector_size(SACCADE_BYTES)));
    vec<double> sum = {};
    void add(vec<T> x, vec<T> y) {
      T a[N], b[N];
      store(a, x), store(b, y);
#pragma GCC unroll 2
      for (int i = 0; i < PARTS; ++i) {
        const wide u = __builtin_convertvector(*reinterpret_cast<const some*>(a + i * L), wide);
        const wide w = __builtin_convertvector(*reinterpret_cast<const some*>(b + i * L), wide);
        sum += reinterpret_cast<vec<double>>(u) * reinterpret_cast<vec<double>>(w);
      }
    }
    double total() const { return add_lanes<double>(sum); }
  };

  // adds R rows times the weights of each key, numbers from d on
  template <int NV>
  [[gnu::always_inline]] void add_rows(const T (*weights)[SHORT], const typename Rows::Side& rows, int64_t t, int64_t d,
                                       T* sums) {
    vec<T> x[R][NV];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) x[r][i] = load(rows.row(min64(t + r, c.Tq - 1)) + d + i * N);
    T* to = sums + all.begin * rows.width + d;
    for (int64_t j = 0; j < keys(); ++j, to += rows.width)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) {
        vec<T> sum = load(to + i * N);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum += x[r][i] * weights[r][j];
        finite.see(sum);
        store(to + i * N, sum);
      }
  }
};

template <class T>
SACCADE_INLINE bool short_gradients(const Call& c) {
  return c.sums && !c.only_sums && !c.dentropy && !c.dbias.data && c.splits == 1 && c.stage.key == 0 &&
         c.stage.key_end == c.Tk && c.q.dtype == same_dtype<T> && c.do_.dtype == c.q.dtype && c.dq.dtype == c.q.dtype &&
         short_rows<T>(c);
}
// the sums dK and dV of a key head, and dQ of its query heads; false as in ShortRows::each_rows
template <class T>
static bool short_key_head(const Call& c, int64_t b, int64_t hk, T* dk, T* dv) {
  for (int64_t h = hk * c.G; h < (hk + 1) * c.G; ++h)
    if (!ShortBackward<T>(c, b, h, dk, dv).run()) return false;
  return true;
}

}  // namespace saccade::SACCADE_ISA
