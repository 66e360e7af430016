{# reverse: for gradients; begins: the initial state is given #}
// carries a state from chunk to chunk: replaces the terms of each chunk by the state before it, and stores the last state; one vector per invocation
{% set names = ["side"] + (["begin"] if begins else []) + (["ramps"] if decay else []) + ["out_states", "out_ends"] %}
{% include "chunk.wgsl" %}
@compute @workgroup_size(64)
fn chunk_carry(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let i = (group.y * 32768u + group.x) * 64u + tid;
  if (i >= numbers.total) { return; }
  let size = numbers.K * numbers.W4;
  i_head = i / size % numbers.H;
  let sequence = numbers.read_at + 4u * (i / (size * numbers.H));
  let slots = side[sequence + 1u];
  var s = {{ "begin[i]" if begins else "vec4<f32>()" }};
  for (var c = 0u; c < slots; c++) {
    let slot = side[sequence] + {{ "slots - 1u - c" if reverse else "c" }};
    let at = numbers.write_at + (slot * numbers.H + i_head) * size + i % size;
    let added = out_states[at];
    out_states[at] = s;
{% if decay %}
    let b = ramps[(side[3u * slot] + side[3u * slot + 1u] - 1u) * numbers.H + i_head];
    s *= exp1(b.x + b.y);
{% endif %}
    s += added;
  }
  out_ends[{{ "numbers.total + " if reverse }}i] = s;
}
