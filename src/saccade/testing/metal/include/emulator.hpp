// Runs the threads of a Metal threadgroup as fibers of one CPU thread, and checks where they wait for each other.
//
// A lane runs until it waits: in a SIMD-group for the other 31 lanes, at a barrier for the threadgroup. All lanes that
// wait together must be in the same line; otherwise the error names both lines. Threadgroup memory starts as NaN.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ADDRESS 1
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#define EMULATOR_THREAD 1
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read_range(void*, unsigned long);
extern "C" void __tsan_write_range(void*, unsigned long);
// what the emulator itself shares between fibers is in order by construction
#define UNWATCHED __attribute__((no_sanitize("thread")))
#else
#define UNWATCHED
#endif

namespace emulator {

constexpr int WIDTH = 32;              // lanes of a SIMD-group
constexpr int LARGEST = 1024;          // threads of a threadgroup
constexpr size_t STACK = 256 * 1024;   // bytes of a lane's stack
constexpr size_t POSTED = 32;          // bytes that a lane may show to the others at once
constexpr size_t GUARD = 64;           // bytes after a threadgroup array that must stay as they are
constexpr unsigned char POISON = 0xFF; // all bits set is NaN in every float format

struct Three {
  unsigned x, y, z;
};

enum class Wait { NOTHING, SIMDGROUP, THREADGROUP, DONE };
enum Order { FORWARD, REVERSE, RANDOM, INTERLEAVED };

struct Simdgroup;

struct Lane {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Wait wait = Wait::DONE;
  int line = 0;           // where it waits
  unsigned number = 0;    // in the threadgroup
  unsigned lane = 0;      // in its SIMD-group
  unsigned exchanges = 0; // two buffers of posted values take turns
  unsigned waits[2] = {}; // by SIMDGROUP and THREADGROUP
  size_t arrays = 0;      // threadgroup arrays that it has come by
  Simdgroup* simdgroup = nullptr;
  Three position{};
#ifdef EMULATOR_ADDRESS
  void* fake = nullptr;
#endif
#ifdef EMULATOR_THREAD
  void* fiber = nullptr;
#endif
};

struct Simdgroup {
  alignas(16) unsigned char posted[2][WIDTH][POSTED];
  Lane* lanes[WIDTH];
  int size = 0;
  unsigned index = 0;
  char ordered[2];
};

struct Array {
  char* bytes;
  size_t size;
};

struct Launch {
  void (*body)() = nullptr;
  Three grid, threads;
  Order order;
  uint64_t seed;
  size_t memory;
};

// what a launch did, for tests to read
struct Counts {
  uint64_t bytes, barriers, exchanges, products;
};

struct Threadgroup {
  std::vector<Lane> lanes;
  std::vector<Simdgroup> simdgroups;
  std::vector<Array> arrays;
  Three index{}, groups{}, size{}, full{}, grid{};
  unsigned threads = 0;
  size_t bytes = 0;
  void (*body)() = nullptr;
  void* scheduler = nullptr;
  Lane* current = nullptr;
  uint64_t random = 1;
  Order order = FORWARD;
  Counts counts{};
  char error[320] = "";
  char ordered[2], started, ended;
#ifdef EMULATOR_ADDRESS
  void* fake = nullptr;
  const void* bottom = nullptr;
  size_t depth = 0;
#endif
#ifdef EMULATOR_THREAD
  void* fiber = nullptr;
#endif
};

extern Threadgroup* running;
// where lanes keep the elements of an 8 x 8 matrix: lane and slot of (row, column), and back; a launch draws its own
struct Fragment {
  unsigned char lane[8][8], slot[8][8], row[WIDTH][2], column[WIDTH][2];
};
extern Fragment fragment;

// the lane waits until the others have come to the same line
void wait_for(Wait what, int line);
// a threadgroup array: the n-th that every thread comes by is the same one
void* shared(size_t size);
// all threadgroups of a launch, one after the other; 1 with an error where one cannot go on
int run(const Launch& launch, char* error, size_t size, Counts* counts);

// every lane shows a value; afterwards `at(lane)` reads what another one showed
template <class T> struct Shown {
  const Simdgroup* simdgroup;
  unsigned buffer;
  UNWATCHED T at(unsigned lane) const {
    T value;
    __builtin_memcpy(&value, simdgroup->posted[buffer][lane % WIDTH], sizeof(T));
    return value;
  }
};
template <class T> UNWATCHED inline Shown<T> exchange(const T& value, int line) {
  static_assert(sizeof(T) <= POSTED, "too large a value to exchange");
  Lane& lane = *running->current;
  const unsigned buffer = lane.exchanges++ & 1;
  __builtin_memcpy(lane.simdgroup->posted[buffer][lane.lane], &value, sizeof(T));
  wait_for(Wait::SIMDGROUP, line);
  return {lane.simdgroup, buffer};
}

} // namespace emulator
