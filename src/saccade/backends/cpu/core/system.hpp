// What differs between operating systems: forks and aligned memory.
#pragma once
#include <cstddef>

namespace saccade {

// Whether this process was forked and has not called exec since: its OpenMP runtime may wait for threads that exist only
// in the parent. Only Linux reports this, and teams are joined only there.
bool was_forked();

// calls `before` in a process that forks, and `in_child` in the new process; nothing where processes cannot fork
void at_forks(void (*before)(), void (*in_child)());

// null if there is not enough memory
void* aligned(size_t alignment, size_t bytes);
void free_aligned(void* memory);

}  // namespace saccade
