// SPDX-License-Identifier: Apache-2.0
#include "merge.h"

#include <string>
#include <vector>

namespace distr::binding {

void merge_parts(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses, const Tensor& out, Tensor lse) {
  if (out.dim() == 4 && out.size(3) > 1 && out.stride(3) != 1) {
    invalid("the last stride of out is " + std::to_string(out.stride(3)) + "; allowed: 1, as out is written to");
  }
  if (outs.size() != lses.size()) {
    invalid("outs has " + std::to_string(outs.size()) + " tensors and lses " + std::to_string(lses.size()) +
            "; allowed: as many");
  }
  Call call = make_call(out, out, out, {});
  call.problem.o = strides_of(out);
  const ScalarType type_of_lse = lse_type(call.problem);
  require(out, "lse", lse, type_of_lse, {out.size(0), out.size(1), out.size(2)});
  std::vector<Tensor> kept;  // what the parts point to
  std::vector<Partial> parts;
  for (std::size_t n = 0; n < outs.size(); ++n) {
    const std::string number = "[" + std::to_string(n) + "]";
    require(out, ("outs" + number).c_str(), outs[n], outs[n].scalar_type(), out.sizes());
    require(out, ("lses" + number).c_str(), lses[n], type_of_lse, lse.sizes());
    const Tensor part = kept.emplace_back(with_unit_rows(outs[n]));
    const Tensor lse_of_part = kept.emplace_back(packed(lses[n]));
    parts.push_back({part.const_data_ptr(), lse_of_part.const_data_ptr(), make_call(part, part, part, {}).problem.dtype,
                     strides_of(part)});
  }
  const Tensor merged_lse = packed(lse);
  if (out.numel() > 0) {
    merge(call.problem, parts, out.mutable_data_ptr(), merged_lse.mutable_data_ptr(), call.execution);
  }
  if (!lse.is_contiguous()) {
    torch::stable::copy_(lse, merged_lse);
  }
}

}  // namespace distr::binding
