// SPDX-License-Identifier: Apache-2.0
// Which elements of memory a tensor has, whatever its strides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernel.h"

namespace distr::test {

// Which elements, counted from the tensor's pointer, a tensor of these axes has.
struct Axis {
  std::int64_t length, stride;
};

struct Elements {
  Elements(std::vector<Axis> wanted, std::size_t element_bytes) : axes(std::move(wanted)), element(element_bytes) {
    empty = std::any_of(axes.begin(), axes.end(), [](const Axis& axis) { return axis.length == 0; });
    for (const Axis& axis : axes) {
      if (empty) {
        break;
      }
      const std::int64_t reach = (axis.length - 1) * axis.stride;
      low += std::min<std::int64_t>(reach, 0);
      high += std::max<std::int64_t>(reach, 0);
    }
  }
  [[nodiscard]] std::size_t bytes() const { return empty ? 0 : static_cast<std::size_t>(high - low + 1) * element; }
  // For each element from the lowest to the highest: does it belong to the tensor?
  [[nodiscard]] std::vector<bool> covered() const {
    std::vector<bool> result(bytes() / element);
    std::vector<std::int64_t> at{-low};
    for (const Axis& axis : axes) {
      std::vector<std::int64_t> next;
      for (const std::int64_t index : at) {
        for (std::int64_t n = 0; n < axis.length; ++n) {
          next.push_back(index + n * axis.stride);
        }
      }
      at = std::move(next);
    }
    for (const std::int64_t index : at) {
      result[static_cast<std::size_t>(index)] = true;
    }
    return result;
  }

  std::vector<Axis> axes;
  std::size_t element;
  std::int64_t low = 0, high = 0;
  bool empty = false;
};

// Rows of Q and of K that a batch entry has, or all entries where they are packed.
inline std::int64_t query_rows(const Problem& p) { return p.packed.has_value() ? p.packed->total_q : p.seq_q; }
inline std::int64_t key_rows(const Problem& p) { return p.packed.has_value() ? p.packed->total_k : p.seq_k; }

inline Elements elements(const Problem& p, const Strides& s, std::int64_t heads, std::int64_t rows,
                         std::int64_t columns) {
  return {{{p.packed.has_value() ? 1 : p.batch, s.batch}, {heads, s.head}, {rows, s.row}, {columns, 1}},
          size_of(p.dtype)};
}

inline Elements rows_of(const Problem& p) {
  const std::int64_t batch = p.packed.has_value() ? 1 : p.batch;
  return {{{batch * p.heads_q * query_rows(p), 1}}, size_of(p.lse_dtype())};
}

inline Elements order_elements(const Problem& p, const Grouping& g) {
  const auto shape = order_shape(p, g);
  return {{{shape[0] * shape[1] * shape[2] * shape[3], 1}}, sizeof(std::int32_t)};
}

inline Elements key_means_elements(const Problem& p, const Grouping& g) {
  const auto shape = key_means_shape(p, g);
  return {{{shape[0] * shape[1] * shape[2] * shape[3], 1}}, sizeof(float)};
}

inline Elements halves_elements(const Problem& p) {
  const auto shape = halves_shape(p);
  return {{{shape[0] * shape[1] * shape[2] * shape[3], 1}}, sizeof(std::int32_t)};
}

inline Elements mask_elements(const Problem& p, bool gradient) {
  std::vector<Axis> axes;
  std::int64_t stride = 1;
  for (int n = p.mask.rank - 1; n >= 0; --n) {
    const auto axis = static_cast<std::size_t>(n);
    axes.push_back({p.mask.shape[axis], gradient ? stride : p.mask.strides[axis]});
    stride *= p.mask.shape[axis];
  }
  const std::size_t element = gradient                           ? size_of(p.lse_dtype())
                              : p.mask.kind == MaskKind::boolean ? 1
                                                                 : size_of(p.mask.dtype);
  return {axes, element};
}

}  // namespace distr::test
