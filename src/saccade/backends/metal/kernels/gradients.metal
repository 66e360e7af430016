// Gradients: a threadgroup owns BR rows and walks the other side, BC rows a step; each gradient has one owner.
//   P = 2^(S - lse)   dS = P (dO Vᵀ - Δ) scale
// For queries: dQ += dS K. For keys (KEYS), over the heads of the group in order: dV += Pᵀ dO   dK += dSᵀ Q.
// With SUMS: Σ P and Σ P (dO Vᵀ - dO · O) of queries, from which `restate` computes a better lse and Δ.
// constants: D, DV, DC, VC, DP, DVP, LIST as in `forward`; KEYS, FIRST (dQ or dK), SECOND (dV), SUMS, FAR as in `restate`, SLOPES
// (their gradient), U (type of a gradient), MERGE (adds earlier gradients)
#include "common.metal"
#include "tiles.metal"

// a pair's weight and the gradient of its score, both 0 where it is excluded
struct Pair {
  float weight, gradient;
};

inline Pair pair_of(Numbers dims, device const int* side, device const float* bias, device const float* stats, thread const Place& p,
                    float x, float dp, int t, int j, thread float& slope, thread float& weighed) {
  Pair found = {0.0f, 0.0f};
  const float s = score_of(dims, side, bias, p, p.h, x, t, j);
  device const float* stat = stats + 4 * row_of(p.b, t, p.h, dims.Tq, dims.Hq);
  const float w = s == MASKED ? 0.0f : exp2_fine((s - stat[0]) - stat[1]);
  if (w == 0.0f) return found;
  const float keep = DROPOUT ? kept(dims, p, p.h, t, j) : 1.0f;
  const float g = w * (dp * keep - stat[2]);
  if (SUMS) weighed += w * (dp * keep - stat[3]);
  if (SLOPES) slope -= g * distance_of(dims, side, p, t, j);
  found.weight = SUMS ? w : w * keep;
  found.gradient = g * (dims.scale * cap_slope(dims, x));
  return found;
}

// writes this SIMD-group's sums of a gradient, rounded once
inline void write(device U* to, device const float* before, thread simdgroup_float8x8* sums, thread const Corners& corners, int n,
                  int first, int stop, Numbers dims, thread const Place& p, int count) {
  for (int e = 0; e < 2; e++) {
    const int a = first + corners.row[e];
    if (a >= stop) continue;
    const long at = (KEYS ? dk_row(dims, p, a) : q_row(dims, p, a)) * n;
    for (int i = 0; i < count; i++) {
      const int c = 8 * i + corners.column[e];
      if (c < n) to[at + c] = U(sums[i].thread_elements()[e] + (MERGE ? before[at + c] : 0.0f));
    }
  }
}

// the first row of a step, whether it needs the element test, and the indices of this thread
struct Step {
  int first;
  bool partial;
  int tid, lane, simdgroup;
};

// sums += weights [8][BC] times rows of `from`; a row has N numbers, WHOLE with padding, in chunks of C; all threads load
template <int WHOLE, int C, int N>
inline void add(thread simdgroup_float8x8* sums, device const T* from, threadgroup const float* weights, threadgroup T* staged,
                threadgroup int* spoiled, Numbers dims, device const int* side, thread const Place& p, Rows others, Step at,
                thread const Corners& corners) {
#pragma clang loop unroll(full)
  for (int c = 0; c < WHOLE; c += C) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool found = stage(staged, from, nullptr, dims, side, p, others, at.first, BC, c, C, N, at.tid);
    report(found, spoiled, at.lane, at.simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool careful = (at.partial || BIAS || RELATIVE) && any_spoiled(spoiled);
#pragma clang loop unroll(full)
    for (int d = 0; d < C; d += 8) {
      simdgroup_float8x8 more = weighted(weights, staged, C, d, careful, corners);
      for (int e = 0; e < 2; e++) sums[(c + d) / 8].thread_elements()[e] += more.thread_elements()[e];
    }
  }
}

kernel void gradients(device const T* q [[buffer(0)]],
                      device const T* k [[buffer(1)]],
                      device const T* v [[buffer(2)]],
                      device const T* dout [[buffer(3)]],
                      device const float* stats [[buffer(4)]],
                      device const float* before_first [[buffer(5)]],
                      device const float* before_second [[buffer(6)]],
                      device const float* before_sums [[buffer(7)]],
                      device const float* bias [[buffer(8)]],
                      device const int* numbers [[buffer(9)]],
                      device const int* side [[buffer(10)]],
                      device U* first [[buffer(11)]],
                      device U* second [[buffer(12)]],
                      device float* sums [[buffer(13)]],
                      uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
                      uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
                      uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
                      uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  Numbers dims = *reinterpret_cast<device const Dims*>(numbers);
  const uint3 group = threadgroup_position_in_grid;
  const int tid = thread_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  threadgroup T own_first[BR * DP];
  threadgroup T own_second[BR * DVP];
  threadgroup T staged[BC * (DC > VC ? DC : VC)];
  threadgroup float scores[BR * BC];
  threadgroup float slopes[BR * BC];
  threadgroup int spoiled[SIMDGROUPS];
  threadgroup float* weights = scores + simdgroup * 8 * BC;
  threadgroup float* gradient = slopes + simdgroup * 8 * BC;

  const int lists = KEYS ? dims.t_tiles : dims.n_tiles;
  const int n_tiles = lists * (LIST / BR);
  const int cls = int(group.y) / n_tiles;
  const int a0 = int(group.y) % n_tiles * BR;
  const int heads = KEYS ? dims.G : 1;
  Place p = place_of(dims, side, group.z, int(group.x) * heads, cls);
  const int stop_own = KEYS ? p.n_k : p.n_q;
  if (a0 >= stop_own) {
    if (SLOPES && lane == 0) sums[((long(p.b) * dims.Hq + p.h) * n_tiles * dims.n_classes + group.y) * SIMDGROUPS + simdgroup] = 0.0f;
    return;
  }
  if (FAR) {
    // every thread gets the same answer
    bool any_far = false;
    for (int i = a0; i < min(a0 + BR, stop_own); i++) any_far |= is_far(stats + 4 * q_row(dims, p, i));
    if (!any_far) {
      for (int i = a0 + tid; i < min(a0 + BR, stop_own); i += 4 * BR) {
        const long at = 2 * q_row(dims, p, i);
        sums[at] = sums[at + 1] = 0.0f;
      }
      return;
    }
  }
  const Corners corners = corners_of(weights, lane);
  const Rows mine = {KEYS, stop_own, false};
  const int row = lane / 4;
  const int piece = lane % 4;
  const int a = a0 + 8 * simdgroup + row;
  float slope = 0.0f;
  float weight = 0.0f;
  float weighed = 0.0f;
  simdgroup_float8x8 out_first[DP / 8];
  simdgroup_float8x8 out_second[SECOND ? DVP / 8 : 1];
#pragma clang loop unroll(full)
  for (int n = 0; n < DP / 8; n++) out_first[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma clang loop unroll(full)
  for (int n = 0; n < (SECOND ? DVP / 8 : 1); n++) out_second[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  stage(own_first, KEYS ? k : q, nullptr, dims, side, p, mine, a0, BR, 0, DP, D, tid);
  stage(own_second, KEYS ? v : dout, nullptr, dims, side, p, mine, a0, BR, 0, DVP, DV, tid);

  for (int g = 0; g < heads; g++) {
    if (g > 0) p = place_of(dims, side, group.z, int(group.x) * heads + g, cls);
    const int batch = dims.mask_batches > 1 ? p.b : 0;
    const int cell = ((cls * dims.n_masks + p.mask) * dims.mask_batches + batch) * lists + a0 / LIST;
    device const int* pointers = side + (KEYS ? dims.o_tptr : dims.o_ptr) + cell;
    for (int n = pointers[0]; n < pointers[1]; n++) {
      device const int* segment = side + (KEYS ? dims.o_tseg : dims.o_seg) + 3 * n;
      const int stop = segment[1];
      const bool partial = segment[2] == 1;
      const Rows others = {!KEYS, stop, false};
      for (int b0 = segment[0]; b0 < stop; b0 += BC) {
        simdgroup_float8x8 s[COLUMNS];
        simdgroup_float8x8 dp[COLUMNS];
#pragma clang loop unroll(full)
        for (int i = 0; i < COLUMNS; i++) s[i] = dp[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (int c = 0; c < DP; c += DC) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          stage(staged, KEYS ? q : k, nullptr, dims, side, p, others, b0, BC, c, DC, D, tid);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          multiply(s, own_first + simdgroup * 8 * DP, DP, c, staged, DC);
        }
        for (int c = 0; c < DVP; c += VC) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          stage(staged, KEYS ? dout : v, nullptr, dims, side, p, others, b0, BC, c, VC, DV, tid);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          multiply(dp, own_second + simdgroup * 8 * DVP, DVP, c, staged, VC);
        }
        put(s, weights);
        put(dp, gradient);
        simdgroup_barrier(mem_flags::mem_threadgroup);

        for (int i = 0; i < EACH; i++) {
          const int at = row * BC + piece + 4 * i;
          const int b = b0 + piece + 4 * i;
          const int t = t_of(dims, p, KEYS ? b : a);
          const int j = j_of(dims, p, KEYS ? a : b);
          Pair pair = {0.0f, 0.0f};
          if (a < stop_own && b < stop && (!partial || allowed(dims, side, p, t, j)))
            pair = pair_of(dims, side, bias, stats, p, weights[at], gradient[at], t, j, slope, weighed);
          weight += pair.weight;
          weights[at] = pair.weight;
          gradient[at] = pair.gradient;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);

        const Step step = {b0, partial, tid, lane, simdgroup};
        if (SECOND) add<DVP, VC, DV>(out_second, KEYS ? dout : v, weights, staged, spoiled, dims, side, p, others, step, corners);
        if (FIRST) add<DP, DC, D>(out_first, KEYS ? q : k, gradient, staged, spoiled, dims, side, p, others, step, corners);
      }
    }
  }
  const int mine0 = a0 + 8 * simdgroup;
  if (FIRST) write(first, before_first, out_first, corners, D, mine0, stop_own, dims, p, DP / 8);
  if (SECOND) write(second, before_second, out_second, corners, DV, mine0, stop_own, dims, p, DVP / 8);
  if (SLOPES) {
    slope = simd_sum(slope);
    if (lane == 0) sums[((long(p.b) * dims.Hq + p.h) * n_tiles * dims.n_classes + group.y) * SIMDGROUPS + simdgroup] = slope;
  }
  if (SUMS) {
    weight += simd_shuffle_xor(weight, 1);
    weight += simd_shuffle_xor(weight, 2);
    weighed += simd_shuffle_xor(weighed, 1);
    weighed += simd_shuffle_xor(weighed, 2);
    if (piece == 0 && a < stop_own) {
      const long at = 2 * q_row(dims, p, a);
      sums[at] = weight + (MERGE ? before_sums[at] : 0.0f);
      sums[at + 1] = weighed + (MERGE ? before_sums[at + 1] : 0.0f);
    }
  }
}
