// SPDX-License-Identifier: Apache-2.0
// The paper prints (256, 64), (128, 128) and (128, 32) for d = 32, 64 and 128 on 100 KB, which Equations 4 and 5 alone
// do not give, with powers of two or without. A bound l (m + d) <= R on the fp32 accumulators of S [l, m] and O [l, d]
// comes closest. How R was found: (256, 64) at d = 32 and (128, 128) at d = 64 both hold 24576 accumulators, so R is at
// least that; (256, 64) at d = 64, which shared memory allows, holds 32768, so R is less. In between lies what 4 warps
// can hold: 128 threads with at most 255 registers each, 32640. One tie remains: at d = 64, (256, 32) holds 24576
// accumulators too, and by "maximise l, then m" it comes before the (128, 128) that the paper prints. No R separates
// them. (Maximising l m, then l, would give all three printed pairs, but is not the rule that the paper states.)
#include "distr/blocks.h"

#include <limits>
#include <optional>
#include <string>

#include "distr/error.h"
#include "distr/problem.h"

namespace distr {
inline namespace v0 {
namespace {

constexpr std::int64_t kTile = 16;  // N', the side that tensor cores take
constexpr std::int64_t kCap = 256;
constexpr std::int64_t kLanes = 32;  // threads of a warp
constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

// The bounds on l and m of one GPU, kernel, d and rule.
struct Bounds {
  std::int64_t rows;          // of l + 2 m: Equation 5 solved for it
  std::int64_t cap;           // of l and of m
  std::int64_t accumulators;  // of l (m + d)
  std::int64_t head_dim;

  [[nodiscard]] std::optional<BlockConstraint> refuse(std::int64_t l, std::int64_t m) const {
    if (l > cap || m > cap) return BlockConstraint::cap;
    if (l + 2 * m > rows) return BlockConstraint::shared_memory;
    if (l * (m + head_dim) > accumulators) return BlockConstraint::registers;
    return std::nullopt;
  }
};

void require(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw Error(Status::invalid_argument, std::string(name) + ": " + std::to_string(value) +
                                            " is not allowed; allowed: " + std::to_string(low) + " to " +
                                            std::to_string(high));
}

void validate(const GpuProperties& gpu, std::int64_t head_dim, const BlockKernel& kernel) {
  require("shared_memory", gpu.shared_memory, 1, std::int64_t{1} << 24);
  require("tensor_cores", gpu.tensor_cores, 1, 64);
  require("registers_per_thread", gpu.registers_per_thread, 1, 65536);
  require("head_dim", head_dim, 1, kMaxHeadDim);
  require("warps", kernel.warps, 1, 32);
  require("element_bytes", kernel.element_bytes, 1, 8);
}

Bounds bounds_of(const GpuProperties& gpu, std::int64_t head_dim, BlockRule rule, const BlockKernel& kernel) {
  const std::int64_t rows = kernel.warps * gpu.shared_memory / (2 * gpu.tensor_cores * kernel.element_bytes * head_dim);
  const std::int64_t registers = kernel.warps * kLanes * gpu.registers_per_thread;
  return {rows, rule == BlockRule::literal ? kUnbounded : kCap, rule == BlockRule::registers ? registers : kUnbounded,
          head_dim};
}

struct Grown {
  std::int64_t size;
  BlockLimit limit;
};

// The largest size from 16 on, in the rule's steps, that `refuse` lets through.
template <typename Refuse>
Grown grow(BlockRule rule, const Refuse& refuse) {
  std::int64_t size = kTile;
  for (;;) {
    const std::int64_t next = rule == BlockRule::literal ? size + kTile : 2 * size;
    if (const std::optional<BlockConstraint> constraint = refuse(next)) {
      return {size, {*constraint, !refuse(size + 1)}};
    }
    size = next;
  }
}

}  // namespace

BlockChoice choose_blocks(const GpuProperties& gpu, std::int64_t head_dim, BlockRule rule, const BlockKernel& kernel) {
  validate(gpu, head_dim, kernel);
  const Bounds bounds = bounds_of(gpu, head_dim, rule, kernel);
  if (const auto constraint = bounds.refuse(kTile, kTile)) {
    throw Error(Status::invalid_argument,
                "no block fits head_dim " + std::to_string(head_dim) + ": l = m = 16 needs more " +
                    (*constraint == BlockConstraint::registers ? "registers" : "shared memory") + " than there is");
  }
  const Grown l = grow(rule, [&](std::int64_t size) { return bounds.refuse(size, kTile); });
  const Grown m = grow(rule, [&](std::int64_t size) { return bounds.refuse(l.size, size); });
  return {l.size, m.size, l.limit, m.limit};
}

}  // namespace v0
}  // namespace distr
