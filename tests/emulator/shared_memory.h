// SPDX-License-Identifier: Apache-2.0
// A block's shared memory: the 32-bit addresses that instructions take, what lies behind them, and which bytes were
// stored by a thread that has not executed a proxy fence since, so that an asynchronous read may miss them.
//
// Variables __shared__ are thread_local, so each thread of the system, which runs a block at a time, has its own.
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
  // For a new block: garbage in `bytes` bytes, which begin at an address that is aligned no better than is declared.
  void start(std::size_t bytes, Random& random);
  // Whether what lies behind those bytes was left alone.
  [[nodiscard]] bool is_intact() const;

  [[nodiscard]] std::uint32_t address(const void* pointer);
  // Fails the thread unless `bytes` bytes are there and the address is a multiple of `alignment`.
  [[nodiscard]] std::byte* at(std::uint32_t address, std::size_t bytes, std::uint32_t alignment, const char* user);

  // What bytes hold that nobody has written yet.
  [[nodiscard]] static std::byte garbage(Random& random);
  // An ordinary store, which nothing under way may read or write.
  void stored(std::uint32_t address, std::size_t bytes, const Thread& thread);
  // Fails unless no copy to these bytes is under way; `proxy`: and asynchronous reads see them.
  enum class Proxy { generic, async };
  void require_settled(std::uint32_t address, std::size_t bytes, Proxy proxy, const char* user);
  // From its beginning to its end a copy or a product writes or reads these bytes at any time.
  void begin_write(std::uint32_t address, std::size_t bytes, const char* user);
  void end_write(std::uint32_t address, std::size_t bytes);
  void begin_read(std::uint32_t address, std::size_t bytes, const char* user);
  void end_read(std::uint32_t address, std::size_t bytes);

 private:
  struct Mark {
    std::uint32_t thread = 0;                // + 1; 0: nobody's
    std::uint32_t fences = 0;                // of that thread, when it stored
    std::uint16_t readers = 0, writers = 0;  // under way
  };
  static constexpr std::size_t kGuardBytes = 1024;

  [[nodiscard]] std::span<Mark> marks(std::uint32_t address, std::size_t bytes);
  [[noreturn]] void fail(const Mark& mark, const char* user, const std::string& why) const;

  std::vector<DynamicArray> dynamic_;
  std::byte* used_ = nullptr;  // the array that the block asked an address of
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

// That of the calling thread of the system.
[[nodiscard]] SharedMemory& shared_memory();

}  // namespace distr::emulator
