// SPDX-License-Identifier: Apache-2.0
// The operators distrattention::{attend_packed, attend_packed_backward, attend_cache}: exact attention whose lengths
// are data.
#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "tensors.h"

namespace distr::binding {
namespace {

const std::int32_t* lengths_data(const Tensor& tensor) {
  return static_cast<const std::int32_t*>(tensor.const_data_ptr());
}

Settings exact(const std::string& causal, std::optional<double> scale, std::optional<std::int64_t> window_left,
               std::optional<std::int64_t> window_right, double softcap) {
  return settings_of(causal, scale, "exact", 1, Grouping{}.block, "mean", "auto", 0, {}, {window_left, window_right},
                     softcap);
}

// [T, heads, columns] as [1, heads, T, columns]: the problem of one entry with all rows, which becomes that of the
// sequences.
Tensor as_one_entry(const char* name, const Tensor& tensor) {
  if (tensor.dim() != 3) {
    invalid(std::string(name) + " has " + std::to_string(tensor.dim()) + " axes; allowed: 3, [rows, heads, columns]");
  }
  return torch::stable::unsqueeze(torch::stable::transpose(tensor, 0, 1), 0);
}

struct Sequences {
  Tensor starts_q, starts_k;

  Sequences(const Tensor& q, const Tensor& of_q, const Tensor& of_k) : starts_q(packed(of_q)), starts_k(packed(of_k)) {
    if (of_q.dim() != 1 || of_q.size(0) == 0) {
      invalid("the starts of the sequences of q have " + std::to_string(of_q.dim()) +
              " axes; allowed: 1, of as many as there are sequences and one more");
    }
    require(q, "the starts of the sequences of q", of_q, ScalarType::Int, {of_q.size(0)});
    require(q, "the starts of the sequences of k", of_k, ScalarType::Int, {of_q.size(0)});
  }
  [[nodiscard]] Lengths lengths() const { return {nullptr, lengths_data(starts_q), lengths_data(starts_k)}; }
};

// The call that all rows as one entry would be, made that of the sequences. q, k and v: with unit rows.
struct PackedCall {
  Call call;
  Sequences sequences;

  PackedCall(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& starts_q, const Tensor& starts_k,
             std::int64_t longest_q, std::int64_t longest_k, const Settings& settings)
      : call(make_call(as_one_entry("q", q), as_one_entry("k", k), as_one_entry("v", v), settings)),
        sequences(q, starts_q, starts_k) {
    Problem& problem = call.problem;
    problem.packed = {problem.seq_q, problem.seq_k};
    problem.batch = starts_q.size(0) - 1;
    problem.seq_q = longest_q;
    problem.seq_k = longest_k;
    problem.window_offset.reset();
  }
};

// `call` has the strides of O.
void run_forward(Call& call, const Tensor& q, const Tensor& k, const Tensor& v, Tensor& o, Tensor& lse,
                 const Lengths& lengths) {
  const Plan plan = plan_of(Operation::forward, call);
  const Workspace workspace = add_workspace(call, plan.workspace_bytes(), q);
  ForwardTensors tensors;
  tensors.q = q.const_data_ptr();
  tensors.k = k.const_data_ptr();
  tensors.v = v.const_data_ptr();
  tensors.o = o.mutable_data_ptr();
  tensors.lse = lse.mutable_data_ptr();
  tensors.lengths = lengths;
  plan.run(tensors, call.execution);
}

// Sequences one behind the other: q [Tq, Hq, d], k [Tk, H, d], v [Tk, H, dv], starts int32 [S + 1] on q's device.
// Returns O [Tq, Hq, dv] and LSE [Hq, Tq]. `deterministic` is for the backward, which takes the settings of its
// forward.
std::tuple<Tensor, Tensor> attend_packed(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                         const Tensor& starts_q, const Tensor& starts_k, std::int64_t longest_q,
                                         std::int64_t longest_k, const std::string& causal, std::optional<double> scale,
                                         std::optional<std::int64_t> window_left,
                                         std::optional<std::int64_t> window_right, double softcap,
                                         bool /*deterministic*/) {
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in), v = with_unit_rows(v_in);
  PackedCall with(q, k, v, starts_q, starts_k, longest_q, longest_k,
                  exact(causal, scale, window_left, window_right, softcap));
  Call& call = with.call;
  Tensor o = empty(q, {q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  Tensor lse = empty(q, {q.size(1), q.size(0)}, lse_type(call.problem));
  call.problem.o = strides_of(as_one_entry("out", o));
  run_forward(call, q, k, v, o, lse, with.sequences.lengths());
  return {std::move(o), std::move(lse)};
}

// dQ, dK and dV, laid out like Q, K and V.
std::tuple<Tensor, Tensor, Tensor> attend_packed_backward(
    const Tensor& d_o_in, const OptionalTensor& d_lse_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    const Tensor& starts_q, const Tensor& starts_k, const Tensor& o_in, const Tensor& lse_in, std::int64_t longest_q,
    std::int64_t longest_k, const std::string& causal, std::optional<double> scale,
    std::optional<std::int64_t> window_left, std::optional<std::int64_t> window_right, double softcap,
    bool deterministic) {
  Tensor d_q = dense_like(q_in), d_k = dense_like(k_in), d_v = dense_like(v_in);
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in), v = with_unit_rows(v_in);
  PackedCall with(q, k, v, starts_q, starts_k, longest_q, longest_k,
                  exact(causal, scale, window_left, window_right, softcap));
  Call& call = with.call;
  const std::array o_shape{q.size(0), q.size(1), v.size(2)};
  const std::array lse_shape{q.size(1), q.size(0)};
  const ScalarType type_of_lse = lse_type(call.problem);
  require(q, "out", o_in, q.scalar_type(), o_shape);
  require(q, "the gradient of out", d_o_in, q.scalar_type(), o_shape);
  require(q, "lse", lse_in, type_of_lse, lse_shape);
  const auto [o, d_o] = laid_out_alike(o_in, d_o_in);
  const Tensor lse = packed(lse_in);
  OptionalTensor d_lse;
  if (d_lse_in) {
    require(q, "the gradient of lse", *d_lse_in, type_of_lse, lse_shape);
    d_lse = packed(*d_lse_in);
  }
  call.problem.o = strides_of(as_one_entry("out", o));
  call.problem.d_q = strides_of(as_one_entry("the gradient of q", d_q));
  call.problem.d_k = strides_of(as_one_entry("the gradient of k", d_k));
  call.problem.d_v = strides_of(as_one_entry("the gradient of v", d_v));
  call.execution.deterministic = deterministic;
  const Plan plan = plan_of(Operation::backward, call);
  const Workspace workspace = add_workspace(call, plan.workspace_bytes(), q);
  BackwardTensors tensors;
  tensors.q = q.const_data_ptr();
  tensors.k = k.const_data_ptr();
  tensors.v = v.const_data_ptr();
  tensors.o = o.const_data_ptr();
  tensors.lse = lse.const_data_ptr();
  tensors.d_o = d_o.const_data_ptr();
  tensors.d_lse = d_lse ? d_lse->const_data_ptr() : nullptr;
  tensors.d_q = d_q.mutable_data_ptr();
  tensors.d_k = d_k.mutable_data_ptr();
  tensors.d_v = d_v.mutable_data_ptr();
  tensors.lengths = with.sequences.lengths();
  plan.run(tensors, call.execution);
  return {std::move(d_q), std::move(d_k), std::move(d_v)};
}

// q [B, Hq, N, d] to the first lengths[b] of k [B, H, S, d] and v [B, H, S, dv]; lengths int32 [B] on q's device.
// Returns O and LSE [B, Hq, N].
std::tuple<Tensor, Tensor> attend_cache(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                        const Tensor& lengths_in, const std::string& causal,
                                        std::optional<double> scale, std::optional<std::int64_t> window_left,
                                        std::optional<std::int64_t> window_right, double softcap) {
  const Tensor q = with_unit_rows(q_in), k = with_unit_rows(k_in), v = with_unit_rows(v_in);
  Call call = make_call(q, k, v, exact(causal, scale, window_left, window_right, softcap));
  require(q, "the lengths", lengths_in, ScalarType::Int, {q.size(0)});
  const Tensor lengths = packed(lengths_in);
  call.problem.key_lengths = true;
  call.problem.window_offset.reset();
  Tensor o = empty_rows_first(q, {q.size(0), q.size(1), q.size(2), v.size(3)});
  Tensor lse = empty(q, {q.size(0), q.size(1), q.size(2)}, lse_type(call.problem));
  call.problem.o = strides_of(o);
  run_forward(call, q, k, v, o, lse, {lengths_data(lengths)});
  return {std::move(o), std::move(lse)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(distrattention, m) {
  const std::string window =
      "str causal='none', float? scale=None, int? window_left=None, int? window_right=None, float softcap=0.";
  const std::string packed = "int longest_q, int longest_k, " + window + ", bool deterministic=True)";
  const auto define = [&m](const std::string& schema) { m.def(schema.c_str()); };
  define("attend_packed(Tensor q, Tensor k, Tensor v, Tensor starts_q, Tensor starts_k, " + packed +
         " -> (Tensor out, Tensor lse)");
  define(
      "attend_packed_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor starts_q, Tensor "
      "starts_k, Tensor out, Tensor lse, " +
      packed + " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  define("attend_cache(Tensor q, Tensor k, Tensor v, Tensor lengths, " + window + ") -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(distrattention, CPU, m) {
  m.impl("attend_packed", TORCH_BOX(&attend_packed));
  m.impl("attend_packed_backward", TORCH_BOX(&attend_packed_backward));
  m.impl("attend_cache", TORCH_BOX(&attend_cache));
}

STABLE_TORCH_LIBRARY_IMPL(distrattention, CUDA, m) {
  m.impl("attend_packed", TORCH_BOX(&attend_packed));
  m.impl("attend_packed_backward", TORCH_BOX(&attend_packed_backward));
  m.impl("attend_cache", TORCH_BOX(&attend_cache));
}

}  // namespace distr::binding
