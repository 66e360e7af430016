// A chunk of tokens of one head: rows of q and k after their feature map, values, decays, and the state.
// Decays are products of the factors themselves, never quotients or exponentials of sums: factors of at most 1 cannot
// overflow, and a factor of 0 forgets the whole state.
#pragma once
#include "recurrent.hpp"
#include "tile.hpp"

namespace saccade::SACCADE_ISA {

// e^x; the product with log2 e has two parts
template <class T>
SACCADE_INLINE vec<T> expv(vec<T> x) {
  constexpr double LOG2E = 1.4426950408889634074;
  constexpr T high = static_cast<T>(LOG2E), low = static_cast<T>(LOG2E - static_cast<double>(high));
  constexpr T least = T(-2000), most = sizeof(T) == 4 ? T(88.72283) : T(709.78271);
  const vec<T> y = x < least ? splat(least) : (x > most ? splat(most) : x);
  const vec<T> t = y * high, rest = (y * high - t) + y * low;
  const vec<T> e = exp2v(t) * (rest * T(0.69314718055994530942) + T(1));
  return x > most ? splat(static_cast<T>(__builtin_inf())) : e;
}

// in place: a row of K numbers becomes ld features, of which the first F are not 0
template <class T>
static void map_features(const Recurrence& c, T* x, int64_t ld) {
  for (int64_t d = c.K; d < ld; ++d) x[d] = T(0);
  if (c.feature == Feature::none) return;
  if (c.feature == Feature::taylor) {
    const T root = static_cast<T>(__builtin_sqrt(c.scale));
    for (int64_t i = c.K - 1; i >= 0; --i) x[1 + i] = x[i] * root;
    x[0] = T(1);
    T* pair = x + 1 + c.K;
    for (int64_t i = 0; i < c.K; ++i) {
      *pair++ = x[1 + i] * x[1 + i] * T(0.70710678118654752440);
      for (int64_t j = i + 1; j < c.K; ++j) *pair++ = x[1 + i] * x[1 + j];
    }
    return;
  }
  for (int64_t d = 0; d < ld; d += lanes<T>) {
    const vec<T> y = load(x + d);
    if (c.feature == Feature::relu)
      store(x + d, y > T(0) ? y : (y == y ? vec<T>{} : y));
    else if (c.feature == Feature::exp)
      store(x + d, expv<T>(y));
    else
      store(x + d, y > T(0) ? y + T(1) : expv<T>(y > T(0) ? vec<T>{} : y));
  }
}

// tokens of a head whose rows are to be fetched; queries: also those of q and of o, or its gradient
struct Next {
  int64_t t = 0, stop = 0, head = 0;
  bool queries = true;
};

template <class T>
struct Chunk {
  const Recurrence& c;
  int64_t sequence, h, share, first, stop;  // tokens of the sequence
  int64_t first_head, stop_head;            // of the task
  int64_t batch, hk, column, width;         // first column of the block, columns with the normaliser's
  int64_t Fp, Wp, Cp;                       // features, columns and tokens of a chunk, padded to whole vectors
  T *q, *k, *e, *u;                         // q, k [Cp][Fp]; values before and after beta [Cp][Wp]
  T *kt, *p, *gamma;                        // k transposed [Fp][Cp]; weights and decays between tokens [Cp][Cp]
  T *a, *from, *to;                         // decay factors; their products from the chunk's start, and to its end
  T *x, *link, *beta;                       // products [Cp][max(Fp, Wp)]; delta rule: -decay (k . k) [Cp][Cp]; [Cp]
  Next next;

  static int64_t pad(int64_t n) { return round_up(n, lanes<T>); }
  bool by_channel() const { return c.decay == CHANNEL; }
  int64_t decays() const { return by_channel() ? Fp : 1; }

  Chunk(const Recurrence& call, int64_t task, Bump& bump)
      : c(call), sequence(task / c.shares() / c.groups()), share(task % c.shares()) {
    first_head = task / c.shares() % c.groups() * c.heads, stop_head = min64(first_head + c.heads, c.H);
    first = c.borders && bump.base ? c.borders[sequence] : 0;
    stop = c.borders && bump.base ? c.borders[sequence + 1] : c.T;
    batch = c.borders ? 0 : sequence, turn_to(first_head);
    column = share * c.block;
    width = min64(c.block, c.V - column) + c.normalize;
    Fp = pad(c.F), Wp = pad(min64(c.block, c.V) + c.normalize), Cp = pad(c.chunk);
    q = bump.take<T>(Cp * Fp), k = bump.take<T>(Cp * Fp), e = bump.take<T>(Cp * Wp);
    u = c.beta.data ? bump.take<T>(Cp * Wp) : e;
    kt = bump.take<T>(Cp * Fp), p = bump.take<T>(Cp * Cp), gamma = bump.take<T>(Cp * Cp);
    a = bump.take<T>(Cp * decays()), from = bump.take<T>(Cp * decays()), to = bump.take<T>(Cp * decays());
    x = bump.take<T>(Cp * max64(Fp, Wp)), link = bump.take<T>(c.delta ? Cp * Cp : 0), beta = bump.take<T>(Cp);
    if (!bump.base) return;
    // the padding of tokens, features and columns takes part in the products
    __builtin_memset(reinterpret_cast<char*>(q), 0,
                     static_cast<size_t>(reinterpret_cast<char*>(beta + Cp) - reinterpret_cast<char*>(q)));
    for (int64_t r = 0; r < Cp; ++r)
      for (int64_t s = 0; s <= r; ++s) gamma[r * Cp + s] = T(1);
  }

  void turn_to(int64_t head) { h = head, hk = head / (c.H / c.Hk); }
  int64_t values() const { return width - c.normalize; }
  int64_t at(const Array& from_, int64_t t, int64_t head) const {
    return batch * from_.stride[0] + t * from_.stride[1] + head * from_.stride[2];
  }
  // offset of the block's first column in this head's state
  int64_t state_at() const { return (sequence * c.H + h) * c.F * (c.V + c.normalize) + column; }

  void read_state(const void* from_, T* S) const {
    const T* in = static_cast<const T*>(from_);
    for (int64_t f = 0; f < c.F; ++f) {
      const int64_t known = in ? width : 0;
      if (in)
        __builtin_memcpy(S + f * Wp, in + state_at() + f * (c.V + c.normalize), static_cast<size_t>(width) * sizeof(T));
      for (int64_t w = known; w < Wp; ++w) S[f * Wp + w] = T(0);
    }
  }
  void write_state(const T* S, void* to_) const {
    T* out = static_cast<T*>(to_);
    for (int64_t f = 0; f < c.F; ++f)
      __builtin_memcpy(out + state_at() + f * (c.V + c.normalize), S + f * Wp, static_cast<size_t>(width) * sizeof(T));
  }

  // loads keys, values and decays; under the delta rule also computes u, given the state before the tokens
  void load_tokens(int64_t t, int64_t n, const T* S) {
    load_keys(t, n);
    if (c.delta) solve(n, S);
  }
  // The rows of the next tokens are fetched while products are computed, a few at a time: a core waits for few at once.
  // Always inlined, because compilers drop calls that only do this.
  __attribute__((always_inline)) void fetch(int64_t rows) {
    const int64_t shared = next.head / (c.H / c.Hk);
    for (; rows > 0 && next.t < next.stop; --rows, ++next.t) {
      prefetch_row(c.k, at(c.k, next.t, shared), c.K);
      prefetch_row(c.v, at(c.v, next.t, next.head) + column, values());
      if (by_channel()) prefetch_row(c.g, at(c.g, next.t, next.head), c.K);
      if (!next.queries) continue;
      const Array& output = c.dout.data ? c.dout : c.o;
      prefetch_row(c.q, at(c.q, next.t, shared), c.K);
      prefetch_row(output, at(output, next.t, next.head) + column, values());
    }
  }
  // f(first row, rows) over the rows of a product
  template <class Body>
  void fetching(int64_t rows, Body f) {
    constexpr int64_t group = 12, fetched = 4;
    for (int64_t r = 0; r < rows; r += group) f(r, min64(group, rows - r)), fetch(fetched);
  }
  void load_queries(int64_t t, int64_t n) {
    for (int64_t r = 0; r < n; ++r) read_row(c.q, at(c.q, t + r, hk), c.K, q + r * Fp), map_features(c, q + r * Fp, Fp);
  }
  void load_keys(int64_t t, int64_t n) {
    for (int64_t r = 0; r < n; ++r) {
      read_row(c.k, at(c.k, t + r, hk), c.K, k + r * Fp), map_features(c, k + r * Fp, Fp);
      read_row(c.v, at(c.v, t + r, h) + column, values(), e + r * Wp);
      if (c.normalize) e[r * Wp + c.V] = T(1);
    }
    if (c.beta.data)
      for (int64_t r = 0; r < n; ++r) {
        beta[r] = read1<T>(c.beta, at(c.beta, t + r, h));
        for (int64_t w = 0; w < Wp; w += lanes<T>) store(u + r * Wp + w, load(e + r * Wp + w) * beta[r]);
      }
    if (c.decay == HEAD) head_decays(t, n);
    if (c.decay == CHANNEL) channel_decays(t, n);
  }

  // gamma[r][s] is the product of the factors after s up to r
  void head_decays(int64_t t, int64_t n) {
    for (int64_t r = 0; r < n; ++r) a[r] = read1<T>(c.g, at(c.g, t + r, h));
    for (int64_t r = 0; r < n; r += lanes<T>) store(a + r, expv<T>(load(a + r)));
    T x = T(1);
    for (int64_t r = 0; r < n; ++r) from[r] = x = x * a[r];
    x = T(1);
    for (int64_t r = n - 1; r >= 0; --r) to[r] = x, x = x * a[r];
    for (int64_t r = 1; r < n; ++r) {
      for (int64_t s = 0; s < r; s += lanes<T>) store(gamma + r * Cp + s, load(gamma + (r - 1) * Cp + s) * a[r]);
      gamma[r * Cp + r] = T(1);
    }
  }
  void channel_decays(int64_t t, int64_t n) {
    for (int64_t r = 0; r < n; ++r) {
      T* row = a + r * Fp;
      read_row(c.g, at(c.g, t + r, h), c.K, row);
      for (int64_t f = 0; f < Fp; f += lanes<T>) {
        store(row + f, expv<T>(load(row + f)));
        store(from + r * Fp + f, r ? load(from + (r - 1) * Fp + f) * load(row + f) : load(row + f));
      }
    }
    for (int64_t r = n - 1; r >= 0; --r)
      for (int64_t f = 0; f < Fp; f += lanes<T>)
        store(to + r * Fp + f, r + 1 < n ? load(to + (r + 1) * Fp + f) * load(a + (r + 1) * Fp + f) : splat(T(1)));
  }

  // rows [n][Fp] times `factors` of this chunk (from or to) and `mul`: in out, or the rows themselves if all are 1
  const T* weighed(int64_t n, const T* rows, const T* factors, T mul, T* out) const {
    if (!c.decay && mul == T(1)) return rows;
    weigh(n, rows, factors, mul, out);
    return out;
  }
  void weigh(int64_t n, const T* rows, const T* factors, T mul, T* out) const {
    for (int64_t r = 0; r < n; ++r) {
      const T one = c.decay == HEAD ? factors[r] * mul : mul;
      for (int64_t f = 0; f < Fp; f += lanes<T>) {
        const vec<T> y = load(rows + r * Fp + f) * one;
        store(out + r * Fp + f, by_channel() ? y * load(factors + r * Fp + f) : y);
      }
    }
  }

  // f(first row, rows, columns) over the blocks of a lower triangle of n rows
  template <class Body>
  static void lower(int64_t n, Body f) {
    for (int64_t r = 0; r < n; r += 16) f(r, min64(16, n - r), min64(r + 16, n));
  }

  // out[r][s] = mul * decay(s -> r) (y_r . k_s) for s <= r - apart, 0 elsewhere; kt is k transposed
  void pairs(int64_t n, const T* y, T mul, int64_t apart, T* out) const {
    lower(n, [&](int64_t r0, int64_t rows, int64_t columns) {
      mm<Plain<T>>(rows, pad(columns), c.F, kt, Cp, y + r0 * Fp, Fp, 1, out + r0 * Cp, Cp, false);
      for (int64_t r = r0; r < r0 + rows; ++r)
        for (int64_t s = 0; s < columns; s += lanes<T>) {
          T* at = out + r * Cp + s;
          const ivec<T> seen = iota<T>() <= isplat<T>(r - s - apart);
          store(at, seen ? load(at) * mul * load(gamma + r * Cp + s) : vec<T>{});
        }
    });
  }
  // the same with decays per channel: the keys in kt are decayed row by row, and so overwritten
  void pairs_by_channel(int64_t n, const T* y, T mul, int64_t apart, T* out) const {
    const ivec<T> lane = iota<T>();
    for (int64_t r = 0; r < n; ++r)
      for (int64_t s = 0; s <= r; s += lanes<T>) {
        const ivec<T> earlier = lane < isplat<T>(r - s), seen = lane <= isplat<T>(r - s - apart);
        vec<T> sum = {};
        for (int64_t f = 0; f < c.F; ++f) {
          T* at = kt + f * Cp + s;
          const vec<T> key = load(at), decayed = earlier ? key * a[r * Fp + f] : key;
          store(at, decayed);
          sum += decayed * y[r * Fp + f];
        }
        store(out + r * Cp + s, seen ? sum * mul : vec<T>{});
      }
    for (int64_t r = 0; r < n; ++r)
      for (int64_t s = round_up(r + 1, lanes<T>); s < Cp; ++s) out[r * Cp + s] = T(0);
  }
  void turn_keys(int64_t n) const { transpose(pad(n), Fp, k, Fp, kt, Cp); }

  // the delta rule: e is the value minus the state's current value for its key, u = beta e; a triangular system in u
  void solve(int64_t n, const T* S) {
    mm<Plain<T>>(n, Wp, c.F, S, Wp, weighed(n, k, from, T(1), x), Fp, 1, u, Wp, false);
    for (int64_t i = 0; i < n * Wp; i += lanes<T>) store(e + i, load(e + i) - load(u + i));
    if (n > 1) {
      turn_keys(n);
      by_channel() ? pairs_by_channel(n, k, T(-1), 1, link) : pairs(n, k, T(-1), 1, link);
    }
    constexpr int64_t block = 8;
    for (int64_t r0 = 0; r0 < n; r0 += block) {
      const int64_t stop = min64(r0 + block, n);
      if (r0) mm<Plain<T>>(stop - r0, Wp, r0, u, Wp, link + r0 * Cp, Cp, 1, e + r0 * Wp, Wp, true);
      for (int64_t r = r0; r < stop; ++r)
        for (int64_t w = 0; w < Wp; w += lanes<T>) {
          vec<T> y = load(e + r * Wp + w);
          for (int64_t s = r0; s < r; ++s) y += load(u + s * Wp + w) * link[r * Cp + s];
          store(e + r * Wp + w, y), store(u + r * Wp + w, y * beta[r]);
        }
    }
  }

  // p: the weight of token s in the output of token r
  void weights(int64_t n) {
    const T mul = outer();
    if (n == 1) {
      T sum = T(0);
      for (int64_t f = 0; f < c.F; ++f) sum += q[f] * k[f];
      p[0] = sum * mul;
      return;
    }
    turn_keys(n);
    by_channel() ? pairs_by_channel(n, q, mul, 0, p) : pairs(n, q, mul, 0, p);
  }
  // the Taylor map contains the scale in its terms
  T outer() const { return c.feature == Feature::taylor ? T(1) : static_cast<T>(c.scale); }

  // S after the chunk's tokens: decayed to their end, plus their own terms; decays k
  void advance(int64_t n, T* S) {
    for (int64_t f = 0; c.decay && f < c.F; ++f) {
      const T total = from[(n - 1) * decays() + (by_channel() ? f : 0)];
      for (int64_t w = 0; w < Wp; w += lanes<T>) store(S + f * Wp + w, load(S + f * Wp + w) * total);
    }
    const T* rows = weighed(n, k, to, T(1), k);
    fetching(c.F, [&](int64_t f, int64_t count) {
      mm<Plain<T>>(count, Wp, n, u, Wp, rows + f, 1, Fp, S + f * Wp, Wp, true);
    });
  }
};

}  // namespace saccade::SACCADE_ISA
