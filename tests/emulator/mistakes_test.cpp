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
#include "emulator/mistakes.h"

namespace distr::emulator::test {
namespace {

constexpr std::uint64_t kSeeds = 8;

// What is wrong with a run, in the words of the emulator or of run() itself; "" if nothing is.
using Run = std::function<std::string(Mistake)>;

std::string run_pipeline(Mistake mistake) {
  std::vector<__nv_bfloat16> tiles(kTiles * kTileBytes / 2);
  for (std::size_t n = 0; n < tiles.size(); ++n) {
    tiles[n] = __float2bfloat16_rn(static_cast<float>(n % 61));
  }
  std::vector<float> d(64 * 64, -1);
  run_grid({dim3(1), dim3(512), kStages * kTileBytes + 128, [&] { pipeline(tiles.data(), d.data(), mistake); }});
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

std::string run_store(Mistake mistake) {
  std::vector<uint4> d(128);
  run_grid({dim3(1), dim3(128), 128 * 16, [&] { store(reinterpret_cast<float*>(d.data()), mistake); }});
  for (std::size_t n = 0; n < d.size(); ++n) {
    if (std::bit_cast<float>(d[n].w) != static_cast<float>(n)) {
      return "wrong";
    }
  }
  return "";
}

std::string run_chain(Mistake mistake) {
  unsigned counter = 0;
  std::vector<float> order(7, -1);
  run_grid({dim3(7), dim3(64), 0, [&] { chain(&counter, order.data(), mistake); }});
  return counter == 7 && std::find(order.begin(), order.end(), -1.0F) == order.end() ? "" : "wrong";
}

std::string run_early(Mistake mistake) {
  std::vector<int> to(2);
  run_grid({dim3(2), dim3(32), 0, [&] { early(to.data(), mistake); }, true});
  return to == std::vector<int>(2, 1) ? "" : "wrong";
}

std::string words(const Run& run, Mistake mistake) {
  try {
    return run(mistake);
  } catch (const Error& error) {
    return error.what();
  }
}

struct Wrong {
  const char* name;
  Run run;
  Mistake mistake;
  const char* message;  // a part of it
};

void PrintTo(const Wrong& wrong, std::ostream* to) { *to << wrong.name; }

class Mistakes : public testing::TestWithParam<Wrong> {};

TEST_P(Mistakes, AreCaught) {
  const Wrong& wrong = GetParam();
  std::string all;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    set_seed(seed);
    EXPECT_EQ(words(wrong.run, Mistake::none), "") << "seed " << seed;
    all += words(wrong.run, wrong.mistake) + "\n";
  }
  EXPECT_NE(all.find(wrong.message), std::string::npos) << all;
}

const Wrong kWrong[] = {
    {"ReleasesBeforeWait", run_pipeline, Mistake::releases_before_wait, "which a read under way may not have seen"},
    {"ReadsBeforeWait", run_pipeline, Mistake::reads_before_wait, "wrong"},
    {"TouchesOperand", run_pipeline, Mistake::touches_operand, "an operand of wgmma in registers was written to"},
    {"OmitsFence", run_pipeline, Mistake::omits_fence, "wgmma without wgmma.fence"},
    {"OmitsWaitForCopy", run_pipeline, Mistake::omits_wait_for_copy, "where a copy is under way"},
    {"ExpectsMoreBytes", run_pipeline, Mistake::expects_more_bytes, "mbarrier"},
    {"ExpectsFewerBytes", run_pipeline, Mistake::expects_fewer_bytes, "mbarrier"},
    {"ArrivesTwice", run_pipeline, Mistake::arrives_twice, "no thread can go on"},
    {"EndsEarly", run_pipeline, Mistake::ends_early, "ends while its products are under way"},
    {"OverwritesBarrier", run_pipeline, Mistake::overwrites_barrier, "a barrier whose memory was overwritten"},
    {"TakesTooManyRegisters", run_pipeline, Mistake::takes_too_many_registers, "registers; allowed: up to 6"},
    {"OmitsProxyFence", run_store, Mistake::omits_proxy_fence, "without a proxy fence since"},
    {"OmitsSync", run_store, Mistake::omits_sync, "which a read under way may not have seen"},
    {"OverwritesBeforeRead", run_store, Mistake::overwrites_before_read, "which a read under way may not have seen"},
    {"WritesOutside", run_store, Mistake::writes_outside, "outside the 2048 bytes"},
    {"EndsBeforeRead", run_store, Mistake::ends_early, "the block ends while a bulk copy"},
    {"SplitsCollective", run_store, Mistake::splits_collective, "while lanes of its warp are in"},
    {"WaitsForLaterBlock", run_chain, Mistake::waits_for_later_block, "no thread can go on"},
    {"OmitsWaitForInputs", run_early, Mistake::omits_wait_for_inputs, "without having waited for the kernels before"},
};

INSTANTIATE_TEST_SUITE_P(Emulator, Mistakes, testing::ValuesIn(kWrong),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace distr::emulator::test
