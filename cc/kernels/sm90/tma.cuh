// Tile copies between global and shared memory by the tensor memory accelerator.
// Source: PTX ISA, data movement: cp.async.bulk.tensor.
#pragma once

#include "sm90/barrier.cuh"
#include "sm90/forward_params.cuh"
#include "sm90/shape.cuh"

namespace jattn::sm90 {

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies one box of an array with axes (columns, rows, heads, batch) and signals its bytes to the barrier.
__device__ __forceinline__ void load_box(unsigned destination, const TensorMap* map, Barrier* barrier, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(destination),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Brings a box into L2.
__device__ __forceinline__ void prefetch_box(const TensorMap* map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(column),
               "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Copies a tile of kRows rows and kColumns columns, one box per chunk of 64 columns. What lies outside the array
// arrives as 0 and counts towards the announced bytes.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_tile(unsigned destination, const TensorMap* map, Barrier* barrier, int row,
                                          int head, int batch) {
#pragma unroll
  for (int chunk = 0; chunk < num_chunks(kColumns); ++chunk) {
    load_box(destination + chunk * kRows * kChunkRowBytes, map, barrier, chunk * kChunkColumns, row, head, batch);
  }
}

// Writes one box; elements outside the array are dropped.
__device__ __forceinline__ void store_box(const TensorMap* map, unsigned source, int column, int row, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Writes one box, or adds it to what is there, in the type of the array. By predicates: a branch has more registers.
__device__ __forceinline__ void put_box(bool adds, const TensorMap* map, unsigned source, int column, int row, int head,
                                        int batch) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %6, 0;\n"
      "@adds cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "@!adds cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n}" ::"l"(map),
      "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(unsigned(adds))
      : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Copies contiguous bytes, a multiple of 16 at addresses that are, and signals them to the barrier.
__device__ __forceinline__ void load_bytes(unsigned destination, const void* source, int bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Adds contiguous floats in shared memory to floats in global memory; commit_stores() and wait_stores_read() as for
// stores.
__device__ __forceinline__ void add_floats(float* destination, unsigned source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

// Copies contiguous floats, likewise.
__device__ __forceinline__ void store_floats(float* destination, unsigned source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

// Returns when the committed stores of this thread, but for the last kPending, have read their shared memory.
template <int kPending = 0>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Returns when all committed stores of this thread have been made.
__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace jattn::sm90
