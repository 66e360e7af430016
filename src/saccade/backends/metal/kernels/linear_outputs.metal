// Outputs of linear attention or one of its gradients, one chunk of tokens per threadgroup. The rows l, m, r are those with the roles of
// q, k, u; S is the state of the tokens before the chunk (for dk and dv: after it).
//   y_i = Σ_j (l_i · m_j) r_j over j <= i (or j >= i) of the chunk + Sᵀ l_i        not CAUSAL: y_i = Sᵀ l_i with the state of all tokens
// dq and dk of a key head are sums over the heads of its group, in order.
//   grid: (H, or Hk for dq and dk; chunks; blocks of VC columns)
// constants: LEFT (the role of l), TOTALS (also write φ(q) · z), DC, VC
#include "linear.metal"

constant constexpr int MIDDLE = LEFT ^ 1;
constant constexpr int RIGHT = LEFT ^ 2;
constant constexpr bool LATER = LEFT == VALUE || LEFT == KEY;
constant constexpr bool OF_KEYS = RIGHT == QUERY || RIGHT == KEY;
constant constexpr bool DIVIDED = LEFT == QUERY && NORMALIZE;

// loads rows d0 .. d0 + DC and columns c0 .. c0 + VC of a state, transposed where l multiplies its columns
inline void stage_state(threadgroup float* to, device const float* state, int d0, int c0, int tid) {
  for (int i = tid; i < DC * VC; i += THREADS) {
    const int d = d0 + i / VC;
    const int c = c0 + i % VC;
    const bool there = d < width_of<LEFT>() && c < width_of<RIGHT>();
    to[i] = there ? state[OF_KEYS ? long(c) * W + d : long(d) * W + c] : 0.0f;
  }
}

// sets the weights of unseen pairs to 0; returns this lane's part of the sum of its row
inline float triangle(threadgroup float* tile, int row, int piece, int first) {
  float sum = 0.0f;
  for (int j = piece; j < BC; j += 4) {
    const bool seen = LATER ? j >= first + row : j <= first + row;
    const float w = seen ? tile[row * BC + j] : 0.0f;
    tile[row * BC + j] = w;
    sum += w;
  }
  return sum;
}

// out += weights [8][BC] times rows [BC][VC] where some of the rows are not finite: adds only the rows that a token may see
inline void add_careful(thread simdgroup_float8x8* out, threadgroup const float* weights, threadgroup const float* rows, int first,
                        thread const Corners& corners) {
#pragma clang loop unroll(full)
  for (int n = 0; n < VC / 8; n++) {
    for (int e = 0; e < 2; e++) {
      const int i = first + corners.row[e];
      float sum = 0.0f;
      for (int j = LATER ? i : 0; j < (LATER ? BC : i + 1); j++)
        sum += weights[corners.row[e] * BC + j] * rows[j * VC + 8 * n + corners.column[e]];
      out[n].thread_elements()[e] += sum;
    }
  }
}

kernel void linear_outputs(device const T* q [[buffer(0)]],
                           device const T* k [[buffer(1)]],
                           device const T* v [[buffer(2)]],
                           device const T* dout [[buffer(3)]],
                           device const float* stats [[buffer(4)]],
                           device const float* states [[buffer(5)]],
                           device const int* numbers [[buffer(6)]],
                           device const int* side [[buffer(7)]],
                           device U* y [[buffer(8)]],
                           device float* totals [[buffer(9)]],
                           uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
                           uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
                           uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
                           uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  Numbers dims = *reinterpret_cast<device const Dims*>(numbers);
  const int tid = thread_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int slot = threadgroup_position_in_grid.y;
  const int c0 = int(threadgroup_position_in_grid.z) * VC;
  const Chunk chunk = chunk_of(side, slot);
  const Given given = {q, k, v, dout, stats};
  const int group = OF_KEYS ? dims.H / dims.Hk : 1;
  const int h0 = int(threadgroup_position_in_grid.x) * group;
  threadgroup float left[C * DC];
  threadgroup float staged[C * (DC > VC ? DC : VC)];
  // tiles of the state, later weights
  threadgroup float tiles[DC * VC > C * BC ? DC * VC : C * BC];
  threadgroup float factors[C];
  threadgroup int spoiled[SIMDGROUPS];
  threadgroup float* tile = tiles + simdgroup * 8 * BC;
  const Corners corners = corners_of(tile, lane);
  // four lanes per row
  const int row = lane / 4;
  const int piece = lane % 4;
  const int first = 8 * simdgroup;
  float total = 0.0f;
  simdgroup_float8x8 out[VC / 8];
#pragma clang loop unroll(full)
  for (int n = 0; n < VC / 8; n++) out[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  for (int h = h0; h < h0 + group; h++) {
    device const float* state = states + (long(CAUSAL ? slot : chunk.sequence) * dims.H + h) * (long(K) * W);
    simdgroup_float8x8 s[COLUMNS];
#pragma clang loop unroll(full)
    for (int n = 0; n < COLUMNS; n++) s[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int d = 0; d < width_of<LEFT>(); d += DC) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage<LEFT>(left, given, dims, chunk, h, d, DC, tid);
      if (CAUSAL) stage<MIDDLE>(staged, given, dims, chunk, h, d, DC, tid);
      stage_state(tiles, state, d, c0, tid);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (CAUSAL) multiply(s, left + first * DC, DC, 0, staged, DC);
      add<false, VC / 8>(out, left + first * DC, DC, tiles, VC, DC);
      if (DIVIDED)
        for (int c = piece; c < DC && d + c < K; c += 4) total += left[(first + row) * DC + c] * state[long(d + c) * W + V];
    }
    if (!CAUSAL) continue;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    put(s, tile);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    total += triangle(tile, row, piece, first);
    report(stage<RIGHT>(staged, given, dims, chunk, h, c0, VC, tid), spoiled, lane, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (any_spoiled(spoiled))
      add_careful(out, tile, staged, first, corners);
    else
      add<false, VC / 8>(out, tile, BC, staged, VC, BC);
  }

  if (DIVIDED) {
    total += simd_shuffle_xor(total, 1);
    total += simd_shuffle_xor(total, 2);
    if (piece == 0) factors[first + row] = total;
    if (TOTALS && piece == 0 && c0 == 0 && first + row < chunk.count)
      totals[row_of(dims, chunk.b, chunk.first + first + row, h0, dims.H)] = total;
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  const int heads = OF_KEYS ? dims.Hk : dims.H;
  for (int e = 0; e < 2; e++) {
    const int a = first + corners.row[e];
    if (a >= chunk.count) continue;
    const long to = row_of(dims, chunk.b, chunk.first + a, int(threadgroup_position_in_grid.x), heads) * (OF_KEYS ? K : V);
    const float whole = DIVIDED ? factors[a] : 1.0f;
#pragma clang loop unroll(full)
    for (int n = 0; n < VC / 8; n++) {
      const int c = c0 + 8 * n + corners.column[e];
      if (c >= (OF_KEYS ? K : V)) continue;
      float x = out[n].thread_elements()[e];
      // a row whose weights add up to 0 is 0
      if (DIVIDED) x = whole == 0.0f ? 0.0f : x / whole;
      if (LEFT == QUERY && !NORMALIZE) x *= dims.scale;
      if (LEFT == GRADIENT) x *= slope_of(float(q[to + c]));
      if (LEFT == VALUE) x *= slope_of(float(k[to + c]));
      y[to + c] = U(x);
    }
  }
}
