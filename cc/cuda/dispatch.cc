#include "cuda/dispatch.h"

#include "cuda/backward.h"
#include "cuda/backward_sm90.h"
#include "cuda/forward.h"
#include "cuda/forward_sm90.h"

namespace jattn::cuda {

int64_t planned_forward_scratch_bytes(const Problem& problem, const Plan& plan) {
  return uses_forward_sm90(plan) ? forward_sm90_scratch_bytes(problem, plan) : forward_scratch_bytes(problem, plan);
}

void planned_forward(const Problem& problem, const ForwardResults& results, const Plan& plan, void* scratch,
                     CUstream stream) {
  if (uses_forward_sm90(plan)) {
    forward_sm90(problem, results, plan, scratch, stream);
  } else {
    forward(problem, results, plan, scratch, stream);
  }
}

int64_t planned_backward_scratch_bytes(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan) {
  return uses_backward_sm90(plan) ? backward_sm90_scratch_bytes(problem, buffers, plan)
                                  : backward_scratch_bytes(problem, buffers, plan);
}

void planned_backward(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, void* scratch,
                      CUstream stream) {
  if (uses_backward_sm90(plan)) {
    backward_sm90(problem, buffers, plan, scratch, stream);
  } else {
    backward(problem, buffers, plan, scratch, stream);
  }
}

}  // namespace jattn::cuda
