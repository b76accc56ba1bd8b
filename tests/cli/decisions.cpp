// SPDX-License-Identifier: Apache-2.0
// Preloaded into the command: when it ends, standard error has how often it validated a problem, resolved a strategy
// and chose a kernel.
#include <iostream>

#include "distr/plan.h"

namespace {

struct AtEnd {
  ~AtEnd() {
    const distr::Decisions counted = distr::decisions();
    std::cerr << counted.validated << ' ' << counted.resolved << ' ' << counted.chosen << '\n';
  }
};
const AtEnd at_end;

}  // namespace
