// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace distr {
inline namespace v0 {

/// What went wrong, for callers that map errors to exit statuses or to another language's exceptions.
enum class Status {
  invalid_argument,  ///< a value that no kernel could take; the message names it and what is allowed
  unsupported,       ///< a valid problem that no kernel here serves; the message lists each kernel's reason
  out_of_memory,     ///< a workspace that is too small, or device memory that could not be had
  device_failure,    ///< the device or its driver reported an error
};

/// The only exception that the library throws (besides std::bad_alloc). Outputs are untouched when a call throws
/// `invalid_argument` or `unsupported`: everything is checked before the first write.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  [[nodiscard]] Status status() const noexcept { return status_; }

 private:
  Status status_;
};

}  // namespace v0
}  // namespace distr
