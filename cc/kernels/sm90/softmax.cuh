// Online softmax over the score fragments of one warpgroup, in base 2. The row maximum follows late, and rests once
// rows are settled.
//
// Fragment of m64nN, per thread: rows lane / 4 and lane / 4 + 8 of its warp's 16 rows (index 0 and 1 below); value
// 4 i + 2 r + c is row r, column 8 i + 2 (lane % 4) + c. A row lives in the four lanes of a quad.
#pragma once

#include "base/numeric.cuh"
#include "sm90/forward_params.cuh"

namespace jattn::sm90 {

// A score fragment is, value for value, the register operand A of the next product.
template <Element kElement, int kCount>
__device__ __forceinline__ void pack_fragment(unsigned (&p)[kCount / 2], const float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) p[i] = ElementTraits<kElement>::pack(s[2 * i], s[2 * i + 1]);
}

// Raises `largest` to the largest value of each of the two rows, over this thread's columns.
template <int kCount>
__device__ __forceinline__ void raise_row_max(float (&largest)[2], const float (&s)[kCount]) {
  // Two chains a row: one chain of kCount / 2 dependent instructions is slower than the pipe.
  float second[2] = {s[1], s[3]};
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], s[4 * i + 2 * r]);
      second[r] = fmaxf(second[r], s[4 * i + 2 * r + 1]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], second[r]);
}

// The same by the three-input integer maximum, half the instructions. Bits of floats order as signed integers unless
// both are negative; so the integer result is the maximum if it is not negative, and need not be known if `largest`
// is not.
//
// kOftenNegative: scores with terms may stay negative for whole rows. Of values that are all negative the largest float
// is the least unsigned number.
template <bool kOftenNegative, int kCount>
__device__ __forceinline__ void raise_row_max_integer(float (&largest)[2], const float (&s)[kCount],
                                                      const int (&most)[2]) {
  const bool unknown = (most[0] < 0 && largest[0] < 0.0f) || (most[1] < 0 && largest[1] < 0.0f);
  if (__any_sync(~0u, unknown)) {
    if constexpr (kOftenNegative) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned least = __float_as_uint(s[2 * r]);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
          least = __vimin3_u32(least, __float_as_uint(s[4 * i + 2 * r]), __float_as_uint(s[4 * i + 2 * r + 1]));
        }
        largest[r] = fmaxf(largest[r], most[r] < 0 ? __uint_as_float(least) : __int_as_float(most[r]));
      }
    } else {
      raise_row_max(largest, s);
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], most[r] < 0 ? largest[r] : __int_as_float(most[r]));
  }
}

// The greatest bits of each row as integers.
template <int kCount>
__device__ __forceinline__ void greatest_bits(int (&most)[2], const float (&s)[kCount]) {
  int bits[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = half * (kCount / 2);
      bits[r][half] = __float_as_int(s[first + 2 * r]);
#pragma unroll
      for (int i = 0; i < kCount / 8; ++i) {
        const int at = first + 4 * i + 2 * r;
        bits[r][half] = __vimax3_s32(bits[r][half], __float_as_int(s[at]), __float_as_int(s[at + 1]));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) most[r] = max(bits[r][0], bits[r][1]);
}

// Units of the scores that the softmax is given, and by what the exponent multiplies them.
enum class ScoreUnits {
  kRaw,      // products: by a positive scale_log2
  kLog2,     // by nothing
  kNatural,  // by log2(e); a score may be as large as any float (a bias)
};

// row_max is the maximum that probabilities refer to, not always the true one. The results out / row_sum and lse do not
// depend on it but for rounding: p = exp2(score - row_max) has the same relative error whatever its size. So no maximum
// is computed once the rows of a warp are settled: each has seen a key, and its row_max is of ordinary size. Until then
// row_max follows when a row of the warp has outgrown it by kLazyLog2, and p stays below 2^8 (source of the lazy
// maximum: FlashAttention-4). A settled row whose later scores exceed row_max by far ends with a sum or an output that
// is too large for its type; the sum tells (Consumer::list_if_lost), and the item is computed again with rows that do
// not settle. Measured on H200: +8 % at head_dim 128, +10 to 13 % at 64.
//
// A tile is summed up by itself and then added (kSumsTiles): equal probabilities, each added to the sum of thousands
// before it, would all be rounded the same way, and lse of 16384 keys be wrong by up to a thousand roundings.
//
// kNearZeroLog2: if positive, rows settle at zero where their maxima are no farther from it. Then exponents have no
// shift, and a term of the score can be their addend (merge). For float16 no farther below than 1: small
// probabilities are rounded to multiples of 2^-24, which must be little of the greatest.
template <ScoreUnits kUnits, bool kIntegerMax, bool kSumsTiles, int kNearZeroLog2 = 0>
struct OnlineSoftmax {
  static constexpr bool kScaled = kUnits == ScoreUnits::kLog2;
  static constexpr bool kHasTerms = kUnits == ScoreUnits::kNatural;
  static constexpr float kLazyLog2 = 8.0f;
  static constexpr float kLazyForGoodLog2 = 9.0f;  // of rows that may not settle
  static constexpr float kLazyAtZero = 0x1p126f;
  static constexpr float kLeastSettledLog2 = -64.0f;
  static constexpr float kFarthestBelowLog2 = kNearZeroLog2 > 16 ? kNearZeroLog2 : 1;
  static constexpr float kLargestExactShift = 16777216.0f;  // 2^24: from here on neighbouring floats are 2 apart

  float scale_log2;
  float lazy;  // kLazyLog2 or kLazyForGoodLog2; below 0 once a shift is inexact; kLazyAtZero or infinite once settled
  float row_max[2];  // -inf: no visible key yet
  float row_sum[2];  // over this thread's columns
  float alpha[2];    // factor of the output so far; 1 unless rescale
  bool rescale;
  // Of the exponents of both rows. As one number of 64 bits ptxas tends to give them a register of even and one of odd
  // number, and then keeps them in the operand cache (.reuse) while exponents of both rows take turns; each register
  // read less leaves more of the register file to the products. Measured on H200, head_dim 64, full: two even registers
  // take 4 to 6 % more time.
  uint64_t shifts;

  __device__ __forceinline__ float unit() const {
    return kScaled ? 1.0f : kUnits == ScoreUnits::kNatural ? kLog2E : scale_log2;
  }

  // A row that must take no part (beyond q_length, or of no head) starts at +inf: it never asks for rescaling and keeps
  // no other row from settling. In units of kLog2 every p of it is 0, if the score is finite. In the other units
  // set_shift() makes the shift 0, as it does from kLargestExactShift on, and p = exp2(score) may be as large as
  // infinity, or NaN. No result depends on these numbers: sum_beyond(), update_unproven() and Consumer::list_if_lost()
  // select by row_max; OutputWriter::finish_rows() gives rows beyond q_length the factor 0, by which those who write
  // the output select; rows of no head are not written.
  __device__ __forceinline__ void reset(bool first_takes_part, bool second_takes_part, bool may_settle) {
    row_max[0] = first_takes_part ? -infinity() : infinity();
    row_max[1] = second_takes_part ? -infinity() : infinity();
    row_sum[0] = row_sum[1] = 0.0f;
    rescale = false;
    lazy = may_settle ? kLazyLog2 : kLazyForGoodLog2;
  }

  // Whether a row takes no part.
  __device__ __forceinline__ bool is_absent(int r) const { return row_max[r] == infinity(); }

  // Settles rows whose scores are bounded: the sums then refer to 0.
  __device__ __forceinline__ void settle_at_zero() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = fmaxf(row_max[r], 0.0f);
    shifts = as_pair(row_max);
    lazy = infinity();
  }

  // Moves row_max to the largest of the row, if a row of the warp has outgrown it; returns whether.
  __device__ __forceinline__ bool follow(float (&largest)[2]) {
    const float unit = this->unit();
    const bool outgrown = (largest[0] - row_max[0]) * unit > lazy || (largest[1] - row_max[1]) * unit > lazy;
    rescale = __any_sync(~0u, outgrown);
    if (rescale) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        alpha[r] = largest[r] == row_max[r] ? 1.0f : exp2_fast((row_max[r] - largest[r]) * unit);
        row_max[r] = largest[r];
        row_sum[r] *= alpha[r];
      }
    }
    return rescale;
  }

  // at_zero: with row_max 0 in all rows that take part.
  __device__ __forceinline__ bool settled() const {
    return kNearZeroLog2 > 0 ? lazy >= kLazyAtZero : lazy == infinity();
  }
  __device__ __forceinline__ bool at_zero() const { return lazy == kLazyAtZero; }

  // 0 for a row of -inf, whose p must be exp2(-inf) and not exp2(-inf + inf), and after shift_ahead().
  __device__ __forceinline__ void set_shift() {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift[r] = row_max[r] * unit();
      const bool plain = kScaled ? row_max[r] != -infinity() : fabsf(shift[r]) < kLargestExactShift;
      shift[r] = plain ? shift[r] : 0.0f;
    }
    shifts = as_pair(shift);
  }

  // With a row_max far below zero rows do not settle: it may be that of keys that a bias hides, with others to come.
  __device__ __forceinline__ void settle() {
    bool open = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float shift = row_max[r] * unit();
      const bool ordinary = shift > kLeastSettledLog2 && (kScaled || shift < kLargestExactShift);
      open = open || !(ordinary || is_absent(r));
    }
    if (!__any_sync(~0u, open)) lazy = infinity();
  }

  __device__ __forceinline__ bool are_near_zero(const float (&largest)[2]) const {
    bool far = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool near = kFarthestBelowLog2 == kNearZeroLog2
                            ? fabsf(largest[r]) * unit() <= kNearZeroLog2
                            : largest[r] * unit() <= kNearZeroLog2 && largest[r] * unit() >= -kFarthestBelowLog2;
      far = far || !(near || is_absent(r));
    }
    return !__any_sync(~0u, far);
  }

  // Settles the rows of a warp at zero, whatever they referred to before.
  __device__ __forceinline__ void move_to_zero() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (is_absent(r)) {
        alpha[r] = 1.0f;
        continue;
      }
      alpha[r] = exp2_fast(row_max[r] * unit());
      row_sum[r] *= alpha[r];
      row_max[r] = 0.0f;
    }
    rescale = true;
    lazy = kLazyAtZero;
  }

  // Calls add(sums), which adds the probabilities of a tile to sums[row].
  template <class Add>
  __device__ __forceinline__ void sum_tile(const Add& add) {
    if constexpr (kSumsTiles) {
      float sum[2] = {-0.0f, -0.0f};  // the compiler leaves out an addition to -0
      add(sum);
#pragma unroll
      for (int r = 0; r < 2; ++r) row_sum[r] += sum[r];
    } else {
      add(row_sum);
    }
  }

  // From a raw product to a probability, of a row settled at zero; term: what is added to the score, in base 2.
  __device__ __forceinline__ void merge(float& s, float term, float& sum) const {
    s = exp2_fast(fmaf(s, scale_log2, term));
    sum += s;
  }

  template <class Series, int kCount>
  __device__ __forceinline__ void sum_capped(float (&s)[kCount], const Series& series, float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_fast(fmaf(s[i], capped_over_product(series, s[i]), -row_max[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }

  // The same as update(), of settled rows, from raw products of magnitude below series.limit, all of them visible: the
  // polynomial ends in the multiply-add of the exponent.
  template <class Series, int kCount>
  __device__ __forceinline__ void update_capped(float (&s)[kCount], const Series& series) {
    static_assert(kScaled);
    rescale = false;
    sum_tile([&](float (&sum)[2]) { sum_capped(s, series, sum); });
  }

  // update_capped() where nothing is known of the scores, of rows settled at zero. Returns whether what this thread has
  // of the tile proves that the series holds for them (cap_series.cuh); if not, nothing has been added to row_sum.
  template <int kCount>
  __device__ __forceinline__ bool update_unproven(float (&s)[kCount], const SquaredCapSeries& series,
                                                  float trusted_sum) {
    static_assert(kScaled);
    rescale = false;
    float sum[2] = {-0.0f, -0.0f};
    sum_capped(s, series, sum);
    bool proven = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      proven = proven && ((sum[r] >= kLeastTrustedSum && sum[r] < trusted_sum) || is_absent(r));
    }
    if (!__all_sync(~0u, proven)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] += sum[r];
    return true;
  }

  // Turns scores into probabilities relative to row_max; sets rescale and alpha for the output accumulated before.
  // has_room: whether rows may settle by this tile. kEarly: if not negative, pause(sum, shift) is called behind
  // that many exponentials of a thread, with their sums, and before the others, which take the shift that it leaves.
  template <int kEarly, int kCount, class Pause>
  __device__ __forceinline__ void update(float (&s)[kCount], bool has_room, const Pause& pause) {
    static_assert(kEarly < 0 || (kEarly % 4 == 0 && kEarly < kCount));
    const float unit = this->unit();
    if (settled()) {
      rescale = false;
    } else {
      float largest[2] = {row_max[0], row_max[1]};
      if constexpr (kIntegerMax) {
        int most[2];
        greatest_bits(most, s);
        raise_row_max_integer<kHasTerms>(largest, s, most);
      } else {
        raise_row_max(largest, s);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = quad_max(largest[r]);
      if (kNearZeroLog2 > 0 && has_room && lazy == kLazyLog2 && are_near_zero(largest)) {
        move_to_zero();
      } else {
        if (follow(largest)) {
          if constexpr (!kScaled) shift_ahead(s);
        }
        if (has_room && lazy == kLazyLog2) settle();
      }
      set_shift();
    }
    float shift[2];
    read_pair(shift, shifts);
    sum_tile([&](float (&sum)[2]) {
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        if (4 * i == kEarly) pause(sum, shift);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[4 * i + 2 * r + c];
            x = exp2_fast(kScaled ? x - shift[r] : fmaf(x, unit, -shift[r]));
            sum[r] += x;
          }
        }
      }
    });
  }

  // A fused multiply-add sees the rounding error of the shift, which can exceed 1 from 2^24 on, while equal scores must
  // give p = 1. Rows with such a shift are shifted here, their products rounded like the shift, and so is every later
  // tile of the warp: a negative `lazy` brings it here.
  template <int kCount>
  __device__ __forceinline__ void shift_ahead(float (&s)[kCount]) {
    float shift[2];
    bool inexact[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift[r] = __fmul_rn(row_max[r], unit());
      const float bounded = kHasTerms ? row_max[r] : shift[r];
      inexact[r] = fabsf(shift[r]) >= kLargestExactShift && fabsf(bounded) < infinity();
    }
    if (!__any_sync(~0u, inexact[0] || inexact[1])) {
      // Rows whose first tiles hold the least float of a bias leave it behind with the first other score.
      if constexpr (kHasTerms) lazy = fabsf(lazy);
      return;
    }
    lazy = -fabsf(lazy);
    if constexpr (kHasTerms) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (inexact[i / 2 % 2]) s[i] -= row_max[i / 2 % 2];
      }
      return;
    }
    const float back = 1.0f / scale_log2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = i / 2 % 2;
      if (inexact[r]) s[i] = (__fmul_rn(s[i], scale_log2) - shift[r]) * back;
    }
  }

  template <int kCount>
  __device__ __forceinline__ void rescale_output(float (&out)[kCount]) const {
    if (!rescale) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] *= alpha[i / 2 % 2];
  }

  // Whether a settled row that takes part has a sum over this thread's columns beyond `limit`.
  __device__ __forceinline__ bool sum_beyond(float limit) const {
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) beyond = beyond || (!is_absent(r) && row_sum[r] > limit);
    return settled() && beyond;
  }

  // Completes the row sums over the quad. After it a sum of 0 means: no visible key. An infinite sum is that of a score
  // of +inf (items whose sums overflow are computed again), and becomes NaN, as the row must.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(row_sum[r]);
      row_sum[r] = fmaf(sum, 0.0f, sum);
    }
  }

  // What row_max times it is in natural units.
  __device__ __forceinline__ float natural_unit() const {
    return kUnits == ScoreUnits::kNatural ? 1.0f : unit() * kLn2;
  }

  // The maximum that the sum refers to, in natural units.
  __device__ __forceinline__ float natural_max(int r) const {
    return kUnits == ScoreUnits::kNatural ? row_max[r] : row_max[r] * unit() * kLn2;
  }

  __device__ __forceinline__ float lse(int r) const {
    if constexpr (kHasTerms) {
      return row_sum[r] == 0.0f ? -infinity() : bounded_lse(natural_max(r) + log2_fast(row_sum[r]) * kLn2);
    } else {
      return row_sum[r] == 0.0f ? -infinity() : (row_max[r] * unit() + log2_fast(row_sum[r])) * kLn2;
    }
  }

  // A backward pass multiplies lse by log2(e), which must not turn a finite one into infinity.
  __device__ __forceinline__ static float bounded_lse(float lse) {
    return fabsf(lse) < infinity() ? fminf(fmaxf(lse, -kLargestNatural), kLargestNatural) : lse;
  }

  // The row with one more key of score `sink` (natural units, may be infinite) that has no value: lse, and what the
  // output is multiplied by. For rows that see keys.
  struct RowResult {
    float factor, lse;
  };
  __device__ __forceinline__ RowResult with_sink(int r, float sink) const {
    const float keys = natural_max(r);
    const float greatest = fmaxf(keys, sink);
    const float keys_part = keys == greatest ? 1.0f : exp2_fast((keys - greatest) * kLog2E);
    const float sink_part = sink == greatest ? 1.0f : exp2_fast((sink - greatest) * kLog2E);
    const float total = fmaf(row_sum[r], keys_part, sink_part);
    return {keys_part / total, bounded_lse(greatest + log2_fast(total) * kLn2)};
  }
};

}  // namespace jattn::sm90
