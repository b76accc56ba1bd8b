// SPDX-License-Identifier: Apache-2.0
#include "run_meta.h"

#include <array>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "distr/device.h"
#include "distr/version.h"
#include "options.h"

namespace distr::cli {
namespace {

std::string& command_line() {
  static std::string text = "distr";
  return text;
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text.data();
}

// As Linux names the first processor.
Json processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return nullptr;
}

// "580.159.04": of the kernel's module, which a container shows too.
Json driver_version() {
  std::ifstream file("/sys/module/nvidia/version");
  std::string version;
  return file >> version ? Json(version) : Json(nullptr);
}

}  // namespace

void remember_command(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) command_line() += std::string(" ") + argv[i];
}

Json run_meta(int threads, Device device) {
  const char* commit = std::getenv("DISTR_COMMIT");
  const char* disabled = std::getenv("DISTR_DISABLE_KERNELS");
  if (disabled == nullptr) {
    disabled = std::getenv("DISTR_LEAVE_OUT");  // its old name
  }
  const bool on_gpu = device == Device::cuda;
  const CudaDevice gpu = on_gpu ? cuda_device() : CudaDevice{};
  return {{"version", version()},
          {"command", command_line()},
          {"date", now()},
          {"commit", commit == nullptr ? Json(nullptr) : Json(commit)},
          {"cpu", processor_name()},
          {"gpu", on_gpu ? Json(gpu.name) : Json(nullptr)},
          {"driver", on_gpu ? driver_version() : Json(nullptr)},
          {"cuda", on_gpu ? Json(gpu.runtime) : Json(nullptr)},
          {"torch", nullptr},
          {"cudnn", nullptr},
          {"compiler", __VERSION__},
          {"build", DISTR_BUILD_TYPE},
          {"disabled_kernels", disabled == nullptr ? "" : disabled},
          {"instruction_set", instruction_set()},
          {"threads", threads > 0 ? threads : processor_count()}};
}

}  // namespace distr::cli
