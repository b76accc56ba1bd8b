// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "distr/attention.h"

namespace distr::test {

// The types that case n of a list is tested in: all of some that loads and stores alone tell apart. Sanitizers, which
// look at loads and stores and slow all else, see the types in turn.
template <std::size_t kCount>
[[nodiscard]] std::span<const DType> types_of_case(std::size_t n, const DType (&types)[kCount]) {
  const std::span<const DType> all(types);
  return DISTR_SANITIZED != 0 ? all.subspan(n % kCount, 1) : all;
}

}  // namespace distr::test
