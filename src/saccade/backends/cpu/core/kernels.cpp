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

// bf16 products need plain scores (the softmax then has only one multiplication left) and the instruction
bool use_pairs([[maybe_unused]] const Call& c) {
#if defined(SACCADE_PAIRS)
  return c.q.dtype == DType::bf16 && c.k.dtype == DType::bf16 && c.v.dtype == DType::bf16 && c.plain() && c.scale > 0;
#else
  return false;
#endif
}

template <class F>
auto by_kind(const Call& c, F f, [[maybe_unused]] bool may_pair = true) {
  if (is_f64(c)) return f(static_cast<Plain<double>*>(nullptr));
#if defined(SACCADE_PAIRS)
  if (may_pair && use_pairs(c)) return f(static_cast<Pairs*>(nullptr));
#endif
  return f(static_cast<Plain<float>*>(nullptr));
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
  // whether pairs of keys can be read in place, by whole vectors
  const bool may_pair = c.D % 32 == 0 && c.Dv % 16 == 0;
  return by_kind(
      c,
      [&](auto* k) {
        using K = std::remove_pointer_t<decltype(k)>;
        return WideDecode<K>::suits(c) ? f(static_cast<WideDecode<K>*>(nullptr)) : f(static_cast<Decode<K>*>(nullptr));
      },
      may_pair);
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
  return by_kind(c, [&](auto* k) { return Backward<std::remove_pointer_t<decltype(k)>>::sums(c); });
}
void backward(const Call& c, int64_t task, char* scratch) {
  by_kind(c, [&](auto* k) { Backward<std::remove_pointer_t<decltype(k)>>::task(c, task, scratch); });
}
void backward_finish(const Call& c, int64_t task) {
  by_kind(c, [&](auto* k) { Backward<std::remove_pointer_t<decltype(k)>>::finish_keys(c, task); });
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
int64_t append_scratch(const Append& c) {
  return c.in.dtype == DType::f64 ? Appender<double>::scratch_bytes(c) : Appender<float>::scratch_bytes(c);
}
void append(const Append& c, int64_t token, char* scratch) {
  c.in.dtype == DType::f64 ? Appender<double>::token(c, token, scratch) : Appender<float>::token(c, token, scratch);
}
void row(const Call& c, int64_t at) {
  by_kind(c, [&](auto* k) { Backward<std::remove_pointer_t<decltype(k)>>::row(c, at); });
}

void refine(const Call& c, int64_t at) {
  by_kind(c, [&](auto* k) { Backward<std::remove_pointer_t<decltype(k)>>::refine(c, at); });
}

// the peak of the machine: the same product on tiles that stay in the L1 cache
constexpr int64_t PROBE = 64;
template <class K>
void probe_product(int64_t rounds, char* scratch) {
  using Num = typename K::num;
  using T = typename K::sum;
  Num* a = reinterpret_cast<Num*>(scratch);
  Num* b = a + PROBE * TILE_Q;
  T* out = reinterpret_cast<T*>(b + PROBE * TILE_Q);
  for (int64_t i = 0; i < PROBE * TILE_Q; ++i) a[i] = Num(0), b[i] = Num(0), out[i] = T(0);
  for (int64_t n = 0; n < rounds; ++n) {
    mm<K>(PROBE, TILE_Q, PROBE, a, TILE_Q, b, PROBE, 1, out, TILE_Q, true);
    asm volatile("" ::: "memory");
  }
}
void probe(int dtype, int64_t rounds, char* scratch) {
#if defined(SACCADE_PAIRS)
  if (dtype == static_cast<int>(DType::bf16)) return probe_product<Pairs>(rounds, scratch);
#endif
  if (dtype == static_cast<int>(DType::f64)) return probe_product<Plain<double>>(rounds, scratch);
  probe_product<Plain<float>>(rounds, scratch);
}
int64_t probe_flops([[maybe_unused]] int dtype) {
  int64_t pairs = 1;
#if defined(SACCADE_PAIRS)
  pairs = dtype == static_cast<int>(DType::bf16) ? 2 : 1;
#endif
  return 2 * pairs * PROBE * PROBE * TILE_Q;
}

}  // namespace SACCADE_ISA

#define SACCADE_TEXT_(x) #x
#define SACCADE_TEXT(x) SACCADE_TEXT_(x)
#define SACCADE_JOIN_(a, b) a##b
#define SACCADE_JOIN(a, b) SACCADE_JOIN_(a, b)

const Kernels* SACCADE_JOIN(kernels_, SACCADE_ISA)() {
  using namespace SACCADE_ISA;
  static constexpr Kernels table = {SACCADE_TEXT(SACCADE_ISA),
                                    forward_tasks,
                                    forward_scratch,
                                    forward,
                                    decode_tasks,
                                    decode_scratch,
                                    decode,
                                    combine,
                                    backward_scratch,
                                    backward_sums,
                                    backward,
                                    backward_finish,
                                    backward_bias,
                                    backward_distances,
                                    tangent_tasks,
                                    tangent_scratch,
                                    tangent,
                                    append_scratch,
                                    append,
                                    row,
                                    refine,
                                    probe,
                                    probe_flops};
  return &table;
}

}  // namespace saccade
