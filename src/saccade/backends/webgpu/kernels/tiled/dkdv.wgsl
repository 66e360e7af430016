{% import "arrays.wgsl" as arrays with context %}
{% import "products.wgsl" as p with context %}
{% include "common.wgsl" %}
{% set careful = "true" if bias or relative else "partial_seg" %}
// dK and dV: a workgroup owns {{ ROWS }} keys of one key head and walks the queries of {{ "one head" if spread else "every head" }} of its group that see them.
//   Pᵀ = 2^(K Qᵀ - lse)   dV += Pᵀ dO   dSᵀ = Pᵀ (V dOᵀ - Δ) scale   dK += dSᵀ Q
{{ arrays.bindings(["q", "k", "v", "dout", "stats", "out_dk", "out_dv", "side", "dims"] + (["bias"] if bias else [])) }}
var<workgroup> sh: array<vec4<f32>, {{ SHARED }}>;
var<workgroup> spoiled: atomic<u32>;

@compute @workgroup_size({{ WG }})
fn dkdv(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let cg = tid % {{ CG }}u;
  let rg = tid / {{ CG }}u;
  let b = dims.first_batch + group.z;
  let tile = dims.first_tile + group.y % dims.tile_count;
  let cls = group.y / dims.tile_count;
  i_b = b;
  place_class(cls);
  let q_low = in_class(dims.q_lo, u32(side[dims.o_classes + 4u * cls]));
  let q_high = in_class(dims.q_hi, u32(side[dims.o_classes + 4u * cls]));
  let k0 = tile * {{ ROWS }}u;
{{ p.zeros("dk", NK) }}
{{ p.zeros("dv", NV) }}
  for (var h = {{ "group.x" if spread else "group.x * dims.G" }}; h < {{ "group.x + 1u" if spread else "(group.x + 1u) * dims.G" }}; h++) {
    place_head(h);
    let list = dims.o_tptr + ((cls * dims.n_masks + u32(side[dims.o_heads + h])) * dims.mask_batches + select(0u, b, dims.mask_batches > 1u)) * dims.t_tiles + tile;
    for (var n = side[list]; n < side[list + 1u]; n++) {
      let seg = dims.o_tseg + 3u * u32(n);
      let stop = min(u32(side[seg + 1u]), q_high);
      let partial_seg = side[seg + 2u] == 1;
      for (var a0 = max(u32(side[seg]), q_low); a0 < stop; a0 += {{ 4 * CG }}u) {
{% for i in range(RT) %}
        var s{{ i }} = vec4<f32>();
        var dp{{ i }} = vec4<f32>();
{% endfor %}
{{ p.rows_by_rows("s", "load_k", "k_row", "k0", "n_k", "load_q", "q_row", "a0", "stop", D4) }}
{{ p.rows_by_rows("dp", "load_v", "k_row", "k0", "n_k", "load_dout", "q_row", "a0", "stop", DV4) }}
        var high4 = vec4<f32>();
        var low4 = vec4<f32>();
        var delta4 = vec4<f32>();
{% for e in range(4) %}
        if (a0 + 4u * cg + {{ e }}u < stop) {
          let stat = stats[stat_row(a0 + 4u * cg + {{ e }}u)];
          high4[{{ e }}] = stat.x;
          low4[{{ e }}] = stat.y;
          delta4[{{ e }}] = stat.z;
        }
{% endfor %}
{% if softcap %}
{% for i in range(RT) %}
        let cap{{ i }} = cap_slope4(s{{ i }});
{% endfor %}
{% endif %}
{{ p.score_columns("s", "k0", "a0", "stop") }}
{% for i in range(RT) %}
        s{{ i }} = select(weights4(s{{ i }}, high4, low4), vec4<f32>(), excluded4(s{{ i }}));
{% if dropout %}
        let keep{{ i }} = kept4(vec4<u32>(t4), vec4<u32>(j4_{{ i }}));
        let w{{ i }} = s{{ i }} * keep{{ i }};
        dp{{ i }} *= keep{{ i }};
{% endif %}
        dp{{ i }} = select(s{{ i }} * (dp{{ i }} - delta4) * (dims.scale{{ " * cap" ~ i if softcap }}), vec4<f32>(), s{{ i }} == vec4<f32>());
{% endfor %}
        workgroupBarrier();
{{ p.put_weights("w" if dropout else "s") }}
{{ p.weights_by_rows("dv", "load_dout", "q_row", "a0", "stop", DV4, NV, careful) }}
        workgroupBarrier();
{{ p.put_weights("dp") }}
{{ p.weights_by_rows("dk", "load_q", "q_row", "a0", "stop", D4, NK, careful) }}
      }
    }
  }
  i_h = 0u;
{% for i in range(RT) %}
  if (k0 + rg * {{ RT }}u + {{ i }}u < n_k) {
    let at = dk_row(k0 + rg * {{ RT }}u + {{ i }}u){{ " + group.x % dims.G * dims.rows" if spread }};
{% for n in range(NK) %}
    if (cg + {{ n * CG }}u < {{ D4 }}u) { out_dk[at * {{ D4 }}u + cg + {{ n * CG }}u] += dk{{ i }}_{{ n }}; }
{% endfor %}
{% for n in range(NV) %}
    if (cg + {{ n * CG }}u < {{ DV4 }}u) { out_dv[at * {{ DV4 }}u + cg + {{ n * CG }}u] += dv{{ i }}_{{ n }}; }
{% endfor %}
  }
{% endfor %}
}
