// SPDX-License-Identifier: Apache-2.0
#include "gnuplot.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// A file without a name that gnuplot inherits: whatever ends either process, nothing is left behind.
class MemoryFile {
 public:
  explicit MemoryFile(const char* name) : descriptor_(memfd_create(name, 0)) {
    if (descriptor_ < 0) fail("memory for the plot");
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  MemoryFile(MemoryFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  MemoryFile& operator=(MemoryFile&&) = delete;
  ~MemoryFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  void write(const void* bytes, std::size_t count) const {
    const char* next = static_cast<const char*>(bytes);
    while (count > 0) {
      const ssize_t written = ::write(descriptor_, next, count);
      if (written < 0 && errno != EINTR) fail("memory for the plot");
      next += std::max<ssize_t>(written, 0);
      count -= static_cast<std::size_t>(std::max<ssize_t>(written, 0));
    }
  }

  [[nodiscard]] std::string read() const {
    std::string bytes(static_cast<std::size_t>(lseek(descriptor_, 0, SEEK_END)), '\0');
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t count = pread(descriptor_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
      if (count == 0 || (count < 0 && errno != EINTR)) fail("the plot could not be read back");
      done += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
    }
    return bytes;
  }

  [[nodiscard]] int descriptor() const { return descriptor_; }
  // As gnuplot, which has the same descriptors, can open it.
  [[nodiscard]] std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

class SpawnActions {
 public:
  explicit SpawnActions(const MemoryFile& messages) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions_, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions_, messages.descriptor(), STDERR_FILENO);
  }
  SpawnActions(const SpawnActions&) = delete;
  SpawnActions& operator=(const SpawnActions&) = delete;
  ~SpawnActions() { posix_spawn_file_actions_destroy(&actions_); }
  [[nodiscard]] const posix_spawn_file_actions_t* get() const { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_{};
};

// Runs `gnuplot argument` and returns its wait status.
int spawn_gnuplot(const std::string& argument, const MemoryFile& messages) {
  std::string words[] = {"gnuplot", "-d", argument};
  char* const arguments[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
  const SpawnActions actions(messages);
  pid_t process = 0;
  const int error = posix_spawnp(&process, "gnuplot", actions.get(), nullptr, arguments, environ);
  if (error != 0) {
    throw std::runtime_error(std::string("gnuplot cannot be run (") + std::strerror(error) +
                             "); install Debian's package gnuplot-nox");
  }
  int status = 0;
  while (waitpid(process, &status, 0) < 0) {
    if (errno != EINTR) fail("waiting for gnuplot");
  }
  return status;
}

// gnuplot prints the line, a caret under the fault, and a sentence that begins with file and line.
std::string last_line(const std::string& text) {
  const std::size_t end = text.find_last_not_of("\n ");
  if (end == std::string::npos) return "no message";
  const std::size_t start = text.rfind('\n', end);
  return text.substr(start + 1, end - start);
}

}  // namespace

PictureFormat picture_format(const std::string& path) {
  const auto extension = std::filesystem::path(path).extension();
  if (extension == ".png") return PictureFormat::png;
  if (extension == ".svg") return PictureFormat::svg;
  throw InputError("--plot: " + quoted(path) + " has the extension " + quoted(extension.string()) +
                   "; allowed: .png, .svg");
}

std::string terminal(PictureFormat format, double width, double height, int font_size) {
  return std::string("set terminal ") + (format == PictureFormat::png ? "pngcairo" : "svg background '#ffffff'") +
         " size " + general(width, 6) + "," + general(height, 6) + " font 'DejaVu Sans," + std::to_string(font_size) +
         "'\n";
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

void require_gnuplot() {
  const MemoryFile messages("messages");
  if (spawn_gnuplot("--version", messages) != 0) {
    throw std::runtime_error("gnuplot --version failed; install Debian's package gnuplot-nox");
  }
}

std::vector<std::byte> run_gnuplot(const std::string& script, const std::map<std::string, std::vector<double>>& data) {
  const MemoryFile messages("messages");
  const MemoryFile picture("picture");
  const MemoryFile script_file("script");
  std::string names = "picture = '" + picture.path() + "'\n";
  std::vector<MemoryFile> files;
  for (const auto& [name, values] : data) {
    const MemoryFile& file = files.emplace_back(name.c_str());
    file.write(values.data(), values.size() * sizeof(double));
    names += name + " = '" + file.path() + "'\n";
  }
  script_file.write(names.data(), names.size());
  script_file.write(script.data(), script.size());
  const int status = spawn_gnuplot(script_file.path(), messages);
  const std::string drawn = picture.read();
  if (status != 0 || drawn.empty()) throw std::runtime_error("gnuplot failed: " + last_line(messages.read()));
  std::vector<std::byte> bytes(drawn.size());
  std::memcpy(bytes.data(), drawn.data(), drawn.size());
  return bytes;
}

}  // namespace distr::cli
