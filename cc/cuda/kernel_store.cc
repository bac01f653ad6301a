#include "cuda/kernel_store.h"

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "core/kernel_unit.h"
#include "core/require.h"
#include "core/sha256.h"
#include "core/text_map.h"
#include "cuda/cubin_cache.h"
#include "cuda/embedded.h"
#include "cuda/nvrtc.h"

namespace jattn::cuda {
namespace {

constexpr int kMaxDevices = 64;

struct Entry {
  Kernel kernel;  // the handle is written once, before the first bit of ready_devices
  std::atomic<uint64_t> ready_devices{0};

  std::mutex mutex;  // guards the rest; held while compiling, so that one thread does and others wait
  std::string code;  // owned, unless the code is embedded
  std::string_view code_view;
  std::string origin;
  CUlibrary library = nullptr;  // loaded, perhaps without a handle of the kernel yet
};

struct Store {
  std::shared_mutex mutex;
  TextMap<Entry*> by_text;  // as callers spell it, and canonical
  std::map<std::string, std::unique_ptr<Entry>> by_canonical_text;

  std::mutex settings_mutex;
  StoreSettings settings;
  std::string cache_write_problem;

  std::atomic<int64_t> num_compilations{0};
};

Store& store() {
  static Store* instance = new Store;  // never destroyed: threads of the runtime may outlive static objects
  return *instance;
}

Entry& find_entry(std::string_view text) {
  Store& s = store();
  {
    const std::shared_lock lock(s.mutex);
    if (const auto found = s.by_text.find(text); found != s.by_text.end()) return *found->second;
  }
  const KernelKey key = parse_kernel_key(text);
  const std::string canonical = to_text(key);
  const std::unique_lock lock(s.mutex);
  std::unique_ptr<Entry>& entry = s.by_canonical_text[canonical];
  if (!entry) {
    entry = std::make_unique<Entry>();
    entry->kernel = {.key = key, .text = canonical, .handle = nullptr};
  }
  s.by_text.emplace(text, entry.get());
  return *entry;
}

// Entries stay where they are for good, so that nobody who wants another one waits while one of these is looked at.
std::vector<std::pair<std::string, Entry*>> all_entries() {
  Store& s = store();
  std::vector<std::pair<std::string, Entry*>> entries;
  const std::shared_lock lock(s.mutex);
  for (const auto& [text, entry] : s.by_canonical_text) entries.emplace_back(text, entry.get());
  return entries;
}

std::string version_text(int version) { return concat(version / 1000, '.', version % 1000 / 10); }

// Machine code of a CUDA release runs on drivers of the same major release and later ones (CUDA Compatibility,
// "Minor Version Compatibility"). Without a driver there is nothing to hold it against: this may be a build machine.
bool driver_accepts(int cuda_version) {
  const int driver_version = driver_cuda_version();
  return driver_version == 0 || driver_version / 1000 >= cuda_version / 1000;
}

const EmbeddedCubin* find_embedded(const std::string& canonical_text) {
  static const auto* by_canonical_text = [] {
    auto* table = new std::map<std::string, const EmbeddedCubin*>;
    for (const EmbeddedCubin& cubin : embedded_cubins()) table->emplace(to_text(parse_kernel_key(cubin.key)), &cubin);
    return table;
  }();
  if (!driver_accepts(embedded_cuda_version())) return nullptr;
  const auto found = by_canonical_text->find(canonical_text);
  return found == by_canonical_text->end() ? nullptr : found->second;
}

void append_part(std::string& text, std::string_view part) { text += concat(part.size(), ':', part); }

const std::string& headers_digest() {
  // Never destroyed: threads of the runtime may outlive static objects.
  static const auto* const digest = [] {
    std::string text;
    for (const EmbeddedHeader& header : embedded_headers()) {
      append_part(text, header.name);
      append_part(text, header.text());
    }
    return new std::string(to_hex(sha256(text)));
  }();
  return *digest;
}

StoreSettings current_settings() {
  Store& s = store();
  const std::lock_guard lock(s.settings_mutex);
  return s.settings;
}

// Call with the entry's mutex held.
void fetch_code(Entry& entry) {
  if (!entry.code_view.empty()) return;
  if (const EmbeddedCubin* cubin = find_embedded(entry.kernel.text)) {
    entry.code_view = cubin->code();
    entry.origin = "embedded";
    return;
  }
  const int version = nvrtc_version();
  if (!driver_accepts(version)) {
    fail(Fault::kMachine, concat("NVRTC ", version_text(version), " makes code that the driver for CUDA ",
                                 version_text(driver_cuda_version()),
                                 " cannot run: update the driver, or install the NVRTC of the driver's major version"));
  }
  const StoreSettings settings = current_settings();
  const CubinCache cache = settings.cache_enabled ? CubinCache(settings.cache_folder) : CubinCache();
  const std::string name = cubin_digest(entry.kernel.key, version);
  if (std::optional<std::string> code = cache.read(name)) {
    entry.code = std::move(*code);
    entry.origin = "disk";
  } else {
    if (settings.offline) {
      fail(Fault::kMachine,
           "it was neither built ahead of time nor is it in the kernel cache, and run-time "
           "compilation is switched off");
    }
    ++store().num_compilations;
    entry.code = nvrtc_compile(kernel_unit_text(entry.kernel.key), entry.kernel.key.arch).cubin;
    entry.origin = "nvrtc";
    if (settings.cache_enabled) {
      const std::string problem = cache.write(name, entry.code);
      const std::lock_guard lock(store().settings_mutex);
      store().cache_write_problem = problem;
    }
  }
  entry.code_view = entry.code;
}

// Names the kernel in whatever goes wrong inside `body`.
template <typename Body>
void naming_kernel(const Entry& entry, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    throw Error(error.fault(), concat("kernel ", entry.kernel.text, ": ", error.what()));
  }
}

// Call with the entry's mutex held.
void load(Entry& entry, int device_ordinal) {
  fetch_code(entry);
  const Driver& functions = driver();
  if (entry.kernel.handle == nullptr) {
    if (entry.library == nullptr) {
      check(
          functions.cuLibraryLoadData(&entry.library, entry.code_view.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
          "cuLibraryLoadData");
    }
    CUkernel handle = nullptr;
    check(functions.cuLibraryGetKernel(&handle, entry.library, kKernelEntry), "cuLibraryGetKernel");
    entry.kernel.handle = handle;
  }
  CUdevice device = 0;
  check(functions.cuDeviceGet(&device, device_ordinal), "cuDeviceGet of device ", device_ordinal);
  int static_shared_bytes = 0;
  check(functions.cuKernelGetAttribute(&static_shared_bytes, kFunctionStaticSharedBytes, entry.kernel.handle, device),
        "loading for device ", device_ordinal);
  // The limit only allows; what a launch gets, and so how many blocks fit, is what that launch asks for.
  const int limit_bytes = device_facts(device_ordinal).shared_bytes_per_block - static_shared_bytes;
  check(functions.cuKernelSetAttribute(kFunctionMaxDynamicSharedBytes, limit_bytes, entry.kernel.handle, device),
        "allowing ", limit_bytes, " bytes of shared memory on device ", device_ordinal);
  entry.ready_devices.fetch_or(uint64_t{1} << device_ordinal, std::memory_order_release);
}

}  // namespace

void configure_store(const StoreSettings& settings) {
  Store& s = store();
  const std::lock_guard lock(s.settings_mutex);
  s.settings = settings;
  s.cache_write_problem.clear();
}

StoreInfo store_info() {
  Store& s = store();
  const std::lock_guard lock(s.settings_mutex);
  const CubinCache cache = s.settings.cache_enabled ? CubinCache(s.settings.cache_folder) : CubinCache();
  return {.settings = s.settings,
          .cache = cache.info(),
          .cache_write_problem = s.cache_write_problem,
          .num_compilations = s.num_compilations};
}

int64_t clear_cache() {
  const StoreSettings settings = current_settings();
  return CubinCache(settings.cache_folder).clear();
}

std::string cubin_digest(const KernelKey& key, int nvrtc_version) {
  std::string text;
  append_part(text, kernel_unit_text(key));
  append_part(text, headers_digest());
  append_part(text, version_text(nvrtc_version));
  for (const std::string& option : nvrtc_options(key.arch)) append_part(text, option);
  return to_hex(sha256(text));
}

void prepare(std::string_view key) {
  Entry& entry = find_entry(key);
  const std::lock_guard lock(entry.mutex);
  naming_kernel(entry, [&] { fetch_code(entry); });
}

const Kernel& find_kernel(std::string_view key, int device_ordinal) {
  JATTN_REQUIRE(device_ordinal >= 0 && device_ordinal < kMaxDevices, "device ordinal ", device_ordinal,
                " must be from 0 to ", kMaxDevices - 1);
  Entry& entry = find_entry(key);
  const uint64_t device_bit = uint64_t{1} << device_ordinal;
  if ((entry.ready_devices.load(std::memory_order_acquire) & device_bit) == 0) {
    const std::lock_guard lock(entry.mutex);
    if ((entry.ready_devices.load(std::memory_order_relaxed) & device_bit) == 0) {
      naming_kernel(entry, [&] { load(entry, device_ordinal); });
    }
  }
  return entry.kernel;
}

const Kernel& describe_kernel(std::string_view key) { return find_entry(key).kernel; }

std::vector<StoredKernel> stored_kernels() {
  std::vector<StoredKernel> kernels;
  for (const auto& [text, entry] : all_entries()) {
    const std::unique_lock lock(entry->mutex, std::try_to_lock);
    if (!lock.owns_lock()) {  // for as long as a compilation takes
      kernels.push_back({.key = text, .origin = "on its way", .num_bytes = 0, .loaded = false});
      continue;
    }
    kernels.push_back({.key = text,
                       .origin = entry->origin,
                       .num_bytes = static_cast<int64_t>(entry->code_view.size()),
                       .loaded = entry->kernel.handle != nullptr});
  }
  return kernels;
}

void forget_unloaded() {
  for (const auto& [text, entry] : all_entries()) {
    const std::lock_guard lock(entry->mutex);
    if (entry->kernel.handle != nullptr) continue;
    entry->code_view = {};
    entry->code.clear();
    entry->origin.clear();
  }
}

}  // namespace jattn::cuda
