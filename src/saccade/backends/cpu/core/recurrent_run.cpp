// Runs the verbs of recurrences on the worker threads, with the kernels of the instruction set in use.
#include "dispatch.hpp"
#include "pool.hpp"
#include "recurrent.hpp"

namespace saccade {

#if defined(__x86_64__)
const RecurrentKernels* recurrent_base();
const RecurrentKernels* recurrent_v3();
const RecurrentKernels* recurrent_avx512();
const RecurrentKernels* recurrent_avx512bf16();
#else
const RecurrentKernels* recurrent_neon();
#endif

namespace {

const RecurrentKernels& current() {
#if defined(__x86_64__)
  for (const RecurrentKernels* k : {recurrent_base(), recurrent_v3(), recurrent_avx512()})
    if (isa() == k->name) return *k;
  return *recurrent_avx512bf16();
#else
  return *recurrent_neon();
#endif
}

// below some microseconds of work a second thread costs more than it saves
int worth(const Recurrence& c, int threads) {
  const double products = static_cast<double>(c.B * c.T * c.H) * static_cast<double>(2 * c.F * c.V + 16 * (c.F + c.V));
  return products < 2e5 ? 1 : threads;
}

}  // namespace

void run_recurrent_forward(const Recurrence& c, int threads) {
  const RecurrentKernels& k = current();
  const int64_t bytes = k.forward_scratch(c);
  parallel(c.tasks(), worth(c, threads), [&](int64_t task) { k.forward(c, task, scratch(bytes)); });
}

void run_recurrent_backward(const Recurrence& c, int threads) {
  const RecurrentKernels& k = current();
  const int64_t bytes = k.backward_scratch(c);
  parallel(c.tasks(), worth(c, threads), [&](int64_t task) { k.backward(c, task, scratch(bytes)); });
}

}  // namespace saccade
