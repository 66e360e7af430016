// Attention of one head, one key a step (online softmax, Milakov and Gimelshein 2018). A SIMD-group owns a query; its lanes have every
// 32nd number of q and of o.
//   s = q k scale   m' = max(m, s)   c = e^(m - m')   p = e^(s - m')   l = l c + p   o = o c + p v   at the end o / l
// q [Tq, D], k, v [Tk, D], o [Tq, D] of type T; lse [Tq]; sizes = (Tq, Tk, causal); scale [1]
// constants: T, D, ROWS (queries of a threadgroup)
constant constexpr int NUMBERS = (D + 31) / 32;

kernel void single_head(device const T* q [[buffer(0)]],
                        device const T* k [[buffer(1)]],
                        device const T* v [[buffer(2)]],
                        device const int* sizes [[buffer(3)]],
                        device const float* scale [[buffer(4)]],
                        device T* o [[buffer(5)]],
                        device float* lse [[buffer(6)]],
                        uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
                        uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
                        uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
                        uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  const int Tq = sizes[0];
  const int Tk = sizes[1];
  const int lane = thread_index_in_simdgroup;
  const int row = threadgroup_position_in_grid.y * ROWS + simdgroup_index_in_threadgroup;
  // rows are counted from the end: the last query sees the last key
  const int visible = sizes[2] != 0 ? clamp(row + 1 + Tk - Tq, 0, Tk) : Tk;
  threadgroup float key[D];
  threadgroup float value[D];
  float mine[NUMBERS];
  float out[NUMBERS];
  for (int n = 0; n < NUMBERS; n++) {
    const int d = lane + 32 * n;
    mine[n] = row < Tq && d < D ? float(q[row * D + d]) * scale[0] : 0.0f;
    out[n] = 0.0f;
  }
  // starts at a finite number: the difference of two such maxima is 0, not NaN
  float top = -1e38f;
  float sum = 0.0f;
  for (int j = 0; j < Tk; j++) {
    for (int d = thread_index_in_threadgroup; d < D; d += 32 * ROWS) {
      key[d] = float(k[j * D + d]);
      value[d] = float(v[j * D + d]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (j < visible) {
      float part = 0.0f;
      for (int n = 0; n < NUMBERS; n++)
        if (lane + 32 * n < D) part += mine[n] * key[lane + 32 * n];
      const float score = simd_sum(part);
      const float higher = max(top, score);
      const float correction = exp(top - higher);
      const float weight = exp(score - higher);
      sum = sum * correction + weight;
      for (int n = 0; n < NUMBERS; n++)
        if (lane + 32 * n < D) out[n] = out[n] * correction + weight * value[lane + 32 * n];
      top = higher;
    }
    // all SIMD-groups must have read this key before the next one is loaded
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (row >= Tq) return;
  for (int n = 0; n < NUMBERS; n++)
    if (lane + 32 * n < D) o[row * D + lane + 32 * n] = T(sum > 0.0f ? out[n] / sum : 0.0f);
  if (lane == 0) lse[row] = sum > 0.0f ? top + log(sum) : -INFINITY;
}
