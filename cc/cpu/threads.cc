#include <cstddef>
#include <cstdlib>
#include <new>
#include <thread>

#include "cpu/kernel_table.h"

namespace jattn::cpu {
namespace {

constexpr std::size_t kAlignment = 64;

struct AlignedMemory {
  void* data = nullptr;
  std::size_t size_bytes = 0;

  ~AlignedMemory() { std::free(data); }

  void grow(std::size_t wanted_bytes) {
    std::free(data);
    size_bytes = (wanted_bytes + kAlignment - 1) / kAlignment * kAlignment;
    data = std::aligned_alloc(kAlignment, size_bytes);
    if (data == nullptr) {
      size_bytes = 0;
      throw std::bad_alloc();
    }
  }
};

}  // namespace

void* thread_memory(int64_t bytes) {
  thread_local AlignedMemory memory;
  const auto wanted_bytes = static_cast<std::size_t>(bytes);
  if (wanted_bytes > memory.size_bytes) memory.grow(wanted_bytes);
  return memory.data;
}

void yield_thread() { std::this_thread::yield(); }

}  // namespace jattn::cpu
