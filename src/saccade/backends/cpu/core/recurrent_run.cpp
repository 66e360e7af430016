// Runs the verbs of recurrences on the worker threads, with the kernels of the instruction set in use.
#include <algorithm>

#include "pool.hpp"
#include "sets.hpp"

namespace saccade {

namespace {

// below some microseconds of work a second thread costs more than it saves
int worth(const Recurrence& c, int threads) {
  const double products = static_cast<double>(c.B * c.T * c.H) * static_cast<double>(2 * c.F * c.V + 16 * (c.F + c.V));
  return products < 2e5 ? 1 : threads;
}

// The most heads of a task with which no thread has more to do than with tasks of one head, and whose states take 256 KB
// at most: each chunk reads and writes them in a core's second cache.
int64_t heads_of_a_task(Recurrence c, int threads) {
  const auto longest = [&] { return (c.tasks() + threads - 1) / threads * c.heads; };
  const int64_t least = longest(), fitting = (int64_t{1} << 16) / std::max<int64_t>(1, c.F * c.V);
  for (c.heads = std::clamp<int64_t>(fitting, 1, 4); longest() > least;) --c.heads;
  return c.heads;
}

}  // namespace

void run_recurrent_forward(const Recurrence& call, int threads) {
  Recurrence c = call;
  threads = worth(c, threads);
  c.heads = heads_of_a_task(c, threads);
  const RecurrentKernels& k = *current_set().recurrent;
  const int64_t bytes = k.forward_scratch(c);
  parallel(c.tasks(), threads, [&](int64_t task) { k.forward(c, task, scratch(bytes)); });
}

void run_recurrent_backward(const Recurrence& c, int threads) {
  const RecurrentKernels& k = *current_set().recurrent;
  const int64_t bytes = k.backward_scratch(c);
  parallel(c.tasks(), worth(c, threads), [&](int64_t task) { k.backward(c, task, scratch(bytes)); });
}

}  // namespace saccade
