#include "cuda/launch.h"

#include <limits>

#include "core/require.h"

namespace jattn::cuda {
namespace {

constexpr int64_t kMaxGridX = std::numeric_limits<int32_t>::max();

std::string describe_launch(const Kernel& kernel, const Launch& shape) {
  return concat("kernel ", kernel.text, " with grid ", shape.grid.x, ", ", shape.num_threads, " threads, ",
                shape.shared_bytes, " bytes of shared memory");
}

}  // namespace

void launch(const Kernel& kernel, const Launch& shape, const void* params, CUstream stream) {
  const Grid& grid = shape.grid;
  if (grid.x == 0) return;
  JATTN_REQUIRE(grid.x > 0 && grid.x <= kMaxGridX && shape.shared_bytes >= 0 && shape.shared_bytes <= kMaxGridX,
                "the problem is too large for one launch: ", describe_launch(kernel, shape));
  void* arguments[] = {const_cast<void*>(params)};
  // The driver accepts a context-independent CUkernel in place of a CUfunction, and then serves the current context.
  const CUresult result =
      driver().cuLaunchKernel(reinterpret_cast<CUfunction>(kernel.handle), static_cast<unsigned int>(grid.x), 1, 1,
                              static_cast<unsigned int>(shape.num_threads), 1, 1,
                              static_cast<unsigned int>(shape.shared_bytes), stream, arguments, nullptr);
  if (result != 0)
    fail(Fault::kJattn, concat(describe(result), " from the launch of ", describe_launch(kernel, shape)));
}

void fill_zero(void* address, int64_t num_bytes, CUstream stream) {
  if (num_bytes <= 0) return;
  check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(address), 0, static_cast<size_t>(num_bytes), stream),
        "filling ", num_bytes, " bytes with zero");
}

}  // namespace jattn::cuda
