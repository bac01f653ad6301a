#include "cuda/cubin_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "core/require.h"
#include "core/sha256.h"

namespace jattn::cuda {
namespace {

constexpr char kMagic[8] = {'J', 'A', 'T', 'T', 'N', 'C', '0', '1'};
constexpr std::string_view kSuffix = ".cubin";
constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr size_t kNameLength = 64;
constexpr uint64_t kMaxCubinBytes = uint64_t{256} << 20;

struct Header {
  char magic[8];
  uint64_t name_bytes;
  uint64_t cubin_bytes;
  Sha256Digest digest;  // of the payload: the name, then the cubin
};
static_assert(sizeof(Header) == 56);

class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

std::string error_text(int error) { return std::strerror(error); }

// Empty if only the user can change what the descriptor stands for.
std::string ownership_problem(const struct stat& facts) {
  if (facts.st_uid != ::geteuid()) return concat("belongs to user ", facts.st_uid, ", not to you (", ::geteuid(), ")");
  if ((facts.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "can be written by group or others: chmod go-w";
  return "";
}

// Makes the folder and what is missing above it, all private to the user.
void make_folders(const std::string& folder) {
  for (size_t slash = folder.find('/', 1); slash != folder.npos; slash = folder.find('/', slash + 1)) {
    ::mkdir(folder.substr(0, slash).c_str(), S_IRWXU);
  }
  ::mkdir(folder.c_str(), S_IRWXU);
}

struct OpenedFolder {
  Descriptor descriptor;
  std::string problem;
  bool missing = false;
};

// Every later access goes through the descriptor, so the folder cannot be exchanged between the check and the use.
OpenedFolder open_folder(std::string folder, bool create) {
  OpenedFolder opened;
  if (folder.empty()) {
    opened.problem = "switched off";
    return opened;
  }
  if (folder.front() != '/') {
    opened.problem = "is not an absolute path";
    return opened;
  }
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();  // "link/" would follow the link
  if (create) make_folders(folder);
  opened.descriptor = Descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!opened.descriptor) {
    const int error = errno;
    opened.missing = error == ENOENT;
    const bool is_link_or_file = error == ELOOP || error == ENOTDIR;
    opened.problem = is_link_or_file ? "is a link or a file, must be a real directory" : error_text(error);
    return opened;
  }
  struct stat facts{};
  if (::fstat(opened.descriptor.number(), &facts) != 0) {
    opened.problem = error_text(errno);
  } else {
    opened.problem = ownership_problem(facts);
  }
  if (!opened.problem.empty()) opened.descriptor = Descriptor();
  return opened;
}

bool is_name(std::string_view text) {
  return text.size() == kNameLength &&
         std::ranges::all_of(text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool is_entry(std::string_view file) {
  return file.size() == kNameLength + kSuffix.size() && is_name(file.substr(0, kNameLength)) && file.ends_with(kSuffix);
}

bool is_leftover(std::string_view file) {
  return file.size() > kNameLength && is_name(file.substr(0, kNameLength)) && file.ends_with(kTemporarySuffix);
}

bool read_all(int file, char* bytes, size_t size) {
  while (size > 0) {
    const ssize_t count = ::read(file, bytes, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes += count;
    size -= static_cast<size_t>(count);
  }
  return true;
}

bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

template <typename Visit>
void for_each_file(int folder, const Visit& visit) {
  // fdopendir takes the descriptor over, and shares its position with ours: open the folder anew.
  const int copy = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return;
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::fdopendir(copy), ::closedir);
  if (!listing) {
    ::close(copy);
    return;
  }
  while (const dirent* entry = ::readdir(listing.get())) visit(std::string_view(entry->d_name));
}

}  // namespace

std::optional<std::string> CubinCache::read(const std::string& name) const {
  const OpenedFolder folder = open_folder(folder_, /*create=*/false);
  if (!folder.descriptor || !is_name(name)) return std::nullopt;
  const std::string file_name = name + std::string(kSuffix);
  // O_NONBLOCK: a planted pipe must not hang us before fstat sees it.
  const Descriptor file(
      ::openat(folder.descriptor.number(), file_name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat facts{};
  if (!file || ::fstat(file.number(), &facts) != 0 || !S_ISREG(facts.st_mode)) return std::nullopt;
  if (!ownership_problem(facts).empty()) return std::nullopt;

  Header header{};
  if (!read_all(file.number(), reinterpret_cast<char*>(&header), sizeof header)) return std::nullopt;
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return std::nullopt;
  if (header.name_bytes != kNameLength || header.cubin_bytes > kMaxCubinBytes) return std::nullopt;
  if (static_cast<uint64_t>(facts.st_size) != sizeof header + header.name_bytes + header.cubin_bytes) {
    return std::nullopt;
  }
  std::string payload(header.name_bytes + header.cubin_bytes, '\0');
  if (!read_all(file.number(), payload.data(), payload.size())) return std::nullopt;
  if (sha256(payload) != header.digest || !payload.starts_with(name)) return std::nullopt;
  return payload.substr(kNameLength);
}

std::string CubinCache::write(const std::string& name, std::string_view cubin) const {
  if (!is_name(name)) return "the name of an entry must be a SHA-256 in hexadecimal";
  if (cubin.size() > kMaxCubinBytes) return "the machine code is too large";
  const OpenedFolder folder = open_folder(folder_, /*create=*/true);
  if (!folder.descriptor) return folder.problem;

  const std::string payload = name + std::string(cubin);
  Header header{.magic = {}, .name_bytes = name.size(), .cubin_bytes = cubin.size(), .digest = sha256(payload)};
  std::memcpy(header.magic, kMagic, sizeof kMagic);

  // With the time: in containers processes have the same numbers, and one that is killed leaves its file behind.
  static std::atomic<unsigned int> counter{0};
  const int64_t time = std::chrono::system_clock::now().time_since_epoch().count();
  const std::string temporary = concat(name, '.', ::getpid(), '.', counter++, '.', time, kTemporarySuffix);
  const int directory = folder.descriptor.number();
  Descriptor file(
      ::openat(directory, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file) return error_text(errno);
  const bool written = write_all(file.number(), {reinterpret_cast<const char*>(&header), sizeof header}) &&
                       write_all(file.number(), payload);
  int error = written ? 0 : errno != 0 ? errno : EIO;
  file = Descriptor();
  const std::string file_name = name + std::string(kSuffix);
  if (written && ::renameat(directory, temporary.c_str(), directory, file_name.c_str()) != 0) error = errno;
  if (error == 0) return "";
  ::unlinkat(directory, temporary.c_str(), 0);
  return error_text(error);
}

CubinCache::Info CubinCache::info() const {
  const OpenedFolder folder = open_folder(folder_, /*create=*/false);
  Info info{.folder = folder_, .problem = folder.missing ? "" : folder.problem};
  if (!folder.descriptor) return info;
  for_each_file(folder.descriptor.number(), [&](std::string_view file) {
    struct stat facts{};
    if (!is_entry(file) ||
        ::fstatat(folder.descriptor.number(), std::string(file).c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
      return;
    }
    ++info.num_entries;
    info.num_bytes += facts.st_size;
  });
  return info;
}

int64_t CubinCache::clear() const {
  const OpenedFolder folder = open_folder(folder_, /*create=*/false);
  if (!folder.descriptor) return 0;
  int64_t num_removed = 0;
  for_each_file(folder.descriptor.number(), [&](std::string_view file) {
    if (!is_entry(file) && !is_leftover(file)) return;
    const bool removed = ::unlinkat(folder.descriptor.number(), std::string(file).c_str(), 0) == 0;
    if (removed && is_entry(file)) ++num_removed;
  });
  return num_removed;
}

}  // namespace jattn::cuda
