// SPDX-License-Identifier: Apache-2.0
#include "gpu/tiles_property.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu/device_run.h"
#include "gpu/properties.h"

namespace distr::test {

std::string names_its_tiles(const ForwardKernel& kernel, DType dtype) {
  bool asked = false;
  for (const char* name : {"near, energy, window 127, sinks, wide heads, bottom right", "skip, exact"}) {
    const Case test_case = with_dtype(find(name), dtype);
    if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
      continue;
    }
    asked = true;
    const auto rows_with = [&](std::int64_t tile_rows) {
      Execution with;
      with.tile_rows = tile_rows;
      std::vector<std::int64_t> rows;
      for (const TileShape& tile : kernel.plan(test_case.problem, test_case.grouping, with).tiles) {
        rows.push_back(tile.rows);
      }
      return rows;
    };
    const std::vector<std::int64_t> named = rows_with(0);
    for (const std::int64_t rows : named) {
      if (rows_with(rows).front() != rows) {
        return std::string(name) + ": names tiles of " + std::to_string(rows) + " rows and does not take them";
      }
    }
    const auto differs = [&](std::int64_t rows) { return !std::ranges::is_permutation(rows_with(rows), named); };
    if (std::ranges::any_of(std::array{1, 32, 100, 1000}, differs)) {
      return std::string(name) + ": other tiles for rows that there are not";
    }
  }
  return asked ? "" : kNotAsked;
}

}  // namespace distr::test
