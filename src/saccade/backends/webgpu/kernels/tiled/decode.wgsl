{% import "arrays.wgsl" as arrays with context %}
{% include "common.wgsl" %}
// Split decode (Flash-Decoding; Dao et al., 2023): a workgroup owns one range of keys for {{ R }} rows (the heads of a group times the queries), {{ KEYS }} keys a step.
// Scores: {{ PER }} invocations per key, {{ OWN }} keys per invocation{{ ", summed by shuffles without a barrier" if shuffle }}. Values: {{ LANES }} invocations per key, {{ SETS }} slots of {{ EACH }} keys,
// each with its own sums (m, l, acc), which are merged at the end. Up to four rows are the components of a vector.
{{ arrays.bindings(["q", "k", "v", "out_partial", "side", "dims"] + (["bias"] if bias else [])) }}
{# a load reads U vectors of a row; an invocation has NK and NV loads per row #}
{% set U = 2 if eights else 1 %}
{% set DU = D4 // U %}
{% set DVU = DV4 // U %}
{% set RAW = "vec4<u32>" if eights else "vec4<f32>" %}
{% macro raw(name, at) %}{{ name ~ "[" ~ at ~ "]" if eights else "load_" ~ name ~ "(" ~ at ~ ")" }}{% endmacro %}
{% macro four(x, u) %}{{ "vec4<f32>(unpack2x16float(" ~ x ~ "." ~ "xz"[u] ~ "), unpack2x16float(" ~ x ~ "." ~ "yw"[u] ~ "))" if eights else x }}{% endmacro %}
{% macro inside(column, n, width) %}{{ "if (" ~ column ~ " + " ~ n[0] ~ "u < " ~ width ~ "u) " if n[0] + n[1] > width }}{% endmacro %}
// the two vectors of a load are stored apart, so that neighbours read neighbouring vectors
var<workgroup> rows_q: array<vec4<f32>, {{ R * D4 }}>;
var<workgroup> parts: array<vec4<f32>, {{ WG if shuffle else KEYS * PER }}>;
{% if not shuffle %}
var<workgroup> s: array<vec4<f32>, {{ KEYS }}>;
{% endif %}
{% if shuffle %}
var<private> in_subgroup: u32;
{% endif %}

// the score of query t with one key from the sum of their products
fn score_of(x: f32, t: u32, key: u32, partial_seg: bool) -> f32 {
  if (partial_seg && !allowed(t_of(t), j_of(key))) { return MASKED; }
{% if plain %}
  return x * (dims.scale * LOG2E);
{% else %}
  return scores4(vec4<f32>(x), vec4<i32>(i32(t_of(t))), vec4<i32>(i32(j_of(key)))).x;
{% endif %}
}
fn place_row(row: u32) -> u32 {
  i_h = i_hk * dims.G + row / dims.Tq;
  place_terms();
  return row % dims.Tq;
}
{% if shuffle %}
// sums over the lanes of a slot: an invocation gets only the sum of its own row
fn sum_own(x: vec4<f32>) -> f32 {
{% if R == 4 %}
  let high = (in_subgroup & 2u) != 0u;
  let two = select(x.xy, x.zw, high) + subgroupShuffleXor(select(x.zw, x.xy, high), 2u);
{% elif R == 2 %}
  let two = x.xy;
{% endif %}
{% if R > 1 %}
  let odd = (in_subgroup & 1u) != 0u;
  var sum = select(two.x, two.y, odd) + subgroupShuffleXor(select(two.y, two.x, odd), 1u);
{% else %}
  var sum = x.x;
{% endif %}
{% for step in (1, 2, 4, 8) if R <= step < PER %}
  sum += subgroupShuffleXor(sum, {{ step }}u);
{% endfor %}
  return sum;
}
// the numbers that the invocations of each row have
fn every_row(x: f32) -> vec4<f32> {
{% if R == 1 %}
  return vec4<f32>(x, 0.0, 0.0, 0.0);
{% else %}
  let first = in_subgroup & {{ 255 - (R - 1) }}u;
  return vec4<f32>({% for r in range(4) %}{{ ", " if r }}{{ "subgroupShuffle(x, first + " ~ r ~ "u)" if r < R else "0.0" }}{% endfor %});
{% endif %}
}
{% endif %}

@compute @workgroup_size({{ WG }})
fn decode(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32{{ ", @builtin(subgroup_invocation_id) lane_id: u32" if shuffle }}) {
  let b = group.z + dims.first_batch;
  i_b = b;
  // neighbouring workgroups have neighbouring heads, so that they read the same rows of the arrays
  i_hk = group.x % dims.Hk;
  let first_row = group.x / dims.Hk * {{ R }}u;
  let chunk = dims.first_tile + group.y;
  place_class(0u);
  let k_low = in_class(dims.k_lo, u32(side[dims.o_classes + 1u]));
  let k_high = in_class(dims.k_hi, u32(side[dims.o_classes + 1u]));
  place_head(i_hk * dims.G);
  for (var i = tid; i < {{ R * D4 }}u; i += {{ WG }}u) {
    let c = i % {{ D4 }}u;
    let t = place_row(min(first_row + i / {{ D4 }}u, dims.rows - 1u));
    rows_q[i - c + c % {{ U }}u * {{ DU }}u + c / {{ U }}u] = load_q(q_row(t) * {{ D4 }}u + c);
  }
  let key = tid / {{ PER }}u;
  let part = tid % {{ PER }}u;
  let lane = tid % {{ LANES }}u;
  let slot = tid / {{ LANES }}u;
  let low = max(chunk * dims.chunk_keys, k_low);
  let high = min((chunk + 1u) * dims.chunk_keys, k_high);
{% if shuffle %}
  in_subgroup = lane_id;
  let own_t = place_row(min(first_row + lane_id % {{ R }}u, dims.rows - 1u));
  var own_m = f32(START);
  var own_l = 0.0;
{% else %}
  var m = vec4<f32>(START);
  var l = vec4<f32>();
{% endif %}
{% for r in range(R) %}{% for n in range(NV) %}{% for u in range(U) %}
  var acc{{ r }}_{{ n }}_{{ u }} = vec4<f32>();
{% endfor %}{% endfor %}{% endfor %}
  let list = dims.o_ptr + select(0u, b, dims.mask_batches > 1u);
  workgroupBarrier();
  for (var n = side[list]; n < side[list + 1u]; n++) {
    let seg = dims.o_seg + 3u * u32(n);
    let stop = min(u32(side[seg + 1u]), high);
    let partial_seg = side[seg + 2u] == 1;
    for (var k0 = max(u32(side[seg]), low); k0 < stop; k0 += {{ KEYS }}u) {
{% for o in range(OWN) %}
      let at{{ o }} = k_row(min(k0 + key + {{ o * WG // PER }}u, stop - 1u)) * {{ DU }}u + part;
{% endfor %}
{% if shuffle %}
{% for o in range(OWN) %}{% for d in range(NK) %}
      var x{{ o }}_{{ d }} = {{ RAW }}();
      {{ inside("part", [d * PER, PER], DU) }}{ x{{ o }}_{{ d }} = {{ raw("k", "at" ~ o ~ " + " ~ d * PER ~ "u") }}; }
{% endfor %}{% endfor %}
{% endif %}
      // loads of values are issued before the scores are ready; values beyond the end are zero
{% for e in range(EACH) %}
{% for n in range(NV) %}
      var v{{ e }}_{{ n }} = {{ RAW }}();
{% endfor %}
      if (k0 + slot + {{ e * SETS }}u < stop) {
        let at = k_row(k0 + slot + {{ e * SETS }}u) * {{ DVU }}u + lane;
{% for n in range(NV) %}
        {{ inside("lane", [n * LANES, LANES], DVU) }}{ v{{ e }}_{{ n }} = {{ raw("v", "at + " ~ n * LANES ~ "u") }}; }
{% endfor %}
      }
{% endfor %}
{% for o in range(OWN) %}
      var sum{{ o }} = vec4<f32>();
{% endfor %}
{% for d in range(NK) %}
      {{ inside("part", [d * PER, PER], DU) }}{
{% if not shuffle %}
{% for o in range(OWN) %}
        let x{{ o }}_{{ d }} = {{ raw("k", "at" ~ o ~ " + " ~ d * PER ~ "u") }};
{% endfor %}
{% endif %}
{% for u in range(U) %}
{% for o in range(OWN) %}
        let y{{ o }}_{{ u }} = {{ four("x" ~ o ~ "_" ~ d, u) }};
{% endfor %}
{% for r in range(R) %}
        let q{{ r }}_{{ u }} = rows_q[{{ r * D4 + u * DU + d * PER }}u + part];
{% for o in range(OWN) %}
        sum{{ o }}.{{ "xyzw"[r] }} += dot(y{{ o }}_{{ u }}, q{{ r }}_{{ u }});
{% endfor %}
{% endfor %}
{% endfor %}
      }
{% endfor %}
{% if shuffle %}
{% for e in range(EACH) %}
      let key{{ e }} = k0 + slot + {{ e * SETS }}u;
      let s{{ e }} = select(MASKED, score_of(sum_own(sum{{ e }}), own_t, min(key{{ e }}, stop - 1u), partial_seg), key{{ e }} < stop);
{% endfor %}
      var top = own_m;
{% for e in range(EACH) %}
      top = max(top, s{{ e }});
{% endfor %}
      let own_fix = exp2(own_m - top);
      own_m = top;
      own_l *= own_fix;
{% for e in range(EACH) %}
      let own_p{{ e }} = {{ "exp2_nan(vec4<f32>(s" ~ e ~ " - top)).x" if rolled else "exp2(s" ~ e ~ " - top)" }};
      own_l += own_p{{ e }};
{% endfor %}
      let fix = every_row(own_fix);
{% else %}
{% for o in range(OWN) %}
      parts[{{ o * WG }}u + tid] = sum{{ o }};
{% endfor %}
      workgroupBarrier();
      for (var i = tid; i < {{ KEYS }}u; i += {{ WG }}u) {
        var four = vec4<f32>(MASKED);
        if (k0 + i < stop) {
          let x = {% for n in range(PER) %}{{ " + " if n }}parts[i * {{ PER }}u + {{ n }}u]{% endfor %};
{% for r in range(R) %}
          four.{{ "xyzw"[r] }} = score_of(x.{{ "xyzw"[r] }}, place_row(min(first_row + {{ r }}u, dims.rows - 1u)), k0 + i, partial_seg);
{% endfor %}
        }
        s[i] = four;
      }
      workgroupBarrier();
{% for e in range(EACH) %}
      let s{{ e }} = s[slot + {{ e * SETS }}u];
{% endfor %}
      var top = m;
{% for e in range(EACH) %}
      top = max(top, s{{ e }});
{% endfor %}
      let fix = exp2(m - top);
      m = top;
      l *= fix;
{% endif %}
{% for r in range(R) %}{% for n in range(NV) %}{% for u in range(U) %}
      acc{{ r }}_{{ n }}_{{ u }} *= fix.{{ "xyzw"[r] }};
{% endfor %}{% endfor %}{% endfor %}
{% for e in range(EACH) %}
      {
{% if shuffle %}
        let p = every_row(own_p{{ e }});
{% else %}
        let p = {{ "exp2_nan" if rolled else "exp2" }}(s{{ e }} - top);
        l += p;
{% endif %}
{% for n in range(NV) %}{% for u in range(U) %}
        let y{{ n }}_{{ u }} = {{ four("v" ~ e ~ "_" ~ n, u) }};
{% endfor %}{% endfor %}
        if (partial_seg{{ " || true" if bias or relative }}) {
{% for r in range(R) %}{% for n in range(NV) %}{% for u in range(U) %}
          acc{{ r }}_{{ n }}_{{ u }} += select(vec4<f32>(), p.{{ "xyzw"[r] }} * y{{ n }}_{{ u }}, has_weight(p.{{ "xyzw"[r] }}));
{% endfor %}{% endfor %}{% endfor %}
        } else {
{% for r in range(R) %}{% for n in range(NV) %}{% for u in range(U) %}
          acc{{ r }}_{{ n }}_{{ u }} = fma(vec4<f32>(p.{{ "xyzw"[r] }}), y{{ n }}_{{ u }}, acc{{ r }}_{{ n }}_{{ u }});
{% endfor %}{% endfor %}{% endfor %}
        }
      }
{% endfor %}
    }
  }
{% if shuffle %}
  let m = every_row(own_m);
  let l = every_row(own_l);
{% endif %}
  // merges the slots: each vector is summed and written by one slot
  workgroupBarrier();
  parts[tid] = m;
  workgroupBarrier();
  var best = m;
  for (var n = 0u; n < {{ SETS }}u; n++) { best = max(best, parts[n * {{ LANES }}u + lane]); }
  let fix = exp2(m - best);
  let first = (i_b * dims.Hk + i_hk) * dims.rows + first_row;
  let sum_l = fold(tid, lane, l * fix, slot == {{ SETS - 1 }}u);
  if (slot == {{ SETS - 1 }}u && lane < {{ R }}u && first_row + lane < dims.rows) {
    out_partial[((first + lane) * dims.chunks + chunk) * {{ DV4 + 1 }}u + {{ DV4 }}u] = vec4<f32>(best[lane], sum_l[lane], 0.0, 0.0);
  }
{% for r in range(R) %}{% for n in range(NV) %}{% for u in range(U) %}
{% set owner = ((r * NV + n) * U + u) % SETS %}
  {
    let sum = fold(tid, lane, acc{{ r }}_{{ n }}_{{ u }} * fix.{{ "xyzw"[r] }}, slot == {{ owner }}u);
    if (slot == {{ owner }}u && first_row + {{ r }}u < dims.rows && lane + {{ n * LANES }}u < {{ DVU }}u) {
      out_partial[((first + {{ r }}u) * dims.chunks + chunk) * {{ DV4 + 1 }}u + (lane + {{ n * LANES }}u) * {{ U }}u + {{ u }}u] = sum;
    }
  }
{% endfor %}{% endfor %}{% endfor %}
}

// the sum of x over the slots of a lane, for invocations with `asked`
fn fold(tid: u32, lane: u32, x: vec4<f32>, asked: bool) -> vec4<f32> {
  workgroupBarrier();
  parts[tid] = x;
  workgroupBarrier();
  var sum = vec4<f32>();
  if (asked) {
    for (var n = 0u; n < {{ SETS }}u; n++) { sum += parts[n * {{ LANES }}u + lane]; }
  }
  return sum;
}
