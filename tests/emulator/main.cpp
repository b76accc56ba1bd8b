// SPDX-License-Identifier: Apache-2.0
// cuda_emulated: `distr_gpu check` without a GPU. Options: --filter CASE --except CASE --case CASE --kernel NAME,
// or =NAME for one kernel, --jobs N --small --thin --seed N.
#include <cstdlib>
#include <iostream>
#include <string>

#include "emulator/launch.h"
#include "gpu/suite.h"

int main(int argc, char** argv) {
  distr::test::CheckOptions options;
  options.jobs = 1;
  options.time_limit = 600;
  for (int n = 1; n < argc; ++n) {
    const std::string word = argv[n];
    if (word == "--small") {
      options.small = true;
      continue;
    }
    if (word == "--thin") {
      options.thin = true;
      continue;
    }
    const std::string value = n + 1 < argc ? argv[++n] : "";
    if (word == "--filter") {
      options.filter = value;
    } else if (word == "--except") {
      options.except = value;
    } else if (word == "--case") {
      options.name = value;
    } else if (word == "--kernel") {
      options.kernel = value;
    } else if (word == "--jobs") {
      options.jobs = std::stoi(value);
    } else if (word == "--seed") {
      distr::emulator::set_seed(std::stoull(value));
    } else {
      std::cerr << "unknown: " << word << "\n";
      return 2;
    }
  }
  setenv("DISTR_CASES_FILE", "tests/cases.json", 0);
  try {
    return distr::test::check(options);
  } catch (const std::exception& error) {
    std::cerr << "cuda_emulated: " << error.what() << "\n";
    return 2;
  }
}
