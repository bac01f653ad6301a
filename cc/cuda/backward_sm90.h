// The backward pass by the Hopper kernels: families backward_prepare, then sm90_backward and backward_cast, or
// sm90_backward_dkv and sm90_backward_dq.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/plan.h"

namespace jattn::cuda {

// True if the plan holds kernels of this file.
bool uses_backward_sm90(const Plan& plan);

// Scratch that backward_sm90() needs; its content may be anything. Reads only which results of `buffers` are wanted.
int64_t backward_sm90_scratch_bytes(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan);

// Writes every element of the wanted gradients. Throws Error if the plan's kernels cannot run the problem.
void backward_sm90(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, void* scratch,
                   CUstream stream);

}  // namespace jattn::cuda
