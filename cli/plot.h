// SPDX-License-Identifier: Apache-2.0
// The picture of `distr compare`: P exact, approximate and their difference, and the error of O against time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gnuplot.h"

namespace distr::cli {

struct PlotPoint {
  std::string series;  // the points of one series are joined by lines
  std::string label;
  double milliseconds = 0;
  double error = 0;
};

struct Picture {
  std::int64_t rows = 0, columns = 0;  // of both heat maps; where P is larger, a pixel is the mean over a block
  std::vector<double> exact, approximate;
  std::int64_t seq_q = 0, seq_k = 0;
  std::string head;               // which one the heat maps show
  std::string setting;            // of the approximate heat map
  std::string error_title;        // of the panel with the points
  std::vector<PlotPoint> points;  // the first is exact attention
};

// The bytes of the finished picture. Throws std::runtime_error if gnuplot fails.
[[nodiscard]] std::vector<std::byte> draw(const Picture& picture, PictureFormat format);

}  // namespace distr::cli
