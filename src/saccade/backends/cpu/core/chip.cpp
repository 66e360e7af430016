#include "chip.hpp"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace saccade {

Instructions instructions() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(__clang__)
  // clang knows the names of the levels from 18 on; a chip with these instructions has the others of its level
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
#else
  const bool v3 = __builtin_cpu_supports("x86-64-v3"), v4 = __builtin_cpu_supports("x86-64-v4");
#endif
  return {v3, v4, v4 && __builtin_cpu_supports("avx512bf16"), __builtin_cpu_is("intel") != 0};
#elif defined(__APPLE__)
  int pairs = 0;
  size_t size = sizeof pairs;
  const bool known = !sysctlbyname("hw.optional.arm.FEAT_BF16", &pairs, &size, nullptr, 0);
  return {false, false, known && pairs, false};
#elif defined(__aarch64__) && defined(__linux__)
  return {false, false, (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0, false};
#else
  return {false, false, false, false};
#endif
}

}  // namespace saccade
