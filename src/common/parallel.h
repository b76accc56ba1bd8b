// SPDX-License-Identifier: Apache-2.0
// One loop over independent tasks on several threads.
#pragma once

#include <cstdint>
#include <functional>

#include "distr/attention.h"

namespace distr::common {

// Processors that this process may use.
[[nodiscard]] int available_processors() noexcept;

// Calls body(task, thread) once for each task in [0, tasks), the low numbers first, with thread in
// [0, execution.threads). Which thread takes which task is left to chance: results must not depend on it.
// Rethrows the first exception after all threads have stopped.
void parallel_for(const Execution& execution, std::int64_t tasks,
                  const std::function<void(std::int64_t task, int thread)>& body);

}  // namespace distr::common
