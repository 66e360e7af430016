{% set backward = true %}
{% set names = ["rows", "params"] + ([] if fixed_B and fixed_C else ["mix"]) + ["side"] + (["begin"] if begins else []) + ["out_kept", "out_last"] %}
{% include "scan.wgsl" %}
// the gradient of the state, token by token from the last: g = exp(Δ A) (g + C dp); stores the gradient after each piece
@compute @workgroup_size(64)
fn scan_reverse(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let id = group.y * 32768u + group.x;
  if (id >= numbers.total) { return; }
  let blocks = (numbers.D + numbers.channels - 1u) / numbers.channels;
  let d = id % blocks * numbers.channels + tid % numbers.channels;
  let lane = tid / numbers.channels;
  if (lane >= numbers.N4 || d >= numbers.D) { return; }
  let sequence = 3u * numbers.slots + 4u * (id / blocks);
  let first = side[sequence + 2u];
  let tokens = side[sequence + 3u];
  let rate = params[d * numbers.N4 + lane];
  let last = (id / blocks * numbers.D + d) * numbers.N4 + lane;
  var g = {{ "begin[last]" if begins else "vec4<f32>()" }};
  for (var piece = side[sequence + 1u]; piece > 0u; piece--) {
    out_kept[((numbers.slots + side[sequence] + piece - 1u) * numbers.D + d) * numbers.N4 + lane] = g;
    let begin_at = (piece - 1u) * {{ KEEP }}u;
    let count = min({{ KEEP }}u, tokens - begin_at);
    for (var s0 = 0u; s0 < count; s0 += {{ BY }}u) {
{% for i in range(BY) %}
      let live{{ i }} = s0 + {{ i }}u < count;
      let t{{ i }} = first + begin_at + count - 1u - min(s0 + {{ i }}u, count - 1u);
      let step{{ i }} = select(0.0, step_of(raw_step(t{{ i }}, d)), live{{ i }});
      let dp{{ i }} = select(0.0, dinner(t{{ i }}, d), live{{ i }});
      let C{{ i }} = C_at(t{{ i }}, d, lane);
{% endfor %}
{% for i in range(BY) %}
      g = exp4(step{{ i }} * rate) * fma(C{{ i }}, vec4<f32>(dp{{ i }}), g);
{% endfor %}
    }
  }
  out_last[last] = g;
}
