// the reductions of prelude.wgsl by subgroup operations; this file replaces them.
//
// nothing is assumed about the size of a subgroup or about which invocations form one: the first of each leaves its
// result in its own slot, and every subgroup then reads all 256 slots.

var<workgroup> wg_scratch: array<f32, 256>;

fn wg_reduce_max(tid: u32, x: f32) -> f32 {
    let size = subgroupAdd(1u);
    let rank = subgroupExclusiveAdd(1u);
    let own = subgroupMax(x);
    wg_scratch[tid] = select(-3e38, own, rank == 0u);
    workgroupBarrier();
    var m = -3e38;
    for (var i = rank; i < 256u; i += size) { m = max(m, wg_scratch[i]); }
    return subgroupMax(m);
}

fn wg_reduce_sum(tid: u32, x: f32) -> f32 {
    let size = subgroupAdd(1u);
    let rank = subgroupExclusiveAdd(1u);
    let own = subgroupAdd(x);
    wg_scratch[tid] = select(0.0, own, rank == 0u);
    workgroupBarrier();
    var sum = 0.0;
    for (var i = rank; i < 256u; i += size) { sum += wg_scratch[i]; }
    return subgroupAdd(sum);
}
