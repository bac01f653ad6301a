// NVIDIA's run-time compiler, opened with dlopen when the first kernel needs it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace jattn::cuda {

struct CompiledKernel {
  std::string cubin;
  std::string log;  // with registers and spills, as ptxas prints them
};

// Where the library is, if the caller knows: a path to libnvrtc.so.*, or empty. A library that is already in the
// process is taken first, then this path, then the system's. Has no effect once the library is open.
void set_nvrtc_path(const std::string& path);

// "NVRTC 13.0 (/path/libnvrtc.so.13)", or why there is none.
std::string nvrtc_status();

// Version as 1000 * major + 10 * minor, like the driver's. Throws Error (Fault::kMachine) if there is no library.
int nvrtc_version();

// Options of a compilation for this architecture: part of the digest that names a cached result.
std::vector<std::string> nvrtc_options(std::string_view arch);

// Compiles a unit against the embedded headers to machine code. Throws Error with the compiler's log.
CompiledKernel nvrtc_compile(const std::string& unit_text, std::string_view arch);

}  // namespace jattn::cuda
