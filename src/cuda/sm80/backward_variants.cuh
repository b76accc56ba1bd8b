// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes, the same for both element types. A new head dim is a line here.
#pragma once

#include <algorithm>
#include <array>

#include "cuda/launch.h"
#include "cuda/sm80/backward_keys.cuh"
#include "cuda/sm80/backward_queries.cuh"
#include "cuda/sm80/backward_variants.h"

namespace distr::cuda::sm80 {

// Of `heads`, as many as read no more than the L2 holds beside what is written.
inline int section_of(std::int64_t heads, std::int64_t bytes_a_head) {
  constexpr std::int64_t kSectionBytes = std::int64_t{24} << 20;
  return static_cast<int>(std::clamp(kSectionBytes / std::max(bytes_a_head, std::int64_t{1}), std::int64_t{1}, heads));
}

template <class T, int kDim, Masks kServes>
void launch_backward(const BackwardParameters& parameters, void* stream) {
  using Keys = KeysShape<T, kDim, kServes>;
  using Queries = QueriesShape<T, kDim, kServes>;
  BackwardParameters p = parameters;
  const DeviceProblem& problem = p.problem;
  const std::int64_t row_bytes = (problem.head_dim + problem.head_dim_v) * 2;
  const std::int64_t heads_kv = problem.batch * problem.heads_kv;
  const std::int64_t heads_q = problem.batch * problem.heads_q;
  const std::int64_t key_blocks = heads_kv * ((problem.seq_k + Keys::kKeys - 1) / Keys::kKeys);
  const std::int64_t query_blocks = heads_q * ((problem.seq_q + Queries::kRows - 1) / Queries::kRows);
  if (key_blocks > 0) {
    p.section = section_of(heads_kv, heads_q / heads_kv * problem.seq_q * row_bytes);
    launch(backward_keys<Keys>, dim3(static_cast<unsigned>(key_blocks), Keys::kParts), Keys::kThreads,
           Keys::kSharedBytes, stream, p);
  }
  if (query_blocks > 0) {
    p.section = section_of(heads_q, problem.seq_k * row_bytes);
    launch(backward_queries<Queries>, dim3(static_cast<unsigned>(query_blocks)), Queries::kThreads,
           Queries::kSharedBytes, stream, p);
  }
}

template <class T, int kDim, Masks kServes>
constexpr BackwardVariant backward_variant() {
  return {kDim, kServes == Masks::tensors, &launch_backward<T, kDim, kServes>};
}

template <class T>
inline constexpr std::array kBackwardVariants = {
    backward_variant<T, 32, Masks::none>(),     backward_variant<T, 64, Masks::none>(),
    backward_variant<T, 128, Masks::none>(),    backward_variant<T, 64, Masks::tensors>(),
    backward_variant<T, 128, Masks::tensors>(), backward_variant<T, 256, Masks::tensors>(),
};

}  // namespace distr::cuda::sm80
