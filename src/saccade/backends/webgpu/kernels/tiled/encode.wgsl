{% set COUNT = row.scales %}
{% set TOP = {"int8": "127.0", "int4": "8.0", "fp8": "448.0"}[row.kind] %}
// one workgroup per row of {{ N }} numbers: first computes its scales, then its codes
@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> out_rows: array<u32>;
@group(0) @binding(2) var<uniform> dims: vec4<u32>;
// bits of bfloat16
var<workgroup> scales: array<u32, {{ COUNT }}>;

fn number(i: u32) -> f32 { return {{ "unpack2x16float(x[i / 2u])[i % 2u]" if halves else "bitcast<f32>(x[i])" }}; }
// exact where the quotient fits 16 bits, as at ties of rounding; the built-in division may be wrong in the last bits
fn quotient(a: f32, b: f32) -> f32 {
  let q = a / b;
  let near = bitcast<f32>((bitcast<u32>(q) + 0x80u) & 0xffffff00u);
  return select(q, near, near * b == a);
}
fn scale_of(first: u32, n: u32) -> u32 {
  var top = 0u;
  for (var i = n * {{ row.group }}u; i < min((n + 1u) * {{ row.group }}u, {{ N }}u); i++) {
    let bits = bitcast<u32>(number(first + i));
{% if row.kind == "int4" %}
    // the number of largest size with its sign; of two opposite numbers the positive one
    let size = bits & 0x7fffffffu;
    let largest = top & 0x7fffffffu;
    if (size > largest || (size == largest && bits < top)) { top = bits; }
{% else %}
    top = max(top, bits & 0x7fffffffu);
{% endif %}
  }
  let size = top & 0x7fffffffu;
  if (size == 0u) { return 0u; }
  if (size >= 0x7f800000u) { return 0x7fc0u; }
  // rounded away from 0, and never subnormal
  let least = max(bitcast<u32>(quotient(bitcast<f32>(size), {{ TOP }})), 0x00800000u);
  return ((least + 0xffffu) >> 16u){{ " | ((~top >> 16u) & 0x8000u)" if row.kind == "int4" }};
}
fn code(first: u32, i: u32) -> u32 {
{% set ZERO = "8u" if row.kind == "int4" else "0u" %}
  if (i >= {{ N }}u) { return {{ ZERO }}; }
  let scale = scales[i / {{ row.group }}u];
  if (scale == 0u || scale == 0x7fc0u) { return {{ ZERO }}; }
  let ratio = quotient(number(first + i), bitcast<f32>(scale << 16u));
{% if row.kind == "int8" %}
  return bitcast<u32>(i32(clamp(round(ratio), -127.0, 127.0))) & 255u;
{% elif row.kind == "int4" %}
  return u32(i32(clamp(round(ratio), -8.0, 7.0)) + 8);
{% else %}
  // three bits after the first, rounded to nearest even; subnormal numbers are multiples of 2^-9
  let bits = bitcast<u32>(ratio);
  let body = bits & 0x7fffffffu;
  let normal = min(((body + 0x7ffffu + ((body >> 20u) & 1u)) >> 20u) - 960u, 126u);
  return select(normal, u32(round(abs(ratio) * 512.0)), body < 0x3c800000u) | ((bits >> 24u) & 128u);
{% endif %}
}

@compute @workgroup_size(64)
fn encode(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let one = group.y * 32768u + group.x;
  if (one >= dims.x) { return; }
  let first = one * {{ N }}u;
  for (var n = tid; n < {{ COUNT }}u; n += 64u) { scales[n] = scale_of(first, n); }
  workgroupBarrier();
  let at = one * {{ row.size }}u;
  for (var w = tid; w < {{ row.words }}u; w += 64u) {
    var word = 0u;
    for (var e = 0u; e < 4u; e++) {
      word |= code(first, 4u * w + e) << (8u * e);
{% if row.kind == "int4" %}
      word |= code(first, {{ 4 * row.words }}u + 4u * w + e) << (8u * e + 4u);
{% endif %}
    }
    out_rows[at + w] = word;
  }
  for (var n = 2u * tid; n < {{ COUNT }}u; n += 128u) {
    var word = scales[n];
    if (n + 1u < {{ COUNT }}u) { word |= scales[n + 1u] << 16u; }
    out_rows[at + {{ row.words }}u + n / 2u] = word;
  }
}
