// SPDX-License-Identifier: Apache-2.0
#include "emulator/copies.h"

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "emulator/shared_memory.h"
#include "emulator/synchronization.h"
#include "emulator/thread_block.h"

namespace distr::emulator {
namespace {

const TensorMap& tensor_map(const CUtensorMap& map, int rank) {
  const auto& known = reinterpret_cast<const TensorMap&>(map);
  if (known.magic != kTensorMapMagic || known.rank != static_cast<std::uint32_t>(rank)) {
    thread_block().fail("a tensor map that was not made for " + std::to_string(rank) + " axes");
  }
  return known;
}

struct Box {
  TensorMap map;
  std::int64_t place[5] = {};
  std::uint32_t shared = 0;
  std::uint32_t bytes = 0;

  Box(const CUtensorMap& from, const int* at, int rank, std::uint32_t address, const char* user)
      : map(tensor_map(from, rank)), shared(address) {
    bytes = map.element;
    for (int axis = 0; axis < rank; ++axis) {
      place[axis] = at[axis];
      bytes *= map.box[axis];
    }
    static_cast<void>(shared_memory().at(shared, bytes, 128, user));
  }

  // act(byte offset in shared memory, before the swizzle, bytes, pointer into the tensor or null) for every row.
  template <class Act>
  void for_rows(const Act& act) const {
    const std::uint32_t row_bytes = map.box[0] * map.element;
    std::uint32_t at[5] = {};
    for (std::uint32_t offset = 0; offset < bytes; offset += row_bytes) {
      bool inside = true;
      std::uint64_t offset_of_row = 0;  // wraps around
      for (std::uint32_t axis = 1; axis < map.rank; ++axis) {
        const std::int64_t index = place[axis] + at[axis];
        inside &= index >= 0 && index < static_cast<std::int64_t>(map.sizes[axis]);
        offset_of_row += static_cast<std::uint64_t>(index) * map.strides[axis];
      }
      act(offset, row_bytes, inside ? map.base + static_cast<std::int64_t>(offset_of_row) : nullptr);
      for (std::uint32_t axis = 1; axis < map.rank && ++at[axis] == map.box[axis]; ++axis) {
        at[axis] = 0;
      }
    }
  }
  [[nodiscard]] bool has_column(std::uint32_t column) const {
    const std::int64_t index = place[0] + column;
    return index >= 0 && index < static_cast<std::int64_t>(map.sizes[0]);
  }

  void read_tensor() const {
    SharedMemory& memory = shared_memory();
    for_rows([&](std::uint32_t offset, std::uint32_t row_bytes, const std::byte* row) {
      for (std::uint32_t byte = 0; byte < row_bytes; byte += 16) {
        std::byte piece[16] = {};
        const std::uint32_t first = byte / map.element;
        const std::uint32_t count = row != nullptr ? 16 / map.element : 0;
        if (count > 0 && has_column(first) && has_column(first + count - 1)) {
          std::memcpy(piece, row + (place[0] + first) * map.element, 16);
        } else {
          for (std::uint32_t element = 0; element < count; ++element) {
            if (has_column(first + element)) {
              std::memcpy(piece + element * map.element, row + (place[0] + first + element) * map.element, map.element);
            }
          }
        }
        std::memcpy(memory.at(swizzled(shared + offset + byte, map.swizzle), 16, 16, "a tensor copy"), piece, 16);
      }
    });
    memory.end_write(shared, bytes);
  }
};

// From now on until it is done the bytes may change at any time; half of all blocks see that at once.
void begin_write(std::uint32_t shared, std::uint32_t bytes, const char* user) {
  static_cast<void>(shared_memory().at(shared, bytes, 16, user));
  shared_memory().begin_write(shared, bytes, user);
  if (thread_block().random().below(2) == 0) {
    std::memset(shared_memory().at(shared, bytes, 16, user),
                static_cast<int>(SharedMemory::garbage(thread_block().random())), bytes);
  }
}

void begin_in(std::string what, std::function<void()> copy, std::uint32_t barrier, std::uint32_t bytes) {
  static_cast<void>(thread_block().barrier(barrier, "a copy"));
  Transfer transfer;
  transfer.number = thread_block().next_transfer();
  transfer.what = std::move(what);
  transfer.read = std::move(copy);
  transfer.write = [barrier, bytes] { barrier_complete(barrier, bytes, "a copy"); };
  thread_block().begin_transfer(std::move(transfer));
}

void begin_out(std::string what, std::function<std::vector<std::byte>()> read,
               std::function<void(const std::vector<std::byte>&)> write) {
  const auto bytes = std::make_shared<std::vector<std::byte>>();
  Transfer transfer;
  transfer.number = thread_block().next_transfer();
  transfer.what = std::move(what);
  transfer.read = [bytes, read = std::move(read)] { *bytes = read(); };
  transfer.write = [bytes, write = std::move(write)] { write(*bytes); };
  thread_block().thread().stores.push_back(transfer.number);
  thread_block().begin_transfer(std::move(transfer));
}

void require_bulk(const void* global, unsigned bytes) {
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    thread_block().fail("a bulk copy of " + std::to_string(bytes) + " bytes, or from an address, not a multiple of 16");
  }
}

}  // namespace

std::uint32_t swizzled(std::uint32_t address, std::uint32_t bytes) {
  switch (bytes) {
    case 128:
      return address ^ (address >> 3 & 0x70);
    case 64:
      return address ^ (address >> 3 & 0x30);
    case 32:
      return address ^ (address >> 3 & 0x10);
    default:
      return address;
  }
}

void copy_async_16(std::uint32_t shared, const void* global, bool valid) {
  static_cast<void>(shared_memory().at(shared, 16, 16, "cp.async"));
  if (valid && reinterpret_cast<std::uintptr_t>(global) % 16 != 0) {
    thread_block().fail("cp.async from an address that is not a multiple of 16");
  }
  begin_write(shared, 16, "cp.async");
  thread_block().thread().copies.push_back({shared, valid ? global : nullptr});
}

void copy_async_commit() {
  Thread& thread = thread_block().thread();
  thread.copy_groups.push_back(thread.copies.size());
}

void copy_async_wait(std::size_t pending) {
  Thread& thread = thread_block().thread();
  std::vector<std::size_t>& ends = thread.copy_groups;
  if (ends.size() <= pending) {
    return;
  }
  const auto done = ends.end() - static_cast<std::ptrdiff_t>(pending);
  const std::size_t count = done[-1];
  for (std::size_t n = 0; n < count; ++n) {
    const auto [shared, global] = thread.copies[n];
    std::byte piece[16] = {};
    if (global != nullptr) {
      std::memcpy(piece, global, 16);
    }
    std::memcpy(shared_memory().at(shared, 16, 16, "cp.async"), piece, 16);
    shared_memory().end_write(shared, 16);
    shared_memory().stored(shared, 16, thread);
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(count));
  ends.erase(ends.begin(), done);
  for (std::size_t& end : ends) {
    end -= count;
  }
}

void copy_box_in(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, const int* place, int rank) {
  const Box box(map, place, rank, shared, "cp.async.bulk.tensor");
  begin_write(shared, box.bytes, "cp.async.bulk.tensor");
  begin_in(
      "a tensor copy to shared memory", [box] { box.read_tensor(); }, barrier, box.bytes);
  thread_block().yield();
}

void tma_prefetch(const CUtensorMap& map, const int* place, int rank) {
  const TensorMap of = tensor_map(map, rank);
  for (int axis = 1; axis < rank; ++axis) {  // a block of three boxes of rows may begin with the tensor's last
    const std::uint64_t end = of.sizes[axis] + (axis == 1 ? 2 * of.box[1] : 0);
    if (place[axis] < 0 || static_cast<std::uint64_t>(place[axis]) >= end) {
      thread_block().fail("cp.async.bulk.prefetch.tensor of " + std::to_string(place[axis]) + " of " +
                          std::to_string(of.sizes[axis]) + " along axis " + std::to_string(axis));
    }
  }
}

void copy_bulk_in(std::uint32_t shared, const void* global, unsigned bytes, std::uint32_t barrier) {
  require_bulk(global, bytes);
  begin_write(shared, bytes, "cp.async.bulk");
  begin_in(
      "a bulk copy to shared memory",
      [shared, global, bytes] {
        std::memcpy(shared_memory().at(shared, bytes, 16, "cp.async.bulk"), global, bytes);
        shared_memory().end_write(shared, bytes);
      },
      barrier, bytes);
  thread_block().yield();
}

void copy_bulk_out(void* global, std::uint32_t shared, unsigned bytes, Reduction reduction) {
  require_bulk(global, bytes);
  static_cast<void>(shared_memory().at(shared, bytes, 16, "cp.async.bulk"));
  shared_memory().begin_read(shared, bytes, "cp.async.bulk");
  begin_out(
      "a bulk copy out of shared memory",
      [shared, bytes] {
        shared_memory().end_read(shared, bytes);
        const std::byte* const from = shared_memory().at(shared, bytes, 16, "cp.async.bulk");
        return std::vector<std::byte>(from, from + bytes);
      },
      [global, reduction](const std::vector<std::byte>& all) {
        if (reduction == Reduction::none) {
          std::memcpy(global, all.data(), all.size());
          return;
        }
        auto* const to = static_cast<float*>(global);
        for (std::size_t n = 0; n < all.size() / sizeof(float); ++n) {
          float more = 0;
          std::memcpy(&more, all.data() + n * sizeof(float), sizeof(float));
          to[n] += more;
        }
      });
  thread_block().yield();
}

void copy_bulk_commit() {
  Thread& thread = thread_block().thread();
  thread.store_groups.push_back(std::move(thread.stores));
  thread.stores.clear();
}

void copy_bulk_wait(std::size_t pending, bool reads) {
  Thread& thread = thread_block().thread();
  for (std::size_t n = 0; n + pending < thread.store_groups.size(); ++n) {
    for (const std::uint64_t number : thread.store_groups[n]) {
      if (!thread_block().is_done(number, reads)) {
        thread_block().advance(number, reads);
      }
    }
  }
  while (!reads && thread.store_groups.size() > pending) {
    thread.store_groups.pop_front();
  }
  thread_block().yield();
}

}  // namespace distr::emulator
