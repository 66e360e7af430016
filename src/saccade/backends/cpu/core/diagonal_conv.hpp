// Causal convolution of each channel: y_t = f(bias + sum_j w_j x_t-K+1+j), f is the identity or SiLU. A sequence is
// preceded by the K - 1 numbers of its state, or zeros. Vectors lie along channels; a task owns some tokens and a strip
// of channels.
#pragma once
#include "diagonal_lanes.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
struct CausalConv {
  static constexpr int L = lanes<T>;
  static constexpr int64_t STRIP = 64, ROWS = 64;  // channels of a task; tokens that it converts at a time

  const Convolution& c;
  int64_t s = 0, halo;
  Lanes x{};
  T *weight, *bias, *window, *sum, *dsum, *dweight, *dbias;  // rows of STRIP

  CausalConv(const Convolution& call, Bump& bump) : c(call), halo(call.K - 1) {
    weight = bump.take<T>(c.K * STRIP), bias = bump.take<T>(STRIP);
    window = bump.take<T>((ROWS + 2 * halo) * STRIP);
    sum = bump.take<T>(STRIP), dsum = bump.take<T>((ROWS + 2 * halo) * STRIP);
    dweight = bump.take<T>(c.K * STRIP), dbias = bump.take<T>(STRIP);
  }
  static int64_t scratch_bytes(const Convolution& c) {
    Bump bump{nullptr};
    CausalConv measure(c, bump);
    return bump.used;
  }
  static int64_t strips(const Convolution& c) { return (c.D + STRIP - 1) / STRIP; }
  static int64_t pieces(const Convolution& c) { return (c.tokens.total() + c.piece - 1) / c.piece; }
  static int64_t tasks(const Convolution& c) { return pieces(c) * strips(c); }
  static int64_t final_tasks(const Convolution& c) { return c.tokens.count * strips(c); }

  void place(int64_t strip) {
    x = {strip * STRIP, min64(STRIP, c.D - strip * STRIP)};
    for (int64_t l = 0; l < STRIP; ++l) {
      const bool in = l < x.n;
      bias[l] = in && c.bias.data ? read1<T>(c.bias, x.first + l) : T(0);
      for (int64_t j = 0; j < c.K; ++j)
        weight[j * STRIP + l] = in ? read1<T>(c.weight, (x.first + l) * c.weight.stride[0] + j) : T(0);
    }
  }

  // row t of the strip, t >= -halo; 0 beyond the strip's channels
  void read(int64_t t, T* out) const {
    for (int64_t l = x.n; l < STRIP; ++l) out[l] = T(0);
    if (t >= 0) return read_row(c.x, c.tokens.at(c.x, s, t) + x.first, x.n, out);
    for (int64_t l = 0; l < x.n; ++l) out[l] = c.initial ? state(c.initial)[l * halo + t + halo] : T(0);
  }
  // a pointer to the strip's first channel in a wide [count, D, K - 1]
  T* state(const void* p) const { return static_cast<T*>(const_cast<void*>(p)) + (s * c.D + x.first) * halo; }
  // window[r] is token t0 - halo + r
  void fill(int64_t t0, int64_t t1) {
    check_stop();
    for (int64_t t = t0 - halo; t < t1; ++t) read(t, window + (t - t0 + halo) * STRIP);
  }
  // the sum before f; row r has the first factor of the token
  void convolve(int64_t r, T* out) const {
    for (int64_t l = 0; l < x.n; l += L) {
      vec<T> a = load(bias + l);
      for (int64_t j = 0; j < c.K; ++j) a += load(weight + j * STRIP + l) * load(window + (r + j) * STRIP + l);
      store(out + l, a);
    }
  }

  // f(first, last) for each stretch of tokens of one sequence in a piece
  template <class F>
  void stretches(int64_t piece, F f) {
    const int64_t begin = piece * c.piece, end = min64(c.tokens.total(), begin + c.piece);
    int64_t low = 0, high = c.tokens.count;  // the last sequence that starts no later
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (c.tokens.begin(middle) <= begin ? low : high) = middle;
    }
    for (s = low; s < c.tokens.count && c.tokens.begin(s) < end; ++s) {
      const int64_t from = max64(begin, c.tokens.begin(s)), to = min64(end, c.tokens.begin(s + 1));
      if (from < to) f(from - c.tokens.begin(s), to - c.tokens.begin(s));
    }
  }

  void forward_rows(int64_t t0, int64_t t1) {
    fill(t0, t1);
    for (int64_t t = t0; t < t1; ++t) {
      convolve(t - t0, sum);
      for (int64_t l = 0; c.silu && l < x.n; l += L) store(sum + l, silu<T>(load(sum + l)));
      const int64_t at = c.tokens.at(c.y, s, t) + x.first;
      for (int64_t l = 0; l < x.n; l += L) put<T>(c.y, at + l, min64(L, x.n - l), load(sum + l));
    }
  }
  static void task(const Convolution& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    CausalConv f(c, bump);
    f.place(task % strips(c));
    f.stretches(task / strips(c), [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; t += ROWS) f.forward_rows(t, min64(to, t + ROWS));
    });
  }

  // the last K - 1 inputs of a sequence; a task is a sequence and a strip
  static void final_state(const Convolution& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    CausalConv f(c, bump);
    f.place(task % strips(c)), f.s = task / strips(c);
    const int64_t length = c.tokens.size(f.s);
    for (int64_t m = 0; m < f.halo; ++m) {
      f.read(length - f.halo + m, f.sum);
      for (int64_t l = 0; l < f.x.n; ++l) f.state(c.final)[l * f.halo + m] = f.sum[l];
    }
  }

  // dx of tokens [t0, t1), and their terms in the sums. dsum[r] is the gradient before f of token t0 - halo + r.
  void backward_rows(int64_t t0, int64_t t1) {
    const int64_t length = c.tokens.size(s), stop = min64(length, t1 + halo);
    fill(t0, stop);
    for (int64_t t = t0; t < t1 + halo; ++t) {
      T* d = dsum + (t - t0) * STRIP;
      for (int64_t l = 0; l < STRIP; ++l) d[l] = T(0);
      if (t >= stop) continue;
      read_row(c.dy, c.tokens.at(c.dy, s, t) + x.first, x.n, d);
      if (!c.silu) continue;
      convolve(t - t0, sum);
      for (int64_t l = 0; l < x.n; l += L) store(d + l, load(d + l) * silu_slope<T>(load(sum + l)));
    }
    for (int64_t l = 0; l < x.n; l += L) {
      vec<T> b = {};
      for (int64_t t = 0; t < t1 - t0; ++t) b += load(dsum + t * STRIP + l);
      store(dbias + l, load(dbias + l) + b);
      for (int64_t j = 0; j < c.K; ++j) {
        vec<T> w = {};
        for (int64_t t = 0; t < t1 - t0; ++t) w += load(dsum + t * STRIP + l) * load(window + (t + j) * STRIP + l);
        store(dweight + j * STRIP + l, load(dweight + j * STRIP + l) + w);
      }
    }
    for (int64_t t = t0; t < t1; ++t) {
      through(t, t0, length);
      const int64_t at = c.tokens.at(c.dx, s, t) + x.first;
      for (int64_t l = 0; l < x.n; l += L) put<T>(c.dx, at + l, min64(L, x.n - l), load(sum + l));
    }
    if (t0 == 0 && c.dinitial) before_start(length);
  }
  // `sum` gets the gradient of input t >= -halo
  void through(int64_t t, int64_t t0, int64_t length) {
    for (int64_t l = 0; l < x.n; l += L) {
      vec<T> a = {};
      for (int64_t j = 0; j < c.K; ++j) {
        const int64_t of = t + halo - j;
        if (of >= 0) a += load(weight + j * STRIP + l) * load(dsum + (of - t0) * STRIP + l);
      }
      store(sum + l, a);
    }
    // the final state contains this input too
    const int64_t m = t - length + halo;
    for (int64_t l = 0; c.dfinal && m >= 0 && l < x.n; ++l) sum[l] += state(c.dfinal)[l * halo + m];
  }
  void before_start(int64_t length) {
    for (int64_t m = 0; m < halo; ++m) {
      through(m - halo, 0, length);
      for (int64_t l = 0; l < x.n; ++l) state(c.dinitial)[l * halo + m] = sum[l];
    }
  }
  static void backward(const Convolution& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    CausalConv f(c, bump);
    const int64_t piece = task / strips(c);
    f.place(task % strips(c));
    for (int64_t i = 0; i < c.K * STRIP; ++i) f.dweight[i] = T(0);
    for (int64_t i = 0; i < STRIP; ++i) f.dbias[i] = T(0);
    f.stretches(piece, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; t += ROWS) f.backward_rows(t, min64(to, t + ROWS));
    });
    const int64_t at = piece * c.D + f.x.first;
    for (int64_t l = 0; l < f.x.n; ++l) {
      if (c.dbias) static_cast<T*>(c.dbias)[at + l] = f.dbias[l];
      for (int64_t j = 0; j < c.K; ++j) static_cast<T*>(c.dweight)[(at + l) * c.K + j] = f.dweight[j * STRIP + l];
    }
  }
};

}  // namespace saccade::SACCADE_ISA
