// The parts of the CPU kernel in isolation, on one thread: the multiply-add peak of the instruction set that this file
// is compiled for (of the matrix unit and of AVX-512-BF16: of their products), the tile products, the softmax of a
// tile, and the whole passes. benchmarks/cpu_tiles.py compiles and runs it for every set. Each part is measured right
// before the peak, many times, on the thread's CPU clock; the least time counts, so that a busy machine disturbs it
// little.
//
// Prints a line of words for each: part, type, head dim, mask, keys ("-" for what does not apply), seconds, FLOPs, peak
// in FLOP/s (of the type), products of bfloat16 that make one of the type (0: multiply-adds of the type itself). An
// argument limits how often each part is timed.
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <type_traits>

#include "cpu/attention.h"
#include "cpu/backward.inl"
#include "cpu/forward.inl"
#include "cpu/program.h"
#if defined(__AMX_BF16__)
#include "cpu/amx_forward_products.h"
#include "cpu/pair_backward_products.h"
#include "cpu/planes_backward_products.h"
#include "cpu/planes_forward_products.h"
#elif defined(__AVX512BF16__)
#include "cpu/pair_backward_products.h"
#include "cpu/pair_forward_products.h"
#endif

namespace jattn::cpu {

// No problem here has a score function: its interpreter is left out of this program.
void run_program_baseline(const Problem&, const ProgramTile&) { std::abort(); }
#if defined(__x86_64__)
void run_program_avx2(const Problem&, const ProgramTile&) { std::abort(); }
void run_program_avx512(const Problem&, const ProgramTile&) { std::abort(); }
#endif

}  // namespace jattn::cpu

namespace jattn::cpu {
namespace {

double thread_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int most_repeats = 1 << 30;

// The least time of one of `calls` calls.
template <typename Body>
double least_seconds(int repeats, int calls, const Body& body) {
  double least = 1e30;
  for (int i = 0; i < repeats && i < most_repeats; ++i) {
    const double begin = thread_seconds();
    for (int call = 0; call < calls; ++call) body();
    const double seconds = (thread_seconds() - begin) / calls;
    least = seconds < least ? seconds : least;
  }
  return least;
}

// Independent multiply-adds without any memory access. Several per chain between the marks that keep the compiler from
// computing the result itself, since it moves registers around those.
double peak_gflops() {
  constexpr int kChains = 12, kSteps = 2000;
  float total = 0;
  const double seconds = least_seconds(20, 10, [&] {
    Vec<float> sum[kChains];
    for (int chain = 0; chain < kChains; ++chain) sum[chain] = broadcast(static_cast<float>(chain));
    Vec<float> factor = broadcast(0.5f), term = broadcast(1.0f);
    for (int step = 0; step < kSteps; ++step) {
      factor = rounded(factor);
#pragma GCC unroll 12
      for (int chain = 0; chain < kChains; ++chain) sum[chain] = sum[chain] * factor + term;
    }
    for (const Vec<float>& chain : sum) total += chain[0];
  });
  if (total < 0) std::puts("never");
  return 2.0 * kChains * kSteps * kWidth<float> / seconds * 1e-9;
}

#if defined(__AMX_BF16__)
// Independent products of the matrix unit, of numbers like those of the operands: with zeros its clock is a third
// higher.
double product_peak_gflops() {
  constexpr int kSteps = 400;
  uint16_t numbers[2][kAmxRows * kAmxInner];
  uint32_t state = 1;
  for (auto& tile : numbers) {
    for (uint16_t& number : tile) {
      state = state * 1664525u + 1013904223u;
      number = static_cast<uint16_t>((state >> 16 & 0x80ff) | 0x3f00);  // between 0.5 and 2, either sign
    }
  }
  const AmxSession session;
  asm volatile("" ::: "memory");
  _tile_loadd(4, numbers[0], kAmxRowBytes);
  _tile_loadd(6, numbers[1], kAmxRowBytes);
  const double seconds = least_seconds(20, 10, [&] {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < kSteps; ++step) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 6);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 6);
    }
  });
  return 4.0 * kSteps * 2 * kAmxRows * kAmxRows * kAmxInner / seconds * 1e-9;
}
#elif defined(__AVX512BF16__)
// As peak_gflops: independent products of pairs, all of the same numbers, which leaves the clock of this machine as it
// is.
double product_peak_gflops() {
  constexpr int kChains = 24, kSteps = 2000;
  float total = 0;
  const double seconds = least_seconds(20, 10, [&] {
    Vec<float> sum[kChains];
    for (int chain = 0; chain < kChains; ++chain) sum[chain] = broadcast(static_cast<float>(chain));
    Vec<float> pairs = broadcast(0.7f);
    for (int step = 0; step < kSteps; ++step) {
      pairs = rounded(pairs);
      const auto factors = reinterpret_cast<__m512bh>(pairs);
#pragma GCC unroll 24
      for (int chain = 0; chain < kChains; ++chain) sum[chain] = add_product(sum[chain], factors, factors);
    }
    for (const Vec<float>& chain : sum) total += chain[0];
  });
  if (total < 0) std::puts("never");
  return 4.0 * kChains * kSteps * kWidth<float> / seconds * 1e-9;
}
#endif

template <typename T>
T* memory(int64_t count) {
  auto* data = static_cast<T*>(std::aligned_alloc(64, static_cast<size_t>((count * sizeof(T) + 63) / 64 * 64)));
  std::memset(data, 0, static_cast<size_t>(count) * sizeof(T));
  return data;
}

template <typename T>
T* random_floats(int64_t count) {
  T* data = memory<T>(count);
  uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    if constexpr (sizeof(T) == 4) {
      data[i] = value;
    } else {
      Vec<float> vector = broadcast(value);
      T narrowed[kWidth<float>];
      narrow(narrowed, vector);
      data[i] = narrowed[0];
    }
  }
  return data;
}

struct Part {
  const char *name, *type;
  int64_t head_dim;
  const char* mask = "-";
  int64_t keys = kTile;
};

// `products` of bfloat16 make one of the type: 0 where multiply-adds do it.
void report(const Part& part, double flops, double seconds, int64_t products = 0) {
#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
  const double peak = products > 0 ? product_peak_gflops() / static_cast<double>(products) : peak_gflops();
#else
  const double peak = peak_gflops();
#endif
  std::printf("%s %s %d %s %d %.9g %.9g %.6g %d\n", part.name, part.type, static_cast<int>(part.head_dim), part.mask,
              static_cast<int>(part.keys), seconds, flops, peak * 1e9, static_cast<int>(products));
  std::fflush(stdout);
}

#if defined(__AMX_BF16__)
template <size_t kCount>
constexpr int64_t count_of(const PlanePair (&)[kCount]) {
  return kCount;
}

// The products of the forward pass, 64 x 64 x D and D x 64 x 64, as it calls them for `Element`.
template <typename Element>
void measure_tiles(const char* type, int64_t head_dim) {
  constexpr bool kIsOnePlane = std::is_same_v<Element, BFloat16>;
  constexpr int64_t kPlanes = kIsOnePlane ? 1 : kPlanesOf<Element>;
  const double flops = 2.0 * kTile * kTile * static_cast<double>(head_dim);
  const BFloat16* rows = random_floats<BFloat16>(kPlanes * kTile * head_dim);
  const BFloat16* lanes = random_floats<BFloat16>(kPlanes * kTile * max_of(head_dim, kTile));
  float* result = memory<float>(kTile * max_of(head_dim, kTile));
  const auto run = [&](const char* part, int64_t products, const auto& body) {
    double seconds;
    {
      const AmxSession session;
      seconds = least_seconds(30, 50, body);
    }
    report({part, type, head_dim}, flops, seconds, products);
  };
  if constexpr (kIsOnePlane) {
    run("scores", 1,
        [&] { amx_multiply<false>(kTile, kTile, head_dim, {rows, head_dim}, {lanes, 2 * kTile}, {result, kTile}); });
    run("values", 1,
        [&] { amx_multiply<true>(head_dim, kTile, kTile, {rows, kTile}, {lanes, 2 * kTile}, {result, kTile}); });
  } else {
    constexpr int64_t kProducts = count_of(kPlanePairs<kPlanes>);
    run("scores", kProducts, [&] {
      multiply_planes<kPlanes, false>(kTile, kTile, head_dim, {rows, head_dim}, {lanes, head_dim}, {result, kTile});
    });
    run("values", kProducts, [&] {
      multiply_planes<kPlanes, true>(head_dim, kTile, kTile, {rows, kTile}, {lanes, kTile}, {result, kTile});
    });
  }
}
#elif defined(__AVX512BF16__)
void measure_tiles(int64_t head_dim) {
  const double flops = 2.0 * kTile * kTile * static_cast<double>(head_dim);
  const auto *a = random_floats<BFloat16>(kTile * head_dim), *b = random_floats<BFloat16>(kTile * head_dim);
  float* c = memory<float>(kTile * max_of(head_dim, kTile));
  const auto run = [&](const char* part, const auto& body) {
    report({part, "bfloat16", head_dim}, flops, least_seconds(30, 50, body), 1);
  };
  const auto multiply_pairs = [&](auto accumulates, int64_t rows, int64_t columns, int64_t inner,
                                  LeftTile<BFloat16> left) {
    multiply<accumulates(), BFloat16>(rows, columns, inner, left, {b, 2 * columns}, {c, columns});
  };
  constexpr std::true_type kAdds;
  run("scores", [&] { multiply_pairs(std::false_type(), kTile, kTile, head_dim, {a, head_dim, 2}); });
  run("values", [&] { multiply_pairs(kAdds, head_dim, kTile, kTile, {a, 2, 2 * head_dim}); });
  run("dk,dv", [&] { multiply_pairs(kAdds, head_dim, kTile, kTile, {a, kTile, 2}); });
  run("dq", [&] { multiply_pairs(kAdds, kTile, head_dim, kTile, {a, kTile, 2}); });
}
#else
void measure_tiles(int64_t head_dim) {
  const double flops = 2.0 * kTile * kTile * static_cast<double>(head_dim);
  float *a = random_floats<float>(kTile * head_dim), *b = random_floats<float>(kTile * head_dim);
  float* c = memory<float>(kTile * max_of(head_dim, kTile));
  const auto run = [&](const char* part, const auto& body) {
    report({part, "float32", head_dim}, flops, least_seconds(30, 50, body));
  };
  run("scores", [&] { multiply<false, float>(kTile, kTile, head_dim, {a, head_dim, 1}, {b, kTile}, {c, kTile}); });
  run("values", [&] { multiply<true, float>(head_dim, kTile, kTile, {a, 1, head_dim}, {b, kTile}, {c, kTile}); });
  run("dk,dv", [&] { multiply<true, float>(kTile, head_dim, kTile, {a, 1, kTile}, {b, head_dim}, {c, head_dim}); });
  run("dq", [&] { multiply<true, float>(kTile, head_dim, kTile, {a, kTile, 1}, {b, head_dim}, {c, head_dim}); });
}
#endif

void measure_softmax() {
  constexpr int64_t kPanel = kPanelRows[static_cast<int>(DType::kF32)];
  float* scores = random_floats<float>(kTile * kPanel);
  auto* state = new SoftmaxState<float, kPanel>;
  state->reset();
  volatile int64_t keys = kTile;
  const double seconds = least_seconds(30, 50, [&] {
    update_softmax<false, false, true, float, kPanel>(keys, kPanel, 1.0f, scores, *state, [](auto&&...) {});
    for (int64_t i = 0; i < kTile * kPanel; i += kWidth<float>) store(scores + i, load(scores + i) - 0.5f);
  });
  report({"softmax", "float32", 0}, 0, seconds);
}

template <typename Element, typename Forward, typename Backward>
void measure_passes(const char* type, int64_t length, int64_t head_dim, bool is_causal, int64_t products = 0) {
  constexpr int64_t kHeads = 2;
  const int64_t count = length * kHeads * head_dim;
  Problem problem;
  problem.batch = 1, problem.q_len = problem.kv_len = length;
  problem.num_heads = problem.num_kv_heads = kHeads;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.dtype = kDType<Element>;
  problem.scale = 1 / __builtin_sqrt(static_cast<double>(head_dim));
  if (is_causal) problem.band_right = 0;
  problem.q = random_floats<Element>(count), problem.k = random_floats<Element>(count);
  problem.v = random_floats<Element>(count);
  const ForwardResults results{memory<Element>(count), memory<float>(length * kHeads)};
  BackwardBuffers buffers;
  buffers.out = results.out, buffers.lse = results.lse, buffers.dout = random_floats<Element>(count);
  buffers.dq = memory<Element>(count), buffers.dk = memory<Element>(count), buffers.dv = memory<Element>(count);
#if defined(__AMX_BF16__)
  constexpr bool kInPlanes = true;
#else
  constexpr bool kInPlanes = false;
#endif
  const ForwardPlan forward_plan = plan_forward(problem, kInPlanes);
  const BackwardPlan backward_plan = plan_backward(problem, false, kInPlanes);
  void* scratch = memory<char>(max_of(forward_plan.scratch_bytes, backward_plan.scratch_bytes));
  const TaskRunner runner{1, nullptr,
                          [](void*, int64_t tasks, int64_t thread_bytes, void (*body)(void*, int64_t), void* argument) {
                            if (!reserve_thread_memory(thread_bytes)) std::abort();
                            for (int64_t i = 0; i < tasks; ++i) body(argument, i);
                          }};
  const double visible = static_cast<double>(length * length) / (is_causal ? 2 : 1);
  const double flops = 4.0 * kHeads * static_cast<double>(head_dim) * visible;
  const auto part = [&](const char* pass) { return Part{pass, type, head_dim, is_causal ? "causal" : "full", length}; };
  const double forward_seconds =
      least_seconds(12, 1, [&] { run_forward<Element, Forward>(problem, forward_plan, results, scratch, runner); });
  report(part("forward"), flops, forward_seconds, products);
  const double backward_seconds =
      least_seconds(8, 1, [&] { run_backward<Element, Backward>(problem, backward_plan, buffers, scratch, runner); });
  report(part("backward"), 2.5 * flops, backward_seconds, products);
}

void measure() {
#if defined(__AMX_BF16__)
  syscall(SYS_arch_prctl, 0x1023, 18);  // permission to use the tile registers (targets.cc)
#endif
#if defined(__AMX_BF16__)
  constexpr int64_t kOfF32 = count_of(kPlanePairs<3>), kOfF16 = count_of(kPlanePairs<2>);
#endif
  for (const int64_t head_dim : {64, 128}) {
#if defined(__AMX_BF16__)
    measure_tiles<float>("float32", head_dim);
    measure_tiles<BFloat16>("bfloat16", head_dim);
    measure_tiles<Float16>("float16", head_dim);
#else
    measure_tiles(head_dim);
#endif
  }
  measure_softmax();
  constexpr int64_t kLength = 1024;
  for (const int64_t head_dim : {64, 128}) {
    for (const bool is_causal : {true, false}) {
#if defined(__AMX_BF16__)
      using BF16 = BFloat16;
      using F16 = Float16;
      measure_passes<float, PlanesForwardProducts<float>, PlanesBackwardProducts<float>>("float32", kLength, head_dim,
                                                                                         is_causal, kOfF32);
      measure_passes<BF16, AmxForwardProducts, PairBackwardProducts<AmxUnit>>("bfloat16", kLength, head_dim, is_causal,
                                                                              1);
      measure_passes<F16, PlanesForwardProducts<F16>, PlanesBackwardProducts<F16>>("float16", kLength, head_dim,
                                                                                   is_causal, kOfF16);
#elif defined(__AVX512BF16__)
      measure_passes<BFloat16, PairForwardProducts, PairBackwardProducts<VectorUnit>>("bfloat16", kLength, head_dim,
                                                                                      is_causal, 1);
#else
      measure_passes<float, ForwardProducts<float>, BackwardProducts<float>>("float32", kLength, head_dim, is_causal);
#endif
    }
  }
}

}  // namespace
}  // namespace jattn::cpu

int main(int argc, char** argv) {
  if (argc > 1) jattn::cpu::most_repeats = std::atoi(argv[1]);
  jattn::cpu::measure();
}
