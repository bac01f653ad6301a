#include <cstddef>
#include <cstdlib>
#include <thread>

#include "cpu/attention.h"
#include "cpu/kernel_table.h"

namespace jattn::cpu {
namespace {

constexpr std::size_t kAlignment = 64;

struct AlignedMemory {
  void* data = nullptr;
  std::size_t size_bytes = 0;

  ~AlignedMemory() { std::free(data); }

  bool reserve(std::size_t wanted_bytes) {
    if (wanted_bytes <= size_bytes) return true;
    std::free(data);
    size_bytes = (wanted_bytes + kAlignment - 1) / kAlignment * kAlignment;
    data = std::aligned_alloc(kAlignment, size_bytes);
    if (data == nullptr) size_bytes = 0;
    return data != nullptr;
  }
};

thread_local AlignedMemory memory_of_thread;

}  // namespace

bool reserve_thread_memory(int64_t bytes) { return memory_of_thread.reserve(static_cast<std::size_t>(bytes)); }

void* thread_memory(int64_t bytes) {
  // A task that takes more than its pass has reserved is an error of that pass.
  if (static_cast<std::size_t>(bytes) > memory_of_thread.size_bytes) std::abort();
  return memory_of_thread.data;
}

void yield_thread() { std::this_thread::yield(); }

}  // namespace jattn::cpu
