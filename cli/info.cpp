// SPDX-License-Identifier: Apache-2.0
// `distr info`: the build, the machine, and which kernels would serve a given problem.
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "commands.h"
#include "distr/attention.h"
#include "distr/device.h"
#include "distr/version.h"
#include "options.h"
#include "report.h"
#include "text.h"

#ifndef DISTR_BUILD_TYPE
#define DISTR_BUILD_TYPE "unknown"
#endif

namespace distr::cli {
namespace {

constexpr Operation kOperations[] = {Operation::grouping, Operation::forward, Operation::backward};

struct InfoOptions {
  Problem problem;  // its sizes, dtype and causal
  std::optional<std::int64_t> heads_kv, seq_k, head_dim_v;
  WindowSize window_size;
  MaskKind mask = MaskKind::none;
  GroupingOptions grouping;
  std::optional<Device> device;
  bool json = false;
};

struct Report {
  Problem problem;
  Grouping grouping;
  Device device = Device::cpu;
  std::vector<Explanation> explanations;  // of each of kOperations on the device
  std::vector<KernelVerdict> verdicts;    // of every kernel of the build
};

Mask full_mask(MaskKind kind, const Problem& problem) {
  Mask mask;
  mask.kind = kind;
  mask.dtype = problem.lse_dtype();
  mask.rank = 2;
  mask.shape = {problem.seq_q, problem.seq_k};
  mask.strides = {problem.seq_k, 1};
  return mask;
}

Problem problem_of(const InfoOptions& options) {
  Problem problem = options.problem;
  problem.heads_kv = options.heads_kv.value_or(problem.heads_q);
  problem.seq_k = options.seq_k.value_or(problem.seq_q);
  problem.head_dim_v = options.head_dim_v.value_or(problem.head_dim);
  options.window_size.set(problem, options.grouping.grouping.key_offset);
  if (options.mask != MaskKind::none) problem.mask = full_mask(options.mask, problem);
  validate(problem);
  return contiguous(problem);
}

Report examine(const InfoOptions& options) {
  Report report;
  report.problem = problem_of(options);
  report.device = choose_device(options.device);
  const Grouping wanted = grouping_of(options.grouping, report.problem.head_dim, 0);
  report.grouping = explain(Operation::forward, report.problem, wanted, report.device).grouping;
  for (const Operation operation : kOperations) {
    report.explanations.push_back(explain(operation, report.problem, wanted, report.device));
    for (const Device device : {Device::cpu, Device::cuda}) {
      const auto verdicts = explain(operation, report.problem, report.grouping, device).verdicts;
      report.verdicts.insert(report.verdicts.end(), verdicts.begin(), verdicts.end());
    }
  }
  return report;
}

void print_json(const Report& report) {
  const std::string reason = cuda_unusable_reason();
  Json json = {{"version", version()},
               {"build", {{"type", DISTR_BUILD_TYPE}, {"compiler", __VERSION__}}},
               {"instruction_set", instruction_set()},
               {"threads", processor_count()},
               {"devices", {{"cpu", device_names(Device::cpu)}, {"cuda", device_names(Device::cuda)}}},
               {"cuda_unusable", reason.empty() ? Json(nullptr) : Json(reason)}};
  for (const StrategyTraits& entry : kStrategies) json["strategies"].push_back(entry.name);
  json["problem"] = sizes_json(report.problem);
  json["problem"]["causal_corner"] = name_of(report.problem.causal);
  json["problem"]["mask"] = name_of(report.problem.mask.kind);
  json["grouping"] = grouping_json(report.problem, report.grouping);
  json["device"] = name_of(report.device);
  json["choice"] = report.explanations[1].choice;
  for (const Operation operation : kOperations) {
    const std::string& kernel = report.explanations[static_cast<std::size_t>(operation)].kernel;
    json["would_run"][name_of(operation)] = kernel.empty() ? Json(nullptr) : Json(kernel);
  }
  json["kernels"] = Json::array();
  for (const KernelVerdict& verdict : report.verdicts) {
    json["kernels"].push_back({{"name", verdict.kernel.name},
                               {"operation", name_of(verdict.kernel.operation)},
                               {"device", name_of(verdict.kernel.device)},
                               {"serves", verdict.reason.empty()},
                               {"reason", verdict.reason.empty() ? Json(nullptr) : Json(verdict.reason)}});
  }
  std::cout << json_text(json) << '\n';
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

std::string cuda_text() {
  const std::string reason = cuda_unusable_reason();
  return joined(device_names(Device::cuda)) + (reason.empty() ? "" : "; " + reason);
}

void print_text(const Report& report) {
  std::cout << "version          " << version() << '\n'
            << "build            " << DISTR_BUILD_TYPE << ", compiler " << __VERSION__ << '\n'
            << "instruction set  " << instruction_set() << '\n'
            << "threads          " << processor_count() << '\n'
            << "CPU              " << joined(device_names(Device::cpu)) << '\n'
            << "CUDA devices     " << cuda_text() << "\n\n"
            << "problem          " << sizes_text(report.problem) << '\n'
            << "grouping         " << grouping_text(report.grouping) << '\n'
            << "choice           " << report.explanations[1].choice << "\n\n";
  Table table;
  for (const char* head : {"operation", "kernel", "device", "for this problem"}) {
    table.add_column(head, Table::Align::left);
  }
  for (const KernelVerdict& verdict : report.verdicts) {
    const auto index = static_cast<std::size_t>(verdict.kernel.operation);
    const bool runs =
        verdict.kernel.device == report.device && report.explanations[index].kernel == verdict.kernel.name;
    table.add_row({name_of(verdict.kernel.operation), verdict.kernel.name, name_of(verdict.kernel.device),
                   runs ? "would run" : (verdict.reason.empty() ? "would serve" : "no: " + verdict.reason)});
  }
  table.print(std::cout);
}

void add_sizes(CLI::App& command, InfoOptions& options) {
  const auto add = [&command](const char* flag, const char* help, std::int64_t low, std::int64_t high, auto& target) {
    const auto option = add_integer(command, flag, help, low, high, [&target](std::int64_t value) { target = value; });
    if constexpr (std::is_same_v<decltype(target), std::int64_t&>) {
      option->default_str(std::to_string(target));
    }
  };
  options.problem.heads_q = 8;
  options.problem.seq_q = 1024;
  options.problem.head_dim = 64;
  add("--batch", "B", 0, kAny, options.problem.batch);
  add("--heads", "Heads of Q", 1, kAny, options.problem.heads_q);
  add("--kv-heads", "Heads of K and V [those of Q]", 1, kAny, options.heads_kv);
  add("--seq-q", "Nq", 0, kAny, options.problem.seq_q);
  add("--seq-k", "Nk [Nq]", 0, kAny, options.seq_k);
  add("--head-dim", "d, of Q and K", 1, kMaxHeadDim, options.problem.head_dim);
  add("--head-dim-v", "dv, of V [d]", 1, kMaxHeadDim, options.head_dim_v);
  add_choice(command, "--dtype", options.problem.dtype, "Of Q, K, V and O");
  add_causal_option(command, options.problem.causal);
  add_window_size_option(command, options.window_size);
  add_softcap_option(command, options.problem.softcap);
  add_choice(command, "--mask", options.mask, "A mask of [Nq, Nk]");
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "The build, the machine, and which kernels would serve a problem");
  const auto options = std::make_shared<InfoOptions>();
  add_sizes(*command, *options);
  add_grouping_options(*command, options->grouping);
  add_device_option(*command, options->device);
  command->add_flag("--json", options->json, "Print one JSON object instead of text");
  command->callback([options] {
    const Report report = examine(*options);
    options->json ? print_json(report) : print_text(report);
  });
}

}  // namespace distr::cli
