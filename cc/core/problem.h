// One attention problem as the host code sees it: extents, options and raw buffers.
//
// Letters: B batch, T query length, S key length, N query heads, K key/value heads, D head dim of q and k,
// Dv head dim of v. All arrays are dense, row-major, in the public layout; strides and lengths count elements.
//
//   s[b,n,t,j] = scale * sum_d q[b,t,n,d] * k[b,j,n*K/N,d]
//   s          = softcap * tanh(s / softcap)                 if softcap > 0
//   s          = s + bias[b,n,t,j]                           if there is a bias
//   s          = s - alibi_slopes[b,n] * |distance|           if there are slopes; distance: see Visibility below
//   s          = f(s, batch_ids[b], head_ids[n], i, j', captures)   if there is a score function f; i and j' are the
//                positions of the pair where there are positions, else t and j
//   s          = -inf where the pair (t, j) is not visible   (see Visibility below)
//   lse[b,n,t] = log(sum_j exp(s) + exp(sinks[b,n]))         natural logarithm; no second term without sinks;
//                                                            -inf for a row that sees no key, with sinks too
//   out[b,t,n] = sum_j z * exp(s - lse) * v[b,j,n*K/N]       0 for a row that sees no key; z: see Dropout below
//
// Visibility: key j is visible from query t iff all of these hold that apply:
//   t < q_lengths[b],  j < kv_lengths[b]
//   -band_left <= distance <= band_right
//       distance = kv_positions[b,j] - q_positions[b,t] if there are positions, else j - (t + offset)
//       offset = 0 (upper left) or kv_length - q_length (lower right; the lengths of this batch entry)
//   q_segments[b,t] == kv_segments[b,j], and that id is not negative (a negative id marks padding)
//   mask[b,n,t,j] != 0
//
// Dropout: z is 0 for a dropped pair and 32768 / (32768 - threshold) for a kept one, else 1. With
// threshold = min(round(32768 * dropout_rate), 32640):
//   words = Philox4x32-10(counter = (0, row group, 0, column group), key = dropout_keys[...])
//   row group = t / 32 * 4 + t % 8 / 2    column group = j / 32 * 4 + j % 8 / 2
//   r = t % 2, h = t / 8 % 2, g = t / 16 % 2 of the query;  e = j % 2, w = j / 8 % 2, f = j / 16 % 2 of the key
//   x(h, w) = words[2 * r + w] >> 8 * (2 * h + e) & 255
//   M(y), of a byte with halves (high, low): that with halves (high ^ low, high)
//   S = x(0, 0) ^ x(0, 1) ^ x(1, 0) ^ x(1, 1)
//   own = x(h, w) ^ (f ? S : 0) ^ (g ? M(S) : 0)    lower = x(0, 1) ^ x(1, 1) ^ M(x(1, 0) ^ x(1, 1))
//   bits of the pair = (own & 127) * 256 + lower;   the pair is dropped if bits < threshold
// so one call serves 64 pairs of 8 queries and 8 keys in a block of 32 x 32. The key is
// dropout_keys[b,n], t and j are indices; with dropout_rows the key is that of row q_segments[b,t] of the table, and t
// and j are q_positions[b,t] and kv_positions[b,j] (packed sequences).
#pragma once

#include <array>
#include <cstdint>
#include <limits>

namespace jattn {

namespace cpu {
struct Program;
}

enum class DType : uint8_t { kF16, kBF16, kF32, kF64 };

inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();
inline constexpr int64_t kMaxCaptures = 16;  // arrays that a score function may read

constexpr int64_t size_bytes(DType dtype) { return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2; }

// An array that broadcasts against (B, N, T, S): an axis of size 1 has stride 0.
struct BroadcastTensor {
  const void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;   // of a bias; a mask holds one byte per element, 0 or 1
  int64_t stride_batch = 0;
  int64_t stride_head = 0;
  int64_t stride_query = 0;
  int64_t stride_key = 0;
};

// A number per batch entry and query head: element b * stride_batch + n * stride_head; stride 0 where all share one.
template <class T>
struct PerHead {
  const T* data = nullptr;  // null: absent
  int64_t stride_batch = 0;
  int64_t stride_head = 0;
};

struct Problem {
  int64_t batch = 0, q_len = 0, kv_len = 0;
  int64_t num_heads = 0, num_kv_heads = 0;
  int64_t head_dim = 0, head_dim_v = 0;
  DType dtype = DType::kF32;  // of q, k, v, out, dout, dq, dk, dv

  double scale = 1.0;    // any sign, also 0
  double softcap = 0.0;  // 0: none
  int64_t band_left = kUnbounded, band_right = kUnbounded;
  bool lower_right = false;

  const void* q = nullptr;                // [B, T, N, D]
  const void* k = nullptr;                // [B, S, K, D]
  const void* v = nullptr;                // [B, S, K, Dv]
  BroadcastTensor bias;                   // added to the scaled (and capped) scores
  BroadcastTensor mask;                   // nonzero: takes part
  const int32_t* q_lengths = nullptr;     // [B], or null: T. Values are clamped to [0, T]
  const int32_t* kv_lengths = nullptr;    // [B], or null: S. Values are clamped to [0, S]
  const int32_t* q_segments = nullptr;    // [B, T], or null. Both or neither
  const int32_t* kv_segments = nullptr;   // [B, S], or null
  const int32_t* q_positions = nullptr;   // [B, T], or null. Both or neither. Within [-2^29, 2^29]: clamped before
  const int32_t* kv_positions = nullptr;  // [B, S], or null
  PerHead<float> sinks;                   // score of a key that has no value
  PerHead<float> alibi_slopes;
  PerHead<uint32_t> dropout_keys;  // two words each; strides count words. With dropout_rows stride_batch is that of the
                                   // table's rows, and a row outside [0, num_dropout_rows) is clamped
  PerHead<float> dropout_rate;     // within [0, 1); stride_head is 0
  bool dropout_rows = false;
  int64_t num_dropout_rows = 0;
  bool score_mod = false;                            // there is a score function; the plan of the call knows it
  const int32_t* batch_ids = nullptr;                // [B]
  const int32_t* head_ids = nullptr;                 // [N]
  std::array<const void*, kMaxCaptures> captures{};  // arrays that it reads, of types and shapes that it knows
  std::array<int64_t, kMaxCaptures> capture_bytes{};
  const cpu::Program* program = nullptr;    // on CPUs: the function (cpu/program.h)
  const cpu::Program* gradients = nullptr;  // on CPUs: what it reads, and its derivatives by that

  int64_t group_size() const { return num_heads / num_kv_heads; }
};

// What the forward pass writes. Every element is written, whatever the masks.
struct ForwardResults {
  void* out = nullptr;  // [B, T, N, Dv], dtype of the problem
  void* lse = nullptr;  // [B, N, T], float (double for a float64 problem)
};

// What the backward pass reads beside the problem, and what it writes. A null result is not wanted.
struct BackwardBuffers {
  const void* out = nullptr;   // [B, T, N, Dv]
  const void* lse = nullptr;   // [B, N, T]
  const void* dout = nullptr;  // [B, T, N, Dv]
  const void* dlse = nullptr;  // [B, N, T], dtype of lse, or null: zero
  void* dq = nullptr;          // [B, T, N, D]
  void* dk = nullptr;          // [B, S, K, D], summed over the query heads of the group
  void* dv = nullptr;          // [B, S, K, Dv], likewise
  void* dbias = nullptr;       // shape, strides and dtype of the bias; summed over its broadcast axes
  void* dslopes = nullptr;     // [B, N, dslopes_parts], dtype of lse: of alibi_slopes, in parts to be added up
  int64_t dslopes_parts = 0;   // tiles of queries on a GPU, 1 on CPUs
  void* dcaptures =
      nullptr;  // [dcaptures_elements], dtype of lse: of captures, one after the other as the program has them
  int64_t dcaptures_elements = 0;
};

}  // namespace jattn
