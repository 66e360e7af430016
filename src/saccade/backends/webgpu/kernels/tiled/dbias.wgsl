{% import "arrays.wgsl" as arrays with context %}
{% import "products.wgsl" as p with context %}
{% include "common.wgsl" %}
// Gradient of a bias: P (dO Vᵀ - Δ), summed by its owner over the dimensions that the bias is broadcast in.
// A workgroup owns {{ ROWS }} queries{{ " (all of them, in turn)" if not rows_own }} by {{ 4 * CG }} keys of one class.
{{ arrays.bindings(["q", "k", "v", "dout", "stats", "out_dbias", "side", "dims"] + (["bias"] if bias else [])) }}
var<workgroup> sh: array<vec4<f32>, {{ SHARED }}>;

@compute @workgroup_size({{ WG }})
fn dbias(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let cg = tid % {{ CG }}u;
  let rg = tid / {{ CG }}u;
  let partial_seg = true;
  let cls = group.x / dims.tile_count;
  place_class(cls);
  let last_q = u32(side[dims.o_classes + 4u * cls + 2u]);
  let k0 = group.x % dims.tile_count * {{ 4 * CG }}u;
  let heads = {{ "dims.Hq" if each_h else "1u" }};
  let own_b = group.z / heads;
  let own_h = group.z % heads;
{% for i in range(RT) %}
  var sum{{ i }} = vec4<f32>();
{% endfor %}
  for (var b = own_b; b < {{ "own_b + 1u" if each_b else "dims.B" }}; b++) {
    for (var h = own_h; h < {{ "own_h + 1u" if each_h else "dims.Hq" }}; h++) {
      i_b = b;
      place_head(h);
      for (var a0 = {{ "group.y * " ~ ROWS ~ "u" if rows_own else "0u" }}; a0 < {{ "min(last_q, (group.y + 1u) * " ~ ROWS ~ "u)" if rows_own else "last_q" }}; a0 += {{ ROWS }}u) {
{% for i in range(RT) %}
        var s{{ i }} = vec4<f32>();
        var dp{{ i }} = vec4<f32>();
{% endfor %}
{{ p.rows_by_rows("s", "load_q", "q_row", "a0", "n_q", "load_k", "k_row", "k0", "n_k", D4) }}
{{ p.rows_by_rows("dp", "load_dout", "q_row", "a0", "n_q", "load_v", "k_row", "k0", "n_k", DV4) }}
{{ p.score_rows("s", "a0", "k0", "n_k") }}
{% for i in range(RT) %}
        if (a0 + rg * {{ RT }}u + {{ i }}u < n_q) {
          let stat = stats[stat_row(a0 + rg * {{ RT }}u + {{ i }}u)];
{% if dropout %}
          dp{{ i }} *= kept4(vec4<u32>(t4_{{ i }}), vec4<u32>(j4));
{% endif %}
          sum{{ i }} += select(weights4(s{{ i }}, stat.xxxx, stat.yyyy) * (dp{{ i }} - stat.z), vec4<f32>(), excluded4(s{{ i }}));
        }
{% endfor %}
      }
    }
  }
{% if rows_own %}
{% for i in range(RT) %}
  if (group.y * {{ ROWS }}u + rg * {{ RT }}u + {{ i }}u < n_q) {
    let at = (group.z * dims.Tq + t_of(group.y * {{ ROWS }}u + rg * {{ RT }}u + {{ i }}u)) * dims.Tk;
{% for e in "xyzw" %}
    if (k0 + 4u * cg + {{ loop.index0 }}u < n_k) { out_dbias[at + j_of(k0 + 4u * cg + {{ loop.index0 }}u)] += sum{{ i }}.{{ e }}; }
{% endfor %}
  }
{% endfor %}
{% else %}
  workgroupBarrier();
  sh[tid] = {% for i in range(RT) %}{{ " + " if i }}sum{{ i }}{% endfor %};
  workgroupBarrier();
  if (rg == 0u) {
    var total = sh[cg];
    for (var n = 1u; n < {{ WG // CG }}u; n++) { total += sh[n * {{ CG }}u + cg]; }
    let at = group.z * dims.Tk;
{% for e in "xyzw" %}
    if (k0 + 4u * cg + {{ loop.index0 }}u < n_k) { out_dbias[at + j_of(k0 + 4u * cg + {{ loop.index0 }}u)] += total.{{ e }}; }
{% endfor %}
  }
{% endif %}
}
