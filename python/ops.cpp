// SPDX-License-Identifier: Apache-2.0
// The torch operators distrattention::{make_grouping, forward, backward}, {attend}, which is the first two in one, for
// eager code, and {explain, describe}, which tell what would run and what was built. Written against LibTorch's stable
// ABI: one binary serves every torch from the version on that CMakeLists.txt targets. Fake kernels and autograd
// formulas are in distrattention/ops.py.
#include <torch/csrc/stable/library.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>

#include "distr/version.h"
#include "tensors.h"

namespace distr::binding {
namespace {

const void* data(const OptionalTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
const std::int32_t* order_data(const OptionalTensor& order) { return static_cast<const std::int32_t*>(data(order)); }

// order int32 [B, Hq, blocks, d], or [B, Hq, blocks * d] when `flat`: an axis that is 1 for short sequences alone would
// make torch.export refuse a range of lengths.
Tensor order_of(Call& call, const Tensor& q, const Tensor& k, bool flat) {
  validate(call.problem, call.grouping);
  const auto shape = order_shape(call.problem, call.grouping);
  Tensor order = flat ? empty(q, {q.size(0), q.size(1), shape[2] * q.size(3)}, ScalarType::Int)
                      : empty(q, {q.size(0), q.size(1), shape[2], q.size(3)}, ScalarType::Int);
  add_workspace(call, Operation::grouping, q);
  make_grouping(
      call.problem, call.grouping,
      {.q = q.const_data_ptr(), .k = k.const_data_ptr(), .order = static_cast<std::int32_t*>(order.mutable_data_ptr())},
      call.execution);
  return order;
}

Tensor make_grouping(const Tensor& q_in, const Tensor& k_in, const std::string& causal, const std::string& strategy,
                     std::int64_t group_size, std::int64_t block_size, const std::string& order_from, std::int64_t seed,
                     bool flat) {
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in);
  Call call = make_call(q, k, k, settings_of(causal, {}, strategy, group_size, block_size, "mean", order_from, seed));
  return order_of(call, q, k, flat);
}

// O [B, Hq, Nq, dv], in memory [B, Nq, Hq, dv]: the transpose that follows attention in models then costs nothing;
// LSE [B, Hq, Nq], if wanted. The call has the mask already.
std::tuple<Tensor, OptionalTensor> attention_of(Call& call, const Tensor& q, const Tensor& k, const Tensor& v,
                                                const OptionalTensor& mask, const OptionalTensor& order,
                                                bool with_lse) {
  Tensor o = empty_rows_first(q, {q.size(0), q.size(1), q.size(2), v.size(3)});
  OptionalTensor lse;
  if (with_lse) {
    lse = empty(q, {q.size(0), q.size(1), q.size(2)}, lse_type(call.problem));
  }
  call.problem.o = strides_of(o);
  add_workspace(call, Operation::forward, q);
  distr::forward(call.problem, call.grouping,
                 {.q = q.const_data_ptr(),
                  .k = k.const_data_ptr(),
                  .v = v.const_data_ptr(),
                  .mask = data(mask),
                  .order = order_data(order),
                  .o = o.mutable_data_ptr(),
                  .lse = lse ? lse->mutable_data_ptr() : nullptr},
                 call.execution);
  return {std::move(o), std::move(lse)};
}

// `deterministic` is for the backward, which takes the settings of its forward.
std::tuple<Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                   const OptionalTensor& mask, const OptionalTensor& order_in,
                                   const std::string& causal, std::optional<double> scale, const std::string& strategy,
                                   std::int64_t group_size, std::int64_t block_size, const std::string& estimator,
                                   const std::string& order_from, bool /*deterministic*/) {
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in), v = with_unit_rows(v_in);
  Call call =
      make_call(q, k, v, settings_of(causal, scale, strategy, group_size, block_size, estimator, order_from, 0));
  const OptionalTensor order = add_mask_and_order(call, q, mask, order_in);
  auto [o, lse] = attention_of(call, q, k, v, mask, order, true);
  return {std::move(o), *std::move(lse)};
}

// make_grouping() and forward() in one; `settings`: unpack(). The order, flat, is the third result where columns are
// grouped, which under `auto` they may not be.
std::tuple<Tensor, OptionalTensor, OptionalTensor> attend(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                          const OptionalTensor& mask, std::optional<double> scale,
                                                          std::int64_t settings, std::int64_t seed, bool with_lse) {
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in), v = with_unit_rows(v_in);
  Call call = make_call(q, k, v, unpack(settings, scale, seed));
  add_mask_and_order(call, q, mask, {});  // `auto` goes by the mask, too
  call.grouping = resolve_strategy(call.problem, call.grouping, call.execution.device);
  OptionalTensor order;
  if (call.grouping.strategy != Strategy::exact && call.grouping.group_size > 1) {
    order = order_of(call, q, k, true);
  }
  auto [o, lse] = attention_of(call, q, k, v, mask, order, with_lse);
  return {std::move(o), std::move(lse), std::move(order)};
}

// dQ, dK, dV, laid out like Q, K, V without their holes; dMask in the mask's shape and LSE's dtype, [0] when not
// wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& d_o_in, const OptionalTensor& d_lse_in,
                                                    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                    const OptionalTensor& mask, const OptionalTensor& order_in,
                                                    const Tensor& o_in, const Tensor& lse_in, bool mask_gradient,
                                                    const std::string& causal, std::optional<double> scale,
                                                    const std::string& strategy, std::int64_t group_size,
                                                    std::int64_t block_size, const std::string& estimator,
                                                    const std::string& order_from, bool deterministic) {
  // The library writes dQ, dK and dV with the strides that it reads Q, K and V with.
  Tensor d_q = dense_like(q_in), d_k = dense_like(k_in), d_v = dense_like(v_in);
  const Tensor q = laid_out_like(d_q, q_in), k = laid_out_like(d_k, k_in), v = laid_out_like(d_v, v_in);
  Call call =
      make_call(q, k, v, settings_of(causal, scale, strategy, group_size, block_size, estimator, order_from, 0));
  const OptionalTensor order = add_mask_and_order(call, q, mask, order_in);

  const std::array lse_shape{q.size(0), q.size(1), q.size(2)};
  const std::array o_shape{q.size(0), q.size(1), q.size(2), v.size(3)};
  const ScalarType type_of_lse = lse_type(call.problem);
  require(q, "out", o_in, q.scalar_type(), o_shape);
  require(q, "the gradient of out", d_o_in, q.scalar_type(), o_shape);
  require(q, "lse", lse_in, type_of_lse, lse_shape);
  const Tensor o = laid_out_like(dense_like(o_in), o_in), d_o = laid_out_like(o, d_o_in);
  const Tensor lse = packed(lse_in);
  OptionalTensor d_lse;
  if (d_lse_in) {
    require(q, "the gradient of lse", *d_lse_in, type_of_lse, lse_shape);
    d_lse = packed(*d_lse_in);
  }
  call.problem.o = strides_of(o);

  const bool want_mask = mask && mask_gradient;
  Tensor d_mask = want_mask ? empty(q, mask->sizes(), type_of_lse) : empty(q, {0}, type_of_lse);
  call.execution.deterministic = deterministic;
  add_workspace(call, Operation::backward, q);
  distr::backward(call.problem, call.grouping,
                  {.q = q.const_data_ptr(),
                   .k = k.const_data_ptr(),
                   .v = v.const_data_ptr(),
                   .mask = data(mask),
                   .order = order_data(order),
                   .o = o.const_data_ptr(),
                   .lse = lse.const_data_ptr(),
                   .d_o = d_o.const_data_ptr(),
                   .d_lse = data(d_lse),
                   .d_q = d_q.mutable_data_ptr(),
                   .d_k = d_k.mutable_data_ptr(),
                   .d_v = d_v.mutable_data_ptr(),
                   .d_mask = want_mask ? d_mask.mutable_data_ptr() : nullptr},
                  call.execution);
  return {d_q, d_k, d_v, d_mask};
}

// What a call with these tensors would do, one "key: value" a line; their data are not read.
std::string explain(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                    const std::string& operation, const std::string& causal, std::optional<double> scale,
                    const std::string& strategy, std::int64_t group_size, std::int64_t block_size,
                    const std::string& estimator, const std::string& order_from, bool deterministic) {
  Call call =
      make_call(q, k, v, settings_of(causal, scale, strategy, group_size, block_size, estimator, order_from, 0));
  add_mask_and_order(call, q, mask, {});
  const auto wanted = named<Operation, 3>(
      "operation", operation,
      {{{"grouping", Operation::grouping}, {"forward", Operation::forward}, {"backward", Operation::backward}}});
  const Explanation found = distr::explain(wanted, call.problem, call.grouping, call.execution.device, deterministic);
  std::string result = "choice: " + found.choice + "\nkernel: " + found.kernel;
  for (const KernelVerdict& verdict : found.verdicts) {
    result += "\n" + verdict.kernel.name + ": " + verdict.reason;
  }
  return result;
}

// What the CUDA kernels could run on: names of devices, or why there is none.
std::string cuda_devices() {
  std::string names;
  for (const std::string& name : device_names(Device::cuda)) {
    names += (names.empty() ? "" : ", ") + name;
  }
  if (!names.empty()) {
    return names;
  }
  Problem any;
  any.seq_q = any.seq_k = 1;
  any.head_dim = any.head_dim_v = 64;
  Grouping exact;
  exact.strategy = Strategy::exact;
  const Explanation found = distr::explain(Operation::forward, contiguous(any), exact, Device::cuda);
  return found.verdicts.empty() ? "none, as this build has no CUDA kernels"
                                : "none, as " + found.verdicts.back().reason;
}

// What was built and what the machine has for it, one "key: value" a line.
std::string describe() {
  const auto name_of = [](Operation operation) {
    return std::array{"grouping", "forward", "backward"}[static_cast<std::size_t>(operation)];
  };
  std::string result = std::string("version: ") + distr::version() + "\ninstruction set: " + distr::instruction_set() +
                       "\nCUDA kernels: " + DISTR_CUDA_BUILD + "\nCUDA devices for them: " + cuda_devices();
  for (const KernelInfo& kernel : distr::list()) {
    result += std::string("\nkernel: ") + name_of(kernel.operation) + " " + kernel.name;
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY(distrattention, m) {
  m.def(
      "make_grouping(Tensor q, Tensor k, str causal='none', str strategy='auto', int group_size=1, "
      "int block_size=128, str order_from='own', int seed=0, bool flat=False) -> Tensor");
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? order=None, str causal='none', "
      "float? scale=None, str strategy='exact', int group_size=1, int block_size=128, str estimator='mean', "
      "str order_from='own', bool deterministic=True) -> (Tensor out, Tensor lse)");
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale, int settings, int seed, bool with_lse) "
      "-> (Tensor out, Tensor? lse, Tensor? order)");
  m.def(
      "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? order, "
      "Tensor out, Tensor lse, bool mask_gradient=False, str causal='none', float? scale=None, str strategy='exact', "
      "int group_size=1, int block_size=128, str estimator='mean', str order_from='own', bool deterministic=True) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_mask)");
  m.def(
      "explain(Tensor q, Tensor k, Tensor v, Tensor? mask=None, str operation='forward', str causal='none', "
      "float? scale=None, str strategy='auto', int group_size=1, int block_size=128, str estimator='mean', "
      "str order_from='own', bool deterministic=True) -> str");
  m.def("describe() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(distrattention, CPU, m) {
  m.impl("make_grouping", TORCH_BOX(&make_grouping));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("backward", TORCH_BOX(&backward));
}

// In a build without CUDA kernels too: the library refuses such tensors in words.
STABLE_TORCH_LIBRARY_IMPL(distrattention, CUDA, m) {
  m.impl("make_grouping", TORCH_BOX(&make_grouping));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("backward", TORCH_BOX(&backward));
}

STABLE_TORCH_LIBRARY_IMPL(distrattention, CompositeExplicitAutograd, m) {
  m.impl("explain", TORCH_BOX(&explain));
  m.impl("describe", TORCH_BOX(&describe));
}

}  // namespace distr::binding
