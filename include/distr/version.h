// SPDX-License-Identifier: Apache-2.0
// The one place that holds the version: CMake, the package and `distr info` read it from here.
#pragma once

#define DISTR_VERSION_MAJOR 0
#define DISTR_VERSION_MINOR 1
#define DISTR_VERSION_PATCH 0

namespace distr {
inline namespace v0 {

/// The version of the library that is loaded, "major.minor.patch"; the macros give that of the headers.
[[nodiscard]] const char* version() noexcept;

}  // namespace v0
}  // namespace distr
