// SPDX-License-Identifier: Apache-2.0
// The C++ element type of a DType, and conversions of elements.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/half.h"
#include "distr/problem.h"

namespace distr::common {

// Calls function(std::type_identity<T>{}), where T is the element type of `dtype`.
template <class Function>
decltype(auto) with_element(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::f16:
      return function(std::type_identity<Float16>{});
    case DType::bf16:
      return function(std::type_identity<BFloat16>{});
    case DType::f32:
      return function(std::type_identity<float>{});
    case DType::f64:
      break;
  }
  return function(std::type_identity<double>{});
}

template <class T>
[[nodiscard]] constexpr double to_double(T value) noexcept {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return to_float(value);
  }
}

template <class T>
[[nodiscard]] constexpr T from_double(double value) noexcept {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else if constexpr (std::is_same_v<T, float>) {
    return static_cast<float>(value);
  } else {
    return from_float<T>(round_to_odd(value));
  }
}

// Loads one element as double. `data` must not be null.
[[nodiscard]] inline double load(const void* data, DType dtype, std::int64_t index) noexcept {
  return with_element(dtype,
                      [=]<class T>(std::type_identity<T>) { return to_double(static_cast<const T*>(data)[index]); });
}

inline void store(void* data, DType dtype, std::int64_t index, double value) noexcept {
  with_element(dtype, [=]<class T>(std::type_identity<T>) { static_cast<T*>(data)[index] = from_double<T>(value); });
}

[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept {
  return a / b + (a % b != 0 ? 1 : 0);
}

}  // namespace distr::common
