{% import "chunk_products.wgsl" as p with context %}
{# of: "k", the terms of a chunk in the state, or "q", in the gradient of the state before it #}
{% set left, right = {"k": ("key", "value"), "q": ("query", "cotangent")}[of] %}
{% set reads = [left, right] %}
// {{ left }}ᵀ {{ right }} of a chunk, for 64 features by 64 columns; a normaliser without a vector of values to fill is one more column
{% set names = ["qk", "vx", "side"] + (["ramps"] if decay or beta else []) + (["divisors"] if normalize and "cotangent" in reads else []) + ["out_states"] %}
{% include "chunk.wgsl" %}
var<workgroup> sh: array<vec4<f32>, 512>;
{% if normalize %}
var<workgroup> sums: array<f32, 16>;
{% endif %}

@compute @workgroup_size(256)
fn chunk_states(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let id = group.y * 32768u + group.x;
  if (id >= numbers.total) { return; }
  let columns = (numbers.V4 + 15u) / 16u;
  let blocks = (numbers.K4 + 15u) / 16u * columns;
  let slot = id / (blocks * numbers.H);
  place(slot, id / blocks % numbers.H);
  let f0 = id % blocks / columns * 16u;
  let c0 = id % columns * 16u;
  let rg = tid / 16u;
  let cg = tid % 16u;
{% if decay or beta %}
  note_sides(tid, {{ "true" if of == "k" else "false" }});
{% endif %}
{{ p.zeros("acc") }}
  var more = vec4<f32>();
  for (var t0 = 0u; t0 < side[3u * slot + 1u]; t0 += 16u) {
    workgroupBarrier();
{% call(t, c) p.natural(0) %}{{ left }}(t0 + {{ t }}, f0 + {{ c }}){% endcall %}
{% call(t, c) p.natural(256) %}{{ right }}(t0 + {{ t }}, c0 + {{ c }}){{ " * sides[t0 + tid / 16u].w" if decay }}{% endcall %}
{% if normalize %}
    if (tid < 16u) { sums[tid] = {{ right }}(t0 + tid, numbers.V4).x{{ " * sides[t0 + tid].w" if decay }}; }
{% endif %}
    workgroupBarrier();
{{ p.multiply([("acc", 256)], "more = fma(a, vec4<f32>(sums[k]), more);" if normalize else "") }}
  }
  let at = numbers.write_at + (slot * numbers.H + i_head) * numbers.K * numbers.W4;
{% for i in range(4) %}
  { let f = 4u * (f0 + rg) + {{ i }}u;
    if (f < numbers.K) {
      if (c0 + cg < numbers.V4) { out_states[at + f * numbers.W4 + c0 + cg] = acc{{ i }}; }
{% if normalize %}
      if (c0 + cg == 0u && numbers.W4 > numbers.V4) { out_states[at + f * numbers.W4 + numbers.V4] = vec4<f32>(more.{{ "xyzw"[i] }}, 0.0, 0.0, 0.0); }
{% endif %}
    }
  }
{% endfor %}
}
