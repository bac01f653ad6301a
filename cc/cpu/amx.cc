#include "cpu/amx_forward_products.h"
#include "cpu/backward.inl"
#include "cpu/forward.inl"
#include "cpu/pair_backward_products.h"
#include "cpu/planes_backward_products.h"
#include "cpu/planes_forward_products.h"

namespace jattn::cpu {

const KernelTable kAmxKernels = {
    "amx",
    {run_forward<Float16, PlanesForwardProducts<Float16>>, run_forward<BFloat16, AmxForwardProducts>,
     run_forward<float, PlanesForwardProducts<float>>, nullptr},
    {run_backward<Float16, PlanesBackwardProducts<Float16>>, run_backward<BFloat16, PairBackwardProducts<AmxUnit>>,
     run_backward<float, PlanesBackwardProducts<float>>, nullptr},
    true,
};

}  // namespace jattn::cpu
