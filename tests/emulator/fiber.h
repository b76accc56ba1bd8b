// SPDX-License-Identifier: Apache-2.0
// Fibers: execution contexts with their own stacks, which switch to each other explicitly.
#pragma once

#include <ucontext.h>
#include <cstddef>

namespace distr::emulator {

class Fiber {
 public:
  Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // Makes the fiber run `body`, which must never return, on a fresh stack from the next switch on. Any other fiber may
  // call it again at any time; what the fiber was doing is then abandoned.
  void prepare(void (*body)());
  // Continues `to`. Returns when another fiber switches back to this one, which must be the running one.
  void switch_to(Fiber& to);

 private:
  static constexpr std::size_t kStackBytes = std::size_t{128} * 1024;

  static void begin();

  ucontext_t context_{};
  void* place_[5] = {};       // where it goes on
  const std::size_t offset_;  // unused bytes of the stack
  void* stack_ = nullptr;
  void (*body_)() = nullptr;
  void* fake_stack_ = nullptr;          // AddressSanitizer's
  const void* stack_bottom_ = nullptr;  // of a system thread's first fiber, which AddressSanitizer tells
  std::size_t stack_size_ = 0;
};

}  // namespace distr::emulator
