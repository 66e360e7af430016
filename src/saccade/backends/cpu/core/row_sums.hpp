// lse and delta of each row, which a backward reads: from the forward's results, or from the sums of P and P dP.
#pragma once
#include "scores.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
struct RowSums {
  static double of(const void* a, int64_t at) { return a ? static_cast<double>(static_cast<const T*>(a)[at]) : 0; }
  static double dlse(const Call& c, int64_t at) { return of(c.dlse, at); }
  static double dentropy(const Call& c, int64_t at) { return of(c.dentropy, at); }
  // what scores are subtracted from to get -log P: the forward's lse, in log2 units
  static T reference(const Call& c, int64_t at) { return static_cast<T>(in_log2(c, static_cast<const T*>(c.lse)[at])); }
  // rowsum(do * o) - dlse + dentropy * entropy of row `at`
  static double delta(const Call& c, int64_t at) {
    T x[1024], y[1024];
    const int64_t h = at % c.Hq, t = at / c.Hq % c.Tq, b = at / c.Hq / c.Tq;
    read_row(c.do_, b * c.do_.stride[0] + t * c.do_.stride[1] + h * c.do_.stride[2], c.Dv, x);
    read_row(c.o, b * c.o.stride[0] + t * c.o.stride[1] + h * c.o.stride[2], c.Dv, y);
    // summed in the order of dP: where one weight is near 1, dP and delta round alike and cancel
    T sum = 0;
    for (int64_t d0 = 0; d0 < c.Dv; d0 += c.chain()) {
      T piece = 0;
      // in a row without keys o is 0 and do may hold any value, also NaN
      for (int64_t d = d0; d < min64(c.Dv, d0 + c.chain()); ++d) piece = y[d] == T(0) ? piece : x[d] * y[d] + piece;
      sum += piece;
    }
    // in a row without keys the entropy is 0 and its gradient may hold any value
    const double entropy = c.dentropy ? of(c.entropy, at) : 0;
    return static_cast<double>(sum) - dlse(c, at) + (entropy == 0 ? 0 : entropy * dentropy(c, at));
  }
  // lse and delta that the gradients of one row use; where all rows are refined, delta comes from the sums later
  static void row(const Call& c, int64_t at) {
    const T lse = static_cast<const T*>(c.lse)[at];
    // all scores of a row without keys are masked
    c.rows[2 * at] = lse == Low<T>::masked ? 0 : in_log2(c, lse);
    c.rows[2 * at + 1] = c.delta ? c.delta[at] : c.sums && c.refines_all() ? 0 : delta(c, at);
    if (c.sums) c.sums[2 * at] = c.sums[2 * at + 1] = c.lse_lost[at] = 0;
  }

  // A row whose weights, with the sink's, add up to 1 within lse's tolerance sees only these keys. It takes lse and
  // delta from the sums, so that the rounding of neither lse nor o enters its gradients. Returns the factor that
  // corrects P.
  static double refine(const Call& c, int64_t at) {
    double* row = c.rows + 2 * at;
    const double sink = c.sinks ? __builtin_exp2(in_log2(c, static_cast<T>(c.sinks[at % c.Hq])) - row[0]) : 0;
    const double total = c.sums[2 * at] + sink, over = total - 1;
    const double lse = __builtin_fabs(row[0] * LN2<double>), eps = sizeof(T) == 4 ? 0x1p-23 : 0x1p-52;
    const double apart = __builtin_fabs(over) < 0x1p-10 ? over : __builtin_log(total);
    if (!(__builtin_fabs(apart) <= 8 * eps * (lse > 1 ? lse : 1))) {
      row[1] = delta(c, at);
      return 1;
    }
    const double before = row[0], small = over * (1 - over * (0.5 - over / 3)) * LOG2E<double>;
    const double shift = __builtin_fabs(over) < 0x1p-10 ? small : apart * LOG2E<double>;
    row[0] += shift;
    c.lse_lost[at] = shift - (row[0] - before);
    row[1] = c.sums[2 * at + 1] / total - dlse(c, at);
    // the sink's part of the sum of P dP
    if (sink > 0 && c.dentropy) row[1] -= sink / total * dentropy(c, at) * (c.sinks[at % c.Hq] - of(c.lse, at));
    return 1 / total;
  }
};

}  // namespace saccade::SACCADE_ISA
