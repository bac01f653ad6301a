// SHA-256 (FIPS 180-4), for the names and checksums of cached machine code.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace jattn {

using Sha256Digest = std::array<uint8_t, 32>;

Sha256Digest sha256(std::string_view bytes);

std::string to_hex(const Sha256Digest& digest);

}  // namespace jattn
