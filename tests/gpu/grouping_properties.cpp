// SPDX-License-Identifier: Apache-2.0
// What must hold of every grouping kernel beside its orders on the shared problems.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device_run.h"
#include "gpu/properties.h"
#include "gpu/suite.h"

namespace distr::test {
namespace {

std::vector<std::int32_t> order_of(const GroupingKernel& kernel, const Instance& instance) {
  std::vector<std::int32_t> order(instance.order.size(), -1);
  run_on_device(kernel, instance.test_case.problem, instance.test_case.grouping,
                {instance.q_data(), instance.k_data(), order.data()});
  return order;
}

Case make_case(const std::string& name, Strategy strategy, std::int64_t heads, std::int64_t rows, std::int64_t d,
               DType dtype) {
  Case result;
  result.name = name;
  result.problem.heads_q = result.problem.heads_kv = heads;
  result.problem.seq_q = result.problem.seq_k = rows;
  result.problem.head_dim = result.problem.head_dim_v = d;
  result.problem = contiguous(result.problem);
  result.grouping.strategy = strategy;
  result.grouping.group_size = 2;
  return with_dtype(result, dtype);
}

// A large mean must not drown the spread around it.
std::string survives_a_large_mean(const GroupingKernel& kernel, DType dtype) {
  const Case test_case = make_case("large mean", Strategy::energy, 1, 1000, 40, dtype);
  if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
    return kNotAsked;
  }
  for (const OrderFrom from : {OrderFrom::own, OrderFrom::previous}) {
    Instance instance(test_case);
    instance.test_case.grouping.order_from = from;
    for (std::int64_t n = 0; n < instance.k.count(); ++n) {
      instance.k.set(n, instance.k.at(n) + (dtype == DType::bf16 ? 100 : 1000));  // 0.5 apart in bf16 and f16
    }
    if (const std::string fault = judge_order(instance, order_of(kernel, instance).data()); !fault.empty()) {
      return fault;
    }
  }
  return "";
}

std::string puts_values_that_are_not_finite_first(const GroupingKernel& kernel, DType dtype) {
  const Case test_case = make_case("not finite", Strategy::energy, 1, 20, 6, dtype);
  if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
    return kNotAsked;
  }
  Instance instance(test_case);
  instance.q.set(6 + 3, std::nan(""));
  instance.k.set(12 + 5, INFINITY);
  const std::vector<std::int32_t> order = order_of(kernel, instance);
  if (order[0] != 3 || order[1] != 5) {
    return "columns " + std::to_string(order[0]) + " and " + std::to_string(order[1]) + " come first, not 3 and 5";
  }
  return "";
}

// Few blocks of Q, whose keys are less than a run, and the last block shorter than others.
std::string orders_few_blocks(const GroupingKernel& kernel, DType dtype) {
  std::string fault = kNotAsked;
  for (const std::int64_t rows : {40, 64, 100, 128, 200}) {
    Case test_case = make_case("few blocks", Strategy::energy, 1, rows, 24, dtype);
    test_case.grouping.block = 64;
    test_case.grouping.order_from = OrderFrom::previous;
    if (kernel.supports(test_case.problem, test_case.grouping).empty()) {
      const Instance instance(test_case);
      fault = judge_order(instance, order_of(kernel, instance).data());
      if (!fault.empty()) {
        return std::to_string(rows) + " rows: " + fault;
      }
    }
  }
  return fault;
}

// More blocks of Q than a grid has blocks of threads, so that one orders several.
std::string orders_many_blocks(const GroupingKernel& kernel, DType dtype) {
  std::string fault = kNotAsked;
  for (const Strategy strategy : {Strategy::energy, Strategy::lsh}) {
    for (const OrderFrom from : {OrderFrom::own, OrderFrom::previous}) {
      Case test_case = make_case("many blocks", strategy, 7, 370, 24, dtype);
      test_case.grouping.block = 1;
      test_case.grouping.order_from = from;
      if (kernel.supports(test_case.problem, test_case.grouping).empty()) {
        const Instance instance(test_case);
        const std::vector<std::int32_t> order = order_of(kernel, instance);
        // One row of Q is too few bits for judge_order to judge lsh by.
        fault = strategy == Strategy::lsh ? (order == instance.order ? "" : "not the reference's order")
                                          : judge_order(instance, order.data());
        if (!fault.empty()) {
          return std::string(from == OrderFrom::own ? "own: " : "previous: ") + fault;
        }
      }
    }
  }
  return fault;
}

// With `previous` the order of block b is that of the rows before it, whatever comes after.
std::string never_sees_the_future(const GroupingKernel& kernel, DType dtype) {
  std::string fault = kNotAsked;
  for (const Strategy strategy : {Strategy::energy, Strategy::lsh}) {
    for (const std::int64_t block : {16, 128, 512}) {
      Case test_case = make_case("future", strategy, 2, 1500, 24, dtype);
      test_case.problem.causal = Causal::top_left;
      test_case.grouping.block = block;
      test_case.grouping.order_from = OrderFrom::previous;
      if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
        continue;
      }
      fault = "";
      Instance instance(test_case);
      const std::vector<std::int32_t> before = order_of(kernel, instance);
      const std::int64_t kept =
          std::max<std::int64_t>(1500 / block * 4 / 9, 1);  // blocks, which end within a run of keys at l = 16
      for (std::int64_t n = 0; n < instance.q.count(); ++n) {
        if (n / 24 % 1500 >= kept * block) {
          instance.q.set(n, std::nan(""));
          instance.k.set(n, std::nan(""));
        }
      }
      const std::vector<std::int32_t> after = order_of(kernel, instance);
      const std::int64_t blocks = (1500 + block - 1) / block;
      for (std::int64_t row = 0; row < 2 * blocks; ++row) {
        const auto first = before.begin() + row * 24;
        if (row % blocks <= kept && !std::equal(first, first + 24, after.begin() + row * 24)) {
          return "l " + std::to_string(block) + ": the order of block " + std::to_string(row % blocks) + " changes";
        }
      }
    }
  }
  return fault;
}

}  // namespace

std::vector<Property<GroupingKernel>> grouping_properties() {
  return {{"survives a large mean", survives_a_large_mean},
          {"puts values that are not finite first", puts_values_that_are_not_finite_first},
          {"orders few blocks", orders_few_blocks},
          {"orders many blocks", orders_many_blocks},
          {"never sees the future", never_sees_the_future}};
}

}  // namespace distr::test
