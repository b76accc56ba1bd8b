// SPDX-License-Identifier: Apache-2.0
// Output files appear whole or not at all, also when the process is killed, the disk is full, or the file system has no
// unnamed files.
#include "output_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>

#include "file_bytes.h"
#include "tensor.h"

namespace distr::cli {
namespace {

namespace fs = std::filesystem;

std::string content_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void put(const fs::path& path, const std::string& content) { std::ofstream(path, std::ios::binary) << content; }

void reserve_and_write(OutputFiles& files, const fs::path& path, const std::string& content) {
  files.reserve(path);
  files.write(path, bytes_of(content));
}

template <typename Action>
std::string refusal(const Action& action) {
  try {
    action();
  } catch (const InputError& error) {
    return error.what();
  } catch (const WriteError& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Makes open(O_TMPFILE) fail in this process as it does on a file system without unnamed files.
void forbid_unnamed_files() {
  constexpr std::uint32_t kFlag = O_TMPFILE & ~O_DIRECTORY;
  std::array filter{
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args) + 2 * sizeof(std::uint64_t)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kFlag, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) std::abort();
  if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) std::abort();
}

// The wait status of a child that runs `action` and then exits with 0; with 1 after an exception.
int status_of_child(const std::function<void()>& action) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      action();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

bool killed_by(int status, int signal) { return WIFSIGNALED(status) && WTERMSIG(status) == signal; }

bool succeeded(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

class OutputFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "output_test.XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = fs::canonical(pattern);
    put(folder_ / "old.npy", "old");
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Every name in the folder with its content.
  [[nodiscard]] std::map<std::string, std::string> snapshot() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      files[entry.path().filename()] = entry.is_regular_file() ? content_of(entry) : "";
    }
    return files;
  }

  fs::path folder_;
};

TEST_F(OutputFilesTest, HoldAnyNumberOfBytes) {
  OutputFiles files;
  const std::string large(3'000'001, 'x');
  files.reserve(folder_ / "empty");
  files.reserve(folder_ / "large");
  files.write(folder_ / "empty", {});
  files.write(folder_ / "large", bytes_of(large + large));
  files.write(folder_ / "large", bytes_of(large));  // the last write counts
  files.commit();
  EXPECT_EQ(content_of(folder_ / "large"), large);
  EXPECT_TRUE(fs::is_empty(folder_ / "empty"));
}

TEST_F(OutputFilesTest, AcceptRelativePathsAndLongNames) {
  const auto child = [&] {
    require(::chdir(folder_.c_str()) == 0, "chdir");
    OutputFiles files;
    const std::string long_name(255, 'n');
    files.reserve("relative");
    files.reserve(long_name);
    require(::chdir("/") == 0, "chdir");
    files.write("relative", bytes_of("r"));
    files.write(long_name, bytes_of("l"));
    files.commit();
  };
  EXPECT_TRUE(succeeded(status_of_child(child)));
  EXPECT_EQ(content_of(folder_ / "relative"), "r");
  EXPECT_EQ(content_of(folder_ / std::string(255, 'n')), "l");
}

TEST_F(OutputFilesTest, HonourUmaskAndKeepPermissions) {
  const auto permissions = [](const fs::path& path) { return static_cast<int>(fs::status(path).permissions()); };
  fs::permissions(folder_ / "old.npy", static_cast<fs::perms>(0600));
  const mode_t before = ::umask(0027);
  OutputFiles files;
  for (const char* name : {"new.npy", "old.npy"}) {
    reserve_and_write(files, folder_ / name, "x");
  }
  files.commit();
  ::umask(before);
  EXPECT_EQ(permissions(folder_ / "new.npy"), 0640);
  EXPECT_EQ(permissions(folder_ / "old.npy"), 0600);
}

TEST_F(OutputFilesTest, WriteThroughLinks) {
  fs::create_directory(folder_ / "sub");
  put(folder_ / "sub" / "target", "old");
  fs::create_symlink("sub/target", folder_ / "link");
  fs::create_symlink(folder_ / "link", folder_ / "link_to_link");
  fs::create_symlink("sub/missing", folder_ / "dangling");
  OutputFiles files;
  for (const char* name : {"link_to_link", "dangling"}) {
    reserve_and_write(files, folder_ / name, name);
  }
  EXPECT_TRUE(contains(refusal([&] { files.reserve(folder_ / "link"); }), "same file"));
  files.commit();
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_TRUE(fs::is_symlink(folder_ / "link_to_link"));
  EXPECT_TRUE(fs::is_symlink(folder_ / "dangling"));
  EXPECT_EQ(content_of(folder_ / "sub" / "target"), "link_to_link");
  EXPECT_EQ(content_of(folder_ / "sub" / "missing"), "dangling");
}

TEST_F(OutputFilesTest, RefusesTheSamePathTwice) {
  fs::create_directory(folder_ / "sub");
  fs::create_directory_symlink("sub", folder_ / "alias");
  OutputFiles files;
  files.reserve(folder_ / "sub" / "a.npy");
  for (const fs::path& same :
       {folder_ / "sub" / "a.npy", folder_ / "sub" / ".." / "sub" / "." / "a.npy", folder_ / "alias" / "a.npy"}) {
    const std::string message = refusal([&] { files.reserve(same); });
    EXPECT_TRUE(contains(message, same.string() + ": is the same file as")) << message;
  }
  files.reserve(folder_ / "a.npy");  // the same name elsewhere
}

TEST_F(OutputFilesTest, RefusesWhatIsNoRegularFile) {
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const fs::path socket_path = folder_ / "socket";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(socket_path.string().size(), sizeof address.sun_path);
  std::memcpy(address.sun_path, socket_path.c_str(), socket_path.string().size() + 1);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ::close(socket);
  fs::create_symlink("/dev/full", folder_ / "to_device");
  const auto before = snapshot();
  OutputFiles files;
  for (const fs::path& path : {fs::path("/dev/full"), fs::path("/dev/null"), pipe, socket_path, folder_, folder_ / "",
                               folder_ / "..", folder_ / "to_device"}) {
    const std::string message = refusal([&] { files.reserve(path); });
    EXPECT_TRUE(message.starts_with(path.string() + ": ")) << message;
    EXPECT_TRUE(contains(message, "not a regular file")) << message;
  }
  EXPECT_EQ(snapshot(), before);
}

TEST_F(OutputFilesTest, RefusesPathsWithoutAFolder) {
  fs::create_symlink("loop", folder_ / "loop");
  OutputFiles files;
  const std::vector<std::pair<fs::path, std::string>> cases{
      {folder_ / "none" / "a.npy", "folder cannot be used: No such"},
      {folder_ / "none" / "", "names no file"},
      {"", "names no file"},
      {folder_ / "old.npy" / "a", "folder"},
      {folder_ / "loop", "Too many levels"},
      {folder_ / std::string(256, 'n'), "too long"}};
  for (const auto& [path, part] : cases) {
    const std::string message = refusal([&, &name = path] { files.reserve(name); });
    EXPECT_TRUE(message.starts_with(path.string() + ": ")) << message;
    EXPECT_TRUE(contains(message, part)) << message;
    EXPECT_TRUE(contains(message, "; ")) << message;
  }
}

TEST_F(OutputFilesTest, RefusesWhatIsNotWritable) {
  fs::permissions(folder_ / "old.npy", static_cast<fs::perms>(0444));
  fs::create_directory(folder_ / "locked");
  fs::permissions(folder_ / "locked", static_cast<fs::perms>(0555));
  fs::permissions(folder_, static_cast<fs::perms>(0755));
  const auto child = [&] {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0) require(::setuid(kNobody) == 0, "setuid");  // root may write anywhere
    OutputFiles files;
    for (const fs::path& path : {folder_ / "old.npy", folder_ / "locked" / "a.npy"}) {
      const std::string message = refusal([&] { files.reserve(path); });
      require(contains(message, "cannot be written: Permission denied"), message.c_str());
    }
  };
  EXPECT_TRUE(succeeded(status_of_child(child)));
}

TEST_F(OutputFilesTest, MisuseIsALogicError) {
  OutputFiles files;
  EXPECT_THROW(files.write(folder_ / "a", {}), std::invalid_argument);
  files.reserve(folder_ / "a");
  EXPECT_THROW(files.commit(), std::logic_error);
}

TEST_F(OutputFilesTest, CommitThatFailsLeavesNothing) {
  fs::create_directory(folder_ / "sub");
  const auto before = snapshot();
  OutputFiles files;
  for (const fs::path& path : {folder_ / "a", folder_ / "sub" / "b"}) {
    reserve_and_write(files, path, "x");
  }
  fs::remove(folder_ / "sub");
  EXPECT_TRUE(contains(refusal([&] { files.commit(); }), "sub/b: cannot be written: No such file"));
  fs::create_directory(folder_ / "sub");
  EXPECT_EQ(snapshot(), before);
}

// Each of these with unnamed files and with named temporary ones.
class OutputFilesOnBoth : public OutputFilesTest, public ::testing::WithParamInterface<bool> {
 protected:
  static void prepare() {
    if (GetParam()) forbid_unnamed_files();
  }
};

TEST_P(OutputFilesOnBoth, Commit) {
  const auto child = [&] {
    prepare();
    const auto before = snapshot();
    OutputFiles files;
    files.reserve(folder_ / "new.npy");
    files.reserve(folder_ / "old.npy");
    require((snapshot() != before) == GetParam(), "a named file exists exactly where unnamed files are forbidden");
    files.write(folder_ / "new.npy", bytes_of("first"));
    files.write(folder_ / "old.npy", bytes_of("second"));
    require(content_of(folder_ / "old.npy") == "old", "the old file stays until commit");
    require(!fs::exists(folder_ / "new.npy"), "the new file is not there before commit");
    files.commit();
  };
  EXPECT_TRUE(succeeded(status_of_child(child)));
  EXPECT_EQ(snapshot(), (std::map<std::string, std::string>{{"new.npy", "first"}, {"old.npy", "second"}}));
}

TEST_P(OutputFilesOnBoth, ASignalLeavesNothing) {
  const auto before = snapshot();
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGKILL}) {
    if (signal == SIGKILL && GetParam()) continue;  // nothing can remove a named file then
    const auto child = [&] {
      prepare();
      OutputFiles files;
      for (const char* name : {"new.npy", "old.npy"}) {
        reserve_and_write(files, folder_ / name, "second");
      }
      ::raise(signal);
    };
    EXPECT_TRUE(killed_by(status_of_child(child), signal));
    EXPECT_EQ(snapshot(), before);
  }
}

TEST_P(OutputFilesOnBoth, VanishWithoutCommit) {
  const auto before = snapshot();
  const auto child = [&] {
    prepare();
    OutputFiles files;
    reserve_and_write(files, folder_ / "new.npy", "text");
    files.reserve(folder_ / "old.npy");
  };
  EXPECT_TRUE(succeeded(status_of_child(child)));
  EXPECT_EQ(snapshot(), before);
}

TEST_P(OutputFilesOnBoth, AFullDiskLeavesNothing) {
  const auto before = snapshot();
  const auto child = [&] {
    prepare();
    OutputFiles files;
    files.reserve(folder_ / "new.npy");
    files.reserve(folder_ / "old.npy");
    const rlimit limit{1000, 1000};
    require(::setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
    files.write(folder_ / "new.npy", Bytes(1000));
    const std::string message = refusal([&] { files.write(folder_ / "old.npy", Bytes(1001)); });
    require(message == "cannot write " + (folder_ / "old.npy").string() + ": File too large", message.c_str());
  };
  EXPECT_TRUE(succeeded(status_of_child(child)));
  EXPECT_EQ(snapshot(), before);
}

INSTANTIATE_TEST_SUITE_P(, OutputFilesOnBoth, ::testing::Bool(),
                         [](const auto& instance) { return instance.param ? "NamedTemporaries" : "UnnamedFiles"; });

TEST_F(OutputFilesTest, IgnoredSignalsStayIgnored) {
  const auto child = [&] {
    ::signal(SIGHUP, SIG_IGN);
    forbid_unnamed_files();
    OutputFiles files;
    files.reserve(folder_ / "new.npy");
    ::raise(SIGHUP);
    files.write(folder_ / "new.npy", bytes_of("text"));
    files.commit();
  };
  EXPECT_TRUE(succeeded(status_of_child(child)));
  EXPECT_EQ(content_of(folder_ / "new.npy"), "text");
}

TEST_F(OutputFilesTest, ForeignTemporaryFilesStay) {
  const auto child = [&] {
    // The first names that the child would try.
    for (int number = 0; number < 5; ++number) {
      put(folder_ / (".new.npy." + std::to_string(::getpid()) + "." + std::to_string(number) + ".tmp"), "foreign");
    }
    forbid_unnamed_files();
    OutputFiles files;
    files.reserve(folder_ / "new.npy");
    ::raise(SIGTERM);
  };
  EXPECT_TRUE(killed_by(status_of_child(child), SIGTERM));
  const auto after = snapshot();
  EXPECT_EQ(after.size(), 6U);
  EXPECT_EQ(std::count_if(after.begin(), after.end(), [](const auto& file) { return file.second == "foreign"; }), 5);
}

}  // namespace
}  // namespace distr::cli
