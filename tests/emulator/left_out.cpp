// SPDX-License-Identifier: Apache-2.0
// What the emulated check does without: the kernels of the CPU, which take long to compile, most cases that take long
// to run, and streams, whose work is done at once here.
#include "gpu/device_api.h"
#include "gpu/large_cases.h"
#include "kernel.h"

namespace distr {

Backend cpu_backend() { return {}; }

namespace test {

std::vector<Case> large_cases() {
  std::vector<Case> result;
  // Blocks on both sides of as many tiles of keys as sm90's consumers take by turns.
  for (const Strategy strategy : {Strategy::exact, Strategy::energy}) {
    Case keys;
    keys.name = strategy == Strategy::exact ? "many keys, exact" : "many keys, energy";
    keys.problem.seq_q = 200;
    keys.problem.seq_k = 2060;
    keys.problem.head_dim = keys.problem.head_dim_v = 72;
    keys.problem.causal = Causal::bottom_right;
    keys.problem = contiguous(keys.problem);
    keys.grouping.strategy = strategy;
    keys.grouping.group_size = strategy == Strategy::exact ? 1 : 4;
    keys.grouping.block = 128;
    result.push_back(keys);
  }
  // So many that energy's keys are picked at d = 64 too (forward_launch.cu, product_of).
  for (const std::int64_t group_size : {2, 4}) {
    Case picked;
    picked.name = "many keys, picked, G " + std::to_string(group_size);
    picked.problem.seq_q = 130;
    picked.problem.seq_k = 4100;
    picked.problem.head_dim = picked.problem.head_dim_v = 56;
    picked.problem = contiguous(picked.problem);
    picked.grouping.strategy = Strategy::energy;
    picked.grouping.group_size = group_size;
    picked.grouping.block = 128;
    result.push_back(picked);
  }
  // On three SMs blocks of three consumers and of two, of more than 32 columns (sm90/waves.h).
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
std::string judge_streams(DType) { return ""; }
std::string judge_memory() { return ""; }

}  // namespace test
}  // namespace distr
