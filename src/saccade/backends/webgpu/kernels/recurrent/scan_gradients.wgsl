{% set backward = true %}
{% set names = ["rows", "params"] + ([] if fixed_B and fixed_C else ["mix"]) + ["kept", "side", "out_rows", "out_parts"] + ([] if fixed_B and fixed_C else ["out_mix"]) %}
{% include "scan.wgsl" %}
{% set MIXED = ([] if fixed_B else ["B"]) + ([] if fixed_C else ["C"]) %}
// all gradients of a piece of {{ KEEP }} tokens, from the states before it and the gradients after it. A workgroup goes through `serial` blocks of
// channels of a group, and sums over them the gradients that channels share: out_mix [blocks, {{ MIXED | length }}, B T, G, N4]. Gradients that tokens share
// have a part per piece: out_parts [of A{{ ", B" if fixed_B }}{{ ", C" if fixed_C }}: pieces, D, N4], then (dD, dbias) [pieces, D]
var<workgroup> sh: array<f32, {{ 3 * KEEP * 64 }}>;
var<workgroup> four: array<vec4<f32>, 256>;
@compute @workgroup_size(64)
fn scan_gradients(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let id = group.y * 32768u + group.x;
  if (id >= numbers.total) { return; }
  let channels = numbers.channels;
  let N4 = numbers.N4;
  let of_group = numbers.D / numbers.G;
  let blocks = (of_group + channels * numbers.serial - 1u) / (channels * numbers.serial);
  let block = id % blocks;
  let i_group = id / blocks % numbers.G;
  let slot = id / (blocks * numbers.G);
  let first = side[3u * slot];
  let count = side[3u * slot + 1u];
  let lane = min(tid / channels, N4 - 1u);
  let column = tid % channels;
  let part = numbers.slots * numbers.D * N4;
{% for name in MIXED %}
  var d{{ name }}: array<vec4<f32>, {{ KEEP }}>;
{% endfor %}
  for (var n = 0u; n < numbers.serial; n++) {
    let c0 = (block * numbers.serial + n) * channels;
    let here = tid / channels < N4 && c0 + column < of_group;
    let d0 = i_group * of_group + c0;
    let d = i_group * of_group + min(c0 + column, of_group - 1u);
    let at = (slot * numbers.D + d) * N4 + lane;
    let rate = params[d * N4 + lane];
    var h = kept[at];
    var before: array<vec4<f32>, {{ KEEP }}>;
    for (var i = 0u; i < count; i++) {
      before[i] = h;
      let step = step_of(raw_step(first + i, d));
      h = fma(exp4(step * rate), h, (step * of_row(0u, first + i, d)) * B_at(first + i, d, lane));
    }
    var g = kept[part + at];
    var drate = vec4<f32>();
{% if fixed_B %}
    var dB = vec4<f32>();
{% endif %}
{% if fixed_C %}
    var dC = vec4<f32>();
{% endif %}
    for (var left = count; left > 0u; left--) {
      let i = left - 1u;
      let t = first + i;
      let step = step_of(raw_step(t, d));
      let added = select(0.0, step * of_row(0u, t, d), here);
      let dp = select(0.0, dinner(t, d), here);
      let a = exp4(step * rate);
      let B = B_at(t, d, lane);
      let C = C_at(t, d, lane);
      h = fma(a, before[i], added * B);
      g = fma(C, vec4<f32>(dp), g);
      dB{{ "" if fixed_B else "[i]" }} += {{ "g * added" if fixed_B else "select(vec4<f32>(), g * added, here)" }};
      dC{{ "" if fixed_C else "[i]" }} += h * dp;
      let through = g * a * before[i];
      drate = fma(through, vec4<f32>(step), drate);
      sh[i * 64u + tid] = total4(g * B);
      sh[({{ KEEP }}u + i) * 64u + tid] = total4(through * rate);
      sh[({{ 2 * KEEP }}u + i) * 64u + tid] = total4(C * h);
      g = a * g;
    }
    if (here) {
      out_parts[at] = drate;
{% if fixed_B %}
      out_parts[part + at] = dB;
{% endif %}
{% if fixed_C %}
      out_parts[{{ 1 + fixed_B }}u * part + at] = dC;
{% endif %}
    }
    workgroupBarrier();
    var dskip = 0.0;
    var dbias = 0.0;
    if (here) {
      for (var i = lane; i < count; i += N4) {
        let t = first + i;
        var through_B = 0.0;
        var through_a = 0.0;
        var inner = 0.0;
        for (var l = 0u; l < N4; l++) {
          let from_lane = l * channels + column;
          through_B += sh[i * 64u + from_lane];
          through_a += sh[({{ KEEP }}u + i) * 64u + from_lane];
          inner += sh[({{ 2 * KEEP }}u + i) * 64u + from_lane];
        }
        let u = of_row(0u, t, d);
        let raw = raw_step(t, d);
        let dp = dinner(t, d);
        let dstep = fma(u, through_B, through_a);
        let draw = dstep{{ " * sigmoid(raw)" if softplus }};
        let out = t * numbers.D + d;
        out_rows[out] = step_of(raw) * through_B{{ " + sides(d).x * dp" if skip }};
        out_rows[numbers.rows * numbers.D + out] = draw;
{% if gate %}
        let z = of_row(2u, t, d);
        let y = inner{{ " + sides(d).x * u" if skip }};
        out_rows[2u * numbers.rows * numbers.D + out] = of_row(3u, t, d) * y * sigmoid(z) * fma(z, sigmoid(-z), 1.0);
{% endif %}
        dskip = fma(dp, u, dskip);
        dbias += draw;
      }
    }
    four[tid] = vec4<f32>(dskip, dbias, 0.0, 0.0);
    workgroupBarrier();
    if (tid < channels && here) {
      var sum = vec4<f32>();
      for (var l = 0u; l < N4; l++) { sum += four[l * channels + column]; }
      out_parts[{{ 1 + fixed_B + fixed_C }}u * part + slot * numbers.D + d] = sum;
    }
  }
{% for name in MIXED %}
  for (var i0 = 0u; i0 < count; i0 += 4u) {
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) { four[i * 64u + tid] = d{{ name }}[i0 + i]; }
    workgroupBarrier();
    for (var i = tid; i < 4u * N4; i += 64u) {
      let t = i0 + i / N4;
      var sum = vec4<f32>();
      for (var c = 0u; c < channels; c++) { sum += four[i / N4 * 64u + i % N4 * channels + c]; }
      if (t < count) { out_mix[(((block * {{ MIXED | length }}u + {{ loop.index0 }}u) * numbers.rows + first + t) * numbers.G + i_group) * N4 + i % N4] = sum; }
    }
  }
{% endfor %}
}
