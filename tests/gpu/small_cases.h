// SPDX-License-Identifier: Apache-2.0
// `distr_gpu check --small`.
#pragma once

namespace distr::test {

// What compute-sanitizer sees: one case for each way that a kernel addresses memory.
inline constexpr const char* kSmall[] = {"smallest",
                                         "no keys",
                                         "odd sizes",
                                         "causal bottom-right, rows without keys",
                                         "boolean mask",
                                         "sliding window, offset, odd sizes",
                                         "sliding window, additive mask",
                                         "additive mask",
                                         "additive mask, transposed",
                                         "GQA",
                                         "GQA, few causal rows, keys split",
                                         "packed q, k, v",
                                         "gaps between rows",
                                         "one more than a tile",
                                         "wide values",
                                         "values wider than keys",
                                         "lsh, short last group",
                                         "lsh, blocks of 3 rows",
                                         "lsh, previous",
                                         "lsh, previous, wide heads, causal",
                                         "lsh, G 4, previous, wide heads, causal",
                                         "lsh, G 4, wide heads, blocks without keys",
                                         "energy, wide heads, low scores",
                                         "energy, G 3 of 32",
                                         "energy, G 3 of 64",
                                         "energy, one column",
                                         "energy, previous, more queries",
                                         "near, energy, causal, rows without keys",
                                         "near, given",
                                         "near, few keys",
                                         "near, few keys, wide heads",
                                         "near, sliding window, rows without keys",
                                         "skip, exact",
                                         "skip, energy, blocks of 100 rows, mask",
                                         "skip, given, finish, additive mask"};

}  // namespace distr::test
