// The public functions: pick the kernels of one instruction set and run them.
//
// Those are compiled from one source, once per instruction set: cmake/cpu_kernel.cmake lists the files and the flags of
// each. Everything here runs on any machine, so it is compiled without flags of an instruction set.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "core/broadcast.h"
#include "cpu/attention.h"
#include "cpu/kernel_table.h"

namespace jattn::cpu {
namespace {

#if defined(__x86_64__)
bool can_run_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool can_run_avx512() {
  return can_run_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool can_run_avx512_bf16() { return can_run_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Whether vdpbf16ps, which does the work of two multiply-adds, takes less time than they do: on a Zen 5 half of it, on
// a Xeon of the fifth generation twice as much (there the matrix unit multiplies bfloat16).
bool has_fast_avx512_bf16() { return __builtin_cpu_is("amd"); }

// The tile registers are large state, which the kernel grants on request, once per process (Linux, "Using XSTATE
// features in user space applications"). Threads that exist already get the permission too.
bool can_run_amx() {
#if defined(JATTN_EMULATED_TILES)  // by a test (tests/compile/emulated_tiles.h)
  return can_run_avx512();
#else
  constexpr unsigned kAmxBf16Bit = 1u << 22, kAmxTileBit = 1u << 24;  // CPUID.(7,0).EDX
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!can_run_avx512() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kAmxBf16Bit) == 0 || (edx & kAmxTileBit) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}

// The matrix unit multiplies tiles of 64 queries and 64 keys, and splits numbers wider than bfloat16 before: where
// sequences have few rows, vectors, which prepare and multiply rows as far as there are any, take less time. Measured
// on one Xeon: docs/kernels/log-cpu.md, "Short sequences on AMX". The same for both passes, which must round scores
// alike: of a score of 1e5, one bit is a percent of the probability.
bool is_short_for_amx(const Problem& problem) {
  const int64_t longer = problem.q_len > problem.kv_len ? problem.q_len : problem.kv_len;
  switch (problem.dtype) {
    case DType::kBF16: return longer <= 16;
    case DType::kF16: return longer < 64;
    default: return problem.q_len <= 128 || problem.kv_len <= 64;
  }
}
#endif

struct Target {
  const KernelTable* kernels;
  const KernelTable* other_kernels;  // of what `kernels` leaves out
  bool (*can_run)();
  bool (*prefers_other)(const Problem& problem) = [](const Problem&) { return false; };

  const char* name() const { return kernels->name; }
};

// Best first.
const Target kTargets[] = {
#if defined(__x86_64__)
    {&kAmxKernels, &kAvx512Kernels, can_run_amx, is_short_for_amx},
    {&kAvx512Bf16Kernels, &kAvx512Kernels, [] { return can_run_avx512_bf16() && has_fast_avx512_bf16(); }},
    {&kAvx512Kernels, nullptr, can_run_avx512},
    {&kAvx512Bf16Kernels, &kAvx512Kernels, [] { return can_run_avx512_bf16() && !has_fast_avx512_bf16(); }},
    {&kAvx2Kernels, nullptr, can_run_avx2},
#endif
    {&kBaselineKernels, nullptr, [] { return true; }},
};

const Target* best_target() {
  static const Target* const best = [] {
    const Target* found = kTargets;
    while (!found->can_run()) ++found;  // the last one always can
    return found;
  }();
  return best;
}

// Null: the best one, or what it prefers to itself for the problem.
std::atomic<const Target*>& forced_target() {
  static std::atomic<const Target*> forced{nullptr};
  return forced;
}

// The tables of an instruction set, in the order in which they are asked for a kernel.
struct Tables {
  const KernelTable *first, *second;
};

Tables tables_of(const Target& target) { return {target.kernels, target.other_kernels}; }

// What runs a problem.
Tables active_tables(const Problem& problem) {
  const Target* forced = forced_target().load(std::memory_order_relaxed);
  if (forced != nullptr) return tables_of(*forced);
  const Target& best = *best_target();
  return best.prefers_other(problem) ? Tables{best.other_kernels, best.kernels} : tables_of(best);
}

// Calls try_table(kernel, table) for those that have a kernel of this type, until one returns true. Returns whether one
// did.
template <typename Kernel, typename Try>
bool try_tables(const Tables& tables, Kernel (KernelTable::*kernels)[4], DType dtype, const Try& try_table) {
  for (const KernelTable* table : {tables.first, tables.second}) {
    if (table == nullptr) continue;
    const Kernel kernel = (table->*kernels)[static_cast<int>(dtype)];
    if (kernel != nullptr && try_table(kernel, *table)) return true;
  }
  return false;
}

TaskRunner runner_of(const Threads& threads) {
  return {threads.count, const_cast<Threads*>(&threads),
          [](void* context, int64_t count, int64_t thread_bytes, void (*body)(void*, int64_t), void* argument) {
            static_cast<const Threads*>(context)->parallel_for(count, thread_bytes,
                                                               [=](int64_t i) { body(argument, i); });
          }};
}

// Without a pair of a query and a key every gradient is zero; those of operands that are not empty must still be
// written.
void clear_gradients(const Problem& problem, const BackwardBuffers& buffers) {
  const auto clear = [](void* gradient, int64_t elements, DType dtype) {
    if (gradient != nullptr) std::memset(gradient, 0, static_cast<size_t>(elements * size_bytes(dtype)));
  };
  const int64_t key_rows = problem.batch * problem.kv_len * problem.num_kv_heads;
  clear(buffers.dq, problem.batch * problem.q_len * problem.num_heads * problem.head_dim, problem.dtype);
  clear(buffers.dk, key_rows * problem.head_dim, problem.dtype);
  clear(buffers.dv, key_rows * problem.head_dim_v, problem.dtype);
  clear(buffers.dbias, shape_of(problem.bias, problem).elements(), problem.bias.dtype);
  const DType lse_dtype = problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  clear(buffers.dslopes, problem.batch * problem.num_heads, lse_dtype);
  clear(buffers.dcaptures, buffers.dcaptures_elements, lse_dtype);
}

}  // namespace

// Of the best instruction set: what it leaves to vectors finds room in what it would take itself, and so do programs of
// a process that is then told to use another set.
int64_t forward_scratch_bytes(const Problem& problem) {
  int64_t bytes = 0;
  try_tables(tables_of(*best_target()), &KernelTable::forward, problem.dtype,
             [&](ForwardKernel, const KernelTable& table) {
               bytes = plan_forward(problem, table.in_planes).scratch_bytes;
               return true;
             });
  return bytes;
}

int64_t backward_scratch_bytes(const Problem& problem, bool wants_dbias, int64_t capture_elements) {
  int64_t bytes = 0;
  try_tables(tables_of(*best_target()), &KernelTable::backward, problem.dtype,
             [&](BackwardKernel, const KernelTable& table) {
               bytes = plan_backward(problem, wants_dbias, table.in_planes, capture_elements).scratch_bytes;
               return true;
             });
  return bytes;
}

bool forward(const Problem& problem, const ForwardResults& results, Scratch scratch, const Threads& threads) {
  const auto run = [&](ForwardKernel kernel, const KernelTable& table) {
    const ForwardPlan plan = plan_forward(problem, table.in_planes);
    if (plan.scratch_bytes > scratch.bytes) return false;
    if (plan.num_tasks > 0) kernel(problem, plan, results, scratch.data, runner_of(threads));
    return true;
  };
  return try_tables(active_tables(problem), &KernelTable::forward, problem.dtype, run);
}

bool backward(const Problem& problem, const BackwardBuffers& buffers, Scratch scratch, const Threads& threads) {
  if (problem.batch == 0 || problem.num_heads == 0 || problem.q_len == 0 || problem.kv_len == 0) {
    clear_gradients(problem, buffers);
    return true;
  }
  const auto run = [&](BackwardKernel kernel, const KernelTable& table) {
    const BackwardPlan plan =
        plan_backward(problem, buffers.dbias != nullptr, table.in_planes, buffers.dcaptures_elements);
    if (plan.scratch_bytes > scratch.bytes) return false;
    kernel(problem, plan, buffers, scratch.data, runner_of(threads));
    return true;
  };
  return try_tables(active_tables(problem), &KernelTable::backward, problem.dtype, run);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Target& target : kTargets) {
    if (target.can_run()) names.emplace_back(target.name());
  }
  return names;
}

bool force_instruction_set(const std::string& name) {
  if (name.empty()) {
    forced_target() = nullptr;
    return true;
  }
  for (const Target& target : kTargets) {
    if (name == target.name() && target.can_run()) {
      forced_target() = &target;
      return true;
    }
  }
  return false;
}

std::string active_instruction_set() {
  const Target* forced = forced_target().load();
  return (forced != nullptr ? forced : best_target())->name();
}

std::string instruction_set_of(const Problem& problem) {
  std::string name;
  try_tables(active_tables(problem), &KernelTable::forward, problem.dtype,
             [&](ForwardKernel, const KernelTable& table) {
               name = table.name;
               return true;
             });
  return name;
}

}  // namespace jattn::cpu
