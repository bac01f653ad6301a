// What an instruction of a warp costs on Hopper alone, and while two warpgroups keep the matrix unit busy beside it.
//
//   nvcc -std=c++20 -O3 -arch=sm_90a -Icc/kernels -o build/instruction_costs tools/instruction_costs.cu
//   build/instruction_costs
//
// A block has one warp in each of the four schedulers that issues nothing but chains of one instruction, and two
// warpgroups that issue m64n128k16 products of zeros, eight a group, A in shared memory ("shared") or in registers
// ("registers"). One line for an instruction: cycles between two of a warp, and in brackets which part of their peak
// the products keep beside it. Sixteen words in turn hide the latency. What ptxas made of a chain is to be looked up in
// the machine code: it folds constants.
#include <cstdint>
#include <cstdio>

#include "attn/dropout.cuh"
#include "sm90/barrier.cuh"
#include "sm90/wgmma.cuh"

namespace {

using namespace jattn;
using namespace jattn::sm90;

constexpr int kThreads = 3 * kWarpgroupThreads, kSharedBytes = 67 * 1024, kBlocks = 132;
constexpr int kGroups = 1000, kProducts = 8, kProductCycles = 64;  // of a warpgroup; cycles of one at the peak
constexpr int kSteps = 8, kChains = 4, kRounds = 2000;             // kRounds: without products

enum class Products { kNone, kShared, kRegisters };

struct Result {
  unsigned long long cycles, product_cycles;
  unsigned rounds;
};

__device__ float as_float(uint32_t x) { return __uint_as_float(x); }

// One step of four words: kInstructions instructions, which kName says.
struct PhiloxRound {
  static constexpr const char* kName = "Philox round: 2 IMAD.WIDE, 2 LOP3";
  static constexpr int kInstructions = 4;
  static __device__ void step(uint32_t (&x)[4], uint32_t k) {
    PhiloxWords words{{x[0], x[1], x[2], x[3]}};
    philox_round(words, {k, k + 1});
    for (int i = 0; i < 4; ++i) x[i] = words.word[i];
  }
};
struct PhiloxRoundByDoubles {
  static constexpr const char* kName = "Philox round: 2 DFMA, 2 IMAD, 2 LOP3";
  static constexpr int kInstructions = 6;
  // fma(2^52 + x, c / 2^32, 2^52 - 2^20 c), cut off, ends in the upper half of c x.
  static __device__ uint32_t upper_half(uint32_t x, uint32_t c) {
    constexpr double kOne = 4503599627370496.0;
    const double factor = c / 4294967296.0;
    return __double2loint(__fma_rz(__hiloint2double(0x43300000, x), factor, kOne - kOne * factor));
  }
  static __device__ void step(uint32_t (&x)[4], uint32_t k) {
    const uint32_t a = upper_half(x[0], kPhiloxMultiplier0), b = upper_half(x[2], kPhiloxMultiplier1);
    const uint32_t low_a = x[0] * kPhiloxMultiplier0, low_b = x[2] * kPhiloxMultiplier1;
    x[0] = b ^ x[1] ^ k;
    x[1] = low_b;
    x[2] = a ^ x[3] ^ (k + 1);
    x[3] = low_a;
  }
};

// Four independent words, an instruction each. The statement sees x[i], its neighbour n, k, and both as floats.
#define JATTN_INSTRUCTION(Name, name, statement)                \
  struct Name {                                                 \
    static constexpr const char* kName = name;                  \
    static constexpr int kInstructions = 4;                     \
    static __device__ void step(uint32_t (&x)[4], uint32_t k) { \
      _Pragma("unroll") for (int i = 0; i < 4; ++i) {           \
        [[maybe_unused]] const uint32_t n = x[(i + 1) % 4];     \
        [[maybe_unused]] float f = as_float(x[i]);              \
        statement;                                              \
      }                                                         \
    }                                                           \
  }

JATTN_INSTRUCTION(UpperProduct, "IMAD.HI",
                  asm volatile("mul.hi.u32 %0, %0, %1;" : "+r"(x[i]) : "n"(kPhiloxMultiplier0)));
JATTN_INSTRUCTION(LowerProduct, "IMAD", asm volatile("mul.lo.u32 %0, %0, %1;" : "+r"(x[i]) : "r"(k)));
JATTN_INSTRUCTION(FourBytes, "IDP.4A", asm volatile("dp4a.u32.u32 %0, %0, %1, %2;" : "+r"(x[i]) : "r"(k), "r"(n)));
JATTN_INSTRUCTION(Logic, "LOP3", asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(x[i]) : "r"(n), "r"(k)));
JATTN_INSTRUCTION(Permute, "PRMT", asm volatile("prmt.b32 %0, %0, %1, 0x1706;" : "+r"(x[i]) : "r"(n)));
JATTN_INSTRUCTION(Shift, "SHF", asm volatile("shf.l.wrap.b32 %0, %0, %0, 7;" : "+r"(x[i])));
JATTN_INSTRUCTION(AddThree, "IADD3",
                  asm volatile("{\n.reg .u32 sum;\nadd.u32 sum, %0, %1;\nadd.u32 %0, sum, %2;\n}" : "+r"(x[i]) : "r"(n),
                               "r"(x[(i + 2) % 4])));
JATTN_INSTRUCTION(Greatest, "VIMNMX3", x[i] = __vimax3_s32(x[i], n, k));
JATTN_INSTRUCTION(FloatMaximum, "FMNMX", asm volatile("max.f32 %0, %0, %1;" : "+f"(f) : "f"(as_float(n)));
                  x[i] = __float_as_uint(f));
JATTN_INSTRUCTION(Pack, "F2FP", asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x[i]) : "f"(f), "f"(as_float(k))));
JATTN_INSTRUCTION(CompareTwo, "HSET2", asm volatile("set.lt.u32.bf16x2 %0, %0, %1;" : "+r"(x[i]) : "r"(k)));
JATTN_INSTRUCTION(MultiplyTwo, "HMUL2", asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(x[i]) : "r"(k)));
JATTN_INSTRUCTION(MultiplyAddTwo, "HFMA2",
                  asm volatile("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x[i]) : "r"(k), "r"(k + 1)));
JATTN_INSTRUCTION(Add, "FADD", asm volatile("add.f32 %0, %0, %1;" : "+f"(f) : "f"(as_float(k)));
                  x[i] = __float_as_uint(f));
JATTN_INSTRUCTION(Multiply, "FMUL", asm volatile("mul.f32 %0, %0, %1;" : "+f"(f) : "f"(as_float(k)));
                  x[i] = __float_as_uint(f));
JATTN_INSTRUCTION(MultiplyAdd, "FFMA",
                  asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(f) : "f"(as_float(k)), "f"(as_float(k + i)));
                  x[i] = __float_as_uint(f));
JATTN_INSTRUCTION(MultiplyAddImmediate, "FFMA, a factor immediate",
                  asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(f) : "f"(1.0001f), "f"(as_float(k)));
                  x[i] = __float_as_uint(f));
JATTN_INSTRUCTION(Exponential, "MUFU.EX2", asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(f));
                  x[i] = __float_as_uint(f));
JATTN_INSTRUCTION(Shuffle, "SHFL", asm volatile("shfl.sync.bfly.b32 %0, %0, 4, 0x1f, 0xffffffff;" : "+r"(x[i])));

template <class Instruction, Products kProductsOf>
__global__ void __launch_bounds__(kThreads, 1) run(Result* results, uint32_t k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ volatile bool stop;
  if (threadIdx.x == 0) stop = false;
  for (int i = threadIdx.x; i < 64 * 1024 / 4; i += kThreads) reinterpret_cast<unsigned*>(shared)[i] = 0;
  __syncthreads();
  Result& result = results[blockIdx.x];
  if (__shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0) == 0) {
    release_registers<56>();
    uint32_t x[kChains][4];
    for (int chain = 0; chain < kChains; ++chain) {
      for (int i = 0; i < 4; ++i) x[chain][i] = threadIdx.x * 77 + i + 13 * chain + 1;
    }
    __nanosleep(2000);  // the products have begun
    const long long begin = clock64();
    unsigned rounds = 0;
#pragma unroll 1
    for (; kProductsOf == Products::kNone ? rounds < kRounds : !stop; ++rounds) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int chain = 0; chain < kChains; ++chain) Instruction::step(x[chain], k);
      }
    }
    const long long cycles = clock64() - begin;
    uint32_t all = 0;
    for (int chain = 0; chain < kChains; ++chain) {
      for (int i = 0; i < 4; ++i) all ^= x[chain][i];
    }
    if (threadIdx.x == 0 || all == 12345) result.cycles = cycles, result.rounds = rounds;
  } else {
    acquire_registers<224>();
    if constexpr (kProductsOf != Products::kNone) {
      float d[64] = {};
      unsigned words[32] = {};
      const unsigned base = shared_address(shared);
      const auto a = descriptor(base, kUnusedLeading), b = descriptor(base + 32 * 1024, kUnusedLeading);
      const long long begin = clock64();
      for (int group = 0; group < kGroups; ++group) {
        pin_registers(d);
        pin_registers(words);
        begin_products();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          if constexpr (kProductsOf == Products::kShared) {
            Wgmma<128>::shared<Element::kBF16, true, 0, 0>(d, (a + i % 4 * 2).bits(), (b + i % 4 * 2).bits());
          } else {
            Wgmma<128>::registers<Element::kBF16, true, 0>(d, words + 4 * i, (b + i % 4 * 2).bits());
          }
        }
        commit_products();
        wait_products<0>();
        pin_registers(d);
      }
      stop = true;
      const long long cycles = clock64() - begin;
      float all = 0.0f;
      for (float value : d) all += value;
      if (threadIdx.x == kWarpgroupThreads || all == 12345.0f) result.product_cycles = cycles;
    }
  }
}

template <class Instruction, Products kProductsOf>
void measure(Result* results) {
  const auto kernel = run<Instruction, kProductsOf>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  for (int repeat = 0; repeat < 2; ++repeat) kernel<<<kBlocks, kThreads, kSharedBytes>>>(results, 2000);
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
    std::printf("  %s", cudaGetErrorString(error));
    return;
  }
  double cycles = 0, product_cycles = 0, rounds = 0;
  for (int i = 0; i < kBlocks; ++i) {
    cycles += results[i].cycles;
    product_cycles += results[i].product_cycles;
    rounds += results[i].rounds;
  }
  std::printf("  %6.2f", cycles / (rounds * kSteps * kChains * Instruction::kInstructions));
  if (kProductsOf != Products::kNone) {
    std::printf(" (%.2f)", 2.0 * kBlocks * kGroups * kProducts * kProductCycles / product_cycles);
  }
}

template <class... Instructions>
void measure_all(Result* results) {
  (..., (std::printf("%-38s", Instructions::kName), measure<Instructions, Products::kNone>(results),
         measure<Instructions, Products::kShared>(results), measure<Instructions, Products::kRegisters>(results),
         std::printf("\n")));
}

}  // namespace

int main() {
  Result* results = nullptr;
  if (cudaMallocManaged(&results, kBlocks * sizeof(Result)) != cudaSuccess) return 1;
  std::printf("%-38s  alone  beside products: shared, registers\n", "cycles of a warp");
  measure_all<PhiloxRound, PhiloxRoundByDoubles, UpperProduct, LowerProduct, FourBytes, Logic, Permute, Shift, AddThree,
              Greatest, FloatMaximum, Pack, CompareTwo, MultiplyTwo, MultiplyAddTwo, Add, Multiply, MultiplyAdd,
              MultiplyAddImmediate, Exponential, Shuffle>(results);
  return 0;
}
