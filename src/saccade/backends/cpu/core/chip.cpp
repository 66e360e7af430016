#include "chip.hpp"

#if defined(_WIN32) && defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace saccade {

#if defined(_WIN32) && defined(__x86_64__)
// clang-cl does not link the library that contains clang's own test of a chip
Instructions instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0, saved = 0;
  const bool intel = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return {false, false, false, intel};
  const bool fma = c & bit_FMA;
  // which registers Windows saves: those of AVX, and those of AVX-512
  asm volatile("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
  constexpr unsigned AVX = 0x6, AVX512 = 0xe6;
  constexpr unsigned V3 = bit_AVX2 | bit_BMI2;
  constexpr unsigned V4 = bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
  b = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  const bool v3 = fma && (saved & AVX) == AVX && (b & V3) == V3;
  const bool v4 = v3 && (saved & AVX512) == AVX512 && (b & V4) == V4;
  a = 0;
  __get_cpuid_count(7, 1, &a, &b, &c, &d);
  return {v3, v4, v4 && (a & bit_AVX512BF16), intel};
}
#else
#if defined(__x86_64__)
// Linux gives the registers of AMX to processes that ask for them.
static bool matrix_registers() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (AMX_BF16 | AMX_TILE)) return false;
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

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
  const bool pairs = v4 && __builtin_cpu_supports("avx512bf16");
  return {v3, v4, pairs, __builtin_cpu_is("intel") != 0, pairs && matrix_registers()};
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
#endif

}  // namespace saccade
