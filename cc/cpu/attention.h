// The native CPU backend: tiled exact attention, forward and backward, any mask, four element types.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/problem.h"

namespace jattn::cpu {

// The threads that a pass may use.
struct Threads {
  int64_t count;  // a hint: how much work makes a task
  // Calls body(i) once for every i in [0, size), on several threads, and returns when all calls have returned.
  std::function<void(int64_t size, const std::function<void(int64_t)>& body)> parallel_for;
};

// Bytes of scratch memory that a pass needs. Depends on extents and flags only, never on the number of threads.
int64_t forward_scratch_bytes(const Problem& problem);
int64_t backward_scratch_bytes(const Problem& problem, bool wants_dbias);

// `scratch` is 64-byte aligned. Results are bitwise independent of the number of threads.
void forward(const Problem& problem, const ForwardResults& results, void* scratch, const Threads& threads);
void backward(const Problem& problem, const BackwardBuffers& buffers, void* scratch, const Threads& threads);

// Instruction sets compiled in that this machine can run, best first ("amx", "avx512_bf16", "avx512", "avx2", "baseline", ...).
std::vector<std::string> instruction_sets();

// Forces one of instruction_sets() for the process (tests), or the best one for "". False if it cannot run here.
bool force_instruction_set(const std::string& name);
std::string active_instruction_set();

}  // namespace jattn::cpu
