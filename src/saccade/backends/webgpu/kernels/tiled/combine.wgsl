{% import "arrays.wgsl" as arrays with context %}
{% include "common.wgsl" %}
// merges the ranges of a split decode, and then the sink: one workgroup for {{ LANES }} vectors of a row, the ranges divided among {{ TEAMS }} teams
{{ arrays.bindings(["partial", "out_o", "out_lse", "side", "dims"]) }}
{% set WIDTH = DV4 + 1 %}
{% set COLUMNS = (DV4 + LANES - 1) // LANES %}
var<workgroup> sums: array<vec4<f32>, 256>;
var<workgroup> stat: array<f32, 256>;
@compute @workgroup_size(256)
fn combine(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  i_b = dims.first_batch + group.z;
  let row = group.x / {{ COLUMNS }}u;
  let column = group.x % {{ COLUMNS }}u * {{ LANES }}u + tid % {{ LANES }}u;
  i_hk = group.y;
  place_class(0u);
  i_h = i_hk * dims.G + row / dims.Tq;
  let first = ((i_b * dims.Hk + i_hk) * dims.rows + row) * dims.chunks * {{ WIDTH }}u;
  var m = f32(START);
  for (var n = tid; n < dims.chunks; n += 256u) { m = max(m, partial[first + n * {{ WIDTH }}u + {{ DV4 }}u].x); }
  stat[tid] = m;
  workgroupBarrier();
  if (tid < 16u) {
    for (var n = 1u; n < 16u; n++) { m = max(m, stat[n * 16u + tid]); }
    stat[tid] = m;
  }
  workgroupBarrier();
  var top = stat[0];
  for (var n = 1u; n < 16u; n++) { top = max(top, stat[n]); }
  var l = 0.0;
  var acc = vec4<f32>();
  for (var n = tid / {{ LANES }}u; n < dims.chunks; n += {{ TEAMS }}u) {
    let at = first + n * {{ WIDTH }}u;
    let one = partial[at + {{ DV4 }}u];
    let weight = exp2(one.x - top);
    l = fma(weight, one.y, l);
    acc = fma(vec4<f32>(weight), partial[at + min(column, {{ DV4 - 1 }}u)], acc);
  }
  workgroupBarrier();
  sums[tid] = acc;
  stat[tid] = l;
  workgroupBarrier();
  // in two steps, because one invocation that sums over all teams would wait for each of them in turn
  if (tid < {{ 8 * LANES }}u) {
{% for n in range(8, TEAMS, 8) %}
    acc += sums[tid + {{ n * LANES }}u];
    l += stat[tid + {{ n * LANES }}u];
{% endfor %}
    sums[tid] = acc;
    stat[tid] = l;
  }
  workgroupBarrier();
  if (tid >= {{ LANES }}u) { return; }
{% for n in range(1, 8) %}
  acc += sums[tid + {{ n * LANES }}u];
  l += stat[tid + {{ n * LANES }}u];
{% endfor %}
  let none = l == 0.0;
  // not by max, which drops a NaN on some devices
  let sum_l = select(l, 1.0, none);
  let mine = select(lse_of(top, sum_l), dims.minus_inf, none);
  var total = mine;
{% if sinks %}
  total = log_add(total, bitcast<f32>(side[dims.o_sinks + i_h]));
{% endif %}
  let scale = select({{ "exp(mine - total)" if sinks else "1.0" }} / sum_l, 0.0, none);
  if (column < {{ DV4 }}u) { out_o[q_row(row % dims.Tq) * {{ DV4 }}u + column] = select(acc * scale, vec4<f32>(), none); }
  if (column == 0u) { out_lse[stat_row(row % dims.Tq)] = total; }
}
