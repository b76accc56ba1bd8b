// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier) and named barriers.
#pragma once

#include <cstdint>

namespace distr::emulator {

void barrier_init(std::uint32_t barrier, unsigned arrivals);
// The running thread arrives and makes the phase expect so many more bytes.
void barrier_arrive(std::uint32_t barrier, unsigned bytes);
void barrier_complete(std::uint32_t barrier, std::int64_t bytes, const char* user);
void barrier_wait(std::uint32_t barrier, unsigned parity);

void named_barrier_sync(int number, int threads);
// How many of the threads hold something.
unsigned named_barrier_count(int number, int threads, bool holds);
void named_barrier_arrive(int number, int threads);
// Waits for the kernels before this one. The emulator has already run them, so it only records the call.
void wait_on_dependent_grids();

enum class Vote { none, any, all };
bool block_sync(Vote vote, bool holds);

}  // namespace distr::emulator
