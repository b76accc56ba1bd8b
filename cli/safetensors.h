// SPDX-License-Identifier: Apache-2.0
// The .safetensors format: an 8-byte header length, a JSON header, the tensors' bytes.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "tensor.h"

namespace distr::cli {

using TensorMap = std::map<std::string, Tensor>;

// Throws InputError that names `path`. The metadata are skipped. Tensors of types that ElementType lacks (F8_E4M3, ...)
// are refused.
[[nodiscard]] TensorMap read_safetensors(const std::filesystem::path& path);

// The same from bytes in memory; `name` stands for the file in messages. No input may crash it.
[[nodiscard]] TensorMap parse_safetensors(std::span<const std::byte> bytes, const std::string& name);

// Throws std::invalid_argument if a tensor contradicts itself, or if a name is __metadata__ or is not UTF-8.
[[nodiscard]] std::vector<std::byte> format_safetensors(const TensorMap& tensors);

}  // namespace distr::cli
