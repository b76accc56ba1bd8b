// SPDX-License-Identifier: Apache-2.0
#include "distr/version.h"

#define DISTR_TEXT(value) #value
#define DISTR_DOTTED(major, minor, patch) DISTR_TEXT(major) "." DISTR_TEXT(minor) "." DISTR_TEXT(patch)

namespace distr {
inline namespace v0 {

const char* version() noexcept { return DISTR_DOTTED(DISTR_VERSION_MAJOR, DISTR_VERSION_MINOR, DISTR_VERSION_PATCH); }

}  // namespace v0
}  // namespace distr
