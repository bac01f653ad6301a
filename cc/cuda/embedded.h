// What the build puts into the module: device headers for NVRTC, and the machine code of the hot set.
// The tables are generated; see cmake/headers.cmake and cmake/hot_set.cmake.
#pragma once

#include <span>
#include <string_view>

namespace jattn::cuda {

struct EmbeddedHeader {
  std::string_view name;  // as it is included: "config.cuh"
  const char* begin;
  const char* end;

  std::string_view text() const { return {begin, static_cast<size_t>(end - begin)}; }
};
std::span<const EmbeddedHeader> embedded_headers();

struct EmbeddedCubin {
  std::string_view key;  // as hot_set.txt spells it
  const char* begin;
  const char* end;
  const char* log_begin;
  const char* log_end;

  std::string_view code() const { return {begin, static_cast<size_t>(end - begin)}; }
  // What the compiler said: registers, spills, warnings.
  std::string_view log() const { return {log_begin, static_cast<size_t>(log_end - log_begin)}; }
};
std::span<const EmbeddedCubin> embedded_cubins();

// CUDA version of the compiler that made them, as 1000 * major + 10 * minor; 0 if there are none.
int embedded_cuda_version();

}  // namespace jattn::cuda
