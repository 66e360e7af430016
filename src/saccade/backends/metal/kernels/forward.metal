// Tiled forward (FlashAttention-2, Dao 2023): a threadgroup owns BR queries of one head and walks their key segments, BC keys a step.
//   S = Q Kᵀ   m' = max(m, S)   P = 2^(S - m')   l = l 2^(m - m') + ΣP   O = O 2^(m - m') + P V   at the end O / l
// Rows of k and v pass through one tile, DC and VC numbers at a time; O stays in registers, [8][DV] per SIMD-group.
// PACKED: the rows are the queries of a whole group, and a threadgroup visits only the keys of one chunk (split decode).
// constants: D, DV, DC, VC, DP, DVP (D and DV in whole chunks), U (type of o), S (type of k and v; uchar for codes),
// MERGE (o and lse are merged with earlier ones), SINKS, LIST (rows that share a list of segments)
#include "common.metal"
#include "tiles.metal"

// writes this SIMD-group's rows of o times their factors, merged with their share of earlier results
inline void write(device U* o, device const float* before, thread simdgroup_float8x8* out, thread const Corners& corners,
                  Numbers dims, thread const Place& p, threadgroup const float* factor, threadgroup const float* old_share,
                  int first, int chunk) {
  for (int e = 0; e < 2; e++) {
    const int r = corners.row[e];
    const int a = first + r;
    if (a >= p.n_q) continue;
    const int t = t_of(dims, p, a);
    const long to = row_of(PACKED ? p.b * dims.chunks + chunk : p.b, t, head_of(dims, p, a), dims.Tq, dims.Hq) * DV;
#pragma clang loop unroll(full)
    for (int n = 0; n < DVP / 8; n++) {
      const int c = 8 * n + corners.column[e];
      if (c >= DV) continue;
      float y = factor[r] == 0.0f ? 0.0f : out[n].thread_elements()[e] / factor[r];
      if (MERGE && old_share[r] != 0.0f) y += old_share[r] * before[to + c];
      o[to + c] = U(y);
    }
  }
}

kernel void forward(device const T* q [[buffer(0)]],
                    device const S* k [[buffer(1)]],
                    device const S* v [[buffer(2)]],
                    device const ushort* k_scales [[buffer(3)]],
                    device const ushort* v_scales [[buffer(4)]],
                    device const float* before_o [[buffer(5)]],
                    device const float* before_lse [[buffer(6)]],
                    device const float* bias [[buffer(7)]],
                    device const float* turns [[buffer(8)]],
                    device const int* numbers [[buffer(9)]],
                    device const int* side [[buffer(10)]],
                    device U* o [[buffer(11)]],
                    device float* lse [[buffer(12)]],
                    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
                    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
                    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
                    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  Numbers dims = *reinterpret_cast<device const Dims*>(numbers);
  const uint3 group = threadgroup_position_in_grid;
  const int tid = thread_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  threadgroup T queries[BR * DP];
  threadgroup T staged[BC * (DC > VC ? DC : VC)];
  threadgroup float tiles[BR * (BC > 8 ? BC : 8)];
  threadgroup float factors[BR];
  threadgroup float earlier[BR];
  threadgroup int spoiled[SIMDGROUPS];
  threadgroup float* tile = tiles + simdgroup * 8 * (BC > 8 ? BC : 8);
  threadgroup float* factor = factors + simdgroup * 8;
  threadgroup float* old_share = earlier + simdgroup * 8;

  // the last tile first: under a causal mask it has the most to do
  const int n_tiles = dims.n_tiles * (LIST / BR);
  const int cls = PACKED ? 0 : int(group.y) / n_tiles;
  const int n_tile = PACKED ? int(group.x) / dims.Hk : n_tiles - 1 - int(group.y) % n_tiles;
  const int head = PACKED ? int(group.x) % dims.Hk * dims.G : int(group.x);
  const Place p = place_of(dims, side, group.z, head, cls);
  const int a0 = n_tile * BR;
  if (a0 >= p.n_q) return;
  const int low = PACKED ? int(group.y) * dims.chunk_keys : 0;
  const int high = PACKED ? low + dims.chunk_keys : p.n_k;
  const int batch = dims.mask_batches > 1 ? p.b : 0;
  const int cell = ((cls * dims.n_masks + p.mask) * dims.mask_batches + batch) * dims.n_tiles + (PACKED ? 0 : a0 / LIST);
  const Corners corners = corners_of(tile, lane);
  const Rows of_queries = {false, p.n_q, true};
  stage(queries, q, turns, dims, side, p, of_queries, a0, BR, 0, DP, D, tid);

  // four lanes per row, each with every fourth key
  const int row = lane / 4;
  const int piece = lane % 4;
  const int a = a0 + 8 * simdgroup + row;
  const int t = t_of(dims, p, a);
  const int h = head_of(dims, p, a);
  float m = START;
  float l = 0.0f;
  float lost = 0.0f;
  simdgroup_float8x8 out[DVP / 8];
#pragma clang loop unroll(full)
  for (int n = 0; n < DVP / 8; n++) out[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  for (int n = side[dims.o_ptr + cell]; n < side[dims.o_ptr + cell + 1]; n++) {
    device const int* segment = side + dims.o_seg + 3 * n;
    const int stop = min(segment[1], high);
    const bool partial = segment[2] == 1;
    const Rows of_keys = {true, stop, true};
    const Rows of_values = {true, stop, false};
    for (int k0 = max(segment[0], low); k0 < stop; k0 += BC) {
      simdgroup_float8x8 s[COLUMNS];
#pragma clang loop unroll(full)
      for (int i = 0; i < COLUMNS; i++) s[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      for (int c = 0; c < DP; c += DC) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage(staged, rows_of(k, k_scales), turns, dims, side, p, of_keys, k0, BC, c, DC, D, tid);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply(s, queries + simdgroup * 8 * DP, DP, c, staged, DC);
      }
      put(s, tile);
      simdgroup_barrier(mem_flags::mem_threadgroup);

      float x[EACH];
      float top = m;
      for (int i = 0; i < EACH; i++) {
        const int key = k0 + piece + 4 * i;
        const int j = j_of(dims, p, key);
        const bool seen = a < p.n_q && key < stop && (!partial || allowed(dims, side, p, t, j));
        x[i] = seen ? score_of(dims, side, bias, p, h, tile[row * BC + piece + 4 * i], t, j) : MASKED;
        top = max(top, x[i]);
      }
      top = max(top, simd_shuffle_xor(top, 1));
      top = max(top, simd_shuffle_xor(top, 2));
      const float fix = precise::exp2(m - top);
      float sum = 0.0f;
      for (int i = 0; i < EACH; i++) {
        float w = x[i] == MASKED ? 0.0f : precise::exp2(x[i] - top);
        sum += w;
        if (DROPOUT && w != 0.0f) w *= kept(dims, p, h, t, j_of(dims, p, k0 + piece + 4 * i));
        tile[row * BC + piece + 4 * i] = w;
      }
      // compensated summation: the rounding error of a long sum would scale a whole row of o
      const float kept_l = l * fix;
      l = kept_l + sum;
      lost = lost * fix + ((max(kept_l, sum) - l) + min(kept_l, sum));
      m = top;
      if (piece == 0) factor[row] = fix;
      simdgroup_barrier(mem_flags::mem_threadgroup);

      const float fixes[2] = {factor[corners.row[0]], factor[corners.row[1]]};
#pragma clang loop unroll(full)
      for (int c = 0; c < DVP; c += VC) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        report(stage(staged, rows_of(v, v_scales), turns, dims, side, p, of_values, k0, BC, c, VC, DV, tid), spoiled, lane, simdgroup);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bool careful = (partial || BIAS || RELATIVE) && any_spoiled(spoiled);
#pragma clang loop unroll(full)
        for (int d = 0; d < VC; d += 8) {
          simdgroup_float8x8 more = weighted(tile, staged, VC, d, careful, corners);
          for (int e = 0; e < 2; e++) {
            const float old = out[(c + d) / 8].thread_elements()[e];
            out[(c + d) / 8].thread_elements()[e] = old * fixes[e] + more.thread_elements()[e];
          }
        }
      }
    }
  }

  l += is_infinite(l) ? 0.0f : lost;
  l += simd_shuffle_xor(l, 1);
  l += simd_shuffle_xor(l, 2);
  const bool none = l == 0.0f;
  const float whole = none ? 1.0f : l;
  const float mine = none ? dims.minus_inf : lse_of(m, whole);
  const long at = PACKED ? row_of(p.b * dims.chunks + group.y, t, h, dims.Tq, dims.Hq) : q_row(dims, p, a);
  float total = mine;
  if (MERGE && a < p.n_q) total = log_add(total, before_lse[at]);
  if (SINKS) total = log_add(total, as_type<float>(side[dims.o_sinks + min(h, dims.Hq - 1)]));
  if (piece == 0) {
    // kept as a divisor, because a rounded inverse would scale a whole row
    factor[row] = none ? 0.0f : MERGE || SINKS ? whole / precise::exp(mine - total) : whole;
    old_share[row] = MERGE && a < p.n_q && before_lse[at] >= MASKED ? precise::exp(before_lse[at] - total) : 0.0f;
    if (a < p.n_q) lse[at] = total;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  write(o, before_o, out, corners, dims, p, factor, old_share, a0 + 8 * simdgroup, int(group.y));
}
