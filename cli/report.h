// SPDX-License-Identifier: Apache-2.0
// Describes a problem and its approximation, for people and in JSON with the keys of the project's result files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "distr/attention.h"

namespace distr::cli {

using Json = nlohmann::ordered_json;

[[nodiscard]] Json sizes_json(const Problem& problem);
[[nodiscard]] Json grouping_json(const Problem& problem, const Grouping& grouping);

// "B 1, H 8 (KV 2), Nq 128, Nk 128, d 64, dv 64, f32"
[[nodiscard]] std::string sizes_text(const Problem& problem);

// "lsh (mean), G 2, l 128, order from own"; "exact"
[[nodiscard]] std::string grouping_text(const Grouping& grouping);

// ", window 512, sinks 128, skip 0.0025, finish"; what is off is left out
[[nodiscard]] std::string near_text(const Grouping& grouping);

// Indented; bytes that are no UTF-8, as in odd file names, are replaced.
[[nodiscard]] std::string json_text(const Json& json);

}  // namespace distr::cli
