// SPDX-License-Identifier: Apache-2.0
// The torch operators distrattention::{merge, add_up}, which put together what was computed of parts of the keys: O by
// the parts' LSE, and gradients, which are sums.
#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "tensors.h"

namespace distr::binding {
namespace {

// The parts' O, [B, H, N, d] of the shape of `out`; `kept` has what they point to.
std::vector<Partial> partials_of(const Tensor& out, const std::vector<Tensor>& outs, const char* name,
                                 std::vector<Tensor>& kept) {
  std::vector<Partial> parts;
  for (std::size_t n = 0; n < outs.size(); ++n) {
    require(out, (name + ("[" + std::to_string(n) + "]")).c_str(), outs[n], outs[n].scalar_type(), out.sizes());
    const Tensor part = kept.emplace_back(with_unit_rows(outs[n]));
    parts.push_back({part.const_data_ptr(), nullptr, make_call(part, part, part, {}).problem.dtype, strides_of(part)});
  }
  return parts;
}

// Of attention whose O is `out`, which is written to.
Call call_of(const Tensor& out, const char* name) {
  if (out.dim() == 4 && out.size(3) > 1 && out.stride(3) != 1) {
    invalid("the last stride of " + std::string(name) + " is " + std::to_string(out.stride(3)) +
            "; allowed: 1, as it is written to");
  }
  Call call = make_call(out, out, out, {});
  call.problem.o = strides_of(out);
  return call;
}

// Merges attention of the same rows over disjoint parts of the keys, outs [B, H, N, dv] and lses [B, H, N], into out
// [B, H, N, dv], whose rows are contiguous, and lse [B, H, N], which may be those of a part. The dtypes of outs may
// differ from out's.
void merge_parts(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses, const Tensor& out, Tensor lse) {
  const Call call = call_of(out, "out");
  if (outs.size() != lses.size()) {
    invalid("outs has " + std::to_string(outs.size()) + " tensors and lses " + std::to_string(lses.size()) +
            "; allowed: as many");
  }
  const ScalarType type_of_lse = lse_type(call.problem);
  require(out, "lse", lse, type_of_lse, {out.size(0), out.size(1), out.size(2)});
  std::vector<Tensor> kept;
  std::vector<Partial> parts = partials_of(out, outs, "outs", kept);
  for (std::size_t n = 0; n < lses.size(); ++n) {
    require(out, ("lses[" + std::to_string(n) + "]").c_str(), lses[n], type_of_lse, lse.sizes());
    parts[n].lse = kept.emplace_back(packed(lses[n])).const_data_ptr();
  }
  const Tensor merged_lse = packed(lse);
  if (out.numel() > 0) {
    merge(call.problem, parts, out.mutable_data_ptr(), merged_lse.mutable_data_ptr(), call.execution);
  }
  if (!lse.is_contiguous()) {
    torch::stable::copy_(lse, merged_lse);
  }
}

// Makes total [B, H, N, d], whose rows are contiguous, the sum of the parts, rounded once. Their dtypes may differ from
// its own.
void add_up(const std::vector<Tensor>& parts, const Tensor& total) {
  const Call call = call_of(total, "total");
  std::vector<Tensor> kept;
  const std::vector<Partial> partials = partials_of(total, parts, "parts", kept);
  if (total.numel() > 0) {
    merge(call.problem, partials, total.mutable_data_ptr(), nullptr, call.execution);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(distrattention, m) {
  m.def("merge(Tensor[] outs, Tensor[] lses, Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def("add_up(Tensor[] parts, Tensor(a!) total) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(distrattention, CPU, m) {
  m.impl("merge", TORCH_BOX(&merge_parts));
  m.impl("add_up", TORCH_BOX(&add_up));
}

// In a build without CUDA kernels too: the library refuses such tensors in words.
STABLE_TORCH_LIBRARY_IMPL(distrattention, CUDA, m) {
  m.impl("merge", TORCH_BOX(&merge_parts));
  m.impl("add_up", TORCH_BOX(&add_up));
}

}  // namespace distr::binding
