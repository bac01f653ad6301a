#include "cpu/amx_backward_products.h"
#include "cpu/amx_forward_products.h"
#include "cpu/backward.inl"
#include "cpu/forward.inl"

namespace jattn::cpu {

const KernelTable kAmxKernels = {
    {run_forward<Float16, AmxForwardProducts<Float16>>, run_forward<BFloat16, AmxForwardProducts<BFloat16>>,
     run_forward<float, AmxForwardProducts<float>>, nullptr},
    {run_backward<Float16, AmxBackwardProducts<Float16>>, run_backward<BFloat16, AmxBackwardProducts<BFloat16>>,
     run_backward<float, AmxBackwardProducts<float>>, nullptr},
};

}  // namespace jattn::cpu
