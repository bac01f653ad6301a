#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <map>
#include <mutex>
#include <optional>

namespace jattn::cuda {
namespace {

constexpr const char* kLibraryName = "libcuda.so.1";

struct OpenedDriver {
  Driver functions{};
  std::string problem;  // empty: usable
  bool has_version = false;
  bool initialized = false;
};

template <typename Function>
void resolve(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) missing += concat(missing.empty() ? "" : ", ", name);
}

OpenedDriver open_driver() {
  OpenedDriver opened;
  void* library = dlopen(kLibraryName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    opened.problem = concat("no NVIDIA driver: ", text == nullptr ? kLibraryName : text);
    return opened;
  }
  Driver& f = opened.functions;
  std::string missing;
  resolve(library, "cuInit", f.cuInit, missing);
  resolve(library, "cuDriverGetVersion", f.cuDriverGetVersion, missing);
  resolve(library, "cuGetErrorName", f.cuGetErrorName, missing);
  resolve(library, "cuGetErrorString", f.cuGetErrorString, missing);
  resolve(library, "cuDeviceGet", f.cuDeviceGet, missing);
  resolve(library, "cuDeviceGetCount", f.cuDeviceGetCount, missing);
  resolve(library, "cuDeviceGetAttribute", f.cuDeviceGetAttribute, missing);
  resolve(library, "cuCtxGetDevice", f.cuCtxGetDevice, missing);
  resolve(library, "cuLibraryLoadData", f.cuLibraryLoadData, missing);
  resolve(library, "cuLibraryGetKernel", f.cuLibraryGetKernel, missing);
  resolve(library, "cuKernelGetAttribute", f.cuKernelGetAttribute, missing);
  resolve(library, "cuKernelSetAttribute", f.cuKernelSetAttribute, missing);
  resolve(library, "cuLaunchKernel", f.cuLaunchKernel, missing);
  resolve(library, "cuMemsetD8Async", f.cuMemsetD8Async, missing);
  resolve(library, "cuTensorMapEncodeTiled", f.cuTensorMapEncodeTiled, missing);
  opened.has_version = f.cuDriverGetVersion != nullptr;
  if (!missing.empty())
    opened.problem = concat("the NVIDIA driver is too old (CUDA 12.0 is needed), it lacks ", missing);
  return opened;
}

std::mutex& driver_mutex() {
  static std::mutex mutex;
  return mutex;
}

// Guarded by driver_mutex(). Opened again on every call while the library is missing.
OpenedDriver& opened_driver() {
  static std::optional<OpenedDriver> opened;
  if (!opened || (!opened->problem.empty() && !opened->has_version)) opened = open_driver();
  return *opened;
}

std::string version_text(int version) { return concat(version / 1000, '.', version % 1000 / 10); }

}  // namespace

const Driver& driver() {
  static std::atomic<const Driver*> ready{nullptr};
  if (const Driver* functions = ready.load(std::memory_order_acquire)) return *functions;
  const std::lock_guard lock(driver_mutex());
  OpenedDriver& opened = opened_driver();
  if (!opened.problem.empty()) fail(Fault::kMachine, opened.problem);
  if (!opened.initialized) {
    const CUresult result = opened.functions.cuInit(0);
    if (result != 0) fail(Fault::kMachine, concat("the NVIDIA driver does not start: cuInit returned ", result));
    opened.initialized = true;
  }
  ready.store(&opened.functions, std::memory_order_release);
  return opened.functions;
}

std::string driver_status() {
  const int version = driver_cuda_version();
  const std::lock_guard lock(driver_mutex());
  const OpenedDriver& opened = opened_driver();
  return opened.problem.empty() ? concat("NVIDIA driver for CUDA ", version_text(version)) : opened.problem;
}

int driver_cuda_version() {
  const std::lock_guard lock(driver_mutex());
  const OpenedDriver& opened = opened_driver();
  int version = 0;
  if (!opened.has_version || opened.functions.cuDriverGetVersion(&version) != 0) return 0;
  return version;
}

std::string describe(CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  const Driver& functions = driver();
  functions.cuGetErrorName(result, &name);
  functions.cuGetErrorString(result, &text);
  return concat(name == nullptr ? "unknown CUDA error" : name, " (", result, ")", text == nullptr ? "" : ": ",
                text == nullptr ? "" : text);
}

int current_device() {
  CUdevice device = 0;  // ordinals and handles are the same numbers, but nothing promises that: look it up
  const Driver& functions = driver();
  check(functions.cuCtxGetDevice(&device), "cuCtxGetDevice");
  int count = 0;
  check(functions.cuDeviceGetCount(&count), "cuDeviceGetCount");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice candidate = 0;
    check(functions.cuDeviceGet(&candidate, ordinal), "cuDeviceGet");
    if (candidate == device) return ordinal;
  }
  fail(Fault::kMachine, "the current device has no ordinal");
}

const DeviceFacts& device_facts(int device_ordinal) {
  static std::mutex mutex;
  // Never destroyed: threads of the runtime may outlive static objects.
  static auto* const known = new std::map<int, DeviceFacts>;
  const std::lock_guard lock(mutex);
  const auto found = known->find(device_ordinal);
  if (found != known->end()) return found->second;
  const Driver& functions = driver();
  CUdevice device = 0;
  check(functions.cuDeviceGet(&device, device_ordinal), "cuDeviceGet of device ", device_ordinal);
  const auto attribute = [&](int id) {
    int value = 0;
    check(functions.cuDeviceGetAttribute(&value, id, device), "attribute of device ", device_ordinal);
    return value;
  };
  DeviceFacts facts;
  facts.sm_count = attribute(kDeviceMultiprocessorCount);
  facts.shared_bytes_per_block = attribute(kDeviceMaxSharedBytesPerBlockOptin);
  return known->emplace(device_ordinal, facts).first->second;
}

}  // namespace jattn::cuda
