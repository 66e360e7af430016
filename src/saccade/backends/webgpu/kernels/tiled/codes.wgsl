{# loads four numbers at once of rows that are codes: name is an array of words, row its layout (codes.py), W4 vectors per row #}
{% macro load(name, row, W4) %}
// bfloat16, two per word
fn scale_{{ name }}(at: u32, n: u32) -> f32 {
  return bitcast<f32>(({{ name }}[at + {{ row.words }}u + n / 2u] >> (n % 2u * 16u)) << 16u);
}
fn load_{{ name }}(i: u32) -> vec4<f32> {
  let at = i / {{ W4 }}u * {{ row.size }}u;
  let c = i % {{ W4 }}u;
{% if row.kind == "int8" %}
  let x = vec4<f32>((vec4<i32>(bitcast<i32>({{ name }}[at + c])) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u));
{% elif row.kind == "int4" %}
  // the high bits contain the second half of a row
  let word = {{ name }}[at + c % {{ row.words }}u] >> (c / {{ row.words }}u * 4u);
  let x = vec4<f32>((vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(15u)) - 8.0;
{% else %}
  // e4m3: moves the exponent to its place in float32; subnormal numbers are handled apart
  let code = (vec4<u32>({{ name }}[at + c]) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
  let body = code & vec4<u32>(127u);
  let small = bitcast<vec4<u32>>(vec4<f32>(body) * 0.001953125);
  var bits = select((body << vec4<u32>(20u)) + vec4<u32>(120u << 23u), small, body < vec4<u32>(8u));
  bits = select(bits, vec4<u32>(0x7fc00000u), body == vec4<u32>(127u));
  let x = bitcast<vec4<f32>>(bits | ((code & vec4<u32>(128u)) << vec4<u32>(24u)));
{% endif %}
{% if row.scales == 1 %}
  return x * scale_{{ name }}(at, 0u);
{% elif row.group % 4 == 0 %}
  return x * scale_{{ name }}(at, c / {{ row.group // 4 }}u);
{% else %}
  // the padding of the last vector has no scale of its own
  let n = min((4u * c + vec4<u32>(0u, 1u, 2u, 3u)) / {{ row.group }}u, vec4<u32>({{ row.scales - 1 }}u));
  return x * vec4<f32>({% for e in "xyzw" %}{{ ", " if not loop.first }}scale_{{ name }}(at, n.{{ e }}){% endfor %});
{% endif %}
}
{% endmacro %}
