// Machine code on disk, so that a kernel is compiled once per user and not once per process.
//
// Whoever can write a file that this process loads as machine code owns the process. So the folder is used only if it
// is a real directory (not a link) that belongs to the user and that nobody else can write; entries likewise must be
// regular files of the user's. Anything else is treated as absent. Entries are named by the SHA-256 of everything that
// went into them (kernel_store.h) and carry a SHA-256 of their own content: a torn or damaged file reads as absent and
// is written again. Writers make a temporary file and rename it, so readers and other writers see a whole entry or
// none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace jattn::cuda {

class CubinCache {
 public:
  CubinCache() = default;  // no folder: reads nothing, writes nothing
  explicit CubinCache(std::string folder) : folder_(std::move(folder)) {}

  // `name`: the SHA-256 of the inputs in hexadecimal. Nothing if there is no sound entry.
  std::optional<std::string> read(const std::string& name) const;

  // Why the entry could not be written, or empty. Never throws: the cache is a convenience.
  std::string write(const std::string& name, std::string_view cubin) const;

  struct Info {
    std::string folder;
    std::string problem;  // why the folder is not used; empty: it is, or it will be made by the first write
    int64_t num_entries = 0;
    int64_t num_bytes = 0;
  };
  Info info() const;

  // Removes every entry; returns how many there were.
  int64_t clear() const;

 private:
  std::string folder_;
};

}  // namespace jattn::cuda
