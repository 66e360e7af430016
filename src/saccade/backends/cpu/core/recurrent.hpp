// Arguments of the recurrence kernels. Plain data only: this header is compiled once per instruction set.
#pragma once
#include "types.hpp"

namespace saccade {

enum class Feature : int { none = 0, elu = 1, relu = 2, exp = 3, taylor = 4 };
enum Decay : int { NO_DECAY = 0, HEAD = 1, CHANNEL = 2 };

// S_t = decay_t S_{t-1} + k_t u_t^T, o_t = scale S_t^T q_t over N sequences; the strides are batch, position, head, 1
struct Recurrence {
  int64_t B, T, N, H, Hk, K, F, V;
  double scale;
  int64_t chunk;
  Feature feature;
  Decay decay;
  bool delta, normalize, causal;
  int64_t block;                          // columns of a state that one task owns, a multiple of 16
  Array q{}, k{}, v{}, g{}, beta{}, o{};  // g, beta: no data where the call has none
  const int64_t* borders = nullptr;       // [N + 1] where sequences are packed into one batch entry
  const void* initial = nullptr;          // [N, H, F, V + normalize] contiguous, f32 (f64 for f64), like the next three
  void* final_state = nullptr;
  const void* dfinal = nullptr;
  void* dinitial = nullptr;
  // dq, dk, dg and dbeta have B batch entries for each block of columns, one block after the other
  Array dout{}, dq{}, dk{}, dv{}, dg{}, dbeta{};

  int64_t heads = 1;  // neighbours that one task computes in turn, chunk by chunk; their rows are close in memory

  int64_t shares() const { return (V + block - 1) / block; }
  int64_t groups() const { return (H + heads - 1) / heads; }
  int64_t tasks() const { return N * groups() * shares(); }
};

// one table per instruction set; a task owns a block of the columns of one state
struct RecurrentKernels {
  int64_t (*forward_scratch)(const Recurrence&);
  void (*forward)(const Recurrence&, int64_t task, char* scratch);
  int64_t (*backward_scratch)(const Recurrence&);
  void (*backward)(const Recurrence&, int64_t task, char* scratch);
};

void run_recurrent_forward(const Recurrence& c, int threads);
void run_recurrent_backward(const Recurrence& c, int threads);

}  // namespace saccade
