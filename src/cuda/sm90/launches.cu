// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/launches.h"

#include <algorithm>

#include "cuda/sm90/heuristics.h"
#include "cuda/sm90/key_list.cuh"
#include "cuda/sm90/tensor_map.h"

namespace distr::cuda::sm90 {
namespace {

// The narrowest shape of so many rows, and blocks an SM, that the problem fits; null: there is none.
[[nodiscard]] const Variant* find(std::span<const Variant> variants, const Problem& problem,
                                  const KernelRequest& request, std::int64_t rows, int blocks = 1) {
  const Variant* found = nullptr;
  for (const Variant& variant : variants) {
    const bool fits = variant.dtype == problem.dtype && variant.scale_in == request.scale_in &&
                      variant.load == request.load && variant.columns >= request.columns &&
                      (!has_near_columns(variant.load) || variant.near_columns >= problem.head_dim) &&
                      (variant.caps_scores || problem.softcap == 0) &&
                      (variant.takes_windows || !common::has_window(problem)) &&
                      (variant.takes_lengths || !common::has_lengths(problem)) &&
                      variant.values >= problem.head_dim_v && variant.rows == rows && variant.ctas_per_sm == blocks;
    const auto width = [](const Variant& of) { return of.columns + of.values; };
    if (fits && (found == nullptr || width(variant) < width(*found))) {
      found = &variant;
    }
  }
  return found;
}

}  // namespace

bool has_near_far_shape(std::span<const Variant> variants, const Problem& problem, const KernelRequest& request) {
  return find(variants, problem, request, kRowsOfTwo) != nullptr;
}

TileShape tile_of(const Variant& variant) noexcept {
  return {variant.rows, variant.keys, variant.values, variant.columns};
}

LaunchShape shape_of(const Launch& of) noexcept {
  return {tile_of(*of.variant), of.scheduler.count(), of.variant->threads, of.variant->shared_bytes};
}

Launches launches_of(std::span<const Variant> variants, const Problem& p, const DeviceProblem& sizes,
                     const KernelRequest& request, std::int64_t begin, std::int64_t end, std::int64_t tile_rows) {
  const Variant* const two = find(variants, p, request, kRowsOfTwo);
  const Variant* const sharing = find(variants, p, request, kRowsOfTwo, 2);
  // Where blocks that share an SM are the only ones of two, one of three is for wider heads.
  const bool only_shares = two == nullptr && sharing != nullptr;
  const Variant* const three = only_shares ? nullptr : find(variants, p, request, kRowsOfThree);
  const bool has_only_three = two == nullptr && sharing == nullptr;
  if (has_only_three && three == nullptr) {  // the library's own serve every size that forward_supports()
    throw Error(Status::unsupported, "no compiled shape takes these sizes");
  }
  const std::int64_t num_sms = device_properties().num_sms;
  const bool has_window = common::has_window(p);
  const bool has_lengths = common::has_lengths(p);
  const Waves waves{p.batch * p.heads_q, end - begin, has_window ? window_keys(p) : p.seq_k, num_sms,
                    p.causal != Causal::none && !has_window};
  const bool shares =
      sharing != nullptr &&
      (only_shares || (sharing->columns == two->columns && tile_rows != kRowsOfThree && waves.is_quicker_sharing()));
  // Capped scores of narrow heads have a shape of three consumers alone; that of two is for wider heads.
  const bool three_is_narrower = two != nullptr && three != nullptr && three->columns < two->columns;
  const std::int64_t rows_of_three = has_only_three                                          ? end - begin
                                     : shares || three == nullptr || tile_rows == kRowsOfTwo ? 0
                                     : tile_rows == kRowsOfThree || three_is_narrower        ? end - begin
                                     : has_lengths                                           ? 0
                                                                                             : waves.rows_for_three();
  Launches result;
  // Packed sequences have their tiles one behind the other, as if a head were one long sequence.
  DeviceProblem scheduled = sizes;
  Problem heads = p;
  if (p.packed.has_value()) {
    scheduled.batch = heads.batch = 1;
  }
  const auto add = [&](const Variant& variant, std::int64_t from, std::int64_t to) {
    const std::int64_t blocks = num_sms * variant.ctas_per_sm;  // that run at the same time
    const std::int64_t behind =
        p.packed.has_value() ? count_packed_tiles(p.packed->total_q, p.batch, variant.rows) * variant.rows : to;
    const int interleaved = interleaved_heads(heads, TileScheduler::of_head(from, behind, variant.rows), blocks);
    const KernelRequest with_lse{ScaleIn::softmax, request.columns, request.load};
    const Variant* const gives_lse = request.scale_in == ScaleIn::softmax
                                         ? &variant
                                         : find(variants, p, with_lse, variant.rows, variant.ctas_per_sm);
    result.list.push_back({&variant, gives_lse, TileScheduler(scheduled, interleaved, from, behind, variant.rows), to,
                           static_cast<unsigned>(blocks), !result.list.empty()});
  };
  const std::int64_t middle = begin + rows_of_three;
  if (begin < middle) {
    add(*three, begin, middle);
  }
  if (middle < end) {
    add(shares ? *sharing : *two, middle, end);
  }
  for (const Variant* variant : {result.list.front().variant, two, three}) {
    if (variant != nullptr && (result.tiles.empty() || result.tiles.front().rows != variant->rows)) {
      result.tiles.push_back(tile_of(*variant));
    }
  }
  return result;
}

void run_launches(const std::vector<Launch>& launches, DType dtype, ForwardParameters& p, const Operand& q,
                  const Operand* k, const Operand& v, const FarOperands* far, void* stream) {
  constexpr int kConsumerRows = 64;
  const auto map = [&](const Operand& x, int rows, int columns) {
    return tensor_map(x, dtype, {rows, std::min(columns, 64)});
  };
  for (const Launch& of : launches) {
    if (p.lse != nullptr && of.with_lse == nullptr) {
      throw Error(Status::unsupported, "no compiled shape gives LSE");
    }
    const Variant& variant = p.lse == nullptr ? *of.variant : *of.with_lse;
    const int keys = is_listed(variant.load) ? kHalfKeys
                     : is_runs(variant.load) ? static_cast<int>(common::kNearTile)
                                             : variant.keys;
    p.q = map(q, kConsumerRows, variant.near_columns);
    if (k != nullptr) {
      p.k = map(*k, keys, variant.load == KeyLoad::fuse ? variant.values : variant.near_columns);
    }
    if (far != nullptr) {
      p.far_q = map(far->q, kConsumerRows, variant.columns);
      if (far->k != nullptr) {
        p.far_k = map(*far->k, keys, variant.columns);
      }
    }
    p.v = map(v, keys, variant.values);
    p.scheduler = of.scheduler;
    p.row_end = of.row_end;
    p.next_tile = of.next_tile;
    p.is_second = of.is_second;
    variant.launch(p, stream);
  }
}

}  // namespace distr::cuda::sm90
