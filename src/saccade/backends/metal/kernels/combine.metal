// Merges the chunks of a split decode: o and lse of each row from those of its chunks, in order; one thread per number of o.
//   lse = log Σ e^lse_c   o = Σ e^(lse_c - lse) o_c
// constants: DV, U, SINKS
#include "common.metal"

kernel void combine(device const float* partial_o [[buffer(0)]],
                    device const float* partial_lse [[buffer(1)]],
                    device const int* numbers [[buffer(2)]],
                    device const int* side [[buffer(3)]],
                    device U* o [[buffer(4)]],
                    device float* lse [[buffer(5)]],
                    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  Numbers dims = *reinterpret_cast<device const Dims*>(numbers);
  const int c = thread_position_in_grid.x;
  const int row = thread_position_in_grid.y;
  const int b = thread_position_in_grid.z;
  const int rows = dims.Tq * dims.Hq;
  const int h = HEADS_FIRST ? row / dims.Tq : row % dims.Hq;
  float top = START;
  for (int n = 0; n < dims.chunks; n++) top = max(top, partial_lse[(long(b) * dims.chunks + n) * rows + row]);
  const float sink = SINKS ? as_type<float>(side[dims.o_sinks + h]) : dims.minus_inf;
  if (SINKS) top = max(top, sink);
  float sum = sink < MASKED ? 0.0f : precise::exp(sink - top);
  float y = 0.0f;
  for (int n = 0; n < dims.chunks; n++) {
    const long at = (long(b) * dims.chunks + n) * rows + row;
    const float mine = partial_lse[at];
    if (mine < MASKED) continue;
    const float share = precise::exp(mine - top);
    sum += share;
    y += share * partial_o[at * DV + c];
  }
  const long to = long(b) * rows + row;
  o[to * DV + c] = U(sum == 0.0f ? 0.0f : y / sum);
  if (c == 0) lse[to] = sum == 0.0f ? dims.minus_inf : top + precise::log(sum);
}
