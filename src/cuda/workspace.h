// SPDX-License-Identifier: Apache-2.0
// Parts of the caller's workspace, by type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"

namespace distr::cuda {

// Where the workspace holds elements of type T; nowhere, unless a layout was asked for them.
template <class T>
class Part {
 public:
  Part() = default;
  Part(WorkspaceLayout& layout, const char* name, std::int64_t count)
      : offset_(layout.add(name, static_cast<std::size_t>(count) * sizeof(T))), exists_(true) {}

  [[nodiscard]] bool exists() const noexcept { return exists_; }
  // Null where there is none.
  [[nodiscard]] T* in(void* workspace) const noexcept {
    return exists_ && workspace != nullptr ? reinterpret_cast<T*>(static_cast<std::byte*>(workspace) + offset_)
                                           : nullptr;
  }

 private:
  std::size_t offset_ = 0;
  bool exists_ = false;
};

}  // namespace distr::cuda
