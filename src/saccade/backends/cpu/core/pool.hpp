// Worker threads: asleep when idle, shared by all callers, remade after a fork.
#pragma once
#include <cstdint>
#include <functional>

namespace saccade {

// runs body(task) for every task in [0, n) on at most `threads` threads, the caller among them, and returns when all are done
void parallel(int64_t n, int threads, const std::function<void(int64_t)>& body);

// this thread's scratch memory: at least `bytes`, aligned to 64, contents undefined
char* scratch(int64_t bytes);

int live_workers();

}  // namespace saccade
