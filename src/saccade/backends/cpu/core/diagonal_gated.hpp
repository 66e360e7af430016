// RG-LRU (Griffin, De et al. 2024), one number per channel: with L = -8 softplus(a_param) sigmoid(r),
// h_t = e^L h_t-1 + sqrt(1 - e^2L) sigmoid(i) x_t. A sequence without an initial state starts with h = sigmoid(i) x.
// Vectors lie along channels; a task owns a sequence and one vector of channels.
#pragma once
#include "diagonal_lanes.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
struct RgLru {
  static constexpr int L = lanes<T>;

  const GatedUnit& c;
  int64_t s;
  Lanes x;
  vec<T> slope;  // dL / dsigmoid(r)

  static int64_t blocks(const GatedUnit& c) { return (c.W + L - 1) / L; }
  static int64_t tasks(const GatedUnit& c) { return c.tokens.count * blocks(c); }

  RgLru(const GatedUnit& call, int64_t task) : c(call), s(task / blocks(call)) {
    const int64_t first = task % blocks(c) * L;
    x = {first, min64(L, c.W - first)};
    slope = T(-8) * softplus<T>(get<T>(c.a_param, first, x.n));
  }
  vec<T> read(const Array& a, int64_t t) const { return get<T>(a, c.tokens.at(a, s, t) + x.first, x.n); }
  void write(const Array& a, int64_t t, vec<T> v) const { put<T>(a, c.tokens.at(a, s, t) + x.first, x.n, v); }
  vec<T> state(const void* p) const { return p ? get<T>(p, s * c.W + x.first, x.n) : vec<T>{}; }
  bool begins(int64_t t) const { return t == 0 && !c.initial; }

  // the gates of one token, and the factors of the state and the input
  struct Step {
    Sigmoid<T> r, i;
    vec<T> x, decay, unit, in;  // unit: 1 - decay^2; in: its root
  };
  Step step(int64_t t) const {
    Step q;
    q.r = Sigmoid<T>::of(read(c.r, t)), q.i = Sigmoid<T>::of(read(c.i, t)), q.x = read(c.x, t);
    if (begins(t)) {
      q.decay = vec<T>{}, q.unit = q.in = splat(T(1));
      return q;
    }
    const vec<T> log_decay = slope * q.r.value;
    q.decay = exponential<T>(log_decay);
    q.unit = one_minus_exponential<T>(T(2) * log_decay);
    q.in = square_root<T>(q.unit);
    return q;
  }

  vec<T> after(vec<T> h, const Step& q) const { return q.decay * h + q.in * (q.i.value * q.x); }

  static void task(const GatedUnit& c, int64_t task, char*) {
    const RgLru f(c, task);
    vec<T> h = f.state(c.initial);
    const int64_t length = c.tokens.size(f.s);
    for (int64_t t = 0; t < length; ++t) {
      h = f.after(h, f.step(t));
      f.write(c.y, t, h);
      if (t % 256 == 255) check_stop();
    }
    if (c.final) put<T>(c.final, f.s * c.W + f.x.first, f.x.n, h);
  }

  static int64_t no_scratch(const GatedUnit&) { return 0; }
  static int64_t scratch_bytes(const GatedUnit& c) {
    const int64_t vectors = c.chunk + (c.tokens.longest() + c.chunk - 1) / c.chunk;
    return vectors * static_cast<int64_t>(sizeof(vec<T>)) + c.chunk * static_cast<int64_t>(sizeof(Step));
  }
  // a first walk stores the state before each chunk; the states within a chunk are computed again from it
  static void backward(const GatedUnit& c, int64_t task, char* scratch) {
    const RgLru f(c, task);
    Bump bump{scratch};
    vec<T>* before = bump.take<vec<T>>(c.chunk);
    Step* steps = bump.take<Step>(c.chunk);
    const int64_t length = c.tokens.size(f.s);
    vec<T>* kept = bump.take<vec<T>>((length + c.chunk - 1) / c.chunk);
    vec<T> h = f.state(c.initial);
    for (int64_t t = 0; t < length; ++t) {
      if (t % c.chunk == 0) check_stop(), kept[t / c.chunk] = h;
      h = f.after(h, f.step(t));
    }
    vec<T> dh = f.state(c.dfinal), dslope = {};
    for (int64_t t0 = (length - 1) / c.chunk * c.chunk; length && t0 >= 0; t0 -= c.chunk) {
      const int64_t n = min64(c.chunk, length - t0);
      check_stop();
      vec<T> dslope_chunk = {};
      h = kept[t0 / c.chunk];
      for (int64_t t = 0; t < n; ++t) {
        const Step q = steps[t] = f.step(t0 + t);
        before[t] = h;
        h = f.after(h, q);
      }
      for (int64_t t = n - 1; t >= 0; --t) {
        const Step q = steps[t];
        dh += f.read(c.dy, t0 + t);
        const vec<T> gated = dh * q.in, din = dh * q.i.value * q.x;
        f.write(c.dx, t0 + t, gated * q.i.value);
        f.write(c.di, t0 + t, gated * q.x * q.i.slope);
        // the derivative of the root, 1 / (2 sqrt), is limited to 1000, as in the published model
        const vec<T> four = T(4) * q.unit, steepest = splat(T(1e-6));
        const vec<T> root = T(1) / square_root<T>(four > steepest ? four : steepest);
        const vec<T> dlog = q.decay * (dh * before[t] - T(2) * q.decay * (root * din));
        f.write(c.dr, t0 + t, dlog * f.slope * q.r.slope);
        dslope_chunk += dlog * q.r.value;
        dh *= q.decay;
      }
      dslope += dslope_chunk;
    }
    const vec<T> da_param = T(-8) * sigmoid<T>(get<T>(c.a_param, f.x.first, f.x.n)) * dslope;
    const int64_t at = f.s * c.W + f.x.first;
    put<T>(c.da_param, at, f.x.n, da_param);
    if (c.dinitial) put<T>(c.dinitial, at, f.x.n, dh);
  }
};

}  // namespace saccade::SACCADE_ISA
