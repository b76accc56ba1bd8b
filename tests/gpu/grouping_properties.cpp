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
#include "support/check_order.h"

namespace distr::test {
namespace {

std::vector<std::int32_t> order_of(const GroupingKernel& kernel, const Instance& instance) {
  std::vector<std::int32_t> order(instance.order.size(), -1);
  run_on_device(kernel, instance.test_case.problem, instance.test_case.grouping,
                {instance.q_data(), instance.k_data(), order.data()});
  return order;
}

// Why the order or the means over the keys are wrong; empty: they are right.
std::string fault_of(const GroupingKernel& kernel, const Instance& instance) {
  std::vector<std::int32_t> order(instance.order.size(), -1);
  std::vector<float> key_means(instance.key_means.size(), -1.0F);
  run_on_device(kernel, instance.test_case.problem, instance.test_case.grouping,
                {instance.q_data(), instance.k_data(), order.data(), key_means.data()});
  return check_grouping(instance, order, key_means);
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

// One head whose blocks take the orders of those before them, with causality at the bottom right.
Case bottom_right_case(const std::string& name, std::int64_t rows, std::int64_t keys, std::int64_t d,
                       std::int64_t block, DType dtype) {
  Case result = make_case(name, Strategy::energy, 1, rows, d, dtype);
  result.problem.seq_k = keys;
  result.problem = contiguous(result.problem);
  result.problem.causal = Causal::bottom_right;
  result.grouping.block = block;
  result.grouping.order_from = OrderFrom::previous;
  return result;
}

// A large mean must not drown the spread around it.
std::string survives_a_large_mean(const GroupingKernel& kernel, DType dtype) {
  Case test_case = make_case("large mean", Strategy::energy, 1, 1000, 40, dtype);
  test_case.grouping.window = 0;
  if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
    return kNotAsked;
  }
  for (const OrderFrom from : {OrderFrom::own, OrderFrom::previous}) {
    test_case.grouping.order_from = from;
    Instance instance(test_case);
    for (std::int64_t n = 0; n < instance.k.count(); ++n) {
      instance.k.set(n, instance.k.at(n) + (dtype == DType::bf16 ? 100 : 1000));  // 0.5 apart in bf16 and f16
    }
    if (const std::string fault = fault_of(kernel, instance); !fault.empty()) {
      return fault;
    }
  }
  return "";
}

// The head's first key is far from all others: alone in the first strip of keys where there is one key more than rows,
// and where blocks are rows; or one of many.
std::string survives_a_far_first_key(const GroupingKernel& kernel, DType dtype) {
  struct Shape {
    std::int64_t rows, keys, block;
  };
  std::string fault = kNotAsked;
  for (const Shape& shape :
       {Shape{2560, 2561, 128}, Shape{640, 641, 16}, Shape{300, 300, 1}, Shape{4094, 4094, 2047}}) {
    const Case test_case = bottom_right_case("far first key", shape.rows, shape.keys, 64, shape.block, dtype);
    if (kernel.supports(test_case.problem, test_case.grouping).empty()) {
      Instance instance(test_case);
      for (std::int64_t c = 0; c < 64; ++c) {
        instance.k.set(c, 1000);
      }
      fault = fault_of(kernel, instance);
      if (!fault.empty()) {
        return "l " + std::to_string(shape.block) + ": " + fault;
      }
    }
  }
  return fault;
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

// Without keys energies are 0, but not those of infinite columns: 0 times infinity is NaN, and comes first.
std::string puts_infinite_queries_without_keys_first(const GroupingKernel& kernel, DType dtype) {
  const Case test_case = bottom_right_case("infinite, no keys", 100, 20, 40, 16, dtype);
  if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
    return kNotAsked;
  }
  Instance instance(test_case);
  instance.q.set(35, INFINITY);
  const std::int32_t first = order_of(kernel, instance)[40];  // of block 1
  return first == 35 ? "" : "column " + std::to_string(first) + " comes first, not 35";
}

// Of columns of the same energy, finite or not, the left one comes first.
std::string keeps_equal_columns_in_order(const GroupingKernel& kernel, DType dtype) {
  const Case test_case = make_case("equal columns", Strategy::energy, 1, 150, 72, dtype);
  if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
    return kNotAsked;
  }
  Instance instance(test_case);
  for (std::int64_t n = 0; n < instance.q.count(); ++n) {
    const std::int64_t c = n % 72;
    instance.q.set(n, instance.q.at(n - c + c % 36));
    instance.k.set(n, c % 36 == 7 && n / 72 == 3 ? INFINITY : instance.k.at(n - c + c % 36));
  }
  const std::vector<std::int32_t> order = order_of(kernel, instance);
  for (std::size_t n = 0; n < order.size(); n += 2) {
    if (order[n] + 36 != order[n + 1]) {
      return "column " + std::to_string(order[n + 1]) + " stands behind " + std::to_string(order[n]);
    }
  }
  return order[0] == 7 ? "" : "column " + std::to_string(order[0]) + " comes first, not 7";
}

// More keys, columns and rows of a block than the kernels take at a time.
std::string orders_more_than_it_takes_at_a_time(const GroupingKernel& kernel, DType dtype) {
  struct Shape {
    Strategy strategy;
    std::int64_t heads, rows, keys, d, block;
    OrderFrom from = OrderFrom::own;
  };
  constexpr Strategy kEnergy = Strategy::energy;
  constexpr Strategy kLsh = Strategy::lsh;
  constexpr OrderFrom kPrevious = OrderFrom::previous;
  std::string fault = kNotAsked;
  for (const Shape& shape : {Shape{kEnergy, 1, 5, 8100, 33, 128}, Shape{kEnergy, 2, 400, 3000, 24, 2},
                             Shape{kEnergy, 2, 400, 3000, 24, 2, kPrevious}, Shape{kEnergy, 1, 3, 300, 384, 128},
                             Shape{kEnergy, 1, 300, 300, 130, 128, kPrevious}, Shape{kEnergy, 1, 9000, 50, 8, 9000},
                             Shape{kEnergy, 1, 1000, 50, 24, 300}, Shape{kEnergy, 1, 3, 4500, 256, 128},
                             Shape{kEnergy, 1, 3, 4500, 512, 128}, Shape{kLsh, 2, 1000, 50, 24, 300},
                             Shape{kLsh, 2, 1000, 50, 24, 300, kPrevious}, Shape{kLsh, 1, 9000, 50, 8, 9000},
                             Shape{kLsh, 1, 16640, 50, 8, 16640}, Shape{kLsh, 1, 200, 50, 130, 64},
                             Shape{kLsh, 1, 200, 50, 256, 64, kPrevious}, Shape{kLsh, 1, 600, 50, 300, 520},
                             Shape{kLsh, 1, 100, 50, 512, 32}}) {
    Case test_case = make_case("more", shape.strategy, shape.heads, shape.rows, shape.d, dtype);
    test_case.problem.heads_kv = 1;
    test_case.problem.seq_k = shape.keys;
    test_case.problem = contiguous(test_case.problem);
    test_case.grouping.block = shape.block;
    test_case.grouping.order_from = shape.from;
    test_case.grouping.window = 0;
    if (kernel.supports(test_case.problem, test_case.grouping).empty()) {
      const Instance instance(test_case);
      fault = fault_of(kernel, instance);
      if (!fault.empty()) {
        return std::to_string(shape.rows) + " rows, " + std::to_string(shape.keys) + " keys, d " +
               std::to_string(shape.d) + ": " + fault;
      }
    }
  }
  return fault;
}

// Few blocks of Q, whose keys are less than a run, and the last block shorter than others.
std::string orders_few_blocks(const GroupingKernel& kernel, DType dtype) {
  std::string fault = kNotAsked;
  for (const std::int64_t rows : {40, 64, 100, 128, 200}) {
    Case test_case = make_case("few blocks", Strategy::energy, 1, rows, 24, dtype);
    test_case.grouping.block = 64;
    test_case.grouping.order_from = OrderFrom::previous;
    test_case.grouping.window = 0;
    if (kernel.supports(test_case.problem, test_case.grouping).empty()) {
      const Instance instance(test_case);
      fault = fault_of(kernel, instance);
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
      Case test_case = make_case("many blocks", strategy, 7, 311, 40, dtype);
      test_case.grouping.block = 1;
      test_case.grouping.order_from = from;
      if (kernel.supports(test_case.problem, test_case.grouping).empty()) {
        const Instance instance(test_case);
        const std::vector<std::int32_t> order = order_of(kernel, instance);
        // One row of Q is too few bits for check_order to judge lsh by.
        fault = strategy == Strategy::lsh ? (order == instance.order ? "" : "not the reference's order")
                                          : check_order(instance, order.data());
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
          {"survives a far first key", survives_a_far_first_key},
          {"puts values that are not finite first", puts_values_that_are_not_finite_first},
          {"puts infinite queries without keys first", puts_infinite_queries_without_keys_first},
          {"keeps equal columns in order", keeps_equal_columns_in_order},
          {"orders more than it takes at a time", orders_more_than_it_takes_at_a_time},
          {"orders few blocks", orders_few_blocks},
          {"orders many blocks", orders_many_blocks},
          {"never sees the future", never_sees_the_future}};
}

}  // namespace distr::test
