// for each row of o [B, T, H]: 1 / its divisor, and the divisor's gradient -Σ do o / divisor; 0 for a row whose weights add up to 0
{% set names = ["vx", "o", "total", "out_divisors"] %}
{% include "chunk.wgsl" %}
@compute @workgroup_size(64)
fn chunk_divisors(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let i = (group.y * 32768u + group.x) * 64u + tid;
  if (i >= numbers.total) { return; }
  var sum = vec4<f32>();
  for (var c = 0u; c < numbers.V4; c++) {
    let at = i * numbers.V4 + c;
    sum = fma(vx[numbers.total * numbers.V4 + at], o[at], sum);
  }
  let inverse = select(1.0 / total[i], 0.0, total[i] == 0.0);
  out_divisors[i] = vec2<f32>(inverse, -((sum.x + sum.y) + (sum.z + sum.w)) * inverse);
}
