// SPDX-License-Identifier: Apache-2.0
#include "gpu/time.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/result_file.h"
#include "distr/version.h"
#include "gpu/ablations.h"
#include "gpu/device_values.h"
#include "gpu/time_inputs.h"
#include "gpu/time_near_backward.h"
#include "support/cases.h"

namespace distr::test {
namespace {

// As a call asks for it that no backward follows.
ForwardTensors without_lse(ForwardTensors tensors) {
  tensors.lse = nullptr;
  return tensors;
}

using Json = nlohmann::ordered_json;

constexpr double kSeconds = 0.1;       // for one measurement
constexpr double kLongestCall = 0.3;   // seconds: a plain kernel that would take longer is left out
constexpr double kPlainFlops = 15e12;  // a second, about

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(Status::device_failure, std::string(what) + ": " + cudaGetErrorString(status));
  }
}

// One kernel in one setting, ready to be called.
template <class Tensors>
struct Call {
  Call(const KernelEntry<Tensors>& wanted, const Problem& p, const Grouping& g, void* stream)
      : kernel(wanted),
        execution(execution_on(stream)),
        plan(kernel.plan(p, g, execution)),
        workspace(plan.workspace.bytes()) {
    execution.workspace_bytes = plan.workspace.bytes();
    execution.workspace = workspace.data();
  }
  void operator()(const Tensors& tensors) const { plan.run(tensors, execution); }

  static Execution execution_on(void* stream) {
    Execution execution;
    execution.device = Device::cuda;
    execution.threads = 1;
    execution.stream = stream;
    return execution;
  }

  KernelEntry<Tensors> kernel;
  Execution execution;
  KernelPlan<Tensors> plan;
  Memory workspace;
};

template <class Tensors>
std::optional<Call<Tensors>> first_that_serves(std::span<const KernelEntry<Tensors>> kernels, const Problem& p,
                                               const Grouping& g, void* stream) {
  for (const KernelEntry<Tensors>& kernel : kernels) {
    if (kernel.supports(p, g).empty()) {
      return Call<Tensors>(kernel, p, g, stream);
    }
  }
  return std::nullopt;
}

Json row_of(const Problem& p, const Setting& setting, const std::string& kernel, const char* impl,
            const char* operation, const Times& times) {
  return {{"impl", impl},
          {"kernel", kernel},
          {"op", operation},
          {"batch", p.batch},
          {"heads", p.heads_q},
          {"kv_heads", p.heads_kv},
          {"seq_q", p.seq_q},
          {"seq_k", p.seq_k},
          {"head_dim", p.head_dim},
          {"head_dim_v", p.head_dim_v},
          {"dtype", name_of(p.dtype)},
          {"causal", p.causal != Causal::none},
          {"strategy", name_of(setting.strategy)},
          {"estimator", setting.strategy == Strategy::lsh ? Json("mean") : Json(nullptr)},
          {"group_size", setting.group_size},
          {"block", grouping_of(setting).block},
          {"ms", times.median()},
          {"ms_min", times.ms.front()},
          {"ms_max", times.ms.back()},
          {"runs", times.ms.size()}};
}

// All kernels on one shape.
class Shape {
 public:
  Shape(const TimeOptions& options, const Problem& problem, void* stream, Json& rows)
      : options_(options),
        problem_(problem),
        stream_(stream),
        rows_(rows),
        sets_(problem, stream),
        outputs_(problem.batch * problem.heads_q * problem.seq_q * problem.head_dim_v),
        exact_o_(static_cast<std::size_t>(outputs_) * size_of(problem.dtype)) {}

  void time_forward() {
    for (const ForwardKernel& kernel : cuda_backend().forward) {
      time_forward(kernel);
    }
  }

  void time_backward() {
    for (const BackwardKernel& kernel : cuda_backend().backward) {
      double exact_ms[2] = {0, 0};
      for (const Setting& setting : kSettings) {
        if (serves(kernel, setting, backward_flops(problem_))) {
          time_backward(kernel, setting, exact_ms);
        }
      }
    }
  }

  // The grouping kernels beside those that only read.
  void time_grouping() {
    for (const Setting& setting : {kSettings[1], kSettings[3]}) {
      for (const GroupingKernel& kernel : cuda_backend().grouping) {
        const auto reading = reading_ablation(kernel);
        if (!reading || !serves(kernel, setting, 0)) {
          continue;
        }
        const auto time = [&](const GroupingKernel& timed) {
          const Call call(timed, problem_, grouping_of(setting), stream_);
          return measure_in_graph(stream_, kSeconds, [&](int n) { call(sets_.grouping(n)); });
        };
        const Times times = time(kernel);
        const double floor = time(*reading).median();
        Json row = row_of(problem_, setting, kernel.name, "distr", "grouping", times);
        row["ms_only_reading"] = floor;
        row["ratio_to_only_reading"] = times.median() / floor;
        std::printf("%-30s %-24s %9.4f ms, only reading %9.4f ms, ratio %.2f", label(problem_).c_str(), kernel.name,
                    times.median(), floor, times.median() / floor);
        if (const auto launches = launching_ablation(kernel)) {
          row["ms_reading_and_a_launch"] = time(*launches).median();
          std::printf(", with an empty launch %9.4f ms", row["ms_reading_and_a_launch"].get<double>());
        }
        rows_.push_back(row);
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }

 private:
  template <class Kernel>
  [[nodiscard]] bool serves(const Kernel& kernel, const Setting& setting, double flops) const {
    const std::string name = kernel.name;
    const bool plain = name.rfind("plain/", 0) == 0;
    return name.find(options_.kernel) != std::string::npos &&
           (options_.strategy.empty() || options_.strategy == name_of(setting.strategy)) &&
           (!plain || flops / kPlainFlops <= kLongestCall) && kernel.supports(problem_, grouping_of(setting)).empty();
  }

  // The order's kernel, after it has written the orders of all sets. None for exact attention.
  [[nodiscard]] std::optional<Call<GroupingTensors>> make_orders(const Setting& setting) const {
    if (setting.strategy == Strategy::exact) {
      return std::nullopt;
    }
    auto order = first_that_serves(cuda_backend().grouping, problem_, grouping_of(setting), stream_);
    for (int n = 0; order && n < sets_.count(); ++n) {
      (*order)(sets_.grouping(n));
    }
    return order;
  }

  void time_forward(const ForwardKernel& kernel) {
    double exact_ms = 0;
    for (const Setting& setting : kSettings) {
      if (!serves(kernel, setting, forward_flops(problem_))) {
        continue;
      }
      const auto order = make_orders(setting);
      const Call call(kernel, problem_, grouping_of(setting), stream_);
      const Times times = measure(stream_, kSeconds, [&](int n) {
        if (order) {
          (*order)(sets_.grouping(n));
        }
        call(without_lse(sets_.forward(n)));
      });
      Json row = row_of(problem_, setting, kernel.name, "distr", "forward", times);
      if (order) {
        row["ms_grouping"] = measure(stream_, kSeconds / 4, [&](int n) { (*order)(sets_.grouping(n)); }).median();
      }
      time_ablations(kernel, setting, row);
      call(without_lse(sets_.forward(0)));
      if (setting.strategy == Strategy::exact && exact_ms == 0) {
        exact_ms = times.median();
        keep_exact();
      }
      if (has_exact_) {
        row["rel_error_out"] =
            relative_difference(sets_.forward(0).o, exact_o_.data(), problem_.dtype, outputs_, stream_);
      }
      add(row, times, forward_flops(problem_), exact_ms);
    }
  }

  // The kernel alone, and each of its ablations.
  void time_ablations(const ForwardKernel& kernel, const Setting& setting, Json& row) const {
    const Grouping grouping = grouping_of(setting);
    const auto time_alone = [&](const ForwardKernel& wanted) {
      const Call call(wanted, problem_, grouping, stream_);
      return measure(stream_, kSeconds, [&](int n) { call(without_lse(sets_.forward(n))); }).median();
    };
    for (const ForwardAblation& ablation : forward_ablations(kernel)) {
      if (ablation.kernel.supports(problem_, grouping).empty()) {
        if (!row.contains("ms_without")) {
          row["ms_without"] = {{"grouping", time_alone(kernel)}};
        }
        row["ms_without"][ablation.stage] = time_alone(ablation.kernel);
      }
    }
  }

  void keep_exact() {
    has_exact_ = true;
    require(cudaMemcpyAsync(exact_o_.data(), sets_.forward(0).o,
                            static_cast<std::size_t>(outputs_) * size_of(problem_.dtype), cudaMemcpyDeviceToDevice,
                            static_cast<cudaStream_t>(stream_)),
            "cudaMemcpyAsync");
  }

  // Backward alone, and with order and forward.
  void time_backward(const BackwardKernel& kernel, const Setting& setting, double (&exact_ms)[2]) {
    const auto order = make_orders(setting);
    const auto forward = first_that_serves(cuda_backend().forward, problem_, grouping_of(setting), stream_);
    const Call backward(kernel, problem_, grouping_of(setting), stream_);
    for (int n = 0; n < sets_.count(); ++n) {
      (*forward)(sets_.forward(n));
    }
    const Times alone = measure(stream_, kSeconds, [&](int n) { backward(sets_.backward(n)); });
    const Times whole = measure(stream_, kSeconds, [&](int n) {
      if (order) {
        (*order)(sets_.grouping(n));
      }
      (*forward)(sets_.forward(n));
      backward(sets_.backward(n));
    });
    if (setting.strategy == Strategy::exact) {
      exact_ms[0] = alone.median();
      exact_ms[1] = whole.median();
    }
    const double flops = backward_flops(problem_);
    add(row_of(problem_, setting, kernel.name, "distr", "backward", alone), alone, flops, exact_ms[0]);
    Json row = row_of(problem_, setting, kernel.name, "distr", "forward_backward", whole);
    row["kernel_forward"] = forward->kernel.name;
    add(row, whole, flops + forward_flops(problem_), exact_ms[1]);
  }

  void add(Json row, const Times& times, double flops, double exact_ms) {
    const double rate = flops / (times.median() * 1e-3) * 1e-12;
    row["tflops_exact_flops"] = rate;
    row["ratio_to_exact"] = exact_ms > 0 ? Json(exact_ms / times.median()) : Json(nullptr);
    const bool whole = row["block"] == kWholeSequence;
    std::printf("%-30s %-24s %-16s %-6s G%lld %5s %9.4f ms (%.4f to %.4f) %6.1f TFLOP/s %5.2fx exact",
                label(problem_).c_str(), row["kernel"].get<std::string>().c_str(), row["op"].get<std::string>().c_str(),
                row["strategy"].get<std::string>().c_str(),
                static_cast<long long>(row["group_size"].get<std::int64_t>()), whole ? "whole" : "", times.median(),
                times.ms.front(), times.ms.back(), rate, exact_ms / times.median());
    if (row.contains("ms_grouping")) {
      std::printf(" grouping %.4f", row["ms_grouping"].get<double>());
    }
    if (row.contains("rel_error_out")) {
      std::printf(" error %.3g", row["rel_error_out"].get<double>());
    }
    if (row.contains("ms_without")) {
      std::printf(" ms without %s", row["ms_without"].dump().c_str());
    }
    std::printf("\n");
    std::fflush(stdout);
    rows_.push_back(std::move(row));
  }

  const TimeOptions& options_;
  Problem problem_;
  void* stream_;
  Json& rows_;
  Sets sets_;
  std::int64_t outputs_;  // elements of O
  Memory exact_o_;        // of set 0
  bool has_exact_ = false;
};

Json meta_of(const TimeOptions& options) {
  cudaDeviceProp properties{};
  int runtime = 0;
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  require(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  const std::time_t now = std::time(nullptr);
  char date[32] = {};
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
  const auto text_or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
  return {{"gpu", properties.name},
          {"driver", text_or_null(options.driver)},
          {"cuda", std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10)},
          {"torch", nullptr},
          {"cudnn", nullptr},
          {"commit", text_or_null(options.commit)},
          {"date", date},
          {"command", options.command},
          {"version", version()}};
}

}  // namespace

int time_kernels(const TimeOptions& options) {
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  Json rows = Json::array();
  const auto for_each_shape = [&](const std::vector<Problem>& shapes, const auto& visit) {
    for (const Problem& problem : shapes) {
      if (label(problem).find(options.filter) != std::string::npos) {
        Shape shape(options, problem, stream, rows);
        visit(shape);
      }
    }
  };
  const auto named = [&](const std::string& operation) {
    return ("," + options.operations + ",").find("," + operation + ",") != std::string::npos;
  };
  const auto wanted = [&](const char* operation) { return options.operations.empty() || named(operation); };
  for_each_shape(attention_shapes(options.quick), [&](Shape& shape) {
    if (wanted("forward")) {
      shape.time_forward();
    }
    if (wanted("backward")) {
      shape.time_backward();
    }
  });
  if (wanted("grouping")) {
    for_each_shape(grouping_shapes(options.quick), [](Shape& shape) { shape.time_grouping(); });
  }
  if (named("near_backward")) {
    time_near_backward(options.filter, options.strategy, stream, rows);
  }
  if (!options.out.empty()) {
    std::ofstream file(options.out);
    file << cli::result_text({{"meta", meta_of(options)}, {"rows", rows}});
    if (!file) {
      throw Error(Status::invalid_argument, "cannot write " + options.out);
    }
  }
  if (rows.empty()) {
    std::printf("nothing was timed: no shape, no kernel or no strategy of that name\n");
  }
  return rows.empty() ? 1 : 0;
}

}  // namespace distr::test
