{# names in binding order; arrays that a kernel writes are named out_* #}
{% set KINDS = {"side": "array<u32>", "divisors": "array<vec2<f32>>", "out_divisors": "array<vec2<f32>>", "given": "array<f32>", "passed": "array<f32>", "out_passed": "array<f32>", "out_dg": "array<f32>", "out_total": "array<f32>", "total": "array<f32>"} %}
{% for name in names %}
@group(0) @binding({{ loop.index0 }}) var<storage, {{ "read_write" if name.startswith("out_") else "read" }}> {{ name }}: {{ KINDS.get(name, "array<vec4<f32>>") }};
{% endfor %}
@group(0) @binding({{ names | length }}) var<uniform> numbers: Numbers;
