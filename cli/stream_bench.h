// SPDX-License-Identifier: Apache-2.0
// `distr bench --stream`: what streaming takes beside its copies alone and its computation alone.
#pragma once

#include <optional>
#include <span>

#include "report.h"
#include "settings.h"
#include "streamed.h"
#include "text.h"

namespace distr::cli {

void add_stream_columns(Table& table);

// Times the settings of a problem on random values, each whole, copies alone and computation alone in turn; adds a row
// for each to the results and to the table. `seed` is that of the values, which lie in the memory of the GPU `from`,
// or in host memory.
void bench_streamed(const Problem& problem, std::span<const Grouping> settings, const StreamOptions& options,
                    std::optional<int> from, int repeats, std::uint64_t seed, Json& rows, Table& table);

}  // namespace distr::cli
