// SPDX-License-Identifier: Apache-2.0
// The words that options, tables and JSON use for the library's enumerations.
#pragma once

#include <string>

#include "distr/attention.h"

namespace distr::cli {

// Defined for Strategy, Estimator, OrderFrom, Causal, DType, Device, Operation and MaskKind.
template <typename Enum>
[[nodiscard]] const char* name_of(Enum value);

// "a, b, c"
template <typename Enum>
[[nodiscard]] std::string all_names(const char* separator = ", ");

// Throws InputError that names the option, the word and what is allowed.
template <typename Enum>
[[nodiscard]] Enum parse_name(const std::string& option, const std::string& word);

}  // namespace distr::cli
