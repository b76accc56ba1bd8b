// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: whatever the bytes, parse_safetensors() either throws InputError or gives tensors that survive a
// round trip.
#include <algorithm>
#include <cstdlib>

#include "safetensors.h"

using distr::cli::TensorMap;

namespace {

bool same(const TensorMap::value_type& left, const TensorMap::value_type& right) {
  return left.first == right.first && left.second.type == right.second.type &&
         left.second.shape == right.second.shape && left.second.data == right.second.data;
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): the name that libFuzzer calls
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  TensorMap tensors;
  try {
    tensors = distr::cli::parse_safetensors({reinterpret_cast<const std::byte*>(bytes), size}, "fuzz.safetensors");
  } catch (const distr::cli::InputError&) {
    return 0;
  }
  // Each failure from here on ends the process: also any exception.
  for (const auto& [name, tensor] : tensors) {
    const auto expected = distr::cli::byte_count(tensor.type, tensor.shape);
    if (!expected || static_cast<std::size_t>(*expected) != tensor.data.size()) std::abort();
  }
  const TensorMap again = distr::cli::parse_safetensors(distr::cli::format_safetensors(tensors), "again");
  if (!std::equal(tensors.begin(), tensors.end(), again.begin(), again.end(), same)) std::abort();
  return 0;
}
