{# the two products of attention, from workgroup memory into registers, and the loads before them
   threads: cg = tid % CG has 4 columns (and values 4 * (cg + CG n)), rg = tid / CG has RT rows
   sh: LEFT [ROWS][DC4], RIGHT [DC][CG] transposed; WEIGHTS [ROWS][CG] reuses the memory of both; then VALUES [KC][NV * CG]
   columns are swizzled by their row, so that neighbouring rows are in different banks #}
{% set DC4 = DC // 4 %}
{% set RIGHT = ROWS * DC4 %}
{# loops are unrolled where compilers profit: not on a CPU, which would compile such texts for minutes #}
{% macro each(n) %}
{% if rolled %}
for (var i = tid; i < {{ n }}u; i += {{ WG }}u) { {{ caller() }} }
{% else %}
{% for k in range((n + WG - 1) // WG) %}
{{ "if (tid + " ~ k * WG ~ "u < " ~ n ~ "u) " if (k + 1) * WG > n else "" }}{ let i = tid + {{ k * WG }}u; {{ caller() }} }
{% endfor %}
{% endif %}
{% endmacro %}
{# n steps, `by` of them unrolled in a loop's body: a longer body would not fit the instruction cache #}
{% macro steps(name, n, by) %}
{% if by >= n %}
{% for k in range(n) %}
{ {{ caller(k ~ "u") }} }
{% endfor %}
{% else %}
for (var {{ name }}0 = 0u; {{ name }}0 < {{ n }}u; {{ name }}0 += {{ by }}u) {
{% for k in range(by) %}
{ let {{ name }} = {{ name }}0 + {{ k }}u; {{ caller(name) }} }
{% endfor %}
}
{% endif %}
{% endmacro %}

{# loads ROWS rows of width W4, from row `first` on: DC numbers of each, from `c0` (in vec4) #}
{% macro stage_left(load, row, first, stop, W4) %}
{% call each(ROWS * DC4) %}
let r = i / {{ DC4 }}u; let c = i % {{ DC4 }}u;
var x = vec4<f32>();
if ({{ first }} + r < {{ stop }}) { x = {{ load }}({{ row }}({{ first }} + r) * {{ W4 }}u + c0 + c); }
sh[r * {{ DC4 }}u + (c ^ ((r / {{ RT }}u) & {{ DC4 - 1 }}u))] = x;
{% endcall %}
{% endmacro %}
{# loads 4 CG rows, transposed in registers four by four #}
{% macro stage_right(load, row, first, stop, W4) %}
{% call each(CG * DC4) %}
let c = i % {{ DC4 }}u; let n = i / {{ DC4 }}u; let r = {{ first }} + 4u * n;
var x0 = vec4<f32>(); var x1 = vec4<f32>(); var x2 = vec4<f32>(); var x3 = vec4<f32>();
{% for e in range(4) %}
if (r + {{ e }}u < {{ stop }}) { x{{ e }} = {{ load }}({{ row }}(r + {{ e }}u) * {{ W4 }}u + c0 + c); }
{% endfor %}
let at = {{ RIGHT }}u + 4u * c * {{ CG }}u + (n ^ (c & {{ CG - 1 }}u));
{% for e in "xyzw" %}
sh[at + {{ loop.index0 * CG }}u] = vec4<f32>(x0.{{ e }}, x1.{{ e }}, x2.{{ e }}, x3.{{ e }});
{% endfor %}
{% endcall %}
{% endmacro %}
{# acc_i += rows rg RT + i of LEFT times the columns of RIGHT #}
{% macro multiply(acc) %}
{% call(c) steps("c", DC4, [DC4, MULTIPLY_BY] | min) %}
{% for e in range(4) %}
let k{{ e }} = sh[{{ RIGHT + e * CG }}u + {{ c }} * {{ 4 * CG }}u + (cg ^ ({{ c }} & {{ CG - 1 }}u))];
{% endfor %}
{% for i in range(RT) %}
let q{{ i }} = sh[(rg * {{ RT }}u + {{ i }}u) * {{ DC4 }}u + ({{ c }} ^ (rg & {{ DC4 - 1 }}u))];
{{ acc }}{{ i }} = fma(vec4<f32>(q{{ i }}.w), k3, fma(vec4<f32>(q{{ i }}.z), k2, fma(vec4<f32>(q{{ i }}.y), k1, fma(vec4<f32>(q{{ i }}.x), k0, {{ acc }}{{ i }}))));
{% endfor %}
{% endcall %}
{% endmacro %}
{# acc = LEFT rows · RIGHT rows, over all numbers of a row #}
{% macro rows_by_rows(acc, left, l_row, l_first, l_stop, right, r_row, r_first, r_stop, W4) %}
for (var c0 = 0u; c0 < {{ W4 }}u; c0 += {{ DC4 }}u) {
  workgroupBarrier();
  {{ stage_left(left, l_row, l_first, l_stop, W4) }}
  {{ stage_right(right, r_row, r_first, r_stop, W4) }}
  workgroupBarrier();
  {{ multiply(acc) }}
}
{% endmacro %}

{% macro weight_at(i) %}(rg * {{ RT }}u + {{ i }}u) * {{ CG }}u{% endmacro %}
{# WEIGHTS = x_i, the four columns of this thread #}
{% macro put_weights(x) %}
{% for i in range(RT) %}
sh[{{ weight_at(i) }} + (cg ^ ((rg * {{ RT }}u + {{ i }}u) & {{ CG - 1 }}u))] = {{ x }}{{ i }};
{% endfor %}
{% endmacro %}
{# acc_i_n += WEIGHTS times rows first .. first + 4 CG (zero from stop on) of width W4. With guard, a row that is not finite is added
   only where its weight is not zero, because only some rows of the tile may see it #}
{% macro weights_by_rows(acc, load, row, first, stop, W4, NV, careful) %}
for (var kc = 0u; kc < min({{ 4 * CG }}u, {{ stop }} - {{ first }}); kc += {{ KC }}u) {
  workgroupBarrier();
  {% call each(KC * NV * CG) %}
  let r = {{ first }} + kc + i / {{ NV * CG }}u; let c = i % {{ NV * CG }}u;
  var x = vec4<f32>();
  if (r < {{ stop }} && c < {{ W4 }}u) { x = {{ load }}({{ row }}(r) * {{ W4 }}u + c); }
  sh[{{ VALUES }}u + i] = x;
  if ({{ careful }} && infinite4(x)) { atomicStore(&spoiled, 1u); }
  {% endcall %}
  workgroupBarrier();
  let guard = {{ careful }} && atomicLoad(&spoiled) != 0u;
{% if rolled %}
  {{ add_chunk(acc, NV, True) }}
{% else %}
  if (guard) {
    {{ add_chunk(acc, NV, True) }}
  } else {
    {{ add_chunk(acc, NV, False) }}
  }
{% endif %}
}
{% endmacro %}
{# a sum per chunk, because the rounding error of a running sum grows with its length #}
{% macro add_chunk(acc, NV, guard) %}
{% for n in range(NV) %}
{
{% for i in range(RT) %}
var sum{{ i }} = vec4<f32>();
{% endfor %}
{% call(k) steps("k", KC // 4, 1 if guard else [KC // 4, ADD_BY] | min) %}
{% for e in range(4) %}
let v{{ e }} = sh[{{ VALUES + e * NV * CG + n * CG }}u + {{ k }} * {{ 4 * NV * CG }}u + cg];
{% endfor %}
{% for i in range(RT) %}
let p{{ i }} = sh[{{ weight_at(i) }} + ((kc / 4u + {{ k }}) ^ ((rg * {{ RT }}u + {{ i }}u) & {{ CG - 1 }}u))];
{% if guard %}
{% for e in "xyzw" %}
sum{{ i }} += select(vec4<f32>(), p{{ i }}.{{ e }} * v{{ loop.index0 }}, has_weight(p{{ i }}.{{ e }}) | !guard);
{% endfor %}
{% else %}
sum{{ i }} = fma(vec4<f32>(p{{ i }}.w), v3, fma(vec4<f32>(p{{ i }}.z), v2, fma(vec4<f32>(p{{ i }}.y), v1, fma(vec4<f32>(p{{ i }}.x), v0, sum{{ i }}))));
{% endif %}
{% endfor %}
{% endcall %}
{% for i in range(RT) %}
{{ acc }}{{ i }}_{{ n }} += sum{{ i }};
{% endfor %}
}
{% endfor %}
{% endmacro %}
{% macro zeros(acc, NV) %}
{% for i in range(RT) %}{% for n in range(NV) %}
var {{ acc }}{{ i }}_{{ n }} = vec4<f32>();
{% endfor %}{% endfor %}
{% endmacro %}
{# products s_i to scores; rows are queries from a0, columns keys from k0; MASKED where excluded #}
{% macro score_rows(s, a0, k0, stop) %}
let j4 = vec4<i32>(i32(j_of({{ k0 }} + 4u * cg))) + vec4<i32>(0, 1, 2, 3) * i32(dims.step);
{% for i in range(RT) %}
let t4_{{ i }} = vec4<i32>(i32(t_of({{ a0 }} + rg * {{ RT }}u + {{ i }}u)));
{{ s }}{{ i }} = scores4({{ s }}{{ i }}, t4_{{ i }}, j4);
{% endfor %}
{{ exclude(s, "j4", k0, stop) }}
{% endmacro %}
{# `score_rows` with rows as keys from k0 and columns as queries from a0 #}
{% macro score_columns(s, k0, a0, stop) %}
let t4 = vec4<i32>(i32(t_of({{ a0 }} + 4u * cg))) + vec4<i32>(0, 1, 2, 3) * i32(dims.step);
{% for i in range(RT) %}
let j4_{{ i }} = vec4<i32>(i32(j_of({{ k0 }} + rg * {{ RT }}u + {{ i }}u)));
{{ s }}{{ i }} = scores4({{ s }}{{ i }}, t4, j4_{{ i }});
{% endfor %}
{{ exclude(s, "t4", a0, stop) }}
{% endmacro %}
{% macro exclude(s, columns, first, stop) %}
if (partial_seg) {
{% if one_band %}
{% for i in range(RT) %}
  {{ s }}{{ i }} = select(vec4<f32>(MASKED), {{ s }}{{ i }}, allowed4({{ "t4_" ~ i ~ ", j4" if columns == "j4" else "t4, j4_" ~ i }}));
{% endfor %}
{% else %}
  // a single copy of the test for all tiles; compilers inline it
  var seen = 0u;
  for (var e = 0u; e < {{ 4 * RT }}u; e++) {
    let row = {{ "a0" if columns == "j4" else "k0" }} + rg * {{ RT }}u + e / 4u;
    let column = {{ first }} + 4u * cg + e % 4u;
    if ({{ "allowed(t_of(row), j_of(column))" if columns == "j4" else "allowed(t_of(column), j_of(row))" }}) { seen |= 1u << e; }
  }
{% for i in range(RT) %}
  {{ s }}{{ i }} = select(vec4<f32>(MASKED), {{ s }}{{ i }}, (vec4<u32>(seen >> {{ 4 * i }}u) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>());
{% endfor %}
{% endif %}
}
if ({{ first }} + {{ 4 * CG }}u > {{ stop }}) {
  let here = vec4<u32>({{ first }} + 4u * cg) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>({{ stop }});
{% for i in range(RT) %}
  {{ s }}{{ i }} = select(vec4<f32>(MASKED), {{ s }}{{ i }}, here);
{% endfor %}
}
{% endmacro %}
