// Selective scan (Mamba, Gu and Dao 2023): h_t = exp(dt_t A) h_t-1 + dt_t B_t u_t, y_t = C_t h_t; each channel has a
// state h of N numbers. Vectors lie along channels, so C_t h_t needs no horizontal step and B_t, C_t are broadcast. A
// task owns a sequence and one vector of channels.
#pragma once
#include "diagonal_lanes.hpp"

namespace saccade::SACCADE_ISA {

// what a walk over a chunk computes: only the state, y as well, or also every state and decay for a backward
enum class Walk { STATE, OUTPUT, ALL };

template <class T>
struct SelectiveScan {
  static constexpr int L = lanes<T>;
  static constexpr int SLOTS = L < 4 ? L : 4;  // numbers of a state kept in registers through a chunk

  const Scan& c;
  int64_t s = 0, g = 0;
  Lanes x{};
  int64_t ld;               // N, rounded up to lanes
  T *rows, *A, *h;          // [ld][L]
  T *rate, *rate_low;       // A log2 e in two parts
  T *B, *C;                 // [chunk][ld], or [ld][L] where fixed in time
  T *u, *dt, *raw, *z, *y;  // [chunk][L]; raw: delta before softplus

  SelectiveScan(const Scan& call, Bump& bump) : c(call), ld(round_up(call.N, L)) {
    rows = bump.take<T>(ld * L), A = bump.take<T>(ld * L), h = bump.take<T>(ld * L);
    rate = bump.take<T>(ld * L), rate_low = bump.take<T>(ld * L);
    B = bump.take<T>(ld * max64(c.chunk, L)), C = bump.take<T>(ld * max64(c.chunk, L));
    u = bump.take<T>(c.chunk * L), dt = bump.take<T>(c.chunk * L), raw = bump.take<T>(c.chunk * L);
    z = bump.take<T>(c.chunk * L), y = bump.take<T>(c.chunk * L);
  }
  static int64_t scratch_bytes(const Scan& c) {
    Bump bump{nullptr};
    SelectiveScan measure(c, bump);
    return bump.used;
  }

  // a block of channels never crosses the border of a group
  static int64_t blocks(const Scan& c) { return (c.D / c.G + L - 1) / L; }
  static int64_t tasks(const Scan& c) { return c.tokens.count * c.G * blocks(c); }

  void place(int64_t sequence, int64_t group, int64_t block) {
    s = sequence, g = group;
    const int64_t width = c.D / c.G, at = block * L;
    x = {group * width + at, min64(L, width - at)};
    table_to_lanes(c.A, 0, x, c.N, rows, A);
    // the rounding of a single part would scale all decays of a channel in the same direction
    for (int64_t i = 0; i < ld * L; ++i) {
      const double product = static_cast<double>(A[i]) * LOG2E<double>;
      rate[i] = static_cast<T>(product);
      double rest = product - static_cast<double>(rate[i]);
      if (sizeof(T) == 8) rest = __builtin_fma(A[i], LOG2E<double>, -product) + A[i] * 2.0355273740931033e-17;
      rate_low[i] = rest * 0 == 0 ? static_cast<T>(rest) : T(0);
    }
    if (c.fixed_B) table_to_lanes(c.B, 0, x, c.N, rows, B);
    if (c.fixed_C) table_to_lanes(c.C, 0, x, c.N, rows, C);
  }
  // h from a wide [count, D, N], or zeros
  void start(const void* from, T* to) {
    if (from) return table_to_lanes(wide_table<T>(from, c.N), s * c.D * c.N, x, c.N, rows, to);
    for (int64_t i = 0; i < ld * L; ++i) to[i] = T(0);
  }
  int64_t at(const Array& a, int64_t t) const { return c.tokens.at(a, s, t) + x.first; }

  // reads n tokens from t0 on
  void read(int64_t t0, int64_t n, Walk wanted) {
    check_stop();
    const bool output = wanted != Walk::STATE;
    const vec<T> bias = c.bias.data ? get<T>(c.bias, x.first, x.n) : vec<T>{};
    for (int64_t t = 0; t < n; ++t) {
      store(u + t * L, get<T>(c.u, at(c.u, t0 + t), x.n));
      const vec<T> d = get<T>(c.delta, at(c.delta, t0 + t), x.n) + bias;
      store(raw + t * L, d);
      store(dt + t * L, c.softplus ? softplus<T>(d) : d);
      if (c.z.data && output) store(z + t * L, get<T>(c.z, at(c.z, t0 + t), x.n));
      if (!c.fixed_B) read_row(c.B, c.tokens.at(c.B, s, t0 + t) + g * c.B.stride[2], c.N, B + t * ld);
      if (!c.fixed_C && output) read_row(c.C, c.tokens.at(c.C, s, t0 + t) + g * c.C.stride[2], c.N, C + t * ld);
    }
  }
  // number j of B or C at token t in all lanes; FIXED: the numbers of the lanes' channels
  template <bool FIXED>
  SACCADE_INLINE vec<T> one(const T* p, int64_t t, int64_t ld, int64_t j) {
    if constexpr (FIXED) return load(p + j * L);
    return splat(p[t * ld + j]);
  }

  // Adds the terms of a few slots to y of n tokens. For a backward it writes `states` [n + 1][SLOTS][L], first those
  // before, and `decays` [n][SLOTS][L].
  template <bool FIXED_B, bool FIXED_C, Walk WANTED, bool FULL>
  void slots(int64_t first, int64_t n, T* states, T* decays) {
    const int64_t some = FULL ? SLOTS : c.N - first;
    vec<T> now[SLOTS], high[SLOTS], low[SLOTS];
    for (int64_t r = 0; r < some; ++r) {
      const int64_t at = (first + r) * L;
      now[r] = load(h + at), high[r] = load(rate + at), low[r] = load(rate_low + at);
      if constexpr (WANTED == Walk::ALL) store(states + r * L, now[r]);
    }
    for (int64_t t = 0; t < n; ++t) {
      const vec<T> step = load(dt + t * L), in = step * load(u + t * L);
      vec<T> sum = {};
      if (WANTED != Walk::STATE && first) sum = load(y + t * L);
#pragma GCC unroll 4
      for (int64_t r = 0; r < some; ++r) {
        const vec<T> a = exp2_any<T>(step * high[r] + step * low[r]);
        now[r] = a * now[r] + in * one<FIXED_B>(B, t, ld, first + r);
        if constexpr (WANTED != Walk::STATE) sum += now[r] * one<FIXED_C>(C, t, ld, first + r);
        if constexpr (WANTED == Walk::ALL)
          store(decays + (t * SLOTS + r) * L, a), store(states + ((t + 1) * SLOTS + r) * L, now[r]);
      }
      if constexpr (WANTED != Walk::STATE) store(y + t * L, sum);
    }
    for (int64_t r = 0; r < some; ++r) store(h + (first + r) * L, now[r]);
  }
  template <bool FIXED_B, bool FIXED_C, Walk WANTED>
  void walk(int64_t n) {
    int64_t j = 0;
    for (; j + SLOTS <= c.N; j += SLOTS) slots<FIXED_B, FIXED_C, WANTED, true>(j, n, nullptr, nullptr);
    if (j < c.N) slots<FIXED_B, FIXED_C, WANTED, false>(j, n, nullptr, nullptr);
  }
  template <Walk WANTED>
  void walk_as_fixed(int64_t n) {
    if (c.fixed_B)
      c.fixed_C ? walk<true, true, WANTED>(n) : walk<true, false, WANTED>(n);
    else
      c.fixed_C ? walk<false, true, WANTED>(n) : walk<false, false, WANTED>(n);
  }

  static void task(const Scan& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    SelectiveScan f(c, bump);
    const int64_t n_blocks = blocks(c);
    f.place(task / n_blocks / c.G, task / n_blocks % c.G, task % n_blocks);
    f.start(c.initial, f.h);
    const vec<T> skip = c.skip.data ? get<T>(c.skip, f.x.first, f.x.n) : vec<T>{};
    const int64_t length = c.tokens.size(f.s);
    for (int64_t t0 = 0; t0 < length; t0 += c.chunk) {
      const int64_t n = min64(c.chunk, length - t0);
      f.read(t0, n, Walk::OUTPUT);
      f.template walk_as_fixed<Walk::OUTPUT>(n);
      for (int64_t t = 0; t < n; ++t) {
        vec<T> out = load(f.y + t * L);
        if (c.skip.data) out += skip * load(f.u + t * L);
        if (c.z.data) out *= silu<T>(load(f.z + t * L));
        put<T>(c.y, f.at(c.y, t0 + t), f.x.n, out);
      }
    }
    if (c.final) lanes_to_table(f.h, f.x, c.N, f.rows, static_cast<T*>(c.final) + f.s * c.D * c.N);
  }
};

// Backward: dh_t = C_t dp_t + a_t+1 dh_t+1 with p the sum before the gate, chunk by chunk from the end. A first walk
// stores the state before each chunk; the states within a chunk are computed again from it. Gradients shared by all
// channels of a group are summed per owner.
template <class T>
struct ScanBackward {
  static constexpr int L = lanes<T>, SLOTS = SelectiveScan<T>::SLOTS;

  SelectiveScan<T> f;
  const Scan& c;
  int64_t ld;
  T* kept;               // [chunks][ld][L]
  T *states, *decays;    // of a few slots: [chunk + 1][SLOTS][L], first those before the chunk; [chunk][SLOTS][L]
  T *dh, *dA;            // [ld][L]
  T *terms_B, *terms_C;  // [chunk][ld / SLOTS][L] products of a few slots, reduced; [ld][L] sums where fixed
  T *dp, *du, *ddt;      // [chunk][L]; du and ddt: the gradients through B and through A

  ScanBackward(const Scan& call, Bump& bump) : f(call, bump), c(call), ld(f.ld) {
    kept = bump.take<T>((c.tokens.longest() + c.chunk - 1) / c.chunk * ld * L);
    states = bump.take<T>((c.chunk + 1) * SLOTS * L), decays = bump.take<T>(c.chunk * SLOTS * L);
    dh = bump.take<T>(ld * L), dA = bump.take<T>(ld * L);
    const int64_t terms = max64(c.chunk * ld / SLOTS, ld) * L;
    terms_B = bump.take<T>(terms), terms_C = bump.take<T>(terms);
    dp = bump.take<T>(c.chunk * L), du = bump.take<T>(c.chunk * L), ddt = bump.take<T>(c.chunk * L);
  }
  static int64_t scratch_bytes(const Scan& c) {
    Bump bump{nullptr};
    ScanBackward measure(c, bump);
    return bump.used;
  }
  static int64_t tasks(const Scan& c) { return c.tokens.count * c.G * c.owners; }

  void first_walk(int64_t length) {
    f.start(c.initial, f.h);
    for (int64_t t0 = 0; t0 < length; t0 += c.chunk) {
      copy(f.h, kept + t0 / c.chunk * ld * L);
      if (t0 + c.chunk >= length) break;
      f.read(t0, c.chunk, Walk::STATE);
      f.template walk_as_fixed<Walk::STATE>(c.chunk);
    }
  }
  void copy(const T* from, T* to) const { __builtin_memcpy(to, from, static_cast<size_t>(ld * L) * sizeof(T)); }

  // gradients of the sums before the gate
  void through_gate(int64_t t0, int64_t n) {
    for (int64_t t = 0; t < n; ++t) {
      const vec<T> d = get<T>(c.dy, f.at(c.dy, t0 + t), f.x.n);
      store(dp + t * L, c.z.data ? d * silu<T>(load(f.z + t * L)) : d);
    }
  }
  // gradients of the gate, once all slots have added to y
  void of_gate(int64_t t0, int64_t n, vec<T> skip) {
    for (int64_t t = 0; c.z.data && t < n; ++t) {
      const vec<T> d = get<T>(c.dy, f.at(c.dy, t0 + t), f.x.n), p = load(f.y + t * L) + skip * load(f.u + t * L);
      put<T>(c.dz, f.at(c.dz, t0 + t), f.x.n, d * p * silu_slope<T>(load(f.z + t * L)));
    }
  }

  // computes the states of a few slots again, and adds their terms to the gradients of a chunk
  template <bool FIXED_B, bool FIXED_C, bool FULL>
  void slots(int64_t first, int64_t n) {
    f.template slots<FIXED_B, FIXED_C, Walk::ALL, FULL>(first, n, states, decays);
    const int64_t some = FULL ? SLOTS : c.N - first;
    vec<T> carried[SLOTS], rate[SLOTS], after[SLOTS], for_A[SLOTS] = {}, for_B[SLOTS] = {}, for_C[SLOTS] = {};
    for (int64_t r = 0; r < some; ++r) {
      const int64_t at = (first + r) * L;
      carried[r] = load(dh + at), rate[r] = load(f.A + at), after[r] = load(states + (n * SLOTS + r) * L);
    }
    for (int64_t t = n - 1; t >= 0; --t) {
      const vec<T> step = load(f.dt + t * L), in = step * load(f.u + t * L), out = load(dp + t * L);
      vec<T> through_B = first ? load(du + t * L) : vec<T>{}, through_A = first ? load(ddt + t * L) : vec<T>{};
#pragma GCC unroll 4
      for (int64_t r = 0; r < some; ++r) {
        const vec<T> d = carried[r] + f.template one<FIXED_C>(f.C, t, ld, first + r) * out;
        for_C[r] = after[r] * out + (FIXED_C ? for_C[r] : vec<T>{});
        for_B[r] = d * in + (FIXED_B ? for_B[r] : vec<T>{});
        through_B += d * f.template one<FIXED_B>(f.B, t, ld, first + r);
        carried[r] = load(decays + (t * SLOTS + r) * L) * d;
        after[r] = load(states + (t * SLOTS + r) * L);
        const vec<T> dx = carried[r] * after[r];
        for_A[r] += dx * step;
        through_A += dx * rate[r];
      }
      store(du + t * L, through_B), store(ddt + t * L, through_A);
      const int64_t at = (t * ld + first) / SLOTS * L;
      if constexpr (!FIXED_B) store(terms_B + at, folded(for_B));
      if constexpr (!FIXED_C) store(terms_C + at, folded(for_C));
    }
    for (int64_t r = 0; r < some; ++r) {
      const int64_t at = (first + r) * L;
      store(dh + at, carried[r]), store(dA + at, load(dA + at) + for_A[r]);
      if constexpr (FIXED_B) store(terms_B + at, load(terms_B + at) + for_B[r]);
      if constexpr (FIXED_C) store(terms_C + at, load(terms_C + at) + for_C[r]);
    }
  }
  SACCADE_INLINE vec<T> folded(const vec<T>* terms) {
    vec<T> a[SLOTS];
#pragma GCC unroll 4
    for (int r = 0; r < SLOTS; ++r) a[r] = terms[r];
    return fold_lanes<T, SLOTS>(a);
  }
  template <bool FIXED_B, bool FIXED_C>
  void reverse(int64_t t0, int64_t n, bool first) {
    int64_t j = 0;
    for (; j + SLOTS <= c.N; j += SLOTS) slots<FIXED_B, FIXED_C, true>(j, n);
    if (j < c.N) slots<FIXED_B, FIXED_C, false>(j, n);
    if constexpr (!FIXED_B) add_up(terms_B, c.sums_B, t0, n, first);
    if constexpr (!FIXED_C) add_up(terms_C, c.sums_C, t0, n, first);
  }
  int64_t owner = 0;
  // sums over the channels into the owner's rows of [owners, total, G, N]
  void add_up(const T* terms, void* sums, int64_t t0, int64_t n, bool first) {
    constexpr int FOLDED = L / SLOTS;
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row = (owner * c.tokens.total() + c.tokens.begin(f.s) + t0 + t) * c.G + f.g;
      T* to = static_cast<T*>(sums) + row * c.N;
      for (int64_t j = 0; j < c.N; j += L) {
        vec<T> a[FOLDED] = {};
#pragma GCC unroll 4
        for (int i = 0; i < FOLDED; ++i)
          if (j + i * SLOTS < c.N) a[i] = load(terms + ((t * ld + j) / SLOTS + i) * L);
        vec<T> sum = fold_lanes<T, FOLDED>(a);
        if (!first) sum += get<T>(to, j, min64(L, c.N - j));
        put<T>(to, j, min64(L, c.N - j), sum);
      }
    }
  }

  void block(bool first) {
    const vec<T> skip = c.skip.data ? get<T>(c.skip, f.x.first, f.x.n) : vec<T>{};
    f.start(c.dfinal, dh);
    for (int64_t i = 0; i < ld * L; ++i) dA[i] = terms_B[i] = terms_C[i] = T(0);
    vec<T> dskip = {}, dbias = {};
    const int64_t length = c.tokens.size(f.s);
    first_walk(length);
    for (int64_t t0 = (length - 1) / c.chunk * c.chunk; length && t0 >= 0; t0 -= c.chunk) {
      const int64_t n = min64(c.chunk, length - t0);
      f.read(t0, n, Walk::ALL);
      copy(kept + t0 / c.chunk * ld * L, f.h);
      through_gate(t0, n);
      if (c.fixed_B)
        c.fixed_C ? reverse<true, true>(t0, n, first) : reverse<true, false>(t0, n, first);
      else
        c.fixed_C ? reverse<false, true>(t0, n, first) : reverse<false, false>(t0, n, first);
      of_gate(t0, n, skip);
      vec<T> skip_chunk = {}, bias_chunk = {};
      for (int64_t t = 0; t < n; ++t) {
        const vec<T> d = load(dp + t * L), through_B = load(du + t * L), u = load(f.u + t * L);
        skip_chunk += d * u;
        put<T>(c.du, f.at(c.du, t0 + t), f.x.n, load(f.dt + t * L) * through_B + d * skip);
        vec<T> of_delta = u * through_B + load(ddt + t * L);
        if (c.softplus) of_delta *= sigmoid<T>(load(f.raw + t * L));
        bias_chunk += of_delta;
        put<T>(c.ddelta, f.at(c.ddelta, t0 + t), f.x.n, of_delta);
      }
      dskip += skip_chunk, dbias += bias_chunk;
    }
    finish(dskip, dbias);
  }
  void finish(vec<T> dskip, vec<T> dbias) {
    const int64_t table = f.s * c.D * c.N;
    const auto write = [&](const T* from, void* to) {
      if (to) lanes_to_table(from, f.x, c.N, f.rows, static_cast<T*>(to) + table);
    };
    write(dA, c.dA), write(dh, c.dinitial);
    if (c.fixed_B) write(terms_B, c.fixed_dB);
    if (c.fixed_C) write(terms_C, c.fixed_dC);
    if (c.dskip) put<T>(c.dskip, f.s * c.D + f.x.first, f.x.n, dskip);
    if (c.dbias) put<T>(c.dbias, f.s * c.D + f.x.first, f.x.n, dbias);
  }

  static void task(const Scan& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    ScanBackward b(c, bump);
    b.owner = task % c.owners;
    const int64_t all = SelectiveScan<T>::blocks(c), each = (all + c.owners - 1) / c.owners;
    const int64_t from = b.owner * each, to = min64(all, from + each);
    for (int64_t block = from; block < to; ++block) {
      b.f.place(task / c.owners / c.G, task / c.owners % c.G, block);
      b.block(block == from);
    }
  }

  // adds the sums of all owners, in order, at one token numbered over all sequences
  static void fold(const Scan& c, int64_t token) {
    if (!c.fixed_B) fold(c, c.sums_B, c.dB, token);
    if (!c.fixed_C) fold(c, c.sums_C, c.dC, token);
  }
  static void fold(const Scan& c, const void* sums, const Array& out, int64_t token) {
    const T* from = static_cast<const T*>(sums) + token * c.G * c.N;
    const int64_t step = c.tokens.total() * c.G * c.N, to = c.tokens.at(out, token);
    for (int64_t g = 0; g < c.G; ++g, from += c.N)
      for (int64_t j = 0; j < c.N; j += L) {
        const int64_t n = min64(L, c.N - j);
        vec<T> sum = get<T>(from, j, n);
        for (int64_t o = 1; o < c.owners; ++o) sum += get<T>(from + o * step, j, n);
        put<T>(out, to + g * out.stride[2] + j, n, sum);
      }
  }
};

}  // namespace saccade::SACCADE_ISA
