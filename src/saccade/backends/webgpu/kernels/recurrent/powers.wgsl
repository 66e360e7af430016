{# e^x and functions of it, exact to about the last digit: the built-ins may lose several, which shows in products of decays #}
fn exp4(x: vec4<f32>) -> vec4<f32> {
  let n = round(clamp(x, vec4<f32>(-174.0), vec4<f32>(174.0)) * 1.44269504);
  let r = (x - n * 0.693145751953125) - n * 1.428606820e-6;
  var p = fma(r, vec4<f32>(0.000198412698), vec4<f32>(0.00138888889));
  p = fma(p, r, vec4<f32>(0.00833333333));
  p = fma(p, r, vec4<f32>(0.0416666667));
  p = fma(p, r, vec4<f32>(0.166666667));
  p = fma(p, r, vec4<f32>(0.5));
  p = fma(p, r, vec4<f32>(1.0));
  p = fma(p, r, vec4<f32>(1.0));
  // 2^n as two factors, because n may exceed the range of one
  let half = vec4<i32>(n) >> vec4<u32>(1u);
  let y = p * bitcast<vec4<f32>>((half + 127) << vec4<u32>(23u)) * bitcast<vec4<f32>>((vec4<i32>(n) - half + 127) << vec4<u32>(23u));
  return select(y, vec4<f32>(), x < vec4<f32>(-104.0));
}
fn exp1(x: f32) -> f32 { return exp4(vec4<f32>(x)).x; }
