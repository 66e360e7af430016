// Results of decode for chunks of keys, rows of [Dv] sums, m, l and what more results need, and the pass that merges them.
#pragma once
#include "scores.hpp"

namespace saccade::SACCADE_ISA {

// one key head: rows are the query heads of its group times Tq
template <class T>
struct DecodeHead {
  T *q, *acc, *m, *l, *u;
  Scorer<T>* scorer;  // [G]
  int64_t b, hk;
};

template <class T>
struct Merge {
  // Writes a head's partial results: rows of [Dv] sums, then m, l and what the entropy needs. True when all sums are finite. In the second
  // pass (`more`), writes only the rows whose sums were not finite and now are.
  static bool store(const Call& c, const DecodeHead<T>& h, int64_t rows, int64_t ldv, T* out, bool more) {
    bool finite = true;
    for (int64_t r = 0; r < rows; ++r, out += c.partial_width()) {
      const bool here = all_finite(h.acc + r * ldv, ldv) || h.l[r] * 0 != 0;
      finite &= here;
      if (more && (!here || all_finite(out, c.Dv))) continue;
      for (int64_t d = 0; d < c.Dv; ++d) out[d] = h.acc[r * ldv + d];
      out[c.Dv] = h.m[r], out[c.Dv + 1] = h.l[r];
      if (c.wants_more()) out[c.Dv + 2] = h.u[r];
      // the maxima of the second pass are not exact
      if (c.wants_more() && !more) out[c.Dv + 3] = h.m[r];
    }
    return finite;
  }
  // merges the chunks of one (batch, key head) in ascending order, then the sink
  static void combine(const Call& c, int64_t task) {
    const int64_t rows = c.G * c.Tq, hk = task % c.Hk, b = task / c.Hk, width = c.partial_width();
    const T* part = static_cast<const T*>(c.partial) + task * c.n_chunks * rows * width;
    T row[1024], other[1024];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = hk * c.G + r / c.Tq, t = r % c.Tq;
      T top = Low<T>::start, sum = 0;
      for (int64_t n = 0; n < c.n_chunks; ++n) top = larger(part[(n * rows + r) * width + c.Dv], top);
      for (int64_t d = 0; d < c.Dv; ++d) row[d] = T(0);
      for (int64_t n = 0; n < c.n_chunks; ++n) {
        const T* p = part + (n * rows + r) * width;
        if (p[c.Dv + 1] == T(0)) continue;
        const T w = static_cast<T>(__builtin_exp2(p[c.Dv] - top));
        sum += p[c.Dv + 1] * w;
        for (int64_t d = 0; d < c.Dv; ++d) row[d] += p[d] * w;
      }
      double lse = -__builtin_inf(), scale = 0;
      const int64_t at = (b * c.Tq + t) * c.Hq + h;
      if (sum != T(0)) {
        lse = lse_of<T>(c, top, sum);
        scale = 1 / static_cast<double>(sum);
      }
      const double mine = lse;
      if (c.sinks) {
        lse = log_add(mine, c.sinks[h]);
        if (sum != T(0)) scale *= __builtin_exp(mine - lse);
      }
      if (c.wants_more()) combine_more(c, part + r * width, rows * width, at, top, sum, mine, lse);
      for (int64_t d = 0; d < c.Dv; ++d) row[d] *= static_cast<T>(scale);
      if (!all_finite(row, c.Dv)) {
        // the merged sums of all chunks may have overflowed
        for (int64_t d = 0; d < c.Dv; ++d) other[d] = T(0);
        for (int64_t n = 0; n < c.n_chunks; ++n) {
          const T* p = part + (n * rows + r) * width;
          const T w = p[c.Dv + 1] == T(0) ? T(0) : static_cast<T>(__builtin_exp2(p[c.Dv] - top) * scale);
          for (int64_t d = 0; w != T(0) && d < c.Dv; ++d) other[d] += p[d] * w;
        }
        if (all_finite(other, c.Dv)) __builtin_memcpy(row, other, static_cast<size_t>(c.Dv) * sizeof(T));
      }
      static_cast<T*>(c.lse)[at] = static_cast<T>(lse);
      write_row(c.o, b * c.o.stride[0] + t * c.o.stride[1] + h * c.o.stride[2], c.Dv, row);
    }
  }
  // the maximum and the entropy of row `at`; `sum` is that of its weights relative to 2^top, `mine` the lse of its keys
  [[gnu::noinline]] static void combine_more(const Call& c, const T* part, int64_t step, int64_t at, T top, T sum,
                                             double mine, double total) {
    double best = -__builtin_inf(), u = 0;
    for (int64_t n = 0; n < c.n_chunks; ++n, part += step) {
      const double l = static_cast<double>(part[c.Dv + 1]),
                   rise = static_cast<double>(part[c.Dv]) - static_cast<double>(top);
      if (l == 0) continue;
      best = part[c.Dv + 3] > best ? static_cast<double>(part[c.Dv + 3]) : best;
      u += (static_cast<double>(part[c.Dv + 2]) + l * rise) * __builtin_exp2(rise);
    }
    const double whole = static_cast<double>(sum);
    // NaN where lse is
    if (c.max) static_cast<T*>(c.max)[at] = static_cast<T>(from_log2<T>(c, best) + whole * 0);
    if (!c.entropy) return;
    double entropy = entropy_share(mine, LN2<double> * (__builtin_log2(whole) - u / whole), total);
    if (c.sinks) entropy += entropy_share(c.sinks[at % c.Hq], 0, total);
    static_cast<T*>(c.entropy)[at] = static_cast<T>(entropy);
  }
};

}  // namespace saccade::SACCADE_ISA
