// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/screen_launch.h"

#include <algorithm>

#include "cuda/heuristics.h"
#include "cuda/launch.h"
#include "cuda/sm90/key_list.cuh"
#include "cuda/sm90/tensor_map.h"

namespace distr::cuda::sm90 {
namespace {

constexpr int kTileRows = 128;

// The narrowest shape that has so many columns.
[[nodiscard]] const ScreenVariant* find(DType dtype, std::int64_t columns) {
  const ScreenVariant* found = nullptr;
  for (const ScreenVariant& variant : screen_variants()) {
    if (variant.dtype == dtype && variant.columns >= columns &&
        (found == nullptr || variant.columns < found->columns)) {
      found = &variant;
    }
  }
  if (found == nullptr) {
    throw Error(Status::unsupported, "no compiled shape decides what is skipped by " + std::to_string(columns) +
                                         " columns; allowed: at most 128");
  }
  return found;
}

}  // namespace

std::int64_t kept_words(const Problem& problem) noexcept {
  return common::ceil_div(problem.seq_k, std::int64_t{32 * kHalfKeys});
}

std::int64_t kept_count(const Problem& problem) noexcept {
  return problem.batch * problem.heads_q * common::ceil_div(problem.seq_q, common::kSkipRows) * kept_words(problem);
}

ScreenLaunch::ScreenLaunch(const Problem& problem, const DeviceProblem& sizes, std::int64_t columns, std::int64_t begin,
                           std::int64_t end)
    : dtype_(problem.dtype), variant_(find(problem.dtype, columns)) {
  const int interleaved =
      interleaved_heads(problem, TileScheduler::of_head(begin, end, kTileRows), device_properties().num_sms);
  parameters_.columns = static_cast<int>(columns);
  parameters_.problem = sizes;
  parameters_.kept_words = kept_words(problem);
  parameters_.scheduler = TileScheduler(sizes, interleaved, begin, end, kTileRows);
  parameters_.row_end = end;
}

void ScreenLaunch::run(const Tensors& tensors, void* stream) const {
  ScreenParameters p = parameters_;
  p.q = tensor_map(tensors.q_hat, dtype_, {static_cast<int>(common::kSkipRows), std::min(variant_->columns, 64)});
  p.keys_transposed = tensors.keys_transposed;
  p.column_stride = tensors.column_stride;
  p.order = tensors.order;
  p.dropped = tensors.dropped;
  p.near = tensors.near;
  p.kept = tensors.kept;
  variant_->launch(p, stream);
}

}  // namespace distr::cuda::sm90
