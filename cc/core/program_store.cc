#include "core/program_store.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "core/require.h"
#include "core/sha256.h"
#include "core/text_map.h"

namespace jattn {
namespace {

constexpr size_t kDigestLength = 2 * sizeof(Sha256Digest);
constexpr size_t kMaxTextBytes = size_t{1} << 20;

struct Store {
  std::shared_mutex mutex;
  TextMap<std::string> digest_of_text;
  TextMap<std::string_view> text_of_digest;  // views of the keys of digest_of_text
};

Store& store() {
  static Store* instance = new Store;  // never destroyed: threads of the runtime may outlive static objects
  return *instance;
}

// A program may come from somebody else, and a compiler reads it. It can compute what it likes, as all of that
// somebody's program can, but not name files of this machine.
void require_plain(std::string_view text) {
  JATTN_REQUIRE(!text.empty() && text.size() <= kMaxTextBytes, "score program: ", text.size(),
                " bytes, must be from 1 to ", kMaxTextBytes);
  const bool printable = std::ranges::all_of(text, [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); });
  JATTN_REQUIRE(printable, "score program: it must be printable ASCII");
  for (std::string_view word : {"#", "%:", "\\"}) {
    JATTN_REQUIRE(text.find(word) == text.npos, "score program: it contains ", word,
                  ", must be free of preprocessor directives");
  }
}

}  // namespace

std::string register_program(std::string_view text) {
  Store& s = store();
  {
    const std::shared_lock lock(s.mutex);
    if (const auto found = s.digest_of_text.find(text); found != s.digest_of_text.end()) return found->second;
  }
  require_plain(text);
  const std::string digest = to_hex(sha256(text));
  const std::unique_lock lock(s.mutex);
  const auto [entry, is_new] = s.digest_of_text.emplace(text, digest);
  if (is_new) s.text_of_digest.emplace(digest, entry->first);
  return digest;
}

std::string_view find_program(std::string_view digest) {
  Store& s = store();
  const std::shared_lock lock(s.mutex);
  const auto found = s.text_of_digest.find(digest);
  JATTN_REQUIRE(found != s.text_of_digest.end(), "score program: none is registered under the digest ", digest,
                "; its text must come with the kernel key");
  return found->second;
}

bool is_program_digest(std::string_view text) {
  return text.size() == kDigestLength &&
         std::ranges::all_of(text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

}  // namespace jattn
