// What the sm90 forward kernel and its helper kernels are given. Plain C++20: the host compiler reads it too.
#pragma once

namespace jattn::sm90 {

// A CUtensorMap: the driver writes it, the tensor memory accelerator reads it from the kernel's parameters.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// What is known of the segment ids of one tile of rows (queries or keys), by passes/segment_blocks.
struct SegmentBlock {
  int min_id;       // of the ids that are not negative; INT_MAX if there are none
  int max_id;       // likewise; -1 if there are none
  int has_padding;  // 1 if some id is negative
  int unused;
};

struct ForwardParams {
  TensorMap q;    // axes (head_dim, q_len, num_heads, batch), box (64, tile_q, 1, 1), 128-byte swizzle
  TensorMap k;    // axes (head_dim, kv_len, num_kv_heads, batch), box (64, tile_kv, 1, 1), likewise
  TensorMap v;    // axes (head_dim_v, kv_len, num_kv_heads, batch), box (64, tile_kv, 1, 1), likewise
  TensorMap out;  // axes (head_dim_v, q_len, num_heads, batch), box (64, 64, 1, 1), likewise

  float* lse;                      // [batch, num_heads, q_len], natural logarithm
  const int* q_lengths;            // [batch], or null: q_len
  const int* kv_lengths;           // [batch], or null: kv_len
  const int* q_segments;           // [batch, q_len]; read only if Config.segments
  const int* kv_segments;          // [batch, kv_len]; likewise
  const SegmentBlock* q_blocks;    // [batch, num_q_tiles]; likewise
  const SegmentBlock* kv_blocks;   // [batch, num_kv_tiles]; likewise
  int* next_item;                  // zero at launch; read only if Config.schedule is 2

  float scale;    // of q.k
  float softcap;  // read only if Config.softcap
  int batch, q_len, kv_len;
  int num_heads, group_size;  // group_size: query heads per key/value head
  int num_q_tiles, num_kv_tiles;
  int num_items;      // batch * num_heads * num_q_tiles
  int section_heads;  // heads whose query tiles are handed out together, last tile first
  int band_left, band_right;  // clamped to +-(q_len + kv_len): beyond that they change nothing
  int lower_right;            // 1: the band's diagonal ends in the lower right corner
};

}  // namespace jattn::sm90
