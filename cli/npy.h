// SPDX-License-Identifier: Apache-2.0
// NumPy's .npy format, versions 1.0 to 3.0 (numpy.lib.format).
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "tensor.h"

namespace distr::cli {

// Reads little- and big-endian f2, f4, f8, bool and integers, C or Fortran order, into C order and native byte order.
// Throws InputError that names `path`.
[[nodiscard]] Tensor read_npy(const std::filesystem::path& path);

// The same from bytes in memory; `name` stands for the file in messages. No input may crash it.
[[nodiscard]] Tensor parse_npy(std::span<const std::byte> bytes, const std::string& name);

// The bytes of a version 1.0 file, little-endian, C order. bf16, which NumPy lacks, is widened to f4 (exact).
// Throws std::invalid_argument if the tensor contradicts itself.
[[nodiscard]] std::vector<std::byte> format_npy(const Tensor& tensor);

}  // namespace distr::cli
