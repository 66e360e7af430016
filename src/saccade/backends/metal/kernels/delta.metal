// Statistics of every row for a backward: (lse in log2 units in two parts, Δ, dO · O), Δ = dO · O - dlse; one thread per row.
// constants: DV, U (type of o), DLSE
#include "common.metal"

kernel void delta(device const T* dout [[buffer(0)]],
                  device const U* o [[buffer(1)]],
                  device const float* lse [[buffer(2)]],
                  device const float* dlse [[buffer(3)]],
                  device float* stats [[buffer(4)]],
                  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  const long row = thread_position_in_grid.x;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int d = 0; d < DV; d++) {
    // a row without keys has o = 0; dO may hold any value there, also NaN
    const float x = float(o[row * DV + d]);
    if (x != 0.0f) sums[d & 3] += float(dout[row * DV + d]) * x;
  }
  const float total = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  const float2 parts = in_log2(lse[row]);
  stats[4 * row] = parts.x;
  stats[4 * row + 1] = parts.y;
  stats[4 * row + 2] = DLSE ? total - dlse[row] : total;
  stats[4 * row + 3] = total;
}
