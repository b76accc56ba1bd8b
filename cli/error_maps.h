// SPDX-License-Identifier: Apache-2.0
// The picture of `distr errors`, like the paper's Figure 7: S and S_hat, and maps of the error, which have their own
// colour range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plot.h"

namespace distr::cli {

struct ErrorMap {
  std::string title;
  std::vector<double> percent;  // [rows, rows]: 100 |S_hat - S| / S
};

struct ErrorPicture {
  std::int64_t rows = 0;
  std::vector<double> exact, approximate;  // [rows, rows]
  std::string approximate_title;
  std::vector<ErrorMap> by_block, by_group;  // four each
};

// The bytes of the finished picture. Throws std::runtime_error if gnuplot fails.
[[nodiscard]] std::vector<std::byte> draw(const ErrorPicture& picture, PictureFormat format);

}  // namespace distr::cli
