// SPDX-License-Identifier: Apache-2.0
// The shared memory of a block: the 32-bit addresses that instructions take, the bytes behind them, and which bytes
// were stored by a thread that has not executed a proxy fence since. Asynchronous reads may miss such bytes.
//
// __shared__ variables are thread_local, so each system thread, which runs one block at a time, has its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "emulator/dynamic_arrays.h"
#include "emulator/random.h"

namespace distr::emulator {

struct Thread;

class SharedMemory {
 public:
  // Starts a new block: fills `bytes` bytes with garbage, at an address that is aligned no better than declared.
  void start(std::size_t bytes, Random& random);
  // Whether the bytes behind them are unchanged.
  [[nodiscard]] bool is_intact() const;

  [[nodiscard]] std::uint32_t address(const void* pointer);
  // Fails the thread unless `bytes` bytes are there and the address is a multiple of `alignment`.
  [[nodiscard]] std::byte* at(std::uint32_t address, std::size_t bytes, std::uint32_t alignment, const char* user) {
    const bool is_dynamic = used_ != nullptr && address >= base_ && address - base_ + bytes <= bytes_;
    return is_dynamic && address % alignment == 0 ? used_ + (address - base_)
                                                  : variable_at(address, bytes, alignment, user);
  }

  // The value of a byte that nothing has written yet.
  [[nodiscard]] static std::byte garbage(Random& random);
  // Records an ordinary store. No asynchronous operation under way may read or write these bytes.
  void stored(std::uint32_t address, std::size_t bytes, const Thread& thread);
  // Fails if a copy to these bytes is under way, or with Proxy::async if asynchronous reads may not see them yet.
  enum class Proxy { generic, async };
  void require_settled(std::uint32_t address, std::size_t bytes, Proxy proxy, const char* user);
  // A copy or a product may write or read these bytes at any time between its beginning and its end.
  void begin_write(std::uint32_t address, std::size_t bytes, const char* user);
  void end_write(std::uint32_t address, std::size_t bytes);
  void begin_read(std::uint32_t address, std::size_t bytes, const char* user);
  void end_read(std::uint32_t address, std::size_t bytes);

 private:
  struct Mark {
    std::uint32_t thread = 0;                // the thread that stored them, + 1; 0: none
    std::uint32_t fences = 0;                // that thread's proxy fences when it stored
    std::uint16_t readers = 0, writers = 0;  // under way
  };
  static constexpr std::size_t kGuardBytes = 1024;

  [[nodiscard]] std::byte* variable_at(std::uint32_t address, std::size_t bytes, std::uint32_t alignment,
                                       const char* user);
  [[nodiscard]] std::span<Mark> marks(std::uint32_t address, std::size_t bytes);
  [[noreturn]] void fail(const Mark& mark, const char* user, const std::string& why) const;

  std::vector<DynamicArray> dynamic_;
  std::byte* used_ = nullptr;  // the array whose address the block took
  std::uint32_t base_ = 0;
  std::uint32_t place_ = 0;  // random, for the base
  std::size_t bytes_ = 0;
  std::byte filler_{};
  std::vector<Mark> marks_;         // of 16 bytes each
  std::byte* variables_ = nullptr;  // all thread_local memory of the program
  std::size_t variables_bytes_ = 0;

  friend SharedMemory& shared_memory();
  SharedMemory();
};

// The shared memory of the calling system thread.
[[nodiscard]] SharedMemory& shared_memory();

}  // namespace distr::emulator
