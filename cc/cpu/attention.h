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
  // Calls body(i) once for every i in [0, size), on several threads that have each reserved `thread_bytes`, and returns
  // when all calls have returned. Throws Error (Fault::kMemory), before the first call, if the calling thread cannot
  // reserve them.
  std::function<void(int64_t size, int64_t thread_bytes, const std::function<void(int64_t)>& body)> parallel_for;
};

// Memory of the calling thread for the tasks that it is going to run: tasks wait for one another, so none may fail
// midway. False if there is not as much to be had.
bool reserve_thread_memory(int64_t bytes);

// Bytes of scratch memory that a pass wants on this machine. Depends on extents, flags and the best instruction set,
// never on the number of threads.
int64_t forward_scratch_bytes(const Problem& problem);
int64_t backward_scratch_bytes(const Problem& problem, bool wants_dbias, int64_t capture_elements = 0);

struct Scratch {
  void* data;  // 64-byte aligned
  int64_t bytes;
};

// Results are bitwise independent of the number of threads. Return false, having done nothing, if the scratch is too
// small. A program that was compiled on a machine without a matrix unit brings enough for vectors, and is computed by
// them on one that has it.
bool forward(const Problem& problem, const ForwardResults& results, Scratch scratch, const Threads& threads);
bool backward(const Problem& problem, const BackwardBuffers& buffers, Scratch scratch, const Threads& threads);

// Instruction sets compiled in that this machine can run, best first ("amx", "avx512_bf16", "avx512", "avx2",
// "baseline", ...).
std::vector<std::string> instruction_sets();

// Forces one of instruction_sets() for the process (tests), which then runs all that it has kernels for. "": the best
// one, but for problems that another runs faster. False if it cannot run here.
bool force_instruction_set(const std::string& name);
std::string active_instruction_set();

// Which of them runs both passes of a problem that is given its scratch memory. Only lengths and type count.
std::string instruction_set_of(const Problem& problem);

}  // namespace jattn::cpu
