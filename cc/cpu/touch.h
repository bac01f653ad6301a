// What the address sanitizer does not see by itself: inline assembly (GCC's tile loads and stores), masked loads, and
// where in a thread's memory one tile ends. In a build that is not instrumented nothing happens here.
#pragma once

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)  // by GCC
#include <sanitizer/asan_interface.h>
#endif

namespace jattn::cpu {
namespace {

// Looks at memory that is about to be read or written.
inline __attribute__((always_inline)) void touch([[maybe_unused]] const void* begin, [[maybe_unused]] int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  if (bytes <= 0) return;
  const void* bad = __asan_region_is_poisoned(const_cast<void*>(begin), static_cast<size_t>(bytes));
  if (bad != nullptr)
    static_cast<void>(*static_cast<const volatile char*>(bad));  // an ordinary read, which is reported
#endif
}

inline __attribute__((always_inline)) void touch_rows([[maybe_unused]] const void* begin, [[maybe_unused]] int64_t rows,
                                                      [[maybe_unused]] int64_t stride_bytes,
                                                      [[maybe_unused]] int64_t row_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  for (int64_t row = 0; row < rows; ++row) touch(static_cast<const char*>(begin) + row * stride_bytes, row_bytes);
#endif
}

// Nobody may touch these bytes, until they are opened again.
inline void close_bytes([[maybe_unused]] const void* begin, [[maybe_unused]] int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(begin, static_cast<size_t>(bytes));
#endif
}

inline void open_bytes([[maybe_unused]] const void* begin, [[maybe_unused]] int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(begin, static_cast<size_t>(bytes));
#endif
}

}  // namespace
}  // namespace jattn::cpu
