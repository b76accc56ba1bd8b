// SPDX-License-Identifier: Apache-2.0
#include "emulator/shared_memory.h"

#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>

#include "emulator/dynamic_arrays.h"
#include "emulator/thread_block.h"

namespace distr::emulator {
namespace {

// Of variables: beyond the addresses that the descriptors of wgmma can hold.
constexpr std::uint32_t kVariables = 1U << 24;

std::string hexadecimal(std::uint32_t address) {
  char words[16];
  std::snprintf(words, sizeof words, "0x%x", address);
  return words;
}

int find_variables(dl_phdr_info* object, std::size_t, void* found) {
  auto& memory = *static_cast<std::span<std::byte>*>(found);
  for (int n = 0; n < object->dlpi_phnum; ++n) {
    if (object->dlpi_phdr[n].p_type == PT_TLS && object->dlpi_tls_data != nullptr) {
      memory = {static_cast<std::byte*>(object->dlpi_tls_data), object->dlpi_phdr[n].p_memsz};
    }
  }
  return 1;  // the program itself comes first
}

}  // namespace

SharedMemory::SharedMemory() {
  std::span<std::byte> memory;
  dl_iterate_phdr(find_variables, &memory);
  variables_ = memory.data();
  variables_bytes_ = memory.size();
  dynamic_ = dynamic_arrays();
}

SharedMemory& shared_memory() {
  thread_local SharedMemory own;
  return own;
}

// NaN, or a number of no conspicuous size in any type, as a kernel may have a way out for NaN.
std::byte SharedMemory::garbage(Random& random) { return random.below(2) == 0 ? std::byte{0xFF} : std::byte{0x3D}; }

void SharedMemory::start(std::size_t bytes, Random& random) {
  used_ = nullptr;
  place_ = static_cast<std::uint32_t>(random.below(1 << 16));
  bytes_ = bytes;
  filler_ = garbage(random);
  marks_.assign((bytes + 15) / 16, Mark{});
  for (const DynamicArray& array : dynamic_) {
    if (bytes + kGuardBytes > array.bytes.size()) {
      thread_block().fail("a launch with " + std::to_string(bytes) + " bytes of shared memory");
    }
    std::memset(array.bytes.data(), static_cast<int>(filler_), bytes + kGuardBytes);
  }
}

bool SharedMemory::is_intact() const {
  return std::all_of(dynamic_.begin(), dynamic_.end(), [&](const DynamicArray& array) {
    const std::byte* const guard = array.bytes.data() + bytes_;
    return std::all_of(guard, guard + kGuardBytes, [&](std::byte x) { return x == filler_; });
  });
}

std::uint32_t SharedMemory::address(const void* pointer) {
  const auto* const byte = static_cast<const std::byte*>(pointer);
  for (const auto& [bytes, alignment] : dynamic_) {
    if (byte >= bytes.data() && byte < bytes.data() + bytes.size()) {
      if (used_ == nullptr) {
        used_ = bytes.data();
        base_ = 1024 + place_ % 1024 / alignment * alignment;
      }
      return base_ + static_cast<std::uint32_t>(byte - bytes.data());
    }
  }
  if (byte < variables_ || byte >= variables_ + variables_bytes_) {
    thread_block().fail("the shared address of something that is not in shared memory");
  }
  return kVariables + static_cast<std::uint32_t>(byte - variables_);
}

std::byte* SharedMemory::variable_at(std::uint32_t address, std::size_t bytes, std::uint32_t alignment,
                                     const char* user) {
  if (address % alignment != 0) {
    thread_block().fail(std::string(user) + " at shared address " + hexadecimal(address) + ", not a multiple of " +
                        std::to_string(alignment));
  }
  if (address >= kVariables && address - kVariables + bytes <= variables_bytes_) {
    return variables_ + (address - kVariables);
  }
  thread_block().fail(std::string(user) + " at shared address " + hexadecimal(address) + ", outside the " +
                      std::to_string(bytes_) + " bytes from " + hexadecimal(base_) + " on that the launch asked for");
}

// Of variables there are none.
std::span<SharedMemory::Mark> SharedMemory::marks(std::uint32_t address, std::size_t bytes) {
  if (address >= kVariables || bytes == 0) {
    return {};
  }
  const std::size_t first = (address - base_) / 16;
  return std::span(marks_).subspan(first, (address - base_ + bytes - 1) / 16 - first + 1);
}

void SharedMemory::fail(const Mark& mark, const char* user, const std::string& why) const {
  const auto index = static_cast<std::uint32_t>(&mark - marks_.data());
  thread_block().fail(std::string(user) + " at shared address " + hexadecimal(base_ + index * 16) + ", " + why);
}

void SharedMemory::stored(std::uint32_t address, std::size_t bytes, const Thread& thread) {
  for (Mark& mark : marks(address, bytes)) {
    if (mark.readers + mark.writers > 0) {
      fail(mark, "a store",
           mark.readers > 0 ? "which a read under way may not have seen" : "where a copy is under way");
    }
    mark.thread = static_cast<std::uint32_t>(thread.index) + 1;
    mark.fences = thread.proxy_fences;
  }
}

void SharedMemory::require_settled(std::uint32_t address, std::size_t bytes, Proxy proxy, const char* user) {
  for (const Mark& mark : marks(address, bytes)) {
    if (mark.writers > 0) {
      fail(mark, user, "where a copy is under way");
    }
    if (proxy == Proxy::async && mark.thread != 0 &&
        thread_block().thread(static_cast<int>(mark.thread) - 1).proxy_fences == mark.fences) {
      fail(mark, user, "which thread " + std::to_string(mark.thread - 1) + " stored without a proxy fence since");
    }
  }
}

void SharedMemory::begin_write(std::uint32_t address, std::size_t bytes, const char* user) {
  for (Mark& mark : marks(address, bytes)) {
    if (mark.readers + mark.writers > 0) {
      fail(mark, user, mark.readers > 0 ? "which a read under way may not have seen" : "where a copy is under way");
    }
    ++mark.writers;
  }
}

void SharedMemory::end_write(std::uint32_t address, std::size_t bytes) {
  for (Mark& mark : marks(address, bytes)) {
    mark.thread = 0;
    --mark.writers;
  }
}

void SharedMemory::begin_read(std::uint32_t address, std::size_t bytes, const char* user) {
  require_settled(address, bytes, Proxy::async, user);
  for (Mark& mark : marks(address, bytes)) {
    ++mark.readers;
  }
}

void SharedMemory::end_read(std::uint32_t address, std::size_t bytes) {
  for (Mark& mark : marks(address, bytes)) {
    --mark.readers;
  }
}

}  // namespace distr::emulator
