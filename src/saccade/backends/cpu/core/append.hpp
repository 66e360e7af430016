// Writes new tokens into a cache: rotates them by their positions' angles, and encodes them in a quantised cache.
#pragma once
#include "tile.hpp"

namespace saccade::SACCADE_ISA {

// |x| <= 448 to the bits of e4m3, rounded to nearest even
SACCADE_INLINE uint8_t float8(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint32_t sign = u >> 24 & 128, body = u & 0x7fffffffu;
  // subnormal numbers of e4m3 are multiples of 2^-9
  const uint32_t small = static_cast<uint32_t>(__builtin_rintf(__builtin_fabsf(x) * 512.0f));
  const uint32_t normal = ((body + 0x7ffffu + (body >> 20 & 1)) >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | (body < 0x3c800000u ? small : normal));
}

// a scale as bf16, rounded away from 0 so that top / scale <= code; 0 for a group of zeros, NaN where top is NaN
SACCADE_INLINE uint16_t scale_of(float top, float code) {
  constexpr float TINY = 1.1754943508222875e-38f;
  float scale = top / code;
  if (__builtin_fabsf(scale) < TINY) scale = scale == 0 ? 0 : __builtin_copysignf(TINY, scale);
  uint32_t u;
  __builtin_memcpy(&u, &scale, 4);
  if ((u & 0x7f800000u) == 0x7f800000u) u = 0x7fc00000u;
  return static_cast<uint16_t>((u + 0xffffu) >> 16);
}

// n numbers to codes, one per byte, with one scale per group
template <class T>
static void encode_row(const T* x, int64_t n, Code code, int64_t group, int8_t* codes, uint16_t* scales) {
  for (int64_t first = 0; first < n; first += group) {
    const int64_t stop = min64(first + group, n);
    float high = static_cast<float>(x[first]), low = high;
    bool bad = false;
    for (int64_t d = first; d < stop; ++d) {
      const float y = static_cast<float>(x[d]);
      high = y > high ? y : high, low = y < low ? y : low, bad |= y != y;
    }
    float top = high >= -low ? high : low;
    if (code != Code::i4) top = __builtin_fabsf(top);
    if (bad) top = __builtin_nanf("");
    const uint16_t bits = scale_of(top, code == Code::i8 ? 127.0f : code == Code::i4 ? -8.0f : 448.0f);
    scales[first / group] = bits;
    const float scale = from_bf16(bits);
    const bool usable = scale == scale && scale != 0;
    const float least = code == Code::i4 ? -8.0f : -127.0f, most = code == Code::i4 ? 7.0f : 127.0f;
    for (int64_t d = first; d < stop; ++d) {
      const float ratio = usable ? static_cast<float>(x[d]) / scale : 0.0f;
      if (code == Code::f8) {
        codes[d] = static_cast<int8_t>(float8(ratio));
      } else {
        const float y = __builtin_rintf(ratio);
        codes[d] = static_cast<int8_t>(y < least ? least : y > most ? most : y);
      }
    }
  }
}

template <class T>
static void turn_row(const T* x, int64_t n, const T* cos, const T* sin, bool interleaved, T* out) {
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : i + half;
    out[a] = x[a] * cos[i] - x[b] * sin[i];
    out[b] = x[a] * sin[i] + x[b] * cos[i];
  }
}

template <class T>
struct Appender {
  static int64_t scratch_bytes(const Append& c) {
    Bump bump{nullptr};
    bump.take<T>(c.n), bump.take<T>(c.n), bump.take<int8_t>(c.n);
    return bump.used;
  }
  static void token(const Append& c, int64_t i, char* scratch) {
    Bump bump{scratch};
    T *row = bump.take<T>(c.n), *rotated = bump.take<T>(c.n);
    int8_t* codes = bump.take<int8_t>(c.n);
    if (c.second[i] < 0) return;
    for (int64_t h = 0; h < c.heads; ++h) {
      const T* x = row;
      read_row(c.in, i * c.in.stride[0] + h * c.in.stride[1], c.n, row);
      if (c.cos) {
        const int64_t at = i * (c.n / 2);
        turn_row(row, c.n, static_cast<const T*>(c.cos) + at, static_cast<const T*>(c.sin) + at, c.interleaved,
                 rotated);
        x = rotated;
      }
      const Array& a = c.out;
      const int64_t at = c.first[i] * a.stride[0] + c.second[i] * a.stride[1] + h * a.stride[2];
      if (a.dtype != DType::codes) {
        write_row(a, at, c.n, x);
        continue;
      }
      const int64_t to = c.first[i] * a.scale_stride[0] + c.second[i] * a.scale_stride[1] + h * a.scale_stride[2];
      encode_row(x, c.n, a.code, a.group, codes, const_cast<uint16_t*>(a.scale) + to);
      int8_t* out = reinterpret_cast<int8_t*>(a.data) + at;
      if (a.code != Code::i4) {
        __builtin_memcpy(out, codes, static_cast<size_t>(c.n));
        continue;
      }
      const int64_t half = c.n / 2;
      for (int64_t d = 0; d < half; ++d) out[d] = static_cast<int8_t>((codes[d] + 8) | (codes[d + half] + 8) << 4);
    }
  }
};

}  // namespace saccade::SACCADE_ISA
