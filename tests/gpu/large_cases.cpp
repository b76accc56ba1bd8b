// SPDX-License-Identifier: Apache-2.0
#include "gpu/large_cases.h"

#include <cstdint>
#include <string>

#include "gpu/time_inputs.h"

namespace distr::test {
namespace {

Case large_case(const std::string& name, std::int64_t seq_q, std::int64_t seq_k, std::int64_t d, std::int64_t dv,
                Strategy strategy, std::int64_t group_size, std::int64_t block) {
  Case result;
  result.name = name;
  result.problem.seq_q = seq_q;
  result.problem.seq_k = seq_k;
  result.problem.head_dim = d;
  result.problem.head_dim_v = dv;
  result.problem = contiguous(result.problem);
  result.grouping.strategy = strategy;
  result.grouping.group_size = group_size;
  result.grouping.block = block;
  return result;
}

// About the order of tiles and the choice of a kernel. Of those named "large, many" suite.cpp leaves out the backward.
std::vector<Case> many_cases() {
  using enum Strategy;
  std::vector<Case> result;
  // More tiles of queries than a GPU runs at once, some split over the keys and some not.
  for (const Strategy strategy : {exact, energy, lsh}) {
    Case many =
        large_case("large, many heads, " + std::string(name_of(strategy)), 129, 584, 128, 128, strategy, 2, 128);
    many.problem.batch = 7;
    many.problem.heads_q = many.problem.heads_kv = 19;
    many.problem = contiguous(many.problem);
    result.push_back(many);
  }
  // As many short ones that blocks share an H200's SMs (sm90/heuristics.h).
  for (const Strategy strategy : {exact, lsh}) {
    Case shared = large_case("large, short heads, " + std::string(name_of(strategy)), 129, 130, 64, 64, strategy,
                             strategy == exact ? 1 : 4, 64);
    shared.problem.batch = 7;
    shared.problem.heads_q = shared.problem.heads_kv = 19;
    shared.problem = contiguous(shared.problem);
    result.push_back(shared);
  }
  // Causal heads of which the last are interleaved, and not the first (cuda/tile_scheduler.cuh).
  Case mixed = large_case("large, many causal heads", 400, 420, 128, 128, exact, 1, 128);
  mixed.problem.batch = 7;
  mixed.problem.heads_q = mixed.problem.heads_kv = 19;
  mixed.problem.causal = Causal::bottom_right;
  mixed.problem = contiguous(mixed.problem);
  result.push_back(mixed);
  // Twenty tiles of keys.
  for (const Strategy strategy : {exact, energy}) {
    Case keys = large_case("large, many keys, d 128, " + std::string(name_of(strategy)), 1030, 2500, 128, 128, strategy,
                           strategy == exact ? 1 : 2, 128);
    keys.problem.heads_q = keys.problem.heads_kv = 4;
    keys.problem.causal = Causal::bottom_right;
    keys.problem = contiguous(keys.problem);
    result.push_back(keys);
  }
  // So many that energy's keys are gathered at d = 64 too (sm90/heuristics.h).
  for (const Causal causal : {Causal::none, Causal::bottom_right}) {
    Case gathered = large_case("large, many keys" + std::string(causal == Causal::none ? "" : ", causal"), 1430, 4200,
                               64, 64, energy, 4, 128);
    gathered.problem.heads_q = gathered.problem.heads_kv = 3;
    gathered.problem.causal = causal;
    gathered.problem = contiguous(gathered.problem);
    result.push_back(gathered);
  }
  return result;
}

}  // namespace

std::vector<Case> large_cases() {
  using enum Strategy;
  std::vector<Case> result{
      large_case("large, exact, d 64", 1021, 2047, 64, 64, exact, 1, 128),
      large_case("large, exact, d 128", 1500, 1000, 128, 128, exact, 1, 128),
      large_case("large, exact, d 32", 1999, 1001, 32, 32, exact, 1, 128),
      large_case("large, exact, d 96 and 40", 777, 1333, 96, 40, exact, 1, 64),
      large_case("large, exact, d 256", 515, 1030, 256, 256, exact, 1, 64),
      large_case("large, lsh, d 64, G 2", 1201, 1531, 64, 64, lsh, 2, 128),
      large_case("large, lsh, d 128, G 2", 1025, 1111, 128, 128, lsh, 2, 128),
      large_case("large, lsh, d 128, G 4, l 64", 1000, 1200, 128, 128, lsh, 4, 64),
      large_case("large, lsh, d 64, G 8, l 256", 1300, 1100, 64, 64, lsh, 8, 256),
      large_case("large, lsh, d 80, G 3", 1000, 1000, 80, 80, lsh, 3, 128),
      large_case("large, lsh, d 32, G 2, one block", 1111, 1999, 32, 32, lsh, 2, 1 << 20),
      large_case("large, energy, d 64, G 2", 1201, 1531, 64, 64, energy, 2, 128),
      large_case("large, energy, d 128, G 4", 1025, 1111, 128, 128, energy, 4, 128),
      large_case("large, energy, d 256, G 2, l 64", 700, 900, 256, 256, energy, 2, 64),
      large_case("large, energy, d 128, G 8, l 256", 1400, 1000, 128, 128, energy, 8, 256),
      large_case("large, energy, d 64, G 2, one block", 1400, 1000, 64, 64, energy, 2, 1 << 20),
      large_case("large, exact, d 128, long", 600, 2500, 128, 128, exact, 1, 128),
  };
  const std::size_t count = result.size();
  for (std::size_t n = 0; n < count; n += 2) {  // every other one causal as well, in turn with both corners
    Case causal = result[n];
    causal.name += ", causal";
    causal.problem.causal = n % 4 == 0 ? Causal::top_left : Causal::bottom_right;
    const bool has_blocks = causal.grouping.block < causal.problem.seq_q;  // one block would be exact by `previous`
    causal.grouping.order_from = has_blocks && n % 8 < 4 ? OrderFrom::previous : OrderFrom::own;
    result.push_back(causal);
  }
  Case heads = large_case("large, lsh, GQA", 600, 1100, 64, 64, lsh, 2, 64);
  heads.problem.batch = 2;
  heads.problem.heads_q = 4;
  heads.problem.heads_kv = 2;
  heads.problem = contiguous(heads.problem);
  result.push_back(heads);
  for (const Strategy strategy : {energy, lsh}) {  // one grouping for the whole sequence
    Case whole = heads;
    whole.name = std::string("large, GQA, one block, ") + name_of(strategy);
    whole.problem.seq_q = 300;
    whole.problem.head_dim = whole.problem.head_dim_v = 128;
    whole.problem = contiguous(whole.problem);
    whole.grouping.strategy = strategy;
    whole.grouping.group_size = strategy == lsh ? 2 : 4;
    whole.grouping.estimator = Estimator::sample;
    whole.grouping.block = 1 << 20;
    result.push_back(whole);
  }
  for (const Strategy strategy : {energy, lsh}) {  // groupings of blocks of their own, for sm90 too
    Case blocks = heads;
    blocks.name = std::string("large, GQA, l 256, ") + name_of(strategy);
    blocks.problem.seq_q = 700;
    blocks.problem.head_dim = 120;
    blocks.problem.head_dim_v = 72;
    blocks.problem.causal = Causal::bottom_right;
    blocks.problem = contiguous(blocks.problem);
    blocks.grouping.strategy = strategy;
    blocks.grouping.group_size = 4;
    blocks.grouping.estimator = Estimator::sample;
    blocks.grouping.block = 256;
    blocks.grouping.order_from = strategy == lsh ? OrderFrom::previous : OrderFrom::own;
    result.push_back(blocks);
    Case low = large_case("large, G 4, low, " + std::string(name_of(strategy)), 270, 1340, 64, 64, strategy, 4, 128);
    low.values = Values::low;
    low.problem.scale = 0.5;
    result.push_back(low);
  }
  for (const Values values : {Values::normal, Values::low}) {  // tiles without a mask for sm90's three consumers
    const std::int64_t members = values == Values::low ? 4 : 2;
    Case causal = large_case("large, causal, one block, G " + std::to_string(members), 1340, 1340, 64, 64, energy,
                             members, 1 << 20);
    causal.problem.causal = Causal::top_left;
    causal.values = values;
    causal.problem.scale = 0.5;
    result.push_back(causal);
  }
  // Whole waves of an H200's blocks of three consumers, and the rest in blocks of two (sm90/heuristics.h).
  Case waves = large_case("large, one block, blocks of two sizes", 4096, 150, 64, 64, lsh, 2, 1 << 20);
  waves.problem.heads_q = waves.problem.heads_kv = 10;
  waves.problem = contiguous(waves.problem);
  result.push_back(waves);
  for (const Case& many : many_cases()) {
    result.push_back(many);
  }
  return result;
}

Case of_backward(const Case& test_case) { return test_case; }

}  // namespace distr::test
