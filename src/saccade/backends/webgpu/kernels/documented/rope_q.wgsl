// rotates Q in place by rotary positions, before attention; rope_q_backward rotates back.
// one invocation per pair: grid ceil(seq_len * n_heads * head_dim / 512); workgroups past 65535 continue in y.

@group(0) @binding(0) var<storage, read_write> Q: array<f32>;
// seq_len, n_heads, head_dim, pos_offset
@group(0) @binding(1) var<uniform> dims: vec4<u32>;
// rope_base, 1 for pairs (i, i + head_dim / 2)
@group(0) @binding(2) var<uniform> params: vec4<f32>;

@compute @workgroup_size(256)
fn rope_q(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) tid: u32
) {
    let n = pair_of(group, groups, tid);
    if (n < dims.x * dims.y * (dims.z / 2u)) {
        let r = rotation(n, dims, params);
        let x = vec2<f32>(Q[r.at.x], Q[r.at.y]);
        Q[r.at.x] = x.x * r.c - x.y * r.s;
        Q[r.at.y] = x.x * r.s + x.y * r.c;
    }
}
