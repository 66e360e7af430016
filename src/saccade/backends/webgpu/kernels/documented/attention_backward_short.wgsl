// backward of attention_forward for seq_len <= 1024: dQ, and P and dS for attention_backward_short_dKdV.
//   P = exp(s - LSE),  dP[k] = dO . v[k],  delta = sum_k P[k] dP[k],  dS = scale P (dP - delta),  dQ += sum_k dS[k] k
// one workgroup per query and head, its whole row of P and dP in workgroup memory. grid (seq_len, n_heads, 1).
// the scratch is (query, head, key): zeros before the query's document, nothing written after the query.

@group(0) @binding(0) var<storage, read> Q: array<f32>;
@group(0) @binding(1) var<storage, read> K: array<f32>;
@group(0) @binding(2) var<storage, read> V: array<f32>;
@group(0) @binding(3) var<storage, read> dO: array<f32>;
@group(0) @binding(4) var<storage, read> LSE: array<f32>;
@group(0) @binding(5) var<storage, read_write> dQ: array<f32>;
@group(0) @binding(6) var<storage, read_write> P_scratch: array<f32>;
@group(0) @binding(7) var<storage, read_write> dS_scratch: array<f32>;
// seq_len, n_heads, n_kv_heads, head_dim
@group(0) @binding(8) var<uniform> dims: vec4<u32>;
// scale
@group(0) @binding(9) var<uniform> params: vec4<f32>;
@group(0) @binding(10) var<storage, read> seg: array<u32>;

var<workgroup> sh_q: array<f32, 256>;
var<workgroup> sh_do: array<f32, 256>;
var<workgroup> sh_p_full: array<f32, 1024>;
var<workgroup> sh_dp_full: array<f32, 1024>;

// the sum over four lanes for the key that this lane owns, exchanged through memory that later holds block k0 of the rows
fn gather_lanes(tid: u32, k0: u32, part: vec4<f32>) -> f32 {
    let rotated = turn(part, tid & 3u);
    sh_p_full[k0 + slot(tid, 1u)] = rotated.y;
    sh_dp_full[k0 + slot(tid, 2u)] = rotated.z;
    wg_scratch[slot(tid, 3u)] = rotated.w;
    workgroupBarrier();
    let sum = (rotated.x + sh_p_full[k0 + tid]) + (sh_dp_full[k0 + tid] + wg_scratch[tid]);
    workgroupBarrier();
    return sum;
}

@compute @workgroup_size(256)
fn attention_backward_short(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let i = group.x;
    let h = group.y;
    let D = dims.w;
    let row = dims.z * D;
    let head = h / (dims.y / dims.z) * D;
    let query = (i * dims.y + h) * D;
    let low = seg[i];
    let lse = LSE[i * dims.y + h];
    let lane = tid & 3u;
    let key = key_of(tid);
    if (tid < D) {
        sh_q[tid] = Q[query + tid];
        sh_do[tid] = dO[query + tid];
    }
    workgroupBarrier();

    var sum = 0.0;
    for (var k0 = low / 256u * 256u; k0 <= i; k0 += 256u) {
        let at = min(k0 + tid / 4u + vec4<u32>(0u, 64u, 128u, 192u), vec4<u32>(i)) * row + head;
        var q_k = vec4<f32>();
        var do_v = vec4<f32>();
        for (var d = lane; d < D; d += 4u) {
            q_k = fma(vec4<f32>(sh_q[d]), vec4<f32>(K[at.x + d], K[at.y + d], K[at.z + d], K[at.w + d]), q_k);
            do_v = fma(vec4<f32>(sh_do[d]), vec4<f32>(V[at.x + d], V[at.y + d], V[at.z + d], V[at.w + d]), do_v);
        }
        let s = params.x * gather_lanes(tid, k0, q_k);
        let dp = gather_lanes(tid, k0, do_v);
        let seen = k0 + key >= low && k0 + key <= i;
        let p = select(0.0, exp(s - lse), seen);
        sh_p_full[k0 + key] = p;
        sh_dp_full[k0 + key] = dp;
        sum += select(0.0, p * dp, seen);
    }
    let delta = wg_reduce_sum(tid, sum);

    let scratch = (i * dims.y + h) * dims.x;
    for (var k = tid; k <= i; k += 256u) {
        var p = 0.0;
        var ds = 0.0;
        if (k >= low) {
            p = sh_p_full[k];
            ds = params.x * p * (sh_dp_full[k] - delta);
            sh_dp_full[k] = ds;
        }
        P_scratch[scratch + k] = p;
        dS_scratch[scratch + k] = ds;
    }
    workgroupBarrier();

    let share = column_share(tid, D);
    let cols = share.cols + head;
    var acc = vec4<f32>();
    for (var k = low + share.chunk; k <= i; k += share.chunks) {
        let at = k * row + cols;
        acc = fma(vec4<f32>(sh_dp_full[k]), vec4<f32>(K[at.x], K[at.y], K[at.z], K[at.w]), acc);
    }
    // P is already written out: its memory holds the sums of the chunks, 4 width columns each
    if (share.chunk < share.chunks) {
        for (var n = 0u; n < 4u; n++) {
            sh_p_full[(share.chunk * 4u + n) * share.width + tid % share.width] = acc[n];
        }
    }
    workgroupBarrier();
    if (tid < D) {
        var dq = 0.0;
        for (var n = 0u; n < share.chunks; n++) { dq += sh_p_full[n * 4u * share.width + tid]; }
        dQ[query + tid] += dq;
    }
}
