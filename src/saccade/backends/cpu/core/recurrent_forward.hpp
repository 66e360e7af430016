// Forward of a recurrence over matrix states, chunk by chunk: o = P u + scale (q decayed) S, then S moves on.
#pragma once
#include "recurrent_tile.hpp"

namespace saccade::SACCADE_ISA {

template <class T>
struct RecurrentForward : Chunk<T> {
  using Base = Chunk<T>;
  using Base::c, Base::Fp, Base::Wp, Base::Cp, Base::q, Base::k, Base::u, Base::p, Base::from;
  T *S, *o, *states;

  RecurrentForward(const Recurrence& call, int64_t task, Bump& bump) : Base(call, task, bump) {
    states = bump.take<T>(c.heads * c.F * Wp), o = bump.take<T>(Cp * Wp);
  }
  static int64_t scratch_bytes(const Recurrence& c) {
    Bump bump{nullptr};
    RecurrentForward measured(c, 0, bump);
    return bump.used;
  }
  static void task(const Recurrence& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    RecurrentForward(c, task, bump).run();
  }

  void turn_to(int64_t head) { Base::turn_to(head), S = states + (head - this->first_head) * c.F * Wp; }
  // f() for each head of the task
  template <class Body>
  void each_head(Body f) {
    for (int64_t head = this->first_head; head < this->stop_head; ++head) turn_to(head), f();
  }

  void run() {
    each_head([&] { this->read_state(c.initial, S); });
    if (c.causal) {
      for (int64_t t = this->first; t < this->stop; t += c.chunk)
        each_head([&] { step(t, min64(c.chunk, this->stop - t)); });
    } else {
      each_head([&] { of_all(); });
    }
    each_head([&] { this->write_state(S, c.final_state); });
  }
  void of_all() {
    for (int64_t t = this->first; t < this->stop; t += c.chunk) {
      const int64_t n = min64(c.chunk, this->stop - t);
      check_stop(), this->load_keys(t, n), this->advance(n, S);
    }
    for (int64_t t = this->first; t < this->stop; t += c.chunk) {
      const int64_t n = min64(c.chunk, this->stop - t);
      check_stop(), this->load_queries(t, n), past(n, false), write(t, n);
    }
  }

  void step(int64_t t, int64_t n) {
    check_stop();
    this->load_queries(t, n), this->load_tokens(t, n, S);
    if (n == 1) return one(), write(t, 1);
    const bool last = this->h + 1 == this->stop_head;
    const int64_t following = last ? t + n : t;
    this->next = {following, min64(following + c.chunk, this->stop), last ? this->first_head : this->h + 1};
    // a NaN or an infinity in a value must not reach earlier tokens, not even times 0
    if (!finite(n)) {
      for (int64_t r = 0; r < n; ++r) step(t + r, 1);
      return;
    }
    this->weights(n);
    this->lower(n, [&](int64_t r, int64_t rows, int64_t columns) {
      mm<Plain<T>>(rows, Wp, columns, u, Wp, p + r * Cp, Cp, 1, o + r * Wp, Wp, false);
    });
    past(n, true), write(t, n);
    this->advance(n, S), this->fetch(n);
  }
  // o and the next state of one token, for which the state is read and written once
  void one() {
    int64_t w = 0;
    for (; w + 4 * lanes<T> <= Wp; w += 4 * lanes<T>) columns<4>(w);
    for (; w < Wp; w += lanes<T>) columns<1>(w);
  }
  template <int NV>
  void columns(int64_t w) {
    constexpr int64_t N = lanes<T>;
    const T mul = this->outer();
    vec<T> value[NV], total[NV];
    for (int v = 0; v < NV; ++v) value[v] = load(u + w + v * N), total[v] = vec<T>{};
    for (int64_t first = 0; first < c.F; first += CHAIN) {
      vec<T> sum[NV];
      for (int v = 0; v < NV; ++v) sum[v] = vec<T>{};
      for (int64_t f = first; f < min64(first + CHAIN, c.F); ++f) {
        const T decay = c.decay ? from[this->by_channel() ? f : 0] : T(1), query = q[f] * mul;
        T* row = S + f * Wp + w;
        for (int v = 0; v < NV; ++v) {
          const vec<T> y = load(row + v * N) * decay + value[v] * k[f];
          store(row + v * N, y), sum[v] += y * query;
        }
      }
      for (int v = 0; v < NV; ++v) total[v] += sum[v];
    }
    for (int v = 0; v < NV; ++v) store(o + w + v * N, total[v]);
  }
  bool finite(int64_t n) const {
    Finite<T> seen;
    for (int64_t i = 0; i < n * Wp; i += lanes<T>) seen.see(load(u + i));
    return seen.all();
  }
  // what the tokens read from the state
  void past(int64_t n, bool add) {
    const T* rows = this->weighed(n, q, from, this->outer(), q);
    this->fetching(n, [&](int64_t r, int64_t count) {
      mm<Plain<T>>(count, Wp, c.F, S, Wp, rows + r * Fp, Fp, 1, o + r * Wp, Wp, add);
    });
  }
  void write(int64_t t, int64_t n) {
    for (int64_t r = 0; r < n; ++r) {
      T* row = o + r * Wp;
      if (c.normalize) {
        const T total = row[c.V], inverse = total != T(0) ? T(1) / total : T(0);
        for (int64_t w = 0; w < Wp; w += lanes<T>) store(row + w, load(row + w) * inverse);
      }
      write_row(c.o, this->at(c.o, t + r, this->h) + this->column, this->values(), row);
    }
  }
};

}  // namespace saccade::SACCADE_ISA
