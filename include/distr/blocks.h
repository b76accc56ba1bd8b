// SPDX-License-Identifier: Apache-2.0
// The paper's rule for the sizes of blocks: l rows of Q and m rows of K and V (paper, Section 3.3.1, Equations 4 and
// 5).
#pragma once

#include <cstdint>

namespace distr {
inline namespace v0 {

/// What the rule reads of a GPU.
struct GpuProperties {
  std::int64_t shared_memory = 0;           ///< M_s: bytes of shared memory of one SM; 1 to 2^24
  std::int64_t tensor_cores = 4;            ///< N_T: tensor cores of one SM; 1 to 64
  std::int64_t registers_per_thread = 255;  ///< registers of 4 bytes that one thread can address; 1 to 65536
};

/// What the rule reads of a kernel.
struct BlockKernel {
  std::int64_t warps = 4;          ///< W_b: warps of one thread block; 1 to 32
  std::int64_t element_bytes = 2;  ///< w: bytes of one element of Q, K and V; 1 to 8
};

/// How the rule is read. All three take the largest l, and for it the largest m.
enum class BlockRule : std::uint8_t {
  literal,        ///< l and m multiples of 16 (Equation 4) that leave enough warps on an SM (Equation 5)
  powers_of_two,  ///< also: powers of two, at most 256
  registers,      ///< also: l (m + d) accumulators, those of S and O in fp32, fit the registers of the block's threads
};

/// What keeps l or m from growing.
enum class BlockConstraint : std::uint8_t {
  shared_memory,  ///< Equation 5: fewer than 2 N_T warps would have shared memory
  cap,            ///< at most 256
  registers,      ///< more accumulators than registers
};

struct BlockLimit {
  BlockConstraint constraint;  ///< what refuses the next size: 16 more, or twice as much for powers of two
  bool rounded;                ///< one row more would still fit: the step (16, or powers of two) binds as well
};

struct BlockChoice {
  std::int64_t l;  ///< rows of Q
  std::int64_t m;  ///< rows of K and V
  BlockLimit l_limit, m_limit;
};

/// The block sizes for Q [N, head_dim] and K, V [N, head_dim] by `rule`: multiples of N' = 16 with
///   warps * shared_memory / (element_bytes * (l * head_dim + 2 * m * head_dim)) >= 2 * tensor_cores.
/// Throws Error(invalid_argument) for a value out of range, and where not even l = m = 16 fits.
[[nodiscard]] BlockChoice choose_blocks(const GpuProperties& gpu, std::int64_t head_dim, BlockRule rule,
                                        const BlockKernel& kernel = {});

}  // namespace v0
}  // namespace distr
