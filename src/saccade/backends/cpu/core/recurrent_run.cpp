// Runs the verbs of recurrences on the worker threads, with the kernels of the instruction set in use.
#include "pool.hpp"
#include "sets.hpp"

namespace saccade {

namespace {

// below some microseconds of work a second thread costs more than it saves
int worth(const Recurrence& c, int threads) {
  const double products = static_cast<double>(c.B * c.T * c.H) * static_cast<double>(2 * c.F * c.V + 16 * (c.F + c.V));
  return products < 2e5 ? 1 : threads;
}

}  // namespace

void run_recurrent_forward(const Recurrence& c, int threads) {
  const RecurrentKernels& k = *current_set().recurrent;
  const int64_t bytes = k.forward_scratch(c);
  parallel(c.tasks(), worth(c, threads), [&](int64_t task) { k.forward(c, task, scratch(bytes)); });
}

void run_recurrent_backward(const Recurrence& c, int threads) {
  const RecurrentKernels& k = *current_set().recurrent;
  const int64_t bytes = k.backward_scratch(c);
  parallel(c.tasks(), worth(c, threads), [&](int64_t task) { k.backward(c, task, scratch(bytes)); });
}

}  // namespace saccade
