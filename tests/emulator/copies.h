// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies: those of single threads (cp.async), and those of TMA (bulk and tensor).
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace distr::emulator {

// What cuTensorMapEncodeTiled keeps: 16-bit or other elements of `element` bytes, up to five axes.
struct TensorMap {
  std::uint64_t magic;
  std::byte* base;
  std::uint32_t rank, element;
  std::uint64_t sizes[5];
  std::uint64_t strides[5];  // bytes; that of axis 0 is the element's size
  std::uint32_t box[5];
  std::uint32_t swizzle;  // 0, 32, 64 or 128 bytes
};
inline constexpr std::uint64_t kTensorMapMagic = 0x7E4504A9;

// A shared address after the swizzle: the bits from 4 on are combined with those of the row.
[[nodiscard]] std::uint32_t swizzled(std::uint32_t address, std::uint32_t bytes);

void copy_async_16(std::uint32_t shared, const void* global, bool valid);
void copy_async_commit();
void copy_async_wait(std::size_t pending);

enum class Reduction { none, add };
void copy_box_in(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, const int* place, int rank);
// Checks that there is such a box, or one shortly before it, and does nothing else.
void tma_prefetch(const CUtensorMap& map, const int* place, int rank);
void copy_bulk_in(std::uint32_t shared, const void* global, unsigned bytes, std::uint32_t barrier);
void copy_bulk_out(void* global, std::uint32_t shared, unsigned bytes, Reduction reduction);
void copy_bulk_commit();
// Waits until shared memory has been read (`reads`), or until everything is written.
void copy_bulk_wait(std::size_t pending, bool reads);

}  // namespace distr::emulator
