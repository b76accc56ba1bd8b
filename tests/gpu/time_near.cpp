// SPDX-License-Identifier: Apache-2.0
#include "gpu/time_near.h"

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <random>

#include "distr/plan.h"
#include "gpu/device_values.h"
#include "gpu/stopwatch.h"
#include "gpu/time_inputs.h"

namespace distr::test {
namespace {

struct NearSetting {
  Strategy strategy;
  std::int64_t group_size;
  bool has_near_keys;  // window 512, and with `skip` sinks 128
  double skip = 0;
  bool finish = false;
};

constexpr NearSetting kNearSettings[] = {{Strategy::exact, 1, false},
                                         {Strategy::exact, 1, true, 0.0025},
                                         {Strategy::energy, 2, false},
                                         {Strategy::energy, 2, true},
                                         {Strategy::energy, 2, true, 0.0025},
                                         {Strategy::energy, 4, true, 0.0025},
                                         {Strategy::energy, 4, true, 0.0025, true}};

Grouping grouping_of(const NearSetting& setting) {
  Grouping grouping{.strategy = setting.strategy, .group_size = setting.group_size, .order_from = OrderFrom::own};
  if (setting.has_near_keys) {
    grouping.window = 512;
    grouping.sinks = 128;
  }
  grouping.skip = setting.skip;
  grouping.finish = setting.finish;
  return grouping;
}

void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (cudaMemcpy(to, from, bytes, kind) != cudaSuccess) {
    throw Error(Status::device_failure, "cudaMemcpy failed");
  }
}

Memory uploaded(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  convert(values.data(), DType::f32, bytes.data(), dtype, static_cast<std::int64_t>(values.size()));
  Memory memory(bytes.size());
  copy(memory.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  return memory;
}

std::size_t count(const std::array<std::int64_t, 4>& shape) {
  return static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]);
}

// One set of inputs, and what the calls on it write.
class NearCalls {
 public:
  NearCalls(const Problem& problem, Memory q, Memory k, void* stream)
      : problem_(problem),
        stream_(stream),
        elements_(problem.batch * problem.heads_q * problem.seq_q * problem.head_dim),
        q_(std::move(q)),
        k_(std::move(k)),
        v_(static_cast<std::size_t>(elements_) * size_of(problem.dtype)),
        o_(static_cast<std::size_t>(elements_) * size_of(problem.dtype)),
        exact_(static_cast<std::size_t>(elements_) * size_of(problem.dtype)),
        halves_(count(halves_shape(problem)) * sizeof(std::int32_t)) {
    fill_normal(v_.data(), problem.dtype, elements_, 3, stream);
  }

  // share: of the halves that matter, as planted.
  nlohmann::ordered_json time(const NearSetting& setting, double share) {
    const Grouping grouping = grouping_of(setting);
    Execution execution;
    execution.device = Device::cuda;
    execution.stream = stream_;
    execution.check_memory = false;
    const Plan forward = plan(Operation::forward, problem_, grouping, execution);
    const bool groups = forward.reads_order();
    const Plan order = forward.for_operation(Operation::grouping);
    const Memory workspace(std::max(forward.workspace_bytes(), order.workspace_bytes()) + 1);
    const Memory orders(count(order_shape(problem_, grouping)) * sizeof(std::int32_t));
    const Memory means(count(key_means_shape(problem_, grouping)) * sizeof(float));
    execution.workspace = workspace.data();
    execution.workspace_bytes = std::max(forward.workspace_bytes(), order.workspace_bytes());
    const auto call = [&](bool counts) {
      if (groups) {
        order.run(GroupingTensors{q_.data(), k_.data(), static_cast<std::int32_t*>(orders.data()),
                                  static_cast<float*>(means.data())},
                  execution);
      }
      ForwardTensors tensors{q_.data(), k_.data(), v_.data(), nullptr, static_cast<const std::int32_t*>(orders.data()),
                             o_.data(), nullptr};
      tensors.key_means = static_cast<const float*>(means.data());
      tensors.halves = counts ? static_cast<std::int32_t*>(halves_.data()) : nullptr;
      forward.run(tensors, execution);
    };
    constexpr double kSeconds = 0.1;
    const Times times = measure(stream_, kSeconds, [&](int) { call(false); });
    nlohmann::ordered_json row{{"impl", "distr"},
                               {"kernel", forward.kernel().name},
                               {"op", "forward_near"},
                               {"batch", problem_.batch},
                               {"heads", problem_.heads_q},
                               {"seq", problem_.seq_q},
                               {"head_dim", problem_.head_dim},
                               {"causal", problem_.causal != Causal::none},
                               {"planted_share", share},
                               {"strategy", traits(setting.strategy).name},
                               {"group_size", setting.group_size},
                               {"window", grouping.window.value_or(-1)},
                               {"sinks", grouping.sinks},
                               {"skip", setting.skip},
                               {"finish", setting.finish},
                               {"ms", times.median()},
                               {"ms_min", times.ms.front()},
                               {"ms_max", times.ms.back()}};
    call(setting.skip > 0);
    if (setting.skip > 0) {
      row["kept_share"] = kept_share();
    }
    if (is_exact(grouping) && setting.skip == 0) {
      exact_ms_ = times.median();
      copy(exact_.data(), o_.data(), static_cast<std::size_t>(elements_) * size_of(problem_.dtype),
           cudaMemcpyDeviceToDevice);
    }
    if (exact_ms_ > 0) {
      row["time_of_exact"] = times.median() / exact_ms_;
      row["rel_error_out"] = relative_difference(o_.data(), exact_.data(), problem_.dtype, elements_, stream_);
    }
    return row;
  }

 private:
  [[nodiscard]] double kept_share() const {
    std::vector<std::int32_t> halves(count(halves_shape(problem_)));
    (void)cudaDeviceSynchronize();
    copy(halves.data(), halves_.data(), halves.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost);
    double kept = 0;
    double seen = 0;
    for (std::size_t n = 0; n < halves.size(); n += 2) {
      kept += halves[n];
      seen += halves[n + 1];
    }
    return seen == 0 ? 0 : kept / seen;
  }

  Problem problem_;
  void* stream_;
  std::int64_t elements_;
  Memory q_, k_, v_, o_, exact_, halves_;
  double exact_ms_ = 0;
};

}  // namespace

PlantedInputs planted_inputs(const Problem& problem, double share, std::uint64_t seed) {
  constexpr int kDirections = 8;  // the first columns; the others are noise
  constexpr double kScore = 5;    // of a key that matters, in nats, where the others have -5
  constexpr double kNoise = 0.5;  // standard deviation of the scores' noise, in nats
  constexpr std::int64_t kHalf = 64;
  const std::int64_t d = problem.head_dim;
  const double along = std::sqrt(kScore / problem.softmax_scale());
  const double noise = std::sqrt(kNoise / (problem.softmax_scale() * std::sqrt(static_cast<double>(d - kDirections))));
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(noise));
  std::bernoulli_distribution matters(share);
  PlantedInputs inputs;
  const std::int64_t heads = problem.batch * problem.heads_q;
  for (std::vector<float>* tensor : {&inputs.q, &inputs.k}) {
    tensor->resize(static_cast<std::size_t>(heads * problem.seq_q * d));
    for (float& x : *tensor) {
      x = normal(random);
    }
  }
  for (std::int64_t head = 0; head < heads; ++head) {
    const auto at = [&](std::vector<float>& tensor, std::int64_t row, std::int64_t c) -> float& {
      return tensor[static_cast<std::size_t>((head * problem.seq_q + row) * d + c)];
    };
    for (std::int64_t i = 0; i < problem.seq_q; ++i) {
      const std::int64_t region = i * kDirections / problem.seq_q;
      for (std::int64_t c = 0; c < kDirections; ++c) {
        at(inputs.q, i, c) = c == region ? static_cast<float>(along) : 0;
      }
    }
    for (std::int64_t first = 0; first < problem.seq_k; first += kHalf) {
      for (std::int64_t c = 0; c < kDirections; ++c) {
        const auto value = static_cast<float>(matters(random) ? along : -along);
        for (std::int64_t j = first; j < std::min(first + kHalf, problem.seq_k); ++j) {
          at(inputs.k, j, c) = value;
        }
      }
    }
  }
  return inputs;
}

void time_near(const std::string& filter, const std::string& strategy, void* stream, nlohmann::ordered_json& rows) {
  for (const std::int64_t d : {128, 64}) {
    for (const bool causal : {false, true}) {
      const Problem problem = problem_of(1, 10, d, 16384, causal);
      if (label(problem).find(filter) == std::string::npos) {
        continue;
      }
      for (const double share : {0.43, 1.0, 0.2}) {
        const PlantedInputs inputs = planted_inputs(problem, share, 7);
        NearCalls calls(problem, uploaded(inputs.q, problem.dtype), uploaded(inputs.k, problem.dtype), stream);
        for (const NearSetting& setting : kNearSettings) {
          if (!strategy.empty() && strategy != traits(setting.strategy).name) {
            continue;
          }
          rows.push_back(calls.time(setting, share));
          std::printf("%s planted %.2f: %s\n", label(problem).c_str(), share, rows.back().dump().c_str());
          std::fflush(stdout);
        }
      }
    }
  }
}

}  // namespace distr::test
