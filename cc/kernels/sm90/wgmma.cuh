// Warpgroup matrix products: operand descriptors, ordering, and the two products of attention.
// Source: PTX ISA, asynchronous warpgroup level matrix instructions; layouts of section "matrix descriptor".
#pragma once

#include "sm90/shape.cuh"
#include "sm90/wgmma_shapes.cuh"

namespace jattn::sm90 {

inline constexpr int kStepDepth = 16;      // k of one wgmma on a 16-bit type
inline constexpr int kUnusedLeading = 16;  // bytes; of a swizzled K-major operand the leading distance is not read

// Descriptor of a tile with 128-byte swizzle. The stride, 8 rows, is that of the swizzle's 1024-byte atom.
struct Descriptor {
  static constexpr unsigned kSwizzle128Bytes = 1u << 30;
  static constexpr unsigned kHigh = kSwizzle128Bytes | 8 * kChunkRowBytes / 16;

  unsigned low;  // address and leading distance, in units of 16 bytes

  __device__ __forceinline__ Descriptor operator+(int units) const { return {low + unsigned(units)}; }

  // Adding to it is one instruction: for a tile that lies elsewhere in each round, whose steps begin there.
  __device__ __forceinline__ unsigned long long bits() const {
    return static_cast<unsigned long long>(kHigh) << 32 | low;
  }

  // Out of its halves, so that a sum stays one of 32 bits: for the steps of a tile that stays where it is.
  __device__ __forceinline__ unsigned long long joined() const {
    unsigned long long bits;
    asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "r"(low), "n"(kHigh));
    return bits;
  }
};

// leading_bytes: distance of the next 64 columns, read only if the operand is MN-major.
__device__ __forceinline__ Descriptor descriptor(unsigned address, int leading_bytes) {
  return {unsigned(leading_bytes / 16) << 16 | (address & 0x3FFFF) >> 4};
}

// Keeps the compiler from moving definitions or uses of the registers across this point. It may otherwise copy
// accumulators into the asynchronous pipeline, and ptxas then serialises every product (C7514, C7515).
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin_registers(unsigned (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Has the values computed before what follows, such as the wait for a product. ptxas puts arithmetic that is merely
// written there behind the wait, where nothing hides it; an instruction with an effect, which depends on the values, it
// leaves in place.
template <int kCount>
__device__ __forceinline__ void finish_here(const unsigned (&values)[kCount]) {
  unsigned all = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) all ^= values[i];
  asm volatile("{\n.reg .pred is_zero;\nsetp.eq.u32 is_zero, %0, 0;\n@is_zero nanosleep.u32 0;\n}" ::"r"(all)
               : "memory");
}

template <int kCount>
__device__ __forceinline__ void finish_here(const float (&values)[kCount]) {
  unsigned bits[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits[i] = __float_as_uint(values[i]);
  finish_here(bits);
}

// The other way round: has what uses the values computed behind what came before. They come out of it as they were, by
// way of a vote that no thread takes part in, which ptxas leaves in its place.
template <int kCount>
__device__ __forceinline__ void begin_here(float (&values)[kCount]) {
  unsigned none;
  asm volatile("{\n.reg .pred votes;\nsetp.eq.u32 votes, %1, 0xFFFFFFFF;\nvote.sync.ballot.b32 %0, votes, -1;\n}"
               : "=r"(none)
               : "r"(threadIdx.x)
               : "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = __uint_as_float(__float_as_uint(values[i]) | none);
}

// Orders ordinary register writes before the products that read them.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Words of q that a consumer holds in registers for the first product.
template <Config C>
struct QueryWords {
  static constexpr int kCount = C.q_in_registers ? C.head_dim / 4 : 1;
};

// Starts s = q k^T for the 64 rows at q_address and the first 2 kCount keys: q and k are tiles in shared memory,
// K-major.
template <Config C, int kCount>
__device__ __forceinline__ void start_scores(float (&s)[kCount], Descriptor q_tile, Descriptor k_tile) {
  const unsigned long long k = k_tile.bits();
  constexpr int kStepsPerChunk = kChunkColumns / kStepDepth;
  constexpr int kStepBytes = kStepDepth * 2;
  begin_products();
#pragma unroll
  for (int step = 0; step < C.head_dim / kStepDepth; ++step) {
    const int chunk = step / kStepsPerChunk;
    const int in_chunk = step % kStepsPerChunk * kStepBytes;
    const int q_step = (chunk * C.tile_q * kChunkRowBytes + in_chunk) / 16;
    const int k_step = (chunk * C.tile_kv * kChunkRowBytes + in_chunk) / 16;
    if (step == 0) {
      Wgmma<2 * kCount>::template shared<C.element, false, 0, 0>(s, q_tile.joined(), k);
    } else {
      Wgmma<2 * kCount>::template shared<C.element, true, 0, 0>(s, (q_tile + q_step).joined(), k + k_step);
    }
  }
  commit_products();
  pin_registers(s);
}

// Starts s = q k^T with q as fragments in registers.
template <Config C, int kCount>
__device__ __forceinline__ void start_scores(float (&s)[kCount], unsigned (&q)[QueryWords<C>::kCount],
                                             Descriptor k_tile) {
  const unsigned long long k = k_tile.bits();
  constexpr int kStepsPerChunk = kChunkColumns / kStepDepth;
  constexpr int kStepBytes = kStepDepth * 2;
  pin_registers(q);
  begin_products();
#pragma unroll
  for (int step = 0; step < C.head_dim / kStepDepth; ++step) {
    const int k_step = (step / kStepsPerChunk * C.tile_kv * kChunkRowBytes + step % kStepsPerChunk * kStepBytes) / 16;
    if (step == 0) {
      Wgmma<2 * kCount>::template registers<C.element, false, 0>(s, q + 4 * step, k + k_step);
    } else {
      Wgmma<2 * kCount>::template registers<C.element, true, 0>(s, q + 4 * step, k + k_step);
    }
  }
  commit_products();
  pin_registers(s);
}

// Starts out += p v: p as fragments in registers, v a tile in shared memory, MN-major.
template <Config C>
__device__ __forceinline__ void start_output(float (&out)[C.head_dim_v / 2], unsigned (&p)[C.tile_kv / 4],
                                             Descriptor v_tile) {
  const unsigned long long v = v_tile.bits();
  constexpr int kStep = kStepDepth * kChunkRowBytes / 16;
  pin_registers(out);
  pin_registers(p);
  begin_products();
#pragma unroll
  for (int step = 0; step < C.tile_kv / kStepDepth; ++step) {
    Wgmma<C.head_dim_v>::template registers<C.element, true, 1>(out, p + 4 * step, v + step * kStep);
  }
  commit_products();
  pin_registers(out);
  pin_registers(p);
}

}  // namespace jattn::sm90
