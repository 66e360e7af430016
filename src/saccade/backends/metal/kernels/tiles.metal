// Tiles of attention in threadgroup memory: loading rows of q, k, v and dO, and sums of rows weighted by scores.
// constants: ROPE, THREADS, SIMDGROUPS, BR (rows of the left side), BC (of the right side), CODES (keys and values are 0 numbers, or codes
// 1 int8, 2 fp8, 3 int4), GROUP (numbers per scale)
#include "matrices.metal"

typedef simdgroup_matrix<T, 8, 8> Matrix;
// keys or queries per lane; four lanes share a row
constant constexpr int EACH = BC / 4;

// Which rows are loaded. With `rotated` and ROPE 1 (pairs (i, i + D / 2)) or 2 (pairs (2 i, 2 i + 1)) they are rotated by turns
// [positions, D / 2, 2], the cosine and sine of the pairs' angles.
struct Rows {
  bool keys;
  int stop;
  bool rotated;
};

// keys or values as codes; each group has a scale, stored as the upper half of a float
struct Coded {
  device const uchar* codes;
  device const ushort* scales;
};
inline device const T* rows_of(device const T* numbers, device const ushort*) { return numbers; }
inline Coded rows_of(device const uchar* codes, device const ushort* scales) {
  Coded found = {codes, scales};
  return found;
}

// number c of a row of n numbers
inline T number_at(device const T* from, long row, int n, int c) { return from[row * n + c]; }
inline T number_at(Coded from, long row, int n, int c) {
  const int byte = CODES == 3 ? from.codes[row * (n / 2) + c % (n / 2)] : from.codes[row * n + c];
  float code = float(byte > 127 ? byte - 256 : byte);
  if (CODES == 3) code = float((c < n / 2 ? byte & 15 : byte >> 4) - 8);
  if (CODES == 2) {
    // e4m3: a sign, four bits of exponent, three of fraction; no infinity
    const int exponent = byte >> 3 & 15;
    const float size = exponent == 0 ? float(byte & 7) * 0.001953125f : as_type<float>(uint((exponent + 120) << 23 | (byte & 7) << 20));
    code = (byte & 127) == 127 ? as_type<float>(0x7fc00000u) : byte > 127 ? -size : size;
  }
  return T(code * as_type<float>(uint(from.scales[row * ((n + GROUP - 1) / GROUP) + c / GROUP]) << 16));
}

// number c of a row of D numbers, its pair rotated by the angle of its position
template <class From> inline float turned_number(From from, long row, device const float* turns, int position, int c) {
  const int half_size = D / 2;
  const bool first = ROPE == 1 ? c < half_size : c % 2 == 0;
  const int other = ROPE == 1 ? (first ? c + half_size : c - half_size) : (first ? c + 1 : c - 1);
  const int pair = ROPE == 1 ? c % half_size : c / 2;
  device const float* angle = turns + (long(position) * half_size + pair) * 2;
  const float partner = float(number_at(from, row, D, other));
  return float(number_at(from, row, D, c)) * angle[0] + (first ? -partner : partner) * angle[1];
}

// Loads numbers c0 .. c0 + width - 1 of `count` rows from `first` on as [count][width], with zeros past the end of an array. Returns
// whether this thread wrote a number that is not finite.
template <class From>
inline bool stage(threadgroup T* to, From from, device const float* turns, Numbers dims, device const int* side, thread const Place& p,
                  Rows rows, int first, int count, int c0, int width, int n, int tid) {
  bool spoiled = false;
  for (int i = tid; i < count * width; i += THREADS) {
    const int a = first + i / width;
    const int c = c0 + i % width;
    T x = T(0.0f);
    if (a < rows.stop && c < n) {
      const long row = rows.keys ? k_row(dims, side, p, a) : q_row(dims, p, a);
      x = number_at(from, row, n, c);
      if (ROPE != 0 && rows.rotated) {
        const int position = rows.keys ? j_of(dims, p, a) : t_of(dims, p, a) + side[dims.o_offset + p.b * dims.offset_stride];
        x = T(turned_number(from, row, turns, position + dims.q_base, c));
      }
    }
    to[i] = x;
    spoiled = spoiled || is_infinite(float(x));
  }
  return spoiled;
}

// Columns d .. d + 7 of weights [8][BC] times values [BC][width], as a sum of its own, because the rounding error of a running sum grows
// with its length. careful: a value that is not finite is added only where its weight is not zero.
inline simdgroup_float8x8 weighted(threadgroup const float* weights, threadgroup const T* values, int width, int d, bool careful,
                                   thread const Corners& corners) {
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  if (!careful) {
#pragma clang loop unroll(full)
    for (int n = 0; n < COLUMNS; n++) {
      simdgroup_float8x8 w;
      Matrix x;
      simdgroup_load(w, weights + 8 * n, BC);
      simdgroup_load(x, values + 8 * n * width + d, width);
      simdgroup_multiply_accumulate(sum, w, x, sum);
    }
    return sum;
  }
  for (int e = 0; e < 2; e++) {
    float total = 0.0f;
    for (int j = 0; j < BC; j++) {
      const float w = weights[corners.row[e] * BC + j];
      if (w != 0.0f) total += w * float(values[j * width + d + corners.column[e]]);
    }
    sum.thread_elements()[e] = total;
  }
  return sum;
}
