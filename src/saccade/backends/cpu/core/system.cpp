#include "system.hpp"

#include <cstdlib>
#if defined(_WIN32)
#include <malloc.h>
#else
#include <pthread.h>
#endif
#if defined(__linux__)
#include <cstdio>
#include <cstring>
#endif

namespace saccade {

bool was_forked() {
  unsigned flags = 0;
#if defined(__linux__)
  constexpr unsigned PF_FORKNOEXEC = 0x40;
  if (std::FILE* file = std::fopen("/proc/self/stat", "r")) {
    char text[512] = {};
    const size_t size = std::fread(text, 1, sizeof(text) - 1, file);
    std::fclose(file);
    const char* name_end = size ? std::strrchr(text, ')') : nullptr;
    if (!name_end || std::sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) flags = 0;
  }
  flags &= PF_FORKNOEXEC;
#endif
  return flags;
}

#if defined(_WIN32)
void at_forks(void (*)(), void (*)()) {}
void* aligned(size_t alignment, size_t bytes) { return _aligned_malloc(bytes, alignment); }
void free_aligned(void* memory) { _aligned_free(memory); }
#else
void at_forks(void (*before)(), void (*in_child)()) { pthread_atfork(before, nullptr, in_child); }
void* aligned(size_t alignment, size_t bytes) {
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, bytes) ? nullptr : memory;
}
void free_aligned(void* memory) { std::free(memory); }
#endif

}  // namespace saccade
