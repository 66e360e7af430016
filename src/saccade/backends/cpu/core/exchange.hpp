// Tensors of a framework that offers DLPack's C exchange interface (`__dlpack_c_exchange_api__`, version 1). They are
// read and created without calls of Python, which would cost more than the arithmetic of a short call.
#pragma once
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "types.hpp"

namespace saccade {

using DLTensor = nanobind::dlpack::dltensor;

struct ManagedTensor {
  uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedTensor*);
  uint64_t flags;
  DLTensor tensor;
};

struct Exchange {
  uint32_t major, minor;
  Exchange* older;
  int (*allocate)(DLTensor* like, ManagedTensor** out, void* context,
                  void (*fail)(void* context, const char* kind, const char* message));
  int (*share)(void* object, ManagedTensor** out);
  int (*wrap)(ManagedTensor* tensor, void** object);
  int (*view)(void* object, DLTensor* out);
  int (*stream)(int device, int32_t id, void** out);

  // null where the capsule has another version
  static const Exchange* of(nanobind::handle capsule) {
    auto* api = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) throw nanobind::python_error();
    while (api && api->major != 1) api = api->older;
    return api;
  }
};

// strides in elements; false for tensors that kernels cannot read: on a device, or with a strided last dimension
inline bool read_tensor(const Exchange& api, nanobind::handle object, Array& x) {
  DLTensor t;
  if (api.view(object.ptr(), &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (t.device.device_type != nanobind::device::cpu::value || t.ndim != 4 || !t.strides) return false;
  if (t.strides[3] != 1 && t.shape[3] != 1) return false;
  x.data = static_cast<char*>(t.data) + t.byte_offset;
  for (int i = 0; i < 4; ++i) x.stride[i] = t.strides[i];
  x.dtype = t.dtype.code == static_cast<uint8_t>(nanobind::dlpack::dtype_code::Bfloat) ? DType::bf16
            : t.dtype.bits == 64                                                       ? DType::f64
            : t.dtype.bits == 32                                                       ? DType::f32
                                                                                       : DType::f16;
  return true;
}

// the data of a contiguous tensor [B, Tq, Hq]; null for any other tensor
inline void* read_row_tensor(const Exchange& api, nanobind::handle object, const Call& c) {
  DLTensor t;
  if (api.view(object.ptr(), &t) != 0) {
    PyErr_Clear();
    return nullptr;
  }
  if (t.device.device_type != nanobind::device::cpu::value || t.ndim != 3 || !t.strides) return nullptr;
  const int64_t strides[3] = {c.Tq * c.Hq, c.Hq, 1};
  for (int i = 0; i < 3; ++i)
    if (t.strides[i] != strides[i] && t.shape[i] != 1) return nullptr;
  return static_cast<char*>(t.data) + t.byte_offset;
}

// a new contiguous tensor of the framework, and the Python object for it
class NewTensor {
 public:
  NewTensor(const Exchange& api, DType type, int32_t n, int64_t a, int64_t b, int64_t c, int64_t d = 1) : api_(api) {
    using nanobind::dlpack::dtype_code;
    int64_t shape[4] = {a, b, c, d};
    DLTensor like{};
    like.device = {nanobind::device::cpu::value, 0};
    like.ndim = n;
    like.shape = shape;
    like.dtype.code = static_cast<uint8_t>(type == DType::bf16 ? dtype_code::Bfloat : dtype_code::Float);
    like.dtype.bits = type == DType::f64 ? 64 : type == DType::f32 ? 32 : 16;
    like.dtype.lanes = 1;
    std::string why;
    const auto fail = [](void* to, const char*, const char* message) { *static_cast<std::string*>(to) = message; };
    if (api.allocate(&like, &tensor_, &why, fail) != 0) throw std::runtime_error("no memory for the result: " + why);
  }
  ~NewTensor() {
    if (tensor_ && tensor_->deleter) tensor_->deleter(tensor_);
  }
  NewTensor(const NewTensor&) = delete;
  NewTensor& operator=(const NewTensor&) = delete;
  char* data() const { return static_cast<char*>(tensor_->tensor.data) + tensor_->tensor.byte_offset; }
  nanobind::object release() {
    void* object = nullptr;
    if (api_.wrap(std::exchange(tensor_, nullptr), &object) != 0) throw nanobind::python_error();
    return nanobind::steal(static_cast<PyObject*>(object));
  }

 private:
  const Exchange& api_;
  ManagedTensor* tensor_ = nullptr;
};

}  // namespace saccade
