// The products of the backward pass, started and not waited for. Tiles in shared memory have 128-byte swizzle.
#pragma once

#include "sm90/wgmma.cuh"

namespace jattn::sm90 {

// Words of a thread for `steps` steps of a left operand in registers; an array has one at least.
JATTN_HOST_DEVICE constexpr int fragment_words(int steps) { return steps > 0 ? 4 * steps : 1; }

// c = a b^T over kDepth columns: 64 rows of a tile of kRowsA rows, all rows of a tile of kRowsB. The first
// kRegisterSteps steps take a as fragments.
template <Element kElement, int kRowsA, int kRowsB, int kDepth, int kRegisterSteps>
__device__ __forceinline__ void start_row_product(float (&c)[kRowsB / 2],
                                                  unsigned (&fragments)[fragment_words(kRegisterSteps)],
                                                  unsigned a_address, unsigned b_address) {
  const unsigned long long a = descriptor(a_address, kUnusedLeading).bits();
  const unsigned long long b = descriptor(b_address, kUnusedLeading).bits();
  constexpr int kStepsPerChunk = kChunkColumns / kStepDepth;
  if constexpr (kRegisterSteps > 0) pin_registers(fragments);
  begin_products();
#pragma unroll
  for (int step = 0; step < kDepth / kStepDepth; ++step) {
    const int chunk = step / kStepsPerChunk;
    const int in_chunk = step % kStepsPerChunk * kStepDepth * 2;
    const int a_step = (chunk * kRowsA * kChunkRowBytes + in_chunk) / 16;
    const int b_step = (chunk * kRowsB * kChunkRowBytes + in_chunk) / 16;
    if (step < kRegisterSteps) {
      if (step == 0) {
        Wgmma<kRowsB>::template registers<kElement, false, 0>(c, fragments, b);
      } else {
        Wgmma<kRowsB>::template registers<kElement, true, 0>(c, fragments + 4 * step, b + b_step);
      }
    } else if (step == 0) {
      Wgmma<kRowsB>::template shared<kElement, false, 0, 0>(c, a, b);
    } else {
      Wgmma<kRowsB>::template shared<kElement, true, 0, 0>(c, a + a_step, b + b_step);
    }
  }
  commit_products();
  pin_registers(c);
}
template <Element kElement, int kRowsA, int kRowsB, int kDepth>
__device__ __forceinline__ void start_row_product(float (&c)[kRowsB / 2], unsigned a_address, unsigned b_address) {
  unsigned none[fragment_words(0)];
  start_row_product<kElement, kRowsA, kRowsB, kDepth, 0>(c, none, a_address, b_address);
}

// c += a b: a as fragments in registers (64 x kDepth), b all kDepth rows and kColumns columns of a tile.
template <Element kElement, int kDepth, int kColumns>
__device__ __forceinline__ void start_fragment_product(float (&c)[kColumns / 2], unsigned (&a)[kDepth / 4],
                                                       unsigned b_address) {
  const unsigned long long b = descriptor(b_address, kDepth * kChunkRowBytes).bits();
  constexpr int kStep = kStepDepth * kChunkRowBytes / 16;
  pin_registers(c);
  pin_registers(a);
  begin_products();
#pragma unroll
  for (int step = 0; step < kDepth / kStepDepth; ++step) {
    Wgmma<kColumns>::template registers<kElement, true, 1>(c, a + 4 * step, b + step * kStep);
  }
  commit_products();
  pin_registers(c);
  pin_registers(a);
}

// c = a^T b over kDepth rows: 64 columns of a from a_address on, kColumns columns of b from b_address on.
template <Element kElement, int kDepth, int kColumns>
__device__ __forceinline__ void start_column_product(float (&c)[kColumns / 2], unsigned a_address, unsigned b_address) {
  const unsigned long long a = descriptor(a_address, kDepth * kChunkRowBytes).bits();
  const unsigned long long b = descriptor(b_address, kDepth * kChunkRowBytes).bits();
  constexpr int kStep = kStepDepth * kChunkRowBytes / 16;
  begin_products();
#pragma unroll
  for (int step = 0; step < kDepth / kStepDepth; ++step) {
    if (step == 0) {
      Wgmma<kColumns>::template shared<kElement, false, 1, 1>(c, a, b);
    } else {
      Wgmma<kColumns>::template shared<kElement, true, 1, 1>(c, a + step * kStep, b + step * kStep);
    }
  }
  commit_products();
  pin_registers(c);
}

}  // namespace jattn::sm90
