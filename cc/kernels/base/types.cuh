// Fixed-width integer types for headers that NVRTC compiles too: it has no standard headers.
#pragma once

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

// Marks constexpr functions that the host compiler, nvcc and NVRTC all call; the host compiler knows no such
// attributes.
#ifdef __CUDACC__
#define JATTN_HOST_DEVICE __host__ __device__
// Marks the functions of a ScoreProgram (attn/score_program.cuh).
#define JATTN_PROGRAM_FUNCTION static __device__ __forceinline__
#else
#define JATTN_HOST_DEVICE
#endif
