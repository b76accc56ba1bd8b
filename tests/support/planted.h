// SPDX-License-Identifier: Apache-2.0
// What a case's values have of the first head's scores, or of all keys, beside random numbers.
#pragma once

#include "support/cases.h"

namespace distr::test {

void plant_values(Instance& instance);

}  // namespace distr::test
