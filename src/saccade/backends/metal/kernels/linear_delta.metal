// For the gradients of normalised outputs: (1 / total, -dO · o / total) of every row, zeros where total is 0; one thread per row.
// constants: V
kernel void linear_delta(device const T* dout [[buffer(0)]],
                         device const float* o [[buffer(1)]],
                         device const float* totals [[buffer(2)]],
                         device float* stats [[buffer(3)]],
                         uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  const long row = thread_position_in_grid.x;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int c = 0; c < V; c++) sums[c & 3] += float(dout[row * V + c]) * o[row * V + c];
  const float total = totals[row];
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  stats[2 * row] = inverse;
  stats[2 * row + 1] = -((sums[0] + sums[2]) + (sums[1] + sums[3])) * inverse;
}
