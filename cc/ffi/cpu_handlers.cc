// The targets jattn_forward_v1 and jattn_backward_v1 for the CPU platform: decode and delegate. Stateless: typed state
// registered before the CPU client exists would stop JAX from starting (docs/design/0003-ffi-boundary.md).
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "core/require.h"
#include "cpu/attention.h"
#include "cpu/program.h"
#include "ffi/bind.h"
#include "ffi/guarded.h"
#include "ffi/handlers.h"

namespace jattn {
namespace {

namespace ffi = xla::ffi;

// One parallel loop on XLA's thread pool. The calling thread is often a worker of that pool itself, so waiting for
// tasks that were only scheduled could wait for ever. Here the caller takes items like every other worker and at the
// end waits only for items that are already being worked on; a task that starts late finds nothing left and touches no
// buffer.
class Loop {
 public:
  Loop(int64_t count, const std::function<void(int64_t)>& body) : count_(count), body_(&body) {}

  void work() {
    int64_t finished = 0;
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      (*body_)(item);
      ++finished;
    }
    if (finished == 0) return;
    std::lock_guard lock(mutex_);
    done_ += finished;
    if (done_ == count_) all_done_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == count_; });
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>* body_;  // outlives every item: the caller waits for all of them
  std::atomic<int64_t> next_{0};
  int64_t done_ = 0;
  std::mutex mutex_;
  std::condition_variable all_done_;
};

cpu::Threads threads_of(ffi::ThreadPool pool) {
  const auto parallel_for = [pool](int64_t count, int64_t thread_bytes,
                                   const std::function<void(int64_t)>& body) mutable {
    if (count <= 0) return;
    if (!cpu::reserve_thread_memory(thread_bytes)) {
      fail(Fault::kMemory, "no memory for the tiles that a thread works on");
    }
    auto loop = std::make_shared<Loop>(count, body);
    const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
    try {
      for (int64_t i = 0; i < helpers; ++i) {
        pool.Schedule([loop, thread_bytes] {
          if (cpu::reserve_thread_memory(thread_bytes)) loop->work();  // else the others do the work
        });
      }
    } catch (const std::bad_alloc&) {
      // Those that were scheduled use `body`: it must not end before they do. Fewer threads do the work.
    }
    loop->work();
    loop->wait();
  };
  return {pool.num_threads(), parallel_for};
}

// Runs a pass, which returns whether `scratch` was large enough. XLA aligns every buffer to 64 bytes on CPU; the layout
// of scratch relies on it.
template <class Pass>
ffi::Error run_pass(ffi::AnyBuffer scratch, int64_t wanted_bytes, const Pass& pass) {
  const auto bytes = static_cast<int64_t>(scratch.size_bytes());
  if (bytes > 0 && reinterpret_cast<uintptr_t>(scratch.untyped_data()) % 64 != 0) {
    return ffi::Error(ffi::ErrorCode::kInternal, "jattn: scratch is not aligned to 64 bytes");
  }
  if (pass(cpu::Scratch{scratch.untyped_data(), bytes})) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jattn: scratch has " + std::to_string(bytes) +
                                                          " bytes, which is too few: this machine wants " +
                                                          std::to_string(wanted_bytes));
}

// Finds a program that the plan has by this name.
const cpu::Program* find_program(const ffi::Dictionary& plan, const char* name, const Problem& problem) {
  const auto text = plan.get<std::string_view>(name);
  JATTN_REQUIRE(text.has_value(), "the problem has a score function, but attribute plan.", name,
                " is missing or is not text");
  const cpu::Program& program = cpu::find_program(*text);
  cpu::check_captures(problem, program);
  return &program;
}

// Finds the score function of the plan, if the problem has one.
void find_score_function(const ffi::Dictionary& plan, Problem& problem) {
  if (problem.score_mod) problem.program = find_program(plan, "program", problem);
}

ffi::Error forward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary spec,
                   ffi::Dictionary plan) {
  ForwardResults results;
  ffi::AnyBuffer scratch(nullptr);
  auto problem = bind::decode_forward(spec, args, rets, results, scratch);
  if (problem.has_error()) return problem.error();
  find_score_function(plan, *problem);
  return run_pass(scratch, cpu::forward_scratch_bytes(*problem),
                  [&](cpu::Scratch memory) { return cpu::forward(*problem, results, memory, threads_of(pool)); });
}

ffi::Error backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary spec,
                    ffi::Dictionary plan) {
  BackwardBuffers buffers;
  ffi::AnyBuffer scratch(nullptr);
  auto problem = bind::decode_backward(spec, args, rets, buffers, scratch);
  if (problem.has_error()) return problem.error();
  find_score_function(plan, *problem);
  if (buffers.dslopes != nullptr && buffers.dslopes_parts != 1) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jattn: dslopes has " + std::to_string(buffers.dslopes_parts) +
                                                            " parts, must have 1: the CPU kernel adds them up itself");
  }
  if (buffers.dcaptures != nullptr) problem->gradients = find_program(plan, "gradients", *problem);
  return run_pass(scratch, cpu::backward_scratch_bytes(*problem, buffers.dbias != nullptr, buffers.dcaptures_elements),
                  [&](cpu::Scratch memory) { return cpu::backward(*problem, buffers, memory, threads_of(pool)); });
}

ffi::Error instantiate(ffi::Dictionary spec, ffi::Dictionary) { return bind::check_attributes(spec); }

}  // namespace
}  // namespace jattn

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnCpuInstantiate, jattn::ffi_handlers::guarded<jattn::instantiate>,
    xla::ffi::Ffi::BindInstantiate().Attr<xla::ffi::Dictionary>("spec").Attr<xla::ffi::Dictionary>("plan"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JattnCpuForward, jattn::ffi_handlers::guarded<jattn::forward>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Dictionary>("spec")
                                  .Attr<xla::ffi::Dictionary>("plan"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JattnCpuBackward, jattn::ffi_handlers::guarded<jattn::backward>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Dictionary>("spec")
                                  .Attr<xla::ffi::Dictionary>("plan"));

namespace jattn::ffi_handlers {

std::vector<Handler> cpu() {
  return {{"jattn_forward_v1", "instantiate", JattnCpuInstantiate},
          {"jattn_forward_v1", "execute", JattnCpuForward},
          {"jattn_backward_v1", "instantiate", JattnCpuInstantiate},
          {"jattn_backward_v1", "execute", JattnCpuBackward}};
}

}  // namespace jattn::ffi_handlers
