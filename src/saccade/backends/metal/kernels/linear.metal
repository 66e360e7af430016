// Linear attention (Katharopoulos et al., 2020): S_t = Σ φ(k_j) u_jᵀ over j <= t, o_t = scale S_tᵀ φ(q_t). With NORMALIZE
// o_t is divided by φ(q_t) · z_t instead of scaled; z is a column of S, from a column of ones appended to v.
// Its gradients are sums of the same kind with other rows in the places of q, k and u:
//   o: φ(q) φ(k) u    dq: g u φ(k)    and over j >= t    dk: u g φ(q)    dv: φ(k) φ(q) g        g = dO scale, or dO / (φ(q) · z)
// A chunk has at most C tokens of one sequence. All tiles are float32, because errors of states accumulate over chunks.
// constants: T, U (type of the output), K, V (numbers of a key, of a value), NORMALIZE, MAP (0 none, 1 elu + 1, 2 relu, 3 exp),
// CAUSAL, C, THREADS
#include "matrices.metal"

constant constexpr int QUERY = 0;
constant constexpr int KEY = 1;
constant constexpr int VALUE = 2;
constant constexpr int GRADIENT = 3;
// columns of a state
constant constexpr int W = V + (NORMALIZE ? 1 : 0);

// the numbers of a call; offsets are in int32 words of `side`
struct Dims {
  int tokens, H, Hk, o_sequences;
  float scale;
  int spare_a, spare_b, spare_c;
};
typedef device const Dims& Numbers;

// a chunk's batch entry, first token, number of tokens and sequence
struct Chunk {
  int b, first, count, sequence;
};

inline Chunk chunk_of(device const int* side, int n) {
  Chunk found;
  found.b = side[4 * n];
  found.first = side[4 * n + 1];
  found.count = side[4 * n + 2];
  found.sequence = side[4 * n + 3];
  return found;
}

// the arrays of a call; stats [B, T, H, 2]: the factor of dO, and the gradient of φ(q) · z
struct Given {
  device const T* q;
  device const T* k;
  device const T* v;
  device const T* dout;
  device const float* stats;
};

inline long row_of(Numbers dims, int b, int t, int h, int heads) { return (long(b) * dims.tokens + t) * heads + h; }

inline float mapped(float x) {
  if (MAP == 1) return x > 0.0f ? x + 1.0f : precise::exp(x);
  if (MAP == 2) return x < 0.0f ? 0.0f : x;
  return MAP == 3 ? precise::exp(x) : x;
}

// derivative of the feature map
inline float slope_of(float x) {
  if (MAP == 1) return x > 0.0f ? 1.0f : precise::exp(x);
  if (MAP == 2) return x > 0.0f ? 1.0f : 0.0f;
  return MAP == 3 ? precise::exp(x) : 1.0f;
}

// numbers of a row with this ROLE
template <int ROLE> inline int width_of() { return ROLE == QUERY || ROLE == KEY ? K : W; }

// number c of the row with this ROLE, of token t and head h
template <int ROLE> inline float number_of(thread const Given& given, Numbers dims, int b, int t, int h, int c) {
  if (ROLE == QUERY || ROLE == KEY) {
    const long at = row_of(dims, b, t, h / (dims.H / dims.Hk), dims.Hk) * K + c;
    return mapped(float(ROLE == QUERY ? given.q[at] : given.k[at]));
  }
  const long row = row_of(dims, b, t, h, dims.H);
  if (ROLE == VALUE) return c < V ? float(given.v[row * V + c]) : 1.0f;
  const float factor = NORMALIZE ? given.stats[2 * row] : dims.scale;
  return c < V ? float(given.dout[row * V + c]) * factor : given.stats[2 * row + 1];
}

// Loads numbers c0 .. c0 + width - 1 of a chunk's rows as [C][width], with zeros past its end. Returns whether this thread wrote a
// number that is not finite.
template <int ROLE>
inline bool stage(threadgroup float* to, thread const Given& given, Numbers dims, Chunk chunk, int h, int c0, int width, int tid) {
  bool spoiled = false;
  for (int i = tid; i < C * width; i += THREADS) {
    const int a = i / width;
    const int c = c0 + i % width;
    const bool there = a < chunk.count && c < width_of<ROLE>();
    const float x = there ? number_of<ROLE>(given, dims, chunk.b, chunk.first + a, h, c) : 0.0f;
    to[i] = x;
    spoiled = spoiled || is_infinite(x);
  }
  return spoiled;
}

// acc[n] += left times right [depth][width]; left is [8][pitch], or [depth][pitch] where TRANSPOSED
template <bool TRANSPOSED, int COUNT>
inline void add(thread simdgroup_float8x8* acc, threadgroup const float* left, int pitch, threadgroup const float* right, int width,
                int depth) {
  for (int d = 0; d < depth; d += 8) {
    simdgroup_float8x8 a;
    simdgroup_load(a, TRANSPOSED ? left + d * pitch : left + d, pitch, ulong2(0, 0), TRANSPOSED);
#pragma clang loop unroll(full)
    for (int n = 0; n < COUNT; n++) {
      simdgroup_float8x8 b;
      simdgroup_load(b, right + d * width + 8 * n, width);
      simdgroup_multiply_accumulate(acc[n], a, b, acc[n]);
    }
  }
}
