#include "cuda/launch.h"

#include <limits>

#include "core/require.h"

namespace jattn::cuda {
namespace {

constexpr int64_t kMaxGridX = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxGridYZ = 65535;

std::string describe_launch(const Kernel& kernel, const Launch& shape) {
  return concat("kernel ", kernel.text, " with grid ", shape.grid.x, " x ", shape.grid.y, " x ", shape.grid.z, ", ",
                shape.num_threads, " threads, ", shape.shared_bytes, " bytes of shared memory, cluster ",
                shape.cluster_size);
}

}  // namespace

void launch(const Kernel& kernel, const Launch& shape, const void* params, CUstream stream) {
  const Grid& grid = shape.grid;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  JATTN_REQUIRE(grid.x > 0 && grid.x <= kMaxGridX && grid.y > 0 && grid.y <= kMaxGridYZ && grid.z > 0 &&
                    grid.z <= kMaxGridYZ && shape.shared_bytes >= 0 && shape.shared_bytes <= kMaxGridX,
                "the problem is too large for one launch: ", describe_launch(kernel, shape));
  LaunchAttribute attributes[2] = {};
  unsigned int num_attributes = 0;
  if (shape.cluster_size > 1) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kLaunchClusterDimension;
    attribute.value.cluster = {static_cast<unsigned int>(shape.cluster_size), 1, 1};
  }
  if (shape.programmatic) {
    LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kLaunchProgrammaticStreamSerialization;
    attribute.value.flag = 1;
  }
  const LaunchConfig config{.grid_x = static_cast<unsigned int>(grid.x),
                            .grid_y = static_cast<unsigned int>(grid.y),
                            .grid_z = static_cast<unsigned int>(grid.z),
                            .block_x = static_cast<unsigned int>(shape.num_threads),
                            .block_y = 1,
                            .block_z = 1,
                            .shared_bytes = static_cast<unsigned int>(shape.shared_bytes),
                            .stream = stream,
                            .attributes = attributes,
                            .num_attributes = num_attributes};
  void* arguments[] = {const_cast<void*>(params)};
  // The driver accepts a context-independent CUkernel in place of a CUfunction, and then serves the current context.
  const CUresult result =
      driver().cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel.handle), arguments, nullptr);
  if (result != 0)
    fail(Fault::kJattn, concat(describe(result), " from the launch of ", describe_launch(kernel, shape)));
}

void fill_zero(void* address, int64_t num_bytes, CUstream stream) {
  if (num_bytes <= 0) return;
  check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(address), 0, static_cast<size_t>(num_bytes), stream),
        "filling ", num_bytes, " bytes with zero");
}

}  // namespace jattn::cuda
