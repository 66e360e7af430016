{% import "arrays.wgsl" as arrays with context %}
{% import "products.wgsl" as p with context %}
{% include "common.wgsl" %}
// Σ P and Σ P (dO Vᵀ - dO · O) of every row, added to those of other keys{{ "; from these a better lse and Δ, free of the" if last }}
{% if last %}
// rounding of lse and o, where the weights, with the sink's, add up to 1 within lse's own tolerance: other rows see more keys.
{% endif %}
{% if far %}
// Only rows whose lse is so far from 0 that its rounding shows.
{% endif %}
{{ arrays.bindings(["q", "k", "v", "dout", "out_stats", "out_sums", "side", "dims"] + (["bias"] if bias else [])) }}
var<workgroup> sh: array<vec4<f32>, {{ SHARED }}>;
{% if far %}
var<workgroup> any_far: u32;
fn is_far(stat: vec4<f32>) -> bool { return abs(stat.x) > 1024.0; }
{% endif %}

@compute @workgroup_size({{ WG }})
fn refine(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
{% include "rows.wgsl" %}
{% if far %}
  if (tid == 0u) {
    for (var a = a0; a < min(a0 + {{ ROWS }}u, n_q); a++) { any_far |= u32(is_far(out_stats[stat_row(a)])); }
  }
  if (workgroupUniformLoad(&any_far) == 0u) { return; }
{% endif %}
{% for i in range(RT) %}
  var stat{{ i }} = vec4<f32>();
  if (a0 + rg * {{ RT }}u + {{ i }}u < n_q) { stat{{ i }} = out_stats[stat_row(a0 + rg * {{ RT }}u + {{ i }}u)]; }
  var weight{{ i }} = vec4<f32>();
  var weighed{{ i }} = vec4<f32>();
{% endfor %}
  for (var n = side[list]; n < side[list + 1u]; n++) {
    let seg = dims.o_seg + 3u * u32(n);
    let stop = min(u32(side[seg + 1u]), k_high);
    let partial_seg = side[seg + 2u] == 1;
    for (var k0 = max(u32(side[seg]), k_low); k0 < stop; k0 += {{ 4 * CG }}u) {
{% for i in range(RT) %}
      var s{{ i }} = vec4<f32>();
      var dp{{ i }} = vec4<f32>();
{% endfor %}
{{ p.rows_by_rows("s", "load_q", "q_row", "a0", "n_q", "load_k", "k_row", "k0", "stop", D4) }}
{{ p.rows_by_rows("dp", "load_dout", "q_row", "a0", "n_q", "load_v", "k_row", "k0", "stop", DV4) }}
{{ p.score_rows("s", "a0", "k0", "stop") }}
{% for i in range(RT) %}
{% if dropout %}
      dp{{ i }} *= kept4(vec4<u32>(t4_{{ i }}), vec4<u32>(j4));
{% endif %}
      let out{{ i }} = excluded4(s{{ i }});
      s{{ i }} = select(weights4(s{{ i }}, stat{{ i }}.xxxx, stat{{ i }}.yyyy), vec4<f32>(), out{{ i }});
      weight{{ i }} += s{{ i }};
      weighed{{ i }} += select(s{{ i }} * (dp{{ i }} - stat{{ i }}.w), vec4<f32>(), out{{ i }});
{% endfor %}
    }
  }
  workgroupBarrier();
{% for i in range(RT) %}
  sh[(rg * {{ RT }}u + {{ i }}u) * {{ CG }}u + cg] = vec4<f32>(weight{{ i }}.xy + weight{{ i }}.zw, weighed{{ i }}.xy + weighed{{ i }}.zw);
{% endfor %}
  workgroupBarrier();
  if (tid < {{ ROWS }}u && a0 + tid < n_q) {
    var sum = sh[tid * {{ CG }}u];
    for (var n = 1u; n < {{ CG }}u; n++) { sum += sh[tid * {{ CG }}u + n]; }
    let at = stat_row(a0 + tid);
    let total = out_sums[at] + vec2<f32>(sum.x + sum.y, sum.z + sum.w);
{% if not last %}
    out_sums[at] = total;
{% else %}
    let stat = out_stats[at];
    var whole = total.x;
    var over = total.y;
{% if sinks %}
    let sink = in_log2(bitcast<f32>(side[dims.o_sinks + h]));
    let share = weights4(sink.xxxx, stat.xxxx, vec4<f32>(stat.y - sink.y)).x;
    whole += share;
    // the sink acts as a key whose dO V is 0
    over -= share * stat.w;
{% endif %}
    // by how much lse is too small, in log2 units: all of the logarithm of the sum if every score is -1e9. Near 1 it is
    // 2 atanh(z), because the built-in logarithm is inexact there. A row without keys has sum 0, and must stay as it is.
    let z = (whole - 1.0) / (whole + 1.0);
    let near = 2.0 * LOG2E * fma(z * z * z, fma(z * z, 0.2, 0.333333333), z);
    let more = select(log2(max(whole, 1e-37)), near, abs(whole - 1.0) < 0.1);
    if (whole > 0.0 && abs(more) * LN2 <= 9.5367431640625e-7 * max(abs(stat.x) * LN2, 1.0){{ " && is_far(stat)" if far }}) {
      out_stats[at] = vec4<f32>(stat.x, stat.y + more, stat.z + over / whole, stat.w);
    }
{% endif %}
  }
}
