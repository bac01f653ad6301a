// Score functions as source text, by digest: what a kernel key with program=1 stands for.
//
// A text defines `struct ScoreProgram` (attn/score_program.cuh); jattn/device_code.py writes it. It travels beside the
// kernel keys of a call and is registered before they are looked up. The store is one per process and only grows: units
// are written again when machine code is missing, whatever became of the call.
#pragma once

#include <string>
#include <string_view>

namespace jattn {

// Remembers a program. Returns its digest, the SHA-256 of the text in hexadecimal digits. From any thread; cheap for
// a text that is there already. Throws Error (Fault::kCaller) if it is too long or holds preprocessor directives.
std::string register_program(std::string_view text);

// The text behind a digest, valid for ever. Throws Error (Fault::kCaller) if none was registered.
std::string_view find_program(std::string_view digest);

// Whether a text has the form of a digest.
bool is_program_digest(std::string_view text);

}  // namespace jattn
