// Products of tiles in threadgroup memory by 8 x 8 matrices of a SIMD-group, which owns 8 rows of the left side.
// Metal does not document which lane has which elements of a matrix, so that is found at run time.
// constants: SIMDGROUPS, BC (rows of the right side)

constant constexpr int COLUMNS = BC / 8;

inline bool is_infinite(float x) { return (as_type<uint>(x) & 0x7f800000u) == 0x7f800000u; }

// row and column of each of this lane's two elements of a matrix
struct Corners {
  int row[2], column[2];
};

// scratch: 64 numbers that belong to this SIMD-group
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

// one word per SIMD-group: whether any of its lanes wrote a number that is not finite
inline void report(bool found, threadgroup int* spoiled, int lane, int simdgroup) {
  const bool any = simd_any(found);
  if (lane == 0) spoiled[simdgroup] = any;
}

inline bool any_spoiled(threadgroup const int* spoiled) {
  bool found = false;
  for (int n = 0; n < SIMDGROUPS; n++) found = found || spoiled[n] != 0;
  return found;
}

// acc += left [8][pitch], from column c0 on, times the transpose of right [BC][width]
template <class N>
inline void multiply(thread simdgroup_float8x8* acc, threadgroup const N* left, int pitch, int c0, threadgroup const N* right,
                     int width) {
  for (int d = 0; d < width; d += 8) {
    simdgroup_matrix<N, 8, 8> a;
    simdgroup_load(a, left + c0 + d, pitch);
#pragma clang loop unroll(full)
    for (int n = 0; n < COLUMNS; n++) {
      simdgroup_matrix<N, 8, 8> b;
      simdgroup_load(b, right + 8 * n * width + d, width, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(acc[n], a, b, acc[n]);
    }
  }
}

// writes the tile [8][BC] of this SIMD-group
inline void put(thread simdgroup_float8x8* acc, threadgroup float* tile) {
#pragma clang loop unroll(full)
  for (int n = 0; n < COLUMNS; n++) simdgroup_store(acc[n], tile + 8 * n, BC);
}
