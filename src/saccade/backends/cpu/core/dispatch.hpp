// Runs the verbs on the worker threads, with the kernels of the instruction set in use.
#pragma once
#include <vector>

#include "types.hpp"

namespace saccade {

void run_forward(Call& c, const std::vector<const Part*>& parts, int threads);
void run_decode(Call& c, const Part& part, int threads);
void run_backward(Call& c, const std::vector<const Part*>& parts, int threads);
// d: see Call::tangent
void run_tangent(Call& c, Call& d, const std::vector<const Part*>& parts, int threads);
void run_append(const Append& c, int threads);

double probe_flops(int dtype, int threads);                   // flop/s of the inner product
double probe_stream(char* data, int64_t bytes, int threads);  // bytes/s of one read

}  // namespace saccade
