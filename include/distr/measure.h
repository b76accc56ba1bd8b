// SPDX-License-Identifier: Apache-2.0
// Evaluation: how far an approximation is from exact attention, in float64.
#pragma once

#include "distr/attention.h"

namespace distr {
inline namespace v0 {

/// How far an approximation is from exact attention. S are the scaled scores without the mask, over the (query, key)
/// pairs that see each other, of the rows that were looked at.
struct Errors {
  double output_frobenius = 0;   ///< |O - O_exact| / |O_exact|, Frobenius norm over all of O
  double row_cosine_min = 1;     ///< the smallest cosine between a row of O and of O_exact, where the latter is not 0;
                                 ///< 0 where the former is 0, NaN where it has a NaN
  double total_variation = 0;    ///< mean over rows of 1/2 sum_j |P_ij - P_exact_ij|, 0 to 1
  double score_elementwise = 0;  ///< mean |S_hat - S| / mean |S|
  double score_signed = 0;       ///< |mean (S_hat - S)| / mean |S|, the kind of statistic of the paper's Tables 3 and 4
  std::int64_t rows = 0;         ///< how many rows of P and S were looked at
};

/// Compares `tensors.o`, as forward() wrote it, with `o_exact` (same type and strides), and the scores and
/// probabilities that `grouping`, `tensors.order` and `tensors.key_means` give with the exact ones; skipped keys have a
/// probability of 0 and no score. About `max_rows` rows of P and S, evenly spread over each head, and at least one a
/// head, are looked at. `tensors.v` and `tensors.lse` are not read. Throws Error(invalid_argument). CPU memory.
[[nodiscard]] Errors measure(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
                             const void* o_exact, std::int64_t max_rows = 1 << 14, const Execution& execution = {});

/// P [rows, columns] of one head in float64, block means of the full matrix where it is larger than `size`, for
/// pictures. Returns the side lengths through `rows` and `columns`. Reads Q, K, the
/// mask, the order and the means of the keys of `tensors`. Throws Error(invalid_argument). CPU memory.
[[nodiscard]] std::vector<double> probabilities(const Problem& problem, const Grouping& grouping,
                                                const ForwardTensors& tensors, std::int64_t batch, std::int64_t head,
                                                std::int64_t size, std::int64_t& rows, std::int64_t& columns);

/// Floating-point operations a second (two for each multiply-add, fp32) that execution.threads of this machine reach on
/// registers alone: the peak that kernels are held against. The best of several runs of some 10 ms.
[[nodiscard]] double fma_peak(const Execution& execution = {});

}  // namespace v0
}  // namespace distr
