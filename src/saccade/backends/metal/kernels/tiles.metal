// Tiles in threadgroup memory, and their products by 8 x 8 matrices of a SIMD-group.
// A SIMD-group owns 8 rows of the left side. Where a matrix keeps its elements in lanes is found out at run time, so that
// nothing depends on more than Metal documents.
// constants: ROPE, THREADS, SIMDGROUPS, BR (rows of the left side), BC (of the right side)

typedef simdgroup_matrix<T, 8, 8> Matrix;
constant constexpr int COLUMNS = BC / 8;
// keys or queries that a lane owns in the row that it shares with three others
constant constexpr int EACH = BC / 4;

// row and column of this lane's two elements of a matrix
struct Corners {
  int row[2], column[2];
};

// scratch: 64 numbers of this SIMD-group
inline Corners corners_of(threadgroup float* scratch, int lane) {
  scratch[lane] = float(lane);
  scratch[lane + 32] = float(lane + 32);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 numbers;
  simdgroup_load(numbers, scratch, 8);
  Corners found;
  for (int e = 0; e < 2; e++) {
    const int at = int(numbers.thread_elements()[e]);
    found.row[e] = at / 8;
    found.column[e] = at % 8;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  return found;
}

// which rows of which array stand on a side of a product; turns [positions, D / 2, 2]: cosine and sine of their pairs' angles,
// read where ROPE is 1 (pairs (i, i + D / 2)) or 2 (pairs (2 i, 2 i + 1)) and `turned`
struct Rows {
  bool keys;
  int stop;
  bool turned;
};

// number c of a row of D, its pair turned by the angle of its position
inline float turned_number(device const T* row, device const float* turns, int position, int c) {
  const int half_size = D / 2;
  const bool first = ROPE == 1 ? c < half_size : c % 2 == 0;
  const int other = ROPE == 1 ? (first ? c + half_size : c - half_size) : (first ? c + 1 : c - 1);
  const int pair = ROPE == 1 ? c % half_size : c / 2;
  device const float* angle = turns + (long(position) * half_size + pair) * 2;
  return float(row[c]) * angle[0] + (first ? -float(row[other]) : float(row[other])) * angle[1];
}

// rows first .. first + count, numbers c0 .. c0 + width of each, as [count][width]; zeros where an array ends. Answers whether one
// of the numbers that this thread wrote is not finite
inline bool stage(threadgroup T* to, device const T* from, device const float* turns, Numbers dims, device const int* side, thread const Place& p, Rows rows,
                  int first, int count, int c0, int width, int n, int tid) {
  bool spoiled = false;
  for (int i = tid; i < count * width; i += THREADS) {
    const int a = first + i / width;
    const int c = c0 + i % width;
    T x = T(0.0f);
    if (a < rows.stop && c < n) {
      device const T* row = from + (rows.keys ? k_row(dims, side, p, a) : q_row(dims, p, a)) * n;
      x = row[c];
      if (ROPE != 0 && rows.turned) {
        const int position = rows.keys ? j_of(dims, p, a) : t_of(dims, p, a) + side[dims.o_offset + p.b * dims.offset_stride];
        x = T(turned_number(row, turns, position + dims.q_base, c));
      }
    }
    to[i] = x;
    spoiled = spoiled || is_infinite(float(x));
  }
  return spoiled;
}

// one word a SIMD-group: whether any of its lanes wrote such a number
inline void report(bool found, threadgroup int* spoiled, int lane, int simdgroup) {
  const bool any = simd_any(found);
  if (lane == 0) spoiled[simdgroup] = any;
}

inline bool any_spoiled(threadgroup const int* spoiled) {
  bool found = false;
  for (int n = 0; n < SIMDGROUPS; n++) found = found || spoiled[n] != 0;
  return found;
}

// acc += left [8][pitch] from c0 on times right [BC][width], by its rows
inline void multiply(thread simdgroup_float8x8* acc, threadgroup const T* left, int pitch, int c0, threadgroup const T* right,
                     int width) {
  for (int d = 0; d < width; d += 8) {
    Matrix a;
    simdgroup_load(a, left + c0 + d, pitch);
#pragma clang loop unroll(full)
    for (int n = 0; n < COLUMNS; n++) {
      Matrix b;
      simdgroup_load(b, right + 8 * n * width + d, width, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(acc[n], a, b, acc[n]);
    }
  }
}

// the tile [8][BC] of this SIMD-group
inline void put(thread simdgroup_float8x8* acc, threadgroup float* tile) {
#pragma clang loop unroll(full)
  for (int n = 0; n < COLUMNS; n++) simdgroup_store(acc[n], tile + 8 * n, BC);
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
