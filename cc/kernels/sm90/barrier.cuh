// Barriers in shared memory, named barriers of the block, register hand-over: one instruction per function. And the
// place in a ring of buffers that such barriers guard.
// Source: PTX ISA, parallel synchronization and communication instructions.
#pragma once

#include "base/shared_memory.cuh"
#include "base/sleeps.cuh"

namespace jattn::sm90 {

using ptx::shared_address;

using Barrier = unsigned long long;  // one mbarrier

// Sleeps now and then, up to two microseconds, in builds that look for missing waits; else nothing.
__device__ __forceinline__ void sleep_at_random() {
  if constexpr (kSleepsAtRandom) {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    unsigned state = (unsigned(clock64()) ^ unsigned(time >> 5) ^ threadIdx.x / 32 * 0x9E3779B9u) * 0x85EBCA6Bu;
    state = __shfl_sync(__activemask(), state ^ state >> 15, __ffs(__activemask()) - 1);  // a warp sleeps as one
    if (state % 4 == 0) __nanosleep(state / 4 % 2048);
  }
}

// An mbarrier by its address.
struct SharedBarrier {
  unsigned address;

  __device__ __forceinline__ SharedBarrier(Barrier* barrier) : address(shared_address(barrier)) {}

  // One of an array. The index is multiplied as a number of 32 bits: NVRTC, other than nvcc, computes pointers to
  // shared memory in 64.
  template <int kCount>
  __device__ __forceinline__ SharedBarrier(Barrier (&barriers)[kCount], int index)
      : address(shared_address(barriers) + unsigned(index) * unsigned(sizeof(Barrier))) {}
};

__device__ __forceinline__ void init_barrier(SharedBarrier barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier.address), "r"(arrivals));
}

// Makes the initialised barriers visible to the copies that will signal them; __syncthreads() must follow.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(SharedBarrier barrier) {
  sleep_at_random();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier.address) : "memory");
}

// As many arrivals at once.
__device__ __forceinline__ void arrive(SharedBarrier barrier, int arrivals) {
  sleep_at_random();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.address), "r"(arrivals) : "memory");
}

// Announces bytes that copies will deliver; the phase ends when they have come and all arrivals are in.
__device__ __forceinline__ void expect_bytes(SharedBarrier barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier.address), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive_and_expect_bytes(SharedBarrier barrier, int bytes) {
  sleep_at_random();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.address), "r"(bytes) : "memory");
}

// Returns when the phase of this parity has ended. A fresh barrier passes parity 1 at once.
__device__ __forceinline__ void wait(SharedBarrier barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n}" ::"r"(barrier.address),
      "r"(parity)
      : "memory");
  sleep_at_random();
}

// The same for a producer warp, whose lanes go on together. Its first lane alone fills the buffers and may run ahead of
// the others; a lane that waited by itself, late, could find that the next phase has ended, too, and wait for ever.
__device__ __forceinline__ void wait_as_warp(SharedBarrier barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "vote.sync.any.pred done, done, 0xffffffff;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n}" ::"r"(barrier.address),
      "r"(parity)
      : "memory");
  sleep_at_random();
}

// Whether the phase of this parity has ended, without waiting for it.
__device__ __forceinline__ bool has_ended(SharedBarrier barrier, unsigned parity) {
  unsigned ended;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(ended)
      : "r"(barrier.address), "r"(parity)
      : "memory");
  return ended != 0;
}

// Barrier of `threads` threads of the block; id 0 is __syncthreads().
__device__ __forceinline__ void sync_named(int id, int threads) {
  sleep_at_random();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts the calling threads without waiting; the others of the `threads` call sync_named().
__device__ __forceinline__ void arrive_named(int id, int threads) {
  sleep_at_random();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders ordinary writes to shared memory before reads of the asynchronous proxy (wgmma, bulk copies). Every writing
// thread calls it, then a barrier, then the reader starts.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders what a load has shown to be in global memory before accesses of the asynchronous proxy by this thread.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Place in a ring of buffers with the parity of its current round.
template <int kStages>
struct RingPosition {
  int index = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

}  // namespace jattn::sm90
