// SPDX-License-Identifier: Apache-2.0
// `distr_gpu check`: every kernel of the CUDA backend on the shared problems and on larger ones.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/cases.h"

namespace distr::test {

struct CheckOptions {
  std::string filter;      // only cases whose name contains it
  std::string except;      // none whose name contains it; empty: no case is left out
  std::string name;        // only the case of this name, or with the filter "properties" the property
  std::string kernel;      // only kernels whose name contains it; with '=' before it, that one
  bool small = false;      // a few small cases, for compute-sanitizer
  bool thin = false;       // leaves out much of f16, and of exact cases half of bf16 (docs/kernels/emulator.md)
  int jobs = 0;            // cases at a time; 0: one for each processor
  double time_limit = 60;  // seconds for one case
};

// Whether nothing is left out.
bool is_whole(const CheckOptions& options);
// Prints what failed and a line for each kernel. Returns the exit status.
int check(const CheckOptions& options);
// Prints the names of the cases of CheckOptions::small, a line each.
int print_small_cases();

}  // namespace distr::test
