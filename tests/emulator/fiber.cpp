// SPDX-License-Identifier: Apache-2.0
// A switch is a few instructions, or where there are none of ours the compiler's setjmp and longjmp: neither makes a
// system call, unlike swapcontext. AddressSanitizer follows only swapcontext, so it is told of each switch.
#include "emulator/fiber.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace distr::emulator {
namespace {

[[maybe_unused]] thread_local Fiber* starting = nullptr;
[[maybe_unused]] thread_local Fiber* preparing = nullptr;

// Stacks begin at different offsets, or their first lines would all fall into the same sets of the cache.
std::size_t next_offset() {
  static std::atomic<std::size_t> count = 0;
  constexpr std::size_t kStep = 13 * 64;
  constexpr std::size_t kMax = 16384;
  return count++ * kStep % kMax;
}

}  // namespace

Fiber::Fiber() : offset_(next_offset()) {}

Fiber::~Fiber() {
  if (stack_ != nullptr) {
    munmap(stack_, kStackBytes);
  }
}

#if defined(__SANITIZE_ADDRESS__)

void Fiber::begin() {
  Fiber* const self = starting;
  __sanitizer_finish_switch_fiber(nullptr, &preparing->stack_bottom_, &preparing->stack_size_);
  self->body_();
}

void Fiber::switch_to(Fiber& to) {
  starting = &to;
  preparing = this;
  __sanitizer_start_switch_fiber(&fake_stack_, to.stack_bottom_, to.stack_size_);
  swapcontext(&context_, &to.context_);
  __sanitizer_finish_switch_fiber(fake_stack_, &preparing->stack_bottom_, &preparing->stack_size_);
}

#elif !defined(__x86_64__)

namespace {

// A function of its own: the compiler allows no jump to where it may have come from.
[[gnu::noinline, noreturn]] void resume(void** place) { __builtin_longjmp(place, 1); }

}  // namespace

void Fiber::begin() {
  Fiber* const self = starting;
  if (__builtin_setjmp(self->place_) == 0) {
    setcontext(&preparing->context_);
  }
  self->body_();
}

void Fiber::switch_to(Fiber& to) {
  if (__builtin_setjmp(place_) == 0) {
    resume(to.place_);
  }
}

#endif

void Fiber::prepare(void (*body)()) {
  if (stack_ == nullptr) {
    stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack_ == MAP_FAILED) {
      stack_ = nullptr;
      throw std::bad_alloc();
    }
  }
  body_ = body;
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
  const auto top = reinterpret_cast<std::uintptr_t>(stack_) + kStackBytes - offset_;
  place_[0] = reinterpret_cast<void*>(body);
  place_[1] = reinterpret_cast<void*>(top - sizeof(void*));  // as behind a call, from a function aligned as offset_ is
  place_[2] = nullptr;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes - offset_;
  context_.uc_link = nullptr;
  stack_bottom_ = stack_;
  stack_size_ = kStackBytes;
  makecontext(&context_, &Fiber::begin, 0);
#if !defined(__SANITIZE_ADDRESS__)
  Fiber back;
  starting = this;
  preparing = &back;
  swapcontext(&back.context_, &context_);
#endif
#endif
}

}  // namespace distr::emulator
