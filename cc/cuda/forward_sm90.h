// The forward pass by the Hopper kernel (family sm90_forward).
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/plan.h"

namespace jattn::cuda {

// True if the plan holds the kernel of this file.
bool uses_forward_sm90(const Plan& plan);

// Scratch that forward_sm90() needs; its content may be anything.
int64_t forward_sm90_scratch_bytes(const Problem& problem, const Plan& plan);

// Writes every element of the results. Throws Error if the plan's kernels cannot run the problem.
void forward_sm90(const Problem& problem, const ForwardResults& results, const Plan& plan, void* scratch,
                  CUstream stream);

}  // namespace jattn::cuda
