// Decode: few query rows against many keys. Each key is read once for all query heads of its group. A task owns one
// chunk of keys and writes (sum of p v, m, l) per row; if there are several chunks, a second pass merges them in order.
#pragma once
#include "decode_merge.hpp"
#include "items.hpp"

namespace saccade::SACCADE_ISA {

// How many key heads a task computes. All of them if the heads of a position are adjacent, since memory is then read in
// one stream. Otherwise one head, whose positions are adjacent.
SACCADE_INLINE int64_t decode_heads(const Call& c) { return c.k.stride[2] < c.k.stride[1] ? c.Hk : 1; }

template <class K, int64_t STEP = 32>
struct Decode {
  using T = typename K::sum;
  static constexpr int N = lanes<T>;
  static constexpr bool PAIRS = Store<K>::per == 2;
  static constexpr int64_t PIECE = STEP;  // keys of one step: with all their heads they fit the L2 cache
  static constexpr int FEW = 4;           // up to this many rows, each product decodes the codes again

  using Head = DecodeHead<T>;

  const Call& c;
  int64_t rows, ld, ldv, n_heads;
  Keys all;
  T pre = T(1);  // the factor of the products, unless q was multiplied by it
  T *s, *kt, *vt, *transposed;
  int64_t s_row = TILE_K, s_key = 1;  // how far apart the scores of neighbouring rows and keys are
  typename K::num* weights;
  const T* q = nullptr;
  T *acc = nullptr, *m = nullptr, *l = nullptr, *u = nullptr;
  Head* heads;
  TileMask<T>* masks;
  // keys and values of the next piece, which the products of this one fetch
  struct Both {
    Ahead k, v;
    void step() { k.step(), v.step(); }
  } ahead;
  int64_t coming_k = 0, coming_v = 0;  // their bytes

  Decode(const Call& call, Bump& bump)
      : c(call),
        rows(call.G * call.Tq),
        ld(round_up(call.D, N)),
        ldv(round_up(call.Dv, N)),
        n_heads(decode_heads(call)),
        all{0, 1, call.Tk} {
    const int64_t lanes = round_up(rows, N);
    s = bump.take<T>(lanes * TILE_K + N);
    kt = bump.take<T>(PIECE * ld);
    vt = bump.take<T>(PIECE * ldv);
    transposed = bump.take<T>(TILE_K * TILE_Q);
    if (PAIRS) weights = bump.take<typename K::num>(lanes * PIECE / 2);
    heads = bump.take<Head>(n_heads);
    masks = bump.take<TileMask<T>>(n_heads * c.G);
    for (int64_t i = 0; i < n_heads; ++i) {
      Head h;
      h.q = bump.take<T>(rows * ld);
      h.acc = bump.take<T>(rows * ldv);
      h.m = bump.take<T>(lanes);
      h.l = bump.take<T>(lanes);
      h.u = bump.take<T>(lanes);
      h.scorer = bump.take<Scorer<T>>(c.G);
      if (bump.base) heads[i] = h;
    }
  }

  // whether keys first to first + n - 1 are a constant stride apart, that is in one page
  bool together(int64_t first, int64_t n) const {
    return !c.block_table || first / c.page_size == (first + n - 1) / c.page_size;
  }

  // values in the compute type; not copied if they already have it and no check is needed
  const T* values(const Head& h, int64_t first, int64_t n, int64_t* stride, bool check, bool* finite) {
    const bool same = c.v.dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64);
    if (same && together(first, n) && !check && c.Dv == ldv) {
      *stride = c.v.stride[1];
      return reinterpret_cast<const T*>(c.v.data) + key_offset(c, c.v, h.b, h.hk, first);
    }
    const bool here = load_rows({c, c.v, h.b, h.hk, all, first, n, c.Dv, false}, vt, ldv, check);
    if (check) *finite = here;
    *stride = ldv;
    return vt;
  }

  // keys as products read them, in place; null if they have another dtype or are in several pages
  const typename K::num* in_place(const Head& h, int64_t first, int64_t n, int64_t* stride) const {
    const Array& a = c.k;
    const bool same = PAIRS ? a.stride[1] % 2 == 0 : a.dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64);
    if (!same || !together(first, n)) return nullptr;
    *stride = a.stride[1] / Store<K>::per;
    return reinterpret_cast<const typename K::num*>(a.data + key_offset(c, a, h.b, h.hk, first) * a.unit());
  }

  // keys are read in place where vector loads support their dtype
  void scores(const Head& h, int64_t first, int64_t n) {
    if constexpr (PAIRS) {
      const uint16_t* k = reinterpret_cast<const uint16_t*>(c.k.data) + key_offset(c, c.k, h.b, h.hk, first);
      if (together(first, n)) return dots(k, n, c.k.stride[1]);
      Store<K>::load_deep({c, c.k, h.b, h.hk, all, first, n, c.D, false}, reinterpret_cast<typename K::num*>(kt),
                          false);
      dots(reinterpret_cast<const uint16_t*>(kt), n, c.D);
    } else {
      const bool same = c.k.dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64);
      const bool half = sizeof(T) == 4 && c.k.dtype == DType::bf16;
      if ((same || half) && together(first, n) && c.D == ld) {
        const Array& a = c.k;
        const int64_t at = key_offset(c, a, h.b, h.hk, first);
        if (same) return dots(reinterpret_cast<const T*>(a.data) + at, n, a.stride[1]);
        if constexpr (sizeof(T) == 4) return dots(reinterpret_cast<const uint16_t*>(a.data) + at, n, a.stride[1]);
      }
      if (rows <= FEW && whole_rows<T>(c.k, c.D) && together(first, n)) return coded_scores(h, first, n);
      load_rows({c, c.k, h.b, h.hk, all, first, n, c.D, false}, kt, ld, false);
      dots(static_cast<const T*>(kt), n, ld);
    }
  }

  // products with undecoded codes; the scale of a key's row multiplies its score
  void coded_scores(const Head& h, int64_t first, int64_t n) {
    const uint8_t* k = reinterpret_cast<const uint8_t*>(c.k.data) + key_offset(c, c.k, h.b, h.hk, first);
    if (c.k.code == Code::i8)
      dots(Codes<Code::i8>{k, 0}, n, c.k.stride[1]);
    else if (c.k.code == Code::i4)
      dots(Codes<Code::i4>{k, c.D / 2}, n, c.k.stride[1]);
    else
      dots(Codes<Code::f8>{k, 0}, n, c.k.stride[1]);
    scale_columns(c.k, h.b, h.hk, first, n);
  }
  // multiplies rows of s [n] by the scales of n keys or values
  void scale_columns(const Array& a, int64_t b, int64_t hk, int64_t first, int64_t n) {
    const Span span{c, a, b, hk, all, first, n, 0, false};
    T scale[PIECE];
    for (int64_t j = 0; j < PIECE; ++j) scale[j] = j < n ? static_cast<T>(from_bf16(*span.scales(j))) : T(0);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < n; j += N) store(s + r * TILE_K + j, load(s + r * TILE_K + j) * load(scale + j));
  }

  template <class X>
  void dots(X k, int64_t n, int64_t stride) {
    constexpr int MOST = N < 4 ? N : 4;
    int64_t row = 0;
    Alone alone;
    const int64_t steps = n_heads * n * ld / (PAIRS ? 2 * N : N);
    ahead.k.bytes = share(coming_k, steps), ahead.v.bytes = share(coming_v, steps);
    // the products of the first rows fetch the next piece
    const auto some = [&]<int R>() {
      row == 0 && coming_k ? dots_of<R>(row, n, k, stride, ahead) : dots_of<R>(row, n, k, stride, alone);
      row += R;
    };
    while (row + MOST <= rows) some.template operator()<MOST>();
    if (row + 2 <= rows) some.template operator()<2>();
    while (row < rows) some.template operator()<1>();
  }
  SACCADE_INLINE vec<T> wide(const T* p, int64_t d) { return load(p + d); }
  SACCADE_INLINE vec<float> wide(const uint16_t* p, int64_t d) {
    return PAIRS ? load(reinterpret_cast<const float*>(p + d)) : widen_bf16(p + d);
  }
  template <Code CODE>
  SACCADE_INLINE vec<T> wide(Codes<CODE> p, int64_t d) {
    return Codes<CODE>::template at<T>(p, d);
  }

  // reads every cache line of a piece that no product has fetched, in the order of addresses
  void touch(const Array& a, const Head& h, int64_t first, int64_t n, int64_t width) const {
    const int64_t size = a.unit();
    const bool one = together(first, n);
    const char* row = a.data + key_offset(c, a, h.b, h.hk, first) * size;
    for (int64_t j = 0; j < n; ++j) {
      const char* p = one ? row + j * a.stride[1] * size : a.data + key_offset(c, a, h.b, h.hk, first + j) * size;
      for (int64_t head = 0; head < n_heads; ++head, p += a.stride[2] * size)
        for (int64_t x = 0; x < a.bytes(width); x += 64) static_cast<void>(*static_cast<const volatile char*>(p + x));
    }
  }

  // R rows against N / R keys at a time: N sums, reduced together
  template <int R, class X, class Side>
  void dots_of(int64_t row, int64_t n, X k, int64_t stride, Side& side) {
    constexpr int KEYS = N / R;
    Side also = side;
    for (int64_t j = 0; j < n; j += KEYS) {
      vec<T> a[N];
      X at[KEYS];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) a[i] = vec<T>{};
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; ++i) at[i] = k + min64(j + i, n - 1) * stride;
      for (int64_t d = 0; d < ld; d += PAIRS ? 2 * N : N) {
        vec<T> w[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) w[r] = load(q + (row + r) * ld + (PAIRS ? d / 2 : d));
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; ++i) {
          const vec<T> x = wide(at[i], d);
          also.step();
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) a[r * KEYS + i] = K::mul_add(x, w[r], a[r * KEYS + i]);
        }
      }
      T sums[N];
      store(sums, fold_lanes<T, N>(a) * pre);
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < KEYS; ++i) s[(row + r) * TILE_K + j + i] = sums[r * KEYS + i];
    }
    side = also;
  }

  // mask, bias and dropout work on tiles whose lanes are the tokens of one head
  void extras(Scorer<T>& x, int64_t g, int64_t first, int64_t n, bool partial, bool weights) {
    T* const head = s + g * c.Tq * s_row;
    for (int64_t r = 0; r < n; ++r)
      for (int64_t t = 0; t < x.width; ++t) transposed[r * x.width + t] = t < c.Tq ? head[t * s_row + r * s_key] : T(0);
    if (weights)
      x.dropout(transposed, nullptr, first, n);
    else
      x.scores(transposed, first, n, partial, nullptr);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t t = 0; t < c.Tq; ++t) head[t * s_row + r * s_key] = transposed[r * x.width + t];
  }

  template <bool ENTROPY>
  [[gnu::always_inline]] void softmax(int64_t r, int64_t n) {
    T* p = s + r * TILE_K;
    const int64_t padded = round_up(n, N);
    for (int64_t j = n; j < padded; ++j) p[j] = Low<T>::masked;
    vec<T> top = splat(m[r]);
    for (int64_t j = 0; j < padded; j += N) top = vmax<T>(top, load(p + j));
    T best = m[r];
    for (int i = 0; i < N; ++i) best = top[i] > best ? top[i] : best;
    const T fix = exp2v(splat(m[r] - best))[0];
    vec<T> sum = {}, logs = {};
    for (int64_t j = 0; j < padded; j += N) {
      const vec<T> log = load(p + j) - best, e = exp2v(log);
      sum += e;
      if constexpr (ENTROPY) logs += e * finite_log<T>(log);
      store(p + j, e);
    }
    if constexpr (ENTROPY) u[r] = (u[r] + l[r] * finite_log<T>(splat(m[r] - best))[0]) * fix + add_lanes<T>(logs);
    l[r] = l[r] * fix + add_lanes<T>(sum);
    m[r] = best;
    if (fix != T(1))
      for (int64_t d = 0; d < ldv; d += N) store(acc + r * ldv + d, load(acc + r * ldv + d) * fix);
  }

  // not inlined, so that plain steps keep their registers
  [[gnu::noinline]] void softmax_with_logs(int64_t n) {
    for (int64_t r = 0; r < rows; ++r) softmax<true>(r, n);
  }

  void softmax(int64_t n) {
    if (c.entropy) return softmax_with_logs(n);
    for (int64_t r = 0; r < rows; ++r) softmax<false>(r, n);
  }

  template <class F>
  static void step(F& f, const Head& h, int64_t first, int64_t n, bool partial) {
    const Call& c = f.c;
    f.q = h.q, f.acc = h.acc, f.m = h.m, f.l = h.l, f.u = h.u;
    Scorer<T>* x = h.scorer;
    f.scores(h, first, n);
    const bool more = partial || !x[0].plain();
    for (int64_t g = 0; more && g < c.G; ++g) f.extras(x[g], g, first, n, partial, false);
    f.softmax(n);
    for (int64_t g = 0; c.drop_below && g < c.G; ++g) f.extras(x[g], g, first, n, partial, true);
    if (!partial && !x[0].masked_by_bias()) return f.add_values(h, first, n);
    bool finite = true;
    int64_t stride = 0;
    const T* v = f.values(h, first, n, &stride, true, &finite);
    finite ? f.product(v, stride, n) : f.values_one_by_one(x, first, n, partial);
  }

  void product(const T* v, int64_t stride, int64_t n) {
    mm<Plain<T>>(rows, ldv, n, v, stride, s, TILE_K, 1, acc, ldv, true);
  }

  // values that all rows see
  void add_values(const Head& h, int64_t first, int64_t n) {
    if constexpr (PAIRS) {
      // for few rows, widening values costs less than pairing them
      const auto* v = reinterpret_cast<const uint16_t*>(c.v.data) + key_offset(c, c.v, h.b, h.hk, first);
      if (rows <= FEW && together(first, n)) return add_in_place<Widened>(v, c.Dv, n, acc);
      values_paired(h, first, n);
    } else {
      if (rows <= FEW && whole_rows<T>(c.v, c.Dv) && together(first, n)) return coded_values(h, first, n);
      int64_t stride = 0;
      const T* v = values(h, first, n, &stride, false, nullptr);
      product(v, stride, n);
    }
  }

  // products with undecoded values; the scale of a value's row multiplies its weights
  void coded_values(const Head& h, int64_t first, int64_t n) {
    const uint8_t* v = reinterpret_cast<const uint8_t*>(c.v.data) + key_offset(c, c.v, h.b, h.hk, first);
    scale_columns(c.v, h.b, h.hk, first, n);
    if (c.v.code == Code::i8) return add_in_place<Coded<T, Code::i8>>(v, c.Dv, n, acc);
    if (c.v.code == Code::f8) return add_in_place<Coded<T, Code::f8>>(v, c.Dv, n, acc);
    add_in_place<Coded<T, Code::i4, false>>(v, c.Dv / 2, n, acc);
    add_in_place<Coded<T, Code::i4, true>>(v, c.Dv / 2, n, acc + c.Dv / 2);
  }
  template <class Left>
  void add_in_place(const typename Left::left* v, int64_t width, int64_t n, T* to) {
    int64_t w = 0;
    Alone alone;
    const auto add = [&]<int NV>() {
      for (; w + NV * N <= width; w += NV * N)
        micro_tail<Left, FEW, NV>(rows, n, v + w, c.v.stride[1], s, TILE_K, 1, to + w, ldv, true, alone);
    };
    add.template operator()<MAX_NV>();
    add.template operator()<1>();
  }

  void values_paired(const Head& h, int64_t first, int64_t n) {
    using num = typename K::num;
    Store<K>::load_across({c, c.v, h.b, h.hk, all, first, n, c.Dv, false}, reinterpret_cast<num*>(vt), ldv);
    for (int64_t r = 0; r < rows; ++r) Store<K>::pair_lanes(s + r * TILE_K, n, weights + r * PIECE / 2);
    mm<K>(rows, ldv, Store<K>::depth(n), reinterpret_cast<num*>(vt), ldv, weights, PIECE / 2, 1, acc, ldv, true);
  }

  void values_one_by_one(Scorer<T>* x, int64_t first, int64_t n, bool partial) {
    for (int64_t g = 0; g < c.G; ++g)
      for (int64_t j = 0; j < n; ++j)
        for (int64_t t = 0; t < c.Tq; ++t) {
          if (partial) x[g].prepare();
          if (!x[g].allowed(static_cast<int>(t / N * N), first + j, partial)[t % N]) continue;
          const int64_t r = g * c.Tq + t;
          for (int64_t d = 0; d < c.Dv; ++d) acc[r * ldv + d] += s[r * s_row + j * s_key] * vt[j * ldv + d];
        }
  }

  static int64_t scratch_bytes(const Call& c) {
    Bump bump{nullptr};
    Decode measure(c, bump);
    return bump.used;
  }
  static int64_t tasks(const Call& c) { return c.B * c.Hk / decode_heads(c) * c.n_chunks; }

  // places the tiles of a key head and loads its rows of q, `padded` of them
  Item<T> place(Head& h, int64_t b, int64_t hk, int64_t cls, TileMask<T>* mask, T* out, int64_t padded) {
    Item<T> it;
    h.b = b, h.hk = hk;
    for (int64_t g = 0; g < c.G; ++g) {
      it.place(c, TaskIndex{b, hk, cls, 0, 0}, g, 0, mask + g);
      h.scorer[g] = it.s;
      load_queries(c.q, {b, hk * c.G + g, 0, 1, c.Tq}, c.Tq, c.D, out + g * c.Tq * ld, ld);
    }
    for (int64_t i = rows * ld; i < padded * ld; ++i) out[i] = T(0);
    return it;
  }
  void start_sums(const Head& h) {
    for (int64_t i = 0; i < rows * ldv; ++i) h.acc[i] = T(0);
    for (int64_t r = 0; r < round_up(rows, N); ++r) h.m[r] = Low<T>::start, h.l[r] = h.u[r] = T(0);
  }

  Item<T> start(Head& h, int64_t b, int64_t hk, TileMask<T>* mask) {
    const Item<T> it = place(h, b, hk, 0, mask, h.q, rows);
    const double factor = c.scale * (it.s.plain() ? LOG2E<double> : 1);
    if constexpr (PAIRS) {
      pre = static_cast<T>(factor);
      for (int64_t r = 0; r < rows; ++r)
        Store<K>::pair_lanes(h.q + r * ld, ld, reinterpret_cast<typename K::num*>(h.q + r * ld));
    } else {
      for (int64_t i = 0; i < rows * ld; ++i) h.q[i] = static_cast<T>(static_cast<double>(h.q[i]) * factor);
    }
    start_sums(h);
    return it;
  }

  // how many of the keys from k on, at most to `last`, are one piece
  int64_t piece(int64_t k, int64_t last) const {
    const int64_t n = min64(PIECE, last - k);
    // a piece inside one page is read in place; smaller pages are gathered
    return c.block_table && c.page_size >= PIECE / 2 ? min64(n, c.page_size - k % c.page_size) : n;
  }

  // whether values are the first numbers of the keys, in memory that is read once
  bool shared() const {
    const auto same = [&](int i) { return c.k.stride[i] == c.v.stride[i]; };
    return n_heads == 1 && c.k.data == c.v.data && c.k.unit() == c.v.unit() && same(0) && same(1) && same(2);
  }

  // computes keys [begin, end) that rows see, for some heads
  template <class F>
  static void visit(F& f, const Item<T>& it, int64_t begin, int64_t end, const Head* some, int64_t n_some) {
    const Call& c = f.c;
    for (const int32_t* seg = it.seg; seg < it.seg_end; seg += 3) {
      const int64_t last = min64(seg[1], end);
      bool fetched = false;
      for (int64_t k = max64(seg[0], begin), n, pieces = 0; k < last; k += n, ++pieces) {
        if (pieces % 64 == 63) check_stop();
        n = f.piece(k, last);
        if (!fetched) f.touch(c.k, f.heads[0], k, n, c.D);
        if (!fetched && !f.shared()) f.touch(c.v, f.heads[0], k, n, c.Dv);
        // after the last piece, the first of the task that this thread will probably take next
        fetched = f.fetch(f.heads[0], k + n < last ? k + n : begin + c.threads * c.split_keys, seg[1]);
        for (int64_t i = 0; i < n_some; ++i) step(f, some[i], k, n, seg[2] == PARTIAL);
      }
    }
  }

  // lets the products of a step fetch the piece from key k on; false if there is none, or if it is not one stream
  bool fetch(const Head& h, int64_t k, int64_t last) {
    const int64_t n = k < last ? piece(k, last) : 0;
    const bool one = !c.matrix && n > 0 && together(k, n) && filled(c.k, c.D) && (shared() || filled(c.v, c.Dv));
    const auto of = [&](const Array& a, bool some, int64_t* bytes) {
      *bytes = some ? n * a.stride[1] * a.unit() : 0;
      return Ahead{some ? a.data + key_offset(c, a, h.b, h.hk, k) * a.unit() : reinterpret_cast<const char*>(s), 0};
    };
    ahead = {of(c.k, one, &coming_k), of(c.v, one && !shared(), &coming_v)};
    return one;
  }
  // whether the heads of a task are all that is stored of a position
  bool filled(const Array& a, int64_t width) const { return a.stride[1] * a.unit() <= n_heads * a.bytes(width); }
  static int64_t share(int64_t bytes, int64_t steps) { return (bytes + steps - 1) / steps; }

  // restarts with maxima so large that l is at most 1: sums of large values may overflow where their mean does not
  void start_again(const Head& h) {
    for (int64_t r = 0; r < rows; ++r) {
      if (h.l[r] > 1) h.m[r] += static_cast<T>(__builtin_ceil(__builtin_log2(static_cast<double>(h.l[r]))));
      h.l[r] = h.u[r] = T(0);
    }
    for (int64_t i = 0; i < rows * ldv; ++i) h.acc[i] = T(0);
  }

  static void task(const Call& c, int64_t task, char* scratch) { run<Decode>(c, task, scratch); }
  template <class F>
  static void run(const Call& c, int64_t task, char* scratch) {
    Bump bump{scratch};
    F f(c, bump);
    const int64_t groups = c.Hk / f.n_heads;
    const int64_t chunk = task % c.n_chunks, first_head = task / c.n_chunks % groups * f.n_heads,
                  b = task / c.n_chunks / groups;
    Item<T> it;
    for (int64_t i = 0; i < f.n_heads; ++i) it = f.start(f.heads[i], b, first_head + i, f.masks + i * c.G);
    const int64_t begin = chunk * c.split_keys, end = begin + c.split_keys;
    visit(f, it, begin, end, f.heads, f.n_heads);
    for (int64_t i = 0; i < f.n_heads; ++i) {
      const int64_t at = (b * c.Hk + first_head + i) * c.n_chunks + chunk;
      T* out = static_cast<T*>(c.partial) + at * f.rows * c.partial_width();
      if (!Merge<T>::store(c, f.heads[i], f.rows, f.ldv, out, false)) {
        f.start_again(f.heads[i]);
        visit(f, it, begin, end, f.heads + i, 1);
        Merge<T>::store(c, f.heads[i], f.rows, f.ldv, out, true);
      }
      if (c.n_chunks == 1) combine(c, b * c.Hk + first_head + i);
    }
  }

  static void combine(const Call& c, int64_t task) { Merge<T>::combine(c, task); }
};

}  // namespace saccade::SACCADE_ISA
