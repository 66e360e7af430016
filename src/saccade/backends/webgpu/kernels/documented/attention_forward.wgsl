// causal attention of a packed sequence with online softmax, one workgroup per query and head.
//   s[k] = scale q . k,  O = sum_k softmax(s)[k] v[k],  LSE = log sum_k exp s[k],  keys seg[i] <= k <= i
// keys come in blocks of 256. scores: 4 lanes per key, 4 keys per lane, so that neighbours read neighbouring words.
// values: column_share, sums kept by each invocation to the end. grid (seq_len, n_heads, 1).

@group(0) @binding(0) var<storage, read> Q: array<f32>;
@group(0) @binding(1) var<storage, read> K: array<f32>;
@group(0) @binding(2) var<storage, read> V: array<f32>;
@group(0) @binding(3) var<storage, read_write> O: array<f32>;
@group(0) @binding(4) var<storage, read_write> LSE: array<f32>;
// seq_len, n_heads, n_kv_heads, head_dim
@group(0) @binding(5) var<uniform> dims: vec4<u32>;
// scale
@group(0) @binding(6) var<uniform> params: vec4<f32>;
// the first token of each query's document
@group(0) @binding(7) var<storage, read> seg: array<u32>;

var<workgroup> sh_q: array<f32, 256>;
var<workgroup> sh_p: array<f32, 256>;
var<workgroup> sh_acc: array<f32, 256>;
var<workgroup> sh_max: array<f32, 1>;
var<workgroup> sh_lse: array<f32, 1>;

// q . k of the key k0 + key_of(tid), whose rows start at K[head]; 0 for keys after `last`
fn dot_of_block(tid: u32, k0: u32, last: u32, row: u32, head: u32, D: u32) -> f32 {
    let lane = tid & 3u;
    let at = min(k0 + tid / 4u + vec4<u32>(0u, 64u, 128u, 192u), vec4<u32>(last)) * row + head;
    var part = vec4<f32>();
    for (var d = lane; d < D; d += 4u) {
        part = fma(vec4<f32>(sh_q[d]), vec4<f32>(K[at.x + d], K[at.y + d], K[at.z + d], K[at.w + d]), part);
    }
    // each lane keeps its part of the key that it owns and gives the other lanes theirs
    let rotated = turn(part, lane);
    sh_p[slot(tid, 1u)] = rotated.y;
    sh_acc[slot(tid, 2u)] = rotated.z;
    wg_scratch[slot(tid, 3u)] = rotated.w;
    workgroupBarrier();
    return (rotated.x + sh_p[tid]) + (sh_acc[tid] + wg_scratch[tid]);
}

@compute @workgroup_size(256)
fn attention_forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let i = group.x;
    let h = group.y;
    let D = dims.w;
    let row = dims.z * D;
    let head = h / (dims.y / dims.z) * D;
    let query = (i * dims.y + h) * D;
    let low = seg[i];
    let key = key_of(tid);
    let share = column_share(tid, D);
    let cols = share.cols + head;
    if (tid < D) { sh_q[tid] = Q[query + tid]; }
    if (tid == 0u) { sh_max[0] = LOWEST; }
    workgroupBarrier();

    var acc = vec4<f32>();
    var l = 0.0;
    for (var k0 = low / 256u * 256u; k0 <= i; k0 += 256u) {
        let s = params.x * dot_of_block(tid, k0, i, row, head, D);
        let seen = k0 + key >= low && k0 + key <= i;
        let m_old = sh_max[0];
        let m = max(m_old, wg_reduce_max(tid, select(LOWEST, s, seen)));
        let p = select(0.0, exp(s - m), seen);
        let correction = exp(m_old - m);
        l = l * correction + p;
        sh_p[key] = p;
        if (tid == 0u) { sh_max[0] = m; }
        workgroupBarrier();

        acc *= correction;
        let end = min(i + 1u - k0, 256u);
        for (var k = max(low, k0) - k0 + share.chunk; k < end; k += share.chunks) {
            let at = (k0 + k) * row + cols;
            acc = fma(vec4<f32>(sh_p[k]), vec4<f32>(V[at.x], V[at.y], V[at.z], V[at.w]), acc);
        }
        workgroupBarrier();
    }

    let total = wg_reduce_sum(tid, l);
    if (tid == 0u) { sh_lse[0] = max(total, 1e-30); }
    workgroupBarrier();
    sh_q[tid] = acc.x;
    sh_p[tid] = acc.y;
    sh_acc[tid] = acc.z;
    wg_scratch[tid] = acc.w;
    workgroupBarrier();
    if (tid < share.width) {
        var o = vec4<f32>();
        for (var n = 0u; n < share.chunks; n++) {
            let at = n * share.width + tid;
            o += vec4<f32>(sh_q[at], sh_p[at], sh_acc[at], wg_scratch[at]);
        }
        o *= 1.0 / sh_lse[0];
        for (var n = 0u; n < 4u; n++) {
            let d = tid + n * share.width;
            if (d < D) { O[query + d] = nan_guard(o[n]); }
        }
    }
    if (tid == 0u) { LSE[i * dims.y + h] = sh_max[0] + log(sh_lse[0]); }
}
