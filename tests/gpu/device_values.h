// SPDX-License-Identifier: Apache-2.0
// Values made and compared on the device, where there are too many for the host.
#pragma once

#include <cstdint>

#include "distr/problem.h"

namespace distr::test {

// Fills `count` elements of device memory with standard normal values; the same for the same seed.
void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed, void* stream);

// |a - b| / |b| over `count` elements of device memory (Frobenius norms). Waits for the stream.
double relative_difference(const void* a, const void* b, DType dtype, std::int64_t count, void* stream);

}  // namespace distr::test
