// SPDX-License-Identifier: Apache-2.0
// Output files by way of unnamed files (O_TMPFILE), or of named temporary ones where the file system lacks those. The
// names of temporary files are also known to a signal handler, so that Ctrl-C removes them.
#include "output_files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "tensor.h"

namespace distr::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::initializer_list<int> kEndingSignals{SIGINT, SIGTERM, SIGHUP};

std::string describe(int error) { return std::generic_category().message(error); }

[[noreturn]] void refuse_to_write(const fs::path& path, int error, const char* allowed) {
  if (error == ENOSPC || error == EDQUOT) {
    throw WriteError("cannot write " + on_one_line(path.string()) + ": " + describe(error));
  }
  refuse(path.string(), "cannot be written: " + describe(error), allowed);
}

// Holds signals back from this thread while it lives.
class SignalBlock {
 public:
  explicit SignalBlock(std::initializer_list<int> signals) {
    sigemptyset(&blocked_);
    for (const int signal : signals) sigaddset(&blocked_, signal);
    pthread_sigmask(SIG_BLOCK, &blocked_, &before_);
  }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;
  ~SignalBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  void discard_pending() {
    const timespec no_wait{};
    while (sigtimedwait(&blocked_, nullptr, &no_wait) > 0) {
    }
  }

 private:
  sigset_t blocked_{};
  sigset_t before_{};
};

// The names that the signal handler removes. They lie in static storage, since a handler may not touch the heap.
struct DoomedName {
  std::atomic<bool> taken;
  std::atomic<bool> complete;
  std::array<char, PATH_MAX> path;
};

std::array<DoomedName, 16> doomed_names;
static_assert(std::atomic<bool>::is_always_lock_free);

extern "C" void remove_temporary_files(int signal) {
  for (DoomedName& name : doomed_names) {
    if (name.complete) ::unlink(name.path.data());
  }
  ::raise(signal);  // its default action, which SA_RESETHAND restored, follows when this function returns
}

// A signal that is ignored (nohup) or that the program handles itself is left alone.
void install_signal_handler() {
  for (const int signal : kEndingSignals) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0) continue;
    if (action.sa_handler != SIG_DFL) continue;
    action = {};
    action.sa_handler = remove_temporary_files;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigfillset(&action.sa_mask);
    ::sigaction(signal, &action, nullptr);
  }
}

// A temporary file's name in a folder, removed with the object.
class TemporaryName {
 public:
  TemporaryName() = default;
  TemporaryName(TemporaryName&& other) noexcept
      : path_(std::exchange(other.path_, {})), doomed_(std::exchange(other.doomed_, nullptr)) {}
  TemporaryName& operator=(TemporaryName&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(doomed_, other.doomed_);
    return *this;
  }
  ~TemporaryName() {
    if (path_.empty()) return;
    ::unlink(path_.c_str());
    release();
  }

  // Calls create(name) with new names until one does not exist yet. Returns what `create` did: -1 is failure.
  template <typename Create>
  int create_beside(const fs::path& target, const Create& create) {
    constexpr std::size_t kMaxStemBytes = 200;  // most file systems allow names of 255 bytes
    constexpr int kMaxAttempts = 1000;
    static std::atomic<unsigned> next_number = 0;
    const SignalBlock block(kEndingSignals);  // between the creation of the file and the note of its name
    for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
      const std::string stem = "." + target.filename().string().substr(0, kMaxStemBytes);
      const std::string number = std::to_string(::getpid()) + "." + std::to_string(next_number++);
      std::string path = (target.parent_path() / (stem + "." + number + ".tmp")).string();
      const int result = create(path.c_str());
      if (result < 0 && errno == EEXIST) continue;
      if (result >= 0) keep(std::move(path));
      return result;
    }
    errno = EEXIST;
    return -1;
  }

  [[nodiscard]] bool exists() const { return !path_.empty(); }

  // False, with errno, on failure.
  bool rename_to(const fs::path& target) {
    if (::rename(path_.c_str(), target.c_str()) != 0) return false;
    release();
    return true;
  }

 private:
  void keep(std::string path) {
    path_ = std::move(path);
    install_signal_handler();
    for (DoomedName& name : doomed_names) {
      if (path_.size() >= name.path.size() || name.taken.exchange(true)) continue;
      std::memcpy(name.path.data(), path_.c_str(), path_.size() + 1);
      name.complete = true;
      doomed_ = &name;
      return;
    }
  }

  void release() {
    path_.clear();
    if (doomed_ == nullptr) return;
    doomed_->complete = false;
    doomed_->taken = false;
    doomed_ = nullptr;
  }

  std::string path_;  // empty: no file
  DoomedName* doomed_ = nullptr;
};

// Follows links by hand, since the last one may point to a file that does not exist yet.
fs::path follow_links(const fs::path& path) {
  constexpr int kMaxLinks = 40;
  std::error_code error;
  fs::path result = path;
  for (int count = 0; count < kMaxLinks && fs::is_symlink(fs::symlink_status(result, error)); ++count) {
    result = result.parent_path() / fs::read_symlink(result, error);
  }
  return result;
}

// The absolute path of the file that `path` stands for. Its folder exists.
fs::path resolve(const fs::path& path) {
  constexpr const char* kNeedFolder = "a path in an existing folder is needed";
  const fs::path target = follow_links(path);
  const fs::path folder = target.parent_path().empty() ? "." : target.parent_path();
  if (target.filename().empty()) refuse(path.string(), "names no file", "a file name is needed");
  std::error_code error;
  const fs::path absolute_folder = fs::canonical(folder, error);
  if (error) refuse(path.string(), "its folder cannot be used: " + error.message(), kNeedFolder);
  if (!fs::is_directory(absolute_folder, error)) refuse(path.string(), "its folder is no folder", kNeedFolder);
  return absolute_folder / target.filename();
}

// The permissions of the file to be replaced; -1 if there is none.
int check_existing(const fs::path& path) {
  constexpr const char* kNeedRegular = "a new file, or a regular file to replace, is needed";
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return -1;  // what lacks is for resolve() to say
    refuse_to_write(path, errno, kNeedRegular);
  }
  if (S_ISDIR(status.st_mode)) refuse(path.string(), "is a folder, not a regular file", kNeedRegular);
  if (!S_ISREG(status.st_mode)) {
    refuse(path.string(), "is a pipe, socket or device, not a regular file", kNeedRegular);
  }
  if (::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0) {
    refuse_to_write(path, errno, "a writable file is needed");
  }
  return static_cast<int>(status.st_mode & 0777U);
}

std::string descriptor_path(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

// -1, with errno, on failure; EOPNOTSUPP where unnamed files cannot be had or could not be named later (no /proc).
int open_unnamed(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    if (errno == EISDIR || errno == ENOENT) errno = EOPNOTSUPP;  // so say kernels and file systems without O_TMPFILE
    return -1;
  }
  if (::access(descriptor_path(descriptor).c_str(), F_OK) == 0) return descriptor;
  ::close(descriptor);
  errno = EOPNOTSUPP;
  return -1;
}

// 0, or errno.
int write_fully(int descriptor, std::span<const std::byte> bytes) {
  SignalBlock block({SIGXFSZ});  // write() then reports EFBIG instead of ending the process
  if (::ftruncate(descriptor, 0) != 0) return errno;
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = ::pwrite(descriptor, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const int error = errno;
      if (error == EFBIG) block.discard_pending();
      return error;
    }
    done += static_cast<std::size_t>(count);
  }
  while (::fsync(descriptor) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace

struct OutputFiles::File {
  File(fs::path given, fs::path resolved) : path(std::move(given)), target(std::move(resolved)) {}
  File(File&& other) noexcept
      : path(std::move(other.path)),
        target(std::move(other.target)),
        descriptor(std::exchange(other.descriptor, -1)),
        temporary(std::move(other.temporary)),
        written(other.written) {}
  ~File() {
    if (descriptor >= 0) ::close(descriptor);
  }

  void open() {
    descriptor = open_unnamed(target.parent_path());
    if (descriptor < 0 && errno == EOPNOTSUPP) {
      descriptor = temporary.create_beside(
          target, [](const char* name) { return ::open(name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666); });
    }
    if (descriptor < 0) refuse_to_write(path, errno, "a path in a writable folder is needed");
  }

  // rename() replaces an existing file, linkat() would not: so an unnamed file first gets a temporary name.
  void give_temporary_name() {
    if (temporary.exists()) return;
    const std::string source = descriptor_path(descriptor);
    const int result = temporary.create_beside(target, [&](const char* name) {
      return ::linkat(AT_FDCWD, source.c_str(), AT_FDCWD, name, AT_SYMLINK_FOLLOW);
    });
    if (result != 0) refuse_to_write(path, errno, "a path in a writable folder is needed");
  }

  fs::path path;    // as given, for messages
  fs::path target;  // absolute, links followed
  int descriptor = -1;
  TemporaryName temporary;
  bool written = false;
};

OutputFiles::OutputFiles() = default;
OutputFiles::~OutputFiles() = default;

void OutputFiles::keep(const fs::path& input) {
  if (!input.empty()) kept_.push_back(input);
}

void OutputFiles::reserve(const fs::path& path) {
  const int permissions = check_existing(path);
  const fs::path target = resolve(path);
  for (const File& other : files_) {
    if (other.target != target) continue;
    refuse(path.string(), "is the same file as the output " + on_one_line(other.path.string()),
           "each output needs its own path");
  }
  for (const fs::path& input : kept_) {
    std::error_code none_there;
    if (!fs::equivalent(path, input, none_there)) continue;
    refuse(path.string(), "is the same file as the input " + on_one_line(input.string()),
           "a path of its own is needed");
  }
  File file(path, target);
  file.open();
  if (permissions >= 0 && ::fchmod(file.descriptor, static_cast<mode_t>(permissions)) != 0) {
    refuse_to_write(path, errno, "a path in a writable folder is needed");
  }
  files_.push_back(std::move(file));
}

void OutputFiles::write(const fs::path& path, std::span<const std::byte> bytes) {
  const auto file = std::find_if(files_.begin(), files_.end(), [&](const File& each) { return each.path == path; });
  if (file == files_.end()) throw std::invalid_argument("the output " + path.string() + " was not reserved");
  file->written = false;
  const int error = write_fully(file->descriptor, bytes);
  if (error != 0) throw WriteError("cannot write " + on_one_line(path.string()) + ": " + describe(error));
  file->written = true;
}

void OutputFiles::commit() {
  for (const File& file : files_) {
    if (!file.written) throw std::logic_error("the output " + file.path.string() + " was not written");
  }
  const SignalBlock block(kEndingSignals);
  std::vector<File> files = std::move(files_);
  files_.clear();
  for (File& file : files) file.give_temporary_name();
  for (File& file : files) {
    if (!file.temporary.rename_to(file.target)) {
      refuse_to_write(file.path, errno, "a new file, or a regular file to replace, is needed");
    }
  }
}

}  // namespace distr::cli
