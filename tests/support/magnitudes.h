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
                                             "energy, wide heads, blocks of 64 rows",
                                             "near, energy, window 127, sinks, wide heads, bottom right",
                                             "skip, exact, nothing is skipped",
                                             "sliding window, causal bottom-right, more keys",
                                             "softcap",
                                             "skip, exact, nothing is skipped, wide heads"};

// One case for each way that a kernel on a GPU sums values, for --filter "large values", and where nothing is left out.
inline constexpr const char* kWithLargeValues[] = {"one more than a tile",
                                                   "causal bottom-right, more keys",
                                                   "huge scores, many keys",
                                                   "boolean mask, wide heads, GQA",
                                                   "few rows, keys split",
                                                   "lsh, G 4",
                                                   "lsh, one block",
                                                   "energy, one block, low scores",
                                                   "energy, wide heads, blocks of 64 rows",
                                                   "near, energy, window 127, sinks, wide heads, bottom right",
                                                   "near, energy, one block, GQA",
                                                   "near, lsh, window 100, sinks",
                                                   "skip, exact",
                                                   "skip, exact, causal, wide heads",
                                                   "skip, energy",
                                                   "skip, energy, one block"};

enum class Use : std::uint8_t { forward, backward };

// The case with Q and K times powers of 2, from about 1e-30 to 1e30 as far as its dtype holds them, and its sums of
// columns.
[[nodiscard]] std::vector<Instance> magnified(const Case& test_case, Use use = Use::forward);

// The case with values that are in range when they are times 2^kLargePower, while sums of four of them are not: all of
// one sign, of random ones, and those of one key alone, beside 0. None in fp16.
inline constexpr int kLargePower = 127;
void scale_by_power(Buffer& buffer, int power);
[[nodiscard]] std::vector<Instance> with_large_values(const Case& test_case);

}  // namespace distr::test
