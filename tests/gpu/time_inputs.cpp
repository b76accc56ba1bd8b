// SPDX-License-Identifier: Apache-2.0
#include "gpu/time_inputs.h"

#include <algorithm>

#include "gpu/device_values.h"

namespace distr::test {

const char* name_of(Strategy strategy) {
  return strategy == Strategy::exact ? "exact" : strategy == Strategy::lsh ? "lsh" : "energy";
}

Grouping grouping_of(const Setting& setting) {
  Grouping grouping;
  grouping.order_from = OrderFrom::own;
  grouping.strategy = setting.strategy;
  grouping.group_size = setting.group_size;
  grouping.block = setting.block;
  return grouping;
}

Problem problem_of(std::int64_t batch, std::int64_t heads, std::int64_t d, std::int64_t n, bool causal) {
  Problem problem;
  problem.dtype = DType::bf16;
  problem.batch = batch;
  problem.heads_q = problem.heads_kv = heads;
  problem.seq_q = problem.seq_k = n;
  problem.head_dim = problem.head_dim_v = d;
  problem.causal = causal ? Causal::top_left : Causal::none;
  return contiguous(problem);
}

std::string label(const Problem& p) {
  return "B" + std::to_string(p.batch) + " H" + std::to_string(p.heads_q) + " d" + std::to_string(p.head_dim) + " N" +
         std::to_string(p.seq_q) + (p.causal == Causal::none ? "" : " causal");
}

std::vector<Problem> attention_shapes(bool quick) {
  std::vector<Problem> result;
  for (const std::int64_t d : {64, 128, 32}) {
    for (const std::int64_t n : {1024, 2048, 4096, 8192, 16384, 32768}) {
      for (const bool causal : {false, true}) {
        if (!quick || (d != 32 && (n == 4096 || (n == 16384 && !causal)))) {
          result.push_back(problem_of(1, 10, d, n, causal));
        }
        if (!quick) {
          result.push_back(problem_of(4, 16, d, n, causal));
        }
      }
    }
  }
  return result;
}

std::vector<Problem> grouping_shapes(bool quick) {
  std::vector<Problem> result;
  for (const std::int64_t heads : {1, 10, 32}) {
    for (const std::int64_t n : {2048, 4096, 10240, 20480, 40960}) {
      for (const std::int64_t d : {64, 128}) {
        if (!quick || (heads == 10 && d == 128)) {
          result.push_back(problem_of(1, heads, d, n, false));
        }
      }
    }
  }
  return result;
}

double forward_flops(const Problem& p) {
  const auto n = static_cast<double>(p.seq_q);
  const double pairs = p.causal == Causal::none ? n * static_cast<double>(p.seq_k) : n * (n + 1) / 2;
  return 2 * static_cast<double>(p.batch * p.heads_q) * pairs * static_cast<double>(p.head_dim + p.head_dim_v);
}

double backward_flops(const Problem& p) {
  return forward_flops(p) * static_cast<double>(3 * p.head_dim + 2 * p.head_dim_v) /
         static_cast<double>(p.head_dim + p.head_dim_v);
}

Sets::Sets(const Problem& p, void* stream) {
  constexpr double kCachedBytes = 128e6;  // more than any L2 holds
  constexpr int kMax = 8;
  const std::int64_t queries = p.batch * p.heads_q * p.seq_q;
  const std::int64_t keys = p.batch * p.heads_kv * p.seq_k;
  const auto memory = [&](std::int64_t count) { return Memory(static_cast<std::size_t>(count) * size_of(p.dtype)); };
  const auto order = order_shape(p, Grouping{});
  const auto inputs = static_cast<double>(queries * p.head_dim + keys * (p.head_dim + p.head_dim_v)) *
                      static_cast<double>(size_of(p.dtype));
  const int count = std::clamp(static_cast<int>(kCachedBytes / inputs) + 1, 2, kMax);
  for (int n = 0; n < count; ++n) {
    Set set{memory(queries * p.head_dim),
            memory(keys * p.head_dim),
            memory(keys * p.head_dim_v),
            memory(queries * p.head_dim_v),
            Memory(static_cast<std::size_t>(queries) * sizeof(float)),
            Memory(static_cast<std::size_t>(order[0] * order[1] * order[2] * order[3]) * sizeof(std::int32_t)),
            memory(queries * p.head_dim_v),
            memory(queries * p.head_dim),
            memory(keys * p.head_dim),
            memory(keys * p.head_dim_v)};
    const auto seed = static_cast<std::uint64_t>(4 * n);
    fill_normal(set.q.data(), p.dtype, queries * p.head_dim, seed, stream);
    fill_normal(set.k.data(), p.dtype, keys * p.head_dim, seed + 1, stream);
    fill_normal(set.v.data(), p.dtype, keys * p.head_dim_v, seed + 2, stream);
    fill_normal(set.d_o.data(), p.dtype, queries * p.head_dim_v, seed + 3, stream);
    sets_.push_back(std::move(set));
  }
}

GroupingTensors Sets::grouping(int n) const {
  const Set& set = at(n);
  return {set.q.data(), set.k.data(), static_cast<std::int32_t*>(set.order.data())};
}

ForwardTensors Sets::forward(int n) const {
  const Set& set = at(n);
  return {set.q.data(), set.k.data(),  set.v.data(), nullptr, static_cast<const std::int32_t*>(set.order.data()),
          set.o.data(), set.lse.data()};
}

BackwardTensors Sets::backward(int n) const {
  const Set& set = at(n);
  BackwardTensors tensors{
      set.q.data(), set.k.data(),   set.v.data(),  nullptr, static_cast<const std::int32_t*>(set.order.data()),
      set.o.data(), set.lse.data(), set.d_o.data()};
  tensors.d_q = set.d_q.data();
  tensors.d_k = set.d_k.data();
  tensors.d_v = set.d_v.data();
  return tensors;
}

}  // namespace distr::test
