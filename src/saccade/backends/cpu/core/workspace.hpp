// Memory for sums that a call needs while it runs.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

namespace saccade {

// kept between calls up to a limit: fresh pages cost more than the sums themselves
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(bytes + 64) {
    {
      // never waits: memory held by another thread, or by a thread lost in a fork, is replaced by a new allocation
      std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      if (lock && kept_bytes_ >= bytes_) data_ = std::exchange(kept_, nullptr), bytes_ = std::exchange(kept_bytes_, 0);
    }
    if (!data_) data_ = std::malloc(static_cast<size_t>(bytes_));
    if (!data_) throw std::bad_alloc();
  }
  ~Workspace() {
    if (data_ && bytes_ <= KEEP) {
      std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      if (lock && bytes_ > kept_bytes_) std::swap(data_, kept_), std::swap(bytes_, kept_bytes_);
    }
    std::free(data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace(Workspace&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Workspace& operator=(const Workspace&) = delete;
  // aligned for vectors
  void* get() const { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(data_) + 63) & ~uintptr_t{63}); }

 private:
  static constexpr int64_t KEEP = int64_t{128} << 20;
  static inline std::mutex mutex_;
  static inline void* kept_ = nullptr;
  static inline int64_t kept_bytes_ = 0;
  void* data_ = nullptr;
  int64_t bytes_;
};

}  // namespace saccade
