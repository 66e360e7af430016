{# the numbers of a call, as side.py packs them #}
{% if kind == "f16" %}
enable f16;
{% endif %}
// one call on one part of its plan; offsets count int32 words of `side`
struct Dims {
  B: u32, Tq: u32, Tk: u32, Hq: u32,
  Hk: u32, G: u32, step: u32, n_masks: u32,
  mask_batches: u32, n_tiles: u32, t_tiles: u32, first_tile: u32,
  o_classes: u32, o_heads: u32, o_ptr: u32, o_seg: u32,
  o_tptr: u32, o_tseg: u32, o_sinks: u32, o_slopes: u32,
  slopes_stride: u32, o_offset: u32, offset_stride: u32, o_masks: u32,
  k_lo: u32, k_hi: u32, tile_count: u32, classes: u32,
  q_lo: u32, q_hi: u32, k_base: u32, q_base: u32,
  first_batch: u32, chunks: u32, rows: u32, drop_below: u32,
  seed_low: u32, seed_high: u32, chunk_keys: u32, o_table: u32,
  table_stride: u32, page_size: u32,
  scale: f32, softcap: f32, keep_scale: f32, minus_inf: f32,
  bias_b: u32, bias_h: u32, bias_t: u32, bias_j: u32,
}
const LOG2E = 1.44269504088896341;
const LN2 = 0.693147180559945309;
// what these lack as 32-bit floats
const LOG2E_LOW = 1.92596299e-8;
const LN2_LOW = -1.90465430e-9;
// a masked score; running maxima start above it, at the lowest score that a finite bias gives
const MASKED = -3.0e38;
const START = -2.9e38;
// x log2(e) in two parts, so that e^x as a power of two is rounded no more than x was
fn in_log2(x: f32) -> vec2<f32> {
  let high = x * LOG2E;
  let low = fma(x, LOG2E, -high) + x * LOG2E_LOW;
  return vec2<f32>(high, select(low, 0.0, abs(high) > 3.0e38));
}
