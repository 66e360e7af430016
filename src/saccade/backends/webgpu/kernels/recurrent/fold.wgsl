// the sums of parts of `total` vectors each, added in order; one invocation per vector
struct Numbers { total: u32, read_at: u32, count: u32 }
@group(0) @binding(0) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> out_sum: array<vec4<f32>>;
@group(0) @binding(2) var<uniform> numbers: Numbers;
@compute @workgroup_size(64)
fn fold(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let i = (group.y * 32768u + group.x) * 64u + tid;
  if (i >= numbers.total) { return; }
  var sum = vec4<f32>();
  for (var p = 0u; p < numbers.count; p++) { sum += parts[numbers.read_at + p * numbers.total + i]; }
  out_sum[i] = sum;
}
