// SPDX-License-Identifier: Apache-2.0
// What must hold of every backward kernel beside its numbers on the shared problems.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "gpu/device_run.h"
#include "gpu/lengths_property.h"
#include "gpu/properties.h"
#include "gpu/sums_property.h"

namespace distr::test {
namespace {

// The tensors of one call: dO is fixed noise, O and LSE are from the plain forward.
struct Gradients {
  explicit Gradients(Instance& instance)
      : d_o(instance.o.count(), instance.o.dtype()),
        d_q(instance.q.count(), instance.q.dtype()),
        d_k(instance.k.count(), instance.k.dtype()),
        d_v(instance.v.count(), instance.v.dtype()) {
    for (std::int64_t n = 0; n < d_o.count(); ++n) {
      d_o.set(n, static_cast<double>(n * 37 % 101) / 50 - 1);
    }
    for (const ForwardKernel& kernel : cuda_backend().forward) {
      if (std::string(kernel.name) == "plain/forward") {
        run_on_device(kernel, instance.test_case.problem, instance.test_case.grouping, instance.forward());
      }
    }
  }

  void run(const BackwardKernel& kernel, Instance& instance, const Grouping& grouping) {
    BackwardTensors tensors{instance.q_data(),     instance.k_data(), instance.v_data(),   nullptr,
                            instance.order.data(), instance.o.data(), instance.lse.data(), d_o.data()};
    tensors.d_q = d_q.data();
    tensors.d_k = d_k.data();
    tensors.d_v = d_v.data();
    tensors.key_means = instance.key_means.data();
    run_on_device(kernel, instance.test_case.problem, grouping, tensors);
  }

  Buffer d_o, d_q, d_k, d_v;
};

// Whether two results for dQ in f16 or bf16 differ: in any bit, or, where the order of a sum may change, by more than
// what lies between the largest and its neighbour.
bool differ(const BackwardKernel& kernel, const std::vector<double>& a, const std::vector<double>& b, DType dtype) {
  if (kernel.deterministic) {
    return a != b;
  }
  double largest = 0;
  double difference = 0;
  for (std::size_t n = 0; n < a.size(); ++n) {
    largest = std::max(largest, std::abs(a[n]));
    difference = std::max(difference, std::abs(a[n] - b[n]));
  }
  return !(difference <= largest * (dtype == DType::bf16 ? 0x1p-7 : 0x1p-10));
}

std::vector<double> values(const Buffer& buffer) {
  std::vector<double> result;
  for (std::int64_t n = 0; n < buffer.count(); ++n) {
    result.push_back(buffer.at(n));
  }
  return result;
}

std::string group_size_one_is_exact(const BackwardKernel& kernel, DType dtype) {
  bool asked = false;
  for (const char* name : {"causal, square", "odd sizes"}) {
    const Case test_case = with_dtype(find(name), dtype);
    if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
      continue;
    }
    Instance instance(test_case);
    Gradients exact(instance);
    exact.run(kernel, instance, test_case.grouping);
    for (const Strategy strategy : {Strategy::lsh, Strategy::energy}) {
      Grouping grouped = test_case.grouping;
      grouped.strategy = strategy;
      grouped.group_size = 1;
      if (!kernel.supports(test_case.problem, grouped).empty()) {
        continue;
      }
      asked = true;
      Gradients gradients(instance);
      gradients.run(kernel, instance, grouped);
      if (differ(kernel, values(gradients.d_q), values(exact.d_q), dtype) ||
          !(gradients.d_k == exact.d_k && gradients.d_v == exact.d_v)) {
        return std::string(name) + ": G = 1 is not exact attention";
      }
    }
  }
  return asked ? "" : kNotAsked;
}

// dQ of the rows up to `last`, with the rows of Q, K, V and dO behind it set to `later`.
std::vector<double> dq_up_to(const BackwardKernel& kernel, const Case& test_case, std::int64_t last, double later) {
  Instance instance(test_case);
  const Problem& p = test_case.problem;
  const std::int64_t first = (last + 1) * p.head_dim;
  for (Buffer* buffer : {&instance.q, &instance.k, &instance.v}) {
    for (std::int64_t n = first; n < buffer->count(); ++n) {
      buffer->set(n, later);
    }
  }
  for (const GroupingKernel& grouping : cuda_backend().grouping) {
    if (grouping.supports(p, test_case.grouping).empty()) {
      run_on_device(grouping, p, test_case.grouping,
                    {instance.q_data(), instance.k_data(), instance.order.data(), instance.key_means.data()});
      break;
    }
  }
  Gradients gradients(instance);
  for (std::int64_t n = first; n < gradients.d_o.count(); ++n) {
    gradients.d_o.set(n, later);
  }
  gradients.run(kernel, instance, test_case.grouping);
  std::vector<double> result;
  for (std::int64_t n = 0; n < first; ++n) {
    result.push_back(gradients.d_q.at(n));
  }
  return result;
}

std::string dq_never_sees_the_future(const BackwardKernel& kernel, DType dtype) {
  bool asked = false;
  const auto changes = [&](Strategy strategy, bool has_near_keys) -> std::string {
    Case test_case;
    test_case.name = "future";
    Problem& p = test_case.problem;
    p.dtype = dtype;
    p.seq_q = p.seq_k = 300;
    p.head_dim = p.head_dim_v = 32;
    p.causal = Causal::top_left;
    p = contiguous(p);
    test_case.grouping.strategy = strategy;
    test_case.grouping.group_size = strategy == Strategy::exact ? 1 : 2;
    test_case.grouping.block = 64;
    test_case.grouping.order_from = OrderFrom::previous;
    if (has_near_keys) {
      test_case.grouping.block = 128;
      test_case.grouping.window = 0;
      test_case.grouping.sinks = 1;
    }
    if (!kernel.supports(p, test_case.grouping).empty()) {
      return "";
    }
    asked = true;
    const std::vector<double> unchanged = dq_up_to(kernel, test_case, p.seq_q - 1, 0);
    for (const std::int64_t last : {0, 63, 64, 100, 128, 250}) {
      const std::vector<double> after = dq_up_to(kernel, test_case, last, -4);
      const std::vector<double> before(unchanged.begin(), unchanged.begin() + std::ssize(after));
      if (differ(kernel, before, after, dtype)) {
        return "dQ up to row " + std::to_string(last) + " changes when later rows do" +
               (has_near_keys ? ", with near keys" : "");
      }
    }
    return "";
  };
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh, Strategy::energy}) {
    for (const bool has_near_keys : {false, true}) {
      if (std::string fault = changes(strategy, has_near_keys); !fault.empty()) {
        return fault;
      }
    }
  }
  return asked ? "" : kNotAsked;
}

// Of kernels that have near keys: where all keys are near, the gradients are exact attention's, in every bit.
std::string near_to_all_keys_is_exact(const BackwardKernel& kernel, DType dtype) {
  bool asked = false;
  for (const Strategy strategy : {Strategy::lsh, Strategy::energy}) {
    for (const std::int64_t block : {128, 1000}) {
      Case test_case;
      test_case.name = "near to all keys";
      Problem& p = test_case.problem;
      p.dtype = dtype;
      p.heads_q = 2;
      p.seq_q = p.seq_k = 300;
      p.head_dim = p.head_dim_v = 64;
      p.causal = Causal::top_left;
      p = contiguous(p);
      test_case.grouping = {.strategy = strategy, .group_size = 2, .block = block, .order_from = OrderFrom::own};
      test_case.grouping.window = 300;
      const Grouping exact{.strategy = Strategy::exact};
      if (!kernel.supports(p, test_case.grouping).empty() || !kernel.supports(p, exact).empty()) {
        continue;
      }
      asked = true;
      Instance instance(test_case);
      Gradients near(instance);
      near.run(kernel, instance, test_case.grouping);
      Gradients wanted(instance);
      wanted.run(kernel, instance, exact);
      if (differ(kernel, values(near.d_q), values(wanted.d_q), dtype) ||
          !(near.d_k == wanted.d_k && near.d_v == wanted.d_v)) {
        return std::string(traits(strategy).name) + ", blocks of " + std::to_string(block) +
               ": near to all keys is not exact attention";
      }
    }
  }
  return asked ? "" : kNotAsked;
}

// A tensor [B, H, N, d] in memory [B, N, H, d], behind its other rows' room for `more` numbers.
Strides rows_first(std::int64_t heads, std::int64_t rows, std::int64_t columns, std::int64_t more) {
  const std::int64_t row = heads * columns + more;
  return {.batch = rows * row, .head = columns, .row = row};
}

std::vector<double> in_order(const Buffer& buffer, const Strides& strides, std::int64_t batch, std::int64_t heads,
                             std::int64_t rows, std::int64_t columns) {
  std::vector<double> result;
  for (std::int64_t n = 0; n < batch * heads * rows * columns; ++n) {
    const std::int64_t row = n / columns;
    result.push_back(buffer.at(row / rows / heads * strides.batch + row / rows % heads * strides.head +
                               row % rows * strides.row + n % columns));
  }
  return result;
}

// dQ, dK and dV with strides of their own have the bits that they have with those of Q, K and V.
std::string gradients_lie_anywhere(const BackwardKernel& kernel, DType dtype) {
  bool asked = false;
  for (const std::int64_t block : {0, 128, 1000}) {  // 0: exact attention
    for (const std::int64_t window : {-1, 0}) {
      Case test_case;
      test_case.name = "gradients that lie anywhere";
      Problem& p = test_case.problem;
      p.dtype = dtype;
      p.batch = p.heads_q = 2;
      p.seq_q = 150;
      p.seq_k = 200;
      p.head_dim = 36;
      p.head_dim_v = 24;
      p = contiguous(p);
      test_case.grouping.strategy = block == 0 ? Strategy::exact : Strategy::energy;
      if (block > 0) {
        test_case.grouping.group_size = 2;
        test_case.grouping.block = block;
        test_case.grouping.order_from = OrderFrom::own;
      }
      if (window >= 0 && block > 0) {
        test_case.grouping.window = window;
      }
      if ((window >= 0 && block == 0) || !kernel.supports(p, test_case.grouping).empty()) {
        continue;
      }
      asked = true;
      Instance instance(test_case);
      Gradients wanted(instance);
      wanted.run(kernel, instance, test_case.grouping);
      Problem& own = instance.test_case.problem;
      own.d_q = rows_first(2, 150, 36, 1);  // rows that nothing wide can be stored to
      own.d_k = rows_first(1, 200, 36, 0);
      own.d_v = rows_first(1, 200, 24, 8);
      Gradients found(instance);
      found.d_q = Buffer(2 * own.d_q->batch, dtype);
      found.d_k = Buffer(2 * own.d_k->batch, dtype);
      found.d_v = Buffer(2 * own.d_v->batch, dtype);
      found.run(kernel, instance, test_case.grouping);
      if (differ(kernel, in_order(found.d_q, *own.d_q, 2, 2, 150, 36), in_order(wanted.d_q, p.q, 2, 2, 150, 36),
                 dtype) ||
          in_order(found.d_k, *own.d_k, 2, 1, 200, 36) != in_order(wanted.d_k, p.k, 2, 1, 200, 36) ||
          in_order(found.d_v, *own.d_v, 2, 1, 200, 24) != in_order(wanted.d_v, p.v, 2, 1, 200, 24)) {
        return "blocks of " + std::to_string(block) + ", window " + std::to_string(window) +
               ": gradients with strides of their own differ";
      }
    }
  }
  return asked ? "" : kNotAsked;
}

}  // namespace

std::vector<Property<BackwardKernel>> backward_properties() {
  return {{"G = 1 is exact", group_size_one_is_exact},
          {"with previous, dQ never sees the future", dq_never_sees_the_future},
          {"near to all keys is exact", near_to_all_keys_is_exact},
          {"gradients lie anywhere", gradients_lie_anywhere},
          {"long sums lose little",
           [](const BackwardKernel& kernel, DType dtype) { return long_sums_lose_little(kernel, dtype); }},
          {"sequences end anywhere",
           [](const BackwardKernel& kernel, DType dtype) { return sequences_end_anywhere(kernel, dtype); }}};
}

}  // namespace distr::test
