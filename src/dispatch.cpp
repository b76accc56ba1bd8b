// SPDX-License-Identifier: Apache-2.0
// What there is and what would serve, without doing it.
#include "dispatch.h"

#include <type_traits>
#include <utility>

namespace distr {
inline namespace v0 {

std::vector<KernelInfo> list() {
  std::vector<KernelInfo> kernels;
  for (const Operation operation : {Operation::grouping, Operation::forward, Operation::backward}) {
    with_tensors(operation, [&]<class Tensors>(std::type_identity<Tensors>) {
      for_each_kernel<Tensors>([&](const KernelEntry<Tensors>& entry) { kernels.push_back(info_of(entry)); });
    });
  }
  return kernels;
}

Explanation explain(Operation operation, const Problem& problem, const Grouping& grouping, Device device,
                    bool deterministic) {
  validate(problem, grouping);
  Resolved resolved = resolve(problem, grouping, device);
  Explanation result{resolved.grouping, std::move(resolved.choice), {}, {}};
  result.verdicts = with_tensors(operation, [&]<class Tensors>(std::type_identity<Tensors>) {
    return judge<Tensors>(problem, result.grouping, device, deterministic);
  });
  for (const KernelVerdict& verdict : result.verdicts) {
    if (verdict.reason.empty()) {
      result.kernel = verdict.kernel.name;
      break;
    }
  }
  return result;
}

Grouping resolve_strategy(const Problem& problem, const Grouping& grouping, Device device) {
  validate(problem, grouping);
  return resolve(problem, grouping, device).grouping;
}

std::vector<std::string> device_names(Device device) {
  std::string reason;
  return device == Device::cpu ? std::vector<std::string>{"cpu"} : cuda_device_names(reason);
}

}  // namespace v0
}  // namespace distr
