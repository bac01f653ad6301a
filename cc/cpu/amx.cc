#include "cpu/amx_backward_products.h"
#include "cpu/amx_forward_products.h"
#include "cpu/backward.inl"
#include "cpu/forward.inl"

namespace jattn::cpu {

const Bfloat16Kernels kAmxKernels = {run_forward<BFloat16, AmxForwardProducts>,
                                     run_backward<BFloat16, AmxBackwardProducts>};

}  // namespace jattn::cpu
