// Consumer warpgroups for head dims above 128: both work on the same 64 keys. The first computes probabilities and dv,
// the second gradients of the scores and dk, so that each holds one accumulator of up to 64 x 256.
//
// The first hands its weights (probabilities times the slope of the score stage) to the second through two buffers in
// shared memory, thread to thread, in 16 bits (kWeightUnit). Neither warpgroup waits for the other but there, so one
// runs its products while the other works on scores.
//
// Fused, the second gives ds to a third warpgroup, which makes dq of it (backward_gather.cuh).
#pragma once

#include "sm90/backward_consumer.cuh"
#include "sm90/backward_gather.cuh"
#include "sm90/backward_products.cuh"

namespace jattn::sm90 {

template <Config C, bool kFused>
struct SplitConsumer {
  static constexpr KeyLayout kLayout = key_layout(C, kFused);
  static constexpr int kWarpgroups = kBackwardConsumers + (kFused ? 1 : 0);
  static constexpr int kQBytes = tile_bytes(C.tile_q, C.head_dim);
  static constexpr int kDoutBytes = tile_bytes(C.tile_q, C.head_dim_v);
  static constexpr int kExchangeBytes = C.tile_kv * C.tile_q * 2;
  using Scores = float[C.tile_q / 2];
  using Fragments = unsigned[C.tile_q / 4];

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  unsigned tiles;  // shared address of the first tile
  RingPosition<C.stages> ring;
  RingPosition<2> exchange;
  RingPosition<kLayout.bias_slots> bias_ring;
  DsBuffers<C> ds_buffers{control, tiles, {}};

  __device__ __forceinline__ unsigned q_address() const { return tiles + kLayout.q + ring.index * kQBytes; }
  __device__ __forceinline__ unsigned dout_address() const { return tiles + kLayout.dout + ring.index * kDoutBytes; }
  __device__ __forceinline__ unsigned exchange_address() const {
    return tiles + kLayout.exchange + exchange.index * kExchangeBytes + warpgroup_thread() * 16;
  }

  __device__ __forceinline__ void give(const Fragments& weights) {
    wait(&control.exchange_empty[exchange.index], exchange.parity ^ 1);
#pragma unroll
    for (int i = 0; i < C.tile_q / 16; ++i) {
      ptx::store_shared_u32x4(exchange_address() + i * kWarpgroupThreads * 16,
                              make_uint4(weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3]));
    }
    release_by_warp(&control.exchange_full[exchange.index]);
    exchange.advance();
  }

  __device__ __forceinline__ void take(Fragments& weights) {
    wait(&control.exchange_full[exchange.index], exchange.parity);
#pragma unroll
    for (int i = 0; i < C.tile_q / 16; ++i) {
      const uint4 four = ptx::load_shared_u32x4(exchange_address() + i * kWarpgroupThreads * 16);
      weights[4 * i] = four.x;
      weights[4 * i + 1] = four.y;
      weights[4 * i + 2] = four.z;
      weights[4 * i + 3] = four.w;
    }
    release_by_warp(&control.exchange_empty[exchange.index]);
    exchange.advance();
  }

  __device__ __forceinline__ void finish_scores(Scores& s, Fragments& p, int flags) {
    Drops<C, C.tile_q / 2, true> drops;
    const int stage = ring.index, row = warp_row() + lane() / 4, column = lane() % 4 * 2;
    if constexpr (C.dropout) {
      const FragmentOrigin origin{control.item.first + row, control.headers[stage].first + column, row, column};
      if constexpr (C.dropout_rows) {
        drops.decide(control.terms[stage], origin, control.ids[stage], control.own_positions, control.positions[stage],
                     params.problem);
      } else {
        drops.decide(control.terms[stage], origin, nullptr, nullptr, nullptr, params.problem);
      }
    }
    FetchedBias<C, C.tile_q / 2> fetched;
    if constexpr (FetchedBias<C, C.tile_q / 2>::kUsed) {
      fetched.fetch(params.problem, control.terms[stage],
                    {control.item.first + row, control.headers[stage].first + column, row, column});
    }
    wait_products<0>();
    pin_registers(s);
    finish_transposed_scores<C, C.tile_q / 2, kLayout.bias_slots>(s, p, flags, drops, fetched, params, control, stage,
                                                                  tiles + kLayout.bias, bias_ring, row, column);
    if constexpr (C.softcap || C.dropout || has_program_slopes<C>() || kWeightUnit<C> != 1.0f) {
      Fragments weights;
      pack_weights<C>(weights, s);
      give(weights);
    } else {
      give(p);
    }
  }

  __device__ __forceinline__ void visit_for_dv(float (&dv)[C.head_dim_v / 2]) {
    for (bool last = false; !last; ring.advance()) {
      wait(&control.first_full[ring.index], ring.parity);
      const int flags = control.headers[ring.index].flags;
      last = flags & kLastStep;
      Scores s;
      Fragments p;
      start_row_product<C.element, C.tile_kv, C.tile_q, C.head_dim>(s, tiles + kLayout.k, q_address());
      finish_scores(s, p, flags);
      release_by_warp(&control.first_empty[ring.index]);
      wait(&control.second_full[ring.index], ring.parity);
      start_fragment_product<C.element, C.tile_q, C.head_dim_v>(dv, p, dout_address());
      wait_products<0>();
      pin_registers(dv);
      release_by_warp(&control.second_empty[ring.index]);
    }
  }

  __device__ __forceinline__ void visit_for_dk(float (&dk)[C.head_dim / 2]) {
    for (bool last = false; !last; ring.advance()) {
      wait(&control.second_full[ring.index], ring.parity);
      Scores dp;
      start_row_product<C.element, C.tile_kv, C.tile_q, C.head_dim_v>(dp, tiles + kLayout.v, dout_address());
      wait(&control.first_full[ring.index], ring.parity);
      const int flags = control.headers[ring.index].flags;
      last = flags & kLastStep;
      const bool hides = hides_pairs<C>(flags);
      wait_products<0>();
      pin_registers(dp);
      Fragments weights, ds;
      take(weights);
      float factor = 1.0f;
      if constexpr (C.dropout) factor = control.terms[ring.index].factor;
      transposed_gradients<C, C.tile_q / 2>(ds, weights, dp, shared_address(control.delta[ring.index]) + lane() % 4 * 8,
                                            factor);
      clear_hidden<C>(ds, weights, hides);
      release_by_warp(&control.second_empty[ring.index]);
      give_ds(ds, last);
      start_fragment_product<C.element, C.tile_q, C.head_dim>(dk, ds, q_address());
      wait_products<0>();
      pin_registers(dk);
      release_by_warp(&control.first_empty[ring.index]);
    }
  }

  __device__ __forceinline__ void give_ds(const Fragments& ds, bool last) {
    if constexpr (kFused) {
      ds_buffers.wait_empty();
#pragma unroll
      for (int step = 0; step < C.tile_q / 16; ++step) {
        ptx::store_matrix_x4(block_address<C.tile_kv>(ds_buffers.address(), warp_row(), step), ds + 4 * step);
      }
      ds_buffers.give(ring.index, last, warpgroup_thread() == 0);
    }
  }

  // The tile of k is free when all warpgroups are done with their loops, and so is that of v.
  template <int kColumns>
  __device__ __forceinline__ void write(const float (&gradient)[kColumns / 2], float scale, unsigned tile,
                                        int warpgroup, const TensorMap* map, bool wanted) const {
    const BackwardItem item = control.item;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = item.first + warp_row() + lane() / 4 + 8 * r < item.kv_length ? scale : 0.0f;
    }
    sync_consumers<kWarpgroups>();
    store_gradient<C.element, C.tile_kv, kColumns>(gradient, factor, tile, 0, warpgroup, map, wanted, item.first,
                                                   item.head, item.batch);
    if (lane() == 0) wait_stores_read();  // shared memory must outlive the copies that read it
  }

  __device__ __forceinline__ bool wait_keys() const {
    wait(&control.own_full, 0);
    return control.item.runs;
  }

  __device__ __forceinline__ void run_for_dv() {
    const bool runs = wait_keys();
    float dv[C.head_dim_v / 2];
#pragma unroll
    for (int i = 0; i < C.head_dim_v / 2; ++i) dv[i] = 0.0f;
    if (runs) visit_for_dv(dv);
    float factor = 1.0f;
    if constexpr (C.dropout) factor = kept_factor(params.problem, control.item.batch);
    write<C.head_dim_v>(dv, factor, tiles + kLayout.v, 0, &params.dv, params.wants_dv);
  }

  __device__ __forceinline__ void run_for_dk() {
    const bool runs = wait_keys();
    float dk[C.head_dim / 2];
#pragma unroll
    for (int i = 0; i < C.head_dim / 2; ++i) dk[i] = 0.0f;
    if (runs) visit_for_dk(dk);
    write<C.head_dim>(dk, params.problem.scale, tiles + kLayout.k, 1, &params.dk, params.wants_dk);
  }
};

}  // namespace jattn::sm90
