// The targets jattn_forward_v1 and jattn_backward_v1 for the CUDA platform: decode and delegate, no logic. Without
// typed state: everything is in the process-wide kernel store, keyed by the text in the plan.
//
// Instantiate needs no device: it makes machine code. Initialize runs before every execution, so it is a look-up
// once the kernels are loaded; loading there keeps it out of a capture. Execute only launches.
#include <atomic>
#include <string_view>
#include <vector>

#include "core/kernel_key.h"
#include "core/program_store.h"
#include "core/require.h"
#include "cuda/dispatch.h"
#include "cuda/kernel_store.h"
#include "cuda/plan.h"
#include "ffi/bind.h"
#include "ffi/guarded.h"
#include "ffi/handlers.h"

namespace jattn {
namespace {

namespace ffi = xla::ffi;

std::string_view plan_text(const ffi::Dictionary& plan, const char* name) {
  const auto value = plan.get<std::string_view>(name);
  JATTN_REQUIRE(value.has_value(), "attribute plan.", name, " is missing or is not text");
  return *value;
}

// The score program of the plan, if it has one: before its kernel keys, which name it by its digest.
void register_program_of(const ffi::Dictionary& plan) {
  if (plan.contains("program")) register_program(plan_text(plan, "program"));
}

cuda::Plan find_plan(const ffi::Dictionary& attributes, int device_ordinal) {
  register_program_of(attributes);
  if (device_ordinal < 0) device_ordinal = cuda::current_device();  // XLA did not say
  cuda::Plan plan{.kernels = {}, .device_ordinal = device_ordinal};
  for (std::string_view key : split_kernel_keys(plan_text(attributes, "kernels"))) {
    plan.kernels.push_back(&cuda::find_kernel(key, device_ordinal));
  }
  return plan;
}

void require_scratch(const ffi::AnyBuffer& scratch, int64_t needed_bytes) {
  const auto size_bytes = static_cast<int64_t>(scratch.size_bytes());
  JATTN_REQUIRE(size_bytes >= needed_bytes, "scratch has ", size_bytes, " bytes, needs ", needed_bytes);
}

std::atomic<int64_t> executions{0};

ffi::Error instantiate(ffi::Dictionary spec, ffi::Dictionary plan) {
  if (ffi::Error error = bind::check_attributes(spec); error.failure()) return error;
  register_program_of(plan);
  for (std::string_view key : split_kernel_keys(plan_text(plan, "kernels"))) cuda::prepare(key);
  return ffi::Error::Success();
}

ffi::Error initialize(int32_t device_ordinal, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary,
                      ffi::Dictionary plan) {
  find_plan(plan, device_ordinal);
  return ffi::Error::Success();
}

ffi::Error forward(cuda::CUstream stream, int32_t device_ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary spec, ffi::Dictionary plan_attributes) {
  ForwardResults results;
  ffi::AnyBuffer scratch(nullptr);
  executions.fetch_add(1, std::memory_order_relaxed);
  const auto problem = bind::decode_forward(spec, args, rets, results, scratch);
  if (problem.has_error()) return problem.error();
  const cuda::Plan plan = find_plan(plan_attributes, device_ordinal);
  require_scratch(scratch, cuda::planned_forward_scratch_bytes(*problem, plan));
  cuda::planned_forward(*problem, results, plan, scratch.untyped_data(), stream);
  return ffi::Error::Success();
}

ffi::Error backward(cuda::CUstream stream, int32_t device_ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary spec, ffi::Dictionary plan_attributes) {
  BackwardBuffers buffers;
  ffi::AnyBuffer scratch(nullptr);
  executions.fetch_add(1, std::memory_order_relaxed);
  const auto problem = bind::decode_backward(spec, args, rets, buffers, scratch);
  if (problem.has_error()) return problem.error();
  const cuda::Plan plan = find_plan(plan_attributes, device_ordinal);
  require_scratch(scratch, cuda::planned_backward_scratch_bytes(*problem, buffers, plan));
  cuda::planned_backward(*problem, buffers, plan, scratch.untyped_data(), stream);
  return ffi::Error::Success();
}

}  // namespace

}  // namespace jattn

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnCudaInstantiate, jattn::ffi_handlers::guarded<jattn::instantiate>,
    xla::ffi::Ffi::BindInstantiate().Attr<xla::ffi::Dictionary>("spec").Attr<xla::ffi::Dictionary>("plan"),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JattnCudaInitialize, jattn::ffi_handlers::guarded<jattn::initialize>,
                              xla::ffi::Ffi::BindInitialize()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Dictionary>("spec")
                                  .Attr<xla::ffi::Dictionary>("plan"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JattnCudaForward, jattn::ffi_handlers::guarded<jattn::forward>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jattn::cuda::CUstream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Dictionary>("spec")
                                  .Attr<xla::ffi::Dictionary>("plan"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JattnCudaBackward, jattn::ffi_handlers::guarded<jattn::backward>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jattn::cuda::CUstream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Dictionary>("spec")
                                  .Attr<xla::ffi::Dictionary>("plan"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

namespace jattn::ffi_handlers {

int64_t cuda_executions() { return jattn::executions.load(std::memory_order_relaxed); }

std::vector<Handler> cuda() {
  return {{"jattn_forward_v1", "instantiate", JattnCudaInstantiate},
          {"jattn_forward_v1", "initialize", JattnCudaInitialize},
          {"jattn_forward_v1", "execute", JattnCudaForward},
          {"jattn_backward_v1", "instantiate", JattnCudaInstantiate},
          {"jattn_backward_v1", "initialize", JattnCudaInitialize},
          {"jattn_backward_v1", "execute", JattnCudaBackward}};
}

}  // namespace jattn::ffi_handlers
