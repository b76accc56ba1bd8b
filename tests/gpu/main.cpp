// SPDX-License-Identifier: Apache-2.0
// distr_gpu: correctness and times of every kernel of the CUDA backend, in one program that needs nothing but a driver.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "gpu/device_run.h"
#include "gpu/launches.h"
#include "gpu/suite.h"
#include "gpu/time.h"
#include "kernel.h"

namespace distr::test {
namespace {

constexpr const char* kUsage =
    "distr_gpu check [--filter CASE] [--case CASE] [--kernel NAME] [--small] [--uninitialized] [--jobs N] "
    "[--time-limit SECONDS] [--cases FILE]\n"
    "distr_gpu time  [--op forward,backward,grouping] [--filter SHAPE] [--kernel NAME] [--strategy NAME] [--quick] "
    "[--out FILE.json] [--commit ID] [--driver VERSION]\n"
    "distr_gpu list  [--small]\n"
    "--filter and --kernel take a part of a name, --kernel =NAME of a check that kernel alone; --cases is\n"
    "tests/cases.json unless given. A check of all cases and kernels fails if a kernel in this program was never\n"
    "launched. The first two take --launches FILE.json, for tools/register_table.py. list prints the kernels, or the\n"
    "cases of check --small.\n";

// The words of the command line behind the command: "--name value" or a flag.
class Words {
 public:
  Words(int count, char** words) : words_(words, words + count) {}

  std::optional<std::string> value(const std::string& name) {
    for (std::size_t n = 0; n + 1 < words_.size(); ++n) {
      if (words_[n] == name) {
        const std::string result = words_[n + 1];
        words_.erase(words_.begin() + static_cast<std::ptrdiff_t>(n),
                     words_.begin() + static_cast<std::ptrdiff_t>(n) + 2);
        return result;
      }
    }
    return std::nullopt;
  }
  bool flag(const std::string& name) { return std::erase(words_, name) > 0; }
  [[nodiscard]] const std::vector<std::string>& left() const { return words_; }

 private:
  std::vector<std::string> words_;
};

int print_kernels() {
  for (const KernelInfo& kernel : list()) {
    if (kernel.device == Device::cuda) {
      std::printf("%s\n", kernel.name.c_str());
    }
  }
  return 0;
}

// Kernels that a check of everything left out are kernels that nobody has checked. Returns the exit status.
int print_never_launched() {
  const std::vector<std::string> names = never_launched();
  for (const std::string& name : names) {
    std::printf("FAILED never launched: %s\n", name.c_str());
  }
  return names.empty() ? 0 : 1;
}

int run(const std::string& command, const std::string& command_line, Words& words) {
  CheckOptions check_options;
  TimeOptions time_options;
  time_options.command = command_line;
  check_options.filter = time_options.filter = words.value("--filter").value_or("");
  check_options.kernel = time_options.kernel = words.value("--kernel").value_or("");
  check_options.name = words.value("--case").value_or("");
  check_options.jobs = std::stoi(words.value("--jobs").value_or("0"));
  check_options.time_limit = std::stod(words.value("--time-limit").value_or("60"));
  check_options.small = words.flag("--small");
  if (words.flag("--uninitialized")) {
    leave_workspace_uninitialized();
  }
  time_options.quick = words.flag("--quick");
  time_options.operations = words.value("--op").value_or("");
  time_options.strategy = words.value("--strategy").value_or("");
  time_options.out = words.value("--out").value_or("");
  time_options.commit = words.value("--commit").value_or("");
  time_options.driver = words.value("--driver").value_or("");
  setenv("DISTR_CASES_FILE", words.value("--cases").value_or("tests/cases.json").c_str(), 1);
  const std::optional<std::string> launches = words.value("--launches");
  if (!words.left().empty()) {
    std::cerr << "unknown: " << words.left().front() << "\n" << kUsage;
    return 2;
  }
  if (command == "list") {
    return check_options.small ? print_small_cases() : print_kernels();
  }
  std::string reason;
  const auto devices = cuda_device_names(reason);
  if (devices.empty()) {
    std::cerr << "nothing can run: " << reason << "\n";
    return 2;
  }
  std::printf("on %s\n", devices.front().c_str());
  int status = command == "check" ? check(check_options) : time_kernels(time_options);
  if (command == "check" && is_whole(check_options)) {
    status = std::max(status, print_never_launched());
  }
  if (launches) {
    write_launches(*launches);
  }
  return status;
}

}  // namespace
}  // namespace distr::test

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command != "check" && command != "time" && command != "list") {
    std::cerr << distr::test::kUsage;
    return 2;
  }
  std::string command_line = "distr_gpu";  // for results, which do not name a machine's folders
  for (int n = 1; n < argc; ++n) {
    const std::filesystem::path word = argv[n];
    command_line += " " + (word.is_absolute() ? word.filename() : word).string();
  }
  distr::test::Words words(argc - 2, argv + 2);
  try {
    return distr::test::run(command, command_line, words);
  } catch (const std::exception& error) {
    std::cerr << "distr_gpu: " << error.what() << "\n";
    return 2;
  }
}
