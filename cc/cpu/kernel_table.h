// The border between the public functions and the kernels of one instruction set.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cpu/plan.h"

namespace jattn::cpu {

// Runs body(argument, i) for every i in [0, count) on several threads that have `thread_bytes` of thread_memory().
// Plain function pointers: a std::function called from an instruction-set file would leave library templates in it that
// use those instructions.
struct TaskRunner {
  int64_t num_threads;
  void* context;
  void (*run)(void* context, int64_t count, int64_t thread_bytes, void (*body)(void* argument, int64_t i),
              void* argument);
};

using ForwardKernel = void (*)(const Problem&, const ForwardPlan&, const ForwardResults&, void* scratch,
                               const TaskRunner&);
using BackwardKernel = void (*)(const Problem&, const BackwardPlan&, const BackwardBuffers&, void* scratch,
                                const TaskRunner&);

// Indexed by DType. Null: left to another instruction set.
struct KernelTable {
  const char* name;  // of the instruction set
  ForwardKernel forward[4];
  BackwardKernel backward[4];
  bool in_planes = false;  // plan.h
};

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;  // of bfloat16
extern const KernelTable kAmxKernels;         // of all but float64
#endif

// 64-byte aligned memory of the calling thread, which has reserved as much (attention.h). Contents are undefined.
void* thread_memory(int64_t bytes);

// Lets another thread of this core run.
void yield_thread();

}  // namespace jattn::cpu
