// SPDX-License-Identifier: Apache-2.0
// The emulator catches mistakes: correct kernels pass with every seed, and a kernel with one mistake fails, by a
// message or a wrong result, with some of the first seeds.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "common/half.h"
#include "distr/error.h"
#include "emulator/device.h"
#include "emulator/faulty_kernels.h"

namespace distr::emulator::test {
namespace {

constexpr std::uint64_t kSeeds = 64;

// What is wrong with a run, in the words of the emulator or of run() itself; "" if nothing is.
using Run = std::function<std::string(Fault)>;

std::string run_pipeline(Fault fault) {
  std::vector<__nv_bfloat16> tiles(kTiles * kTileBytes / 2);
  for (std::size_t n = 0; n < tiles.size(); ++n) {
    tiles[n] = __float2bfloat16_rn(static_cast<float>(n % 61));
  }
  std::vector<float> d(64 * 64, -1);
  run_grid({dim3(1), dim3(512), kStages * kTileBytes + 128, [&] { pipeline(tiles.data(), d.data(), fault); }});
  for (int row = 0; row < 64; ++row) {
    for (int n = 0; n < 64; ++n) {
      float sum = 0;
      for (int tile = 0; tile < kTiles; ++tile) {  // k = 0 of row n: the first of its 16 bytes
        sum += static_cast<float>(tiles[static_cast<std::size_t>(tile * kTileBytes / 2 + n / 8 * 128 + n % 8 * 8)]);
      }
      if (d[static_cast<std::size_t>(row * 64 + n)] != sum) {
        return "wrong";
      }
    }
  }
  return "";
}

std::string run_store(Fault fault) {
  std::vector<uint4> d(128);
  run_grid({dim3(1), dim3(128), 128 * 16, [&] { store(reinterpret_cast<float*>(d.data()), fault); }});
  for (std::size_t n = 0; n < d.size(); ++n) {
    if (std::bit_cast<float>(d[n].w) != static_cast<float>(n)) {
      return "wrong";
    }
  }
  return "";
}

std::string run_chain(Fault fault) {
  unsigned counter = 0;
  std::vector<float> order(7, -1);
  run_grid({dim3(7), dim3(64), 0, [&] { chain(&counter, order.data(), fault); }});
  return counter == 7 && std::find(order.begin(), order.end(), -1.0F) == order.end() ? "" : "wrong";
}

std::string run_dependent(Fault fault) {
  std::vector<int> to(2);
  run_grid({dim3(2), dim3(32), 0, [&] { dependent(to.data(), fault); }, true});
  return to == std::vector<int>(2, 1) ? "" : "wrong";
}

std::string words(const Run& run, Fault fault) {
  try {
    return run(fault);
  } catch (const Error& error) {
    return error.what();
  }
}

struct FaultyKernel {
  const char* name;
  Run run;
  Fault fault;
  const char* message;  // a part of it
};

void PrintTo(const FaultyKernel& kernel, std::ostream* to) { *to << kernel.name; }

class Faults : public testing::TestWithParam<FaultyKernel> {};

TEST_P(Faults, AreCaught) {
  const FaultyKernel& kernel = GetParam();
  std::string all;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    set_seed(seed);
    EXPECT_EQ(words(kernel.run, Fault::none), "") << "seed " << seed;
    all += words(kernel.run, kernel.fault) + "\n";
  }
  EXPECT_NE(all.find(kernel.message), std::string::npos) << all;
}

const FaultyKernel kWrong[] = {
    {"ReleasesBeforeWait", run_pipeline, Fault::releases_before_wait, "which a read under way may not have seen"},
    {"ReadsBeforeWait", run_pipeline, Fault::reads_before_wait, "wrong"},
    {"TouchesOperand", run_pipeline, Fault::touches_operand, "an operand of wgmma in registers was written to"},
    {"TouchesAccumulator", run_pipeline, Fault::touches_accumulator, "an accumulator of wgmma was written to"},
    {"OmitsFence", run_pipeline, Fault::omits_fence, "wgmma without wgmma.fence"},
    {"OmitsWaitForCopy", run_pipeline, Fault::omits_wait_for_copy, "where a copy is under way"},
    {"ExpectsMoreBytes", run_pipeline, Fault::expects_more_bytes, "mbarrier"},
    {"ExpectsFewerBytes", run_pipeline, Fault::expects_fewer_bytes, "mbarrier"},
    {"ArrivesTwice", run_pipeline, Fault::arrives_twice, "no thread can go on"},
    {"InitialisesTwice", run_pipeline, Fault::initialises_twice, "was initialised before"},
    {"EndsEarly", run_pipeline, Fault::ends_early, "ends while its products are under way"},
    {"OverwritesBarrier", run_pipeline, Fault::overwrites_barrier, "a barrier whose memory was overwritten"},
    {"TakesTooManyRegisters", run_pipeline, Fault::takes_too_many_registers, "registers; allowed: up to 6"},
    {"WaitsForWhatMayPass", run_pipeline, Fault::waits_for_what_may_pass, "no thread can go on"},
    {"OmitsProxyFence", run_store, Fault::omits_proxy_fence, "without a proxy fence since"},
    {"OmitsSync", run_store, Fault::omits_sync, "which a read under way may not have seen"},
    {"OverwritesBeforeRead", run_store, Fault::overwrites_before_read, "which a read under way may not have seen"},
    {"WritesOutside", run_store, Fault::writes_outside, "outside the 2048 bytes"},
    {"EndsBeforeRead", run_store, Fault::ends_early, "the block ends while a bulk copy"},
    {"SplitsCollective", run_store, Fault::splits_collective, "while lanes of its warp are in"},
    {"WaitsForLaterBlock", run_chain, Fault::waits_for_later_block, "no thread can go on"},
    {"OmitsDependencyWait", run_dependent, Fault::omits_dependency_wait,
     "without having waited for the kernels before"},
};

INSTANTIATE_TEST_SUITE_P(Emulator, Faults, testing::ValuesIn(kWrong),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace distr::emulator::test
