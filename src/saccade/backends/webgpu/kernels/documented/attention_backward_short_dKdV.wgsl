// dK and dV from the scratch of attention_backward_short, one workgroup per key and kv head.
//   dK[j] += sum over i >= j and the group's heads of dS[i, h, j] q[i, h],  dV[j] += sum of P[i, h, j] dO[i, h]
// each row of dK and dV has one owner: no atomics. grid (seq_len, n_kv_heads, 1).

@group(0) @binding(0) var<storage, read> Q: array<f32>;
@group(0) @binding(1) var<storage, read> dO: array<f32>;
@group(0) @binding(2) var<storage, read> P_scratch: array<f32>;
@group(0) @binding(3) var<storage, read> dS_scratch: array<f32>;
@group(0) @binding(4) var<storage, read_write> dK: array<f32>;
@group(0) @binding(5) var<storage, read_write> dV: array<f32>;
// seq_len, n_heads, n_kv_heads, head_dim
@group(0) @binding(6) var<uniform> dims: vec4<u32>;

var<workgroup> sh_dk_partial: array<f32, 256>;
var<workgroup> sh_dv_partial: array<f32, 256>;

@compute @workgroup_size(256)
fn attention_backward_short_dKdV(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32
) {
    let j = group.x;
    let D = dims.w;
    let heads = dims.y / dims.z;
    let share = column_share(tid, D);
    var dk = vec4<f32>();
    var dv = vec4<f32>();
    if (share.chunk < share.chunks) {
        // this invocation's (query, head) pairs: every `chunks`-th one
        var i = j + share.chunk / heads;
        var h = share.chunk % heads;
        while (i < dims.x) {
            let r = i * dims.y + group.y * heads + h;
            let p = P_scratch[r * dims.x + j];
            let ds = dS_scratch[r * dims.x + j];
            // zeros mark keys before the query's document: values of its rows, such as NaN, must not count
            if (p != 0.0 || ds != 0.0) {
                let at = r * D + share.cols;
                dk = fma(vec4<f32>(ds), vec4<f32>(Q[at.x], Q[at.y], Q[at.z], Q[at.w]), dk);
                dv = fma(vec4<f32>(p), vec4<f32>(dO[at.x], dO[at.y], dO[at.z], dO[at.w]), dv);
            }
            i += share.chunks / heads;
            h += share.chunks % heads;
            if (h >= heads) {
                h -= heads;
                i += 1u;
            }
        }
    }

    let key = (j * dims.z + group.y) * D;
    for (var n = 0u; n < 4u; n++) {
        sh_dk_partial[tid] = dk[n];
        sh_dv_partial[tid] = dv[n];
        workgroupBarrier();
        let d = tid + n * share.width;
        if (tid < share.width && d < D) {
            var dk_sum = 0.0;
            var dv_sum = 0.0;
            for (var at = tid; at < share.chunks * share.width; at += share.width) {
                dk_sum += sh_dk_partial[at];
                dv_sum += sh_dv_partial[at];
            }
            dK[key + d] += dk_sum;
            dV[key + d] += dv_sum;
        }
        workgroupBarrier();
    }
}
