// SPDX-License-Identifier: Apache-2.0
// The shared list of problems (tests/cases.json), and buffers with their values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distr/attention.h"
#include "kernel.h"

namespace distr::test {

// low_columns, high_columns: half of the first head's columns are the same in all rows, so that every score has a large
// constant.
enum class Values {
  normal,
  heavy,
  huge,
  tiny,
  constant,
  best_first,
  best_last,
  best_middle,
  low,
  patches,
  low_columns,
  high_columns
};

struct Case {
  std::string name;
  Problem problem;                                                   // its dtype is f32 until with_dtype()
  Grouping grouping{.group_size = 2, .order_from = OrderFrom::own};  // decided: kernels and oracles read it
  Values values = Values::normal;
  bool packed = false;  // q, k and v are views of one buffer [B, N, 3, H, d]
  bool mask_hides_all = false;
  bool mask_follows_dtype = true;  // else the mask is f32
};

// All cases, with their strides set.
[[nodiscard]] const std::vector<Case>& cases();
// Those with near keys and skipped tiles (method, 8). Cases with `skip` have no backward.
[[nodiscard]] const std::vector<Case>& near_cases();
// The case of that name in either list; throws std::invalid_argument if there is none.
[[nodiscard]] const Case& find(const std::string& name);
[[nodiscard]] Case with_dtype(Case test_case, DType dtype);
// One head of as many keys as rows, in f32.
[[nodiscard]] Case square(std::int64_t rows, std::int64_t head_dim, Causal causal, const Grouping& grouping);
[[nodiscard]] const char* name_of(DType dtype);

// Memory with canaries on both sides and poison (a NaN pattern) inside.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::int64_t count, DType dtype);
  [[nodiscard]] void* data() { return bytes_.data() + kMargin; }
  [[nodiscard]] const void* data() const { return bytes_.data() + kMargin; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] double at(std::int64_t index) const;
  void set(std::int64_t index, double value);
  [[nodiscard]] bool canaries_intact() const;
  [[nodiscard]] bool operator==(const Buffer& other) const { return bytes_ == other.bytes_; }

 private:
  static constexpr std::size_t kMargin = 256;
  std::int64_t count_ = 0;
  DType dtype_ = DType::f32;
  std::vector<std::byte> bytes_;
};

// Whether make_grouping() has an order to make.
[[nodiscard]] inline bool makes_order(const Grouping& grouping) {
  return is_exact(grouping) || traits(grouping.strategy).order == OrderSource::computed;
}

// How far a tensor of these strides reaches: 1 + the largest index; 0 if it is empty.
[[nodiscard]] std::int64_t extent(const Strides& strides, std::int64_t batch, std::int64_t heads, std::int64_t rows,
                                  std::int64_t columns);

// Everything a call of forward needs, with fresh seeded values, the order by make_grouping of the reference (random
// where the caller brings it), and poisoned outputs.
struct Instance {
  explicit Instance(Case wanted, std::uint64_t seed = 1);

  void make_order();  // computes the order again from the present values
  [[nodiscard]] ForwardTensors forward();
  [[nodiscard]] ForwardTensors forward_into(Buffer& o_buffer, Buffer& lse_buffer);
  [[nodiscard]] Buffer output() const;      // poisoned, O's extent
  [[nodiscard]] Buffer lse_output() const;  // poisoned

  Case test_case;
  Buffer q, k, v, mask;
  std::vector<std::uint8_t> boolean_mask;
  std::vector<std::int32_t> order;
  std::vector<float> key_means;      // empty where none are needed
  std::vector<std::int32_t> halves;  // out; empty where nothing is skipped
  Buffer o, lse;
  std::int64_t q_offset = 0, k_offset = 0, v_offset = 0;  // elements into `q` when packed

  [[nodiscard]] const void* q_data() const;
  [[nodiscard]] const void* k_data() const;
  [[nodiscard]] const void* v_data() const;
  [[nodiscard]] const void* mask_data() const;
};

}  // namespace distr::test
