{# products of tiles in workgroup memory: 64 rows by 64 columns, four by four per invocation of 256, in steps of 16 #}
{# a tile is [16, 64], the sum runs over its first index. natural: vectors in their own order, one per invocation #}
{% macro natural(place) %}
sh[{{ place }}u + tid] = {{ caller("tid / 16u", "tid % 16u") }};
{% endmacro %}
{# transposed: rows of four vectors each, transposed in registers four by four, by the 64 invocations from 64 `part` on #}
{% macro transposed(place, part) %}
if (tid / 64u == {{ part }}u) {
  let c = tid % 4u;
  let g = tid % 64u / 4u;
{% for e in range(4) %}
  let x{{ e }} = {{ caller("(4u * g + " ~ e ~ "u)", "c") }};
{% endfor %}
{% for e in "xyzw" %}
  sh[{{ place }}u + 64u * c + {{ 16 * loop.index0 }}u + g] = vec4<f32>(x0.{{ e }}, x1.{{ e }}, x2.{{ e }}, x3.{{ e }});
{% endfor %}
}
{% endmacro %}
{# acc += left right for each (acc, place of right); extra is code to run in each step, in terms of a and k #}
{% macro multiply(pairs, extra="") %}
for (var k0 = 0u; k0 < 16u; k0 += {{ BY }}u) {
{% for n in range(BY) %}
  { let k = k0 + {{ n }}u;
    let a = sh[k * 16u + rg];
    {{ extra }}
{% for acc, place in pairs %}
    { let b = sh[{{ place }}u + k * 16u + cg];
{% for i in range(4) %}
      {{ acc }}{{ i }} = fma(vec4<f32>(a.{{ "xyzw"[i] }}), b, {{ acc }}{{ i }});
{% endfor %}
    }
{% endfor %}
  }
{% endfor %}
}
{% endmacro %}
{% macro zeros(acc) %}
{% for i in range(4) %}
var {{ acc }}{{ i }} = vec4<f32>();
{% endfor %}
{% endmacro %}
