// SPDX-License-Identifier: Apache-2.0
// `distr_gpu time`: how long every kernel of the CUDA backend takes, and its ablations, which leave a stage out.
#pragma once

#include <string>

namespace distr::test {

struct TimeOptions {
  std::string filter;      // only shapes whose label contains it, "B1 H10 d128 N16384 causal" for instance
  std::string kernel;      // only kernels whose name contains it
  std::string strategy;    // only this one; empty: all
  std::string operations;  // "forward,backward,grouping", or some of them; empty: all. By name alone "near_backward"
                           // (time_near_backward.h)
  std::string out;         // result file; empty: none
  std::string commit;      // for the result file
  std::string driver;      // likewise
  std::string command;     // likewise
  bool quick = false;      // a few shapes
};

// Prints a line for each measurement. Returns the exit status.
int time_kernels(const TimeOptions& options);

}  // namespace distr::test
