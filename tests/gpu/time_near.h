// SPDX-License-Identifier: Apache-2.0
// Inputs of which a known part of the far keys matters, for times of near keys and skipped tiles (method, 8).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "distr/problem.h"

namespace distr::test {

// One of a head's 8 regions of queries has one of 8 directions, and a half of a tile (64 keys) points along it or
// against it: it matters to all rows of the region or to none. `share`: of the halves that matter, drawn for each head,
// region and half.
struct PlantedInputs {
  std::vector<float> q, k;  // [batch, heads, seq, head_dim], Q and K alike in shape
};
[[nodiscard]] PlantedInputs planted_inputs(const Problem& problem, double share, std::uint64_t seed);

// Times the forward on planted inputs, of which about half, all and few matter, with near keys, `skip` and `finish`, by
// the kernels that calls take. Order and means are included. Adds a row for each, and prints it. filter, strategy:
// as in TimeOptions.
void time_near(const std::string& filter, const std::string& strategy, void* stream, nlohmann::ordered_json& rows);

// Times the backward with near keys on random inputs beside the one without them and exact attention's, which is timed
// whatever the strategy. Likewise.
void time_near_backward(const std::string& filter, const std::string& strategy, void* stream,
                        nlohmann::ordered_json& rows);

}  // namespace distr::test
