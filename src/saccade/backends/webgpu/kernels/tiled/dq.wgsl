{% import "arrays.wgsl" as arrays with context %}
{% import "products.wgsl" as p with context %}
{% include "common.wgsl" %}
{% set careful = "true" if bias or relative else "partial_seg" %}
// dQ: a workgroup owns {{ ROWS }} queries of one head and walks their key segments.
//   P = 2^(S - lse)   dS = P (dO Vᵀ - Δ) scale   dQ += dS K
{% set statistics = "out_stats" if gates_grad else "stats" %}
{{ arrays.bindings(["q", "k", "v", "dout", statistics, "out_dq", "side", "dims"] + (["bias"] if bias else []) + (["out_dslopes"] if slopes_grad else [])) }}
var<workgroup> sh: array<vec4<f32>, {{ SHARED }}>;
var<workgroup> spoiled: atomic<u32>;
{% if slopes_grad or gates_grad %}
var<workgroup> sums: array<f32, {{ WG }}>;
{% endif %}

@compute @workgroup_size({{ WG }})
fn dq(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
{% include "rows.wgsl" %}
{{ p.zeros("dq", NK) }}
{% for i in range(RT) %}
  var stat{{ i }} = vec4<f32>();
  if (a0 + rg * {{ RT }}u + {{ i }}u < n_q) { stat{{ i }} = {{ statistics }}[stat_row(a0 + rg * {{ RT }}u + {{ i }}u)]; }
{% endfor %}
{% if slopes_grad %}
  var dslope = 0.0;
{% endif %}
{% if gates_grad %}
{% for i in range(RT) %}
  var total{{ i }} = 0.0;
{% endfor %}
{% endif %}
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
{% if softcap %}
{% for i in range(RT) %}
      let cap{{ i }} = cap_slope4(s{{ i }});
{% endfor %}
{% endif %}
{{ p.score_rows("s", "a0", "k0", "stop") }}
{% for i in range(RT) %}
{% if dropout %}
      dp{{ i }} *= kept4(vec4<u32>(t4_{{ i }}), vec4<u32>(j4));
{% endif %}
      s{{ i }} = select(weights4(s{{ i }}, stat{{ i }}.xxxx, stat{{ i }}.yyyy) * (dp{{ i }} - stat{{ i }}.z), vec4<f32>(), excluded4(s{{ i }}));
{% if gates_grad %}
      total{{ i }} += (s{{ i }}.x + s{{ i }}.y) + (s{{ i }}.z + s{{ i }}.w);
{% endif %}
{% if slopes_grad %}
      dslope -= dot(s{{ i }}, abs(vec4<f32>(t4_{{ i }} + position - j4)));
{% endif %}
      s{{ i }} *= dims.scale{{ " * cap" ~ i if softcap }};
{% endfor %}
      workgroupBarrier();
{{ p.put_weights("s") }}
{{ p.weights_by_rows("dq", "load_k", "k_row", "k0", "stop", D4, NK, careful) }}
    }
  }
{% for i in range(RT) %}
  if (a0 + rg * {{ RT }}u + {{ i }}u < n_q) {
    let at = q_row(a0 + rg * {{ RT }}u + {{ i }}u) * {{ D4 }}u + cg;
{% for n in range(NK) %}
    if (cg + {{ n * CG }}u < {{ D4 }}u) { out_dq[at + {{ n * CG }}u] += dq{{ i }}_{{ n }}; }
{% endfor %}
  }
{% endfor %}
{% if gates_grad %}
  // dS summed over keys replaces dO · O, which is no longer needed
{% for i in range(RT) %}
  workgroupBarrier();
  sums[tid] = total{{ i }};
  workgroupBarrier();
  if (cg == 0u && a0 + rg * {{ RT }}u + {{ i }}u < n_q) {
    for (var n = 1u; n < {{ CG }}u; n++) { total{{ i }} += sums[tid + n]; }
    out_stats[stat_row(a0 + rg * {{ RT }}u + {{ i }}u)].w = total{{ i }}{{ " + stat" ~ i ~ ".w" if not first }};
  }
{% endfor %}
  workgroupBarrier();
{% endif %}
{% if slopes_grad %}
  sums[tid] = dslope;
  workgroupBarrier();
  if (tid == 0u) {
    for (var n = 1u; n < {{ WG }}u; n++) { dslope += sums[n]; }
    out_dslopes[(i_b * dims.Hq + i_h) * dims.n_tiles * dims.n_classes + group.y] += dslope;
  }
{% endif %}
}
