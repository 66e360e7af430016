{% import "arrays.wgsl" as arrays with context %}
// sums the gradients from the heads of a group for each of dims.rows vectors, in order; one invocation per vector
{% include "dims.wgsl" %}
{{ arrays.bindings(["partial", "out_sum", "dims"]) }}
@compute @workgroup_size(64)
fn gather(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let i = (group.y * 32768u + group.x) * 64u + tid;
  if (i >= dims.rows) { return; }
  var sum = vec4<f32>();
  for (var g = 0u; g < dims.G; g++) { sum += partial[g * dims.rows + i]; }
  out_sum[i] += sum;
}
