{# shared by kernels of the selective scan: an invocation has one channel and four of its slots; N4 invocations share each of `channels` channels #}
{% include "powers.wgsl" %}
// total: workgroups; rows: B T; D channels of N4 vectors of slots, in G groups; slots: pieces of {{ KEEP }} tokens; write_at: offset in `kept`
struct Numbers { total: u32, rows: u32, D: u32, N4: u32, G: u32, channels: u32, slots: u32, serial: u32 }
{% set KINDS = {"side": "array<u32>", "rows": "array<f32>", "out_y": "array<f32>", "out_rows": "array<f32>"} %}
{% for name in names %}
@group(0) @binding({{ loop.index0 }}) var<storage, {{ "read_write" if name.startswith("out_") else "read" }}> {{ name }}: {{ KINDS.get(name, "array<vec4<f32>>") }};
{% endfor %}
@group(0) @binding({{ names | length }}) var<uniform> numbers: Numbers;

// log(1 + y) for 0 <= y <= 1, as 2 artanh(y / (2 + y))
fn log1p(y: f32) -> f32 {
  let s = y / (2.0 + y);
  let x = s * s;
  var p = fma(x, 0.0666666667, 0.0769230769);
  p = fma(p, x, 0.0909090909);
  p = fma(p, x, 0.111111111);
  p = fma(p, x, 0.142857143);
  p = fma(p, x, 0.2);
  p = fma(p, x, 0.333333333);
  return 2.0 * fma(s * x, p, s);
}
fn sigmoid(x: f32) -> f32 {
  let e = exp1(-abs(x));
  return select(1.0, e, x < 0.0) / (1.0 + e);
}
// rows are u, delta{{ ", z" if gate }}{{ ", dy" if backward }}, each [B T, D], one after the other
fn of_row(n: u32, t: u32, d: u32) -> f32 { return rows[(n * numbers.rows + t) * numbers.D + d]; }
{# params: A, then B and C where they are fixed in time, each [D, N4]; then (D, delta_bias) of each channel #}
fn sides(d: u32) -> vec4<f32> { return params[{{ 1 + fixed_B + fixed_C }}u * numbers.D * numbers.N4 + d]; }
fn raw_step(t: u32, d: u32) -> f32 { return of_row(1u, t, d){{ " + sides(d).y" if bias }}; }
fn step_of(raw: f32) -> f32 { return {{ "max(raw, 0.0) + log1p(exp1(-abs(raw)))" if softplus else "raw" }}; }
fn B_at(t: u32, d: u32, lane: u32) -> vec4<f32> {
{% if fixed_B %}
  return params[(numbers.D + d) * numbers.N4 + lane];
{% else %}
  return mix[(t * numbers.G + d / (numbers.D / numbers.G)) * numbers.N4 + lane];
{% endif %}
}
fn C_at(t: u32, d: u32, lane: u32) -> vec4<f32> {
{% if fixed_C %}
  return params[({{ 1 + fixed_B }}u * numbers.D + d) * numbers.N4 + lane];
{% else %}
  return mix[({{ "" if fixed_B else "numbers.rows * numbers.G + " }}t * numbers.G + d / (numbers.D / numbers.G)) * numbers.N4 + lane];
{% endif %}
}
fn total4(x: vec4<f32>) -> f32 { return (x.x + x.y) + (x.z + x.w); }
{% if backward %}
// the gradient of C · h + D u
fn dinner(t: u32, d: u32) -> f32 {
  let dy = of_row({{ 2 + gate }}u, t, d);
{% if gate %}
  let z = of_row(2u, t, d);
  return dy * (z * sigmoid(z));
{% else %}
  return dy;
{% endif %}
}
{% endif %}
