{% import "arrays.wgsl" as arrays with context %}
{% include "common.wgsl" %}
// Split decode (row S26): a workgroup owns one range of keys for {{ R }} rows (the heads of a group times the queries), {{ KEYS }} keys a step.
// Scores: {{ PER }} invocations a key, {{ KEYS * PER // WG }} keys an invocation. Values: {{ LANES }} invocations a key, {{ SETS }} slots of {{ EACH }} keys, each with
// sums (m, l, acc) of its own, which fold together at the end. Up to four rows are the components of a vector.
{{ arrays.bindings(["q", "k", "v", "out_partial", "side", "dims"] + (["bias"] if bias else [])) }}
var<workgroup> rows_q: array<vec4<f32>, {{ R * D4 }}>;
var<workgroup> parts: array<vec4<f32>, {{ KEYS * PER }}>;
var<workgroup> s: array<vec4<f32>, {{ KEYS }}>;
{% set OWN = KEYS * PER // WG %}

// the score of one row and key from the sum of its products
fn score(x: f32, row: u32, key: u32, partial_seg: bool) -> f32 {
{% if plain %}
  let value = x * (dims.scale * LOG2E);
{% else %}
  i_h = i_hk * dims.G + row / dims.Tq;
{% if alibi %}
  slope = bitcast<f32>(side[dims.o_slopes + i_b * dims.slopes_stride + i_h]);
{% endif %}
  let value = scores4(vec4<f32>(x), vec4<i32>(i32(t_of(row % dims.Tq))), vec4<i32>(i32(j_of(key)))).x;
{% endif %}
  if (!partial_seg) { return value; }
  return select(MASKED, value, allowed(t_of(row % dims.Tq), j_of(key)));
}

@compute @workgroup_size({{ WG }})
fn decode(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let b = dims.first_batch + group.z;
  i_b = b;
  i_hk = group.y;
  let groups = (dims.rows + {{ R - 1 }}u) / {{ R }}u;
  let first_row = group.x % groups * {{ R }}u;
  let chunk = dims.first_tile + group.x / groups;
  place_class(0u);
  let k_low = in_class(dims.k_lo, u32(side[dims.o_classes + 1u]));
  let k_high = in_class(dims.k_hi, u32(side[dims.o_classes + 1u]));
  place_head(i_hk * dims.G);
  for (var i = tid; i < {{ R * D4 }}u; i += {{ WG }}u) {
    let row = min(first_row + i / {{ D4 }}u, dims.rows - 1u);
    i_h = i_hk * dims.G + row / dims.Tq;
    rows_q[i] = load_q(q_row(row % dims.Tq) * {{ D4 }}u + i % {{ D4 }}u);
  }
  let key = tid / {{ PER }}u;
  let part = tid % {{ PER }}u;
  let lane = tid % {{ LANES }}u;
  let slot = tid / {{ LANES }}u;
  let low = max(chunk * dims.chunk_keys, k_low);
  let high = min((chunk + 1u) * dims.chunk_keys, k_high);
  var m = vec4<f32>(START);
  var l = vec4<f32>();
{% for r in range(R) %}{% for n in range(NV) %}
  var acc{{ r }}_{{ n }} = vec4<f32>();
{% endfor %}{% endfor %}
  let list = dims.o_ptr + select(0u, b, dims.mask_batches > 1u);
  workgroupBarrier();
  for (var n = side[list]; n < side[list + 1u]; n++) {
    let seg = dims.o_seg + 3u * u32(n);
    let stop = min(u32(side[seg + 1u]), high);
    let partial_seg = side[seg + 2u] == 1;
    for (var k0 = max(u32(side[seg]), low); k0 < stop; k0 += {{ KEYS }}u) {
      // values are asked for before the scores are ready
{% for e in range(EACH) %}
{% for n in range(NV) %}
      var v{{ e }}_{{ n }} = vec4<f32>();
{% endfor %}
      if (k0 + slot * {{ EACH }}u + {{ e }}u < stop) {
        let at = k_row(k0 + slot * {{ EACH }}u + {{ e }}u) * {{ DV4 }}u + lane;
{% for n in range(NV) %}
        {{ "if (lane + " ~ n * LANES ~ "u < " ~ DV4 ~ "u) " if (n + 1) * LANES > DV4 }}{ v{{ e }}_{{ n }} = load_v(at + {{ n * LANES }}u); }
{% endfor %}
      }
{% endfor %}
{% for o in range(OWN) %}
      var sum{{ o }} = vec4<f32>();
{% endfor %}
{% for o in range(OWN) %}
      let at{{ o }} = k_row(min(k0 + key + {{ o * WG // PER }}u, stop - 1u)) * {{ D4 }}u + part;
{% endfor %}
{% for d in range((D4 + PER - 1) // PER) %}
      {{ "if (part + " ~ d * PER ~ "u < " ~ D4 ~ "u) " if (d + 1) * PER > D4 }}{
{% for o in range(OWN) %}
        let x{{ o }} = load_k(at{{ o }} + {{ d * PER }}u);
{% endfor %}
{% for r in range(R) %}
        let q{{ r }} = rows_q[{{ r * D4 + d * PER }}u + part];
{% for o in range(OWN) %}
        sum{{ o }}.{{ "xyzw"[r] }} += dot(x{{ o }}, q{{ r }});
{% endfor %}
{% endfor %}
      }
{% endfor %}
{% for o in range(OWN) %}
      parts[{{ o * WG }}u + tid] = sum{{ o }};
{% endfor %}
      workgroupBarrier();
      for (var i = tid; i < {{ KEYS }}u; i += {{ WG }}u) {
        var four = vec4<f32>(MASKED);
        if (k0 + i < stop) {
          let x = {% for n in range(PER) %}{{ " + " if n }}parts[i * {{ PER }}u + {{ n }}u]{% endfor %};
{% for r in range(R) %}
          four.{{ "xyzw"[r] }} = score(x.{{ "xyzw"[r] }}, min(first_row + {{ r }}u, dims.rows - 1u), k0 + i, partial_seg);
{% endfor %}
        }
        s[i] = four;
      }
      workgroupBarrier();
      var top = m;
{% for e in range(EACH) %}
      let s{{ e }} = s[slot * {{ EACH }}u + {{ e }}u];
      top = max(top, s{{ e }});
{% endfor %}
      let fix = exp2(m - top);
      m = top;
      l *= fix;
{% for r in range(R) %}{% for n in range(NV) %}
      acc{{ r }}_{{ n }} *= fix.{{ "xyzw"[r] }};
{% endfor %}{% endfor %}
{% for e in range(EACH) %}
      {
        let p = {{ "exp2_nan" if rolled else "exp2" }}(s{{ e }} - top);
        l += p;
        if (partial_seg{{ " || true" if bias }}) {
{% for r in range(R) %}{% for n in range(NV) %}
          acc{{ r }}_{{ n }} += select(vec4<f32>(), p.{{ "xyzw"[r] }} * v{{ e }}_{{ n }}, p.{{ "xyzw"[r] }} != 0.0);
{% endfor %}{% endfor %}
        } else {
{% for r in range(R) %}{% for n in range(NV) %}
          acc{{ r }}_{{ n }} = fma(vec4<f32>(p.{{ "xyzw"[r] }}), v{{ e }}_{{ n }}, acc{{ r }}_{{ n }});
{% endfor %}{% endfor %}
        }
      }
{% endfor %}
    }
  }
  // slots fold into the first
  workgroupBarrier();
  parts[tid] = m;
  workgroupBarrier();
  var best = m;
  for (var n = 0u; n < {{ SETS }}u; n++) { best = max(best, parts[n * {{ LANES }}u + lane]); }
  let fix = exp2(m - best);
  l = fold(tid, lane, l * fix);
{% for r in range(R) %}{% for n in range(NV) %}
  acc{{ r }}_{{ n }} = fold(tid, lane, acc{{ r }}_{{ n }} * fix.{{ "xyzw"[r] }});
{% endfor %}{% endfor %}
  if (slot != 0u) { return; }
{% for r in range(R) %}
  if (first_row + {{ r }}u < dims.rows) {
    let at = (((i_b * dims.Hk + i_hk) * dims.rows + first_row + {{ r }}u) * dims.chunks + chunk) * {{ 4 * DV4 + 2 }}u;
    if (lane == 0u) {
      out_partial[at + {{ 4 * DV4 }}u] = best.{{ "xyzw"[r] }};
      out_partial[at + {{ 4 * DV4 + 1 }}u] = l.{{ "xyzw"[r] }};
    }
{% for n in range(NV) %}
    if (lane + {{ n * LANES }}u < {{ DV4 }}u) {
{% for e in "xyzw" %}
      out_partial[at + 4u * lane + {{ 4 * n * LANES + loop.index0 }}u] = acc{{ r }}_{{ n }}.{{ e }};
{% endfor %}
    }
{% endfor %}
  }
{% endfor %}
}

// the sum of x over the slots of a lane
fn fold(tid: u32, lane: u32, x: vec4<f32>) -> vec4<f32> {
  workgroupBarrier();
  parts[tid] = x;
  workgroupBarrier();
  var sum = parts[lane];
  for (var n = 1u; n < {{ SETS }}u; n++) { sum += parts[n * {{ LANES }}u + lane]; }
  return sum;
}
