// Runs the recurrences with diagonal states over the worker threads, by the kernels of the instruction set in use.
#include <algorithm>
#include <optional>

#include "pool.hpp"
#include "sets.hpp"
#include "workspace.hpp"

namespace saccade {

namespace {

const DiagonalKernels& kernels() { return *current_set().diagonal; }

// below some microseconds of work a second thread costs more than it saves
int worth(int64_t steps, int threads) { return steps < 30000 ? 1 : threads; }

template <class Call>
void run(const Tasks<Call>& tasks, const Call& c, int threads) {
  const int64_t bytes = tasks.scratch(c);
  parallel(tasks.count(c), threads, [&](int64_t task) { tasks.run(c, task, bytes ? scratch(bytes) : nullptr); });
}

// enough owners of a group's channels to occupy a large machine, each with at least one block
int64_t owners(const Scan& c, int64_t blocks) {
  constexpr int64_t ENOUGH = 32;
  const int64_t wanted = std::max<int64_t>(1, ENOUGH / std::max<int64_t>(1, c.tokens.count * c.G));
  const int64_t each = (blocks + wanted - 1) / wanted;
  return (blocks + each - 1) / each;
}

}  // namespace

void run_scan(const Scan& c, int threads) { run(kernels().scan, c, worth(c.tokens.total() * c.D * c.N, threads)); }

void run_scan_backward(Scan& c, int threads) {
  const DiagonalKernels& k = kernels();
  const int64_t total = c.tokens.total(), bytes = c.u.dtype == DType::f64 ? 8 : 4, block = 64;
  c.owners = owners(c, k.scan_blocks(c));
  const int64_t size = c.owners * total * c.G * c.N;
  const Workspace sums(((c.fixed_B ? 0 : size) + (c.fixed_C ? 0 : size)) * bytes);
  c.sums_B = sums.get();
  c.sums_C = static_cast<char*>(sums.get()) + (c.fixed_B ? 0 : size * bytes);
  threads = worth(total * c.D * c.N, threads);
  run(k.scan_backward, c, threads);
  if (c.fixed_B && c.fixed_C) return;
  parallel((total + block - 1) / block, threads, [&](int64_t task) {
    for (int64_t t = task * block; t < std::min(total, (task + 1) * block); ++t) k.scan_fold(c, t);
  });
}

void run_gated(const GatedUnit& c, int threads) { run(kernels().gated, c, worth(c.tokens.total() * c.W * 8, threads)); }
void run_gated_backward(const GatedUnit& c, int threads) {
  run(kernels().gated_backward, c, worth(c.tokens.total() * c.W * 8, threads));
}

void run_conv(const Convolution& c, int threads) {
  threads = worth(c.tokens.total() * c.D, threads);
  run(kernels().conv, c, threads);
  if (c.final) run(kernels().conv_final, c, threads);
}
void run_conv_backward(const Convolution& c, int threads) {
  run(kernels().conv_backward, c, worth(c.tokens.total() * c.D, threads));
}

}  // namespace saccade
