// SPDX-License-Identifier: Apache-2.0
// From torch's tensors to the library's Problem. Everything here throws distr::Error (a std::runtime_error, Python's
// RuntimeError) that names the tensor or value and what is allowed.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "distr/plan.h"

namespace distr::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;  // a view: of a tensor's sizes, or of {1, 2, 3} in a call

[[noreturn]] void invalid(const std::string& message);

// The entry of a table that goes by `name`.
template <class Entry, std::size_t size>
const Entry& named(const char* what, const std::string& name, const std::array<Entry, size>& entries) {
  std::string allowed;
  for (const Entry& entry : entries) {
    if (name == entry.name) {
      return entry;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(entry.name);
  }
  invalid(std::string(what) + " is '" + name + "'; allowed: " + allowed);
}

// In the order that pack() in distrattention/ops.py has them in.
inline constexpr std::array kCorners{Named<Causal>{Causal::none, "none"}, Named<Causal>{Causal::top_left, "top_left"},
                                     Named<Causal>{Causal::bottom_right, "bottom_right"}};

// Float; Double where dtype is f64: of LSE and of a mask's gradient.
[[nodiscard]] ScalarType lse_type(const Problem& problem);

// What a tensor holds; null of none.
[[nodiscard]] inline const void* data(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}
[[nodiscard]] inline void* mutable_data(const OptionalTensor& tensor) {
  return tensor ? tensor->mutable_data_ptr() : nullptr;
}
[[nodiscard]] inline const std::int32_t* order_data(const OptionalTensor& order) {
  return static_cast<const std::int32_t*>(data(order));
}
[[nodiscard]] inline const float* means_data(const OptionalTensor& key_means) {
  return static_cast<const float*>(data(key_means));
}

// Requires the dtype, the shape and q's device.
void require(const Tensor& q, const char* name, const Tensor& tensor, ScalarType type, Sizes shape);

[[nodiscard]] Strides strides_of(const Tensor& tensor);

// An uninitialized tensor on q's device: contiguous, or of q's type, four axes and, in memory, [B, N, H, d].
[[nodiscard]] Tensor empty(const Tensor& q, Sizes sizes, ScalarType type);
[[nodiscard]] Tensor empty_rows_first(const Tensor& q, Sizes sizes);
// The tensor, or a contiguous copy.
[[nodiscard]] Tensor packed(const Tensor& tensor);
// The tensor, or a copy, with what the kernels want: contiguous rows, and on CUDA an address that 16 divides.
[[nodiscard]] Tensor with_unit_rows(const Tensor& tensor);
// An uninitialized tensor that is laid out like `tensor`, without its holes and repetitions, and with contiguous rows.
[[nodiscard]] Tensor dense_like(const Tensor& tensor);
// Two tensors of one shape with the same strides, contiguous rows and on CUDA addresses that 16 divides. Where they are
// not so, they are copied as far as need be to lie as the first does, without its holes.
[[nodiscard]] std::pair<Tensor, Tensor> laid_out_alike(const Tensor& first, const Tensor& second);

// What Grouping says of near keys and skipped tiles.
struct NearKeys {
  std::optional<std::int64_t> window;
  std::int64_t sinks = 0;
  std::optional<std::int64_t> key_offset;
  double skip = 0;
  bool finish = false;
  std::optional<Part> part = std::nullopt;
};
// Where a call lies in a longer one, if it is a part of one.
[[nodiscard]] std::optional<Part> part_of(std::optional<std::int64_t> first_row, std::optional<std::int64_t> first_key);

// Problem's window_left and window_right. Queries stand beside keys as the causal corner, or NearKeys::key_offset,
// says.
struct SlidingWindow {
  std::optional<std::int64_t> left, right;
};

// Everything but the tensors that says what attention is wanted, as the operators take it.
struct Settings {
  Causal causal = Causal::none;
  std::optional<double> scale;
  Grouping grouping;
  bool grouped_heads = true;  // Hq may be a multiple of H
  SlidingWindow sliding;
  double softcap = 0;
};
[[nodiscard]] Settings settings_of(const std::string& causal, std::optional<double> scale, const std::string& strategy,
                                   std::int64_t group_size, std::int64_t block_size, const std::string& estimator,
                                   const std::string& order_from, std::int64_t seed, const NearKeys& near,
                                   const SlidingWindow& sliding = {}, double softcap = 0);
// The same from three numbers (pack(), pack_near() and pack_window_size() in distrattention/packing.py), which take
// less time to pass than the names.
[[nodiscard]] Settings unpack(std::int64_t packed, std::int64_t packed_near, std::optional<std::int64_t> key_offset,
                              double skip, std::optional<double> scale, std::int64_t seed, std::int64_t packed_window,
                              double softcap);

struct Call {
  Problem problem;
  Grouping grouping;
  // CPU: torch's threads, as many as torch.set_num_threads() says, from its pool. CUDA: torch's current stream.
  Execution execution;
  std::int32_t device_index = 0;                                 // CUDA: q's device
  std::optional<torch::stable::accelerator::DeviceGuard> guard;  // CUDA: it is the current one
};

// For Q [B, Hq, Nq, d], K [B, H, Nk, d], V [B, H, Nk, dv] with contiguous rows. Problem::o is left to the caller.
[[nodiscard]] Call make_call(const Tensor& q, const Tensor& k, const Tensor& v, const Settings& settings);
// Adds the mask, if there is one.
void add_mask(Call& call, const Tensor& q, const OptionalTensor& mask);
// The call's plan, from the thread's last ones where it is among them.
[[nodiscard]] Plan plan_of(Operation operation, const Call& call);
// The plan of the order that a forward reads.
[[nodiscard]] Plan plan_of_order(const Call& call, const Plan& forward);
// The order as the library wants it, contiguous, if there is one. It may come as [B, Hq, blocks, d] or flat,
// [B, Hq, blocks * d].
[[nodiscard]] OptionalTensor order_for(const Plan& plan, const Tensor& q, const OptionalTensor& order);
// The means of the keys likewise, [B, H, blocks or 1, d] or flat; none where the plan reads none.
[[nodiscard]] OptionalTensor key_means_for(const Plan& plan, const Tensor& q, const OptionalTensor& key_means);
// It goes back to torch with the result: what reuses it comes later on the same stream.
struct Workspace {
  OptionalTensor memory;
  std::byte* behind = nullptr;
};
// On CUDA, gives the call a workspace of so many bytes from torch's caching allocator; on the CPU the library allocates
// its own. `behind`: bytes that are wanted behind it, on any device.
[[nodiscard]] Workspace add_workspace(Call& call, std::size_t bytes, const Tensor& q, std::size_t behind = 0);

}  // namespace distr::binding
