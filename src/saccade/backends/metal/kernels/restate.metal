// A better lse and Δ from Σ P and Σ P (dO Vᵀ - dO · O) of a row, free of the rounding of lse and o. It applies where P holds all keys of
// the row: its weights, with the sink's, add up to 1 within lse's own tolerance. One thread per row.
// constants: SINKS
#include "common.metal"

kernel void restate(device const float* stats [[buffer(0)]],
                    device const float* sums [[buffer(1)]],
                    device const int* numbers [[buffer(2)]],
                    device const int* side [[buffer(3)]],
                    device float* better [[buffer(4)]],
                    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  Numbers dims = *reinterpret_cast<device const Dims*>(numbers);
  const int row = thread_position_in_grid.x;
  const int h = HEADS_FIRST ? row / dims.Tq % dims.Hq : row % dims.Hq;
  device const float* stat = stats + 4 * row;
  float whole = sums[2 * row];
  float over = sums[2 * row + 1];
  float low = stat[1];
  float change = 0.0f;
  if (SINKS) {
    const float2 sink = in_log2(as_type<float>(side[dims.o_sinks + h]));
    const float share = exp2_fine((sink.x - stat[0]) - (stat[1] - sink.y));
    whole += share;
    // the sink acts as a key whose dO V is 0
    over -= share * stat[3];
  }
  // the tolerance is at most 1/2: a row without keys has sum 0 and lse = -inf, and must stay as it is
  if (fabs(whole - 1.0f) <= min(9.5367431640625e-7f * max(fabs(stat[0]) * LN2, 1.0f), 0.5f)) {
    // the logarithm of the sum as 2 atanh(z), because the built-in one is inexact near 1
    const float z = (whole - 1.0f) / (whole + 1.0f);
    low += 2.0f * LOG2E * fma(z * z * z, fma(z * z, 0.2f, 0.333333333f), z);
    change = over / whole;
  }
  better[4 * row] = stat[0];
  better[4 * row + 1] = low;
  better[4 * row + 2] = stat[2] + change;
  better[4 * row + 3] = stat[3];
}
