// SPDX-License-Identifier: Apache-2.0
// k_hat^T[g, j] = sum of K^T[c, j] over the columns c of group g, in fp32, rounded once
//
// A thread makes 8 keys of one group, 16 bytes: it reads as many of each of the group's rows of K^T, one after another,
// and its neighbours read the next ones. The row past the last group has no columns, so it is zero. No shared memory;
// bound by the reads.
#include "cuda/prepare/fuse.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/element.h"
#include "cuda/launch.h"
#include "cuda/tile.cuh"

namespace distr::cuda {
namespace {

constexpr int kFuseThreads = 256;

// One thread a chunk of 8 keys of one group.
template <class T>
__global__ void fuse_kernel(const uint4* kt, const std::int32_t* order, Fusion fusion, uint4* fused) {
  const std::int64_t chunks = fusion.stride / kChunk;
  const std::int64_t index = std::int64_t{blockIdx.x} * kFuseThreads + threadIdx.x;
  const std::int64_t row = index / chunks;  // of batch * heads_q * (groups + 1)
  const std::int64_t head = row / (fusion.groups + 1);
  if (head >= fusion.batch * fusion.heads_q) {
    return;
  }
  const std::int64_t b = head / fusion.heads_q;
  const std::int64_t head_kv = head % fusion.heads_q / (fusion.heads_q / fusion.heads_kv);
  const uint4* from = kt + (b * fusion.heads_kv + head_kv) * (fusion.columns + 1) * chunks + index % chunks;
  const std::int64_t begin = row % (fusion.groups + 1) * fusion.members;
  float sums[kChunk] = {};
  for (std::int64_t i = begin; i < min(begin + fusion.members, fusion.columns); ++i) {
    const uint4 chunk = from[order[head * fusion.columns + i] * chunks];
    const auto* elements = reinterpret_cast<const T*>(&chunk);
    for (int e = 0; e < kChunk; ++e) {
      sums[e] += static_cast<float>(elements[e]);
    }
  }
  uint4 result;
  auto* elements = reinterpret_cast<T*>(&result);
  for (int e = 0; e < kChunk; ++e) {
    elements[e] = T(sums[e]);
  }
  fused[index] = result;
}

}  // namespace

void fuse(const void* kt, const std::int32_t* order, const Fusion& fusion, void* fused, void* stream) {
  const std::int64_t chunks = fusion.count() / kChunk;
  if (chunks > 0) {
    const auto blocks = static_cast<unsigned>(common::ceil_div(chunks, std::int64_t{kFuseThreads}));
    launch(fusion.dtype == DType::f16 ? fuse_kernel<__half> : fuse_kernel<__nv_bfloat16>, dim3(blocks), kFuseThreads, 0,
           stream, static_cast<const uint4*>(kt), order, fusion, static_cast<uint4*>(fused));
  }
}

}  // namespace distr::cuda
