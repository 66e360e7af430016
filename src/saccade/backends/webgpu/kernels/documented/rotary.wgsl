// shared by the four rotations: this file precedes each of them.
//
// pair n of x [seq_len, heads, head_dim] is rotated by position * base^(-2 n' / head_dim), n' its number within the head.
// positions reach 65535 radians, where neither a float32 angle nor a device's sin and cos are exact enough. the angle is
// computed in units of a full turn from pairs of floats, high and low, and reduced to an eighth of a turn; its sine and
// cosine are polynomials.

// the two elements of a pair, and the cosine and sine of its angle
struct Rotation {
    at: vec2<u32>,
    c: f32,
    s: f32,
}

// 0, but not a compile-time constant: some compilers simplify (a + b) - a to b, and with it the low parts below
var<private> nought: u32;

fn kept(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) + nought);
}

fn high_half(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u);
}

// a * b, exactly
fn product(a: f32, b: f32) -> vec2<f32> {
    let p = kept(a * b);
    let a0 = high_half(a);
    let b0 = high_half(b);
    let a1 = a - a0;
    let b1 = b - b0;
    return vec2<f32>(p, ((a0 * b0 - p) + a0 * b1 + a1 * b0) + a1 * b1);
}

fn carried(high: f32, low: f32) -> vec2<f32> {
    let sum = kept(high + low);
    return vec2<f32>(sum, low - (sum - high));
}

// a * b for pairs of floats
fn times(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    let p = product(a.x, b.x);
    return carried(p.x, p.y + (a.x * b.y + a.y * b.x));
}

// a + b for pairs of floats, |a| >= |b|
fn plus(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    let sum = carried(a.x, b.x);
    return carried(sum.x, sum.y + (a.y + b.y));
}

// 2^x for -120 < x < 120
fn power_of_two(x: vec2<f32>) -> vec2<f32> {
    let whole = round(x.x);
    // y = ln 2 (x - whole) / 16, below 0.022
    let y = times(vec2<f32>(x.x - whole, x.y), vec2<f32>(0.0433217, -1.190409e-10));
    let tail = 4.1666668e-2 + y.x * (8.3333333e-3 + y.x * 1.3888889e-3);
    var e = plus(vec2<f32>(0.16666667, -4.967054e-9), vec2<f32>(y.x * tail, 0.0));
    e = plus(vec2<f32>(0.5, 0.0), times(e, y));
    e = plus(vec2<f32>(1.0, 0.0), times(e, y));
    e = plus(vec2<f32>(1.0, 0.0), times(e, y));
    for (var n = 0; n < 4; n++) { e = times(e, e); }
    return e * bitcast<f32>(u32(i32(whole) + 127) << 23u);
}

// base^(-n / pairs) / 2 pi
fn frequency(base: f32, n: u32, pairs: u32) -> vec2<f32> {
    // the device's own logarithm, and the logarithm of the remaining factor
    let guess = log2(base);
    let near_one = times(power_of_two(vec2<f32>(-guess, 0.0)), vec2<f32>(base, 0.0));
    let left = (near_one.x - 1.0) + near_one.y;
    let more = 1.442695 * left * (1.0 - left * (0.5 - left * 0.33333333));
    let whole = times(vec2<f32>(guess, more), vec2<f32>(f32(n), 0.0));
    let quotient = whole.x / f32(pairs);
    let back = product(quotient, f32(pairs));
    let rest = ((whole.x - back.x) - back.y + whole.y) / f32(pairs);
    return times(power_of_two(-carried(quotient, rest)), vec2<f32>(0.15915494, 6.4206383e-9));
}

// dims: seq_len, heads, head_dim, pos_offset. params: base, and 1 where pairs are (i, i + D/2) instead of (2i, 2i + 1)
fn rotation(n: u32, dims: vec4<u32>, params: vec4<f32>) -> Rotation {
    nought = dims.z >> 31u;
    let pairs = dims.z / 2u;
    let pair = n % pairs;
    let row = n / pairs;
    let position = f32(dims.w + row / dims.y);
    let per_token = frequency(params.x, pair, pairs);
    let turns = product(position, per_token.x);
    let part = (turns.x - round(turns.x)) + (turns.y + position * per_token.y);
    let quarter = round(4.0 * part);
    let x = 6.2831853 * (part - 0.25 * quarter);
    let z = x * x;
    let s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4));
    let c = 1.0 - 0.5 * z + z * z * (4.166664568e-2 + z * (-1.388731625e-3 + z * 2.443315712e-5));
    let swapped = select(vec2<f32>(c, s), vec2<f32>(-s, c), (i32(quarter) & 1) != 0);
    let rotated = select(swapped, -swapped, (i32(quarter) & 2) != 0);
    let start = row * dims.z;
    let at = select(vec2<u32>(2u * pair, 2u * pair + 1u), vec2<u32>(pair, pair + pairs), params.y == 1.0);
    return Rotation(start + at, rotated.x, rotated.y);
}

// the pair of this invocation: workgroups past 65535 continue in y
fn pair_of(group: vec3<u32>, groups: vec3<u32>, tid: u32) -> u32 {
    return (group.y * groups.x + group.x) * 256u + tid;
}
