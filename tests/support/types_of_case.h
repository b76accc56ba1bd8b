// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "distr/attention.h"

namespace distr::test {

// The types that case n of a list is tested in: all of some. Sanitizers, which slow every case, see the types in turn.
template <std::size_t kCount>
[[nodiscard]] std::span<const DType> types_of_case(std::size_t n, const DType (&types)[kCount]) {
  const std::span<const DType> all(types);
  return DISTR_SANITIZED != 0 ? all.subspan(n % kCount, 1) : all;
}

// The numbers of threads that a case is computed with, which must give the bits of one thread. Sanitizers see the last
// alone: each thread has a part of its own, as with any other number.
template <std::size_t kCount>
[[nodiscard]] std::span<const int> thread_counts(const int (&counts)[kCount]) {
  const std::span<const int> all(counts);
  return DISTR_SANITIZED != 0 ? all.last(1) : all;
}

}  // namespace distr::test
