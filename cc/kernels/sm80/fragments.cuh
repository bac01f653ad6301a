// Matrix operands of one warp: from swizzled shared memory or accumulators to mma.sync fragments, for every element
// type.
//
// 16-bit types use m16n8k16. float32 uses three m16n8k8 TF32 products per step: each number is split into a part
// rounded to TF32 and the rest, and all but rest * rest is summed, which leaves an error of about 2^-21 per product. A
// step covers kStep elements along the summed axis, 32 bytes in either case, so both types share the address
// arithmetic.
//
// In products whose A comes from accumulators (or a transposed A), the float32 step pairs slot t with position 2t and
// slot t + 4 with position 2t + 1, in A and in B alike: the sum does not care, an accumulator then is an A operand as
// it stands, and the 32-bit reads of B are free of bank conflicts.
#pragma once

#include "base/numeric.cuh"
#include "base/ptx.cuh"
#include "base/swizzle.cuh"

namespace jattn::sm80 {

template <Element kElement>
struct Fragments {
  static constexpr int kStep = 16;

  struct A {
    uint32_t r[4];
  };
  struct B {  // two neighbouring 8-column blocks: {r[0], r[1]} and {r[2], r[3]}
    uint32_t r[4];
  };

  static __device__ __forceinline__ void load_a(A& a, uint32_t address) { ptx::load_matrix_x4(a.r, address); }
  static __device__ __forceinline__ void load_b(B& b, uint32_t address) { ptx::load_matrix_x4(b.r, address); }

  // accumulators of columns [16 k, 16 k + 16), negative ones as 0 if kClamp
  template <bool kClamp, int kN>
  static __device__ __forceinline__ void from_accumulator(A& a, const float (&c)[kN][4], int k) {
    a.r[0] = pack<kClamp>(c[2 * k][0], c[2 * k][1]);
    a.r[1] = pack<kClamp>(c[2 * k][2], c[2 * k][3]);
    a.r[2] = pack<kClamp>(c[2 * k + 1][0], c[2 * k + 1][1]);
    a.r[3] = pack<kClamp>(c[2 * k + 1][2], c[2 * k + 1][3]);
  }
  template <bool kClamp>
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    using Traits = ElementTraits<kElement>;
    return kClamp ? Traits::pack_clamped(low, high) : Traits::pack(low, high);
  }

  static __device__ __forceinline__ void multiply(float (&c)[4], const A (&a)[1], const B (&b)[1], int block) {
    ptx::mma_m16n8k16<kElement>(c, a[0].r, b[0].r[2 * block], b[0].r[2 * block + 1]);
  }
};

template <>
struct Fragments<Element::kF32> {
  static constexpr int kStep = 8;

  struct A {
    uint32_t big[4], rest[4];
  };
  struct B {
    uint32_t big[4], rest[4];
  };

  static __device__ __forceinline__ void split(uint32_t& big, uint32_t& rest, float x) {
    big = ptx::to_tf32(x);
    rest = __float_as_uint(x - __uint_as_float(big));
  }
  // Of an operand whose numbers may stand behind a mask and meet a weight of 0: 0 times infinity is NaN.
  static __device__ __forceinline__ void split_finite(uint32_t& big, uint32_t& rest, float x) {
    big = ptx::to_finite_tf32(x);
    rest = __float_as_uint(x - __uint_as_float(big));
  }

  template <class Operand>
  static __device__ __forceinline__ void load(Operand& operand, uint32_t address) {
    uint32_t x[4];
    ptx::load_matrix_x4(x, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) split(operand.big[i], operand.rest[i], __uint_as_float(x[i]));
  }
  static __device__ __forceinline__ void load_a(A& a, uint32_t address) { load(a, address); }
  static __device__ __forceinline__ void load_b(B& b, uint32_t address) { load(b, address); }

  // accumulators of columns [8 k, 8 k + 8), negative ones as 0 if kClamp
  template <bool kClamp, int kN>
  static __device__ __forceinline__ void from_accumulator(A& a, const float (&c)[kN][4], int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = c[k][i / 2 + i % 2 * 2];
      split(a.big[i], a.rest[i], kClamp ? clamp_negative(x) : x);
    }
  }

  // The unit truncates when it adds to its accumulator, so a long chain drifts towards 0 (2048 keys: four times the
  // error of float32). A few steps (Config::tf32_chain) therefore start from 0, smallest terms first, and are added by
  // an ordinary rounded addition.
  template <int kChain>
  static __device__ __forceinline__ void multiply(float (&c)[4], const A (&a)[kChain], const B (&b)[kChain],
                                                  int block) {
    float sum[4];
    ptx::mma_m16n8k8_tf32_first(sum, a[0].rest, b[0].big[2 * block], b[0].big[2 * block + 1]);
#pragma unroll
    for (int i = 0; i < kChain; ++i) {
      if (i > 0) ptx::mma_m16n8k8_tf32(sum, a[i].rest, b[i].big[2 * block], b[i].big[2 * block + 1]);
      ptx::mma_m16n8k8_tf32(sum, a[i].big, b[i].rest[2 * block], b[i].rest[2 * block + 1]);
    }
#pragma unroll
    for (int i = 0; i < kChain; ++i) {
      ptx::mma_m16n8k8_tf32(sum, a[i].big, b[i].big[2 * block], b[i].big[2 * block + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += sum[i];
  }

  // One step of a chain whose sums the caller keeps and adds.
  static __device__ __forceinline__ void multiply_on(float (&sum)[4], const A& a, const B& b, int block, bool first) {
    if (first) {
      ptx::mma_m16n8k8_tf32_first(sum, a.rest, b.big[2 * block], b.big[2 * block + 1]);
    } else {
      ptx::mma_m16n8k8_tf32(sum, a.rest, b.big[2 * block], b.big[2 * block + 1]);
    }
    ptx::mma_m16n8k8_tf32(sum, a.big, b.rest[2 * block], b.rest[2 * block + 1]);
    ptx::mma_m16n8k8_tf32(sum, a.big, b.big[2 * block], b.big[2 * block + 1]);
  }
};

// The longest chain of at most `wanted` steps that divides a product.
JATTN_HOST_DEVICE constexpr int chain_steps(Element element, int wanted, int steps) {
  int chain = element == Element::kF32 ? wanted : 1;
  while (steps % chain != 0) --chain;
  return chain;
}

// A tile in shared memory: rows of kWidth elements, swizzled (base/swizzle.cuh). `address` is aligned to 128 bytes.
template <Element kElement, int kWidth>
struct Tile {
  static constexpr int kBytes = element_bytes(kElement);
  static constexpr int kRowBytes = kWidth * kBytes;
  using Layout = SwizzledRows<kRowBytes>;
  uint32_t address;

  static JATTN_HOST_DEVICE constexpr int bytes(int rows) { return rows * kRowBytes; }
};

// Lane part of the addresses of a fragment; the rest are constants added by at(). One per operand, made before the
// loops.
template <Element kElement, int kWidth>
struct RowOperand {  // rows along the result, columns along the sum
  using Layout = typename Tile<kElement, kWidth>::Layout;
  static constexpr int kRowBytes = Tile<kElement, kWidth>::kRowBytes;
  uint32_t address;

  // A operand: 16 rows from `row`
  static __device__ __forceinline__ RowOperand a(Tile<kElement, kWidth> tile, int row) {
    const int lane = ptx::thread_index_anew() & 31;
    return {tile.address + row * kRowBytes + Layout::offset(lane & 15, lane >> 4)};
  }
  // B operand: 16 result columns from `row`
  static __device__ __forceinline__ RowOperand b(Tile<kElement, kWidth> tile, int row) {
    const int lane = ptx::thread_index_anew() & 31;  // made per tile: nothing to keep in registers
    return {tile.address + row * kRowBytes + Layout::offset((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1)};
  }
  // A operand for products with a ColumnOperand: in float32 slots t and t + 4 of a step are columns 2t and 2t + 1. The
  // address then is that of the lane's own row.
  static __device__ __forceinline__ RowOperand paired(Tile<kElement, kWidth> tile, int row) {
    if constexpr (kElement != Element::kF32) return a(tile, row);
    const int lane = ptx::thread_index_anew() & 31;
    return {tile.address + row * kRowBytes + Layout::offset(lane >> 2, (lane >> 1) & 1) + (lane & 1) * 8};
  }

  // 16 `block` rows further on, step `k` along the sum
  __device__ __forceinline__ uint32_t at(int block, int k) const {
    return Layout::advance(address, 2 * k) + block * (16 * kRowBytes);
  }

  __device__ __forceinline__ void load_paired(typename Fragments<kElement>::A& a, int block, int k) const {
    if constexpr (kElement == Element::kF32) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 x = ptx::load_shared_f32x2(at(block, k) + h * (8 * kRowBytes));
        Fragments<kElement>::split(a.big[h], a.rest[h], x.x);
        Fragments<kElement>::split(a.big[2 + h], a.rest[2 + h], x.y);
      }
    } else {
      Fragments<kElement>::load_a(a, at(block, k));
    }
  }
};

// Rows along the sum, columns along the result. kAnyColumn: the first column is any multiple of 16; otherwise the
// columns that are read must not cross a span of the swizzle unless the first column starts one, and addresses are
// cheaper.
template <Element kElement, int kWidth, bool kAnyColumn = false>
struct ColumnOperand {
  using Layout = typename Tile<kElement, kWidth>::Layout;
  using Fragment = Fragments<kElement>;
  static constexpr int kRowBytes = Tile<kElement, kWidth>::kRowBytes;
  static constexpr bool kWide = kElement == Element::kF32;  // one read per number: rows 2t and 2t + 1 of the step
  static constexpr int kStepRows = Fragment::kStep;

  uint32_t line[kWide ? 2 : 1];  // of the lane's row(s)
  uint32_t swizzle[kWide ? 2 : 1];
  uint32_t chunk;  // of the lane in its row, before the permutation

  // The fragment of an A (is_a) or B operand that starts at `row` and `column`.
  __device__ __forceinline__ ColumnOperand(Tile<kElement, kWidth> tile, int row, int column, bool is_a) {
    const int lane = ptx::thread_index_anew() & 31;  // made per tile: nothing to keep in registers
    const uint32_t base = tile.address + row * kRowBytes;
    if constexpr (kWide) {
      chunk = column / 4 + (lane >> 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int lane_row = 2 * (lane & 3) + i;
        line[i] = base + lane_row * kRowBytes + ((lane >> 2) & 3) * 4;
        swizzle[i] = Layout::swizzle(lane_row);
      }
    } else {
      const int lane_row = (lane & 7) + (is_a ? lane >> 4 : (lane >> 3) & 1) * 8;
      chunk = column / 8 + (is_a ? (lane >> 3) & 1 : lane >> 4);
      line[0] = base + lane_row * kRowBytes;
      swizzle[0] = Layout::swizzle(lane_row);
    }
  }

  // `step` chunks to the right of the first column; step is even.
  __device__ __forceinline__ uint32_t at(int i, int step) const {
    if constexpr (kAnyColumn) return line[i] + (((chunk + step) ^ swizzle[i]) << 4);
    return Layout::advance(line[i] + ((chunk ^ swizzle[i]) << 4), step);
  }

  // 16 result columns from 16 `block`, step k along the sum
  __device__ __forceinline__ void load_b(typename Fragment::B& b, int block, int k) const {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // 8 columns each
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t address = at(odd, 4 * block + 2 * i) + k * (kStepRows * kRowBytes);
          const float x = __uint_as_float(ptx::load_shared_u32(address));
          Fragment::split_finite(b.big[2 * i + odd], b.rest[2 * i + odd], x);
        }
      }
    } else {
      ptx::load_matrix_x4_transposed(b.r, at(0, 2 * block) + k * (kStepRows * kRowBytes));
    }
  }
  __device__ __forceinline__ void load_a(typename Fragment::A& a, int block, int k) const {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // result rows g and g + 8
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t address = at(odd, 4 * block + 2 * i) + k * (kStepRows * kRowBytes);
          Fragment::split(a.big[2 * odd + i], a.rest[2 * odd + i], __uint_as_float(ptx::load_shared_u32(address)));
        }
      }
    } else {
      ptx::load_matrix_x4_transposed(a.r, at(0, 2 * block) + k * (kStepRows * kRowBytes));
    }
  }
};

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[m][n][e] = 0.0f;
    }
  }
}

// c += A B^T, both with the summed axis along rows of shared memory. Operands are loaded one group of products ahead: A
// for the next step, B for the next 16 columns; more in flight costs registers that the accumulators need. kChain:
// Config::tf32_chain.
template <int kWantedChain, Element kElement, int kWidth, int kM, int kN>
__device__ __forceinline__ void multiply_rows(float (&c)[kM][kN][4], RowOperand<kElement, kWidth> a_operand,
                                              RowOperand<kElement, kWidth> b_operand) {
  using Fragment = Fragments<kElement>;
  constexpr int kSteps = kWidth / Fragment::kStep, kGroups = kN / 2;
  constexpr int kChain = chain_steps(kElement, kWantedChain, kSteps);
  static_assert(kN % 2 == 0);
  typename Fragment::A a[2][kM][1];
  typename Fragment::B b[2][1];
  float sum[kChain > 1 ? kM : 1][kChain > 1 ? kN : 1][4];  // of a chain
#pragma unroll
  for (int m = 0; m < kM; ++m) Fragment::load_a(a[0][m][0], a_operand.at(m, 0));
  Fragment::load_b(b[0][0], b_operand.at(0, 0));
#pragma unroll(kElement == Element::kF32 && kM == 1 ? (kChain > 2 ? kChain : 2) : kSteps)
  for (int k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) {
#pragma unroll
      for (int m = 0; m < kM; ++m) Fragment::load_a(a[(k + 1) & 1][m][0], a_operand.at(m, k + 1));
    }
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int group = k * kGroups + n;
      if (group + 1 < kSteps * kGroups) {
        Fragment::load_b(b[(group + 1) & 1][0], b_operand.at((group + 1) % kGroups, (group + 1) / kGroups));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if constexpr (kChain > 1) {
            Fragment::multiply_on(sum[m][2 * n + i], a[k & 1][m][0], b[group & 1][0], i, k % kChain == 0);
            if (k % kChain == kChain - 1) {
#pragma unroll
              for (int e = 0; e < 4; ++e) c[m][2 * n + i][e] += sum[m][2 * n + i][e];
            }
          } else {
            Fragment::multiply(c[m][2 * n + i], a[k & 1][m], b[group & 1], i);
          }
        }
      }
    }
  }
}

// c += P B, P in accumulators (rounded to the element type here; negative numbers as 0 if kClamp), B with the summed
// axis down the rows of shared memory.
template <int kWantedChain, bool kClamp = false, Element kElement, int kWidth, bool kAnyColumn, int kM, int kP, int kN>
__device__ __forceinline__ void multiply_accumulator(float (&c)[kM][kN][4], const float (&p)[kM][kP][4],
                                                     ColumnOperand<kElement, kWidth, kAnyColumn> b_operand) {
  using Fragment = Fragments<kElement>;
  constexpr int kSteps = kP * 8 / Fragment::kStep;
  constexpr int kChain = chain_steps(kElement, kWantedChain, kSteps);
  static_assert(kN % 2 == 0);
#pragma unroll
  for (int k = 0; k < kSteps; k += kChain) {
    typename Fragment::A a[kM][kChain];
    typename Fragment::B b[2][kChain];
#pragma unroll
    for (int j = 0; j < kChain; ++j) {
#pragma unroll
      for (int m = 0; m < kM; ++m) Fragment::template from_accumulator<kClamp>(a[m][j], p[m], k + j);
      b_operand.load_b(b[0][j], 0, k + j);
    }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      if (n + 1 < kN / 2) {
#pragma unroll
        for (int j = 0; j < kChain; ++j) b_operand.load_b(b[(n + 1) & 1][j], n + 1, k + j);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < kM; ++m) Fragment::multiply(c[m][2 * n + i], a[m], b[n & 1], i);
      }
    }
  }
}

// c += A B with the summed axis along the rows of A and down the rows of B; kSum is its length.
template <int kWantedChain, Element kElement, int kSum, int kWidthA, int kWidthB, bool kAnyColumnB, int kM, int kN>
__device__ __forceinline__ void multiply_row_column(float (&c)[kM][kN][4], RowOperand<kElement, kWidthA> a_operand,
                                                    ColumnOperand<kElement, kWidthB, kAnyColumnB> b_operand) {
  using Fragment = Fragments<kElement>;
  static_assert(kN % 2 == 0 && kSum % Fragment::kStep == 0);
  constexpr int kSteps = kSum / Fragment::kStep;
  constexpr int kChain = chain_steps(kElement, kWantedChain, kSteps);
#pragma unroll(kChain > 1 ? 1 : 4)
  for (int k = 0; k < kSteps; k += kChain) {
    typename Fragment::A a[kM][kChain];
#pragma unroll
    for (int j = 0; j < kChain; ++j) {
#pragma unroll
      for (int m = 0; m < kM; ++m) a_operand.load_paired(a[m][j], m, k + j);
    }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      typename Fragment::B b[kChain];
#pragma unroll
      for (int j = 0; j < kChain; ++j) b_operand.load_b(b[j], n, k + j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < kM; ++m) Fragment::multiply(c[m][2 * n + i], a[m], b, i);
      }
    }
  }
}

// c += A B with the summed axis down the rows of both tiles; kSum is its length.
template <int kWantedChain, Element kElement, int kSum, int kWidthA, int kWidthB, bool kAnyColumnA, bool kAnyColumnB,
          int kM, int kN>
__device__ __forceinline__ void multiply_columns(float (&c)[kM][kN][4],
                                                 ColumnOperand<kElement, kWidthA, kAnyColumnA> a_operand,
                                                 ColumnOperand<kElement, kWidthB, kAnyColumnB> b_operand) {
  using Fragment = Fragments<kElement>;
  static_assert(kN % 2 == 0 && kSum % Fragment::kStep == 0);
  constexpr int kSteps = kSum / Fragment::kStep;
  constexpr int kChain = chain_steps(kElement, kWantedChain, kSteps);
#pragma unroll(kChain > 1 ? 1 : 4)
  for (int k = 0; k < kSteps; k += kChain) {
    typename Fragment::A a[kM][kChain];
#pragma unroll
    for (int j = 0; j < kChain; ++j) {
#pragma unroll
      for (int m = 0; m < kM; ++m) a_operand.load_a(a[m][j], m, k + j);
    }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      typename Fragment::B b[kChain];
#pragma unroll
      for (int j = 0; j < kChain; ++j) b_operand.load_b(b[j], n, k + j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < kM; ++m) Fragment::multiply(c[m][2 * n + i], a[m], b, i);
      }
    }
  }
}

}  // namespace jattn::sm80
