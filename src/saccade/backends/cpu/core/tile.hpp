// Tiles: scratch memory, the one load function of keys and values, transposes between rows and lanes.
#pragma once
#include "codes.hpp"

namespace saccade::SACCADE_ISA {

SACCADE_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
SACCADE_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
SACCADE_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// hands out aligned pieces of a scratch block; with a null base it measures the size that is needed
struct Bump {
  char* base;
  int64_t used = 0;
  template <class X>
  X* take(int64_t n) {
    char* p = base + used;
    used += round_up(n * static_cast<int64_t>(sizeof(X)), 64);
    return reinterpret_cast<X*>(p);
  }
};

struct TaskIndex {
  int64_t b, hk, cls, block, chunk;
};

// element offset of key (or value) j: strided, or through a page table
SACCADE_INLINE int64_t key_offset(const Call& c, const int64_t* stride, int64_t b, int64_t hk, int64_t j) {
  if (!c.block_table) return b * stride[0] + j * stride[1] + hk * stride[2];
  const int64_t page = c.block_table[b * c.table_stride + j / c.page_size];
  return page * stride[0] + (j % c.page_size) * stride[1] + hk * stride[2];
}
SACCADE_INLINE int64_t key_offset(const Call& c, const Array& a, int64_t b, int64_t hk, int64_t j) {
  return key_offset(c, a.stride, b, hk, j);
}

// prefetches the row that the next tile needs: the keys of one head are too far apart for a hardware prefetcher
SACCADE_INLINE void prefetch_row(const Array& a, int64_t at, int64_t width) {
  const char* p = a.data + at * a.unit();
  for (int64_t x = 0; x < a.bytes(width); x += 64) __builtin_prefetch(p + x, 0, 2);
}

// keys that a task visits, by number: start + step * n, or those in a list
struct Keys {
  int64_t start, step, total;
  const int32_t* list = nullptr;

  int64_t at(int64_t n) const { return list ? list[n] : start + step * n; }
  // how many of `most` keys from n on are `step` apart
  int64_t run(int64_t n, int64_t most) const {
    int64_t count = 1;
    while (list && count < most && list[n + count] == list[n] + count) ++count;
    return list ? count : most;
  }
};

// n rows of one key head: keys first to first + n - 1
struct Span {
  const Call& c;
  const Array& a;
  int64_t b, hk;
  const Keys& keys;
  int64_t first, n, width;
  bool ahead = true;  // prefetch the next tile's rows

  int64_t row(int64_t r) const {
    const int64_t next = first + r + TILE_K;
    if (ahead && next < keys.total) prefetch_row(a, key_offset(c, a, b, hk, keys.at(next)), width);
    return key_offset(c, a, b, hk, keys.at(first + r));
  }
  // the first row, if rows are numbers of type T a constant stride apart, in one page
  template <class T>
  const T* in_place() const {
    const bool same = a.dtype == (sizeof(T) == 4 ? DType::f32 : DType::f64);
    if (!same || c.block_table || keys.run(first, n) < n) return nullptr;
    return reinterpret_cast<const T*>(a.data) + key_offset(c, a, b, hk, keys.at(first));
  }
  const uint16_t* scales(int64_t r) const { return a.scale + key_offset(c, a.scale_stride, b, hk, keys.at(first + r)); }
};

// the rows of a query tile: row t0 + step * w of head h, or, of selected keys, rows of `pack` heads in turn from lane
// lane0 on
struct QueryRows {
  int64_t b, h, t0, step, rows;
  int64_t pack = 1, lane0 = 0;

  int64_t row(int64_t w) const { return t0 + step * (pack == 1 ? lane0 + w : (lane0 + w) / pack); }
  int64_t head(int64_t w) const { return pack == 1 ? h : h + (lane0 + w) % pack; }
  int64_t at(const Array& a, int64_t w) const { return b * a.stride[0] + row(w) * a.stride[1] + head(w) * a.stride[2]; }
};

// rows in the compute type, padded with zeros to ld; with `check`, returns whether all of them are finite
template <class T>
static bool load_rows(const Span& x, T* out, int64_t ld, bool check) {
  Finite<T> finite;
  for (int64_t r = 0; r < x.n; ++r) {
    if (x.a.dtype == DType::codes) {
      decode_row(x.a, x.row(r), x.scales(r), x.width, out + r * ld);
      for (int64_t d = 0; check && d < x.width; ++d) finite.see1(out[r * ld + d]);
    } else {
      read_row(x.a, x.row(r), x.width, out + r * ld, check ? &finite : nullptr);
    }
    for (int64_t d = x.width; d < ld; ++d) out[r * ld + d] = T(0);
  }
  return finite.all();
}

// the lanes of two vectors in turn, from the first one or from lane FROM on
template <int N, int FROM>
struct Woven {
  static constexpr int of(int l) { return FROM + l / 2 + (l % 2) * N; }
};

// one N x N block: log2 N rounds of interleaving row i with row i + N/2
template <class T>
SACCADE_INLINE void transpose_block(const T* in, int64_t ld_in, T* out, int64_t ld_out) {
  constexpr int N = lanes<T>;
  vec<T> a[N], b[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) a[i] = load(in + i * ld_in);
#pragma GCC unroll 4
  for (int s = 1; s < N; s *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      b[2 * i] = shuffle<T, Woven<N, 0>>(a[i], a[i + N / 2]);
      b[2 * i + 1] = shuffle<T, Woven<N, N / 2>>(a[i], a[i + N / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) store(out + i * ld_out, a[i]);
}

// rows and columns are multiples of the vector length
template <class T>
static void transpose(int64_t rows, int64_t columns, const T* in, int64_t ld_in, T* out, int64_t ld_out) {
  for (int64_t r = 0; r < rows; r += lanes<T>)
    for (int64_t d = 0; d < columns; d += lanes<T>)
      transpose_block(in + r * ld_in + d, ld_in, out + d * ld_out + r, ld_out);
}

// query-side rows, zero-padded to `padded` rows and ld columns
template <class T>
static void load_queries(const Array& a, const QueryRows& x, int64_t padded, int64_t width, T* out, int64_t ld) {
  for (int64_t r = 0; r < padded; ++r) {
    if (r < x.rows) read_row(a, x.at(a, r), width, out + r * ld);
    for (int64_t d = r < x.rows ? width : 0; d < ld; ++d) out[r * ld + d] = T(0);
  }
}

// How a kind of product stores its operands. A sum over head dimensions needs its rows "deep" (pairs along the row), a
// sum over positions needs them "across" (pairs of two rows); plain numbers are stored in one way for both.
template <class K>
struct Store {
  using T = typename K::sum;
  static constexpr int per = 1;
  static int64_t depth(int64_t n) { return n; }
  static bool load_deep(const Span& x, T* out, bool check) { return load_rows(x, out, x.width, check); }
  static bool load_across(const Span& x, T* out, int64_t ld) { return load_rows(x, out, ld, true); }
  // [padded][ld] rows to lanes: out [width][padded] times mul
  // mul is in two parts, since its rounding would scale all scores in the same direction
  static void turn(const T* rows, int64_t ld, int64_t padded, int64_t width, double mul, T* scratch, T* out) {
    const T high = static_cast<T>(mul), low = static_cast<T>(mul - static_cast<double>(high));
    transpose(padded, round_up(width, lanes<T>), rows, ld, scratch, padded);
    for (int64_t d = 0; d < width; ++d)
      for (int64_t w = 0; w < padded; w += lanes<T>) {
        const vec<T> x = load(scratch + d * padded + w), y = x * high;
        // not y + x low of an infinity, which is NaN unless low > 0
        store(out + d * padded + w, y - y == T(0) ? y + x * low : y);
      }
  }
  static void turn_tile(const T*, int64_t, int64_t, T*, int64_t) {}
  static T across(const T* tile, int64_t ld, int64_t r, int64_t d) { return tile[r * ld + d]; }
  // replaces numbers that are not finite by 0
  static void drop_infinite(T* tile, int64_t n) {
    for (int64_t i = 0; i < n; ++i) tile[i] = tile[i] * 0 == 0 ? tile[i] : T(0);
  }
};

#if defined(SACCADE_PAIRS)
template <>
struct Store<Pairs> {
  static constexpr int per = 2;
  static int64_t depth(int64_t n) { return (n + 1) / 2; }
  static const uint16_t* row(const Span& x, int64_t r) {
    return reinterpret_cast<const uint16_t*>(x.a.data) + x.row(r);
  }
  static bool load_deep(const Span& x, uint32_t* out, bool) {
    const int64_t ld = depth(x.width);
    for (int64_t r = 0; r < x.n; ++r, out += ld) {
      out[ld - 1] = 0;
      __builtin_memcpy(out, row(x, r), static_cast<size_t>(x.width) * 2);
    }
    return true;
  }
  static bool load_across(const Span& x, uint32_t* out, int64_t ld) {
    const ivec<float> low_exponent = isplat<float>(0x7f80), high_exponent = low_exponent << 16;
    ivec<float> bad = {};
    bool finite = true;
    for (int64_t r = 0; r < x.n; r += 2, out += ld) {
      const uint16_t* low = row(x, r);
      const uint16_t* high = r + 1 < x.n ? row(x, r + 1) : nullptr;
      for (int64_t d = weave(low, high, x.width, out, &finite); d < ld; d += lanes<float>) {
        const int64_t left = x.width - d;
        const ivec<float> second = high ? load_words(high + d, left) << 16 : ivec<float>{};
        const ivec<float> both = load_words(low + d, left) | second;
        bad |= ((both & low_exponent) == low_exponent) | ((both & high_exponent) == high_exponent);
        store(reinterpret_cast<float*>(out + d), reinterpret_cast<vec<float>>(both));
      }
    }
    return finite && !any(bad);
  }
  // bf16 keeps its input unchanged: the factor of the scores is applied elsewhere
  static void turn(const float* rows, int64_t ld, int64_t padded, int64_t width, double, float* scratch,
                   uint32_t* out) {
    transpose(padded, round_up(width, lanes<float>), rows, ld, scratch, padded);
    for (int64_t d = 0; d < width; d += 2)
      for (int64_t w = 0; w < padded; w += lanes<float>) {
        const vec<float> high = d + 1 < width ? load(scratch + (d + 1) * padded + w) : vec<float>{};
        store(reinterpret_cast<float*>(out + d / 2 * padded + w), pack_pairs(load(scratch + d * padded + w), high));
      }
  }
  // rows r and r + 1 of [n][ld] become one row of pairs; an odd last row pairs with zero
  static void pair_rows(const float* rows, int64_t ld, int64_t n, int64_t width, uint32_t* out) {
    for (int64_t r = 0; r < n; r += 2)
      for (int64_t w = 0; w < width; w += lanes<float>) {
        const vec<float> high = r + 1 < n ? load(rows + (r + 1) * ld + w) : vec<float>{};
        store(reinterpret_cast<float*>(out + r / 2 * ld + w), pack_pairs(load(rows + r * ld + w), high));
      }
  }
  // an "across" tile of n positions to "deep" rows, ld_out apart
  static void turn_tile(const uint32_t* tile, int64_t ld, int64_t n, uint32_t* out, int64_t ld_out) {
    transpose(round_up(depth(n), lanes<float>), ld, reinterpret_cast<const float*>(tile), ld,
              reinterpret_cast<float*>(out), ld_out);
  }
  // pairs of neighbours among n numbers, in steps of two vectors; out may be the same memory
  static void pair_lanes(const float* rows, int64_t n, uint32_t* out) {
    constexpr int N = lanes<float>;
    for (int64_t i = 0; i < n; i += 2 * N)
      store(reinterpret_cast<float*>(out + i / 2), pair_neighbours(load(rows + i), load(rows + i + N)));
  }
  static float across(const uint32_t* tile, int64_t ld, int64_t r, int64_t d) {
    return from_bf16(static_cast<uint16_t>(tile[r / 2 * ld + d] >> (r % 2 * 16)));
  }
  static void drop_infinite(uint32_t* tile, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if ((tile[i] & 0x7f80u) == 0x7f80u) tile[i] &= 0xffff0000u;
      if ((tile[i] & 0x7f800000u) == 0x7f800000u) tile[i] &= 0xffffu;
    }
  }
};
#endif

}  // namespace saccade::SACCADE_ISA
