// Compiled once per instruction set (SACCADE_ISA): the table of its recurrence kernels.
#include "recurrent_backward.hpp"
#include "recurrent_forward.hpp"

namespace saccade {
namespace SACCADE_ISA {

bool wide(const Recurrence& c) { return c.q.dtype == DType::f64; }

int64_t recurrent_forward_scratch(const Recurrence& c) {
  return wide(c) ? RecurrentForward<double>::scratch_bytes(c) : RecurrentForward<float>::scratch_bytes(c);
}
void recurrent_forward(const Recurrence& c, int64_t task, char* scratch) {
  wide(c) ? RecurrentForward<double>::task(c, task, scratch) : RecurrentForward<float>::task(c, task, scratch);
}
int64_t recurrent_backward_scratch(const Recurrence& c) {
  return wide(c) ? RecurrentBackward<double>::scratch_bytes(c) : RecurrentBackward<float>::scratch_bytes(c);
}
void recurrent_backward(const Recurrence& c, int64_t task, char* scratch) {
  wide(c) ? RecurrentBackward<double>::task(c, task, scratch) : RecurrentBackward<float>::task(c, task, scratch);
}

}  // namespace SACCADE_ISA

#define SACCADE_JOIN_(a, b) a##b
#define SACCADE_JOIN(a, b) SACCADE_JOIN_(a, b)

const RecurrentKernels* SACCADE_JOIN(recurrent_, SACCADE_ISA)() {
  using namespace SACCADE_ISA;
  static constexpr RecurrentKernels table = {recurrent_forward_scratch, recurrent_forward, recurrent_backward_scratch,
                                             recurrent_backward};
  return &table;
}

}  // namespace saccade
