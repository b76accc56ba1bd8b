// SPDX-License-Identifier: Apache-2.0
#include "merge.h"

#include <array>
#include <string>

namespace distr::binding {

void merge_into(const Tensor& out, Tensor lse, const Tensor& more_out_in, const Tensor& more_lse) {
  if (out.dim() == 4 && out.size(3) > 1 && out.stride(3) != 1) {
    invalid("the last stride of out is " + std::to_string(out.stride(3)) + "; allowed: 1, as out is written to");
  }
  Call call = make_call(out, out, out, {});
  call.problem.o = strides_of(out);
  const ScalarType type_of_lse = lse_type(call.problem);
  require(out, "more_out", more_out_in, more_out_in.scalar_type(), out.sizes());
  require(out, "lse", lse, type_of_lse, {out.size(0), out.size(1), out.size(2)});
  require(out, "more_lse", more_lse, type_of_lse, lse.sizes());
  const Tensor more_out = with_unit_rows(more_out_in), all_lse = packed(lse), other_lse = packed(more_lse);
  const std::array parts{Partial{out.const_data_ptr(), all_lse.const_data_ptr()},
                         Partial{more_out.const_data_ptr(), other_lse.const_data_ptr(),
                                 make_call(more_out, more_out, more_out, {}).problem.dtype, strides_of(more_out)}};
  if (out.numel() > 0) {
    merge(call.problem, parts, out.mutable_data_ptr(), all_lse.mutable_data_ptr(), call.execution);
  }
  if (!lse.is_contiguous()) {
    torch::stable::copy_(lse, all_lse);
  }
}

}  // namespace distr::binding
