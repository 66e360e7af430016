{% import "arrays.wgsl" as arrays with context %}
{% include "common.wgsl" %}
// Split decode (row S26): a workgroup owns one range of keys for {{ R }} rows (the heads of a group times the queries), {{ KEYS }} keys a step.
// Scores: {{ PER }} invocations a key, {{ KEYS * PER // WG }} keys an invocation. Values: {{ LANES }} invocations a key, {{ SETS }} slots of {{ EACH }} keys, each with
// sums (m, l, acc) of its own, which fold together at the end.
{{ arrays.bindings(["q", "k", "v", "out_partial", "side", "dims"] + (["bias"] if bias else [])) }}
var<workgroup> rows_q: array<vec4<f32>, {{ R * D4 }}>;
var<workgroup> parts: array<f32, {{ R * KEYS * PER }}>;
var<workgroup> s: array<vec4<f32>, {{ R * KEYS // 4 }}>;
{% set OWN = KEYS * PER // WG %}
{% set FOURS = EACH // 4 %}

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
{% for r in range(R) %}
  var m{{ r }} = f32(START);
  var l{{ r }} = 0.0;
{% for n in range(NV) %}
  var acc{{ r }}_{{ n }} = vec4<f32>();
{% endfor %}
{% endfor %}
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
{% for r in range(R) %}{% for o in range(OWN) %}
      var dot{{ r }}_{{ o }} = 0.0;
{% endfor %}{% endfor %}
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
        dot{{ r }}_{{ o }} += dot(x{{ o }}, q{{ r }});
{% endfor %}
{% endfor %}
      }
{% endfor %}
{% for r in range(R) %}{% for o in range(OWN) %}
      parts[{{ r * KEYS * PER + o * WG }}u + tid] = dot{{ r }}_{{ o }};
{% endfor %}{% endfor %}
      workgroupBarrier();
      for (var i = tid; i < {{ R * KEYS // 4 }}u; i += {{ WG }}u) {
        let row = min(first_row + i / {{ KEYS // 4 }}u, dims.rows - 1u);
        let first = k0 + i % {{ KEYS // 4 }}u * 4u;
        var four = vec4<f32>(MASKED);
{% for e in range(4) %}
        if (first + {{ e }}u < stop) {
          let at = (4u * i + {{ e }}u) * {{ PER }}u;
          four[{{ e }}] = score({% for n in range(PER) %}{{ " + " if n }}parts[at + {{ n }}u]{% endfor %}, row, first + {{ e }}u, partial_seg);
        }
{% endfor %}
        s[i] = four;
      }
      workgroupBarrier();
{% for r in range(R) %}
      {
{% for f in range(FOURS) %}
        let s{{ f }} = s[{{ r * KEYS // 4 + f }}u + slot * {{ FOURS }}u];
{% endfor %}
        var best = s0;
{% for f in range(1, FOURS) %}
        best = max(best, s{{ f }});
{% endfor %}
        let top = max(m{{ r }}, max(max(best.x, best.y), max(best.z, best.w)));
        let fix = exp2(m{{ r }} - top);
        m{{ r }} = top;
{% for f in range(FOURS) %}
        let p{{ f }} = {{ "exp2_nan" if rolled else "exp2" }}(s{{ f }} - top);
{% endfor %}
        let sum = {% for f in range(FOURS) %}{{ " + " if f }}p{{ f }}{% endfor %};
        l{{ r }} = l{{ r }} * fix + (sum.x + sum.y) + (sum.z + sum.w);
{% for n in range(NV) %}
        acc{{ r }}_{{ n }} *= fix;
{% endfor %}
        if (partial_seg{{ " || true" if bias }}) {
{% for e in range(EACH) %}{% for n in range(NV) %}
          acc{{ r }}_{{ n }} += select(vec4<f32>(), p{{ e // 4 }}.{{ "xyzw"[e % 4] }} * v{{ e }}_{{ n }}, p{{ e // 4 }}.{{ "xyzw"[e % 4] }} != 0.0);
{% endfor %}{% endfor %}
        } else {
{% for e in range(EACH) %}{% for n in range(NV) %}
          acc{{ r }}_{{ n }} = fma(vec4<f32>(p{{ e // 4 }}.{{ "xyzw"[e % 4] }}), v{{ e }}_{{ n }}, acc{{ r }}_{{ n }});
{% endfor %}{% endfor %}
        }
      }
{% endfor %}
    }
  }
  // slots fold into the first, row by row
{% for r in range(R) %}
  workgroupBarrier();
  parts[tid] = m{{ r }};
  workgroupBarrier();
  {
    var top = parts[lane];
    for (var n = 1u; n < {{ SETS }}u; n++) { top = max(top, parts[n * {{ LANES }}u + lane]); }
    let fix = exp2(m{{ r }} - top);
    m{{ r }} = top;
    l{{ r }} *= fix;
{% for n in range(NV) %}
    acc{{ r }}_{{ n }} *= fix;
{% endfor %}
  }
  let out{{ r }} = (((i_b * dims.Hk + i_hk) * dims.rows + first_row + {{ r }}u) * dims.chunks + chunk) * {{ 4 * DV4 + 2 }}u;
  fold(tid, lane, slot, l{{ r }}, out{{ r }} + {{ 4 * DV4 + 1 }}u, lane == 0u && first_row + {{ r }}u < dims.rows);
{% for n in range(NV) %}
{% for e in "xyzw" %}
  fold(tid, lane, slot, acc{{ r }}_{{ n }}.{{ e }}, out{{ r }} + 4u * lane + {{ 4 * n * LANES + loop.index0 }}u, lane + {{ n * LANES }}u < {{ DV4 }}u && first_row + {{ r }}u < dims.rows);
{% endfor %}
{% endfor %}
  if (tid == 0u && first_row + {{ r }}u < dims.rows) { out_partial[out{{ r }} + {{ 4 * DV4 }}u] = m{{ r }}; }
{% endfor %}
}

// the sum of x over the slots of a lane, written where wanted
fn fold(tid: u32, lane: u32, slot: u32, x: f32, at: u32, wanted: bool) {
  workgroupBarrier();
  parts[tid] = x;
  workgroupBarrier();
  if (slot != 0u || !wanted) { return; }
  var sum = x;
  for (var n = 1u; n < {{ SETS }}u; n++) { sum += parts[n * {{ LANES }}u + lane]; }
  out_partial[at] = sum;
}
