// SPDX-License-Identifier: Apache-2.0
// What was measured on CPUs and is decided by it.
#pragma once

#include <array>

#include "common/advice.h"

namespace distr::cpu {

// Where `energy` is worth its error to those who ask for it: at least 1.15 times as quick as exact attention in the
// middle of the settings, at G = 2 (bench/results/cpu/experiments/forward_f32.json). Smaller heads lose too much when
// half of their columns go (bench/results/cpu/minilm_report.json, d = 32).
inline constexpr std::array kCrossovers{common::Crossover{64, 2048}, common::Crossover{128, 1024}};

}  // namespace distr::cpu
