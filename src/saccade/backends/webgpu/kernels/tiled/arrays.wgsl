{# how arrays are bound and read: f32, halves (shader-f16), halves packed in words; keys and values also as eight halves at once, or codes #}
{% import "codes.wgsl" as coded %}
{% set codes = codes | default(none) %}
{% set TYPES = {"f32": "array<vec4<f32>>", "f16": "array<vec4<f16>>", "packed": "array<vec2<u32>>"} %}
{% set WIDE = {"f32": "x", "f16": "vec4<f32>(x)", "packed": "vec4<f32>(unpack2x16float(x.x), unpack2x16float(x.y))"} %}
{% set KEYS_TYPE = "array<u32>" if codes else "array<vec4<u32>>" if eights | default(false) else TYPES[kind] %}
{# names in binding order; arrays that a kernel writes are named out_*, and arrays of numbers per row are scalars #}
{% macro bindings(names) %}
{% for name in names %}
{% set access = "read_write" if name.startswith("out_") else "read" %}
{% if name == "dims" %}
@group(0) @binding({{ loop.index0 }}) var<uniform> dims: Dims;
{% else %}
@group(0) @binding({{ loop.index0 }}) var<storage, {{ access }}> {{ name }}: {{ {"side": "array<i32>", "out_sums": "array<vec2<f32>>", "q": TYPES[kind], "k": KEYS_TYPE, "v": KEYS_TYPE, "dout": TYPES[kind], "bias": "array<f32>", "lse": "array<f32>", "dlse": "array<f32>", "out_lse": "array<f32>", "out_dbias": "array<f32>", "out_dslopes": "array<f32>"}.get(name, "array<vec4<f32>>") }};
{% endif %}
{% endfor %}
{% for name in names if name in ("q", "k", "v", "dout") and not (name in ("k", "v") and (codes or eights | default(false))) %}
fn load_{{ name }}(i: u32) -> vec4<f32> { let x = {{ name }}[i]; return {{ WIDE[kind] }}; }
{% endfor %}
{% if codes and "k" in names %}
{{ coded.load("k", codes.k, D4) }}
{{ coded.load("v", codes.v, DV4) }}
{% endif %}
{% endmacro %}
