// SPDX-License-Identifier: Apache-2.0
// Merges attention over disjoint parts of the keys:
//   m = max_p LSE_p,  w_p = exp(LSE_p - m),  LSE = m + log(sum_p w_p),  O = sum_p w_p O_p / sum_p w_p
//
// A thread takes kWidth columns of a row, and a block whole rows. All is in fp32, with weights divided by kMostParts, a
// power of two, so that no sum leaves its range. The parts are added in their order: the same bits in every run. A part
// whose weight is 0 adds nothing, whatever its values are. Parts without LSE are added up. No shared memory; bound by
// memory.
#include <algorithm>
#include <string>

#include "common/element.h"
#include "cuda/launch.h"
#include "cuda/tile.cuh"
#include "kernel.h"

namespace distr {
namespace cuda {
namespace {

constexpr int kMostParts = 64;  // of a launch: a kernel's parameters are at most 4 KiB
constexpr int kMergeThreads = 512;
constexpr int kWide = 8;  // columns of a thread where all rows of O begin at a multiple of 16 bytes
static_assert(kMaxHeadDim <= kMergeThreads);

struct MergePart {
  const void* o;     // [B, H, N, dv]
  const float* lse;  // [B, H, N]; null: none, for a plain sum
  Strides strides;   // of O
  DType dtype;       // of O
};

struct Merge {
  MergePart parts[kMostParts];
  int count;
  void* o;          // [B, H, N, dv]
  float* lse;       // [B, H, N]; null: not wanted
  Strides strides;  // of O
  std::int64_t rows, heads, rows_of_head;
  int columns;  // dv
  int threads_of_row;
};
static_assert(sizeof(Merge) <= 4096);

__device__ std::int64_t start_of(const Strides& strides, const Merge& p, std::int64_t row) {
  const std::int64_t head = row / p.rows_of_head;
  return head / p.heads * strides.batch + head % p.heads * strides.head + row % p.rows_of_head * strides.row;
}

template <class T, int kWidth>
__device__ void load(const void* o, std::int64_t index, float (&values)[kWidth]) {
  struct alignas(kWidth > 1 ? 16 : sizeof(T)) Vector {
    T elements[kWidth];
  };
  const Vector vector = *reinterpret_cast<const Vector*>(static_cast<const T*>(o) + index);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    values[i] = static_cast<float>(vector.elements[i]);
  }
}

template <int kWidth>
__device__ void load(const MergePart& part, std::int64_t index, float (&values)[kWidth]) {
  switch (part.dtype) {
    case DType::f16:
      return load<__half>(part.o, index, values);
    case DType::bf16:
      return load<__nv_bfloat16>(part.o, index, values);
    default:
      return load<float>(part.o, index, values);
  }
}

template <class T, int kWidth>
__device__ void store(void* o, std::int64_t index, const float (&values)[kWidth]) {
  struct alignas(kWidth > 1 ? 16 : sizeof(T)) Vector {
    T elements[kWidth];
  } vector;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    vector.elements[i] = T(values[i]);
  }
  *reinterpret_cast<Vector*>(static_cast<T*>(o) + index) = vector;
}

// What a thread takes: kWidth columns of a row. A block has kMergeThreads / p.threads_of_row rows.
struct Place {
  std::int64_t row;
  int column;
  bool has_work;

  __device__ Place(const Merge& p, int width) {
    const int thread = static_cast<int>(threadIdx.x);
    const int rows_of_block = kMergeThreads / p.threads_of_row;
    row = std::int64_t{blockIdx.x} * rows_of_block + thread / p.threads_of_row;
    column = thread % p.threads_of_row * width;
    has_work = thread < rows_of_block * p.threads_of_row && row < p.rows;
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kMergeThreads) sum_kernel(const __grid_constant__ Merge p) {
  const Place place(p, kWidth);
  if (!place.has_work) {
    return;
  }
  float r_o[kWidth] = {};
  for (int n = 0; n < p.count; ++n) {
    float r_part[kWidth];
    load(p.parts[n], start_of(p.parts[n].strides, p, place.row) + place.column, r_part);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      r_o[i] += r_part[i];
    }
  }
  store<T>(p.o, start_of(p.strides, p, place.row) + place.column, r_o);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Merge p) {
  const auto [row, column, has_work] = Place(p, kWidth);
  float largest = -INFINITY;
  for (int n = 0; n < p.count && has_work; ++n) {
    const float lse = p.parts[n].lse[row];
    largest = isnan(lse) || lse > largest ? lse : largest;
  }
  float sum = 0;
  float r_o[kWidth] = {};
  for (int n = 0; n < p.count && largest != -INFINITY; ++n) {
    const MergePart& part = p.parts[n];
    float weight = expf(part.lse[row] - largest);
    if (weight == 0) {
      continue;
    }
    weight *= 1.0F / kMostParts;
    sum += weight;
    float r_part[kWidth];
    load(part, start_of(part.strides, p, row) + column, r_part);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      r_o[i] = fmaf(weight, r_part[i], r_o[i]);
    }
  }
  __syncthreads();  // LSE may be that of a part, which all of its row's threads have read by now
  if (!has_work) {
    return;
  }
#pragma unroll
  for (float& x : r_o) {
    x = largest == -INFINITY ? 0.0F : x / sum;
  }
  store<T>(p.o, start_of(p.strides, p, row) + column, r_o);
  if (column == 0 && p.lse != nullptr) {
    p.lse[row] = largest == -INFINITY ? largest : largest + logf(sum * kMostParts);
  }
}

bool is_wide(const void* o, const Strides& strides, DType dtype, const Merge& p) {
  constexpr std::int64_t kBytes = 16;
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  return reinterpret_cast<std::uintptr_t>(o) % kBytes == 0 && p.columns % kWide == 0 &&
         strides.batch * element % kBytes == 0 && strides.head * element % kBytes == 0 &&
         strides.row * element % kBytes == 0;
}

template <class T, int kWidth>
auto kernel_of(const Merge& p) {
  const bool is_sum = p.count > 0 && p.parts[0].lse == nullptr;
  return is_sum ? sum_kernel<T, kWidth> : merge_kernel<T, kWidth>;
}

template <int kWidth>
void launch_merge(DType dtype, Merge p, void* stream) {
  p.threads_of_row = p.columns / kWidth;
  const auto kernel = dtype == DType::f16    ? kernel_of<__half, kWidth>(p)
                      : dtype == DType::bf16 ? kernel_of<__nv_bfloat16, kWidth>(p)
                                             : kernel_of<float, kWidth>(p);
  const std::int64_t rows_of_block = kMergeThreads / p.threads_of_row;
  launch(kernel, dim3(static_cast<unsigned>(common::ceil_div(p.rows, rows_of_block))), kMergeThreads, 0, stream, p);
}

void launch_merge(DType dtype, const Merge& p, void* stream) {
  const bool all_are_wide =
      is_wide(p.o, p.strides, dtype, p) && std::all_of(p.parts, p.parts + p.count, [&p](const MergePart& part) {
        return is_wide(part.o, part.strides, part.dtype, p);
      });
  all_are_wide ? launch_merge<kWide>(dtype, p, stream) : launch_merge<1>(dtype, p, stream);
}

void require_served(const Problem& problem, std::span<const Partial> parts) {
  const std::string reason = unusable_reason();
  if (!reason.empty()) {
    throw Error(Status::unsupported, "CUDA cannot be used: " + reason);
  }
  const bool has_double =
      std::any_of(parts.begin(), parts.end(), [](const Partial& part) { return part.dtype == DType::f64; });
  if (problem.dtype == DType::f64 || has_double) {
    throw Error(Status::unsupported, "O of a merge on CUDA is f64; allowed: f16, bf16, f32");
  }
}

void require_memory_of_device(std::span<const Partial> parts, const void* o, const void* lse) {
  const int device = current_device();
  for (const Partial& part : parts) {
    require_device_memory(part.o, "a part's O", device);
    require_device_memory(part.lse, "a part's LSE", device);
  }
  require_device_memory(o, "O", device);
  require_device_memory(lse, "LSE", device);
}

}  // namespace
}  // namespace cuda

void cuda_merge(const Problem& problem, std::span<const Partial> parts, void* o, void* lse,
                const Execution& execution) {
  using namespace cuda;
  require_served(problem, parts);
  if (lse == nullptr && parts.size() > kMostParts && parts.front().lse != nullptr) {
    throw Error(Status::invalid_argument, "LSE is null, and there are " + std::to_string(parts.size()) +
                                              " parts; allowed on CUDA: memory for LSE, or up to " +
                                              std::to_string(kMostParts) + " parts");
  }
  if (execution.check_memory) {
    require_memory_of_device(parts, o, lse);
  }
  Merge p{};
  p.o = o;
  p.lse = static_cast<float*>(lse);
  p.strides = problem.o;
  p.rows = problem.batch * problem.heads_q * problem.seq_q;
  p.heads = problem.heads_q;
  p.rows_of_head = problem.seq_q;
  p.columns = static_cast<int>(problem.head_dim_v);
  std::size_t taken = 0;
  do {  // later launches take what the one before made as their first part
    p.count = 0;
    const auto add = [&p](const MergePart& part) { p.parts[p.count++] = part; };
    if (taken > 0) {
      add({o, p.lse, problem.o, problem.dtype});
    }
    for (; taken < parts.size() && p.count < kMostParts; ++taken) {
      const Partial& part = parts[taken];
      add({part.o, static_cast<const float*>(part.lse), part.strides.value_or(problem.o),
           part.dtype.value_or(problem.dtype)});
    }
    launch_merge(problem.dtype, p, execution.stream);
  } while (taken < parts.size());
}

}  // namespace distr
