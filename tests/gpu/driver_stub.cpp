// SPDX-License-Identifier: Apache-2.0
// Stands for libcuda.so.1 in the tests of machines that cannot serve: a driver of version DISTR_STUB_VERSION whose
// cuInit returns DISTR_STUB_INIT, and that does nothing else.
#include <cstdlib>
#include <string>

namespace {

int number(const char* name, int absent) {
  const char* text = std::getenv(name);
  return text == nullptr ? absent : std::atoi(text);
}

int unknown() { return 999; }

}  // namespace

// The names are those of the driver's API.
extern "C" {

int cuDriverGetVersion(int* version) {
  *version = number("DISTR_STUB_VERSION", 0);
  return 0;
}

int cuInit(unsigned /*flags*/) { return number("DISTR_STUB_INIT", 0); }

int cuGetExportTable(const void** /*table*/, const void* /*id*/) { return 1; }

int cuGetProcAddress(const char* name, void** function, int /*version*/, unsigned long /*flags*/) {
  const std::string wanted = name;
  *function = wanted == "cuInit"               ? reinterpret_cast<void*>(cuInit)
              : wanted == "cuDriverGetVersion" ? reinterpret_cast<void*>(cuDriverGetVersion)
                                               : reinterpret_cast<void*>(unknown);
  return 0;
}

}  // extern "C"
