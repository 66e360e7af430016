{% import "chunk_products.wgsl" as p with context %}
{# of: "o", or q, k, v for a gradient. Its row i is Σ_j pair(i, j) values(j) + ramp(i) left(i) state, pair(i, j) = left(i) · other(j) e^(b - b) #}
{% set left, other, values = {"o": ("query", "key", "value"), "q": ("cotangent", "value", "key"), "k": ("value", "cotangent", "query"), "v": ("key", "query", "cotangent")}[of] %}
{% set reads = [left, other, values] %}
{% set wide, narrow = ("K4", "V4") if of in "ov" else ("W4", "K4") %}
{% set later = of in "kv" %}
{# whether the gradients of decays or of beta need sums of its rows #}
{% set passes = decay if of in "qk" else beta and of == "v" %}
{% set divided = normalize and of == "o" %}
// rows of {{ of if of == "o" else "d" ~ of }} of one chunk and 64 of their columns
{% set names = ["qk", "vx", "side", "states"] + (["ramps"] if decay or beta else []) + (["divisors"] if normalize and "cotangent" in reads else []) + ["out_rows"] + (["out_total"] if totals else []) + (["out_passed"] if passes else []) %}
{% include "chunk.wgsl" %}
{# places of left, states, other; then of pairs, values #}
var<workgroup> sh: array<vec4<f32>, 768>;
{% if divided %}
var<workgroup> sums: array<f32, 16>;
{% endif %}
{# the product of each row with another one, as a share per block of columns #}
{% macro passing(with) %}
  workgroupBarrier();
  sh[tid] = vec4<f32>({% for i in range(4) %}dot(acc{{ i }}, {{ with }}(4u * rg + {{ i }}u, c0 + cg)){{ ", " if not loop.last }}{% endfor %});
  workgroupBarrier();
  if (cg < 4u && 4u * rg + cg < count) {
    var sum = 0.0;
    for (var n = 0u; n < 16u; n++) {
      let x = sh[16u * rg + n];
      sum += select(select(x.x, x.y, cg == 1u), select(x.z, x.w, cg == 3u), cg > 1u);
    }
    out_passed[({{ "blocks + " if of == "k" }}id % blocks) * numbers.rows + row(4u * rg + cg)] = sum;
  }
{% endmacro %}
fn held(f: u32, c: u32) -> vec4<f32> {
  if (f >= numbers.K || c >= numbers.W4) { return vec4<f32>(); }
  return states[state + f * numbers.W4 + c];
}

@compute @workgroup_size(256)
fn chunk_rows(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let id = group.y * 32768u + group.x;
  if (id >= numbers.total) { return; }
  let blocks = (numbers.{{ narrow }} + 15u) / 16u;
  let slot = id / (blocks * numbers.H);
  place(slot, id / blocks % numbers.H);
  let c0 = id % blocks * 16u;
  let rg = tid / 16u;
  let cg = tid % 16u;
{% if decay or beta %}
  note_sides(tid, {{ "true" if later else "false" }});
{% endif %}
{{ p.zeros("acc") }}
{{ p.zeros("pair") }}
  var weight = vec4<f32>();
  for (var w0 = 0u; w0 < numbers.{{ wide }}; w0 += 4u) {
    workgroupBarrier();
{% call(r, c) p.transposed(0, 0) %}{{ left }}({{ r }}, w0 + {{ c }}){% endcall %}
{% if causal %}
{% call(r, c) p.transposed(512, 1) %}{{ other }}({{ r }}, w0 + {{ c }}){% endcall %}
{% endif %}
{% if of in "ov" %}
{% call(f, c) p.natural(256) %}held(4u * w0 + {{ f }}, c0 + {{ c }}){% endcall %}
{% else %}
{% call(f, c) p.transposed(256, 2) %}held(4u * c0 + {{ f }}, w0 + {{ c }}){% endcall %}
{% endif %}
{% if divided %}
    if (tid < 16u) { sums[tid] = held(4u * w0 + tid, numbers.V / 4u)[numbers.V % 4u]; }
{% endif %}
    workgroupBarrier();
{{ p.multiply([("acc", 256)] + ([("pair", 512)] if causal else []), "weight = fma(a, vec4<f32>(sums[k]), weight);" if divided else "") }}
  }
{% if decay %}
{% for i in range(4) %}
  { let by = sides[4u * rg + {{ i }}u].w; acc{{ i }} *= by;{{ " weight." ~ "xyzw"[i] ~ " *= by;" if divided }} }
{% endfor %}
{% endif %}
{% if passes and of != "v" %}
{{ passing("query" if of == "q" else "key") }}
{% endif %}
{% if causal %}
  { let j = vec4<u32>(4u * cg) + vec4<u32>(0u, 1u, 2u, 3u);
{% for i in range(4) %}
    { let r = 4u * rg + {{ i }}u;
{% if decay %}
      pair{{ i }} *= between(r, 4u * cg, {{ "-1.0" if later else "1.0" }});
{% endif %}
      pair{{ i }} = select(vec4<f32>(), pair{{ i }}, j {{ ">=" if later else "<=" }} vec4<u32>(r));
    }
{% endfor %}
  }
  for (var s0 = 0u; s0 < side[3u * slot + 1u]; s0 += 16u) {
    workgroupBarrier();
    if (cg / 4u == s0 / 16u) {
{% for e in "xyzw" %}
      sh[(4u * (cg % 4u) + {{ loop.index0 }}u) * 16u + rg] = vec4<f32>(pair0.{{ e }}, pair1.{{ e }}, pair2.{{ e }}, pair3.{{ e }});
{% endfor %}
    }
{% call(j, c) p.natural(256) %}{{ values }}(s0 + {{ j }}, c0 + {{ c }}){% endcall %}
    workgroupBarrier();
{{ p.multiply([("acc", 256)], "weight += a;" if divided else "") }}
  }
{% endif %}
{% if passes and of == "v" %}
{{ passing("value_at") }}
{% endif %}
  let c = c0 + cg;
{% for i in range(4) %}
  { let r = 4u * rg + {{ i }}u;
    if (r < count && c < numbers.{{ narrow }}) {
{% if of == "o" %}
{% if divided %}
      let sum = weight.{{ "xyzw"[i] }};
      out_rows[numbers.write_at + row(r) * numbers.V4 + c] = select(acc{{ i }} / sum, vec4<f32>(), sum == 0.0);
{% if totals %}
      if (c == 0u) { out_total[row(r)] = sum; }
{% endif %}
{% else %}
      out_rows[numbers.write_at + row(r) * numbers.V4 + c] = acc{{ i }} * numbers.scale;
{% endif %}
{% elif of == "v" %}
      out_rows[numbers.write_at + row(r) * numbers.V4 + c] = acc{{ i }}{{ " * sides[r].z" if beta }};
{% else %}
      let at = (i_head % numbers.G * 2u + {{ 0 if of == "q" else 1 }}u) * numbers.rows_k + row_k(r);
      out_rows[at * numbers.K4 + c] = acc{{ i }} * slope({{ "query_at" if of == "q" else "key_at" }}(r, c));
{% endif %}
    }
  }
{% endfor %}
}
