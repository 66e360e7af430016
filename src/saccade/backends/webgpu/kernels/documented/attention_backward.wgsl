// backward of attention_forward at any length: dQ, and dK and dV by atomic adds, whose last bits vary.
//   P = exp(s - LSE),  dP[k] = dO . v[k],  delta = sum_k P[k] dP[k],  dS = scale P (dP - delta)
//   dQ += sum_k dS[k] k,  dK[k] += dS[k] q,  dV[k] += P[k] dO
// one workgroup per query and head; two passes over blocks of 256 keys, the first for delta. grid (seq_len, n_heads, 1).

@group(0) @binding(0) var<storage, read> Q: array<f32>;
@group(0) @binding(1) var<storage, read> K: array<f32>;
@group(0) @binding(2) var<storage, read> V: array<f32>;
@group(0) @binding(3) var<storage, read> dO: array<f32>;
@group(0) @binding(4) var<storage, read> LSE: array<f32>;
@group(0) @binding(5) var<storage, read_write> dQ: array<f32>;
// bits of f32
@group(0) @binding(6) var<storage, read_write> dK: array<atomic<u32>>;
@group(0) @binding(7) var<storage, read_write> dV: array<atomic<u32>>;
// seq_len, n_heads, n_kv_heads, head_dim
@group(0) @binding(8) var<uniform> dims: vec4<u32>;
// scale
@group(0) @binding(9) var<uniform> params: vec4<f32>;
@group(0) @binding(10) var<storage, read> seg: array<u32>;

var<workgroup> sh_q: array<f32, 256>;
var<workgroup> sh_do: array<f32, 256>;
var<workgroup> sh_p: array<f32, 256>;
var<workgroup> sh_dp: array<f32, 256>;
var<workgroup> sh_dq_acc: array<f32, 256>;
var<workgroup> sh_D: array<f32, 1>;

fn add_to_dK(at: u32, x: f32) {
    var old = atomicLoad(&dK[at]);
    loop {
        let tried = atomicCompareExchangeWeak(&dK[at], old, bitcast<u32>(bitcast<f32>(old) + x));
        if (tried.exchanged) { break; }
        old = tried.old_value;
    }
}

fn add_to_dV(at: u32, x: f32) {
    var old = atomicLoad(&dV[at]);
    loop {
        let tried = atomicCompareExchangeWeak(&dV[at], old, bitcast<u32>(bitcast<f32>(old) + x));
        if (tried.exchanged) { break; }
        old = tried.old_value;
    }
}

fn sum_of_lanes(tid: u32, part: vec4<f32>) -> f32 {
    let rotated = turn(part, tid & 3u);
    sh_p[slot(tid, 1u)] = rotated.y;
    sh_dp[slot(tid, 2u)] = rotated.z;
    wg_scratch[slot(tid, 3u)] = rotated.w;
    workgroupBarrier();
    let sum = (rotated.x + sh_p[tid]) + (sh_dp[tid] + wg_scratch[tid]);
    workgroupBarrier();
    return sum;
}

// P and dP of the key k0 + key_of(tid); zeros for a key that the query does not see
fn p_and_dp(tid: u32, k0: u32, i: u32, h: u32) -> vec2<f32> {
    let D = dims.w;
    let rows = min(k0 + tid / 4u + vec4<u32>(0u, 64u, 128u, 192u), vec4<u32>(i));
    let at = (rows * dims.z + h / (dims.y / dims.z)) * D;
    var s4 = vec4<f32>();
    var dp4 = vec4<f32>();
    for (var d = tid & 3u; d < D; d += 4u) {
        s4 = fma(vec4<f32>(sh_q[d]), vec4<f32>(K[at.x + d], K[at.y + d], K[at.z + d], K[at.w + d]), s4);
        dp4 = fma(vec4<f32>(sh_do[d]), vec4<f32>(V[at.x + d], V[at.y + d], V[at.z + d], V[at.w + d]), dp4);
    }
    let s = params.x * sum_of_lanes(tid, s4);
    let dp = sum_of_lanes(tid, dp4);
    let k = k0 + key_of(tid);
    return select(vec2<f32>(), vec2<f32>(exp(s - LSE[i * dims.y + h]), dp), k >= seg[i] && k <= i);
}

@compute @workgroup_size(256)
fn attention_backward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let i = group.x;
    let h = group.y;
    let D = dims.w;
    let query = (i * dims.y + h) * D;
    let low = seg[i];
    let first = low / 256u * 256u;
    if (tid < D) {
        sh_q[tid] = Q[query + tid];
        sh_do[tid] = dO[query + tid];
    }
    workgroupBarrier();

    var sum = 0.0;
    for (var k0 = first; k0 <= i; k0 += 256u) {
        let pair = p_and_dp(tid, k0, i, h);
        sum += pair.x * pair.y;
    }
    let delta = wg_reduce_sum(tid, sum);
    if (tid == 0u) { sh_D[0] = delta; }
    workgroupBarrier();

    let share = column_share(tid, D);
    let dims_of = tid % share.width + share.width * vec4<u32>(0u, 1u, 2u, 3u);
    let q = vec4<f32>(sh_q[share.cols.x], sh_q[share.cols.y], sh_q[share.cols.z], sh_q[share.cols.w]);
    let do_ = vec4<f32>(sh_do[share.cols.x], sh_do[share.cols.y], sh_do[share.cols.z], sh_do[share.cols.w]);
    let mine = dims_of < vec4<u32>(D);
    var acc = vec4<f32>();
    for (var k0 = first; k0 <= i; k0 += 256u) {
        let pair = p_and_dp(tid, k0, i, h);
        sh_p[key_of(tid)] = pair.x;
        sh_dp[key_of(tid)] = params.x * pair.x * (pair.y - sh_D[0]);
        workgroupBarrier();
        let begin = max(low, k0);
        let count = min(i + 1u, k0 + 256u) - begin;
        let turns = (count + share.chunks - 1u) / share.chunks;
        for (var n = 0u; n < turns; n++) {
            // queries start at different keys, so that fewer of them add to one address at a time
            let k = begin + (n + i) % turns * share.chunks + share.chunk;
            if (k >= begin + count) { continue; }
            let p = sh_p[k - k0];
            let ds = sh_dp[k - k0];
            let at = (k * dims.z + h / (dims.y / dims.z)) * D + share.cols;
            acc = fma(vec4<f32>(ds), vec4<f32>(K[at.x], K[at.y], K[at.z], K[at.w]), acc);
            for (var c = 0u; c < 4u; c++) {
                if (mine[c]) {
                    add_to_dK(at[c], ds * q[c]);
                    add_to_dV(at[c], p * do_[c]);
                }
            }
        }
        workgroupBarrier();
    }

    sh_p[tid] = acc.x;
    sh_dp[tid] = acc.y;
    sh_dq_acc[tid] = acc.z;
    wg_scratch[tid] = acc.w;
    workgroupBarrier();
    if (tid < share.width) {
        var dq = vec4<f32>();
        for (var at = tid; at < share.chunks * share.width; at += share.width) {
            dq += vec4<f32>(sh_p[at], sh_dp[at], sh_dq_acc[at], wg_scratch[at]);
        }
        for (var c = 0u; c < 4u; c++) {
            if (mine[c]) { dQ[query + dims_of[c]] += dq[c]; }
        }
    }
}
