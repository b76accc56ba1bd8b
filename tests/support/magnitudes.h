// SPDX-License-Identifier: Apache-2.0
// Scores of every magnitude: the softmax knows their differences alone.
#pragma once

#include <string>
#include <vector>

#include "support/cases.h"

namespace distr::test {

// One case for each way that a kernel on a GPU gets its scores: for --filter magnitudes, and where nothing is left out.
inline constexpr const char* kMagnified[] = {"one more than a tile",
                                             "causal bottom-right, more keys",
                                             "causal, best key first, far above the others",
                                             "boolean mask, wide heads, GQA",
                                             "additive mask",
                                             "few rows, keys split",
                                             "lsh, G 4",
                                             "lsh, one block",
                                             "energy, wide heads, blocks of 64 rows"};

enum class Use : std::uint8_t { forward, backward };

// The case with Q and K times powers of 2, from about 1e-30 to 1e30 as far as its dtype holds them, and its sums of
// columns.
[[nodiscard]] std::vector<Instance> magnified(const Case& test_case, Use use = Use::forward);

}  // namespace distr::test
