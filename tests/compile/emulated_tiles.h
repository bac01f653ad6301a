// The tile instructions of the matrix unit (AMX) in software, in the place of the compiler's own: included before
// everything else, with JATTN_EMULATED_TILES, it lets machines with AVX-512 alone run the kernel that is made of them.
//
// Registers are always full size: 16 rows of 64 bytes. Products as in the Intel SDM, volume 2, TDPBF16PS: sums over the
// pairs of one instruction, of even and of odd elements, start at 0 and are then added to the result.
#pragma once

#if defined(__AVX512F__) && defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace jattn::emulated {

constexpr int kRegisters = 8, kRows = 16, kRowBytes = 64, kPairs = 16;
inline thread_local uint8_t tiles[kRegisters][kRows][kRowBytes];

inline void load(int tile, const void* from, int64_t stride_bytes) {
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride_bytes, kRowBytes);
  }
}

inline void store(int tile, void* to, int64_t stride_bytes) {
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride_bytes, tiles[tile][row], kRowBytes);
  }
}

inline void clear(int tile) { std::memset(tiles[tile], 0, sizeof(tiles[tile])); }

// The even or the odd ones of pairs of bfloat16 as floats. Not by intrinsics: of those for shifts GCC 12 says that they
// read what nobody has written.
using Words = uint32_t __attribute__((vector_size(kRowBytes)));
inline __m512 even_elements(__m512i pairs) { return reinterpret_cast<__m512>(reinterpret_cast<Words>(pairs) << 16); }
inline __m512 odd_elements(__m512i pairs) {
  return reinterpret_cast<__m512>(reinterpret_cast<Words>(pairs) & 0xffff0000u);
}

inline void multiply(int sum, int left, int right) {
  for (int row = 0; row < kRows; ++row) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int pair = 0; pair < kPairs; ++pair) {
      int32_t both;
      std::memcpy(&both, tiles[left][row] + pair * sizeof(both), sizeof(both));
      const __m512i a = _mm512_set1_epi32(both), b = _mm512_loadu_si512(tiles[right][pair]);
      even = _mm512_fmadd_ps(even_elements(a), even_elements(b), even);
      odd = _mm512_fmadd_ps(odd_elements(a), odd_elements(b), odd);
    }
    float* const to = reinterpret_cast<float*>(tiles[sum][row]);
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_add_ps(even, odd)));
  }
}

}  // namespace jattn::emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadd(tile, from, stride_bytes) jattn::emulated::load(tile, from, stride_bytes)
#define _tile_stored(tile, to, stride_bytes) jattn::emulated::store(tile, to, stride_bytes)
#define _tile_zero(tile) jattn::emulated::clear(tile)
#define _tile_dpbf16ps(sum, left, right) jattn::emulated::multiply(sum, left, right)
#define _tile_release() static_cast<void>(0)

#endif
