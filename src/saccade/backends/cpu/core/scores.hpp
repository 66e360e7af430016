// scores and dscores: everything between the products and the softmax (scale, softcap, bias, ALiBi, gates, mask,
// dropout), shared by forward and backward.
//   s = softcap(scale q.k) + bias + distances[i - j] - slope |i - j| + gates[i] - gates[j], at position i = t + offset
//   stored as s * log2 e; masked: Low<T>::masked
#pragma once
#include "mask.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
constexpr T LOG2E = T(1.442695040888963407359924681);
template <class T>
constexpr T LN2 = T(0.693147180559945309417232121);

// Scores in log2 units. Scores whose size is above FAR, where neighbouring numbers of the dtype are 32 apart, are moved
// nearer to 0. They keep their order, the largest still outweighs all others, and none overflows. Converted back, an
// lse too large to hold the logarithm of a sum is exactly the largest score.
template <class T>
constexpr T FAR = sizeof(T) == 4 ? T(0x1p29) : T(0x1p58);
template <class V, class T>
SACCADE_INLINE V nearer(V s, T side) {
  return s * T(0.5) + side * FAR<T>;
}
template <class T>
[[gnu::noinline, gnu::cold]] static vec<T> brought_nearer(vec<T> s, vec<T> y) {
  return s > FAR<T> ? nearer(s, T(1)) : s < -FAR<T> ? nearer(s, T(-1)) : y;
}
// a natural logarithm such as lse to log2 units
template <class T>
SACCADE_INLINE double in_log2(const Call& c, T s) {
  if (c.plain() || !(s > FAR<T> || s < -FAR<T>)) return static_cast<double>(s) * LOG2E<double>;
  return static_cast<double>(nearer(s, s > T(0) ? T(1) : T(-1)));
}
// the inverse; y may be slightly above the score that it came from
template <class T>
SACCADE_INLINE double from_log2(const Call& c, double y) {
  constexpr double far = static_cast<double>(FAR<T>);
  if (c.plain() || __builtin_fabs(y) < 1.47 * far) return y * LN2<double>;
  return 2 * (y - (y > 0 ? far : -far));
}

// lse of a row in natural units, from the maximum of its scores in log2 units and the sum of its weights
template <class T>
SACCADE_INLINE double lse_of(const Call& c, double m, double l) {
  if (l == 0) return -__builtin_inf();
  if (m == __builtin_inf()) return m;
  return from_log2<T>(c, m + __builtin_log2(l));
}

// the weights of a part of the keys, of earlier parts and of the sink in a row, which add up to 1, and the row's lse
struct Shares {
  double here, before, sink, lse;
};

// m, l: as in `lse_of`, of the keys of this part. sink: -inf for none. kept: maximum and sum of the earlier parts, then
// also of this one; null if there is only one. The lse of large scores has lost the logarithm of its sum.
template <class T>
SACCADE_INLINE Shares shares_of(const Call& c, T m, T l, double sink, double* kept = nullptr) {
  const double from[] = {static_cast<double>(m), kept && c.merge ? kept[0] : 0, in_log2(c, static_cast<T>(sink))};
  double sums[] = {static_cast<double>(l), kept && c.merge ? kept[1] : 0, sink == -__builtin_inf() ? 0. : 1.};
  double top = -__builtin_inf(), sum = 0;
  for (int i = 0; i < 3; ++i)
    if (sums[i] != 0 && from[i] > top) top = from[i];
  for (int i = 0; i < 3; ++i) {
    // also of infinite scores
    if (sums[i] != 0 && from[i] != top) sums[i] *= __builtin_exp2(from[i] - top);
    sum += sums[i];
  }
  if (kept && !c.last) kept[0] = top, kept[1] = sum;
  const double all = sum == 0 ? 1 : sum;
  return {sums[0] / all, sums[1] / all, sums[2] / all, lse_of<T>(c, top, sum)};
}

// log(e^a + e^b), NaN if one of them is
SACCADE_INLINE double log_add(double a, double b) {
  if (a != a || b != b) return a + b;
  const double top = a > b ? a : b;
  if (__builtin_isinf(top)) return top;
  return top + __builtin_log1p(__builtin_exp(-__builtin_fabs(a - b)));
}

// what keys of this lse and entropy add to the entropy of a row whose lse is `total`
SACCADE_INLINE double entropy_share(double lse, double entropy, double total) {
  return lse == -__builtin_inf() ? 0 : __builtin_exp(lse - total) * (entropy + (total - lse));
}
// the same of keys that have this share of the row's weight
SACCADE_INLINE double share_entropy(double share, double entropy) {
  return share == 0 ? 0 : share * (entropy - __builtin_log(share));
}
// log2 differences below this have weight 0; unlike -inf, they may be multiplied by it
template <class T>
SACCADE_INLINE vec<T> finite_log(vec<T> x) {
  return vmax<T>(x, splat(T(-4096)));
}

// Philox-4x32-10 for counter (t, j / 4, b * Hq + h, 0) over a tile of rows
struct Philox {
  static void words(const Call& c, const uint32_t* t, uint32_t block, uint32_t stream, uint32_t (*out)[TILE_Q]) {
    for (int w = 0; w < TILE_Q; ++w) {
      uint32_t x0 = t[w], x1 = block, x2 = stream, x3 = 0, k0 = c.seed[0], k1 = c.seed[1];
      for (int round = 0; round < 10; ++round) {
        const uint64_t a = 0xD2511F53ull * x0, b = 0xCD9E8D57ull * x2;
        const uint32_t y0 = static_cast<uint32_t>(b >> 32) ^ x1 ^ k0, y2 = static_cast<uint32_t>(a >> 32) ^ x3 ^ k1;
        x1 = static_cast<uint32_t>(b), x3 = static_cast<uint32_t>(a), x0 = y0, x2 = y2;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
      }
      out[0][w] = x0, out[1][w] = x1, out[2][w] = x2, out[3][w] = x3;
    }
  }
};

// one query tile of one head, and how its scores are computed
template <class T>
struct Scorer : QueryRows {
  const Call* c;
  int64_t width;  // rows, rounded up to vectors
  Keys keys;
  const Mask* mask;
  TileMask<T>* lanes_mask;
  bool prepared;
  T factor;  // of the products, for scores that are not plain
  uint32_t drop_t[TILE_Q];

  bool plain() const { return c->plain(); }
  // what makes scores of products: a factor for the softmax, if scores are plain, otherwise `factor`; 1 if q contains it
  T scale_by(double scale, bool in_q) {
    factor = in_q || plain() ? T(1) : static_cast<T>(scale);
    return in_q || !plain() ? T(1) : static_cast<T>(scale);
  }
  bool masked_by_bias() const { return c->bias.data || c->distances.data; }

  void prepare() {
    if (prepared) return;
    lanes_mask->prepare(*mask, *this);
    prepared = true;
  }
  int64_t key(int64_t local) const { return keys.at(local); }
  int64_t offset() const { return c->offset[b * c->offset_stride]; }
  int64_t pair_at(const Array& a, int64_t t, int64_t j) const {
    return b * a.stride[0] + h * a.stride[1] + t * a.stride[2] + j * a.stride[3];
  }
  // numbers of an array for the rows from w on; row 0 of the array is row t
  vec<T> of_rows(const Array& a, int64_t t, int64_t w, int64_t j) const {
    if (a.stride[2] * step == 1 && a.unit() == sizeof(T) && w + lanes<T> <= rows)
      return load(reinterpret_cast<const T*>(a.data) + pair_at(a, t + w, j));
    vec<T> x;
    for (int l = 0; l < lanes<T>; ++l) x[l] = read1<T>(a, pair_at(a, t + step * min64(w + l, rows - 1), j));
    return x;
  }
  vec<T> biases(int64_t w, int64_t j) const {
    vec<T> x = {};
    if (c->bias.data) x = of_rows(c->bias, t0, w, j);
    if (c->distances.data) x += of_rows(c->distances, t0 + offset(), w, j);
    return x;
  }

  // lanes that see the key, by the mask and by biases of -inf
  ivec<T> allowed(int w, int64_t j, bool partial) const {
    ivec<T> ok = partial ? lanes_mask->allowed(w, j) : ~ivec<T>{};
    if (masked_by_bias()) ok &= biases(w, j) != splat(-static_cast<T>(__builtin_inf()));
    return ok;
  }

  // S [n][width]: takes products, returns log2 scores. cap_slope (may be null) gets the softcap's derivative.
  void scores(T* S, int64_t first, int64_t n, bool partial, T* cap_slope) {
    if (partial) prepare();
    if (plain() && !partial) return;
    if (plain() && mask->one_band) return one_band(S, first, n);
    for (int64_t r = 0; r < n; ++r) {
      const int64_t j = key(first + r);
      for (int64_t w = 0; w < width; w += lanes<T>) {
        T* p = S + r * width + w;
        vec<T> s = load(p);
        if (!plain()) s = general(s, r, w, j, cap_slope);
        if (partial || masked_by_bias()) s = allowed(static_cast<int>(w), j, partial) ? s : splat(Low<T>::masked);
        store(p, s);
      }
    }
  }

  void one_band(T* S, int64_t first, int64_t n) const {
    const int64_t first_row = row(0), last = row(rows - 1);
    for (int64_t r = 0; r < n; ++r) {
      int64_t from, stop;
      lanes_mask->seen_by(key(first + r), &from, &stop);
      if (from <= first_row && stop > last) continue;
      // rows of the tile fit T's integers; the limits of the band may not
      const ivec<T> low = isplat<T>(max64(from, first_row)), high = isplat<T>(min64(stop, last + 1));
      for (int64_t w = 0; w < width; w += lanes<T>) {
        T* p = S + r * width + w;
        const ivec<T> t = TileMask<T>::at(lanes_mask->t, static_cast<int>(w));
        store(p, ((t >= low) & (t < high)) ? load(p) : splat(Low<T>::masked));
      }
    }
  }

  vec<T> general(vec<T> s, int64_t r, int64_t w, int64_t j, T* cap_slope) {
    s = s * factor;
    if (c->softcap != 0) {
      const vec<T> x = s / static_cast<T>(c->softcap);
      s = tanhv<T>(x) * static_cast<T>(c->softcap);
      if (cap_slope) store(cap_slope + r * width + w, tanh_slope<T>(x));
    }
    s = with_terms(s, w, j);
    const vec<T> y = s * LOG2E<T> + s * static_cast<T>(LOG2E<double> - static_cast<double>(LOG2E<T>));
    return any((s > FAR<T>) | (s < -FAR<T>)) ? brought_nearer<T>(s, y) : y;
  }

  vec<T> with_terms(vec<T> s, int64_t w, int64_t j) const {
    if (masked_by_bias()) s += biases(w, j);
    if (c->slopes) s -= static_cast<T>(slope()) * distance(w, j);
    if (c->gates.data) s += forgotten(w, j);
    return s;
  }

  double slope() const { return c->slopes[b * c->slopes_stride + h]; }
  vec<T> distance(int64_t w, int64_t j) const {
    const int64_t from = t0 + offset() - j;
    vec<T> d;
    for (int l = 0; l < lanes<T>; ++l) {
      const int64_t x = from + step * (w + l);
      d[l] = static_cast<T>(x < 0 ? -x : x);
    }
    return d;
  }

  // the sum of log gates between a key and each row, in double because both may be large and their difference small
  vec<T> forgotten(int64_t w, int64_t j) const {
    const double* sums =
        reinterpret_cast<const double*>(c->gates.data) + b * c->gates.stride[0] + h * c->gates.stride[1];
    const int64_t from = t0 + offset();
    vec<T> x;
    for (int l = 0; l < lanes<T>; ++l)
      x[l] = static_cast<T>(sums[max64(0, from + step * min64(w + l, rows - 1))] - sums[j]);
    return x;
  }

  // sets dropped weights in P and (if given) dP to zero, and scales up the others
  void dropout(T* P, T* dP, int64_t first, int64_t n) {
    if (!c->drop_below) return;
    uint32_t words[4][TILE_Q];
    int64_t block = -1;
    for (int w = 0; w < TILE_Q; ++w) drop_t[w] = static_cast<uint32_t>(t0 + step * w);
    for (int64_t r = 0; r < n; ++r) {
      const int64_t j = key(first + r);
      if (j >> 2 != block) {
        block = j >> 2;
        Philox::words(*c, drop_t, static_cast<uint32_t>(block), static_cast<uint32_t>(b * c->Hq + h), words);
      }
      for (int64_t w = 0; w < width; ++w) {
        const bool keep = words[j & 3][w] >= c->drop_below;
        T& p = P[r * width + w];
        p = keep ? p * static_cast<T>(c->keep_scale) : T(0);
        if (dP) {
          T& x = dP[r * width + w];
          x = keep ? x * static_cast<T>(c->keep_scale) : T(0);
        }
      }
    }
  }
};

}  // namespace saccade::SACCADE_ISA
