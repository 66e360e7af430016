// The emulator's own part, compiled once for all kernels: fibers, the order in which they run, what they wait for.
#include "emulator.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#if defined(__x86_64__)
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
#error "the emulator switches fibers by instructions of x86-64: run it there"
#endif

namespace emulator {

Threadgroup* running = nullptr;
Fragment fragment;

UNWATCHED static void to_scheduler() {
  Threadgroup& g = *running;
  Lane& lane = *g.current;
#ifdef EMULATOR_ADDRESS
  __sanitizer_start_switch_fiber(lane.wait == Wait::DONE ? nullptr : &lane.fake, g.bottom, g.depth);
#endif
#ifdef EMULATOR_THREAD
  __tsan_switch_to_fiber(g.fiber, __tsan_switch_to_fiber_no_sync);
#endif
  emulator_switch(&lane.stack_pointer, g.scheduler);
#ifdef EMULATOR_ADDRESS
  __sanitizer_finish_switch_fiber(lane.fake, &g.bottom, &g.depth);
#endif
}

UNWATCHED static void lane_main() {
  Threadgroup& g = *running;
#ifdef EMULATOR_ADDRESS
  __sanitizer_finish_switch_fiber(nullptr, &g.bottom, &g.depth);
#endif
#ifdef EMULATOR_THREAD
  __tsan_acquire(&g.started);
#endif
  g.body();
#ifdef EMULATOR_THREAD
  __tsan_release(&g.ended);
#endif
  g.current->wait = Wait::DONE;
  to_scheduler();
  abort();
}

UNWATCHED void wait_for(Wait what, int line) {
  Lane& lane = *running->current;
  lane.wait = what;
  lane.line = line;
#ifdef EMULATOR_THREAD
  // two objects take turns: a lane that is ahead must not give order to one that is behind
  const bool all = what == Wait::THREADGROUP;
  void* object = (all ? running->ordered : lane.simdgroup->ordered) + (lane.waits[all]++ & 1);
  __tsan_release(object);
  to_scheduler();
  __tsan_acquire(object);
#else
  to_scheduler();
#endif
}

UNWATCHED void* shared(size_t size) {
  Threadgroup& g = *running;
  const size_t n = g.current->arrays++;
  if (n == g.arrays.size()) {
    char* bytes = static_cast<char*>(malloc(size + GUARD));
    for (size_t i = 0; i < size + GUARD; i++) bytes[i] = static_cast<char>(POISON);
    g.arrays.push_back({bytes, size});
    g.bytes += (size + 15) / 16 * 16;
#ifdef EMULATOR_THREAD
    __tsan_release(&g.arrays);
#endif
  }
#ifdef EMULATOR_THREAD
  __tsan_acquire(&g.arrays);
#endif
  return g.arrays[n].bytes;
}

static uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// 0 .. n - 1 in the order of the schedule
static void arrange(Threadgroup& g, int n, std::vector<int>& order) {
  order.resize(n);
  for (int i = 0; i < n; i++) order[i] = g.order == REVERSE ? n - 1 - i : i;
  if (g.order >= RANDOM)
    for (int i = n; i > 1; i--) std::swap(order[i - 1], order[next_random(g.random) % i]);
}

static bool fail(Threadgroup& g, const char* what, int first, int second) {
  snprintf(g.error, sizeof g.error, "threadgroup (%u, %u, %u): %s (lines %d and %d)", g.index.x, g.index.y, g.index.z,
           what, first, second);
  return false;
}

static void start(Threadgroup& g, Lane& lane, unsigned number) {
  char* stack = lane.stack;
  if (!stack) {
    void* made = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) abort();
    stack = static_cast<char*>(made);
  }
#ifdef EMULATOR_THREAD
  if (lane.fiber) __tsan_destroy_fiber(lane.fiber);
#endif
  lane = Lane{};
  lane.stack = stack;
  void** top = reinterpret_cast<void**>(stack + STACK);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&lane_main);
  // the six registers that a switch restores
  for (int i = 0; i < 6; i++) *--top = nullptr;
  lane.stack_pointer = top;
  lane.wait = Wait::NOTHING;
  lane.number = number;
  lane.lane = number % WIDTH;
  lane.simdgroup = &g.simdgroups[number / WIDTH];
  lane.position = {number % g.size.x, number / g.size.x % g.size.y, number / (g.size.x * g.size.y)};
#ifdef EMULATOR_THREAD
  lane.fiber = __tsan_create_fiber(0);
#endif
}

static void resume(Threadgroup& g, Lane& lane) {
  g.current = &lane;
#ifdef EMULATOR_ADDRESS
  __sanitizer_start_switch_fiber(&g.fake, lane.stack, STACK);
#endif
#ifdef EMULATOR_THREAD
  g.fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(lane.fiber, __tsan_switch_to_fiber_no_sync);
#endif
  emulator_switch(&g.scheduler, lane.stack_pointer);
#ifdef EMULATOR_ADDRESS
  __sanitizer_finish_switch_fiber(g.fake, nullptr, nullptr);
#endif
}

// lanes of one SIMD-group as far as they get without others; 1: they met in one line and go on, 0: they wait, -1: error
static int advance(Threadgroup& g, Simdgroup& s, std::vector<int>& order) {
  arrange(g, s.size, order);
  for (int n : order)
    if (s.lanes[n]->wait == Wait::NOTHING) resume(g, *s.lanes[n]);
  int waiting = 0;
  const Lane* first = nullptr;
  const Lane* other = nullptr;
  for (int n = 0; n < s.size; n++) {
    const Lane& lane = *s.lanes[n];
    if (lane.wait == Wait::SIMDGROUP) {
      waiting++;
      if (!first) first = &lane;
      if (lane.line != first->line) other = &lane;
    } else {
      other = &lane;
    }
  }
  if (!waiting) return 0;
  if (other) {
    const int line = other->wait == Wait::DONE ? -1 : other->line;
    return fail(g, "lanes of a SIMD-group diverge at an operation of all (-1: returned)", first->line, line), -1;
  }
  g.counts.exchanges++;
  for (int n = 0; n < s.size; n++) s.lanes[n]->wait = Wait::NOTHING;
  return 1;
}

// whether all threads wait at the same barrier and may continue; false with an error if some cannot
static bool pass_barrier(Threadgroup& g, unsigned& done) {
  done = 0;
  unsigned waiting = 0;
  for (const Lane& lane : g.lanes) {
    done += lane.wait == Wait::DONE;
    waiting += lane.wait == Wait::THREADGROUP;
  }
  if (done == g.threads) return true;
  if (!waiting) return fail(g, "no thread can go on", 0, 0);
  if (done) return fail(g, "threads wait at a barrier after others returned", -1, -1);
  const int line = g.lanes[0].line;
  for (const Lane& lane : g.lanes)
    if (lane.line != line) return fail(g, "threads wait at different barriers", line, lane.line);
  for (Lane& lane : g.lanes) lane.wait = Wait::NOTHING;
  g.counts.barriers++;
  return true;
}

static bool run_group(Threadgroup& g, size_t memory) {
  g.threads = g.size.x * g.size.y * g.size.z;
  for (size_t n = g.threads; n < g.lanes.size(); n++)
    if (g.lanes[n].stack) munmap(g.lanes[n].stack, STACK);
  g.lanes.resize(g.threads);
  g.simdgroups.resize((g.threads + WIDTH - 1) / WIDTH);
  g.bytes = 0;
  for (unsigned n = 0; n < g.threads; n++) start(g, g.lanes[n], n);
  for (unsigned s = 0; s < g.simdgroups.size(); s++) {
    Simdgroup& group = g.simdgroups[s];
    group.index = s;
    group.size = 0;
    for (unsigned n = s * WIDTH; n < g.threads && group.size < WIDTH; n++) group.lanes[group.size++] = &g.lanes[n];
  }
#ifdef EMULATOR_THREAD
  __tsan_release(&g.started);
#endif
  std::vector<int> order, lanes;
  for (unsigned done = 0; done < g.threads;) {
    bool moving = true;
    while (moving) {
      moving = false;
      arrange(g, static_cast<int>(g.simdgroups.size()), order);
      for (int s : order) {
        int met = advance(g, g.simdgroups[s], lanes);
        while (met == 1 && g.order != INTERLEAVED) met = advance(g, g.simdgroups[s], lanes);
        if (met < 0) return false;
        moving |= met == 1;
      }
    }
    if (!pass_barrier(g, done)) return false;
  }
#ifdef EMULATOR_THREAD
  __tsan_acquire(&g.ended);
#endif
  g.counts.bytes = g.bytes > g.counts.bytes ? g.bytes : g.counts.bytes;
  bool whole = true;
  for (const Array& array : g.arrays) {
    for (size_t i = 0; i < GUARD; i++) whole &= array.bytes[array.size + i] == static_cast<char>(POISON);
    free(array.bytes);
  }
  g.arrays.clear();
  if (!whole) return fail(g, "a threadgroup array was written past its end", 0, 0);
  if (g.bytes > memory)
    return fail(g, "too much threadgroup memory (bytes used and there)", static_cast<int>(g.bytes), static_cast<int>(memory));
  return true;
}

// in order 0 rows lie as they do in memory; others are random, for Metal promises none
static void draw_fragment(uint64_t seed) {
  int order[64];
  for (int i = 0; i < 64; i++) order[i] = i;
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  if (seed)
    for (int i = 64; i > 1; i--) std::swap(order[i - 1], order[next_random(state) % i]);
  for (int i = 0; i < 64; i++) {
    const int row = i / 8, column = i % 8, lane = order[i] / 2, slot = order[i] % 2;
    fragment.lane[row][column] = static_cast<unsigned char>(lane);
    fragment.slot[row][column] = static_cast<unsigned char>(slot);
    fragment.row[lane][slot] = static_cast<unsigned char>(row);
    fragment.column[lane][slot] = static_cast<unsigned char>(column);
  }
}

int run(const Launch& launch, char* error, size_t size, Counts* counts) {
  Threadgroup g;
  const Three t = launch.threads, n = launch.grid;
  if (uint64_t(t.x) * t.y * t.z > LARGEST || !t.x || !t.y || !t.z) {
    snprintf(error, size, "threadgroup of %u x %u x %u threads; expected 1 to %d", t.x, t.y, t.z, LARGEST);
    return 1;
  }
  draw_fragment(launch.seed);
  running = &g;
  g.body = launch.body;
  g.order = launch.order;
  g.random = launch.seed * 0xD1B54A32D192ED03ull + 88172645463325252ull;
  g.grid = n;
  g.full = t;
  g.groups = {(n.x + t.x - 1) / t.x, (n.y + t.y - 1) / t.y, (n.z + t.z - 1) / t.z};
  bool good = true;
  const uint64_t total = uint64_t(g.groups.x) * g.groups.y * g.groups.z;
  for (uint64_t i = 0; i < total && good; i++) {
    g.index = {unsigned(i % g.groups.x), unsigned(i / g.groups.x % g.groups.y), unsigned(i / g.groups.x / g.groups.y)};
    // the last threadgroups may be smaller
    auto left = [](unsigned all, unsigned each, unsigned at) { return all - at * each < each ? all - at * each : each; };
    g.size = {left(n.x, t.x, g.index.x), left(n.y, t.y, g.index.y), left(n.z, t.z, g.index.z)};
    good = run_group(g, launch.memory);
  }
  for (Lane& lane : g.lanes)
    if (lane.stack) munmap(lane.stack, STACK);
  running = nullptr;
  *counts = g.counts;
  snprintf(error, size, "%s", g.error);
  return good ? 0 : 1;
}

} // namespace emulator

#ifdef EMULATOR_PROGRAM
// a kernel in a separate process, as a sanitizer needs it; arrays are passed in files. Without a sanitizer NaN surrounds every array
extern "C" int emulate(void** buffers, const unsigned* sizes, int order, unsigned long seed, unsigned long memory, char* error,
                       unsigned long size, emulator::Counts* counts);
#if defined(EMULATOR_ADDRESS) || defined(EMULATOR_THREAD)
constexpr size_t MARGIN = 0;
#else
constexpr size_t MARGIN = 4096;
#endif
int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  int64_t head[10];
  if (!file || fread(head, 8, 10, file) != 10) return 9;
  std::vector<int64_t> sizes(head[0]);
  if (fread(sizes.data(), 8, sizes.size(), file) != sizes.size()) return 9;
  std::vector<void*> buffers;
  for (int64_t n : sizes) {
    char* whole = static_cast<char*>(malloc(n + 2 * MARGIN));
    memset(whole, emulator::POISON, MARGIN);
    memset(whole + MARGIN + n, emulator::POISON, MARGIN);
    buffers.push_back(whole + MARGIN);
    if (fread(buffers.back(), 1, n, file) != size_t(n)) return 9;
  }
  fclose(file);
  unsigned shape[6];
  for (int i = 0; i < 6; i++) shape[i] = unsigned(head[1 + i]);
  char error[320] = "";
  emulator::Counts counts{};
  int bad = emulate(buffers.data(), shape, int(head[7]), head[8], head[9], error, sizeof error, &counts);
  for (size_t i = 0; i < sizes.size() && !bad; i++) {
    const char* own = static_cast<char*>(buffers[i]);
    const char poison = char(emulator::POISON);
    for (size_t n = 0; n < MARGIN; n++) bad |= own[-1 - long(n)] != poison || own[sizes[i] + n] != poison;
    if (bad) snprintf(error, sizeof error, "the kernel wrote outside its array %d", int(i));
  }
  if (bad) fprintf(stderr, "emulator: %s\n", error);
  file = fopen(names[2], "wb");
  if (!file) return 9;
  fwrite(&counts, sizeof counts, 1, file);
  for (size_t i = 0; i < sizes.size(); i++) fwrite(buffers[i], 1, sizes[i], file);
  fclose(file);
  return bad;
}
#endif
