// Compiled once per instruction set (SACCADE_ISA): the table of its kernels.
#include <type_traits>

#include "append.hpp"
#include "bias.hpp"
#include "decode_wide.hpp"
#include "forward.hpp"
#include "ordered.hpp"
#include "tangent.hpp"

namespace saccade {
namespace SACCADE_ISA {

bool is_f64(const Call& c) { return c.q.dtype == DType::f64; }

// calls f with a null pointer of the kind of products; a set with pairs is only compiled for those
template <class F>
auto by_kind([[maybe_unused]] const Call& c, F f) {
#if defined(SACCADE_PAIRS)
  return f(static_cast<Pairs*>(nullptr));
#else
  if (is_f64(c)) return f(static_cast<Plain<double>*>(nullptr));
  return f(static_cast<Plain<float>*>(nullptr));
#endif
}
bool short_rows(const Call& c) {
  return by_kind(c, [&](auto* k) { return short_rows<typename std::remove_pointer_t<decltype(k)>::sum>(c); });
}
int64_t forward_tasks(const Call& c) {
  return by_kind(c, [&](auto* k) { return Forward<std::remove_pointer_t<decltype(k)>>::tasks(c); });
}
int64_t forward_scratch(const Call& c) {
  return by_kind(c, [&](auto* k) { return Forward<std::remove_pointer_t<decltype(k)>>::scratch_bytes(c); });
}
void forward(const Call& c, int64_t task, char* scratch) {
  by_kind(c, [&](auto* k) { Forward<std::remove_pointer_t<decltype(k)>>::task(c, task, scratch); });
}
// calls f with a pointer to the type of the kernel
template <class F>
auto by_decode(const Call& c, F f) {
  if (c.range)
    return by_kind(c, [&](auto* k) { return f(static_cast<Ordered<std::remove_pointer_t<decltype(k)>>*>(nullptr)); });
  return by_kind(c, [&](auto* k) {
    using K = std::remove_pointer_t<decltype(k)>;
    return WideDecode<K>::suits(c) ? f(static_cast<WideDecode<K>*>(nullptr)) : f(static_cast<Decode<K>*>(nullptr));
  });
}
int64_t decode_tasks(const Call& c) {
  return by_decode(c, [&](auto* k) { return std::remove_pointer_t<decltype(k)>::tasks(c); });
}
int64_t decode_scratch(const Call& c) {
  return by_decode(c, [&](auto* k) { return std::remove_pointer_t<decltype(k)>::scratch_bytes(c); });
}
void decode(const Call& c, int64_t task, char* scratch) {
  by_decode(c, [&](auto* k) { std::remove_pointer_t<decltype(k)>::task(c, task, scratch); });
}
void combine(const Call& c, int64_t task) {
  by_decode(c, [&](auto* k) { std::remove_pointer_t<decltype(k)>::combine(c, task); });
}
int64_t backward_scratch(const Call& c) {
  return by_kind(c, [&](auto* k) { return Backward<std::remove_pointer_t<decltype(k)>>::scratch_bytes(c); });
}
int64_t backward_sums(const Call& c) {
  return by_kind(c, [&](auto* k) { return KeySums<typename std::remove_pointer_t<decltype(k)>::sum>::size(c); });
}
void backward(const Call& c, int64_t task, char* scratch) {
  by_kind(c, [&](auto* k) { Backward<std::remove_pointer_t<decltype(k)>>::task(c, task, scratch); });
}
void backward_finish(const Call& c, int64_t task, int64_t begin, int64_t end) {
  by_kind(c, [&](auto* k) { KeySums<typename std::remove_pointer_t<decltype(k)>::sum>::finish(c, task, begin, end); });
}
void backward_distances(const Call& c, int64_t task, char* scratch) {
  by_kind(c, [&](auto* k) { BiasGradient<std::remove_pointer_t<decltype(k)>>::distances(c, task, scratch); });
}
void backward_bias(const Call& c, int64_t task, char* scratch) {
  by_kind(c, [&](auto* k) { BiasGradient<std::remove_pointer_t<decltype(k)>>::task(c, task, scratch); });
}
int64_t tangent_tasks(const Call& c) {
  return by_kind(c, [&](auto* k) { return Tangent<std::remove_pointer_t<decltype(k)>>::tasks(c); });
}
int64_t tangent_scratch(const Call& c) {
  return by_kind(c, [&](auto* k) { return Tangent<std::remove_pointer_t<decltype(k)>>::scratch_bytes(c); });
}
void tangent(const Call& c, int64_t task, char* scratch) {
  by_kind(c, [&](auto* k) { Tangent<std::remove_pointer_t<decltype(k)>>::task(c, task, scratch); });
}
#if defined(SACCADE_PAIRS)
constexpr auto append_scratch = nullptr, append = nullptr;
#else
int64_t append_scratch(const Append& c) {
  return c.in.dtype == DType::f64 ? Appender<double>::scratch_bytes(c) : Appender<float>::scratch_bytes(c);
}
void append(const Append& c, int64_t token, char* scratch) {
  c.in.dtype == DType::f64 ? Appender<double>::token(c, token, scratch) : Appender<float>::token(c, token, scratch);
}
#endif
void row(const Call& c, int64_t at) {
  by_kind(c, [&](auto* k) { Backward<std::remove_pointer_t<decltype(k)>>::row(c, at); });
}

void refine(const Call& c, int64_t at) {
  by_kind(c, [&](auto* k) { Backward<std::remove_pointer_t<decltype(k)>>::refine(c, at); });
}

// the peak of the machine: the same product on tiles that stay in the L1 cache
constexpr int64_t PROBE = 64;
template <class K>
void probe_product(bool matrix, int64_t rounds, char* scratch) {
  using Num = typename K::num;
  using T = typename K::sum;
  Num* a = reinterpret_cast<Num*>(scratch);
  Num* b = a + PROBE * TILE_Q;
  T* out = reinterpret_cast<T*>(b + PROBE * TILE_Q);
  for (int64_t i = 0; i < PROBE * TILE_Q; ++i) a[i] = Num(0), b[i] = Num(0), out[i] = T(0);
  const MatrixRegisters registers(matrix);
  const LeftRows<Num> rows{b, PROBE, 1, matrix ? b : nullptr, PROBE};
  for (int64_t n = 0; n < rounds; ++n) {
    product<K>(PROBE, TILE_Q, PROBE, a, TILE_Q, rows, out, TILE_Q, true);
    asm volatile("" ::: "memory");
  }
}
void probe([[maybe_unused]] int dtype, bool matrix, int64_t rounds, char* scratch) {
#if defined(SACCADE_PAIRS)
  probe_product<Pairs>(matrix, rounds, scratch);
#else
  if (dtype == static_cast<int>(DType::f64)) return probe_product<Plain<double>>(matrix, rounds, scratch);
  probe_product<Plain<float>>(matrix, rounds, scratch);
#endif
}
int64_t probe_flops() {
#if defined(SACCADE_PAIRS)
  return 4 * PROBE * PROBE * TILE_Q;
#else
  return 2 * PROBE * PROBE * TILE_Q;
#endif
}

}  // namespace SACCADE_ISA

#define SACCADE_JOIN_(a, b) a##b
#define SACCADE_JOIN(a, b) SACCADE_JOIN_(a, b)

const Kernels* SACCADE_JOIN(kernels_, SACCADE_ISA)() {
  using namespace SACCADE_ISA;
  static constexpr Kernels table = {short_rows,       forward_tasks,
                                    forward_scratch,  forward,
                                    decode_tasks,     decode_scratch,
                                    decode,           combine,
                                    backward_scratch, backward_sums,
                                    backward,         backward_finish,
                                    backward_bias,    backward_distances,
                                    tangent_tasks,    tangent_scratch,
                                    tangent,          append_scratch,
                                    append,           row,
                                    refine,           probe,
                                    probe_flops};
  return &table;
}

}  // namespace saccade
