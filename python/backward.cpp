// SPDX-License-Identifier: Apache-2.0
// The torch operators distrattention::{backward, backward_into}: the gradients as results, and written to memory that
// the caller has, as a ring does, which sends them on. Their schemas are in ops.cpp.
#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "tensors.h"

namespace distr::binding {
namespace {

// What a backward reads, and whether an additive mask's gradient is wanted.
struct BackwardInputs {
  const Tensor& d_o;
  const OptionalTensor& d_lse;
  const Tensor &q, &k, &v;
  const OptionalTensor &mask, &order, &key_means;
  const Tensor &o, &lse;
  bool mask_gradient, deterministic;
};

struct Gradients {
  Tensor q, k, v;
};

// Writes the gradients, whose rows are contiguous; returns dMask in the mask's shape and LSE's dtype, [0] when not
// wanted.
Tensor differentiate(const BackwardInputs& inputs, const Settings& settings, const Gradients& to) {
  const Tensor q = with_unit_rows(inputs.q), k = with_unit_rows(inputs.k), v = with_unit_rows(inputs.v);
  const OptionalTensor& mask = inputs.mask;
  Call call = make_call(q, k, v, settings);
  add_mask(call, q, mask);
  call.problem.d_q = strides_of(to.q);
  call.problem.d_k = strides_of(to.k);
  call.problem.d_v = strides_of(to.v);

  const std::array lse_shape{q.size(0), q.size(1), q.size(2)};
  const std::array o_shape{q.size(0), q.size(1), q.size(2), v.size(3)};
  const ScalarType type_of_lse = lse_type(call.problem);
  require(q, "out", inputs.o, q.scalar_type(), o_shape);
  require(q, "the gradient of out", inputs.d_o, q.scalar_type(), o_shape);
  require(q, "lse", inputs.lse, type_of_lse, lse_shape);
  const auto [o, d_o] = laid_out_alike(inputs.o, inputs.d_o);
  const Tensor lse = packed(inputs.lse);
  OptionalTensor d_lse;
  if (inputs.d_lse) {
    require(q, "the gradient of lse", *inputs.d_lse, type_of_lse, lse_shape);
    d_lse = packed(*inputs.d_lse);
  }
  call.problem.o = strides_of(o);

  const bool want_mask = mask && inputs.mask_gradient;
  Tensor d_mask = want_mask ? empty(q, mask->sizes(), type_of_lse) : empty(q, {0}, type_of_lse);
  call.execution.deterministic = inputs.deterministic;
  const Plan plan = plan_of(Operation::backward, call);
  const OptionalTensor order = order_for(plan, q, inputs.order), key_means = key_means_for(plan, q, inputs.key_means);
  const Workspace workspace = add_workspace(call, plan.workspace_bytes(), q);
  plan.run(BackwardTensors{.q = q.const_data_ptr(),
                           .k = k.const_data_ptr(),
                           .v = v.const_data_ptr(),
                           .mask = data(mask),
                           .order = order_data(order),
                           .o = o.const_data_ptr(),
                           .lse = lse.const_data_ptr(),
                           .d_o = d_o.const_data_ptr(),
                           .d_lse = data(d_lse),
                           .d_q = to.q.mutable_data_ptr(),
                           .d_k = to.k.mutable_data_ptr(),
                           .d_v = to.v.mutable_data_ptr(),
                           .d_mask = want_mask ? d_mask.mutable_data_ptr() : nullptr,
                           .key_means = means_data(key_means)},
           call.execution);
  return d_mask;
}

// dQ, dK, dV, laid out like Q, K, V without their holes, and dMask.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& d_o, const OptionalTensor& d_lse, const Tensor& q, const Tensor& k, const Tensor& v,
    const OptionalTensor& mask, const OptionalTensor& order, const OptionalTensor& key_means, const Tensor& o,
    const Tensor& lse, bool mask_gradient, const std::string& causal, std::optional<double> scale,
    const std::string& strategy, std::int64_t group_size, std::int64_t block_size, const std::string& estimator,
    const std::string& order_from, std::optional<std::int64_t> window, std::int64_t sinks,
    std::optional<std::int64_t> key_offset, double skip, bool finish, bool deterministic,
    std::optional<std::int64_t> first_row, std::optional<std::int64_t> first_key,
    std::optional<std::int64_t> window_left, std::optional<std::int64_t> window_right, double softcap) {
  const Settings settings = settings_of(causal, scale, strategy, group_size, block_size, estimator, order_from, 0,
                                        {window, sinks, key_offset, skip, finish, part_of(first_row, first_key)},
                                        {window_left, window_right}, softcap);
  const Gradients found{dense_like(q), dense_like(k), dense_like(v)};
  Tensor d_mask = differentiate({d_o, d_lse, q, k, v, mask, order, key_means, o, lse, mask_gradient, deterministic},
                                settings, found);
  return {found.q, found.k, found.v, d_mask};
}

// `to` is to become the gradient of `of`.
void require_place(const std::string& name, const Tensor& to, const Tensor& of) {
  require(of, name.c_str(), to, of.scalar_type(), of.sizes());
  if (to.dim() == 4 && to.size(3) > 1 && to.stride(3) != 1) {
    invalid("the last stride of " + name + " is " + std::to_string(to.stride(3)) + "; allowed: 1, as it is written to");
  }
}

// The same without a mask, written to d_q, d_k and d_v, of the shapes of q, k and v.
void backward_into(const Tensor& d_o, const OptionalTensor& d_lse, const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptionalTensor& order, const OptionalTensor& key_means, const Tensor& o, const Tensor& lse,
                   const Tensor& d_q, const Tensor& d_k, const Tensor& d_v, const std::string& causal,
                   std::optional<double> scale, const std::string& strategy, std::int64_t group_size,
                   std::int64_t block_size, const std::string& estimator, const std::string& order_from,
                   std::optional<std::int64_t> window, std::int64_t sinks, std::optional<std::int64_t> key_offset,
                   double skip, bool finish, bool deterministic, std::optional<std::int64_t> first_row,
                   std::optional<std::int64_t> first_key) {
  require_place("grad_q", d_q, q);
  require_place("grad_k", d_k, k);
  require_place("grad_v", d_v, v);
  const Settings settings = settings_of(causal, scale, strategy, group_size, block_size, estimator, order_from, 0,
                                        {window, sinks, key_offset, skip, finish, part_of(first_row, first_key)});
  differentiate({d_o, d_lse, q, k, v, {}, order, key_means, o, lse, false, deterministic}, settings, {d_q, d_k, d_v});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(distrattention, CPU, m) {
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("backward_into", TORCH_BOX(&backward_into));
}

// In a build without CUDA kernels too: the library refuses such tensors in words.
STABLE_TORCH_LIBRARY_IMPL(distrattention, CUDA, m) {
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("backward_into", TORCH_BOX(&backward_into));
}

}  // namespace distr::binding
