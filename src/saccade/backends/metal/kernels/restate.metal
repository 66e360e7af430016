// A better lse and Δ from Σ P and Σ P (dO Vᵀ - dO · O) of a row, free of the rounding of lse and o. It applies where P holds all keys of
// the row: its weights, with the sink's, add up to 1 within lse's own tolerance. One thread per row.
// constants: SINKS, FAR (only rows whose lse is so far from 0 that its rounding shows)
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
  // By how much lse is too small, in log2 units: all of the logarithm of the sum if every score is -1e9. Near 1 it is 2 atanh(z),
  // because the built-in logarithm is inexact there. A row without keys has sum 0, and must stay as it is.
  const float z = (whole - 1.0f) / (whole + 1.0f);
  const float near = 2.0f * LOG2E * fma(z * z * z, fma(z * z, 0.2f, 0.333333333f), z);
  const float more = fabs(whole - 1.0f) < 0.1f ? near : log2(max(whole, 1e-37f));
  const bool wanted = whole > 0.0f && (!FAR || is_far(stat));
  if (wanted && fabs(more) * LN2 <= 9.5367431640625e-7f * max(fabs(stat[0]) * LN2, 1.0f)) {
    low += more;
    change = over / whole;
  }
  better[4 * row] = stat[0];
  better[4 * row + 1] = low;
  better[4 * row + 2] = stat[2] + change;
  better[4 * row + 3] = stat[3];
}
