// Backward of a recurrence over matrix states, chunk by chunk from the end. The states at the starts of chunks are
// computed again, one span of chunks at a time from the state at its start, so that memory stays small. The gradient of
// a decay is a sum over the pairs of tokens before and after it; nothing is subtracted.
#pragma once
#include "recurrent_tile.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
struct RecurrentBackward : Chunk<T> {
  using Base = Chunk<T>;
  using Base::c, Base::Fp, Base::Wp, Base::Cp, Base::q, Base::k, Base::e, Base::u, Base::p, Base::x, Base::gamma,
      Base::a, Base::from, Base::to, Base::width, Base::link, Base::beta, Base::pad;
  static constexpr int64_t SPAN = 64;

  int64_t size;               // numbers of a state
  T *states, *starts;         // at the starts of a span's chunks; at the starts of spans
  T *S, *dS;                  // state before the chunk; gradient of the state after it, later before it
  T *d, *du, *dp;             // gradients of the sums o [Cp][Wp], of u, of p [Cp][Cp]
  T *turned_u, *turned_d;     // [Wp][Cp]
  T *transposed, *X, *Y;      // [Fp][Cp]; S d and dS u of each token [Cp][Fp]
  T *dq, *dk, *qw, *kw;       // [Cp][Fp]; queries decayed from the chunk's start and scaled, keys decayed to its end
  T *begins, *ends, *dg, *M;  // terms of dg with S, with dS; dg itself; its terms of pairs [Cp][Cp]

  RecurrentBackward(const Recurrence& call, int64_t task, Bump& bump) : Base(call, task, bump) {
    size = c.F * Wp;
    char* begin = bump.base + bump.used;
    S = bump.take<T>(size), dS = bump.take<T>(size);
    d = bump.take<T>(Cp * Wp), du = bump.take<T>(Cp * Wp), dp = bump.take<T>(Cp * Cp);
    turned_u = bump.take<T>(Wp * Cp), turned_d = bump.take<T>(Wp * Cp), transposed = bump.take<T>(Fp * Cp);
    X = bump.take<T>(Cp * Fp), Y = bump.take<T>(Cp * Fp), dq = bump.take<T>(Cp * Fp), dk = bump.take<T>(Cp * Fp);
    qw = bump.take<T>(Cp * Fp), kw = bump.take<T>(Cp * Fp);
    begins = bump.take<T>(Cp), ends = bump.take<T>(Cp);
    dg = bump.take<T>(Cp * this->decays()), M = bump.take<T>(Cp * Cp);
    if (bump.base) __builtin_memset(begin, 0, static_cast<size_t>(bump.base + bump.used - begin));
    const int64_t chunks = (c.T + c.chunk - 1) / c.chunk;
    states = bump.take<T>(min64(chunks, SPAN) * size), starts = bump.take<T>((chunks + SPAN - 1) / SPAN * size);
  }
  static int64_t scratch_bytes(const Recurrence& c) {
    Bump bump{nullptr};
    RecurrentBackward measured(c, 0, bump);
    return bump.used;
  }
  static void task(const Recurrence& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    RecurrentBackward(c, task, bump).run();
  }
  void copy(T* to_, const T* from_) const { __builtin_memcpy(to_, from_, static_cast<size_t>(size) * sizeof(T)); }

  void run() {
    this->read_state(c.initial, S), this->read_state(c.dfinal, dS);
    const int64_t step = c.chunk, length = this->stop - this->first, chunks = (length + step - 1) / step;
    const auto at = [&](int64_t i) { return this->first + i * step; };
    const auto count = [&](int64_t i) { return min64(step, this->stop - at(i)); };
    const auto forward = [&](int64_t i) {
      check_stop(), this->load_tokens(at(i), count(i), S);
      this->next = {at(i + 1), min64(at(i + 2), this->stop), this->h, false};
      this->advance(count(i), S);
    };
    if (!c.causal) {
      for (int64_t i = 0; i < chunks; ++i) forward(i);
      for (int64_t i = 0; i < chunks; ++i) queries_of_all(at(i), count(i));
      for (int64_t i = 0; i < chunks; ++i) keys_of_all(at(i), count(i));
      return this->write_state(dS, c.dinitial);
    }
    for (int64_t i = 0; i < chunks; ++i) {
      if (i % SPAN == 0) copy(starts + i / SPAN * size, S);
      if (i / SPAN < (chunks - 1) / SPAN) forward(i);
    }
    for (int64_t span = (chunks + SPAN - 1) / SPAN - 1; span >= 0; --span) {
      const int64_t begin = span * SPAN, end = min64(begin + SPAN, chunks);
      copy(S, starts + span * size);
      for (int64_t i = begin; i < end; ++i) {
        copy(states + (i - begin) * size, S);
        if (i + 1 < end) forward(i);
      }
      for (int64_t i = end - 1; i >= begin; --i) copy(S, states + (i - begin) * size), chunk(at(i), count(i));
    }
    this->write_state(dS, c.dinitial);
  }

  void chunk(int64_t t, int64_t n) {
    check_stop();
    this->load_queries(t, n), this->load_tokens(t, n, S), load_gradient(t, n);
    const int64_t before = min64(c.chunk, t - this->first);
    this->next = {t - before, t, this->h};
    this->weights(n);
    transpose(pad(n), Wp, u, Wp, turned_u, Cp);
    this->lower(n, [&](int64_t r, int64_t rows, int64_t columns) {
      mm<Plain<T>>(rows, pad(columns), width, turned_u, Cp, d + r * Wp, Wp, 1, dp + r * Cp, Cp, false);
    });
    this->weigh(n, q, from, this->outer(), qw), this->weigh(n, k, to, T(1), kw);
    states_times(n, S, turned_d, X);
    if (c.normalize) quotient(n, true);
    states_times(n, dS, turned_u, Y);
    values(n);
    this->by_channel() ? pairs_by_channel(n) : pairs_of_heads(n);
    if (c.delta) delta(n);
    if (c.decay == HEAD) decays_of_heads(n);
    state(n);
    write(t, n);
  }

  void load_gradient(int64_t t, int64_t n) {
    for (int64_t r = 0; r < n; ++r) {
      read_row(c.dout, this->at(c.dout, t + r, this->h) + this->column, Base::values(), d + r * Wp);
      if (c.normalize) d[r * Wp + c.V] = T(0);
    }
    transpose(pad(n), Wp, d, Wp, turned_d, Cp);
  }
  // out[r] = state y_r; turned_y is y transposed
  void states_times(int64_t n, const T* state_, const T* turned_y, T* out) {
    this->fetching(c.F, [&](int64_t f, int64_t rows) {
      mm<Plain<T>>(rows, pad(n), width, turned_y, Cp, state_ + f * Wp, Wp, 1, transposed + f * Cp, Cp, false);
    });
    transpose(Fp, pad(n), transposed, Cp, out, Fp);
  }
  static T dot(const T* y, const T* z, int64_t n) {
    vec<T> sum = {};
    int64_t i = 0;
    for (; i + lanes<T> <= n; i += lanes<T>) sum += load(y + i) * load(z + i);
    T total = T(0);
    for (int l = 0; l < lanes<T>; ++l) total += sum[l];
    for (; i < n; ++i) total += y[i] * z[i];
    return total;
  }
  static T sum_of(const T* y, int64_t n) {
    vec<T> sum = {};
    int64_t i = 0;
    for (; i + lanes<T> <= n; i += lanes<T>) sum += load(y + i);
    T total = T(0);
    for (int l = 0; l < lanes<T>; ++l) total += sum[l];
    for (; i < n; ++i) total += y[i];
    return total;
  }

  // from the gradient of the normalised output to that of its sums; the last sum is the divisor, 0 passes no gradient
  void quotient(int64_t n, bool pairs) {
    for (int64_t r = 0; r < n; ++r) {
      T total = T(0), product = dot(qw + r * Fp, X + r * Fp, c.F);
      for (int64_t f = 0; f < c.F; ++f) total += qw[r * Fp + f] * S[f * Wp + c.V];
      if (pairs) total += sum_of(p + r * Cp, r + 1), product += dot(p + r * Cp, dp + r * Cp, r + 1);
      // the mean is subtracted before the division: the two terms may cancel
      const T inverse = total != T(0) ? T(1) / total : T(0), mean = total != T(0) ? product / total : T(0);
      for (int64_t w = 0; w < c.V; ++w) d[r * Wp + w] *= inverse;
      d[r * Wp + c.V] = -mean * inverse;
      for (int64_t s = 0; pairs && s <= r; ++s) dp[r * Cp + s] = (dp[r * Cp + s] - mean) * inverse;
      for (int64_t f = 0; f < c.F; ++f) X[r * Fp + f] = (X[r * Fp + f] - S[f * Wp + c.V] * mean) * inverse;
    }
  }

  // f(first column, columns, rows below) over blocks of an upper triangle: from token s to tokens s, s + 1, ..
  template <class Body>
  static void upper(int64_t n, Body f) {
    for (int64_t s = 0; s < n; s += 16) f(s, min64(16, n - s), n - s);
  }
  void values(int64_t n) {
    this->fetching(n, [&](int64_t r, int64_t rows) {
      mm<Plain<T>>(rows, Wp, c.F, dS, Wp, kw + r * Fp, Fp, 1, du + r * Wp, Wp, false);
    });
    upper(n, [&](int64_t s, int64_t rows, int64_t terms) {
      mm<Plain<T>>(rows, Wp, terms, d + s * Wp, Wp, p + s * Cp + s, 1, Cp, du + s * Wp, Wp, true);
    });
  }
  // y [Cp][Fp] += the lower (or upper) triangle z times rows
  void add_lower(int64_t n, const T* z, const T* rows_, T* y) const {
    this->lower(n, [&](int64_t r, int64_t rows, int64_t columns) {
      mm<Plain<T>>(rows, Fp, columns, rows_, Fp, z + r * Cp, Cp, 1, y + r * Fp, Fp, true);
    });
  }
  void add_upper(int64_t n, const T* z, const T* rows_, T* y) const {
    upper(n, [&](int64_t s, int64_t rows, int64_t terms) {
      mm<Plain<T>>(rows, Fp, terms, rows_ + s * Fp, Fp, z + s * Cp + s, 1, Cp, y + s * Fp, Fp, true);
    });
  }

  void pairs_of_heads(int64_t n) {
    const T mul = this->outer();
    for (int64_t r = 0; r < n; ++r) {
      begins[r] = dot(qw + r * Fp, X + r * Fp, c.F), ends[r] = dot(kw + r * Fp, Y + r * Fp, c.F);
      for (int64_t s = 0; s < pad(n); s += lanes<T>) {
        const ivec<T> seen = iota<T>() <= isplat<T>(r - s);
        const vec<T> y = load(dp + r * Cp + s);
        store(M + r * Cp + s, seen ? y * load(p + r * Cp + s) : vec<T>{});
        store(dp + r * Cp + s, seen ? y * load(gamma + r * Cp + s) * mul : vec<T>{});
      }
    }
    this->weigh(n, X, from, mul, dq), this->weigh(n, Y, to, T(1), dk);
    add_lower(n, dp, k, dq), add_upper(n, dp, q, dk);
  }

  // Channels f of rows y that read keys with weights mul dp, each key decayed up to the row that reads it. Adds what
  // passes each decay to `between`, what the keys receive to of_keys; of_rows is what the rows receive.
  void channels_of_pairs(int64_t n, int64_t f, const T* y, T mul, vec<T>* of_rows, vec<T>* of_keys,
                         vec<T>* between) const {
    vec<T> key[128], query[128];
    const auto row = [&](const T* z, int64_t r) { return load(z + r * Fp + f); };
    for (int64_t r = 0; r < n; ++r) key[r] = row(k, r), query[r] = row(y, r);
    for (int64_t r = 0; r < n; ++r) {
      vec<T> sum = {};
      for (int64_t s = 0; s < r; ++s) {
        key[s] *= row(a, r), sum += key[s] * (dp[r * Cp + s] * mul);
        between[s + 1] += row(y, r) * sum;
      }
      of_rows[r] = sum + key[r] * (dp[r * Cp + r] * mul);
    }
    for (int64_t s = n - 1; s >= 0; --s) {
      vec<T> sum = query[s] * (dp[s * Cp + s] * mul) + of_keys[s];
      for (int64_t r = s + 1; r < n; ++r) query[r] *= row(a, s + 1), sum += query[r] * (dp[r * Cp + s] * mul);
      of_keys[s] = sum;
    }
  }

  void pairs_by_channel(int64_t n) {
    const T mul = this->outer();
    for (int64_t f = 0; f < Fp; f += lanes<T>) {
      vec<T> of_rows[128], of_keys[128], between[129];
      const auto row = [&](const T* y, int64_t r) { return load(y + r * Fp + f); };
      for (int64_t r = 0; r < n; ++r) of_keys[r] = row(Y, r) * row(to, r), between[r] = vec<T>{};
      channels_of_pairs(n, f, q, mul, of_rows, of_keys, between);
      for (int64_t r = 0; r < n; ++r) {
        store(dq + r * Fp + f, of_rows[r] + row(X, r) * row(from, r) * mul);
        store(dk + r * Fp + f, of_keys[r]);
      }
      vec<T> whole = {};
      for (int l = 0; l < lanes<T> && f + l < c.F; ++l)
        whole[l] = dot(S + (f + l) * Wp, dS + (f + l) * Wp, Wp) * from[(n - 1) * Fp + f + l];
      vec<T> begun = {}, ended = whole;
      for (int64_t t = n - 1; t >= 0; --t) begun += row(qw, t) * row(X, t), between[t] += begun;
      for (int64_t t = 0; t < n; ++t) store(dg + t * Fp + f, between[t] + ended), ended += row(kw, t) * row(Y, t);
    }
  }

  // back through the triangular system of the delta rule; du becomes its solution, kw the factors of S in the values
  void delta(int64_t n) {
    for (int64_t r = 0; r < n; ++r)
      for (int64_t s = 0; s < r; ++s) link[r * Cp + s] *= beta[r];
    constexpr int64_t block = 8;
    for (int64_t s0 = (n - 1) / block * block; s0 >= 0; s0 -= block) {
      const int64_t stop = min64(s0 + block, n);
      if (stop < n)
        mm<Plain<T>>(stop - s0, Wp, n - stop, du + stop * Wp, Wp, link + stop * Cp + s0, 1, Cp, du + s0 * Wp, Wp, true);
      for (int64_t s = stop - 1; s >= s0; --s)
        for (int64_t w = 0; w < Wp; w += lanes<T>) {
          vec<T> y = load(du + s * Wp + w);
          for (int64_t r = s + 1; r < stop; ++r) y += load(du + r * Wp + w) * link[r * Cp + s];
          store(du + s * Wp + w, y);
        }
    }
    this->lower(n, [&](int64_t r0, int64_t rows, int64_t columns) {
      mm<Plain<T>>(rows, pad(columns), width, turned_u, Cp, du + r0 * Wp, Wp, 1, dp + r0 * Cp, Cp, false);
    });
    for (int64_t r = 0; r < n; ++r)
      for (int64_t s = 0; s < pad(n); ++s) {
        T& y = dp[r * Cp + s];
        if (s < r) M[r * Cp + s] += link[r * Cp + s] * y;
        y = s < r ? -beta[r] * gamma[r * Cp + s] * y : T(0);
      }
    transpose(pad(n), Wp, du, Wp, turned_d, Cp);
    states_times(n, S, turned_d, X);
    if (this->by_channel()) return keys_by_channel(n);
    add_lower(n, dp, k, dk), add_upper(n, dp, k, dk);
    for (int64_t r = 0; r < n; ++r) {
      const T mul = c.decay == HEAD ? -beta[r] * from[r] : -beta[r];
      for (int64_t f = 0; f < Fp; f += lanes<T>) {
        const vec<T> y = load(X + r * Fp + f) * mul;
        store(dk + r * Fp + f, load(dk + r * Fp + f) + y), store(kw + r * Fp + f, load(k + r * Fp + f) * mul);
      }
      begins[r] += dot(kw + r * Fp, X + r * Fp, c.F);
    }
  }

  // the end of `delta` with decays per channel, whose gamma is 1: keys as rows that read keys and the state
  void keys_by_channel(int64_t n) {
    for (int64_t f = 0; f < Fp; f += lanes<T>) {
      vec<T> of_rows[128], of_keys[128], between[129], begun = {};
      const auto row = [&](const T* y, int64_t r) { return load(y + r * Fp + f); };
      for (int64_t r = 0; r < n; ++r) of_keys[r] = row(dk, r), between[r] = vec<T>{};
      channels_of_pairs(n, f, k, T(1), of_rows, of_keys, between);
      for (int64_t r = n - 1; r >= 0; --r) {
        const vec<T> decay = row(from, r) * -beta[r];
        store(dk + r * Fp + f, of_keys[r] + of_rows[r] + row(X, r) * decay);
        store(kw + r * Fp + f, row(k, r) * decay);
        begun += row(kw, r) * row(X, r);
        store(dg + r * Fp + f, row(dg, r) + between[r] + begun);
      }
    }
  }

  void decays_of_heads(int64_t n) {
    const T whole = dot(S, dS, size) * from[n - 1];
    T* below = x;  // column sums of M over tokens t and later
    for (int64_t s = 0; s < Cp; ++s) below[s] = T(0);
    T begun = T(0), ended = whole;
    for (int64_t t = n - 1; t >= 0; --t) {
      for (int64_t s = 0; s < pad(n); s += lanes<T>) store(below + s, load(below + s) + load(M + t * Cp + s));
      begun += begins[t];
      dg[t] = sum_of(below, t) + begun;
    }
    for (int64_t t = 0; t < n; ++t) dg[t] += ended, ended += ends[t];
  }

  // dS at the chunk's start: the decayed dS, plus the terms of the tokens. Under the delta rule the two kinds of terms
  // nearly cancel, so they are added in small alternating steps.
  void state(int64_t n) {
    for (int64_t f = 0; c.decay && f < c.F; ++f) {
      const T total = from[(n - 1) * this->decays() + (this->by_channel() ? f : 0)];
      for (int64_t w = 0; w < Wp; w += lanes<T>) store(dS + f * Wp + w, load(dS + f * Wp + w) * total);
    }
    const int64_t step = c.delta ? 8 : n;
    for (int64_t t = (n - 1) / step * step; t >= 0; t -= step) {
      const int64_t rows = min64(step, n - t);
      mm<Plain<T>>(c.F, Wp, rows, d + t * Wp, Wp, qw + t * Fp, 1, Fp, dS, Wp, true);
      if (c.delta) mm<Plain<T>>(c.F, Wp, rows, du + t * Wp, Wp, kw + t * Fp, 1, Fp, dS, Wp, true);
    }
  }

  // without causality: queries read the last state, which has all keys
  void queries_of_all(int64_t t, int64_t n) {
    check_stop();
    this->load_queries(t, n), load_gradient(t, n);
    this->weigh(n, q, from, this->outer(), qw);
    states_times(n, S, turned_d, X);
    if (c.normalize) quotient(n, false);
    this->weigh(n, X, from, this->outer(), dq);
    mm<Plain<T>>(c.F, Wp, n, d, Wp, qw, 1, Fp, dS, Wp, true);
    write_features(c.dq, t, n, q, dq);
  }
  void keys_of_all(int64_t t, int64_t n) {
    check_stop();
    this->load_keys(t, n);
    transpose(pad(n), Wp, u, Wp, turned_u, Cp);
    states_times(n, dS, turned_u, dk);
    mm<Plain<T>>(n, Wp, c.F, dS, Wp, k, Fp, 1, du, Wp, false);
    write_features(c.dk, t, n, k, dk), write_values(t, n);
  }

  int64_t shared_at(const Array& to_, int64_t t) const {
    return (this->share * c.B + this->batch) * to_.stride[0] + t * to_.stride[1] + this->h * to_.stride[2];
  }
  void write(int64_t t, int64_t n) {
    write_features(c.dq, t, n, q, dq), write_features(c.dk, t, n, k, dk), write_values(t, n);
    for (int64_t r = 0; c.dg.data && r < n; ++r)
      write_row(c.dg, shared_at(c.dg, t + r), this->by_channel() ? c.K : 1, dg + r * this->decays());
  }
  void write_values(int64_t t, int64_t n) {
    for (int64_t r = 0; r < n; ++r) {
      T* row = du + r * Wp;
      if (c.dbeta.data) {
        const T y = dot(row, e + r * Wp, width);
        write_row(c.dbeta, shared_at(c.dbeta, t + r), 1, &y);
        for (int64_t w = 0; w < Wp; w += lanes<T>) store(row + w, load(row + w) * beta[r]);
      }
      write_row(c.dv, this->at(c.dv, t + r, this->h) + this->column, Base::values(), row);
    }
  }
  // back through the feature map, whose derivative follows from its value y
  void write_features(const Array& to_, int64_t t, int64_t n, const T* features, T* gradients) {
    for (int64_t r = 0; r < n; ++r) {
      const T* y = features + r * Fp;
      T* g = gradients + r * Fp;
      if (c.feature == Feature::taylor) {
        from_taylor(y, g);
      } else if (c.feature != Feature::none) {
        for (int64_t f = 0; f < Fp; f += lanes<T>) {
          const vec<T> z = load(y + f), one = splat(T(1));
          const vec<T> slope = c.feature == Feature::exp    ? z
                               : c.feature == Feature::relu ? (z > T(0) ? one : vec<T>{})
                                                            : (z > one ? one : z);
          store(g + f, load(g + f) * slope);
        }
      }
      write_row(to_, shared_at(to_, t + r), c.K, g);
    }
  }
  void from_taylor(const T* y, T* g) const {
    const T root = static_cast<T>(__builtin_sqrt(c.scale));
    const T *row = y + 1, *pair = g + 1 + c.K;
    T* sum = x;
    for (int64_t i = 0; i < c.K; ++i) sum[i] = g[1 + i];
    for (int64_t i = 0; i < c.K; ++i) {
      sum[i] += *pair++ * row[i] * T(1.4142135623730950488);
      for (int64_t j = i + 1; j < c.K; ++j, ++pair) sum[i] += *pair * row[j], sum[j] += *pair * row[i];
    }
    for (int64_t i = 0; i < c.K; ++i) g[i] = sum[i] * root;
  }
};

}  // namespace saccade::SACCADE_ISA
