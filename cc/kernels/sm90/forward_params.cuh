// What the sm90 kernels are given. Plain C++20: the host compiler reads it too.
#pragma once

#include "params.cuh"

namespace jattn::sm90 {

// A CUtensorMap: the driver writes it, the tensor memory accelerator reads it from the kernel's parameters.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct ForwardParams {
  TensorMap q;    // axes (D, T, N, B), box (64, tile_q, 1, 1), 128-byte swizzle
  TensorMap k;    // axes (D, S, K, B), box (64, tile_kv, 1, 1), likewise
  TensorMap v;    // axes (Dv, S, K, B), box (64, tile_kv, 1, 1), likewise
  TensorMap out;  // axes (Dv, T, N, B), box (64, 64, 1, 1), likewise
  ProblemParams problem;
  float* lse;             // [B, N, T]
  int32_t* next_item;     // zero at launch; read only if Config::schedule is 2
  int32_t tiles;          // query tiles of one head
  int32_t items;          // B * N * tiles
  int32_t section_heads;  // heads whose tiles are scheduled together, heaviest first (attn/schedule.cuh)
};

}  // namespace jattn::sm90
