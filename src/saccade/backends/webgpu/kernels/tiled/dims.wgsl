{# the numbers of a launch, whose struct backends/plan_encoding.py defines and fills (DIMS there), and logarithms #}
{% if kind == "f16" %}
enable f16;
{% endif %}
// one launch on one part of a plan; an o_ is the word of `side` at which a table starts
{{ struct_dims }}
const LOG2E = 1.44269504088896341;
const LN2 = 0.693147180559945309;
// the low parts of these constants, lost in 32-bit floats
const LOG2E_LOW = 1.92596299e-8;
const LN2_LOW = -1.90465430e-9;
// the score of a masked pair; running maxima start above it, at the lowest score that a finite bias gives
const MASKED = -3.0e38;
const START = -2.9e38;
// x log2(e) in two parts, so that 2^(x log2 e) is as exact as x
fn in_log2(x: f32) -> vec2<f32> {
  let high = x * LOG2E;
  let low = fma(x, LOG2E, -high) + x * LOG2E_LOW;
  // beyond 2^20 scores are rounded by more than the lower part can say, and equal ones must keep a difference of 0
  return vec2<f32>(high, select(low, 0.0, abs(high) > 1048576.0));
}
