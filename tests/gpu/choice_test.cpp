// SPDX-License-Identifier: Apache-2.0
// The table of tiles against the measurement that it was read from; needs no GPU.
#include "cuda/sm80/heuristics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>

namespace distr::cuda::sm80 {
namespace {

using Json = nlohmann::json;
using Key = std::tuple<std::string, int, int, int, int, int, bool>;  // strategy, G, d, heads, N, kernel's d, causal

struct Times {
  std::map<int, double> ms;  // by the rows of the tile
  Json row;                  // any of them
};

// The rows at the default block length, by problem and setting.
std::map<Key, Times> measured() {
  std::ifstream file(DISTR_TUNE_JSON);
  const Json report = Json::parse(file);
  std::map<Key, Times> result;
  for (Json row : report.at("rows")) {
    const bool exact = row.at("strategy") == "exact";
    if (!exact && row.at("block") != 128) {
      continue;
    }
    row["processors"] = report.at("meta").at("processors");
    Times& times = result[{row.at("strategy"), row.at("group_size"), row.at("head_dim"), row.at("heads"),
                           row.at("seq_q"), row.at("kernel_dim"), row.at("causal")}];
    times.ms[row.at("tile_rows").get<int>()] = row.at("ms").get<double>();
    times.row = row;
  }
  return result;
}

int choice_for(const Json& row) {
  const bool causal = row.at("causal").get<bool>();
  const auto rows = row.at("seq_q").get<double>();
  const double keys = causal ? (rows + 1) / 2 : rows;
  const double scores = row.at("batch").get<double>() * row.at("heads").get<double>() * rows * keys;
  const int dim = row.at("kernel_dim").get<int>();
  const int groups = row.at("kernel_groups").get<int>();
  const bool adds = row.at("strategy") == "lsh" && groups < dim;  // the exact kernels, on Q~ as well, add no columns
  return chosen_rows(dim, groups, adds ? row.at("group_size").get<int>() : 1, causal,
                     scores / row.at("processors").get<double>());
}

// By d, strategy, G and causality, over all sizes.
TEST(Choice, LosesLessThanTwoPercent) {
  std::map<std::tuple<int, std::string, int, bool>, std::pair<double, int>> losses;  // sum of logarithms, count
  for (const auto& [key, times] : measured()) {
    if (times.ms.size() == 2) {
      auto& [sum, count] = losses[{std::get<2>(key), std::get<0>(key), std::get<1>(key), std::get<6>(key)}];
      sum += std::log(times.ms.at(choice_for(times.row)) / std::min(times.ms.at(64), times.ms.at(128)));
      ++count;
    }
  }
  EXPECT_GT(losses.size(), 20U);
  for (const auto& [family, loss] : losses) {
    EXPECT_LT(std::exp(loss.first / loss.second), 1.02)
        << "d " << std::get<0>(family) << ", " << std::get<1>(family) << ", G " << std::get<2>(family)
        << (std::get<3>(family) ? ", causal" : "");
  }
}

// The sides of the border as they were measured on an H200 (docs/kernel-log/sm80-backward.md, steps 6 and 10).
TEST(AddingDq, PaysInManyRoundsOrWhereKernelsFollowOneAnother) {
  constexpr int kSms = 132;
  const auto pays = [](int dim, bool causal, std::int64_t heads, std::int64_t seq_k, bool side_by_side) {
    const std::int64_t resident = dim == 128 ? kSms : 2 * kSms;
    return adding_dq_pays(dim, causal, heads * ((seq_k + 127) / 128), resident, side_by_side);
  };
  EXPECT_FALSE(pays(128, false, 10, 4096, true));
  EXPECT_FALSE(pays(128, true, 64, 1024, true));
  EXPECT_TRUE(pays(128, true, 10, 8192, true));
  EXPECT_FALSE(pays(64, false, 10, 1024, true));
  EXPECT_TRUE(pays(64, false, 10, 2048, true));
  EXPECT_FALSE(pays(64, true, 10, 4096, true));
  EXPECT_TRUE(pays(64, true, 10, 8192, true));
  EXPECT_TRUE(pays(64, true, 64, 1024, true));
  EXPECT_TRUE(pays(128, true, 10, 1024, false));
}

// Of thread blocks of 128 rows with near keys (docs/kernel-log/sm80-forward.md, steps 35 and 37).
TEST(NearRows, PayWithManyScores) {
  const auto pays = [](int dim, bool causal, double scores) { return near_rows_pay(dim, 128, causal, scores, 2, 4); };
  EXPECT_TRUE(pays(64, false, 5e6));
  EXPECT_TRUE(pays(64, true, 2.03e6));
  EXPECT_FALSE(pays(64, false, 1.3e6));
  EXPECT_TRUE(pays(128, false, 300e3));
  EXPECT_FALSE(pays(128, true, 300e3));
  EXPECT_FALSE(near_rows_pay(64, 128, false, 5e6, 1, 2));  // one block an SM where two of 64 rows have room
  EXPECT_TRUE(near_rows_pay(64, 64, false, 0, 4, 4));
}

}  // namespace
}  // namespace distr::cuda::sm80
