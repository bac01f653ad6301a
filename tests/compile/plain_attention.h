// Attention as cc/core/problem.h defines it, in plain loops over doubles: what the CPU kernel is checked against where
// there is no Python. Short rather than fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/problem.h"

namespace jattn::check {

struct Solution {
  std::vector<double> out, lse, dq, dk, dv, dbias, dslopes;
  std::vector<double> dslopes_sizes;  // sums of the absolute values of what dslopes sums
  std::vector<bool> sees;             // [B, T, N]: whether the query sees any key
  std::vector<bool> is_seen;          // [B, S, K]: whether any query sees the key
};

inline int64_t bounded_length(const int32_t* lengths, int64_t batch, int64_t extent) {
  return lengths == nullptr ? extent : std::clamp<int64_t>(lengths[batch], 0, extent);
}

inline int64_t bias_index(const BroadcastTensor& tensor, int64_t b, int64_t n, int64_t t, int64_t j) {
  return b * tensor.stride_batch + n * tensor.stride_head + t * tensor.stride_query + j * tensor.stride_key;
}

inline int64_t distance(const Problem& p, int64_t b, int64_t t, int64_t j) {
  if (p.q_positions != nullptr) return int64_t{p.kv_positions[b * p.kv_len + j]} - p.q_positions[b * p.q_len + t];
  const int64_t surplus = bounded_length(p.kv_lengths, b, p.kv_len) - bounded_length(p.q_lengths, b, p.q_len);
  return j - t - (p.lower_right ? surplus : 0);
}

inline bool is_visible(const Problem& p, int64_t b, int64_t n, int64_t t, int64_t j) {
  if (t >= bounded_length(p.q_lengths, b, p.q_len) || j >= bounded_length(p.kv_lengths, b, p.kv_len)) return false;
  const int64_t d = distance(p, b, t, j);
  if (d > p.band_right || (p.band_left != kUnbounded && d < -p.band_left)) return false;
  if (p.q_segments != nullptr) {
    const int32_t segment = p.q_segments[b * p.q_len + t];
    if (segment < 0 || segment != p.kv_segments[b * p.kv_len + j]) return false;
  }
  return p.mask.data == nullptr || static_cast<const uint8_t*>(p.mask.data)[bias_index(p.mask, b, n, t, j)] != 0;
}

// The fifteen bits that decide about a pair.
inline uint32_t dropout_bits(const uint32_t* key, uint32_t t, uint32_t j) {
  uint32_t counter[4] = {0, t / 32 * 4 + t % 8 / 2, 0, j / 32 * 4 + j % 8 / 2};
  for (uint32_t round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{counter[0]} * 0xD2511F53u, third = uint64_t{counter[2]} * 0xCD9E8D57u;
    const uint32_t key_low = key[0] + round * 0x9E3779B9u, key_high = key[1] + round * 0xBB67AE85u;
    const uint32_t next[4] = {static_cast<uint32_t>(third >> 32) ^ counter[1] ^ key_low, static_cast<uint32_t>(third),
                              static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key_high, static_cast<uint32_t>(first)};
    std::copy_n(next, 4, counter);
  }
  const auto word_byte = [&](uint32_t h, uint32_t w) {
    return counter[2 * (t % 2) + w] >> (8 * (2 * h + j % 2)) & 255u;
  };
  const auto times_generator = [](uint32_t y) { return (((y >> 4) ^ y) & 15u) << 4 | y >> 4; };
  const uint32_t sum = word_byte(0, 0) ^ word_byte(0, 1) ^ word_byte(1, 0) ^ word_byte(1, 1);
  uint32_t own = word_byte(t / 8 % 2, j / 8 % 2);
  if (j / 16 % 2 != 0) own ^= sum;
  if (t / 16 % 2 != 0) own ^= times_generator(sum);
  const uint32_t lower = word_byte(0, 1) ^ word_byte(1, 1) ^ times_generator(word_byte(1, 0) ^ word_byte(1, 1));
  return (own & 127u) * 256 + lower;
}

// What a pair's weight is multiplied by. Of dropout without rows of its own for packed sequences.
inline double kept_factor(const Problem& p, int64_t b, int64_t n, int64_t t, int64_t j) {
  if (p.dropout_keys.data == nullptr) return 1;
  const double rate = p.dropout_rate.data[b * p.dropout_rate.stride_batch];
  const double threshold = std::min(std::round(32768 * rate), 32640.0);
  const uint32_t* key = p.dropout_keys.data + b * p.dropout_keys.stride_batch + n * p.dropout_keys.stride_head;
  const uint32_t bits = dropout_bits(key, static_cast<uint32_t>(t), static_cast<uint32_t>(j));
  return bits < threshold ? 0 : 1 / (1 - threshold / 32768);
}

inline double dot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

inline void add(double factor, const double* from, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

// One query of one head, forward and backward.
class Row {
 public:
  Row(const Problem& problem, int64_t b, int64_t n, int64_t t)
      : p_(problem), b_(b), n_(n), t_(t), query_((b * p_.q_len + t) * p_.num_heads + n) {}

  void solve(const double* dout, const double* dlse, Solution& solution) const {
    const int64_t D = p_.head_dim, Dv = p_.head_dim_v, lse_index = (b_ * p_.num_heads + n_) * p_.q_len + t_;
    const double* q = static_cast<const double*>(p_.q) + query_ * D;
    const auto *keys = static_cast<const double*>(p_.k), *values = static_cast<const double*>(p_.v);
    struct Pair {
      int64_t index, key;
      double score, slope;  // of the score by the product, without the scale
    };
    std::vector<Pair> pairs;
    double largest = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j < p_.kv_len; ++j) {
      if (!is_visible(p_, b_, n_, t_, j)) continue;
      const int64_t key = (b_ * p_.kv_len + j) * p_.num_kv_heads + n_ / p_.group_size();
      Pair pair{j, key, p_.scale * dot(q, keys + key * D, D), 1};
      if (p_.softcap > 0) {
        const double tangent = std::tanh(pair.score / p_.softcap);
        pair.score = p_.softcap * tangent, pair.slope = 1 - tangent * tangent;
      }
      if (p_.bias.data != nullptr) {
        pair.score += static_cast<const double*>(p_.bias.data)[bias_index(p_.bias, b_, n_, t_, j)];
      }
      if (p_.alibi_slopes.data != nullptr) {
        pair.score -= of_head(p_.alibi_slopes) * static_cast<double>(std::abs(distance(p_, b_, t_, j)));
      }
      largest = std::max(largest, pair.score);
      pairs.push_back(pair);
      solution.is_seen[key] = true;
    }
    solution.lse[lse_index] = largest;
    if (pairs.empty()) return;
    solution.sees[query_] = true;
    double sum = p_.sinks.data != nullptr ? std::exp(of_head(p_.sinks) - largest) : 0;
    for (const Pair& pair : pairs) sum += std::exp(pair.score - largest);
    const double lse = largest + std::log(sum);
    solution.lse[lse_index] = lse;

    double* out = solution.out.data() + query_ * Dv;
    const auto weight = [&](const Pair& pair) { return std::exp(pair.score - lse); };
    const auto kept = [&](const Pair& pair) { return kept_factor(p_, b_, n_, t_, pair.index); };
    for (const Pair& pair : pairs) add(kept(pair) * weight(pair), values + pair.key * Dv, Dv, out);
    const double* cotangent = dout + query_ * Dv;
    const double delta = dot(cotangent, out, Dv) - dlse[lse_index];
    for (const Pair& pair : pairs) {
      add(kept(pair) * weight(pair), cotangent, Dv, solution.dv.data() + pair.key * Dv);
      const double dp = kept(pair) * dot(cotangent, values + pair.key * Dv, Dv);
      const double ds = weight(pair) * (dp - delta), dproduct = p_.scale * pair.slope * ds;
      add(dproduct, keys + pair.key * D, D, solution.dq.data() + query_ * D);
      add(dproduct, q, D, solution.dk.data() + pair.key * D);
      if (!solution.dbias.empty()) solution.dbias[bias_index(p_.bias, b_, n_, t_, pair.index)] += ds;
      if (!solution.dslopes.empty()) {
        const int64_t away = std::abs(distance(p_, b_, t_, pair.index));
        solution.dslopes[b_ * p_.num_heads + n_] -= ds * static_cast<double>(away);
        solution.dslopes_sizes[b_ * p_.num_heads + n_] += std::abs(ds) * static_cast<double>(away);
      }
    }
  }

 private:
  double of_head(const PerHead<float>& numbers) const {
    return numbers.data[b_ * numbers.stride_batch + n_ * numbers.stride_head];
  }

  const Problem& p_;
  int64_t b_, n_, t_, query_;
};

// All arrays of the problem hold doubles; `bias_size` elements of a bias, or 0.
inline Solution solve(const Problem& p, const double* dout, const double* dlse, int64_t bias_size) {
  const int64_t queries = p.batch * p.q_len * p.num_heads, keys = p.batch * p.kv_len * p.num_kv_heads;
  const auto zeros = [](int64_t count) { return std::vector<double>(static_cast<size_t>(count)); };
  const int64_t slopes = p.alibi_slopes.data != nullptr ? p.batch * p.num_heads : 0;
  Solution solution{zeros(queries * p.head_dim_v),
                    zeros(queries),
                    zeros(queries * p.head_dim),
                    zeros(keys * p.head_dim),
                    zeros(keys * p.head_dim_v),
                    zeros(bias_size),
                    zeros(slopes),
                    zeros(slopes),
                    std::vector<bool>(queries),
                    std::vector<bool>(keys)};
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t n = 0; n < p.num_heads; ++n) {
      for (int64_t t = 0; t < p.q_len; ++t) Row(p, b, n, t).solve(dout, dlse, solution);
    }
  }
  return solution;
}

}  // namespace jattn::check
