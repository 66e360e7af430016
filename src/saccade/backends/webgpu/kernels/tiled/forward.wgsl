{% import "arrays.wgsl" as arrays with context %}
{% import "products.wgsl" as p with context %}
{% include "common.wgsl" %}
{% set careful = "true" if bias or relative else "partial_seg" %}
// Tiled forward (FlashAttention-2; Dao, 2023): a workgroup owns {{ ROWS }} queries of one head and walks their key segments, {{ 4 * CG }} keys a step.
//   S = Q Kᵀ   m' = max(m, S)   P = 2^(S - m')   l = l 2^(m - m') + ΣP   O = O 2^(m - m') + P V   o = O / l
{{ arrays.bindings(["q", "k", "v", "out_o", "out_lse", "side", "dims"] + (["bias"] if bias else [])) }}
var<workgroup> sh: array<vec4<f32>, {{ SHARED }}>;
var<workgroup> half_row: array<f32, {{ WG }}>;
var<workgroup> factor: array<f32, {{ ROWS }}>;
var<workgroup> before: array<f32, {{ ROWS if merge else 1 }}>;
var<workgroup> spoiled: atomic<u32>;
{% set HALF = CG * ROWS // WG %}

@compute @workgroup_size({{ WG }})
fn forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
{% include "rows.wgsl" %}
  // row statistics: two threads (or more) per row, each with {{ 4 * HALF }} of its keys
  let row = tid / {{ WG // ROWS }}u;
  let piece = tid % {{ WG // ROWS }}u;
  var m = f32(START);
  var l = 0.0;
  var lost = 0.0;
{{ p.zeros("o", NV) }}
  for (var n = side[list]; n < side[list + 1u]; n++) {
    let seg = dims.o_seg + 3u * u32(n);
    let stop = min(u32(side[seg + 1u]), k_high);
    let partial_seg = side[seg + 2u] == 1;
    for (var k0 = max(u32(side[seg]), k_low); k0 < stop; k0 += {{ 4 * CG }}u) {
{% for i in range(RT) %}
      var s{{ i }} = vec4<f32>();
{% endfor %}
{{ p.rows_by_rows("s", "load_q", "q_row", "a0", "n_q", "load_k", "k_row", "k0", "stop", D4) }}
{{ p.score_rows("s", "a0", "k0", "stop") }}
      workgroupBarrier();
{{ p.put_weights("s") }}
      workgroupBarrier();
      let at = row * {{ CG }}u;
      let turn = row & {{ CG - 1 }}u;
{% for n in range(HALF) %}
      var x{{ n }} = sh[at + ((piece * {{ HALF }}u + {{ n }}u) ^ turn)];
{% endfor %}
      var top = x0;
{% for n in range(1, HALF) %}
      top = max(top, x{{ n }});
{% endfor %}
      half_row[tid] = max(max(top.x, top.y), max(top.z, top.w));
      workgroupBarrier();
      var m_new = m;
{% for n in range(WG // ROWS) %}
      m_new = max(m_new, half_row[row * {{ WG // ROWS }}u + {{ n }}u]);
{% endfor %}
      var sum = vec4<f32>();
{% for n in range(HALF) %}
      x{{ n }} = {{ "exp2_nan" if rolled else "exp2" }}(x{{ n }} - m_new);
      sum += x{{ n }};
{% endfor %}
      let fix = exp2(m - m_new);
      // compensated summation: the rounding error of a long sum would scale a whole row of o
      let add = (sum.x + sum.y) + (sum.z + sum.w);
      let kept_l = l * fix;
      l = kept_l + add;
      lost = lost * fix + ((max(kept_l, add) - l) + min(kept_l, add));
      m = m_new;
      if (piece == 0u) { factor[row] = fix; }
{% if dropout %}
      let j_first = j_of(k0 + piece * {{ 4 * HALF }}u);
{% for n in range(HALF) %}
      x{{ n }} *= kept4(vec4<u32>(t_of(a0 + row)), vec4<u32>(j_first) + vec4<u32>({{ 4 * n }}u, {{ 4 * n + 1 }}u, {{ 4 * n + 2 }}u, {{ 4 * n + 3 }}u) * dims.step);
{% endfor %}
{% endif %}
{% for n in range(HALF) %}
      sh[at + ((piece * {{ HALF }}u + {{ n }}u) ^ turn)] = x{{ n }};
{% endfor %}
      workgroupBarrier();
{% for i in range(RT) %}
      { let fix_i = factor[rg * {{ RT }}u + {{ i }}u];
{% for n in range(NV) %}
        o{{ i }}_{{ n }} *= fix_i;
{% endfor %}
      }
{% endfor %}
{{ p.weights_by_rows("o", "load_v", "k_row", "k0", "stop", DV4, NV, careful) }}
    }
  }
  workgroupBarrier();
  half_row[tid] = l + select(lost, 0.0, infinite4(vec4<f32>(l)));
  workgroupBarrier();
  if (piece == 0u && a0 + row < n_q) {
    l = half_row[tid];
{% for n in range(1, WG // ROWS) %}
    l += half_row[tid + {{ n }}u];
{% endfor %}
    let at = stat_row(a0 + row);
    let none = l == 0.0;
    // not by max, which drops a NaN on some devices
    let sum_l = select(l, 1.0, none);
    let mine = select(lse_of(m, sum_l), dims.minus_inf, none);
    var total = mine;
{% if merge %}
    let old = out_lse[at];
    total = log_add(total, old);
{% endif %}
{% if sinks %}
    let sink = bitcast<f32>(side[dims.o_sinks + i_h]);
    total = log_add(total, sink);
{% endif %}
{% if merge %}
    // the lse of large scores has lost the logarithm of its sum; the shares of a row add up to 1 all the same
    let earlier = select(exp(old - total), 0.0, old < MASKED);
    var all = select(exp(mine - total), 0.0, none) + earlier;
{% if sinks %}
    all += select(exp(sink - total), 0.0, sink < MASKED);
{% endif %}
    all = select(all, 1.0, all == 0.0);
    before[row] = earlier / all;
{% endif %}
    // stored as a divisor, because a rounded inverse would scale a whole row
    factor[row] = select(sum_l{{ " / exp(mine - total)" if merge or sinks }}{{ " * all" if merge }}, 0.0, none);
    out_lse[at] = total;
  }
  workgroupBarrier();
{% for i in range(RT) %}
  { let r = rg * {{ RT }}u + {{ i }}u;
    if (a0 + r < n_q) {
      let at = q_row(a0 + r) * {{ DV4 }}u + cg;
{% for n in range(NV) %}
      if (cg + {{ n * CG }}u < {{ DV4 }}u) {
        out_o[at + {{ n * CG }}u] = select(o{{ i }}_{{ n }} / factor[r], vec4<f32>(), factor[r] == 0.0){{ " + select(before[r] * out_o[at + " ~ n * CG ~ "u], vec4<f32>(), before[r] == 0.0)" if merge }};
      }
{% endfor %}
    }
  }
{% endfor %}
}
