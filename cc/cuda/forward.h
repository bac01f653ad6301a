// The forward pass by the kernels of sm_80: Problem, results and plan -> kernel launches on a stream (cuda/dispatch.h
// picks).
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/plan.h"

namespace jattn::cuda {

// Scratch that forward() needs; its content may be anything.
int64_t forward_scratch_bytes(const Problem& problem, const Plan& plan);

// Writes every element of the results. Throws Error if the plan's kernels cannot run the problem.
void forward(const Problem& problem, const ForwardResults& results, const Plan& plan, void* scratch, CUstream stream);

}  // namespace jattn::cuda
