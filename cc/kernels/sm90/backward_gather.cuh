// The warpgroup that makes dq = ds k of what the others give it, and adds it up in memory (has_dq_warpgroup()).
//
// ds passes through two buffers in shared memory, tiles [keys][queries]. Neither this product nor its reductions hold
// up the warpgroups that work on scores, and these do not wait for each other.
#pragma once

#include "sm90/backward_consumer.cuh"
#include "sm90/backward_products.cuh"

namespace jattn::sm90 {

template <Config C>
struct DsBuffers {
  static constexpr KeyLayout kLayout = key_layout(C, true);
  static constexpr int kBytes = C.tile_kv * C.tile_q * 2;

  BackwardControl<C, false>& control;
  unsigned tiles;  // shared address of the first tile
  RingPosition<2> ring;

  __device__ __forceinline__ unsigned address() const { return tiles + kLayout.ds + ring.index * kBytes; }

  // Givers: by every thread, around its stores.
  __device__ __forceinline__ void wait_empty() const { wait(&control.ds_empty[ring.index], ring.parity ^ 1); }
  // stage: of the step; tells: one thread of all.
  __device__ __forceinline__ void give(int stage, bool last, bool tells) {
    if (tells) control.dq_steps[ring.index] = {control.headers[stage].accumulator_row, last};
    fence_async_proxy();
    release_by_warp(&control.ds_full[ring.index]);
    ring.advance();
  }
};

template <Config C>
struct GatherConsumer {
  static constexpr int kPartColumns = dq_part_columns(C);
  static constexpr int kPartFloats = 16 * kPartColumns;
  using Dq = float[C.head_dim / 2];

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  unsigned tiles;

  // A warp has two of the parts of backward_cast.cuh.
  __device__ __forceinline__ void add_dq(const Dq& dq, float* target) const {
    constexpr int kBlocks = kPartColumns / 8, kWarps = kWarpgroupThreads / 32;
    target += warpgroup_thread() / 32 * kPartFloats + (C.bulk_reduce ? 0 : lane() * 4);
    const unsigned staging = tiles + DsBuffers<C>::kLayout.staging + warpgroup_thread() / 32 * 2 * kPartFloats * 4;
    if constexpr (C.bulk_reduce) {
      if (lane() == 0) wait_stores_read();
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < C.head_dim / 8; ++i) {
      if constexpr (C.bulk_reduce) {
        ptx::store_shared_f32x4(staging + i * 512 + lane() * 16, dq + 4 * i);
      } else {
        float* const block = target + i / kBlocks * kWarps * kPartFloats + i % kBlocks * 128;
        ptx::reduce_add(block, dq + 4 * i);
      }
    }
    if constexpr (C.bulk_reduce) {
      fence_async_proxy();
      __syncwarp();
      if (lane() == 0) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          add_floats(target + part * kWarps * kPartFloats, staging + part * kPartFloats * 4, kPartFloats * 4);
        }
        commit_stores();
      }
    }
  }

  __device__ __forceinline__ void run() {
    wait(&control.own_full, 0);
    DsBuffers<C> buffers{control, tiles};
    for (bool last = !control.item.runs; !last; buffers.ring.advance()) {
      wait(&control.ds_full[buffers.ring.index], buffers.ring.parity);
      // Before the product starts: one thread frees the record when that is done.
      const DqStep step = control.dq_steps[buffers.ring.index];
      last = step.last;
      Dq dq;
      start_column_product<C.element, C.tile_kv, C.head_dim>(dq, buffers.address(), tiles + DsBuffers<C>::kLayout.k);
      wait_products<0>();
      pin_registers(dq);
      release_by_warpgroup(&control.ds_empty[buffers.ring.index]);
      add_dq(dq, params.dq_accumulator + step.accumulator_row * C.head_dim);
    }
    sync_consumers<kBackwardConsumers + 1>();              // the others' results take the place of k and v
    if (C.bulk_reduce && lane() == 0) wait_stores_read();  // shared memory must outlive the copies that read it
  }
};

}  // namespace jattn::sm90
