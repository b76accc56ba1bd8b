// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: whatever the bytes, parse_npy() either throws InputError or gives a tensor that survives a round
// trip.
#include <cstdlib>

#include "npy.h"

using distr::cli::Tensor;

// NOLINTNEXTLINE(readability-identifier-naming): the name that libFuzzer calls
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Tensor tensor;
  try {
    tensor = distr::cli::parse_npy({reinterpret_cast<const std::byte*>(bytes), size}, "fuzz.npy");
  } catch (const distr::cli::InputError&) {
    return 0;
  }
  // Each failure from here on ends the process: also any exception.
  const auto expected = distr::cli::byte_count(tensor.type, tensor.shape);
  if (!expected || static_cast<std::size_t>(*expected) != tensor.data.size()) std::abort();
  const Tensor again = distr::cli::parse_npy(distr::cli::format_npy(tensor), "again.npy");
  if (again.type != tensor.type || again.shape != tensor.shape || again.data != tensor.data) std::abort();
  return 0;
}
