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
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
  // In place of a call, the return from which the processor would mispredict, as the last call was another fiber's.
  [[gnu::always_inline]] void switch_to(Fiber& to) {
    void** from = place_;
    void** place = to.place_;
    asm volatile(
        "leaq 1f(%%rip), %%rax\n\t"
        "movq %%rax, (%0)\n\t"
        "movq %%rsp, 8(%0)\n\t"
        "movq %%rbp, 16(%0)\n\t"
        "movq 8(%1), %%rsp\n\t"
        "movq 16(%1), %%rbp\n\t"
        "jmpq *(%1)\n"
        "1:"
        : "+D"(from), "+S"(place)
        :
        : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
          "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
          "cc", "memory");
  }
#else
  void switch_to(Fiber& to);
#endif

 private:
  static constexpr std::size_t kStackBytes = std::size_t{128} * 1024;

  static void begin();

  void* place_[5] = {};       // where it goes on
  const std::size_t offset_;  // unused bytes of the stack
  void* stack_ = nullptr;
  void (*body_)() = nullptr;
  void* fake_stack_ = nullptr;          // AddressSanitizer's
  const void* stack_bottom_ = nullptr;  // of a system thread's first fiber, which AddressSanitizer tells
  std::size_t stack_size_ = 0;
  ucontext_t context_{};
};

}  // namespace distr::emulator
