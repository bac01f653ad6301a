#include "cpu/program_run.inl"

namespace jattn::cpu {

const OperationGroup* const kAvx2Operations = kGroups;

void run_program_avx2(const Problem& problem, const ProgramTile& tile) {
  ProgramRun<kProgramAvx2>(problem, tile).run();
}

}  // namespace jattn::cpu
