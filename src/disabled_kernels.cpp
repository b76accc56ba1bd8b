// SPDX-License-Identifier: Apache-2.0
#include "disabled_kernels.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "distr/attention.h"
#include "distr/error.h"

namespace distr {
namespace {

// Calls visit(beginning) until it returns true; whether it did.
template <class Visitor>
bool any_beginning(std::string_view text, Visitor visit) {
  while (true) {
    const std::size_t comma = text.find(',');
    if (visit(text.substr(0, comma))) {
      return true;
    }
    if (comma == std::string_view::npos) {
      return false;
    }
    text.remove_prefix(comma + 1);
  }
}

}  // namespace

inline namespace v0 {

std::string_view disabled_kernels() noexcept {
  const char* text = std::getenv("DISTR_DISABLE_KERNELS");
  if (text == nullptr) {
    text = std::getenv("DISTR_LEAVE_OUT");  // its name until version 0.2
  }
  return text == nullptr ? "" : text;
}

}  // namespace v0

DisabledKernels::DisabledKernels() : beginnings_(disabled_kernels()) {}

bool DisabledKernels::has(std::string_view kernel) const noexcept {
  return !beginnings_.empty() &&
         any_beginning(beginnings_, [&](std::string_view beginning) { return kernel.starts_with(beginning); });
}

void DisabledKernels::validate() const {
  if (beginnings_.empty()) {
    return;
  }
  const auto kernels = list();
  any_beginning(beginnings_, [&](std::string_view beginning) {
    const auto begins = [&](const KernelInfo& kernel) { return kernel.name.starts_with(beginning); };
    if (beginning.empty() || std::none_of(kernels.begin(), kernels.end(), begins)) {
      throw Error(Status::invalid_argument, "DISTR_DISABLE_KERNELS has \"" + std::string(beginning) +
                                                "\"; allowed: beginnings of the names of this build's kernels, "
                                                "with commas between them");
    }
    return false;
  });
}

}  // namespace distr
