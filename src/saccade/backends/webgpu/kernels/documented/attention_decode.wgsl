// attention of one new query per head over a cache of keys, one workgroup per head; an empty cache gives zeros.
//   s[k] = scale q . k,  O = sum_k softmax(s)[k] v[k],  keys k < cache_len
// work is divided as in attention_forward, without mask and lse. grid (n_heads, 1, 1).

@group(0) @binding(0) var<storage, read> Q_one: array<f32>;
@group(0) @binding(1) var<storage, read> K_cache: array<f32>;
@group(0) @binding(2) var<storage, read> V_cache: array<f32>;
@group(0) @binding(3) var<storage, read_write> O_one: array<f32>;
// cache_len, n_heads, n_kv_heads, head_dim
@group(0) @binding(4) var<uniform> dims: vec4<u32>;
// scale
@group(0) @binding(5) var<uniform> params: vec4<f32>;

var<workgroup> sh_q: array<f32, 256>;
var<workgroup> sh_p: array<f32, 256>;
var<workgroup> sh_acc: array<f32, 256>;

fn score(tid: u32, k0: u32, head: u32) -> f32 {
    let lane = tid & 3u;
    let keys = min(k0 + tid / 4u + vec4<u32>(0u, 64u, 128u, 192u), vec4<u32>(dims.x - 1u));
    let at = keys * dims.z * dims.w + head;
    var part = vec4<f32>();
    for (var d = lane; d < dims.w; d += 4u) {
        let k = vec4<f32>(K_cache[at.x + d], K_cache[at.y + d], K_cache[at.z + d], K_cache[at.w + d]);
        part = fma(vec4<f32>(sh_q[d]), k, part);
    }
    let rotated = turn(part, lane);
    wg_scratch[slot(tid, 1u)] = rotated.y;
    sh_acc[slot(tid, 2u)] = rotated.z;
    sh_p[slot(tid, 3u)] = rotated.w;
    workgroupBarrier();
    return params.x * ((rotated.x + wg_scratch[tid]) + (sh_acc[tid] + sh_p[tid]));
}

@compute @workgroup_size(256)
fn attention_decode(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let length = dims.x;
    let D = dims.w;
    let head = group.x / (dims.y / dims.z) * D;
    let key = key_of(tid);
    let share = column_share(tid, D);
    if (tid < D) { sh_q[tid] = Q_one[group.x * D + tid]; }
    workgroupBarrier();

    var m = LOWEST;
    var l = 0.0;
    var acc = vec4<f32>();
    for (var k0 = 0u; k0 < length; k0 += 256u) {
        let s = score(tid, k0, head);
        let m_old = m;
        m = max(m, wg_reduce_max(tid, select(LOWEST, s, k0 + key < length)));
        let p = select(0.0, exp(s - m), k0 + key < length);
        sh_p[key] = p;
        workgroupBarrier();
        l = l * exp(m_old - m) + p;
        acc *= exp(m_old - m);
        for (var k = share.chunk; k < min(length - k0, 256u); k += share.chunks) {
            let at = (k0 + k) * dims.z * D + head + share.cols;
            acc = fma(vec4<f32>(sh_p[k]), vec4<f32>(V_cache[at.x], V_cache[at.y], V_cache[at.z], V_cache[at.w]), acc);
        }
        workgroupBarrier();
    }

    // sums of all chunks, in workgroup memory that is no longer needed
    let total = max(wg_reduce_sum(tid, l), 1e-30);
    workgroupBarrier();
    sh_q[tid] = acc.x;
    sh_p[tid] = acc.y;
    sh_acc[tid] = acc.z;
    wg_scratch[tid] = acc.w;
    workgroupBarrier();
    if (tid >= share.width) { return; }
    acc = vec4<f32>();
    for (var at = tid; at < share.chunks * share.width; at += share.width) {
        acc += vec4<f32>(sh_q[at], sh_p[at], sh_acc[at], wg_scratch[at]);
    }
    for (var n = 0u; n < 4u && tid + n * share.width < D; n++) {
        O_one[group.x * D + tid + n * share.width] = nan_guard(acc[n] / total);
    }
}
