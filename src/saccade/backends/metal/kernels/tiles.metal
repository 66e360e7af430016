// Tiles of attention in threadgroup memory: rows of q, k, v and dO as they are loaded, and sums weighted by scores.
// constants: ROPE, THREADS, SIMDGROUPS, BR (rows of the left side), BC (of the right side), CODES (keys and values are 0 numbers, or codes
// 1 int8, 2 fp8, 3 int4), GROUP (numbers to a scale)
#include "matrices.metal"

typedef simdgroup_matrix<T, 8, 8> Matrix;
// keys or queries that a lane owns in the row that it shares with three others
constant constexpr int EACH = BC / 4;

// which rows of which array stand on a side of a product; turns [positions, D / 2, 2]: cosine and sine of their pairs' angles,
// read where ROPE is 1 (pairs (i, i + D / 2)) or 2 (pairs (2 i, 2 i + 1)) and `turned`
struct Rows {
  bool keys;
  int stop;
  bool turned;
};

// keys or values as codes, a scale in the upper half of a float for each group
struct Coded {
  device const uchar* codes;
  device const ushort* scales;
};
inline device const T* rows_of(device const T* numbers, device const ushort*) { return numbers; }
inline Coded rows_of(device const uchar* codes, device const ushort* scales) {
  Coded found = {codes, scales};
  return found;
}

// number c of a row of n
inline T number_at(device const T* from, long row, int n, int c) { return from[row * n + c]; }
inline T number_at(Coded from, long row, int n, int c) {
  const int byte = CODES == 3 ? from.codes[row * (n / 2) + c % (n / 2)] : from.codes[row * n + c];
  float code = float(byte > 127 ? byte - 256 : byte);
  if (CODES == 3) code = float((c < n / 2 ? byte & 15 : byte >> 4) - 8);
  if (CODES == 2) {
    // sign, four bits of exponent, three of fraction; no infinity
    const int exponent = byte >> 3 & 15;
    const float size = exponent == 0 ? float(byte & 7) * 0.001953125f : as_type<float>(uint((exponent + 120) << 23 | (byte & 7) << 20));
    code = (byte & 127) == 127 ? as_type<float>(0x7fc00000u) : byte > 127 ? -size : size;
  }
  return T(code * as_type<float>(uint(from.scales[row * ((n + GROUP - 1) / GROUP) + c / GROUP]) << 16));
}

// number c of a row of D, its pair turned by the angle of its position
template <class From> inline float turned_number(From from, long row, device const float* turns, int position, int c) {
  const int half_size = D / 2;
  const bool first = ROPE == 1 ? c < half_size : c % 2 == 0;
  const int other = ROPE == 1 ? (first ? c + half_size : c - half_size) : (first ? c + 1 : c - 1);
  const int pair = ROPE == 1 ? c % half_size : c / 2;
  device const float* angle = turns + (long(position) * half_size + pair) * 2;
  const float beside = float(number_at(from, row, D, other));
  return float(number_at(from, row, D, c)) * angle[0] + (first ? -beside : beside) * angle[1];
}

// rows first .. first + count, numbers c0 .. c0 + width of each, as [count][width]; zeros where an array ends. Answers whether one
// of the numbers that this thread wrote is not finite
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
      if (ROPE != 0 && rows.turned) {
        const int position = rows.keys ? j_of(dims, p, a) : t_of(dims, p, a) + side[dims.o_offset + p.b * dims.offset_stride];
        x = T(turned_number(from, row, turns, position + dims.q_base, c));
      }
    }
    to[i] = x;
    spoiled = spoiled || is_infinite(float(x));
  }
  return spoiled;
}

// 8 columns from d on of weights [8][BC] times values [BC][width]; a sum of its own, for the rounding of a running sum grows with
// its length. careful: a value that is not finite counts only where its weight is not zero
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
