#include "cuda/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <optional>

#include "core/kernel_unit.h"
#include "core/require.h"
#include "cuda/embedded.h"

namespace jattn::cuda {
namespace {

using nvrtcResult = int;  // 0: success
using nvrtcProgram = struct nvrtcProgramOpaque*;

constexpr const char* kSonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

struct Nvrtc {
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(nvrtcResult result);
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram* program, const char* text, const char* name, int num_headers,
                                    const char* const* headers, const char* const* include_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram* program);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram program, int num_options, const char* const* options);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram program, size_t* size);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram program, char* cubin);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram program, size_t* size);
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram program, char* log);
  nvrtcResult (*nvrtcGetNumSupportedArchs)(int* count);
  nvrtcResult (*nvrtcGetSupportedArchs)(int* architectures);

  int version = 0;
  std::string path;
};

struct State {
  std::mutex mutex;
  std::string configured_path;
  std::optional<Nvrtc> library;
};

State& state() {
  static State* const instance = new State;  // never destroyed: threads of the runtime may outlive static objects
  return *instance;
}

std::string dlopen_error() {
  const char* text = dlerror();
  return text == nullptr ? "unknown error" : text;
}

// The wheel of NVRTC 13.0 lacks a run path to its own second library. Once that is in the process, opening the first
// one works; other versions do not need it.
void open_builtins_beside(const std::string& path) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(path).parent_path(), error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("libnvrtc-builtins.so.")) dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
  }
}

void* open_library(const std::string& configured_path, std::string& problem) {
  for (const char* soname : kSonames) {
    if (void* library = dlopen(soname, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  if (!configured_path.empty()) {
    open_builtins_beside(configured_path);
    if (void* library = dlopen(configured_path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    problem = dlopen_error();
  }
  for (const char* soname : kSonames) {
    if (void* library = dlopen(soname, RTLD_NOW | RTLD_LOCAL)) return library;
    problem += concat(problem.empty() ? "" : "; ", dlopen_error());
  }
  return nullptr;
}

template <typename Function>
void resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) fail(Fault::kMachine, concat("NVRTC lacks the function ", name, "; version 12.0 is needed"));
}

std::string path_of(void* symbol) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "unknown path";
}

// Stays the same once it is open. Only opening takes the mutex: NVRTC may be called by several threads.
const Nvrtc& open_nvrtc() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.library) return *s.library;
  std::string problem;
  void* library = open_library(s.configured_path, problem);
  if (library == nullptr) {
    fail(Fault::kMachine, concat("NVRTC, CUDA's run-time compiler, was not found: ", problem,
                                 ". Install it with pip install \"jax[cuda13]\", or nvidia-cuda-nvrtc"));
  }
  Nvrtc f{};
  resolve(library, "nvrtcVersion", f.nvrtcVersion);
  resolve(library, "nvrtcGetErrorString", f.nvrtcGetErrorString);
  resolve(library, "nvrtcCreateProgram", f.nvrtcCreateProgram);
  resolve(library, "nvrtcDestroyProgram", f.nvrtcDestroyProgram);
  resolve(library, "nvrtcCompileProgram", f.nvrtcCompileProgram);
  resolve(library, "nvrtcGetCUBINSize", f.nvrtcGetCUBINSize);
  resolve(library, "nvrtcGetCUBIN", f.nvrtcGetCUBIN);
  resolve(library, "nvrtcGetProgramLogSize", f.nvrtcGetProgramLogSize);
  resolve(library, "nvrtcGetProgramLog", f.nvrtcGetProgramLog);
  resolve(library, "nvrtcGetNumSupportedArchs", f.nvrtcGetNumSupportedArchs);
  resolve(library, "nvrtcGetSupportedArchs", f.nvrtcGetSupportedArchs);
  int major = 0, minor = 0;
  if (f.nvrtcVersion(&major, &minor) != 0) fail(Fault::kMachine, "NVRTC does not tell its version");
  f.version = 1000 * major + 10 * minor;
  f.path = path_of(reinterpret_cast<void*>(f.nvrtcVersion));
  s.library = f;
  return *s.library;
}

std::string name_and_version(const Nvrtc& nvrtc) {
  return concat("NVRTC ", nvrtc.version / 1000, '.', nvrtc.version % 1000 / 10);
}

// The compiler itself would only say that its option is invalid.
void require_known(const Nvrtc& nvrtc, std::string_view arch) {
  int count = 0;
  if (nvrtc.nvrtcGetNumSupportedArchs(&count) != 0) return;
  std::vector<int> known(static_cast<size_t>(count));
  if (known.empty() || nvrtc.nvrtcGetSupportedArchs(known.data()) != 0) return;
  const bool is_known = std::any_of(known.begin(), known.end(), [&](int number) {
    const std::string name = concat("sm_", number);
    return arch.starts_with(name) && (arch.size() == name.size() || arch[name.size()] == 'a');
  });
  if (is_known) return;
  const auto [least, most] = std::minmax_element(known.begin(), known.end());
  fail(Fault::kMachine,
       concat(name_and_version(nvrtc), " makes no code for ", arch, ", only for architectures from sm_", *least,
              " to sm_", *most, ": install one for this GPU, for example with pip install -U \"jax[cuda13]\""));
}

class Program {
 public:
  Program(const Nvrtc& nvrtc, const std::string& unit_text) : nvrtc_(nvrtc) {
    std::vector<std::string> texts, names;
    for (const EmbeddedHeader& header : embedded_headers()) {
      texts.emplace_back(header.text());
      names.emplace_back(header.name);
    }
    std::vector<const char*> text_pointers, name_pointers;
    for (const std::string& text : texts) text_pointers.push_back(text.c_str());
    for (const std::string& name : names) name_pointers.push_back(name.c_str());
    check(nvrtc_.nvrtcCreateProgram(&program_, unit_text.c_str(), "jattn_kernel.cu", static_cast<int>(texts.size()),
                                    text_pointers.data(), name_pointers.data()),
          "nvrtcCreateProgram");
  }
  ~Program() { nvrtc_.nvrtcDestroyProgram(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  CompiledKernel compile(const std::vector<std::string>& options) {
    std::vector<const char*> option_pointers;
    for (const std::string& option : options) option_pointers.push_back(option.c_str());
    const nvrtcResult result =
        nvrtc_.nvrtcCompileProgram(program_, static_cast<int>(options.size()), option_pointers.data());
    const std::string log = read(nvrtc_.nvrtcGetProgramLogSize, nvrtc_.nvrtcGetProgramLog);
    if (result != 0) fail(Fault::kJattn, concat(nvrtc_.nvrtcGetErrorString(result), "\n", log));
    return {read(nvrtc_.nvrtcGetCUBINSize, nvrtc_.nvrtcGetCUBIN), log};
  }

 private:
  void check(nvrtcResult result, const char* what) const {
    if (result != 0) fail(Fault::kJattn, concat(what, ": ", nvrtc_.nvrtcGetErrorString(result)));
  }

  std::string read(nvrtcResult (*get_size)(nvrtcProgram, size_t*), nvrtcResult (*get)(nvrtcProgram, char*)) const {
    size_t size = 0;
    check(get_size(program_, &size), "size of NVRTC's result");
    std::string bytes(size, '\0');
    check(get(program_, bytes.data()), "NVRTC's result");
    return bytes;
  }

  const Nvrtc& nvrtc_;
  nvrtcProgram program_ = nullptr;
};

}  // namespace

void set_nvrtc_path(const std::string& path) {
  const std::lock_guard lock(state().mutex);
  state().configured_path = path;
}

std::string nvrtc_status() {
  try {
    const Nvrtc& nvrtc = open_nvrtc();
    return concat(name_and_version(nvrtc), " (", nvrtc.path, ")");
  } catch (const Error& error) {
    return error.what();
  }
}

int nvrtc_version() { return open_nvrtc().version; }

std::vector<std::string> nvrtc_options(std::string_view arch) {
  return {concat("--gpu-architecture=", arch), "-std=c++20",
          // Functions without __device__ are constexpr and serve the host as well.
          "-default-device",
          // NVRTC does not split "-v,-warn-spills" at the comma, so the option is there twice.
          "--ptxas-options=-v", "--ptxas-options=-warn-spills"};
}

CompiledKernel nvrtc_compile(const std::string& unit_text, std::string_view arch) {
  const Nvrtc& nvrtc = open_nvrtc();
  require_known(nvrtc, arch);
  Program program(nvrtc, unit_text);
  CompiledKernel compiled = program.compile(nvrtc_options(arch));
  while (!compiled.log.empty() && compiled.log.back() == '\0') compiled.log.pop_back();
  return compiled;
}

}  // namespace jattn::cuda
