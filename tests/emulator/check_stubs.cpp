// SPDX-License-Identifier: Apache-2.0
// Stubs for what the emulated check leaves out: the CPU kernels, which take long to compile; most of the cases that
// take long to run; and streams, whose work is done at once here.
#include "common/element.h"
#include "common/mask.h"
#include "gpu/device_api.h"
#include "gpu/large_cases.h"
#include "kernel.h"

namespace distr {

Backend cpu_backend() { return {}; }
Advice cpu_advice(const Problem& /*problem*/, const Grouping& /*grouping*/) { return {}; }

namespace test {

std::vector<Case> large_cases() {
  std::vector<Case> result;
  // So many that energy's keys are gathered at d = 64 too (sm90/heuristics.h); as they are for larger d.
  for (const std::int64_t dim : {56, 72}) {
    Case gathered;
    gathered.name = "many keys, gathered, d " + std::to_string(dim);
    gathered.problem.seq_q = 130;
    gathered.problem.seq_k = 4100;
    gathered.problem.head_dim = gathered.problem.head_dim_v = dim;
    gathered.problem.causal = Causal::bottom_right;
    gathered.problem = contiguous(gathered.problem);
    gathered.grouping.strategy = Strategy::energy;
    gathered.grouping.group_size = 4;
    gathered.grouping.block = 128;
    result.push_back(gathered);
  }
  // On three SMs blocks of three consumers and of two, of more than 32 columns (sm90/heuristics.h).
  Case sizes;
  sizes.name = "many keys, lsh, blocks of two sizes";
  sizes.problem.heads_q = sizes.problem.heads_kv = 3;
  sizes.problem.seq_q = 700;
  sizes.problem.seq_k = 2820;
  sizes.problem.head_dim = sizes.problem.head_dim_v = 40;
  sizes.problem = contiguous(sizes.problem);
  sizes.grouping.strategy = Strategy::lsh;
  sizes.grouping.group_size = 5;
  sizes.grouping.block = 192;
  result.push_back(sizes);
  return result;
}
// Cases of so many keys are about the forward, which splits or gathers them. A backward has a thread block for each
// tile of keys, and decides nothing by their number: here that of tiles is less, with a last one as long, whatever its
// rows.
Case of_backward(const Case& test_case) {
  constexpr std::int64_t kManyKeys = 2000, kMostKeys = 512, kTiles = 384;  // a multiple of every tile's keys
  Case result = test_case;
  Problem& p = result.problem;
  if (p.seq_k > kManyKeys && !common::has_window(p)) {
    p.seq_k -= common::ceil_div(p.seq_k - kMostKeys, kTiles) * kTiles;
    p = contiguous(p);
  }
  return result;
}

std::string check_streams(DType) { return ""; }
std::string check_memory() { return ""; }

}  // namespace test
}  // namespace distr
