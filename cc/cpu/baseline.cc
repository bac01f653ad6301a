#include "cpu/backward.inl"
#include "cpu/forward.inl"

namespace jattn::cpu {

const KernelTable kBaselineKernels = {
    "baseline",
    {run_forward<Float16>, run_forward<BFloat16>, run_forward<float>, run_forward<double>},
    {run_backward<Float16>, run_backward<BFloat16>, run_backward<float>, run_backward<double>},
};

}  // namespace jattn::cpu
