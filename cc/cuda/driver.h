// The few entry points of the CUDA driver that jattn calls, found at run time.
//
// Nothing is linked and no CUDA header is read, so the module builds without a toolkit and imports without a driver.
// Names, values and layouts are those of the driver API's documentation (CUDA 12.0 and later).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/require.h"

namespace jattn::cuda {

using CUresult = int;  // 0: success
using CUdevice = int;
using CUstream = struct CUstreamOpaque*;
using CUlibrary = struct CUlibraryOpaque*;
using CUkernel = struct CUkernelOpaque*;
using CUfunction = struct CUfunctionOpaque*;
using CUdeviceptr = unsigned long long;

struct alignas(128) CUtensorMap {  // the driver wants 64; CUDA 13's own header says 128
  uint64_t opaque[16];
};

// CUdevice_attribute
inline constexpr int kDeviceMultiprocessorCount = 16;
inline constexpr int kDeviceMaxSharedBytesPerBlockOptin = 97;
// CUfunction_attribute
inline constexpr int kFunctionStaticSharedBytes = 1;
inline constexpr int kFunctionMaxDynamicSharedBytes = 8;

struct Driver {
  CUresult (*cuInit)(unsigned int flags);
  CUresult (*cuDriverGetVersion)(int* version);  // 1000 * major + 10 * minor
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuCtxGetDevice)(CUdevice* device);
  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, int* jit_options, void** jit_values,
                                unsigned int num_jit_options, int* library_options, void** library_values,
                                unsigned int num_library_options);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelGetAttribute)(int* value, int attribute, CUkernel kernel, CUdevice device);
  CUresult (*cuKernelSetAttribute)(int attribute, int value, CUkernel kernel, CUdevice device);
  CUresult (*cuLaunchKernel)(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                             unsigned int block_x, unsigned int block_y, unsigned int block_z,
                             unsigned int shared_bytes, CUstream stream, void** params, void** extra);
  CUresult (*cuMemsetD8Async)(CUdeviceptr address, unsigned char value, size_t num_bytes, CUstream stream);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap* map, int element, unsigned int rank, void* address,
                                     const uint64_t* extents, const uint64_t* strides_bytes, const uint32_t* box,
                                     const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,
                                     int oob_fill);
};

// The opened and initialised driver. Throws Error (Fault::kMachine) if libcuda.so.1 is missing, too old or broken;
// the next call tries again.
const Driver& driver();

// "NVIDIA driver for CUDA 13.0", or why there is none. Does not throw and does not initialise the driver.
std::string driver_status();

// The CUDA version that the driver serves as 1000 * major + 10 * minor, or 0 without a driver. Needs no device.
int driver_cuda_version();

// "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
std::string describe(CUresult result);

// Throws Error (Fault::kMachine) "<what>: <description of the result>" unless the result is success. `what` comes in
// parts, joined only for an error: some of these checks run in every call.
template <typename... Parts>
void check(CUresult result, const Parts&... what) {
  if (result != 0) fail(Fault::kMachine, concat(what..., ": ", describe(result)));
}

// Ordinal of the device whose context is current on this thread.
int current_device();

// Facts of one device that do not change, asked once.
struct DeviceFacts {
  int sm_count = 0;
  int shared_bytes_per_block = 0;
};
const DeviceFacts& device_facts(int device_ordinal);

}  // namespace jattn::cuda
