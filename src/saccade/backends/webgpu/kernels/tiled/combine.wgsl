{% import "arrays.wgsl" as arrays with context %}
{% include "common.wgsl" %}
// the ranges of a split decode, and then the sink: one workgroup a row, four values a lane, the ranges shared out to four teams
{{ arrays.bindings(["partial", "out_o", "out_lse", "side", "dims"]) }}
{% set WIDTH = 4 * DV4 + 2 %}
var<workgroup> team_sum: array<vec4<f32>, 256>;
var<workgroup> team_m: array<f32, 256>;
var<workgroup> team_l: array<f32, 256>;
@compute @workgroup_size(256)
fn combine(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  i_b = dims.first_batch + group.z;
  let row = group.x;
  let lane = tid % 64u;
  i_hk = group.y;
  place_class(0u);
  i_h = i_hk * dims.G + row / dims.Tq;
  let first = ((i_b * dims.Hk + i_hk) * dims.rows + row) * dims.chunks * {{ WIDTH }}u;
  var m = f32(START);
  for (var n = tid; n < dims.chunks; n += 256u) { m = max(m, partial[first + n * {{ WIDTH }}u + {{ 4 * DV4 }}u]); }
  team_m[tid] = m;
  workgroupBarrier();
  var top = team_m[0];
  for (var n = 1u; n < min(256u, dims.chunks); n++) { top = max(top, team_m[n]); }
  var l = 0.0;
  for (var n = tid; n < dims.chunks; n += 256u) {
    let at = first + n * {{ WIDTH }}u + {{ 4 * DV4 }}u;
    l += exp2(partial[at] - top) * partial[at + 1u];
  }
  team_l[tid] = l;
  var acc = vec4<f32>();
  for (var n = tid / 64u; n < dims.chunks; n += 4u) {
    let at = first + n * {{ WIDTH }}u;
    let p = at + 4u * min(lane, {{ DV4 - 1 }}u);
    acc = fma(vec4<f32>(exp2(partial[at + {{ 4 * DV4 }}u] - top)), vec4<f32>(partial[p], partial[p + 1u], partial[p + 2u], partial[p + 3u]), acc);
  }
  team_sum[tid] = acc;
  workgroupBarrier();
  if (tid >= 64u) { return; }
  l = 0.0;
  for (var n = 0u; n < min(256u, dims.chunks); n++) { l += team_l[n]; }
  acc = (team_sum[lane] + team_sum[lane + 64u]) + (team_sum[lane + 128u] + team_sum[lane + 192u]);
  let none = l == 0.0;
  // not by max, which some devices let a NaN lose
  let sum_l = select(l, 1.0, none);
  let mine = select(top * LN2 + log(sum_l), dims.minus_inf, none);
  var total = mine;
{% if sinks %}
  total = log_add(total, bitcast<f32>(side[dims.o_sinks + i_h]));
{% endif %}
  let scale = select({{ "exp(mine - total)" if sinks else "1.0" }} / sum_l, 0.0, none);
  if (lane < {{ DV4 }}u) { out_o[q_row(row % dims.Tq) * {{ DV4 }}u + lane] = select(acc * scale, vec4<f32>(), none); }
  if (lane == 0u) { out_lse[stat_row(row % dims.Tq)] = total; }
}
