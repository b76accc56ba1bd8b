// SPDX-License-Identifier: Apache-2.0
// Reads Q, K, V, the mask and an order from files, checks them against each other and makes the library's problem.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "distr/attention.h"
#include "options.h"
#include "tensor.h"

namespace distr::cli {

struct Inputs {
  Problem problem;                           // validated; Q, K, V and O are contiguous
  DType file_type;                           // of Q, K and V in their files
  std::size_t rank;                          // of Q, K and V in their files: 2, 3 or 4
  std::vector<std::byte> q, k, v, mask;      // in the type computed in; the mask in its own
  std::map<std::string, std::string> paths;  // tensor name -> file

  [[nodiscard]] ForwardTensors tensors() const;
  // Drops as many leading axes of [batch, heads, ...] as the input lacks.
  [[nodiscard]] std::vector<std::int64_t> shape_like_input(std::vector<std::int64_t> shape) const;
};

// Throws InputError, or the library's Error for sizes that it does not allow.
[[nodiscard]] Inputs read_inputs(const InputOptions& input_options, const RunOptions& run_options);

// An order of the columns; each row has to be a permutation. Throws InputError.
[[nodiscard]] std::vector<std::int32_t> read_order(const std::filesystem::path& path, const Inputs& inputs,
                                                   const Grouping& grouping);

// The type of a file that holds the library's type.
[[nodiscard]] ElementType element_type(DType dtype) noexcept;

// The product of the lengths.
[[nodiscard]] std::int64_t count_of(std::span<const std::int64_t> shape) noexcept;

[[nodiscard]] std::vector<std::byte> converted(std::vector<std::byte> data, DType from, DType to);

}  // namespace distr::cli
