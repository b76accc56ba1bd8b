// SPDX-License-Identifier: Apache-2.0
// Times of the backward with near keys (method, 8). Those of the forward depend on the inputs: bench/near.py.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace distr::test {

// On random inputs, beside the backward without near keys and exact attention's, which is timed whatever the strategy.
// Adds a row for each, and prints it. filter, strategy: as in TimeOptions.
void time_near_backward(const std::string& filter, const std::string& strategy, void* stream,
                        nlohmann::ordered_json& rows);

}  // namespace distr::test
