// Tiles of rows between global memory and swizzled shared memory, by all threads of a block.
#pragma once

#include "base/integers.cuh"
#include "base/ptx.cuh"
#include "sm80/fragments.cuh"

namespace jattn::sm80 {

// A matrix in global memory: rows of `width` readable elements from `data` on.
struct GlobalRows {
  const unsigned char* data;
  int stride_bytes;  // between rows; 32 bits, so that an offset is one wide multiplication (the host checks the range)
  int width;
  int copy_bytes;  // widest aligned access: 16, 8, 4 or 2 bytes

  __device__ __forceinline__ const unsigned char* row(int index) const { return data + int64_t(index) * stride_bytes; }
};

struct EveryRow {
  __device__ __forceinline__ bool operator()(int) const { return true; }
};

// The rows of one head of a [batch, rows, heads, width] array, from `first_column` on.
template <Element kElement>
__device__ __forceinline__ GlobalRows head_rows(const void* data, int rows, int heads, int width, int batch, int head,
                                                int first_column, int copy_bytes) {
  const int64_t offset = (int64_t(batch) * rows * heads + head) * width + first_column;
  return {static_cast<const unsigned char*>(data) + offset * element_bytes(kElement),
          heads * width * element_bytes(kElement), width - first_column, copy_bytes};
}

// Facts of a block that are read once per tile are kept in shared memory: registers are full of accumulators, and the
// compiler would put them into local memory instead. One thread saves, everyone reads after a barrier.
inline constexpr int kSavedBytes = 16;

__device__ __forceinline__ void save_rows(uint32_t address, const GlobalRows& rows) {
  const uint64_t data = reinterpret_cast<uint64_t>(rows.data);
  ptx::store_shared_u32x4(address, make_uint4(uint32_t(data), uint32_t(data >> 32), rows.stride_bytes, rows.width));
}

__device__ __forceinline__ GlobalRows saved_rows(uint32_t address, int copy_bytes) {
  const uint4 x = ptx::load_shared_u32x4(address);
  return {reinterpret_cast<const unsigned char*>(uint64_t(x.y) << 32 | x.x), int(x.z), int(x.w), copy_bytes};
}

// Threads that share a row: a power of two, so that each thread keeps its columns.
JATTN_HOST_DEVICE constexpr int threads_per_row(int chunks, int threads) {
  int n = 1;
  while (n < 16 && n * 2 <= threads && chunks % (n * 2) == 0) n *= 2;
  return n;
}

// load_tile for rows on 16-byte boundaries.
template <Element kElement, int kWidth, int kRows, int kThreads>
__device__ __forceinline__ void load_wide_rows(Tile<kElement, kWidth> tile, const GlobalRows& source, int row0,
                                               int row_limit) {
  using Layout = typename Tile<kElement, kWidth>::Layout;
  constexpr int kBytes = element_bytes(kElement);
  constexpr int kChunkElements = 16 / kBytes;
  constexpr int kChunks = kWidth / kChunkElements;
  constexpr int kSharing = threads_per_row(kChunks, kThreads);
  constexpr int kRowStep = kThreads / kSharing;
  constexpr int kColumns = kChunks / kSharing;
  // Read anew, so that the addresses made of it are not kept in registers from tile to tile.
  const unsigned thread = ptx::thread_index_anew();
  const int first_row = thread / kSharing;
  const int first_chunk = thread % kSharing;
  // Uniform base plus a 32-bit lane offset: the bases stay in uniform registers.
  const unsigned char* line = source.row(row0);
  const int line_step = source.stride_bytes * kRowStep;
  const uint32_t lane_offset = first_row * source.stride_bytes + first_chunk * 16;
  const uint32_t destination = tile.address + Layout::offset(first_row, first_chunk);
  int rows_left[kColumns];  // counted from first_row; none in columns beyond the width
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const bool inside = (first_chunk + c * kSharing) * kChunkElements < source.width;
    rows_left[c] = inside ? row_limit - row0 - first_row : 0;
  }
#pragma unroll
  for (int r = 0; r < ceil_div(kRows, kRowStep); ++r) {
    if (kRows % kRowStep != 0 && first_row + r * kRowStep >= kRows) break;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      // Eight rows on, the swizzle is the same: only a constant is added.
      const uint32_t address =
          kRowStep % 8 == 0
              ? Layout::advance(destination, c * kSharing) + r * (kRowStep * Tile<kElement, kWidth>::kRowBytes)
              : tile.address + Layout::offset(first_row + r * kRowStep, first_chunk + c * kSharing);
      ptx::copy_async<16>(address, line + lane_offset + c * (kSharing * 16), r * kRowStep < rows_left[c]);
    }
    line += line_step;
  }
}

// load_tile row by row: any alignment, and a predicate for each row.
template <Element kElement, int kWidth, int kRows, int kThreads, bool kNarrow, class TakeRow>
__device__ __forceinline__ void load_single_rows(Tile<kElement, kWidth> tile, const GlobalRows& source, int row0,
                                                 int row_limit, TakeRow take_row) {
  using Layout = typename Tile<kElement, kWidth>::Layout;
  constexpr int kBytes = element_bytes(kElement);
  constexpr int kChunkElements = 16 / kBytes;
  constexpr int kChunks = kWidth / kChunkElements;
  constexpr int kSharing = threads_per_row(kChunks, kThreads);
#pragma unroll 1
  for (int row = threadIdx.x / kSharing; row < kRows; row += kThreads / kSharing) {
    const bool valid_row = row0 + row < row_limit && take_row(row0 + row);
    const unsigned char* line = source.row(row0 + row);
#pragma unroll 1
    for (int chunk = threadIdx.x % kSharing; chunk < kChunks; chunk += kSharing) {
      const uint32_t destination = tile.address + Layout::offset(row, chunk);
      const int column = chunk * kChunkElements;
      const int valid = valid_row ? min(max(source.width - column, 0), kChunkElements) : 0;
      const unsigned char* from = line + column * kBytes;
      if constexpr (!kNarrow) {
        ptx::copy_async<16>(destination, from, valid > 0);
      } else if (source.copy_bytes >= 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::copy_async<4>(destination + 4 * i, from + 4 * i, i * (4 / kBytes) < valid);
      } else if constexpr (kBytes == 2) {  // there is no 2-byte asynchronous copy
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint16_t* two = reinterpret_cast<const uint16_t*>(from) + 2 * i;
          const uint32_t low = 2 * i < valid ? __ldg(two) : uint16_t(0);
          const uint32_t high = 2 * i + 1 < valid ? __ldg(two + 1) : uint16_t(0);
          x[i] = low | high << 16;
        }
        ptx::store_shared_u32x4(destination, make_uint4(x[0], x[1], x[2], x[3]));
      }
    }
  }
}

// Starts the copy of rows [row0, row0 + kRows) into `tile`. Rows at or beyond row_limit, rows that take_row(row)
// refuses, and columns beyond the width become zeros: padding may hold NaN, and 0 * NaN is not 0. take_row is asked if
// ask_rows, which only kMayAsk allows. The caller commits the group. kNarrow: rows are no multiple of 16 bytes.
template <Element kElement, int kWidth, int kRows, int kThreads, bool kNarrow, bool kMayAsk, class TakeRow>
__device__ __forceinline__ void load_tile(Tile<kElement, kWidth> tile, const GlobalRows& source, int row0,
                                          int row_limit, bool ask_rows, TakeRow take_row) {
  if constexpr (kNarrow || kMayAsk) {
    if (kNarrow || ask_rows) {
      const auto take = [&](int row) { return !kMayAsk || !ask_rows || take_row(row); };
      load_single_rows<kElement, kWidth, kRows, kThreads, kNarrow>(tile, source, row0, row_limit, take);
      return;
    }
  }
  if constexpr (!kNarrow) load_wide_rows<kElement, kWidth, kRows, kThreads>(tile, source, row0, row_limit);
}

// Sets the rows [first, first + kRows) for which empty(row) to zero, by kThreads threads.
template <Element kElement, int kWidth, int kRows, int kThreads, class Empty>
__device__ __forceinline__ void clear_rows(Tile<kElement, kWidth> tile, int first, Empty empty) {
  using Layout = typename Tile<kElement, kWidth>::Layout;
  constexpr int kChunks = Tile<kElement, kWidth>::kRowBytes / 16;
  constexpr int kSharing = threads_per_row(kChunks, kThreads);
  const int thread = threadIdx.x % kThreads;
#pragma unroll 1
  for (int row = first + thread / kSharing; row < first + kRows; row += kThreads / kSharing) {
    if (!empty(row)) continue;
#pragma unroll 1
    for (int chunk = thread % kSharing; chunk < kChunks; chunk += kSharing) {
      ptx::store_shared_u32x4(tile.address + Layout::offset(row, chunk), make_uint4(0, 0, 0, 0));
    }
  }
}

// What the rows of a warp's part are multiplied by: 0 at or beyond the length.
template <int kM>
__device__ __forceinline__ void row_factors(float (&factor)[kM][2], int first_row, int length, float scale) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[m][h] = first_row + 16 * m + 8 * h + (lane >> 2) < length ? scale : 0.0f;
  }
}

// Writes one warp's accumulator rows, times factor[m][h], into rows row0.. of a staging tile of the element type;
// negative numbers as 0 if kClamp.
template <bool kClamp = false, Element kElement, int kWidth, int kM, int kN>
__device__ __forceinline__ void stage_accumulator(Tile<kElement, kWidth> tile, const float (&c)[kM][kN][4],
                                                  const float (&factor)[kM][2], int row0, int column0) {
  using Layout = typename Tile<kElement, kWidth>::Layout;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 16 * m + 8 * h + (lane >> 2);
      const float f = factor[m][h];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        // A factor of 0 marks a row whose result is 0 whatever was summed.
        const float x = f == 0.0f ? 0.0f : c[m][n][2 * h] * f;
        const float y = f == 0.0f ? 0.0f : c[m][n][2 * h + 1] * f;
        const int column = column0 + 8 * n + 2 * (lane & 3);
        if constexpr (kElement == Element::kF32) {
          const uint32_t address = tile.address + Layout::offset(row, column / 4) + (column % 4) * 4;
          ptx::store_shared_u32x2(address, __float_as_uint(kClamp ? clamp_negative(x) : x),
                                  __float_as_uint(kClamp ? clamp_negative(y) : y));
        } else {
          const uint32_t address = tile.address + Layout::offset(row, column / 8) + (column % 8) * 2;
          ptx::store_shared_u32(address, Fragments<kElement>::template pack<kClamp>(x, y));
        }
      }
    }
  }
}

// Copies rows [row0, row0 + kRows) of a staging tile to global rows, by one warp (kThreads = 32) or a block; rows at or
// beyond row_limit and columns beyond the width are left out. `first` is the tile row that belongs to global row row0.
template <Element kElement, int kWidth, int kRows, int kThreads, bool kNarrow>
__device__ __forceinline__ void store_tile(Tile<kElement, kWidth> tile, const GlobalRows& target, int first, int row0,
                                           int row_limit) {
  using Layout = typename Tile<kElement, kWidth>::Layout;
  constexpr int kBytes = element_bytes(kElement);
  constexpr int kChunkElements = 16 / kBytes;
  constexpr int kChunks = kWidth / kChunkElements;
  constexpr int kSharing = threads_per_row(kChunks, kThreads);
  const int thread = threadIdx.x % kThreads;
  for (int row = thread / kSharing; row < kRows; row += kThreads / kSharing) {
    if (row0 + row >= row_limit) break;
    unsigned char* line = const_cast<unsigned char*>(target.row(row0 + row));
#pragma unroll
    for (int c = 0; c < kChunks / kSharing; ++c) {
      const int chunk = thread % kSharing + c * kSharing;
      const int valid = min(target.width - chunk * kChunkElements, kChunkElements);
      if (valid <= 0) continue;
      const uint4 x = ptx::load_shared_u32x4(tile.address + Layout::offset(first + row, chunk));
      if constexpr (!kNarrow) {
        *reinterpret_cast<uint4*>(line + chunk * 16) = x;
      } else {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kBytes == 4) {
            if (i < valid) *reinterpret_cast<uint32_t*>(line + chunk * 16 + 4 * i) = words[i];
          } else {
            uint16_t* two = reinterpret_cast<uint16_t*>(line + chunk * 16) + 2 * i;
            if (2 * i < valid) two[0] = uint16_t(words[i]);
            if (2 * i + 1 < valid) two[1] = uint16_t(words[i] >> 16);
          }
        }
      }
    }
  }
}

}  // namespace jattn::sm80
