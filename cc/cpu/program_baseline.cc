#include "cpu/program_run.inl"

namespace jattn::cpu {

const OperationGroup* const kBaselineOperations = kGroups;

void run_program_baseline(const Problem& problem, const ProgramTile& tile) {
  ProgramRun<kProgramBaseline>(problem, tile).run();
}

}  // namespace jattn::cpu
