{# shared by the tiled kernels: the place of a workgroup, and the score of a (query, key) pair #}
{% include "dims.wgsl" %}

// the part of the problem that this workgroup computes: one batch entry, one query head, one residue class
var<private> i_b: u32;
var<private> i_h: u32;
var<private> i_hk: u32;
var<private> i_mask: u32;
var<private> q_start: u32;
var<private> k_start: u32;
var<private> n_q: u32;
var<private> n_k: u32;
var<private> position: i32;
var<private> slope: f32;
var<private> distances_at: i32;
var<private> gates_at: u32;

fn place_class(cls: u32) {
  let at = dims.o_classes + 4u * cls;
  q_start = u32(side[at]);
  k_start = u32(side[at + 1u]);
  n_q = u32(side[at + 2u]);
  n_k = u32(side[at + 3u]);
}

// the terms that depend on positions, for the scores of a head
fn place_terms() {
{% if alibi %}
  slope = bitcast<f32>(side[dims.o_slopes + i_b * dims.slopes_stride + i_h]);
{% endif %}
{% if gates %}
  gates_at = dims.o_gates + 2u * (i_b * dims.Hq + i_h) * dims.Tk;
{% endif %}
{% if relative %}
  distances_at = i32(dims.o_distances + i_b * dims.distances_stride + i_h * dims.distances_row);
{% endif %}
{% if alibi or relative or gates %}
  position = side[dims.o_offset + i_b * dims.offset_stride];
{% endif %}
}

fn place_head(h: u32) {
  i_h = h;
  i_hk = h / dims.G;
  i_mask = u32(side[dims.o_heads + h]);
  place_terms();
{% if one_band %}
  load_band();
{% endif %}
}

// row numbers in the whole problem
fn t_of(a: u32) -> u32 { return q_start + dims.step * a; }
fn j_of(a: u32) -> u32 { return k_start + dims.step * a; }
// the first row of a class that is at least x
fn in_class(x: u32, start: u32) -> u32 { return (max(x, start) - start + dims.step - 1u) / dims.step; }
// rows [B, T, H] of the arrays as they are bound
fn q_row(a: u32) -> u32 { return (i_b * dims.Tq + t_of(a) - dims.q_base) * dims.Hq + i_h; }
fn dk_row(a: u32) -> u32 { return (i_b * dims.Tk + j_of(a) - dims.k_base) * dims.Hk + i_hk; }
{% if paged %}
// pages [n, page_size, H] are found in the block table
fn k_row(a: u32) -> u32 {
  let j = j_of(a);
  let page = u32(side[dims.o_table + i_b * dims.table_stride + j / dims.page_size]);
  return (page * dims.page_size + j % dims.page_size) * dims.Hk + i_hk;
}
{% else %}
fn k_row(a: u32) -> u32 { return dk_row(a); }
{% endif %}
// arrays of numbers per row are always bound whole
fn stat_row(a: u32) -> u32 { return (i_b * dims.Tq + t_of(a)) * dims.Hq + i_h; }

{% if one_band %}
var<private> band_d: vec2<i32>;
var<private> band_k: vec2<i32>;
var<private> band_q: vec2<i32>;
fn load_band() {
  let at = u32(side[dims.o_records + 4u]) + select(0u, i_b * 8u, side[dims.o_records + 1u] != 0);
  band_d = vec2<i32>(side[at], side[at + 1u]);
  band_k = vec2<i32>(side[at + 2u], side[at + 3u]);
  band_q = vec2<i32>(side[at + 4u], side[at + 5u]);
}
fn allowed4(t: vec4<i32>, j: vec4<i32>) -> vec4<bool> {
  let d = t - j;
  return (d >= vec4<i32>(band_d.x)) & (d <= vec4<i32>(band_d.y)) & (j >= vec4<i32>(band_k.x)) & (j < vec4<i32>(band_k.y)) &
         (t >= vec4<i32>(band_q.x)) & (t < vec4<i32>(band_q.y));
}
fn allowed(t: u32, j: u32) -> bool { return allowed4(vec4<i32>(i32(t)), vec4<i32>(i32(j))).x; }
{% else %}
// plan_encoding.py defines the layout of intervals, grids and records
fn between(at: u32, i: u32, x: i32) -> bool {
  let lo = u32(side[at]) + i_b * u32(side[at + 2u]) + i;
  let hi = u32(side[at + 1u]) + i_b * u32(side[at + 2u]) + i;
  return side[lo] <= x && x < side[hi];
}
fn in_grid(at: u32, t: u32, j: u32) -> bool {
  let cell = i_b * u32(side[at + 6u]) + (j / u32(side[at + 8u])) * u32(side[at + 5u]) + t / u32(side[at + 7u]);
  return ((u32(side[u32(side[at]) + cell / 4u]) >> (cell % 4u * 8u)) & 255u) != 0u;
}
fn residue(x: i32, s: i32) -> i32 { return ((x % s) + s) % s; }
{% for mask in masks %}
fn allowed_{{ loop.index0 }}(t: i32, j: i32) -> bool {
  let dir = dims.o_records + {{ mask.record }}u;
  let batch = select(0u, i_b, side[dir + 1u] != 0);
  var any = false;
{% for band in mask.bands %}
  {
    let f = u32(side[dir + 4u]) + (batch * {{ mask.bands | length }}u + {{ loop.index0 }}u) * 8u;
    let d = t - j;
    var ok = d >= side[f] && d <= side[f + 1u] && j >= side[f + 2u] && j < side[f + 3u] && t >= side[f + 4u] && t < side[f + 5u];
{% if band.strided %}
    let s = side[f + 6u];
    let met = residue(t - j - side[f + 7u], abs(s)) == 0;
    ok = ok && (abs(s) == 1 || met == (s > 0));
{% endif %}
{% for f in band.factors %}
{% set test = "in_grid" if f.grid else "between" %}
{% set pair = "u32(t), u32(j)" if f.grid else "u32(j), t" if f.of_keys else "u32(t), j" %}
    ok = ok && {{ "" if f.inside else "!" }}{{ test }}(dir + {{ f.place }}u, {{ pair }});
{% endfor %}
    any = any || ok;
  }
{% endfor %}
  return any;
}
{% endfor %}
// also called for rows and keys outside the problem: the result is not used then, but reads must stay inside the buffer
fn allowed(row: u32, key: u32) -> bool {
  let t = i32(min(row, dims.Tq - 1u));
  let j = i32(min(key, dims.Tk - 1u));
{% if masks | length == 1 %}
  return allowed_0(t, j);
{% else %}
  switch i_mask {
{% for mask in masks %}
    {{ "default" if loop.last else "case " ~ loop.index0 ~ "u" }}: { return allowed_{{ loop.index0 }}(t, j); }
{% endfor %}
  }
{% endif %}
}
{% endif %}

{% if dropout %}
fn mul_high(a: u32, b: u32) -> u32 {
  let a0 = a & 0xffffu; let a1 = a >> 16u; let b0 = b & 0xffffu; let b1 = b >> 16u;
  let mid = a1 * b0 + ((a0 * b0) >> 16u);
  let low = (mid & 0xffffu) + a0 * b1;
  return a1 * b1 + (mid >> 16u) + (low >> 16u);
}
// the weights that dropout keeps, by Philox-4x32-10 of (t, j / 4, b * Hq + h, 0)
fn kept(t: u32, j: u32) -> bool {
  var x = vec4<u32>(t, j >> 2u, i_b * dims.Hq + i_h, 0u);
  var key = vec2<u32>(dims.seed_low, dims.seed_high);
  for (var round = 0u; round < 10u; round++) {
    x = vec4<u32>(mul_high(0xCD9E8D57u, x.z) ^ x.y ^ key.x, 0xCD9E8D57u * x.z,
                  mul_high(0xD2511F53u, x.x) ^ x.w ^ key.y, 0xD2511F53u * x.x);
    key += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
  }
  return x[j & 3u] >= dims.drop_below;
}
fn kept4(t: vec4<u32>, j: vec4<u32>) -> vec4<f32> {
  let keep = vec4<bool>(kept(t.x, j.x), kept(t.y, j.y), kept(t.z, j.z), kept(t.w, j.w));
  return select(vec4<f32>(0.0), vec4<f32>(dims.keep_scale), keep);
}
{% endif %}

{% if bias %}
fn bias4(t: vec4<i32>, j: vec4<i32>) -> vec4<f32> {
  let a = vec4<u32>(min(t, vec4<i32>(i32(dims.Tq) - 1)));
  let b = vec4<u32>(min(j, vec4<i32>(i32(dims.Tk) - 1)));
  let at = i_b * dims.bias_b + i_h * dims.bias_h + a * dims.bias_t + b * dims.bias_j;
  return vec4<f32>(bias[at.x], bias[at.y], bias[at.z], bias[at.w]);
}
{% endif %}
{% if relative %}
// biases by distance; rows and keys beyond the last ones are clamped to the table
fn relative4(at: vec4<i32>, j: vec4<i32>) -> vec4<f32> {
  let last = i32(dims.Tk) - 1;
  let word = vec4<u32>(distances_at + min(at, vec4<i32>(last)) - min(j, vec4<i32>(last)));
  return bitcast<vec4<f32>>(vec4<i32>(side[word.x], side[word.y], side[word.z], side[word.w]));
}
{% endif %}
{% if gates %}
fn gate_sum(at: i32) -> vec2<f32> {
  let word = gates_at + 2u * u32(clamp(at, 0, i32(dims.Tk) - 1));
  return vec2<f32>(bitcast<f32>(side[word]), bitcast<f32>(side[word + 1u]));
}
fn forgotten(at: i32, j: i32) -> f32 {
  let d = gate_sum(at) - gate_sum(j);
  return d.x + d.y;
}
// sum of log gates between a key and a row; the running sums may be large, and their high parts cancel exactly
fn forgotten4(at: vec4<i32>, j: vec4<i32>) -> vec4<f32> {
  return vec4<f32>(forgotten(at.x, j.x), forgotten(at.y, j.y), forgotten(at.z, j.z), forgotten(at.w, j.w));
}
{% endif %}
{% if softcap %}
// the built-in tanh may lose half the digits of a small number
fn tanh4(x: vec4<f32>) -> vec4<f32> {
  let z = x * x;
  var p = fma(z, vec4<f32>(-0.005718377419), vec4<f32>(0.02065235935));
  p = fma(p, z, vec4<f32>(-0.05374431238));
  p = fma(p, z, vec4<f32>(0.1333150566));
  p = fma(p, z, vec4<f32>(-0.3333328366));
  let far = sign(x) * (1.0 - 2.0 / (1.0 + exp(2.0 * min(abs(x), vec4<f32>(15.0)))));
  return select(fma(x * z, p, x), far, abs(x) >= vec4<f32>(0.625));
}
{% endif %}
// products q.k to scores in log2 units; MASKED or less is excluded
fn scores4(x: vec4<f32>, t: vec4<i32>, j: vec4<i32>) -> vec4<f32> {
{% if plain %}
  return x * (dims.scale * LOG2E);
{% else %}
  var s = x * dims.scale;
{% if softcap %}
  s = dims.softcap * tanh4(s / dims.softcap);
{% endif %}
{% if bias %}
  let added = bias4(t, j);
  s += added;
{% endif %}
{% if alibi %}
  s -= slope * abs(vec4<f32>(t + position - j));
{% endif %}
{% if gates %}
  s += forgotten4(t + position, j);
{% endif %}
{% if relative %}
  let nearby = relative4(t + position, j);
  s += nearby;
{% endif %}
  let y = s * LOG2E;
  s = select(max(y, vec4<f32>(START)), y, is_nan4(y));
{% if bias %}
  // -inf excludes; tested by its bits, because WGSL does not guarantee infinities
  s = select(s, vec4<f32>(MASKED), bitcast<vec4<u32>>(added) == vec4<u32>(0xff800000u));
{% endif %}
{% if relative %}
  s = select(s, vec4<f32>(MASKED), bitcast<vec4<u32>>(nearby) == vec4<u32>(0xff800000u));
{% endif %}
  return s;
{% endif %}
}
{% if softcap %}
// derivative of the softcap at a product; 1 - tanh^2 would lose its digits where tanh is near 1
fn cap_slope4(x: vec4<f32>) -> vec4<f32> {
  let e = exp(-2.0 * min(abs(x * (dims.scale / dims.softcap)), vec4<f32>(30.0)));
  return 4.0 * e / ((1.0 + e) * (1.0 + e));
}
{% endif %}
// tests the bits, because compilers may assume x == x; for the same reason a NaN may be neither above MASKED nor unequal 0
fn is_nan4(x: vec4<f32>) -> vec4<bool> { return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u); }
// log(exp(a) + exp(b)); both may be -inf
fn log_add(a: f32, b: f32) -> f32 {
  if (a < MASKED) { return b; }
  if (b < MASKED) { return a; }
  let top = max(a, b);
  let both = a + b;
  return select(top + log(1.0 + exp((a - top) + (b - top))), both, is_nan4(vec4<f32>(both)).x);
}
// the natural lse of weights 2^(score - top) that add up to `sum`, rounded once; some devices take the log of a NaN for a number
fn lse_of(top: f32, sum: f32) -> f32 {
  let high = top * LN2;
  return high + (fma(top, LN2, -high) + top * LN2_LOW + select(log(sum), sum, is_nan4(vec4<f32>(sum)).x));
}
fn infinite4(x: vec4<f32>) -> bool {
  return any((bitcast<vec4<u32>>(x) & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u));
}
fn excluded4(s: vec4<f32>) -> vec4<bool> { return (s <= vec4<f32>(MASKED)) & !is_nan4(s); }
fn has_weight(p: f32) -> bool { return (bitcast<u32>(p) & 0x7fffffffu) != 0u; }
{% if fine or rolled | default(false) %}
// exp2 of a NaN is a number on some CPUs
fn exp2_nan(x: vec4<f32>) -> vec4<f32> { return select(exp2(x), x, is_nan4(x)); }
{% endif %}
{% if fine %}
// 2^x to half a unit in the last place; the built-in may lose two, which shows in gradients of few terms. A weight is at
// most 1; a rounded lse may exceed that, and rows beyond the last one, or whose lse is lost, may not overflow
fn exp2_fine(x: vec4<f32>) -> vec4<f32> {
  let near = clamp(x, vec4<f32>(-126.0), vec4<f32>(1.0));
  let n = round(near);
  let f = near - n;
  var p = fma(f, vec4<f32>(0.00015345811916183706), vec4<f32>(0.0013399931218953942));
  p = fma(p, f, vec4<f32>(0.009618488957449392));
  p = fma(p, f, vec4<f32>(0.0555032877696621));
  p = fma(p, f, vec4<f32>(0.24022646890630905));
  p = fma(p, f, vec4<f32>(0.6931472057372672));
  p = fma(p, f, vec4<f32>(1.0));
  let y = select(p * bitcast<vec4<f32>>((vec4<i32>(n) + 127) << vec4<u32>(23u)), vec4<f32>(), x < vec4<f32>(-126.0));
  return select(y, x, is_nan4(x));
}
// high, low: the parts of lse
fn weights4(s: vec4<f32>, high: vec4<f32>, low: vec4<f32>) -> vec4<f32> { return exp2_fine((s - high) - low); }
{% endif %}
