// Arguments of the kernels. Plain data only: this header is compiled once per instruction set.
#pragma once
#include <cstdint>

namespace saccade {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, codes = 4 };
enum class Code : int { none = 0, i8 = 1, i4 = 2, f8 = 3 };

// a strided array; a row of D numbers is contiguous, and keys that no query block needs are never read
struct Array {
  char* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};  // in elements: batch, position, head, 1 (paged: page, slot, head, 1)
  DType dtype = DType::f32;
  // codes: strides are in bytes, and `group` numbers share a scale [batch, position, head, n] in bf16
  Code code = Code::none;
  int64_t group = 0, scale_stride[3] = {0, 0, 0};
  const uint16_t* scale = nullptr;

  // bytes per unit of a stride, and per row
  int64_t unit() const { return dtype == DType::codes ? 1 : dtype == DType::f32 ? 4 : dtype == DType::f64 ? 8 : 2; }
  int64_t bytes(int64_t width) const { return code == Code::i4 ? width / 2 : width * unit(); }
};

// axis 'q': inside iff lo[t] <= j < hi[t]; axis 'k': inside iff lo[j] <= t < hi[j]
struct Rows {
  const int32_t* lo;
  const int32_t* hi;
  int64_t batch_stride;  // 0 when every batch entry shares the intervals
  int on_keys;
};

// inside iff bit t / block_q of row j / block_k is set; 32 bits can be read from any byte of a row
struct Grid {
  const uint8_t* bits;
  int64_t batch_stride, row_stride;
  int block_q, block_k;
};

enum BandField { D_LO, D_HI, K_LO, K_HI, Q_LO, Q_HI, STRIDE, PHASE, BAND_FIELDS };
enum UseField { ROWS_IN, ROWS_OUT, GRIDS_IN, GRIDS_OUT, USE_FIELDS };

// allowed(t, j) = OR over bands of (the band AND its row intervals AND its grids)
struct Mask {
  const int32_t* bands;  // [Bm, n_bands, 8]
  const int32_t* uses;   // [n_bands, 4]
  int n_bands, n_rows, n_grids;
  int64_t batch_stride;
  Rows rows[8];
  Grid grids[4];
  bool one_band = false;  // whether in all batch entries one band alone tells which keys a row sees
};

enum Kind { EMPTY = 0, PARTIAL = 1, FULL = 2 };

// `classes` residue classes of one stride; class c has query rows q_start[c] + step * a and keys k_start[c] + step * a
struct Part {
  int step, classes, n_tiles, n_masks, mask_batches;
  const int32_t *q_start, *k_start, *nq, *nk;  // [classes]
  const int32_t* entry = nullptr;              // [classes]: the batch entry of a class; null if all have it
  const int32_t* head;                         // [Hq] -> mask
  const int32_t* ptr;                          // [classes, n_masks, mask_batches, n_tiles] + 1
  const int32_t* seg;                          // [n, 3]: begin, end, kind, in keys of the class
  const Mask* masks;
  bool one_bands = false;  // whether all masks have one band
  // [n_stages, 3]: first query tile, first key and end of the keys of each stage of a backward; see Stage
  int n_stages = 0;
  const int32_t* stages = nullptr;
};

// A stage of a backward computes the query tiles from `tile` on, which see keys in [key, key_end). No later stage sees
// keys below `ready`. Where tiles only see keys near their own, many stages share the memory of one.
struct Stage {
  int64_t tile = 0, tile_end = INT64_MAX, key = 0, key_end = 0, ready = 0;
};

// selected keys: row t sees key j only if j / block is in lists[b, hk, t / rows]; entries < 0 are no block
struct Selection {
  const int32_t* lists = nullptr;  // [B, Hk, groups, n] contiguous
  int64_t batch_stride = 0, groups = 0, n = 0, block = 1, rows = 1;
};

// how many terms of a sum are added one after the other
constexpr int64_t CHAIN = 64;

struct Call {
  int64_t B, Tq, Tk, Hq, Hk, G, D, Dv;
  double scale, softcap;
  uint32_t drop_below = 0;  // a Philox word below this drops the weight
  double keep_scale = 1.0;
  uint32_t seed[2] = {0, 0};
  Array q, k, v, o, do_, dq, dk, dv;
  const int32_t* block_table = nullptr;  // paged keys: [B, pages]
  int64_t table_stride = 0;
  int64_t page_size = 0;
  void* lse = nullptr;                      // [B, Tq, Hq] contiguous, f32 (f64 for f64)
  bool lse_unread = false;                  // no caller reads it
  const void* dlse = nullptr;               // [B, Tq, Hq] contiguous, the type of lse, as are the next four
  void *max = nullptr, *entropy = nullptr;  // results, null where not asked for; backward: entropy is read
  const void* dentropy = nullptr;
  const double* delta =
      nullptr;  // [B, Tq, Hq] contiguous: rowsum(do * o) - dlse + dentropy * entropy, if the caller has it
  Array bias;   // broadcast: stride 0 where the dimension is 1
  Array dbias;  // f64, or f32 where not broadcast; zeroed by the host, one owner per element
  int64_t bias_b = 1, bias_h = 1, bias_t = 1;  // which dimensions of dbias have elements of their own
  Array distances;                             // a bias by distance: strides of b, h, the row's position and the key
  Array ddistances;                            // f64, zeroed by the host, one owner per (b, h)
  const double* slopes = nullptr;
  int64_t slopes_stride = 0;
  double* dslopes = nullptr;  // [B * Hk * splits, G] partial sums
  double* dgates = nullptr;   // [B * Hk * splits, G, Tk] partial sums, by position
  Array gates;                // f64, running sums of log forget gates: (b, h, position), stride 0 as in bias
  const int32_t* offset = nullptr;
  int64_t offset_stride = 0;  // position of query row 0, per batch, for distances, slopes and gates
  const double* sinks = nullptr;
  Selection selection;
  const Part* part = nullptr;
  int merge = 0;  // merge with o and lse of an earlier part
  int last = 1;   // sinks are added by the last part
  int splits = 1;
  int64_t first = 0;    // backward: `partial` has the sums of (batch, key head) from this one on
  Stage stage, before;  // backward: what is computed now, and before; `partial` has room for sum_keys keys per owner
  int64_t sum_keys = 0;
  int threads = 1;
  int64_t split_keys = 0, n_chunks = 0;
  int64_t range = 0;        // keys of one partial result, if no bit of a row may depend on the batch; see ordered.hpp
  void* partial = nullptr;  // decode: [B, Hk, n_chunks, rows, partial_width()]; backward: dk, dv sums per owner
  uint8_t* lost = nullptr;  // ordered decode: [B, Hk], whether the forward must compute the rows
  int accumulate = 0;       // backward: add into dq, dk, dv sums instead of starting from zero
  // backward: (lse in log2 units, delta) of each row, [B, Tq, Hq, 2]; tangents of several parts: three sums
  double* rows = nullptr;
  double* sums = nullptr;      // backward: (sum of P, sum of P dP) of each row, where rows are refined
  double* lse_lost = nullptr;  // the part of a refinement lost in adding it to a large lse
  int only_sums = 0;           // backward: only add to the sums, since more parts follow
  // the tangents of q, k, v, the terms of scores and the sinks, null where zero; its o and lse get the results
  const Call* tangent = nullptr;

  bool matrix = false;  // products use matrix registers

  // Always inline: a copy compiled for one instruction set could be linked to code for another.
  // scores are only products
  [[gnu::always_inline]] bool plain() const {
    return softcap == 0 && !bias.data && !distances.data && !slopes && !gates.data;
  }
  // whether the pairs are few enough to spend more time on each
  [[gnu::always_inline]] bool few() const { return !range && Tq * Tk <= 64 * 64; }
  // whether a backward refines all rows: the gradients of slopes and gates add up the rounding of delta over many pairs
  [[gnu::always_inline]] bool refines_all() const { return few() || dslopes || dgates; }
  // whether the lse of a row is so far from 0 that its rounding shows in the row's weights; if every bias is -1e9, it has
  // lost all of the logarithm of the sum
  [[gnu::always_inline]] bool far(int64_t row) const {
    return __builtin_fabs(rows[2 * row]) > (q.dtype == DType::f64 ? 0x1p39 : 0x1p10);
  }
  [[gnu::always_inline]] bool refines(int64_t row) const { return refines_all() || far(row); }
  [[gnu::always_inline]] bool wants_more() const { return max || entropy; }
  // numbers of a row's partial result: sums, m, l, and for more results u of forward.hpp and the exact maximum; ordered
  // decode pads the sums to vectors, of at most 16 numbers
  [[gnu::always_inline]] int64_t partial_width() const { return Dv + (range ? 17 : wants_more() ? 4 : 2); }
  [[gnu::always_inline]] int64_t chain() const { return few() ? CHAIN / 4 : CHAIN; }  // of sums over a head dimension
};

// tokens into rows (first[i], second[i]) of an array; tokens whose second is negative are skipped
struct Append {
  int64_t tokens, heads, n;
  Array in;   // strides: token, head, 1
  Array out;  // strides: first, second, head, 1
  const int64_t *first, *second;
  const void *cos = nullptr, *sin = nullptr;  // [tokens, n / 2], f32 (f64 for f64)
  bool interleaved = false;
};

// one table per instruction set; the tasks of one verb are independent, and each owns its outputs
struct Kernels {
  bool (*short_rows)(const Call&);  // whether the forward is faster than decode
  int64_t (*forward_tasks)(const Call&);
  int64_t (*forward_scratch)(const Call&);
  void (*forward)(const Call&, int64_t task, char* scratch);
  int64_t (*decode_tasks)(const Call&);
  int64_t (*decode_scratch)(const Call&);
  void (*decode)(const Call&, int64_t task, char* scratch);
  void (*combine)(const Call&, int64_t task);
  int64_t (*backward_scratch)(const Call&);
  int64_t (*backward_sums)(const Call&);  // size of a task's sums, in numbers of the compute type
  void (*backward)(const Call&, int64_t task, char* scratch);
  void (*backward_finish)(const Call&, int64_t task, int64_t begin, int64_t end);
  void (*backward_bias)(const Call&, int64_t task, char* scratch);
  void (*backward_distances)(const Call&, int64_t task, char* scratch);
  int64_t (*tangent_tasks)(const Call&);
  int64_t (*tangent_scratch)(const Call&);
  void (*tangent)(const Call&, int64_t task, char* scratch);
  int64_t (*append_scratch)(const Append&);
  void (*append)(const Append&, int64_t token, char* scratch);
  void (*row)(const Call&, int64_t at);  // at: index in [B, Tq, Hq]
  void (*refine)(const Call&, int64_t at);
  void (*probe)(int dtype, bool matrix, int64_t rounds, char* scratch);
  int64_t (*probe_flops)();  // flops of one round
};

// Kernels call it about once per tile; it throws where the call must stop. See Interruptible in pool.hpp.
void check_stop();

constexpr int TILE_Q = 64;  // query rows of one block: the vector lanes
constexpr int TILE_K = 64;  // keys of one step
constexpr int SHORT = 64;   // the most tokens that short.hpp computes

}  // namespace saccade
