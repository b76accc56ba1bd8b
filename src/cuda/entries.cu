// SPDX-License-Identifier: Apache-2.0
// The kernels of the CUDA backend, in order of preference. What holds for all of them is checked here: that there is a
// device they can run on, and that the tensors are in its memory.
#include <array>
#include <string>
#include <utility>

#include "common/near.h"
#include "common/sequence.h"
#include "cuda/grouping.h"
#include "cuda/heuristics.h"
#include "cuda/launch.h"
#include "cuda/plain/plain.h"
#include "cuda/sm80/backward_launch.h"
#include "cuda/sm80/forward_launch.h"
#include "cuda/sm80/sequences_launch.h"
#include "cuda/sm90/backward_launch.h"
#include "cuda/sm90/forward_launch.h"
#include "disabled_kernels.h"
#include "kernel.h"

namespace distr {
namespace cuda {
namespace {

// Whether a kernel has near keys; its own supports() may still refuse some.
enum class NearKeys { none, served };

// Whether it has lengths that are data.
enum class DataLengths { none, served };

// The kernel's own reason comes before the device's, for which no kernel serves.
template <auto kSupports, NearKeys kNearKeys, DataLengths kLengths>
std::string supports(const Problem& problem, const Grouping& grouping) {
  std::string reason = kSupports(problem, grouping);
  if (kNearKeys == NearKeys::none && reason.empty()) {
    reason = common::reason_against_near_keys(grouping);
  }
  if (kLengths == DataLengths::none && reason.empty()) {
    reason = common::reason_against_lengths(problem);
  }
  return reason.empty() ? unusable_reason() : reason;
}

using NamedTensor = std::pair<const void*, const char*>;

constexpr const char* kKeyMeans = "the means of the keys";
constexpr const char* kStartsOfQ = "the starts of the sequences of Q";
constexpr const char* kStartsOfK = "the starts of the sequences of K";

std::array<NamedTensor, 4> named(const GroupingTensors& t) {
  return {{{t.q, "Q"}, {t.k, "K"}, {t.order, "the order"}, {t.key_means, kKeyMeans}}};
}

std::array<NamedTensor, 12> named(const ForwardTensors& t) {
  return {{{t.q, "Q"},
           {t.k, "K"},
           {t.v, "V"},
           {t.mask, "the mask"},
           {t.order, "the order"},
           {t.key_means, kKeyMeans},
           {t.o, "O"},
           {t.lse, "LSE"},
           {t.halves, "the counts of kept halves"},
           {t.lengths.keys, "the lengths of the keys"},
           {t.lengths.starts_q, kStartsOfQ},
           {t.lengths.starts_k, kStartsOfK}}};
}

std::array<NamedTensor, 16> named(const BackwardTensors& t) {
  return {{{t.q, "Q"},
           {t.k, "K"},
           {t.v, "V"},
           {t.mask, "the mask"},
           {t.order, "the order"},
           {t.key_means, kKeyMeans},
           {t.o, "O"},
           {t.lse, "LSE"},
           {t.d_o, "dO"},
           {t.d_lse, "dLSE"},
           {t.d_q, "dQ"},
           {t.d_k, "dK"},
           {t.d_v, "dV"},
           {t.d_mask, "the mask's gradient"},
           {t.lengths.starts_q, kStartsOfQ},
           {t.lengths.starts_k, kStartsOfK}}};
}

// The kernel's plan, whose run looks first at where the tensors are, unless the caller knows.
template <class Tensors, auto kPlan>
KernelPlan<Tensors> plan(const Problem& problem, const Grouping& grouping, const Execution& execution) {
  KernelPlan<Tensors> result = kPlan(problem, grouping, execution);
  result.run = [run = std::move(result.run)](const Tensors& tensors, const Execution& with) {
    if (with.check_memory) {
      const int device = current_device();
      for (const auto& [pointer, name] : named(tensors)) {
        require_device_memory(pointer, name, device);
      }
      require_device_memory(with.workspace, "the workspace", device);
    }
    run(tensors, with);
  };
  return result;
}

template <class Tensors, auto kSupports, auto kPlan, NearKeys kNearKeys = NearKeys::none,
          DataLengths kLengths = DataLengths::none>
constexpr KernelEntry<Tensors> entry(const char* name) {
  return {name, Device::cuda, supports<kSupports, kNearKeys, kLengths>, plan<Tensors, kPlan>};
}

template <class Tensors>
constexpr KernelEntry<Tensors> not_deterministic(KernelEntry<Tensors> kernel) {
  kernel.deterministic = false;
  return kernel;
}

constexpr std::array<GroupingKernel, 4> kGrouping{
    entry<GroupingTensors, identity::supports, identity::plan, NearKeys::served, DataLengths::served>("cuda/exact"),
    entry<GroupingTensors, lsh::supports, lsh::plan, NearKeys::served>("cuda/lsh"),
    entry<GroupingTensors, energy::supports, energy::plan, NearKeys::served>("cuda/energy"),
    entry<GroupingTensors, energy::supports_means, energy::plan, NearKeys::served>("cuda/means")};
// Hopper's own kernel for exact attention and for one grouping of the whole sequence, which `auto` asks for.
constexpr ForwardKernel kHopperForward =
    entry<ForwardTensors, sm90::forward_supports, sm90::plan_forward, NearKeys::served, DataLengths::served>(
        "sm90/forward");
constexpr std::array<ForwardKernel, 5> kForward{
    kHopperForward,
    entry<ForwardTensors, sm90::forward_blocks_supports, sm90::plan_forward, NearKeys::served>("sm90/forward_blocks"),
    entry<ForwardTensors, sm80::sequences_supports, sm80::plan_sequences, NearKeys::none, DataLengths::served>(
        "sm80/sequences"),
    entry<ForwardTensors, sm80::forward_supports, sm80::plan_forward, NearKeys::served>("sm80/forward"),
    entry<ForwardTensors, plain::supports, plain::plan_forward, NearKeys::served, DataLengths::served>(
        "plain/forward")};
constexpr std::array<BackwardKernel, 5> kBackward{
    not_deterministic(entry<BackwardTensors, sm90::backward_supports, sm90::plan_backward_atomics, NearKeys::served,
                            DataLengths::served>("sm90/backward_atomics")),
    entry<BackwardTensors, sm90::backward_supports, sm90::plan_backward, NearKeys::served, DataLengths::served>(
        "sm90/backward"),
    not_deterministic(
        entry<BackwardTensors, sm80::backward_supports, sm80::plan_backward_atomics>("sm80/backward_atomics")),
    entry<BackwardTensors, sm80::backward_supports, sm80::plan_backward, NearKeys::none, DataLengths::served>(
        "sm80/backward"),
    entry<BackwardTensors, plain::supports, plain::plan_backward, NearKeys::served, DataLengths::served>(
        "plain/backward")};

// Whether Hopper's own kernel would serve with another strategy.
bool is_served_by_hopper(const Problem& problem, Grouping grouping, Strategy strategy) {
  grouping.strategy = strategy;
  return !DisabledKernels().has(kHopperForward.name) && kHopperForward.supports(problem, grouping).empty();
}

}  // namespace
}  // namespace cuda

Backend cuda_backend() { return {cuda::kGrouping, cuda::kForward, cuda::kBackward}; }

Advice cuda_advice(const Problem& problem, const Grouping& grouping) {
  using cuda::is_served_by_hopper;
  return cuda::advise(problem, grouping,
                      {is_served_by_hopper(problem, grouping, Strategy::exact),
                       is_served_by_hopper(problem, grouping, Strategy::energy)});
}

}  // namespace distr
