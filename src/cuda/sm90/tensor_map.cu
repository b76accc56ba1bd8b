// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/tensor_map.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "cuda/launch.h"
#include "cuda/sm90/config.h"
#include "kernel.h"

namespace distr::cuda::sm90 {
namespace {

[[nodiscard]] bool suits_tma(const Strides& strides, const Extent& extent) noexcept {
  const auto steps = [](std::int64_t stride, std::int64_t count) { return count == 1 || stride > 0; };
  return has_aligned_rows(strides) && extent.columns % 8 == 0 && steps(strides.row, extent.rows) &&
         steps(strides.head, extent.heads) && steps(strides.batch, extent.batch);
}

using Encode = decltype(&cuTensorMapEncodeTiled);

[[nodiscard]] Encode encoder() {
  static const Encode function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    constexpr unsigned kSince = 12000;  // the CUDA version that has it
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kSince, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) {
      throw Error(Status::device_failure, "the NVIDIA driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<Encode>(entry);
  }();
  return function;
}

}  // namespace

Input for_tma(const char* name, const Strides& strides, const Extent& extent, WorkspaceLayout& workspace) {
  return {name, strides, extent, suits_tma(strides, extent), workspace};
}

Input entries_for_tma(const char* name, const Strides& strides, const Extent& extent, WorkspaceLayout& workspace) {
  const bool has_whole_rows = strides.row > 0 && (extent.batch == 1 || strides.batch % strides.row == 0);
  return {name, strides, extent, has_whole_rows && suits_tma(strides, extent), workspace};
}

std::int64_t entry_rows(const Extent& extent, const Strides& strides) noexcept {
  return extent.batch == 1 ? 0 : strides.batch / strides.row;
}

Operand of_entries(Operand tensor) {
  tensor.ends_by_entry = true;
  return tensor;
}

namespace {

// A map by its axes: columns, rows and heads, and for a tensor behind them its batch, for entries what ends them.
template <std::size_t kRank>
CUtensorMap encode(const void* data, DType dtype, const Box& box, const std::array<cuuint64_t, kRank>& sizes,
                   const std::array<cuuint64_t, kRank - 1>& strides_bytes) {
  std::array<cuuint32_t, kRank> sides{static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows)};
  std::fill(sides.begin() + 2, sides.end(), 1);
  std::array<cuuint32_t, kRank> steps{};
  steps.fill(1);
  const auto type = dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle = box.columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                       : box.columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                           : CU_TENSOR_MAP_SWIZZLE_32B;
  CUtensorMap map{};
  const CUresult result = encoder()(&map, type, kRank, const_cast<void*>(data), sizes.data(), strides_bytes.data(),
                                    sides.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(Status::device_failure, "cuTensorMapEncodeTiled: CUresult " + std::to_string(result));
  }
  return map;
}

}  // namespace

CUtensorMap tensor_map(const Operand& tensor, DType dtype, const Box& box) {
  constexpr cuuint64_t kElement = 2;  // bytes
  const Extent& extent = tensor.extent;
  const Strides& strides = tensor.strides;
  const auto size = [](std::int64_t count) { return static_cast<cuuint64_t>(count); };
  const auto stride = [&](std::int64_t count, std::int64_t elements) {
    return count == 1 ? size(packed_columns(extent.columns)) * kElement : size(elements) * kElement;
  };
  const cuuint64_t head = stride(extent.heads, strides.head);
  if (!tensor.ends_by_entry) {
    return encode<4>(tensor.data, dtype, box,
                     {size(extent.columns), size(extent.rows), size(extent.heads), size(extent.batch)},
                     {stride(extent.rows, strides.row), head, stride(extent.batch, strides.batch)});
  }
  const cuuint64_t row = stride(extent.rows * extent.batch, strides.row);
  const cuuint64_t ends = size((extent.batch - 1) * entry_rows(extent, strides) + extent.rows + 1);
  return encode<5>(tensor.data, dtype, box,
                   {size(extent.columns), kEntryRows, size(extent.heads), ends, kEntryRows + 1},
                   {row, head, row, kEntryWrap - row});
}

}  // namespace distr::cuda::sm90
