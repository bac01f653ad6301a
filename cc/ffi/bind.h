// Turns an XLA FFI call frame into a Problem and its buffers, checking everything a kernel relies on.
//
// Extents come from the buffers, never from attributes: a partitioner may have cut the call after it was lowered.
// Operand order of both targets:
//   forward:  q, k, v, then the optional operands that the `operands` bits announce, in bit order
//   backward: q, k, v, out, lse, dout, then the optional operands, then dlse if `has_dlse`
// Result order:
//   forward:  out, lse, scratch
//   backward: dq, dk, dv, dbias, dslopes, dcaptures, scratch
// A gradient that is not wanted has zero elements. dslopes comes in parts, (batch, heads, parts); dcaptures has one
// axis, for those of all captures.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jattn::bind {

namespace ffi = xla::ffi;

// Bits of the attribute `operands`; jattn/ffi.py has the same list (a test compares them).
enum OperandBit : int64_t {
  kBias = 1,
  kMask = 2,
  kQLengths = 4,
  kKvLengths = 8,
  kSegments = 16,   // two operands: q_segments, kv_segments
  kPositions = 32,  // two operands: q_positions, kv_positions
  kSinks = 64,
  kAlibiSlopes = 128,
  kDropout = 256,   // two operands: dropout_keys, dropout_rate
  kScoreMod = 512,  // batch_ids, head_ids, and as many captures as the attribute `num_captures` says
};

ffi::ErrorOr<Problem> decode_forward(const ffi::Dictionary& spec, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                     ForwardResults& results, ffi::AnyBuffer& scratch);

ffi::ErrorOr<Problem> decode_backward(const ffi::Dictionary& spec, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                      BackwardBuffers& buffers, ffi::AnyBuffer& scratch);

// Checks that every attribute is there with its width; run in the instantiate stage, so that mistakes surface when
// XLA compiles and not in the middle of a run.
ffi::Error check_attributes(const ffi::Dictionary& spec);

}  // namespace jattn::bind
