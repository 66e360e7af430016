// Shared by the tiled kernels: the numbers of a call, the place of a threadgroup in it, the element test, the score of a pair.
// constants: T (type of a number in memory), HEADS_FIRST (arrays are [B, H, T, n], else [B, T, H, n]), SOFTCAP, BIAS, ALIBI, DROPOUT,
// PACKED (a row is a pair of a query and a head of its group), MASKED_PAIRS (some pairs need the element test)

// One launch on one part of a plan. backends/plan_encoding.py defines and fills this struct (DIMS there); an o_ is the word of
// `side` at which a table starts.
#include "dims.metal"
typedef device const Dims& Numbers;

constant constexpr float LOG2E = 1.44269504088896341f;
constant constexpr float LN2 = 0.693147180559945309f;
// the low parts of these constants, lost in 32-bit floats
constant constexpr float LOG2E_LOW = 1.92596299e-8f;
constant constexpr float LN2_LOW = -1.90465430e-9f;
// the score of a masked pair; running maxima start above it, at the lowest score that a finite bias gives
constant constexpr float MASKED = -3.0e38f;
constant constexpr float START = -2.9e38f;

// one batch entry, one query head (packed: the first head of the group), one residue class
struct Place {
  int b, h, hk, mask, q_start, k_start, n_q, n_k;
};

inline Place place_of(Numbers dims, device const int* side, int b, int h, int cls) {
  Place p;
  p.b = b;
  p.h = h;
  p.hk = h / dims.G;
  p.mask = side[dims.o_heads + h];
  device const int* mine = side + dims.o_classes + 4 * cls;
  p.q_start = mine[0];
  p.k_start = mine[1];
  p.n_q = mine[2] * (PACKED ? dims.G : 1);
  p.n_k = mine[3];
  return p;
}

// row and key numbers in the whole problem
inline int t_of(Numbers dims, thread const Place& p, int a) { return p.q_start + dims.step * (PACKED ? a / dims.G : a); }
inline int j_of(Numbers dims, thread const Place& p, int a) { return p.k_start + dims.step * a; }
inline int head_of(Numbers dims, thread const Place& p, int a) { return PACKED ? p.hk * dims.G + a % dims.G : p.h; }
// row index in an array of T rows and H heads
inline long row_of(int b, int t, int h, int T_rows, int H) {
  return HEADS_FIRST ? (long(b) * H + h) * T_rows + t : (long(b) * T_rows + t) * H + h;
}
inline long q_row(Numbers dims, thread const Place& p, int a) {
  return row_of(p.b, t_of(dims, p, a), head_of(dims, p, a), dims.Tq, dims.Hq);
}
// rows of keys: gradients are strided; keys may be in pages [n, page_size, H] that a block table names
inline long dk_row(Numbers dims, thread const Place& p, int a) { return row_of(p.b, j_of(dims, p, a), p.hk, dims.Tk, dims.Hk); }
inline long k_row(Numbers dims, device const int* side, thread const Place& p, int a) {
  if (dims.page_size == 0) return dk_row(dims, p, a);
  const int j = j_of(dims, p, a);
  const int page = side[dims.o_table + p.b * dims.table_stride + j / dims.page_size];
  return (long(page) * dims.page_size + j % dims.page_size) * dims.Hk + p.hk;
}

// one factor of a band, encoded by plan_encoding.py; code: its place in the record, and bits for grid, inside and rows of keys
inline bool factor_of(device const int* side, int dir, int code, int b, int t, int j) {
  device const int* at = side + dir + (code >> 3);
  bool inside;
  if (code & 1) {
    const int cell = b * at[6] + j / at[8] * at[5] + t / at[7];
    inside = (side[at[0] + cell / 4] >> (cell % 4 * 8) & 255) != 0;
  } else {
    const int row = b * at[2] + (code & 4 ? j : t);
    const int x = code & 4 ? t : j;
    inside = side[at[0] + row] <= x && x < side[at[1] + row];
  }
  return inside == ((code & 2) != 0);
}

// whether row t may see key j: an OR over bands, each of them AND its factors
inline bool allowed(Numbers dims, device const int* side, thread const Place& p, int t, int j) {
  device const int* program = side + dims.o_programs + side[dims.o_programs + p.mask];
  const int dir = dims.o_records + program[0];
  const int bands = program[1];
  device const int* f = side + side[dir + 4] + (side[dir + 1] != 0 ? p.b * bands * 8 : 0);
  program += 2;
  const int d = t - j;
  for (int n = 0; n < bands; n++, f += 8) {
    const int factors = *program++;
    bool ok = d >= f[0] && d <= f[1] && j >= f[2] && j < f[3] && t >= f[4] && t < f[5];
    if (ok && abs(f[6]) != 1) {
      const int s = abs(f[6]);
      ok = (((d - f[7]) % s + s) % s == 0) == (f[6] > 0);
    }
    for (int u = 0; u < factors && ok; u++) ok = factor_of(side, dir, program[u], p.b, t, j);
    if (ok) return true;
    program += factors;
  }
  return false;
}

// the dropout factor of a weight, by Philox-4x32-10 of (t, j / 4, b Hq + h, 0)
inline float kept(Numbers dims, thread const Place& p, int h, int t, int j) {
  uint x[4] = {uint(t), uint(j) >> 2, uint(p.b * dims.Hq + h), 0};
  uint key[2] = {dims.seed_low, dims.seed_high};
  for (int round = 0; round < 10; round++) {
    const uint a = mulhi(0xCD9E8D57u, x[2]) ^ x[1] ^ key[0];
    const uint b = 0xCD9E8D57u * x[2];
    const uint c = mulhi(0xD2511F53u, x[0]) ^ x[3] ^ key[1];
    const uint d = 0xD2511F53u * x[0];
    x[0] = a;
    x[1] = b;
    x[2] = c;
    x[3] = d;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return x[j & 3] >= dims.drop_below ? dims.keep_scale : 0.0f;
}

// |distance| of a pair, by which a slope is multiplied
inline float distance_of(Numbers dims, device const int* side, thread const Place& p, int t, int j) {
  return fabs(float(t + side[dims.o_offset + p.b * dims.offset_stride] - j));
}

// sum of log gates between a key and a row; the running sums may be large, and their high parts cancel exactly
inline float forgotten(Numbers dims, device const int* side, thread const Place& p, int h, int t, int j) {
  device const int* sums = side + dims.o_gates + 2 * (p.b * dims.Hq + h) * dims.Tk;
  const int at = 2 * clamp(t + side[dims.o_offset + p.b * dims.offset_stride], 0, dims.Tk - 1);
  const float high = as_type<float>(sums[at]) - as_type<float>(sums[2 * j]);
  return high + (as_type<float>(sums[at + 1]) - as_type<float>(sums[2 * j + 1]));
}

// the score of an allowed pair in log2 units, from the product q.k
inline float score_of(Numbers dims, device const int* side, device const float* bias, thread const Place& p, int h, float x,
                      int t, int j) {
  if (!(SOFTCAP || BIAS || ALIBI || RELATIVE || GATES)) return x * (dims.scale * LOG2E);
  float s = x * dims.scale;
  if (SOFTCAP) s = dims.softcap * precise::tanh(s / dims.softcap);
  if (BIAS) {
    const float more = bias[long(p.b) * dims.bias_b + long(h) * dims.bias_h + long(t) * dims.bias_t + j * dims.bias_j];
    // a bias of -inf excludes the pair, even if the key contains NaN
    if (more == -INFINITY) return MASKED;
    s += more;
  }
  if (ALIBI) {
    const float slope = as_type<float>(side[dims.o_slopes + p.b * dims.slopes_stride + h]);
    s -= slope * distance_of(dims, side, p, t, j);
  }
  if (RELATIVE) {
    const int at = dims.o_distances + p.b * dims.distances_stride + h * dims.distances_row;
    const float more = as_type<float>(side[at + t + side[dims.o_offset + p.b * dims.offset_stride] - j]);
    if (more == -INFINITY) return MASKED;
    s += more;
  }
  if (GATES) s += forgotten(dims, side, p, h, t, j);
  // a NaN passes this comparison unchanged
  return s * LOG2E < START ? START : s * LOG2E;
}

// derivative of the softcap at a product; 1 - tanh^2 would lose its digits where tanh is near 1
inline float cap_slope(Numbers dims, float x) {
  if (!SOFTCAP) return 1.0f;
  const float e = precise::exp(-2.0f * min(fabs(x * (dims.scale / dims.softcap)), 30.0f));
  return 4.0f * e / ((1.0f + e) * (1.0f + e));
}

// log(exp(a) + exp(b)); both may be -inf
inline float log_add(float a, float b) {
  if (a < MASKED) return b;
  if (b < MASKED) return a;
  const float top = max(a, b);
  return top + precise::log(1.0f + precise::exp((a - top) + (b - top)));
}

// the natural lse of weights 2^(score - top) that add up to `sum`, rounded once
inline float lse_of(float top, float sum) {
  const float high = top * LN2;
  return high + (fma(top, LN2, -high) + top * LN2_LOW + precise::log(sum));
}

// x log2(e) in two parts, so that 2^(x log2 e) is as exact as x
inline float2 in_log2(float x) {
  const float high = x * LOG2E;
  const float low = fma(x, LOG2E, -high) + x * LOG2E_LOW;
  // beyond 2^20 scores are rounded by more than the lower part can say, and equal ones must keep a difference of 0
  return float2(high, fabs(high) > 1048576.0f ? 0.0f : low);
}

// whether lse, in stats of a row, is so far from 0 that its rounding shows in the row's weights
inline bool is_far(device const float* stat) { return fabs(stat[0]) > 1024.0f; }

// tests the bits, because compilers may assume x == x
inline bool is_nan(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }

// 2^x for x <= 0 to half a unit in the last place; the built-in function may be less exact, which shows in gradients of few terms
inline float exp2_fine(float x) {
  if (is_nan(x)) return x;
  if (x < -126.0f) return 0.0f;
  const float n = rint(x);
  const float f = x - n;
  float y = fma(f, 0.00015345811916183706f, 0.0013399931218953942f);
  y = fma(y, f, 0.009618488957449392f);
  y = fma(y, f, 0.0555032877696621f);
  y = fma(y, f, 0.24022646890630905f);
  y = fma(y, f, 0.6931472057372672f);
  y = fma(y, f, 1.0f);
  return y * as_type<float>((int(n) + 127) << 23);
}
