// shared by the attention kernels: this file precedes each of them. all workgroups have 256 invocations.

// a replacement of minus infinity in a running maximum; exp of it is 0
const LOWEST: f32 = -3e38;

// 0 for NaN and infinity, tested by their bits: compilers may remove a comparison of x with itself
fn nan_guard(x: f32) -> f32 {
    return select(x, 0.0, (bitcast<u32>(x) & 0x7f800000u) == 0x7f800000u);
}

// products over a block of 256 keys: invocation 4 g + lane sums its quarter of the columns for the keys g + 64 n,
// n < 4, and then owns the key g + 64 lane
fn key_of(tid: u32) -> u32 {
    return tid / 4u + 64u * (tid & 3u);
}

// (x[lane], x[lane + 1], ..) for lane in 0..3, indices modulo 4
fn turn(x: vec4<f32>, lane: u32) -> vec4<f32> {
    let half = select(x, x.yzwx, (lane & 1u) != 0u);
    return select(half, half.zwxy, (lane & 2u) != 0u);
}

// the invocation of the same four lanes that is `by` lanes further on
fn slot(tid: u32, by: u32) -> u32 {
    return (tid & ~3u) | ((tid + by) & 3u);
}

// sums over keys of whole rows of D columns. column c < width, with c + width, c + 2 width, c + 3 width, is summed by
// `chunks` invocations, each over every `chunks`-th key. columns beyond D - 1 repeat it and are dropped at the end.
// invocations that are not needed have a chunk beyond all keys of a block.
struct ColumnShare {
    width: u32,
    chunk: u32,
    chunks: u32,
    cols: vec4<u32>,
}

fn column_share(tid: u32, D: u32) -> ColumnShare {
    let width = (D + 3u) / 4u;
    let chunks = 256u / width;
    let chunk = tid / width;
    let cols = min(tid % width + width * vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(D - 1u));
    return ColumnShare(width, select(0x10000000u, chunk, chunk < chunks), chunks, cols);
}

// reductions: on devices with subgroups, prelude_subgroups.wgsl may replace this line and all lines below it.
//
// the maximum or sum over the workgroup, the same bits in every invocation and in every run. all invocations must call
// these in uniform control flow; a barrier must separate their return from the next write of wg_scratch.

var<workgroup> wg_scratch: array<f32, 256>;

fn wg_reduce_max(tid: u32, x: f32) -> f32 {
    wg_scratch[tid] = x;
    workgroupBarrier();
    // 256 -> 32 -> 4, then every invocation reduces the 4
    if (tid < 32u) {
        var m = x;
        for (var i = tid + 32u; i < 256u; i += 32u) { m = max(m, wg_scratch[i]); }
        wg_scratch[tid] = m;
    }
    workgroupBarrier();
    if (tid < 4u) {
        var m = wg_scratch[tid];
        for (var i = tid + 4u; i < 32u; i += 4u) { m = max(m, wg_scratch[i]); }
        wg_scratch[tid] = m;
    }
    workgroupBarrier();
    return max(max(wg_scratch[0], wg_scratch[1]), max(wg_scratch[2], wg_scratch[3]));
}

fn wg_reduce_sum(tid: u32, x: f32) -> f32 {
    wg_scratch[tid] = x;
    workgroupBarrier();
    if (tid < 32u) {
        var sum = x;
        for (var i = tid + 32u; i < 256u; i += 32u) { sum += wg_scratch[i]; }
        wg_scratch[tid] = sum;
    }
    workgroupBarrier();
    if (tid < 4u) {
        var sum = wg_scratch[tid];
        for (var i = tid + 4u; i < 32u; i += 4u) { sum += wg_scratch[i]; }
        wg_scratch[tid] = sum;
    }
    workgroupBarrier();
    return (wg_scratch[0] + wg_scratch[1]) + (wg_scratch[2] + wg_scratch[3]);
}
