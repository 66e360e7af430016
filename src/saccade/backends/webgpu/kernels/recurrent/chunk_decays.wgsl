{% import "chunk_products.wgsl" as p with context %}
{% set reads = ["query", "key", "value", "cotangent"] %}
{% set names = ["qk", "vx", "side", "states", "ramps", "passed", "out_dg"] %}
{% include "chunk.wgsl" %}
// the gradient of each decay's logarithm: weights of the pairs that its token separates, terms from the state to it and later tokens, terms from
// earlier tokens into the next state, and terms past the chunk. passed: [2, blocks of features, B T H], written by the kernels of dq and of dk
var<workgroup> sh: array<vec4<f32>, 512>;
var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn chunk_decays(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let id = group.y * 32768u + group.x;
  if (id >= numbers.total) { return; }
  let slot = id / numbers.H;
  place(slot, id % numbers.H);
  let rg = tid / 16u;
  let cg = tid % 16u;
  note_sides(tid, false);
{{ p.zeros("pair") }}
{{ p.zeros("score") }}
{% for left, right, wide, acc in [("cotangent", "value", "W4", "pair"), ("query", "key", "K4", "score")] %}
  for (var w0 = 0u; w0 < numbers.{{ wide }}; w0 += 4u) {
    workgroupBarrier();
{% call(r, c) p.transposed(0, 0) %}{{ left }}({{ r }}, w0 + {{ c }}){% endcall %}
{% call(r, c) p.transposed(256, 1) %}{{ right }}({{ r }}, w0 + {{ c }}){% endcall %}
    workgroupBarrier();
{{ p.multiply([(acc, 256)]) }}
  }
{% endfor %}
  let j = vec4<u32>(4u * cg) + vec4<u32>(0u, 1u, 2u, 3u);
{% for i in range(4) %}
  { let r = 4u * rg + {{ i }}u;
    pair{{ i }} *= score{{ i }} * between(r, 4u * cg, 1.0);
    pair{{ i }} = select(vec4<f32>(), pair{{ i }}, j < vec4<u32>(r));
  }
{% endfor %}
  var dg = 0.0;
  for (var r0 = 0u; r0 < 64u; r0 += 16u) {
    workgroupBarrier();
    if (rg / 4u == r0 / 16u) {
{% for i in range(4) %}
      sh[(4u * (rg % 4u) + {{ i }}u) * 16u + cg] = pair{{ i }};
{% endfor %}
    }
    workgroupBarrier();
    if (tid < 16u) {
      // running sums of a row up to each column
      var sum = 0.0;
      for (var c = 0u; c < 16u; c++) {
        var x = sh[tid * 16u + c];
        x.x += sum;
        x.y += x.x;
        x.z += x.y;
        x.w += x.z;
        sum = x.w;
        sh[tid * 16u + c] = x;
      }
    }
    workgroupBarrier();
    if (tid > 0u && tid < 64u) {
      for (var r = max(r0, tid); r < r0 + 16u; r++) { dg += sh[(r - r0) * 16u + (tid - 1u) / 4u][(tid - 1u) % 4u]; }
    }
  }
  let size = numbers.K * numbers.W4;
  var past = vec4<f32>();
  for (var i = tid; i < size; i += 256u) {
    past = fma(states[(slot * numbers.H + i_head) * size + i], states[numbers.read_at + (slot * numbers.H + i_head) * size + i], past);
  }
  sums[tid] = (past.x + past.y) + (past.z + past.w);
  for (var half = 128u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if (tid < half) { sums[tid] += sums[tid + half]; }
  }
  workgroupBarrier();
  if (tid < count) {
    dg += sums[0] * sides[count - 1u].w;
    let blocks = (numbers.K4 + 15u) / 16u;
    for (var i = 0u; i < count; i++) {
      let from_block = select(blocks, 0u, i >= tid);
      for (var n = 0u; n < blocks; n++) { dg += passed[(from_block + n) * numbers.rows + row(i)]; }
    }
    out_dg[row(tid)] = dg;
  }
}
