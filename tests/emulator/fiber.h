// SPDX-License-Identifier: Apache-2.0
// Contexts of execution with stacks of their own, which hand the processor to each other.
#pragma once

#include <ucontext.h>
#include <csetjmp>
#include <cstddef>

namespace distr::emulator {

class Fiber {
 public:
  Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // From the next switch on, `body` runs on a fresh stack; it must never return. May be called again at any time but by
  // the fiber itself: what the fiber was at is forgotten.
  void prepare(void (*body)());
  // Goes on where `to` is; returns when somebody switches back to this one, which must be the running one.
  void switch_to(Fiber& to);

 private:
  static constexpr std::size_t kStackBytes = std::size_t{128} * 1024;

  static void begin();

  ucontext_t context_{};
  std::jmp_buf place_{};
  const std::size_t offset_;  // bytes of the stack that are not used
  void* stack_ = nullptr;
  void (*body_)() = nullptr;
  void* fake_stack_ = nullptr;          // AddressSanitizer's
  const void* stack_bottom_ = nullptr;  // of the fiber that a thread of the system starts with, as it finds out
  std::size_t stack_size_ = 0;
};

}  // namespace distr::emulator
