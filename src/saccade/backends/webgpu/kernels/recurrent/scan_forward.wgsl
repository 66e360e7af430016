{% set names = ["rows", "params"] + ([] if fixed_B and fixed_C else ["mix"]) + ["side"] + (["begin"] if begins else []) + (["out_kept"] if keep else ["out_y", "out_last"]) %}
{% include "scan.wgsl" %}
// h = exp(Δ A) h + Δ u B token by token; {{ "stores the state before each piece" if keep else "y = (C · h + D u) silu(z), and the last state" }}
{% if not keep %}
var<workgroup> sh: array<f32, {{ 64 * BY }}>;
{% endif %}
@compute @workgroup_size(64)
fn scan_forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let id = group.y * 32768u + group.x;
  if (id >= numbers.total) { return; }
  let blocks = (numbers.D + numbers.channels - 1u) / numbers.channels;
  let d0 = id % blocks * numbers.channels;
  let sequence = 3u * numbers.slots + 4u * (id / blocks);
  let first = side[sequence + 2u];
  let tokens = side[sequence + 3u];
  let here = tid / numbers.channels < numbers.N4 && d0 + tid % numbers.channels < numbers.D;
  let d = min(d0 + tid % numbers.channels, numbers.D - 1u);
  let lane = min(tid / numbers.channels, numbers.N4 - 1u);
  let rate = params[d * numbers.N4 + lane];
  var h = {{ "begin[(id / blocks * numbers.D + d) * numbers.N4 + lane]" if begins else "vec4<f32>()" }};
  for (var s0 = 0u; s0 < tokens; s0 += {{ BY }}u) {
{% if keep %}
    if (here && s0 % {{ KEEP }}u == 0u) { out_kept[((side[sequence] + s0 / {{ KEEP }}u) * numbers.D + d) * numbers.N4 + lane] = h; }
{% endif %}
{# loads several tokens at once, because each load waits long #}
{% for i in range(BY) %}
    let live{{ i }} = s0 + {{ i }}u < tokens;
    let t{{ i }} = first + min(s0 + {{ i }}u, tokens - 1u);
    let u{{ i }} = select(0.0, of_row(0u, t{{ i }}, d), live{{ i }});
    let raw{{ i }} = raw_step(t{{ i }}, d);
    let B{{ i }} = B_at(t{{ i }}, d, lane);
{% if not keep %}
    let C{{ i }} = C_at(t{{ i }}, d, lane);
{% endif %}
{% endfor %}
{% for i in range(BY) %}
    { let step = select(0.0, step_of(raw{{ i }}), live{{ i }});
      h = fma(exp4(step * rate), h, (step * u{{ i }}) * B{{ i }});
{% if not keep %}
      sh[{{ 64 * i }}u + tid] = total4(C{{ i }} * h);
{% endif %}
    }
{% endfor %}
{% if not keep %}
    workgroupBarrier();
    for (var i = tid; i < {{ BY }}u * numbers.channels; i += 64u) {
      let c = i % numbers.channels;
      let t = s0 + i / numbers.channels;
      if (t < tokens && d0 + c < numbers.D) {
        var y = 0.0;
        for (var l = 0u; l < numbers.N4; l++) { y += sh[i / numbers.channels * 64u + l * numbers.channels + c]; }
{% if skip %}
        y = fma(sides(d0 + c).x, of_row(0u, first + t, d0 + c), y);
{% endif %}
{% if gate %}
        let z = of_row(2u, first + t, d0 + c);
        y *= z * sigmoid(z);
{% endif %}
        out_y[(first + t) * numbers.D + d0 + c] = y;
      }
    }
    workgroupBarrier();
{% endif %}
  }
{% if not keep %}
  if (here) { out_last[(id / blocks * numbers.D + d) * numbers.N4 + lane] = h; }
{% endif %}
}
