// From a kernel key to a kernel that can be launched, in the two steps that XLA's stages ask for.
//
//   prepare()      key -> machine code: embedded in the module, else on disk, else compiled by NVRTC. Needs no GPU.
//   find_kernel()  key, device -> handle. Loads the code on first use; afterwards a hash look-up.
//
// The store is one per process, keyed by the text of the key. A loaded kernel is never unloaded: captured command
// buffers of XLA may still hold it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/kernel_key.h"
#include "cuda/cubin_cache.h"
#include "cuda/driver.h"

namespace jattn::cuda {

struct Kernel {
  KernelKey key;
  std::string text;  // of the key, canonical
  CUkernel handle = nullptr;

  const Config& config() const { return key.config; }
};

// Makes sure that the machine code of the key is there. One thread compiles a key, others that want it wait.
// Throws Error with the compiler's log if it cannot be had.
void prepare(std::string_view key);

// The loaded kernel, ready for launches with any legal amount of dynamic shared memory on this device.
const Kernel& find_kernel(std::string_view key, int device_ordinal);

// The variant that a key names, without any machine code: enough to size scratch for it. The handle may be null.
const Kernel& describe_kernel(std::string_view key);

// Where the machine code of a key came from, for `python -m jattn info` and the tests.
struct StoredKernel {
  std::string key;
  std::string origin;  // "embedded", "disk" or "nvrtc"; "" before it is there, "on its way" while somebody fetches it
  int64_t num_bytes = 0;
  bool loaded = false;
};
std::vector<StoredKernel> stored_kernels();

// What the caller's environment decides. Set at import and by tests; kernels that are there already stay.
struct StoreSettings {
  std::string cache_folder;  // absolute; empty: no cache on disk
  bool cache_enabled = false;
  bool offline = false;  // no run-time compilation: a key that is neither embedded nor on disk is then an error
};
void configure_store(const StoreSettings& settings);

struct StoreInfo {
  StoreSettings settings;
  CubinCache::Info cache;
  std::string cache_write_problem;  // of the latest write; empty: none
  int64_t num_compilations = 0;     // runs of the compiler for prepare()
};
StoreInfo store_info();

int64_t clear_cache();  // the entries on disk; returns how many there were

// The name of a kernel's entry on disk: SHA-256 over the unit, all headers, the compiler's version (major and minor:
// NVRTC tells no more) and its options.
std::string cubin_digest(const KernelKey& key, int nvrtc_version);

// Forgets machine code that no device has loaded yet (tests of the disk cache).
void forget_unloaded();

}  // namespace jattn::cuda
