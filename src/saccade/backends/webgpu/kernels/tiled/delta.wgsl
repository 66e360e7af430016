{% import "arrays.wgsl" as arrays with context %}
// stats = (lse in log2 units in two parts, Δ, dO · O) of every row, Δ = dO · O - dlse; one invocation per row, 64 per workgroup
{% include "dims.wgsl" %}
{{ arrays.bindings(["dout", "o", "lse", "out_stats", "dims"] + (["dlse"] if dlse else [])) }}
@compute @workgroup_size(64)
fn delta(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = dims.q_lo + (group.y * 32768u + group.x) * 64u + tid;
  if (row >= dims.q_hi) { return; }
  let at = (row - dims.q_base * dims.Hq) * {{ DV4 }}u;
  var sum = vec4<f32>();
  for (var d = 0u; d < {{ DV4 }}u; d++) {
    // a row without keys has o = 0; dO may hold any value there, also NaN
    let x = o[at + d];
    sum += select(load_dout(at + d) * x, vec4<f32>(), x == vec4<f32>());
  }
  let total = (sum.x + sum.y) + (sum.z + sum.w);
  out_stats[row] = vec4<f32>(in_log2(lse[row]), total{{ " - dlse[row]" if dlse }}, total);
}
