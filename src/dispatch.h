// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a call: the backends' entries in order of preference.
#pragma once

#include <string>

#include "kernel.h"

namespace distr {

struct Resolved {
  Grouping grouping;   // without `automatic`
  std::string choice;  // one sentence: what and why
};

// Replaces `automatic` by what pays on `device` (method, 2, "Strategy auto").
Resolved resolve(const Problem& problem, const Grouping& grouping, Device device);

}  // namespace distr
