{% import "arrays.wgsl" as arrays with context %}
{% include "common.wgsl" %}
// Gradient of a bias by distance: P (dO Vᵀ - Δ) summed along its diagonal, one invocation per distance, rows in ascending order.
//   grid: (blocks of 64 distances, heads, batch entries that have distances of their own)
{{ arrays.bindings(["q", "k", "v", "dout", "stats", "out_dbias", "side", "dims"] + (["bias"] if bias else [])) }}
@compute @workgroup_size(64)
fn distances(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let n = dims.distances_row;
  let at = group.x * 64u + tid;
  if (at >= n) { return; }
  let distance = i32(at) - i32(n - dims.Tk);
  var sum = 0.0;
  // compensated summation: the part of the sum lost by rounding
  var lost = 0.0;
  for (var b = group.z; b < {{ "group.z + 1u" if each_b else "dims.B" }}; b++) {
    i_b = b;
    for (var cls = 0u; cls < dims.n_classes; cls++) {
      place_class(cls);
      place_head(group.y);
      for (var a = 0u; a < n_q; a++) {
        let t = t_of(a);
        let from_start = i32(t) + position - distance - i32(k_start);
        let c = u32(from_start) / dims.step;
        if (from_start < 0 || c * dims.step != u32(from_start) || c >= n_k || !allowed(t, j_of(c))) { continue; }
        var x = vec4<f32>();
        for (var d = 0u; d < {{ D4 }}u; d++) { x += load_q(q_row(a) * {{ D4 }}u + d) * load_k(k_row(c) * {{ D4 }}u + d); }
        var dp = vec4<f32>();
        for (var d = 0u; d < {{ DV4 }}u; d++) { dp += load_dout(q_row(a) * {{ DV4 }}u + d) * load_v(k_row(c) * {{ DV4 }}u + d); }
        let s = scores4(vec4<f32>((x.x + x.y) + (x.z + x.w)), vec4<i32>(i32(t)), vec4<i32>(i32(j_of(c))));
        if (s.x <= MASKED) { continue; }
        let stat = stats[stat_row(a)];
        let keep = {{ "select(0.0, dims.keep_scale, kept(t, j_of(c)))" if dropout else "1.0" }};
        let more = weights4(s, stat.xxxx, stat.yyyy).x * (((dp.x + dp.y) + (dp.z + dp.w)) * keep - stat.z);
        let old = sum;
        sum += more;
        lost += select((old - sum) + more, (more - sum) + old, abs(old) < abs(more));
      }
    }
  }
  out_dbias[(group.z * dims.Hq + group.y) * n + at] += sum + lost;
}
