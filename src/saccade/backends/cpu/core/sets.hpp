// The instruction sets that the core is compiled for, those that this machine runs, and the one in use.
#pragma once
#include <string>
#include <vector>

#include "diagonal_types.hpp"
#include "recurrent.hpp"
#include "types.hpp"

namespace saccade {

struct Set {
  const char* name;
  const Kernels* kernels;
  const Kernels* pairs;  // those that multiply pairs of bfloat16, for calls that they suit; or null
  const RecurrentKernels* recurrent;
  const DiagonalKernels* diagonal;
  bool matrix = false;  // whether these pairs have matrix registers
};

std::vector<std::string> available_isas();  // best first
void set_isa(const std::string& name);      // throws std::invalid_argument with the available names
const Set& current_set();
const Kernels& kernels_of(const Call& c);
// of forward and backward, and of decode; they state in the call whether its products use matrix registers
const Kernels& matrix_kernels_of(Call& c);
const Kernels& decode_kernels_of(Call& c);

}  // namespace saccade
