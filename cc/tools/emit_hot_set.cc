// Build-time program: writes the translation unit of one kernel key to a file. A file that has the text already is left
// alone, so that a change of this program compiles no kernel again unless the text did change.
//   emit_hot_set "<key>" <file>
#include <cstdio>
#include <exception>
#include <fstream>
#include <sstream>
#include <string>

#include "core/kernel_key.h"
#include "core/kernel_unit.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: emit_hot_set \"<kernel key>\" <file>\n", stderr);
    return 2;
  }
  try {
    const std::string text = jattn::kernel_unit_text(jattn::parse_kernel_key(argv[1]));
    std::ostringstream present;
    present << std::ifstream(argv[2], std::ios::binary).rdbuf();
    if (present.str() == text) return 0;
    std::ofstream file(argv[2], std::ios::binary);
    file << text;
    file.close();
    if (!file) {
      std::fprintf(stderr, "emit_hot_set: cannot write %s\n", argv[2]);
      return 1;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "emit_hot_set: %s\n", error.what());
    return 1;
  }
  return 0;
}
