#include "cpu/backward.inl"
#include "cpu/forward.inl"
#include "cpu/pair_backward_products.h"
#include "cpu/pair_forward_products.h"

namespace jattn::cpu {

const KernelTable kAvx512Bf16Kernels = {
    "avx512_bf16",
    {nullptr, run_forward<BFloat16, PairForwardProducts>, nullptr, nullptr},
    {nullptr, run_backward<BFloat16, PairBackwardProducts<VectorUnit>>, nullptr, nullptr},
};

}  // namespace jattn::cpu
