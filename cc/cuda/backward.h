// The backward pass by the kernels of sm_80: Problem, buffers and plan -> kernel launches on a stream (cuda/dispatch.h
// picks).
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/plan.h"

namespace jattn::cuda {

// Scratch that backward() needs; its content may be anything. Reads only which results of `buffers` are wanted.
int64_t backward_scratch_bytes(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan);

// Writes every element of the wanted gradients. Throws Error if the plan's kernels cannot run the problem.
void backward(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, void* scratch, CUstream stream);

}  // namespace jattn::cuda
