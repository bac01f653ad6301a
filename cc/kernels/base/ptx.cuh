// One instruction per function: asynchronous copies, matrix products of a warp, reductions in memory, special
// registers. Accesses of shared memory are in base/shared_memory.cuh.
#pragma once

#include "base/shared_memory.cuh"
#include "base/types.cuh"
#include "config.cuh"

// Dynamic shared memory, with C linkage so that PTX can name it.
extern "C" {
extern __shared__ __align__(1024) unsigned char jattn_shared[];
}

namespace jattn::ptx {

// The address of jattn_shared as PTX writes it. NVRTC makes it of 64 bits and converts it wherever it is used, nvcc
// does not; at the limit of the register file that was 8 bytes of spills. The operand makes the array known to the
// unit.
__device__ __forceinline__ uint32_t shared_base() {
  uint32_t address;
  asm("mov.u32 %0, jattn_shared;" : "=r"(address) : "l"(jattn_shared));
  return address;
}

// Copies kBytes, or writes zeros if !valid; source must be a readable address only if valid. The 16-byte form bypasses
// L1.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t destination, const void* source, bool valid) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// c += a * b for a 16x16 a, a 16x8 b and float32 c. Lane l = 4g + t holds
//   c: rows g, g + 8, columns 2t, 2t + 1 as {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}
//   a: (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..), two columns each
//   b: rows 2t.., 2t + 8.. of column g
template <Element kElement>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kElement == Element::kBF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(kElement == Element::kF16);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The same for a 16x8 a and an 8x8 b of TF32 numbers; the unit ignores the low 13 bits of a and b. Lane 4g + t holds
//   a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)    b: (t, g), (t + 4, g)    c as above
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c = a * b
__device__ __forceinline__ void mma_m16n8k8_tf32_first(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                       uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
      "%10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// x rounded to TF32, halves away from 0: two instructions and the bits of cvt.rna.tf32.f32, which the compiler expands
// to four because it keeps NaN. A NaN may become any number here; the rest that is split off it is NaN.
__device__ __forceinline__ uint32_t to_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }

// The same where finite numbers have to stay finite, which rounding to nearest takes to infinity from 2^128 - 2^116 on:
// cut off after a sum rounded towards 0, x + 0.36 to 0.72 units of the last place. As cheap, at most 0.72 of a unit
// away, without bias over a binade.
__device__ __forceinline__ uint32_t to_finite_tf32(float x) {
  return __float_as_uint(__fmaf_rz(x, 0.36f / 1024, x)) & 0xffffe000u;
}

// Adds four floats to 16-byte aligned memory. One instruction from sm_90 on; no order between blocks.
__device__ __forceinline__ void reduce_add(float* address, const float* x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address + i), "f"(x[i]) : "memory");
  }
#endif
}

// The block index as a value that the compiler cannot derive from an earlier read: what is computed from it after a
// loop is computed anew instead of being kept in registers across the loop.
__device__ __forceinline__ int block_index_anew() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// Likewise.
__device__ __forceinline__ int thread_index_anew() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

}  // namespace jattn::ptx
