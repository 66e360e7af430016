// Arguments of the recurrences with one number of state per channel and slot. Plain data, as in types.hpp.
#pragma once
#include "types.hpp"

namespace saccade {

// sequences: rows of a batch, or consecutive stretches of row 0
struct Tokens {
  int64_t count = 0, length = 0;
  const int64_t* starts = nullptr;  // [count + 1] starts of stretches

  // tokens are numbered over all sequences
  int64_t begin(int64_t s) const { return starts ? starts[s] : s * length; }
  int64_t size(int64_t s) const { return begin(s + 1) - begin(s); }
  int64_t total() const { return begin(count); }
  // offset of token t of sequence s in a [B, T, ..]
  int64_t at(const Array& a, int64_t s, int64_t t) const {
    return starts ? (starts[s] + t) * a.stride[1] : s * a.stride[0] + t * a.stride[1];
  }
  // offset of a token by its number
  int64_t at(const Array& a, int64_t token) const {
    return starts ? token * a.stride[1] : token / length * a.stride[0] + token % length * a.stride[1];
  }
  int64_t longest() const {
    int64_t n = 0;
    for (int64_t s = 0; s < count; ++s) n = size(s) > n ? size(s) : n;
    return n;
  }
};

// "wide" arrays have the accumulator's dtype: f32, or f64 for f64 inputs
struct Scan {
  Tokens tokens;
  int64_t D = 0, N = 0, G = 0;
  int64_t chunk = 0;   // tokens between two states that a backward stores
  int64_t owners = 1;  // owners of a group's channels, each with sums of its own
  bool softplus = false;
  Array u, delta, z, y;  // [B, T, D]
  Array A, skip, bias;   // [D, N], [D], [D]
  Array B, C;            // [B, T, G, N], or [D, N] where fixed in time
  bool fixed_B = false, fixed_C = false;
  const void* initial = nullptr;  // wide [count, D, N]
  void* final = nullptr;          // wide [count, D, N]
  Array dy, du, ddelta, dz, dB, dC;
  const void* dfinal = nullptr;
  void *dinitial = nullptr, *dA = nullptr;        // wide [count, D, N]
  void *dskip = nullptr, *dbias = nullptr;        // wide [count, D]
  void *fixed_dB = nullptr, *fixed_dC = nullptr;  // wide [count, D, N]
  void *sums_B = nullptr, *sums_C = nullptr;      // wide [owners, total, G, N]
};

struct GatedUnit {
  Tokens tokens;
  int64_t W = 0, chunk = 0;
  Array x, r, i, y;               // [B, T, W]
  Array a_param;                  // [W]
  const void* initial = nullptr;  // wide [count, W]
  void* final = nullptr;
  Array dy, dx, dr, di;
  const void* dfinal = nullptr;
  void *dinitial = nullptr, *da_param = nullptr;  // wide [count, W]
};

struct Convolution {
  Tokens tokens;
  int64_t D = 0, K = 0;
  int64_t piece = 0;  // tokens of one task
  bool silu = false;
  Array x, y;                     // [B, T, D]
  Array weight, bias;             // [D, K], [D]
  const void* initial = nullptr;  // wide [count, D, K - 1]
  void* final = nullptr;
  Array dy, dx;
  const void* dfinal = nullptr;
  void* dinitial = nullptr;
  void *dweight = nullptr, *dbias = nullptr;  // wide [pieces, D, K], [pieces, D]
};

// one table per instruction set; tasks are independent, and each owns its outputs
template <class Call>
struct Tasks {
  int64_t (*count)(const Call&);
  int64_t (*scratch)(const Call&);  // bytes
  void (*run)(const Call&, int64_t task, char* scratch);
};
struct DiagonalKernels {
  Tasks<Scan> scan, scan_backward;
  int64_t (*scan_blocks)(const Scan&);  // blocks of a group's channels
  void (*scan_fold)(const Scan&, int64_t token);
  Tasks<GatedUnit> gated, gated_backward;
  Tasks<Convolution> conv, conv_final, conv_backward;
};

void run_scan(const Scan& c, int threads);
void run_scan_backward(Scan& c, int threads);
void run_gated(const GatedUnit& c, int threads);
void run_gated_backward(const GatedUnit& c, int threads);
void run_conv(const Convolution& c, int threads);
void run_conv_backward(const Convolution& c, int threads);

}  // namespace saccade
