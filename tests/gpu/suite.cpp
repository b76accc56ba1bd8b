// SPDX-License-Identifier: Apache-2.0
#include "gpu/suite.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "gpu/broken_kernels.h"
#include "gpu/device_api.h"
#include "gpu/device_run.h"
#include "gpu/forced_tiles.h"
#include "gpu/judge.h"
#include "gpu/large_cases.h"
#include "gpu/merge_check.h"
#include "gpu/properties.h"
#include "gpu/small_cases.h"
#include "gpu/stream_check.h"
#include "gpu/time_inputs.h"
#include "gpu/watchdog.h"
#include "support/lengths.h"
#include "support/magnitudes.h"
#include "support/oracle.h"

namespace distr::test {
namespace {

constexpr DType kDTypes[] = {DType::f16, DType::bf16, DType::f32};

// Stands for a kernel's name, and for a case's in --filter.
constexpr const char* kPublic = "public functions";

// Cases that are about the forward. Their textbook gradients, anew for each of four kernels, would take minutes.
bool is_of_forward_alone(const Case& test_case) {
  return test_case.grouping.skip > 0 || test_case.name.find("large, many") != std::string::npos;
}

// As CheckOptions::kernel.
bool is_named(const std::string& words, const std::string& kernel) {
  return words.starts_with('=') ? kernel == words.substr(1) : kernel.find(words) != std::string::npos;
}

struct Tally {
  int passed = 0, failed = 0;
  std::map<std::string, int> refused;  // by reason
};

class Checker {
 public:
  explicit Checker(const CheckOptions& options) : options_(options), watchdog_(options.time_limit) {}

  // Every kernel that serves the case.
  void check(const Case& test_case) {
    const Watchdog::Guard guard(watchdog_, label(test_case));
    check(Instance(test_case));
  }

  void check_non_finite(const Case& test_case) {
    for (const Instance& instance : with_non_finite(test_case)) {
      const bool in_values = instance.test_case.name.ends_with("in V");
      const Watchdog::Guard guard(watchdog_, label(instance.test_case));
      for (const auto& kernel : cuda_backend().forward) {
        if (!in_values || !needs_finite_values(kernel.name)) {
          check(kernel, instance);
        }
      }
      for (const auto& kernel : backward_kernels()) {
        if (reaches_everything(instance) || !needs_finite_values(kernel.name)) {
          check(kernel, instance);
        }
      }
    }
  }

  void check_magnitudes(const Case& test_case) {
    for (const Instance& instance : magnified(test_case)) {
      const Watchdog::Guard guard(watchdog_, label(instance.test_case));
      for (const ForwardKernel& kernel : cuda_backend().forward) {
        check(kernel, instance);
      }
      for (const ForwardKernel& kernel : forced_tiles()) {
        check(kernel, instance);
      }
    }
    for (const Instance& instance : magnified(test_case, Use::backward)) {
      const Watchdog::Guard guard(watchdog_, label(instance.test_case));
      for (const BackwardKernel& kernel : backward_kernels()) {
        if (wanted(kernel.name) && kernel.supports(test_case.problem, test_case.grouping).empty()) {
          record(kernel.name, label(instance.test_case), caught([&] { return judge_own(kernel, instance); }));
        }
      }
    }
  }

  void check_large_values(const Case& test_case) {
    for (const Instance& instance : with_large_values(test_case)) {
      const Watchdog::Guard guard(watchdog_, label(instance.test_case));
      const auto check_one = [&](const ForwardKernel& kernel) {
        if (wanted(kernel.name) && kernel.supports(test_case.problem, test_case.grouping).empty()) {
          record(kernel.name, label(instance.test_case), caught([&] { return judge_large_values(kernel, instance); }));
        }
      };
      std::ranges::for_each(cuda_backend().forward, check_one);
      std::ranges::for_each(forced_tiles(), check_one);
    }
  }

  void check_extremes(DType dtype) {
    for (const Extreme& extreme : extremes(dtype)) {
      const Watchdog::Guard guard(watchdog_, extreme.name);
      for (const ForwardKernel& kernel : cuda_backend().forward) {
        const Case& test_case = extreme.instance.test_case;
        const bool asked_for = test_case.problem.mask.kind != MaskKind::none || !needs_finite_values(kernel.name);
        if (asked_for && wanted(kernel.name) && kernel.supports(test_case.problem, test_case.grouping).empty()) {
          record(kernel.name, label(test_case), caught([&] { return check_extreme(kernel, extreme.instance); }));
        }
      }
    }
  }

  void check_properties(DType dtype) {
    check_properties(grouping_properties(), cuda_backend().grouping, dtype);
    check_properties(properties(), cuda_backend().forward, dtype);
    check_properties(backward_properties(), backward_kernels(), dtype);
  }

  void check_refusals() {
    const Watchdog::Guard guard(watchdog_, kPublic);
    record(kPublic, "refusals", caught(check_unsupported));
    record(kPublic, "memory and times", caught(check_memory));
    for (const DType dtype : kDTypes) {
      record(kPublic, std::string("merge, ") + name_of(dtype), caught([dtype] { return check_merge(dtype); }));
      record(kPublic, std::string("streaming, ") + name_of(dtype), caught([dtype] { return check_streaming(dtype); }));
    }
    for (const DType dtype : {DType::bf16, DType::f32}) {
      record(kPublic, std::string("streams, ") + name_of(dtype), caught([dtype] { return check_streams(dtype); }));
    }
  }

  // Kernels that are broken in one way each must not pass.
  void check_that_broken_kernels_fail() {
    const Backend backend = cuda_backend();
    check_broken(backend.grouping);
    check_broken(backend.forward);
    check_broken(backward_kernels());
  }

  [[nodiscard]] int report() const {
    int failed = 0;
    for (const auto& [name, tally] : tallies_) {
      std::printf("%-32s %5d passed, %d failed\n", name.c_str(), tally.passed, tally.failed);
      for (const auto& [reason, count] : tally.refused) {
        std::printf("    refused %d: %s\n", count, reason.c_str());
      }
      const bool idle = options_.filter.empty() && options_.name.empty() && tally.passed + tally.failed == 0;
      failed += tally.failed + (idle ? 1 : 0);
    }
    if (tallies_.empty()) {
      std::printf("no kernel of that name, or no case\n");
    }
    return tallies_.empty() || failed > 0 ? 1 : 0;
  }

 private:
  static std::string label(const Case& test_case) { return test_case.name + ", " + name_of(test_case.problem.dtype); }

  [[nodiscard]] bool wanted(const std::string& kernel) const { return is_named(options_.kernel, kernel); }

  template <class Kernel>
  void check_properties(const std::vector<Property<Kernel>>& wanted_properties, std::span<const Kernel> kernels,
                        DType dtype) {
    for (const Property<Kernel>& property : wanted_properties) {
      for (const Kernel& kernel : kernels) {
        if (wanted(kernel.name) && (options_.name.empty() || options_.name == property.name)) {
          const Watchdog::Guard guard(watchdog_, property.name);
          const std::string fault = caught([&] { return property.judge(kernel, dtype); });
          if (fault != kNotAsked) {
            record(kernel.name, std::string(property.name) + ", " + name_of(dtype), fault);
          }
        }
      }
    }
  }

  template <class Kernel>
  void check_broken(std::span<const Kernel> kernels) {
    for (const Kernel& kernel : kernels) {
      for (const BrokenKernel<Kernel>& broken : broken_kernels(kernel)) {
        const Case test_case = with_dtype(find(broken.case_name), DType::f16);
        if (wanted(kernel.name) && kernel.supports(test_case.problem, test_case.grouping).empty()) {
          const Watchdog::Guard guard(watchdog_, std::string(kernel.name) + ", " + broken.what);
          const std::string fault = caught([&] { return judge(broken.kernel, Instance(test_case)); });
          record(std::string("broken ") + kernel.name, broken.what, fault.empty() ? "was not caught" : "");
        }
      }
    }
  }

  void check(const Instance& instance) {
    const Backend backend = cuda_backend();
    for (const auto& kernel : backend.grouping) {
      check(kernel, instance);
    }
    for (const auto& kernel : backend.forward) {
      check(kernel, instance);
    }
    for (const auto& kernel : forced_tiles()) check(kernel, instance);
    if (is_of_forward_alone(instance.test_case)) {
      for (const auto& kernel : backward_kernels()) refuse(kernel.name, "is not asked what is of the forward alone");
      return;
    }
    const Case backward = of_backward(instance.test_case);
    const bool same = backward.problem == instance.test_case.problem;
    const std::optional<Instance> other = same ? std::nullopt : std::optional<Instance>(backward);
    for (const auto& kernel : backward_kernels()) {
      check(kernel, same ? instance : *other);
    }
  }

  // What is wrong by `judgement`, or what it throws.
  template <class Judgement>
  static std::string caught(const Judgement& judgement) {
    try {
      return judgement();
    } catch (const Fault& fault) {
      return fault.what();
    } catch (const Error& error) {
      return std::string("threw: ") + error.what();
    }
  }

  template <class Kernel>
  void check(const Kernel& kernel, const Instance& instance) {
    if (!wanted(kernel.name)) return;
    const Case& test_case = instance.test_case;
    if constexpr (!std::is_same_v<Kernel, GroupingKernel>) check_with_lengths(kernel, instance);
    const std::string reason = kernel.supports(test_case.problem, test_case.grouping);
    if (!reason.empty()) {
      refuse(kernel.name, reason);
      return;
    }
    record(kernel.name, label(test_case), caught([&] { return judge(kernel, instance); }));
  }

  template <class Kernel>
  void check_with_lengths(const Kernel& kernel, const Instance& instance) {
    const Case& test_case = instance.test_case;
    for (const LengthsAs kind : {LengthsAs::keys, LengthsAs::packed}) {
      const bool asks = std::is_same_v<Kernel, ForwardKernel> || kind == LengthsAs::packed;
      if (asks && can_have_lengths(test_case, kind) &&
          kernel.supports(with_lengths(test_case.problem, kind), test_case.grouping).empty()) {
        record(kernel.name, label(test_case) + ", " + name_of(kind),
               caught([&] { return judge_with_lengths(kernel, kind, instance); }));
      }
    }
  }

  void refuse(const std::string& kernel, const std::string& reason) {
    if (!wanted(kernel)) return;
    const std::lock_guard lock(mutex_);
    ++tallies_[kernel].refused[reason];
  }

  void record(const std::string& kernel, const std::string& what, const std::string& fault) {
    const std::lock_guard lock(mutex_);
    Tally& tally = tallies_[kernel];
    ++(fault.empty() ? tally.passed : tally.failed);
    if (fault.empty()) return;
    std::printf("FAILED %s | %s: %s\n", kernel.c_str(), what.c_str(), fault.c_str());
    std::fflush(stdout);
  }

  const CheckOptions& options_;
  Watchdog watchdog_;
  std::mutex mutex_;
  std::map<std::string, Tally> tallies_;
};

std::vector<Case> wanted_cases(const CheckOptions& options) {
  std::vector<Case> all;
  if (options.small) {
    for (const char* name : kSmall) {
      all.push_back(find(name));
    }
  } else {
    all = large_cases();  // first, for they take longest
    for (const auto* list : {&cases(), &near_cases()}) {
      all.insert(all.end(), list->begin(), list->end());
    }
  }
  std::vector<Case> result;
  for (std::size_t n = 0; n < all.size(); ++n) {
    const Case& test_case = all[n];
    for (const DType dtype : kDTypes) {
      const bool is_excepted = !options.except.empty() && test_case.name.find(options.except) != std::string::npos;
      const bool is_thinned =
          options.thin && (is_exact(test_case.grouping) ? dtype == (n % 2 == 0 ? DType::f16 : DType::bf16)
                                                        : dtype == DType::f16 && n % 3 != 0);
      if (!is_excepted && !is_thinned && test_case.name.find(options.filter) != std::string::npos &&
          (options.name.empty() || test_case.name == options.name)) {
        result.push_back(with_dtype(test_case, dtype));
      }
    }
  }
  return result;
}

// Pieces of work for the threads, the long ones first.
std::vector<std::function<void()>> wanted_work(const CheckOptions& options, Checker& checker) {
  std::vector<std::function<void()>> work;
  for (const Case& test_case : wanted_cases(options)) {
    work.emplace_back([&checker, test_case] { checker.check(test_case); });
  }
  if (options.small) return work;
  const auto add = [&](const std::string& filter, std::span<const char* const> names, auto check_case) {
    if (!is_whole(options) && options.filter != filter) return;
    for (const char* name : names) {
      if (!options.name.empty() && options.name != name) continue;
      for (const DType dtype : kDTypes) {
        work.emplace_back(
            [&checker, check_case, test_case = with_dtype(find(name), dtype)] { (checker.*check_case)(test_case); });
      }
    }
  };
  add("magnitudes", kMagnified, &Checker::check_magnitudes);
  add("large values", kWithLargeValues, &Checker::check_large_values);
  const bool has_all = options.filter.empty() && options.name.empty();
  if (has_all || options.filter == "properties") {
    for (const DType dtype : kDTypes) {
      if (options.thin && dtype == DType::f16) continue;
      work.emplace_back([&checker, dtype] { checker.check_properties(dtype); });
    }
  }
  if (!has_all) {
    return work;
  }
  for (const DType dtype : kDTypes) {
    work.emplace_back([&checker, dtype] { checker.check_extremes(dtype); });
    for (const char* name : {"odd sizes", "causal, square", "padding mask", "additive mask", "energy", "lsh, mean"}) {
      const Case test_case = with_dtype(find(name), dtype);
      work.emplace_back([&checker, test_case] { checker.check_non_finite(test_case); });
    }
  }
  work.emplace_back([&checker] { checker.check_that_broken_kernels_fail(); });
  return work;
}

}  // namespace

int print_small_cases() {
  for (const char* name : kSmall) {
    std::printf("%s\n", name);
  }
  return 0;
}

bool is_whole(const CheckOptions& options) {
  return !options.small && options.filter.empty() && options.except.empty() && options.name.empty() &&
         options.kernel.empty();
}

int check(const CheckOptions& options) {
  Checker checker(options);
  const bool is_public = std::string(kPublic).find(options.filter) != std::string::npos;
  if (!options.small && options.name.empty() && is_public && is_named(options.kernel, kPublic)) {
    // Before the threads: it holds a stream up, which any call that frees memory would wait for.
    checker.check_refusals();
  }
  const std::vector<std::function<void()>> all = wanted_work(options, checker);
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> threads;
  const int jobs = options.jobs > 0 ? options.jobs : static_cast<int>(std::thread::hardware_concurrency());
  for (int n = 0; n < jobs; ++n) {
    threads.emplace_back([&] {
      try {
        for (std::size_t index = next++; index < all.size(); index = next++) {
          all[index]();
        }
      } catch (const std::exception& error) {
        stop_here(error.what());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return checker.report();
}

}  // namespace distr::test
