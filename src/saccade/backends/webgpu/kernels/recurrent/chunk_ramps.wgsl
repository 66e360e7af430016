{% set names = ["side", "given", "out_ramps"] %}
{% include "chunk.wgsl" %}
// for each token and head (b, b's low part, beta, 0), where b is the sum of the logarithms of its chunk's decays up to the token; one invocation per
// chunk and head. b is a multiple of 2^-10, so that differences of b are exact; e^-200 is 0
@compute @workgroup_size(64)
fn chunk_ramps(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let id = (group.y * 32768u + group.x) * 64u + tid;
  if (id >= numbers.total) { return; }
  place(id / numbers.H, id % numbers.H);
  var b = vec2<f32>();
  for (var i = 0u; i < count; i++) {
{% if decay %}
    let g = given[row(i)];
    let is_nan = (bitcast<u32>(g) & 0x7fffffffu) > 0x7f800000u;
    let x = select(max(g, -200.0), g, is_nan);
    let high = floor(x * 1024.0 + 0.5) * 0.0009765625;
    b += vec2<f32>(high, x - high);
{% endif %}
    out_ramps[row(i)] = vec4<f32>(b, {{ ("given[numbers.rows + row(i)]" if decay else "given[row(i)]") if beta else "1.0" }}, 0.0);
  }
}
