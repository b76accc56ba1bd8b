// SPDX-License-Identifier: Apache-2.0
#include "gpu/time_near_backward.h"

#include <cstdio>
#include <utility>

#include "distr/plan.h"
#include "gpu/stopwatch.h"
#include "gpu/time_inputs.h"

namespace distr::test {
namespace {

struct NearBackwardSetting {
  Setting setting;
  bool has_near_keys;  // window 512 and sinks 128
};

constexpr NearBackwardSetting kNearBackwardSettings[] = {
    {{Strategy::exact, 1}, false},
    {{Strategy::energy, 2}, false},
    {{Strategy::energy, 2}, true},
    {{Strategy::energy, 4}, true},
    {{Strategy::lsh, 2}, true},
    {{Strategy::energy, 2, kWholeSequence}, false},
    {{Strategy::energy, 2, kWholeSequence}, true},
    {{Strategy::energy, 4, kWholeSequence}, true},
};

// A plan of one operation, with a workspace of its own.
class Call {
 public:
  Call(Plan plan, Execution execution)
      : plan_(std::move(plan)), execution_(execution), workspace_(plan_.workspace_bytes() + 1) {
    execution_.workspace = workspace_.data();
    execution_.workspace_bytes = plan_.workspace_bytes();
  }
  template <class Tensors>
  void operator()(const Tensors& tensors) const {
    plan_.run(tensors, execution_);
  }
  [[nodiscard]] const Plan& plan() const { return plan_; }

 private:
  Plan plan_;
  Execution execution_;
  Memory workspace_;
};

// Backward alone, and with order, means and forward, on one set of inputs, which no L2 cache holds.
nlohmann::ordered_json time_setting(const Problem& problem, const NearBackwardSetting& of, const Sets& sets,
                                    void* stream) {
  Grouping grouping = grouping_of(of.setting);
  grouping.order_from = OrderFrom::own;
  if (of.has_near_keys) {
    grouping.window = 512;
    grouping.sinks = 128;
  }
  Execution execution;
  execution.device = Device::cuda;
  execution.stream = stream;
  execution.check_memory = false;
  const Call backward(plan(Operation::backward, problem, grouping, execution), execution);
  const Call forward(backward.plan().for_operation(Operation::forward), execution);
  const Call order(backward.plan().for_operation(Operation::grouping), execution);
  const auto shape = key_means_shape(problem, grouping);
  const Memory means(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]) * sizeof(float));
  const auto prepare = [&] {
    if (backward.plan().reads_order()) {
      GroupingTensors tensors = sets.grouping(0);
      tensors.key_means = static_cast<float*>(means.data());
      order(tensors);
    }
    ForwardTensors tensors = sets.forward(0);
    tensors.key_means = static_cast<const float*>(means.data());
    forward(tensors);
  };
  const auto differentiate = [&] {
    BackwardTensors tensors = sets.backward(0);
    tensors.key_means = static_cast<const float*>(means.data());
    backward(tensors);
  };
  constexpr double kSeconds = 0.1;
  prepare();
  const Times alone = measure(stream, kSeconds, [&](int) { differentiate(); });
  const Times whole = measure(stream, kSeconds, [&](int) {
    prepare();
    differentiate();
  });
  return {{"impl", "distr"},
          {"kernel", backward.plan().kernel().name},
          {"kernel_forward", forward.plan().kernel().name},
          {"op", "backward_near"},
          {"batch", problem.batch},
          {"heads", problem.heads_q},
          {"seq", problem.seq_q},
          {"head_dim", problem.head_dim},
          {"causal", problem.causal != Causal::none},
          {"strategy", name_of(grouping.strategy)},
          {"group_size", grouping.group_size},
          {"block", grouping.block},
          {"window", grouping.window.value_or(-1)},
          {"sinks", grouping.sinks},
          {"ms", alone.median()},
          {"ms_min", alone.ms.front()},
          {"ms_max", alone.ms.back()},
          {"ms_with_forward", whole.median()}};
}

}  // namespace

void time_near_backward(const std::string& filter, const std::string& strategy, void* stream,
                        nlohmann::ordered_json& rows) {
  for (const std::int64_t d : {128, 64}) {
    for (const bool causal : {false, true}) {
      const Problem problem = problem_of(1, 10, d, 16384, causal);
      if (label(problem).find(filter) == std::string::npos) {
        continue;
      }
      const Sets sets(problem, stream);
      nlohmann::ordered_json exact;
      for (const NearBackwardSetting& of : kNearBackwardSettings) {
        const bool is_exact = of.setting.strategy == Strategy::exact;  // what the others are compared with
        if (!is_exact && !strategy.empty() && strategy != name_of(of.setting.strategy)) {
          continue;
        }
        nlohmann::ordered_json row = time_setting(problem, of, sets, stream);
        if (is_exact) {
          exact = row;
        }
        row["time_of_exact"] = row["ms"].get<double>() / exact["ms"].get<double>();
        row["time_of_exact_with_forward"] =
            row["ms_with_forward"].get<double>() / exact["ms_with_forward"].get<double>();
        std::printf("%s: %s\n", label(problem).c_str(), row.dump().c_str());
        std::fflush(stdout);
        rows.push_back(std::move(row));
      }
    }
  }
}

}  // namespace distr::test
