// SPDX-License-Identifier: Apache-2.0
// The torch operators distrattention::{make_grouping, forward}, {attend}, which is both in one, for eager code,
// {forward_counting}, a forward that tells what it skipped, and {explain, describe, decisions}, which tell what would
// run and what was built. The schemas of backward.cpp's are here, too, as they share the settings.
// Written against LibTorch's stable ABI: one binary serves every torch from the version on that CMakeLists.txt targets.
// Fake kernels and autograd formulas are in distrattention/ops.py.
#include <torch/csrc/stable/library.h>
#include <charconv>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "distr/device.h"
#include "distr/version.h"
#include "tensors.h"

namespace distr::binding {
namespace {

// Of `blocks` blocks of d values for each head: [B, heads, blocks, d], or [B, heads, blocks * d] when `flat`: an axis
// that is 1 for short sequences alone would make torch.export refuse a range of lengths.
Tensor empty_blocks(const Tensor& q, std::int64_t heads, std::int64_t blocks, ScalarType type, bool flat) {
  return flat ? empty(q, {q.size(0), heads, blocks * q.size(3)}, type)
              : empty(q, {q.size(0), heads, blocks, q.size(3)}, type);
}

// The shapes of what a grouping writes, none of what it does not.
struct ColumnShapes {
  using Shape = std::array<std::int64_t, 4>;  // B, heads, blocks, d

  std::optional<Shape> order;      // int32; none in `given`, whose order the caller has
  std::optional<Shape> key_means;  // float32, where needs_key_means()

  // The plan is of the grouping.
  explicit ColumnShapes(const Plan& plan) {
    const Grouping& grouping = plan.grouping();
    if (!plan.reads_order() || traits(grouping.strategy).order == OrderSource::computed) {
      order = order_shape(plan.problem(), grouping);
    }
    if (needs_key_means(grouping)) {
      key_means = key_means_shape(plan.problem(), grouping);
    }
  }
  [[nodiscard]] static std::size_t bytes(const std::optional<Shape>& shape) {
    constexpr std::size_t kAlignment = 256;
    std::size_t count = shape ? sizeof(std::int32_t) : 0;
    for (const std::int64_t size : shape.value_or(Shape{})) {
      count *= static_cast<std::size_t>(size);
    }
    return (count + kAlignment - 1) / kAlignment * kAlignment;
  }
  [[nodiscard]] std::size_t bytes() const { return bytes(order) + bytes(key_means); }
};

// What a grouping wrote.
struct Columns {
  OptionalTensor order, key_means;  // none where they are of no use behind the call
  std::int32_t* order_data = nullptr;
  float* key_means_data = nullptr;
};

Columns empty_columns(const ColumnShapes& shapes, const Tensor& q, const Tensor& k, bool flat) {
  Columns columns;
  if (shapes.order) {
    columns.order = empty_blocks(q, q.size(1), (*shapes.order)[2], ScalarType::Int, flat);
    columns.order_data = static_cast<std::int32_t*>(columns.order->mutable_data_ptr());
  }
  if (shapes.key_means) {
    columns.key_means = empty_blocks(q, k.size(1), (*shapes.key_means)[2], ScalarType::Float, flat);
    columns.key_means_data = static_cast<float*>(columns.key_means->mutable_data_ptr());
  }
  return columns;
}

// In memory of shapes.bytes() bytes.
Columns columns_in(std::byte* memory, const ColumnShapes& shapes) {
  Columns columns;
  if (shapes.order) {
    columns.order_data = reinterpret_cast<std::int32_t*>(memory);
  }
  if (shapes.key_means) {
    columns.key_means_data = reinterpret_cast<float*>(memory + ColumnShapes::bytes(shapes.order));
  }
  return columns;
}

void group_by(const Call& call, const Plan& plan, const Tensor& q, const Tensor& k, const Columns& columns) {
  plan.run(GroupingTensors{.q = q.const_data_ptr(),
                           .k = k.const_data_ptr(),
                           .order = columns.order_data,
                           .key_means = columns.key_means_data},
           call.execution);
}

// The order, [0] in `given`, and the means of the keys, [0] where the grouping as it was asked for needs none, and
// zeros where `auto` came to one that needs none: the shapes depend on the settings alone.
std::tuple<Tensor, Tensor> make_grouping(const Tensor& q_in, const Tensor& k_in, const std::string& causal,
                                         const std::string& strategy, std::int64_t group_size, std::int64_t block_size,
                                         const std::string& order_from, std::int64_t seed, bool flat,
                                         std::optional<std::int64_t> window, std::int64_t sinks,
                                         std::optional<std::int64_t> key_offset, double skip, bool finish) {
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in);
  const NearKeys near{window, sinks, key_offset, skip, finish};
  Call call =
      make_call(q, k, k, settings_of(causal, {}, strategy, group_size, block_size, "mean", order_from, seed, near));
  const Plan plan = plan_of(Operation::grouping, call);
  const Workspace workspace = add_workspace(call, plan.workspace_bytes(), q);
  Columns columns = empty_columns(ColumnShapes(plan), q, k, flat);
  group_by(call, plan, q, k, columns);
  if (!columns.key_means && needs_key_means(call.grouping)) {
    call.grouping.order_from = plan.grouping().order_from;
    const auto shape = key_means_shape(call.problem, call.grouping);
    columns.key_means = empty_blocks(q, k.size(1), shape[2], ScalarType::Float, flat);
    torch::stable::zero_(*columns.key_means);
  }
  return {columns.order ? *columns.order : empty(q, {0}, ScalarType::Int),
          columns.key_means ? *columns.key_means : empty(q, {0}, ScalarType::Float)};
}

// O [B, Hq, Nq, dv], in memory [B, Nq, Hq, dv]: the transpose that follows attention in models then costs nothing.
Tensor output_of(Call& call, const Tensor& q, const Tensor& v) {
  Tensor o = empty_rows_first(q, {q.size(0), q.size(1), q.size(2), v.size(3)});
  call.problem.o = strides_of(o);
  return o;
}

// What a forward reads.
struct ForwardInputs {
  const Tensor &q, &k, &v;
  const OptionalTensor& mask;
  const std::int32_t* order;
  const float* key_means;
};

// Writes O, LSE [B, Hq, Nq] and the counts of halves, if wanted. The plan is of the forward.
void attend_by(const Call& call, const Plan& plan, const ForwardInputs& inputs, const Tensor& o,
               const OptionalTensor& lse, const OptionalTensor& halves) {
  plan.run(ForwardTensors{.q = inputs.q.const_data_ptr(),
                          .k = inputs.k.const_data_ptr(),
                          .v = inputs.v.const_data_ptr(),
                          .mask = data(inputs.mask),
                          .order = inputs.order,
                          .o = o.mutable_data_ptr(),
                          .lse = mutable_data(lse),
                          .key_means = inputs.key_means,
                          .halves = static_cast<std::int32_t*>(mutable_data(halves))},
           call.execution);
}

Tensor empty_lse(const Call& call, const Tensor& q) {
  return empty(q, {q.size(0), q.size(1), q.size(2)}, lse_type(call.problem));
}

// forward(), and with `counting` the counts of halves.
std::tuple<Tensor, Tensor, OptionalTensor> forward_of(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                      const OptionalTensor& mask, const OptionalTensor& order,
                                                      const OptionalTensor& key_means, const Settings& settings,
                                                      bool counting) {
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in), v = with_unit_rows(v_in);
  Call call = make_call(q, k, v, settings);
  add_mask(call, q, mask);
  Tensor o = output_of(call, q, v);
  const Plan forward = plan_of(Operation::forward, call);
  const Workspace workspace = add_workspace(call, forward.workspace_bytes(), q);
  Tensor lse = empty_lse(call, q);
  const OptionalTensor order_read = order_for(forward, q, order), means_read = key_means_for(forward, q, key_means);
  OptionalTensor halves;
  if (counting) {
    halves = empty(q, {q.size(0), q.size(1), halves_shape(call.problem)[2], 2}, ScalarType::Int);
  }
  attend_by(call, forward, {q, k, v, mask, order_data(order_read), means_data(means_read)}, o, lse, halves);
  return {std::move(o), std::move(lse), std::move(halves)};
}

// `deterministic` is for the backward, which takes the settings of its forward.
std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                   const OptionalTensor& order, const OptionalTensor& key_means,
                                   const std::string& causal, std::optional<double> scale, const std::string& strategy,
                                   std::int64_t group_size, std::int64_t block_size, const std::string& estimator,
                                   const std::string& order_from, std::optional<std::int64_t> window,
                                   std::int64_t sinks, std::optional<std::int64_t> key_offset, double skip, bool finish,
                                   bool /*deterministic*/, std::optional<std::int64_t> first_row,
                                   std::optional<std::int64_t> first_key, std::optional<std::int64_t> window_left,
                                   std::optional<std::int64_t> window_right, double softcap) {
  const Settings settings = settings_of(causal, scale, strategy, group_size, block_size, estimator, order_from, 0,
                                        {window, sinks, key_offset, skip, finish, part_of(first_row, first_key)},
                                        {window_left, window_right}, softcap);
  auto [o, lse, halves] = forward_of(q, k, v, mask, order, key_means, settings, false);
  return {std::move(o), std::move(lse)};
}

// forward() with `skip`, and halves int32 [B, Hq, ceil(Nq / 64), 2]: of the far halves of tiles in which a row sees a
// far key, how many were kept, and how many there are.
std::tuple<Tensor, Tensor, Tensor> forward_counting(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, const OptionalTensor& order,
    const OptionalTensor& key_means, const std::string& causal, std::optional<double> scale,
    const std::string& strategy, std::int64_t group_size, std::int64_t block_size, const std::string& estimator,
    const std::string& order_from, std::optional<std::int64_t> window, std::int64_t sinks,
    std::optional<std::int64_t> key_offset, double skip, bool finish, std::optional<std::int64_t> window_left,
    std::optional<std::int64_t> window_right, double softcap) {
  const auto settings = settings_of(causal, scale, strategy, group_size, block_size, estimator, order_from, 0,
                                    {window, sinks, key_offset, skip, finish}, {window_left, window_right}, softcap);
  auto [o, lse, halves] = forward_of(q, k, v, mask, order, key_means, settings, true);
  return {std::move(o), std::move(lse), *std::move(halves)};
}

// make_grouping() and forward() in one; `settings` to `window_size`: unpack(). With LSE the order and the means of the
// keys, flat, are returned, too, as a backward reads them, where there are some: under `auto` columns may not be
// grouped. Without it they are not made tensors, which would take the host as long as a launch.
std::tuple<Tensor, OptionalTensor, OptionalTensor, OptionalTensor> attend(
    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& mask, std::optional<double> scale,
    std::int64_t settings, std::int64_t near, std::optional<std::int64_t> key_offset, double skip, std::int64_t seed,
    std::int64_t window_size, bool with_lse, double softcap) {
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in), v = with_unit_rows(v_in);
  Call call = make_call(q, k, v, unpack(settings, near, key_offset, skip, scale, seed, window_size, softcap));
  add_mask(call, q, mask);
  Tensor o = output_of(call, q, v);
  const Plan forward = plan_of(Operation::forward, call);
  Workspace workspace;
  Columns columns;
  if (forward.reads_order()) {
    const Plan of_order = plan_of_order(call, forward);
    const ColumnShapes shapes(of_order);
    const std::size_t bytes = std::max(forward.workspace_bytes(), of_order.workspace_bytes());  // one after the other
    workspace = add_workspace(call, bytes, q, with_lse ? 0 : shapes.bytes());
    columns = with_lse ? empty_columns(shapes, q, k, true) : columns_in(workspace.behind, shapes);
    group_by(call, of_order, q, k, columns);
  } else {
    workspace = add_workspace(call, forward.workspace_bytes(), q);
  }
  const OptionalTensor lse = with_lse ? OptionalTensor(empty_lse(call, q)) : OptionalTensor();
  attend_by(call, forward, {q, k, v, mask, columns.order_data, columns.key_means_data}, o, lse, {});
  return {std::move(o), lse, std::move(columns.order), std::move(columns.key_means)};
}

constexpr std::array kOperations{Named<Operation>{Operation::grouping, "grouping"},
                                 Named<Operation>{Operation::forward, "forward"},
                                 Named<Operation>{Operation::backward, "backward"}};

using Strings = std::vector<std::string>;

// What a call with these tensors would do, whose data are not read: the strategy and the rows for orders that it comes
// to, a sentence that says why, the kernel that would run (empty: none), and for every kernel of the device its name
// and why it does not serve (empty: it does).
std::tuple<std::string, std::string, std::string, std::string, Strings, Strings> explain(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, const std::string& operation,
    const std::string& causal, std::optional<double> scale, const std::string& strategy, std::int64_t group_size,
    std::int64_t block_size, const std::string& estimator, const std::string& order_from,
    std::optional<std::int64_t> window, std::int64_t sinks, std::optional<std::int64_t> key_offset, double skip,
    bool finish, bool deterministic, std::optional<std::int64_t> window_left, std::optional<std::int64_t> window_right,
    double softcap) {
  const auto settings = settings_of(causal, scale, strategy, group_size, block_size, estimator, order_from, 0,
                                    {window, sinks, key_offset, skip, finish}, {window_left, window_right}, softcap);
  Call call = make_call(q, k, v, settings);
  add_mask(call, q, mask);
  const Operation wanted = named("operation", operation, kOperations).value;
  const Explanation found = distr::explain(wanted, call.problem, call.grouping, call.execution.device, deterministic);
  Strings kernels, reasons;
  for (const KernelVerdict& verdict : found.verdicts) {
    kernels.push_back(verdict.kernel.name);
    reasons.push_back(verdict.reason);
  }
  const char* order_from_found = name_in(kOrdersFrom, found.grouping.order_from);
  return {traits(found.grouping.strategy).name, order_from_found, found.choice, found.kernel, kernels, reasons};
}

// The library's version, the CPU's instruction set, the architectures that CUDA kernels were built for ("none"), the
// CUDA devices that could run them, why there is none (empty: there is), and every kernel with its operation.
std::tuple<std::string, std::string, std::string, Strings, std::string, Strings, Strings> describe() {
  Strings operations, kernels;
  for (const KernelInfo& kernel : distr::list()) {
    operations.emplace_back(name_in(kOperations, kernel.operation));
    kernels.push_back(kernel.name);
  }
  return {distr::version(),
          distr::instruction_set(),
          DISTR_CUDA_BUILD,
          device_names(Device::cuda),
          cuda_unusable_reason(),
          operations,
          kernels};
}

// How often this process has validated a problem, resolved a strategy and chosen a kernel.
std::tuple<std::int64_t, std::int64_t, std::int64_t> decisions() {
  const Decisions counted = distr::decisions();
  return {counted.validated, counted.resolved, counted.chosen};
}

// A float of a schema.
std::string number(double value) {
  char text[32];
  const std::string digits(text, std::to_chars(text, text + sizeof text, value).ptr);
  return digits.find_first_of(".e") == std::string::npos ? digits + "." : digits;
}

// The defaults of Grouping, as schemas have them.
std::string with_defaults(std::string schema) {
  const Grouping defaults;
  const auto replace = [&schema](const std::string& mark, const std::string& value) {
    for (std::size_t at = 0; (at = schema.find(mark, at)) != std::string::npos;) {
      schema.replace(at, mark.size(), value);
    }
  };
  replace("$group_size", std::to_string(defaults.group_size));
  replace("$block_size", std::to_string(defaults.block));
  replace("$strategy", traits(defaults.strategy).name);
  replace("$estimator", name_in(kEstimators, defaults.estimator));
  replace("$order_from", name_in(kOrdersFrom, defaults.order_from));
  replace("$seed", std::to_string(defaults.seed));
  replace("$sinks", std::to_string(defaults.sinks));
  replace("$skip", number(defaults.skip));
  replace("$finish", defaults.finish ? "True" : "False");
  return schema;
}

}  // namespace

STABLE_TORCH_LIBRARY(distrattention, m) {
  const auto define = [&m](const std::string& schema) { m.def(with_defaults(schema).c_str()); };
  const std::string near =
      "int? window=None, int sinks=$sinks, int? key_offset=None, float skip=$skip, bool finish=$finish";
  const std::string settings =
      "str causal='none', float? scale=None, str strategy='$strategy', int group_size=$group_size, "
      "int block_size=$block_size, str estimator='$estimator', str order_from='$order_from', " +
      near;
  define(
      "make_grouping(Tensor q, Tensor k, str causal='none', str strategy='$strategy', int group_size=$group_size, "
      "int block_size=$block_size, str order_from='$order_from', int seed=$seed, bool flat=False, " +
      near + ") -> (Tensor order, Tensor key_means)");
  const std::string inputs =
      "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? order=None, Tensor? key_means=None, ";
  const std::string sliding = ", int? window_left=None, int? window_right=None, float softcap=0.)";
  const std::string part = ", bool deterministic=True, int? first_row=None, int? first_key=None";
  define("forward" + inputs + settings + part + sliding + " -> (Tensor out, Tensor lse)");
  define("forward_counting" + inputs + settings + sliding + " -> (Tensor out, Tensor lse, Tensor halves)");
  define(
      "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale, int settings, int near, int? key_offset, float "
      "skip, int seed, int window_size, bool with_lse, float softcap=0.) -> (Tensor out, Tensor? lse, Tensor? order, "
      "Tensor? key_means)");
  define(
      "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? order, "
      "Tensor? key_means, Tensor out, Tensor lse, bool mask_gradient=False, " +
      settings + part + sliding + " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_mask)");
  define(
      "backward_into(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? order, "
      "Tensor? key_means, Tensor out, Tensor lse, Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, " +
      settings + part + ") -> ()");
  define("explain(Tensor q, Tensor k, Tensor v, Tensor? mask=None, str operation='forward', " + settings +
         ", bool deterministic=True" + sliding +
         " -> (str strategy, str order_from, str choice, str kernel, str[] kernels, str[] reasons)");
  define(
      "describe() -> (str version, str instruction_set, str cuda_build, str[] cuda_devices, str cuda_unusable, "
      "str[] operations, str[] kernels)");
  define("decisions() -> (int validated, int resolved, int chosen)");
}

STABLE_TORCH_LIBRARY_IMPL(distrattention, CPU, m) {
  m.impl("make_grouping", TORCH_BOX(&make_grouping));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("forward_counting", TORCH_BOX(&forward_counting));
  m.impl("attend", TORCH_BOX(&attend));
}

// In a build without CUDA kernels too: the library refuses such tensors in words.
STABLE_TORCH_LIBRARY_IMPL(distrattention, CUDA, m) {
  m.impl("make_grouping", TORCH_BOX(&make_grouping));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("forward_counting", TORCH_BOX(&forward_counting));
  m.impl("attend", TORCH_BOX(&attend));
}

STABLE_TORCH_LIBRARY_IMPL(distrattention, CompositeExplicitAutograd, m) {
  m.impl("explain", TORCH_BOX(&explain));
  m.impl("describe", TORCH_BOX(&describe));
  m.impl("decisions", TORCH_BOX(&decisions));
}

}  // namespace distr::binding
