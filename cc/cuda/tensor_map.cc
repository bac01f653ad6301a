#include "cuda/tensor_map.h"

#include <array>

#include "core/require.h"

namespace jattn::cuda {
namespace {

// CUtensorMapDataType
int element_type(DType dtype) {
  switch (dtype) {
    case DType::kF16: return 6;
    case DType::kF32: return 7;
    case DType::kF64: return 8;
    case DType::kBF16: return 9;
  }
  fail(Fault::kJattn, "tensor map: unknown element type");
}

constexpr int kInterleaveNone = 0;  // CUtensorMapInterleave
constexpr int kFillZero = 0;        // CUtensorMapFloatOOBfill
constexpr size_t kMaxRank = 5;
constexpr int64_t kAlignmentBytes = 16;
constexpr int64_t kMaxExtent = int64_t{1} << 32;
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
constexpr int64_t kMaxBox = 256;

int64_t swizzle_bytes(Swizzle swizzle) {
  return swizzle == Swizzle::kNone ? 0 : int64_t{16} << static_cast<int>(swizzle);
}

}  // namespace

CUtensorMap make_tensor_map(const void* address, DType dtype, std::span<const TensorMapAxis> axes, Swizzle swizzle,
                            L2Promotion promotion) {
  const int64_t element_bytes = size_bytes(dtype);
  JATTN_REQUIRE(!axes.empty() && axes.size() <= kMaxRank, "tensor map: ", axes.size(), " axes, must be 1 to ",
                kMaxRank);
  JATTN_REQUIRE(reinterpret_cast<uintptr_t>(address) % kAlignmentBytes == 0, "tensor map: the address ", address,
                " must be a multiple of ", kAlignmentBytes, " bytes");
  JATTN_REQUIRE(axes[0].stride == 1, "tensor map: the innermost stride is ", axes[0].stride, ", must be 1");
  const int64_t row_bytes = axes[0].box * element_bytes;
  JATTN_REQUIRE(row_bytes % kAlignmentBytes == 0 && (swizzle == Swizzle::kNone || row_bytes <= swizzle_bytes(swizzle)),
                "tensor map: the innermost box has ", row_bytes, " bytes, must be a multiple of ", kAlignmentBytes,
                " and no wider than the swizzle of ", swizzle_bytes(swizzle));

  std::array<uint64_t, kMaxRank> extents{};
  std::array<uint64_t, kMaxRank> strides_bytes{};  // of the axes 1, 2, ...
  std::array<uint32_t, kMaxRank> box{};
  std::array<uint32_t, kMaxRank> element_strides{};
  for (size_t i = 0; i < axes.size(); ++i) {
    const TensorMapAxis& axis = axes[i];
    const int64_t stride_bytes = axis.stride * element_bytes;
    JATTN_REQUIRE(axis.extent >= 1 && axis.extent <= kMaxExtent, "tensor map: axis ", i, " has extent ", axis.extent,
                  ", must be 1 to 2^32");
    JATTN_REQUIRE(axis.box >= 1 && axis.box <= kMaxBox, "tensor map: axis ", i, " has box ", axis.box,
                  ", must be 1 to ", kMaxBox);
    JATTN_REQUIRE(
        i == 0 || (stride_bytes % kAlignmentBytes == 0 && stride_bytes >= 0 && stride_bytes < kMaxStrideBytes),
        "tensor map: axis ", i, " has a stride of ", stride_bytes, " bytes, must be a multiple of ", kAlignmentBytes,
        " below 2^40");
    extents[i] = static_cast<uint64_t>(axis.extent);
    if (i > 0) strides_bytes[i - 1] = static_cast<uint64_t>(stride_bytes);
    box[i] = static_cast<uint32_t>(axis.box);
    element_strides[i] = 1;
  }
  CUtensorMap map{};
  const CUresult result = driver().cuTensorMapEncodeTiled(
      &map, element_type(dtype), static_cast<unsigned int>(axes.size()), const_cast<void*>(address), extents.data(),
      strides_bytes.data(), box.data(), element_strides.data(), kInterleaveNone, static_cast<int>(swizzle),
      static_cast<int>(promotion), kFillZero);
  if (result != 0) fail(Fault::kJattn, concat("cuTensorMapEncodeTiled: ", describe(result)));
  return map;
}

}  // namespace jattn::cuda
