// SPDX-License-Identifier: Apache-2.0
// One loop over independent tasks on several threads.
#pragma once

#include <cstdint>
#include <functional>

#include "distr/attention.h"

namespace distr::common {

// How many processors this process may use.
[[nodiscard]] int available_processors() noexcept;

// Calls body(task, thread) once for each task in [0, tasks), starting with the low numbers, where thread is in
// [0, execution.threads). Results must not depend on which thread takes which task: that is left to chance. The first
// exception is rethrown after all threads have stopped.
void parallel_for(const Execution& execution, std::int64_t tasks,
                  const std::function<void(std::int64_t task, int thread)>& body);

}  // namespace distr::common
