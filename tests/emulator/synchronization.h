// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier) and those with numbers.
#pragma once

#include <cstdint>

namespace distr::emulator {

void barrier_init(std::uint32_t barrier, unsigned arrivals);
// An arrival of the running thread that expects so many bytes more.
void barrier_arrive(std::uint32_t barrier, unsigned bytes);
void barrier_complete(std::uint32_t barrier, std::int64_t bytes, const char* user);
void barrier_wait(std::uint32_t barrier, unsigned parity);

void named_barrier_sync(int number, int threads);
// For the kernels before this one, which the emulator runs to their end.
void wait_for_inputs();

enum class Vote { none, any, all };
bool block_sync(Vote vote, bool holds);

}  // namespace distr::emulator
