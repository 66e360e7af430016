// The gradient of a bias, one thread per element: Σ P (dO Vᵀ - Δ) over the batch entries, heads and rows that share it.
//   grid: (Tk, or 1 for the sum over keys, or with BY_DISTANCE the distances, rows of the bias, its batch entries times heads)
// Each thread computes its own products, because a problem with a bias of T x T numbers is small.
// constants: D, DV, MERGE, EACH_B and EACH_H: whether batch entries and heads have elements of their own, BY_DISTANCE
#include "common.metal"

// the residue class that contains both row t and key j, or -1
inline int class_of(Numbers dims, device const int* side, int t, int j) {
  for (int cls = 0; cls < dims.n_classes; cls++) {
    device const int* at = side + dims.o_classes + 4 * cls;
    const int a = t - at[0];
    const int b = j - at[1];
    if (a >= 0 && b >= 0 && a % dims.step == 0 && b % dims.step == 0 && a / dims.step < at[2] && b / dims.step < at[3]) return cls;
  }
  return -1;
}

// x . y of n numbers, added in the order of the matrix products, so that it is rounded like the row's lse and Δ
inline float product(device const T* x, device const T* y, int n) {
  float sum = 0.0f;
  for (int i = 0; i < n; i++) sum += float(x[i]) * float(y[i]);
  return sum;
}

kernel void bias_gradient(device const T* q [[buffer(0)]],
                          device const T* k [[buffer(1)]],
                          device const T* v [[buffer(2)]],
                          device const T* dout [[buffer(3)]],
                          device const float* stats [[buffer(4)]],
                          device const float* before [[buffer(5)]],
                          device const float* bias [[buffer(6)]],
                          device const int* numbers [[buffer(7)]],
                          device const int* side [[buffer(8)]],
                          device float* gradient [[buffer(9)]],
                          uint3 thread_position_in_grid [[thread_position_in_grid]],
                          uint3 threads_per_grid [[threads_per_grid]]) {
  Numbers dims = *reinterpret_cast<device const Dims*>(numbers);
  const int at = thread_position_in_grid.x;
  const int n = threads_per_grid.x;
  const int rows = threads_per_grid.y;
  const int heads = EACH_H ? dims.Hq : 1;
  const int own_b = int(thread_position_in_grid.z) / heads;
  const int own_h = int(thread_position_in_grid.z) % heads;
  const bool each_b = EACH_B;
  const bool all_keys = !BY_DISTANCE && n < dims.Tk;
  float sum = 0.0f;
  // compensated summation: the part of the sum lost by rounding
  float lost = 0.0f;
  for (int b = each_b ? own_b : 0; b < (each_b ? own_b + 1 : dims.B); b++) {
    for (int h = heads > 1 ? own_h : 0; h < (heads > 1 ? own_h + 1 : dims.Hq); h++) {
      for (int t = rows > 1 ? int(thread_position_in_grid.y) : 0; t < (rows > 1 ? int(thread_position_in_grid.y) + 1 : dims.Tq); t++) {
        for (int key = all_keys ? 0 : at; key < (all_keys ? dims.Tk : at + 1); key++) {
          const int j = BY_DISTANCE ? t + side[dims.o_offset + b * dims.offset_stride] + n - dims.Tk - at : key;
          const int cls = j < 0 || j >= dims.Tk ? -1 : class_of(dims, side, t, j);
          if (cls < 0) continue;
          const Place p = place_of(dims, side, b, h, cls);
          if (!allowed(dims, side, p, t, j)) continue;
          const long at_q = row_of(b, t, h, dims.Tq, dims.Hq);
          const long at_k = k_row(dims, side, p, (j - p.k_start) / dims.step);
          const float s = score_of(dims, side, bias, p, h, product(q + at_q * D, k + at_k * D, D), t, j);
          device const float* stat = stats + 4 * at_q;
          const float w = s == MASKED ? 0.0f : exp2_fine((s - stat[0]) - stat[1]);
          if (w == 0.0f) continue;
          const float keep = DROPOUT ? kept(dims, p, h, t, j) : 1.0f;
          const float more = w * (product(dout + at_q * DV, v + at_k * DV, DV) * keep - stat[2]);
          const float old = sum;
          sum += more;
          lost += fabs(old) < fabs(more) ? (more - sum) + old : (old - sum) + more;
        }
      }
    }
  }
  const long to = (long(thread_position_in_grid.z) * rows + thread_position_in_grid.y) * n + at;
  gradient[to] = (sum + lost) + (MERGE ? before[to] : 0.0f);
}
