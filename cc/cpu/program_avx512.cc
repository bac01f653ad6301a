#include "cpu/program_run.inl"

namespace jattn::cpu {

const OperationGroup* const kAvx512Operations = kGroups;

void run_program_avx512(const Problem& problem, const ProgramTile& tile) {
  ProgramRun<kProgramAvx512>(problem, tile).run();
}

}  // namespace jattn::cpu
