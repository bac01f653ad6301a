// Which host code runs a plan's kernels: sm90 where the plan has its kernel, else sm80.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/plan.h"

namespace jattn::cuda {

int64_t planned_forward_scratch_bytes(const Problem& problem, const Plan& plan);

void planned_forward(const Problem& problem, const ForwardResults& results, const Plan& plan, void* scratch,
                     CUstream stream);

int64_t planned_backward_scratch_bytes(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan);

void planned_backward(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, void* scratch,
                      CUstream stream);

}  // namespace jattn::cuda
