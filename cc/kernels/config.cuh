// Every compile-time choice of a CUDA kernel as one struct. Plain C++20: the host, nvcc and NVRTC all read it.
//
// A kernel variant is a family name plus one Config; its text form ("family=... name=value ...") is the kernel key that
// travels in the plan of a call. cc/core/kernel_key.cc turns the text into this struct and back.
#pragma once

#include "base/types.cuh"

namespace jattn {

enum class Element : unsigned char { kF16, kBF16, kF32 };
JATTN_HOST_DEVICE constexpr int element_bytes(Element element) { return element == Element::kF32 ? 4 : 2; }

struct Config {
  Element element = Element::kBF16;       // of q, k, v, out and their gradients
  Element bias_element = Element::kBF16;  // of bias and dbias; read only if bias
  int head_dim = 128;                     // width of the q and k tiles: the head dim rounded up
  int head_dim_v = 128;                   // width of the v tile, likewise
  int tile_q = 128;
  int tile_kv = 64;
  int num_warps = 4;
  int stages = 2;
  bool band = false;     // causal and windows: limits are runtime numbers
  bool lengths = false;  // query and key lengths per batch entry
  bool segments = false;
  bool mask = false;  // dense bool mask, packed by passes/mask_tiles.cuh
  bool bias = false;  // dense bias, read by broadcast strides
  bool softcap = false;
  bool large_cap = false;  // tanh of the softcap exact near zero, too: an error of 2^-21 of the cap would be seen
  bool positions = false;  // bands and slopes measure distances between positions[b, row], not between indices
  bool sinks = false;
  bool alibi = false;
  bool dropout = false;
  bool dropout_rows = false;  // the key of a row is looked up by its segment id, and positions are its coordinates
  bool program = false;       // scores pass through the unit's ScoreProgram (attn/score_program.cuh)
  bool narrow_rows = false;   // rows of q, k, v are no multiple of 16 bytes: copies of 4 or 2 bytes
  // Tiles of the bias are copied to shared memory: contiguous keys, rows on 16-byte boundaries.
  bool staged_bias = false;
  bool row_bias = false;  // the bias is the same for all queries: a row of it travels beside each tile of keys
  // Backward: p and ds pass through shared memory, so that warps share products along both axes.
  bool shared_scores = false;
  int grad_slices = 1;  // parts of the columns of dq, dk, dv, each computed by a block of its own
  int tf32_chain = 1;   // float32: steps whose products the tensor unit adds up before a rounded addition

  // Read by kernels/sm90 only.
  int schedule = 0;              // 0: one block per work item; 2: resident blocks that take items by a counter
  bool in_series = false;        // forward: a warpgroup has one product in flight, not two
  bool scale_first = false;      // scale scores before the row maximum: for scale <= 0 (softcap implies it)
  bool q_in_registers = false;   // q as a register operand of the first product
  bool integer_max = false;      // row maximum by three-input integer instructions
  int key_register_steps = 0;    // backward: steps of 16 columns of the scores' product that take k from registers
  bool bulk_reduce = false;      // dq is added up by bulk reductions from shared memory, not by threads from registers
  bool partial_results = false;  // a block sees a part of an item's keys; sm90/forward_combine.cuh adds the parts up
  int key_splits = 1;            // forward_combine: the parts
  bool stores_ds = false;        // backward: gradients of the scores leave for memory in the place of a staged bias
  bool sums_bias = false;  // backward: sums of the gradients of scores over the queries, for that of a bias of the keys
  bool take_turns = false;  // consumer warpgroups start their products one after the other (sm90/turns.cuh)
  int dq_order = 0;  // backward: dq is added up 0: to zeros, in any order; by warps of their own (backward_sender.cuh)
                     // 1: in any order, the first block stores; 2: in the order of the key tiles, likewise
  // Forward: softcap by a polynomial, in tiles without masks whose scores are small enough for it.
  bool cap_series = false;
  bool documents = false;     // tiles begin with the runs of segment ids where each id has one (document_tiles.cuh)
  bool drops_beside = false;  // warps beside the producer call Philox for dropout (drops.cuh, backward_drops.cuh)
  // Forward: rows of a tile are queries of all heads of a group, so that few queries read the keys once
  // (sm90/rows.cuh).
  bool packed_heads = false;
};

// What a band is measured by. Index bands cut a range out of the tiles; position bands filter tiles one by one.
JATTN_HOST_DEVICE constexpr bool has_index_band(const Config& config) { return config.band && !config.positions; }
JATTN_HOST_DEVICE constexpr bool has_position_band(const Config& config) { return config.band && config.positions; }

}  // namespace jattn
