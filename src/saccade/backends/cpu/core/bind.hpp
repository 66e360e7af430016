// What the Python interfaces share: arrays as kernels see them.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "pool.hpp"
#include "types.hpp"

namespace saccade {

namespace nb = nanobind;
using Any = nb::ndarray<>;
using In = nb::ndarray<nb::ro>;

// bfloat16 arrives as uint16
template <class A>
DType dtype_of(const A& a) {
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return a.dtype().code == static_cast<uint8_t>(code) && a.dtype().bits == bits && a.dtype().lanes == 1;
  };
  using Kind = nb::dlpack::dtype_code;
  if (is(Kind::Float, 32)) return DType::f32;
  if (is(Kind::UInt, 16)) return DType::bf16;
  if (is(Kind::Float, 16)) return DType::f16;
  if (is(Kind::Float, 64)) return DType::f64;
  throw nb::type_error("an array has a dtype that the core does not compute");
}

// coded: of codes, whose scales the caller adds
template <class A>
Array view(const A& a, bool coded = false) {
  Array x;
  x.data = static_cast<char*>(const_cast<void*>(static_cast<const void*>(a.data())));
  x.dtype = coded ? DType::codes : dtype_of(a);
  for (size_t i = 0; i < a.ndim() && i < 4; ++i) x.stride[i] = a.stride(i);
  return x;
}

// Lets other Python threads run while the core computes. Python still handles signals: a call of the main thread ends
// with the exception that a handler raises, such as KeyboardInterrupt.
class Unlocked {
 public:
  Unlocked();

 private:
  nb::gil_scoped_release released_;
  Interruptible interruptible_;
};

void bind_recurrent(nb::module_& m);
void bind_diagonal(nb::module_& m);
void bind_ffi(nb::module_& m);

}  // namespace saccade
