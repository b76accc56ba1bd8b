// SPDX-License-Identifier: Apache-2.0
// Small kernels for faulty_kernels_test.cpp, each of which can be run correctly or with one mistake.
//
//   pipeline: D = the sum over tiles of A B_t, [64][64] from [64][16] [16][64]. Warpgroup 0 copies tiles into a ring of
//     two stages, warpgroup 1 multiplies, two more do nothing; A is in registers, all ones in its first column and zero
//     elsewhere.
//   store: 128 threads write 16 bytes each to shared memory, and one of them copies all of it to global memory in bulk.
//   chain: every block waits for the one before it to raise a counter.
//   early: a dependent launch, which may start before the kernel before it ends.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/sm90/ptx.cuh"
#include "emulator/dynamic_arrays.h"

namespace distr::cuda::sm90 {
extern thread_local constinit std::uint8_t memory[emulator::kMaxSharedBytes];
}  // namespace distr::cuda::sm90

namespace distr::emulator::test {

namespace ptx = cuda::ptx;

enum class Fault {
  none,
  releases_before_wait,
  reads_before_wait,
  touches_operand,
  touches_accumulator,
  omits_fence,
  omits_wait_for_copy,
  expects_more_bytes,
  expects_fewer_bytes,
  arrives_twice,
  initialises_twice,
  ends_early,
  omits_proxy_fence,
  omits_sync,
  overwrites_before_read,
  writes_outside,
  overwrites_barrier,
  takes_too_many_registers,
  waits_for_what_may_pass,
  splits_collective,
  waits_for_later_block,
  omits_dependency_wait,
};

inline constexpr int kTileBytes = 16 * 64 * 2;
inline constexpr int kStages = 2;
inline constexpr int kTiles = 6;

struct Shared {
  std::uint32_t base, full, empty;
  explicit Shared(const void* tiles, const std::uint64_t* barriers)
      : base((ptx::shared_address(tiles) + 127) / 128 * 128),
        full(ptx::shared_address(barriers)),
        empty(ptx::shared_address(barriers + kStages)) {}
};

inline void copy_tiles(const __nv_bfloat16* tiles, const Shared& shared, Fault fault) {
  for (int n = 0; n < kTiles; ++n) {
    const auto stage = static_cast<std::uint32_t>(n % kStages);
    ptx::barrier_wait(shared.empty + 8 * stage, (static_cast<unsigned>(n) / kStages % 2) ^ 1);
    const int more = fault == Fault::expects_more_bytes ? 16 : fault == Fault::expects_fewer_bytes ? -16 : 0;
    ptx::barrier_arrive_expect_tx(shared.full + 8 * stage, static_cast<unsigned>(kTileBytes + more));
    ptx::bulk_load(shared.base + stage * kTileBytes, tiles + n * (kTileBytes / 2), kTileBytes, shared.full + 8 * stage);
  }
}

inline void multiply_tiles(float* d, const Shared& shared, Fault fault) {
  const unsigned lane = threadIdx.x % 32;
  constexpr std::uint32_t kOne = 0x3F80;
  std::uint32_t a[4] = {lane % 4 == 0 ? kOne : 0, lane % 4 == 0 ? kOne : 0, 0, 0};
  float sums[32] = {};
  const auto release = [&](std::uint32_t stage) {
    if (lane == 0) {
      ptx::barrier_arrive(shared.empty + 8 * stage);
    }
  };
  for (int n = 0; n < kTiles; ++n) {
    const auto stage = static_cast<std::uint32_t>(n % kStages);
    if (fault != Fault::omits_wait_for_copy) {
      ptx::barrier_wait(shared.full + 8 * stage, static_cast<unsigned>(n) / kStages % 2);
    }
    if (fault != Fault::omits_fence) {
      ptx::wgmma_fence();
    }
    // Without a swizzle: eight rows (along k) of 16 bytes side by side, then those of the other half of k, then more n.
    constexpr std::uint64_t kLeading = 8, kStride = 16;  // 16 bytes each
    const std::uint64_t start = (shared.base + stage * kTileBytes) / 16;
    ptx::wgmma<ptx::Major::k>(sums, a, start | kLeading << 16 | kStride << 32, true, __nv_bfloat16{});
    ptx::wgmma_commit();
    if (fault == Fault::releases_before_wait) {
      release(stage);
    }
    if (fault == Fault::touches_accumulator && n == kTiles - 1) {
      sums[31] = 1;
    }
    if (fault == Fault::touches_operand) {
      a[3] = kOne;
    }
    if (fault == Fault::reads_before_wait && n == kTiles - 1) {
      d[0] = sums[0];
    }
    if (fault == Fault::ends_early && n == kTiles - 1) {
      return;
    }
    ptx::wgmma_wait<0>();
    if (fault != Fault::releases_before_wait) {
      release(stage);
    }
    if (fault == Fault::arrives_twice) {
      release(stage);
    }
  }
  const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(lane) / 4;
  for (int i = 0; i < 32; ++i) {
    const int at = (row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + static_cast<int>(lane) % 4 * 2 + i % 2;
    if (fault != Fault::reads_before_wait || at != 0) {
      d[at] = sums[i];
    }
  }
}

inline void pipeline(const __nv_bfloat16* tiles, float* d, Fault fault) {
  static thread_local std::uint64_t barriers[2 * kStages];
  const Shared shared(cuda::sm90::memory, barriers);
  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(shared.full + 8 * stage, 1);
      ptx::barrier_init(shared.empty + 8 * stage, 4);
    }
    if (fault == Fault::initialises_twice) {
      ptx::barrier_init(shared.full, 1);
    }
    ptx::barrier_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == 0) {
      copy_tiles(tiles, shared, fault);
    }
  } else {
    fault == Fault::takes_too_many_registers ? ptx::setmaxnreg_inc<240>() : ptx::setmaxnreg_inc<160>();
    if (fault == Fault::overwrites_barrier && threadIdx.x == 128) {
      barriers[0] = 0;
    }
    if (threadIdx.x < 256) {
      multiply_tiles(d, shared, fault);
    }
    // Nobody waits for this thread, so the barrier may be two phases further, whose parity is the same again.
    for (int n = 0; n < kTiles && fault == Fault::waits_for_what_may_pass && threadIdx.x == 256; ++n) {
      ptx::barrier_wait(shared.full + 8 * static_cast<std::uint32_t>(n % kStages),
                        static_cast<unsigned>(n) / kStages % 2);
    }
  }
}

inline uint4 bits_of(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return {bits, bits, bits, bits};
}

inline void store(float* d, Fault fault) {
  const std::uint32_t base = ptx::shared_address(cuda::sm90::memory);
  const auto thread = static_cast<std::uint32_t>(threadIdx.x);
  const auto x = static_cast<float>(threadIdx.x);
  const std::uint32_t all = fault == Fault::writes_outside ? 129 : 128;
  for (std::uint32_t n = thread; n < all; n += 128) {
    ptx::store_shared_16(base + n * 16, bits_of(x));
  }
  if (fault != Fault::omits_proxy_fence) {
    ptx::fence_proxy_async();
  }
  if (fault != Fault::omits_sync) {
    ptx::named_barrier_sync(1, 128);
  }
  if (thread == 0) {
    ptx::bulk_store(d, base, 128 * 16);
    ptx::bulk_commit();
    if (fault != Fault::overwrites_before_read && fault != Fault::ends_early) {
      ptx::bulk_wait_read<0>();
    }
    if (fault != Fault::ends_early) {
      ptx::store_shared_16(base, bits_of(-1.0F));
    }
    ptx::fence_proxy_async();
  }
  if (fault == Fault::splits_collective && thread % 32 == 3) {
    __syncwarp();
  } else {
    static_cast<void>(__ballot_sync(~0U, 1));
  }
}

inline void chain(unsigned* counter, float* order, Fault fault) {
  const unsigned wanted = fault == Fault::waits_for_later_block ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  if (threadIdx.x == 0) {
    while (ptx::load_acquire(counter) != wanted) {
    }
    order[wanted] = static_cast<float>(blockIdx.x);
    ptx::store_release(counter, wanted + 1);
  }
  __syncthreads();
}

inline void dependent(int* to, Fault fault) {
  if (fault != Fault::omits_dependency_wait || blockIdx.x == 0) {
    cudaGridDependencySynchronize();
  }
  to[blockIdx.x] = 1;
}

}  // namespace distr::emulator::test
