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

template <class A>
DType dtype_of(const A& a) {
  if (a.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt)) return DType::bf16;
  return a.dtype().bits == 64 ? DType::f64 : a.dtype().bits == 32 ? DType::f32 : DType::f16;
}

template <class A>
Array view(const A& a) {
  Array x;
  x.data = static_cast<char*>(const_cast<void*>(static_cast<const void*>(a.data())));
  x.dtype = dtype_of(a);
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
