// What differs between chips: the instructions that they have, the mode of rounding, and waiting in a loop.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace saccade {

// Instruction sets beyond those that the rest of the process needs. On x86-64 v3, v4 and pairs of bfloat16, on arm64 pairs.
struct Instructions {
  bool v3, v4, pairs;
  // whether pairs of bfloat16 are multiplied no faster than numbers of float32
  bool slow_pairs;
  // matrix registers for pairs, which this process may use
  bool matrix = false;
};
Instructions instructions();

// tells the chip that this thread waits in a loop
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Rounding to nearest, with numbers below the normal ones, for as long as it lives. A thread inherits the mode of the
// thread that starts it, and JAX and torch may flush such numbers to zero: bits would depend on which thread computes.
class PlainNumbers {
 public:
#if defined(__x86_64__)
  PlainNumbers() {
    if ((outer_ & ~FLAGS) != PLAIN) _mm_setcsr(PLAIN);
  }
  ~PlainNumbers() {
    if ((outer_ & ~FLAGS) != PLAIN) _mm_setcsr(outer_);
  }

 private:
  static constexpr unsigned PLAIN = 0x1f80, FLAGS = 0x3f;
  const unsigned outer_ = _mm_getcsr();
#elif defined(__aarch64__)
  PlainNumbers() { set(0); }
  ~PlainNumbers() { set(outer_); }

 private:
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  void set(uint64_t mode) const {
    if (outer_) asm volatile("msr fpcr, %0" : : "r"(mode));
  }
  const uint64_t outer_ = get();
#else
  PlainNumbers() {}
#endif
};

}  // namespace saccade
