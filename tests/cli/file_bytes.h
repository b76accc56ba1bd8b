// SPDX-License-Identifier: Apache-2.0
// What the tests of the file formats share: bytes, random tensors, and what a refusal says.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tensor.h"

namespace distr::cli {

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of(const std::string& text) {
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

inline std::string string_of(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

inline Tensor random_tensor(ElementType type, const std::vector<std::int64_t>& shape, unsigned seed) {
  std::mt19937 generator(seed);
  Tensor tensor{type, shape, Bytes(static_cast<std::size_t>(byte_count(type, shape).value()))};
  const unsigned mask = type == ElementType::boolean ? 1U : 255U;
  for (std::byte& value : tensor.data) value = static_cast<std::byte>(generator() & mask);
  return tensor;
}

// One line with the file, each of the given parts, and what is allowed.
inline void expect_refusal_with(const std::string& message, const std::string& file,
                                const std::vector<std::string>& parts) {
  EXPECT_TRUE(message.starts_with(file + ": ")) << message;
  EXPECT_NE(message.find("; "), std::string::npos) << message;
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message << "\n" << part;
  for (const char character : message) EXPECT_TRUE(character >= 0x20 && character < 0x7f) << message;
  EXPECT_LT(message.size(), 400U);
}

}  // namespace distr::cli
