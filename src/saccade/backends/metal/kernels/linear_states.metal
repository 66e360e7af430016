// The states of linear attention before each chunk, and the last one: S += φ(k)ᵀ u, chunk by chunk of a sequence. BACKWARD: the
// gradients of states after each chunk, S += φ(q)ᵀ g from the last chunk on. A threadgroup owns KB rows and VC columns of a head's state.
//   grid: (H, blocks of the state, sequences)
// constants: BACKWARD, INITIAL (there is an initial state), KEEP (write the states between chunks), KB, VC
#include "linear.metal"

kernel void linear_states(device const T* q [[buffer(0)]],
                          device const T* k [[buffer(1)]],
                          device const T* v [[buffer(2)]],
                          device const T* dout [[buffer(3)]],
                          device const float* stats [[buffer(4)]],
                          device const float* initial [[buffer(5)]],
                          device const int* numbers [[buffer(6)]],
                          device const int* side [[buffer(7)]],
                          device float* kept [[buffer(8)]],
                          device float* last [[buffer(9)]],
                          uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
                          uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
                          uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
                          uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  Numbers dims = *reinterpret_cast<device const Dims*>(numbers);
  const int tid = thread_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int h = threadgroup_position_in_grid.x;
  const int sequence = threadgroup_position_in_grid.z;
  constexpr int BLOCKS = (W + VC - 1) / VC;
  const int row0 = int(threadgroup_position_in_grid.y) / BLOCKS * KB;
  const int column0 = int(threadgroup_position_in_grid.y) % BLOCKS * VC;
  const Given given = {q, k, v, dout, stats};
  threadgroup float keys[C * KB];
  threadgroup float values[C * VC];
  threadgroup float scratch[64 * SIMDGROUPS];
  const Corners corners = corners_of(scratch + 64 * simdgroup, lane);

  // offsets of this lane's elements in the state of a head, and which of them exist
  long at[2][VC / 8];
  bool there[2][VC / 8];
  simdgroup_float8x8 state[VC / 8];
#pragma clang loop unroll(full)
  for (int n = 0; n < VC / 8; n++) {
    for (int e = 0; e < 2; e++) {
      const int row = row0 + 8 * simdgroup + corners.row[e];
      const int column = column0 + 8 * n + corners.column[e];
      there[e][n] = row < K && column < W;
      at[e][n] = long(row) * W + column;
      const long from = (long(sequence) * dims.H + h) * (long(K) * W) + at[e][n];
      state[n].thread_elements()[e] = INITIAL && there[e][n] ? initial[from] : 0.0f;
    }
  }

  device const int* mine = side + dims.o_sequences + 2 * sequence;
  for (int i = 0; i < mine[1]; i++) {
    const int slot = mine[0] + (BACKWARD ? mine[1] - 1 - i : i);
    const Chunk chunk = chunk_of(side, slot);
    if (KEEP) {
#pragma clang loop unroll(full)
      for (int n = 0; n < VC / 8; n++)
        for (int e = 0; e < 2; e++)
          if (there[e][n]) kept[(long(slot) * dims.H + h) * (long(K) * W) + at[e][n]] = state[n].thread_elements()[e];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<BACKWARD ? QUERY : KEY>(keys, given, dims, chunk, h, row0, KB, tid);
    stage<BACKWARD ? GRADIENT : VALUE>(values, given, dims, chunk, h, column0, VC, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // a sum per chunk, because the rounding error of a running sum grows with its length
    simdgroup_float8x8 more[VC / 8];
#pragma clang loop unroll(full)
    for (int n = 0; n < VC / 8; n++) more[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    add<true, VC / 8>(more, keys + 8 * simdgroup, KB, values, VC, C);
#pragma clang loop unroll(full)
    for (int n = 0; n < VC / 8; n++)
      for (int e = 0; e < 2; e++) state[n].thread_elements()[e] += more[n].thread_elements()[e];
  }
#pragma clang loop unroll(full)
  for (int n = 0; n < VC / 8; n++)
    for (int e = 0; e < 2; e++)
      if (there[e][n]) last[(long(sequence) * dims.H + h) * (long(K) * W) + at[e][n]] = state[n].thread_elements()[e];
}
