// SPDX-License-Identifier: Apache-2.0
// Division by a divisor that is known when a kernel is launched. It takes one product and one shift, where the compiler
// would emit a chain of about 20 dependent instructions.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace distr::cuda {

// Divides numbers n below 2^31. With shift = 31 + ceil(log2(value)) and m = ceil(2^shift / value), n / value is
// n m / 2^shift rounded down: m is too large by less than 1, which adds less than n / 2^shift < 1 / value.
class Divisor {
 public:
  Divisor() : Divisor(1) {}
  // A value of 0 becomes 1; nothing is divided by it.
  explicit Divisor(std::uint32_t value)
      : value_(std::max(1U, value)),
        shift_(31 + static_cast<int>(std::bit_width(value_ - 1))),
        multiplier_(static_cast<std::uint32_t>(((std::uint64_t{1} << shift_) + value_ - 1) / value_)) {}

  [[nodiscard]] __host__ __device__ std::uint32_t value() const { return value_; }

  friend __host__ __device__ std::uint32_t operator/(std::uint32_t n, const Divisor& divisor) {
    return static_cast<std::uint32_t>(std::uint64_t{n} * divisor.multiplier_ >> divisor.shift_);
  }
  friend __host__ __device__ std::uint32_t operator%(std::uint32_t n, const Divisor& divisor) {
    return n - n / divisor * divisor.value_;
  }

 private:
  std::uint32_t value_;
  int shift_;  // 31 to 62
  std::uint32_t multiplier_;
};

}  // namespace distr::cuda
