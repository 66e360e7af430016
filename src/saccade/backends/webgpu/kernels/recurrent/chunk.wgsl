{# shared by kernels of chunks of matrix states: the place of a workgroup, and one load function per kind of row #}
{% include "powers.wgsl" %}
// total: workgroups or invocations; read_at, write_at: offsets in buffers to read and to write; G: heads of v per head of q and k; rows: B T H,
// rows_k: B T H / G; K4, V4, W4: vectors per row of q, of v and of the state, which has one more column with a normaliser
struct Numbers {
  total: u32, read_at: u32, write_at: u32, H: u32,
  G: u32, rows: u32, rows_k: u32, K: u32,
  V: u32, K4: u32, V4: u32, W4: u32,
  scale: f32,
}
{% include "chunk_bindings.wgsl" %}
{% if "side" in names %}
// a workgroup owns a block of the results of one chunk, 64 tokens, of one head
var<private> i_head: u32;
var<private> first: u32;
var<private> count: u32;
var<private> state: u32;

// side: for each slot the row of its first token, its number of tokens, its sequence; then for each sequence its first slot, number of slots, first row and tokens
fn place(slot: u32, head: u32) {
  i_head = head;
  first = side[3u * slot];
  count = side[3u * slot + 1u];
  state = numbers.read_at + ({{ "slot" if causal else "side[3u * slot + 2u]" }} * numbers.H + head) * numbers.K * numbers.W4;
}
fn row(i: u32) -> u32 { return (first + i) * numbers.H + i_head; }
{% endif %}
{% if "qk" in names %}
fn row_k(i: u32) -> u32 { return (first + i) * (numbers.H / numbers.G) + i_head / numbers.G; }
{# the exponent is not chosen by min, which may drop a NaN #}
{% macro feature(x) %}
{% if feature_map == "elu+1" %}
select(exp4(select({{ x }}, vec4<f32>(), {{ x }} > vec4<f32>())), {{ x }} + 1.0, {{ x }} > vec4<f32>())
{%- elif feature_map == "relu" %}
select({{ x }}, vec4<f32>(), {{ x }} < vec4<f32>())
{%- elif feature_map == "exp" %}
exp4({{ x }})
{%- else %}
{{ x }}
{%- endif %}
{% endmacro %}
// features c of a row, and the factor from a gradient of them to the gradient of the row
fn mapped(x: vec4<f32>, c: u32) -> vec4<f32> {
  let y = {{ feature("x") }};
  return select(vec4<f32>(), y, vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(numbers.K));
}
fn slope(x: vec4<f32>) -> vec4<f32> {
{% if feature_map == "elu+1" %}
  return exp4(select(x, vec4<f32>(), x > vec4<f32>()));
{% elif feature_map == "relu" %}
  return select(vec4<f32>(), vec4<f32>(1.0), x > vec4<f32>());
{% elif feature_map == "exp" %}
  return exp4(x);
{% else %}
  return vec4<f32>(1.0);
{% endif %}
}
fn query_at(i: u32, c: u32) -> vec4<f32> { return qk[row_k(i) * numbers.K4 + c]; }
fn key_at(i: u32, c: u32) -> vec4<f32> { return qk[(numbers.rows_k + row_k(i)) * numbers.K4 + c]; }
fn query(i: u32, c: u32) -> vec4<f32> {
  if (i >= count || c >= numbers.K4) { return vec4<f32>(); }
  return mapped(query_at(i, c), c);
}
fn key(i: u32, c: u32) -> vec4<f32> {
  if (i >= count || c >= numbers.K4) { return vec4<f32>(); }
  return mapped(key_at(i, c), c);
}
{% if beta %}
fn value_at(i: u32, c: u32) -> vec4<f32> {
  if (i >= count || c >= numbers.V4) { return vec4<f32>(); }
  return vx[row(i) * numbers.V4 + c];
}
{% endif %}
// beta v, and 1 for a normaliser
fn value(i: u32, c: u32) -> vec4<f32> {
  var x = vec4<f32>();
  if (i >= count) { return x; }
  if (c < numbers.V4) { x = vx[row(i) * numbers.V4 + c]; }
{% if normalize %}
  if (c == numbers.V / 4u) { x[numbers.V % 4u] = 1.0; }
{% endif %}
  return x{{ " * sides[i].z" if beta }};
}
{% if "cotangent" in reads %}
// the gradient of the sums that make up a row of o
fn cotangent(i: u32, c: u32) -> vec4<f32> {
  var x = vec4<f32>();
  if (i >= count) { return x; }
  if (c < numbers.V4) { x = vx[(numbers.rows + row(i)) * numbers.V4 + c]; }
{% if normalize %}
  let by = divisors[row(i)];
  x *= by.x;
  if (c == numbers.V / 4u) { x[numbers.V % 4u] = by.y; }
  return x;
{% else %}
  return x * numbers.scale;
{% endif %}
}
{% endif %}
{% endif %}
{% if "ramps" in names and "qk" in names %}
// for each token of the chunk: b in two parts, beta, and the decay from the chunk's start to the token, or from the token to the chunk's end
var<workgroup> sides: array<vec4<f32>, 64>;
fn note_sides(tid: u32, to_end: bool) {
  if (tid < 64u) {
    // no decay after the last token
    var x = ramps[row(min(tid, count - 1u))];
{% if decay %}
    let end = ramps[row(count - 1u)];
    x.w = exp1(select(x.x, end.x - x.x, to_end) + select(x.y, end.y - x.y, to_end));
{% endif %}
    sides[tid] = x;
  }
  workgroupBarrier();
}
{% endif %}
{% if decay and "qk" in names %}
// decays between a row and four columns; by = 1: from the columns to the row, by = -1: from the row to the columns
fn between(i: u32, j: u32, by: f32) -> vec4<f32> {
  let b = sides[i];
  let b0 = sides[j];
  let b1 = sides[j + 1u];
  let b2 = sides[j + 2u];
  let b3 = sides[j + 3u];
  return exp4((b.x - vec4<f32>(b0.x, b1.x, b2.x, b3.x)) * by + (b.y - vec4<f32>(b0.y, b1.y, b2.y, b3.y)) * by);
}
{% endif %}
