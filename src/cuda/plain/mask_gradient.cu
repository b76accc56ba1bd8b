// SPDX-License-Identifier: Apache-2.0
// The gradient of an additive mask: dS summed over the axes along which the mask repeats, in a fixed order.
//
// A block of 16 x 16 threads owns the mask's elements of one tile of queries and one of keys, of one batch entry and
// head, each of these as far as the mask has that axis. Along an axis that repeats it meets all batch entries, heads,
// tiles of queries, or tiles of keys in turn. Thread (y, x) sums dS of 4 rows and 4 keys in registers; where rows or
// keys repeat, the threads' sums are added in shared memory at the end.
// A mask that repeats along most axes leaves most of the device idle: a simple kernel, not a quick one.
#include "cuda/mask_gradient.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/plain/backward.cuh"
#include "cuda/plain/plain.h"

namespace distr::cuda {
namespace plain {
namespace {

struct alignas(16) MaskShared {
  Staged staged;
  float sum[kSide * kPitch];  // [row][key]
  std::int32_t order[kMaxHeadDim];
};
static_assert(sizeof(MaskShared) <= 48 * 1024);

// From .. to - 1: the one index that the block owns, or all.
struct Range {
  std::int64_t from, to;
};

__device__ Range range(std::int64_t& index, std::int64_t owners, std::int64_t all) {
  const bool repeats = owners < 0;
  const std::int64_t own = repeats ? 0 : index % owners;
  index = repeats ? index : index / owners;
  return repeats ? Range{0, all} : Range{own, own + 1};
}

// How many blocks share an axis: -1 where it repeats (one block meets all of it).
struct Owners {
  std::int64_t batch, head, row, key;
};

__host__ __device__ inline std::int64_t blocks_of(const Owners& owners) {
  const auto at_least_one = [](std::int64_t count) { return count < 0 ? 1 : count; };
  return at_least_one(owners.batch) * at_least_one(owners.head) * at_least_one(owners.row) * at_least_one(owners.key);
}

// Writes sum [row][key], added up over rows and keys that repeat.
__device__ void store_sum(const BackwardArguments& arguments, const Owners& owners, const float* s_sum, std::int64_t b,
                          std::int64_t h, std::int64_t first_row, std::int64_t rows, std::int64_t first_key) {
  const std::int64_t* shape = arguments.mask_shape;
  const bool all_rows = owners.row < 0;
  const bool all_keys = owners.key < 0;
  const int own_rows = all_rows ? 1 : static_cast<int>(rows);
  const int own_keys = all_keys ? 1 : kSide;
  for (int n = static_cast<int>(threadIdx.x); n < own_rows * own_keys; n += kThreads) {
    const int row = n / own_keys;
    const int key = n % own_keys;
    float sum = 0;
    for (int i = row; i < (all_rows ? kSide : row + 1); ++i) {
      for (int j = key; j < (all_keys ? kSide : key + 1); ++j) {
        sum += s_sum[i * kPitch + j];
      }
    }
    if (all_keys || first_key + key < shape[3]) {
      const std::int64_t line = ((shape[0] == 1 ? 0 : b) * shape[1] + (shape[1] == 1 ? 0 : h)) * shape[2];
      arguments.d_mask[(line + (all_rows ? 0 : first_row + row)) * shape[3] + (all_keys ? 0 : first_key + key)] = sum;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    mask_kernel(const __grid_constant__ BackwardArguments arguments, const __grid_constant__ Owners owners) {
  __shared__ MaskShared shared;
  const DeviceProblem& problem = arguments.problem;
  std::int64_t index = blockIdx.x;
  const Range keys = range(index, owners.key, (problem.seq_k + kSide - 1) / kSide);
  const Range tiles = range(index, owners.row, arguments.tiles_of_head);
  const Range heads = range(index, owners.head, problem.heads_q);
  const Range batches = range(index, owners.batch, problem.batch);
  float r_sum[4][4] = {};
  Tile last{};
  for (std::int64_t b = batches.from; b < batches.to; ++b) {
    for (std::int64_t h = heads.from; h < heads.to; ++h) {
      for (std::int64_t n = tiles.from; n < tiles.to; ++n) {
        const Tile tile = find_tile(problem, arguments.tiles, (b * problem.heads_q + h) * arguments.tiles_of_head + n);
        last = tile;
        if (tile.rows <= 0) {
          continue;
        }
        const SeenKeys seen = seen_keys(problem, tile);
        for (std::int64_t key_tile = keys.from; key_tile < keys.to; ++key_tile) {
          if (!seen.has(key_tile * kSide)) {
            continue;
          }
          const Tile at = at_keys(problem, tile, key_tile * kSide);
          const TileGroups groups = load_groups(problem, at, arguments.order, shared.order);
          float r_s[4][4];
          compute_score_gradients<T>(arguments, at, groups, key_tile * kSide, Slope::none, shared.staged, r_s);
          for (int element = 0; element < 16; ++element) {
            r_sum[element / 4][element % 4] += r_s[element / 4][element % 4];
          }
        }
      }
    }
  }
  const int y = static_cast<int>(threadIdx.x) / 16;
  const int x = static_cast<int>(threadIdx.x) % 16;
  for (int element = 0; element < 16; ++element) {
    shared.sum[(4 * y + element / 4) * kPitch + 4 * x + element % 4] = r_sum[element / 4][element % 4];
  }
  __syncthreads();
  store_sum(arguments, owners, shared.sum, batches.from, heads.from, last.first, last.rows, keys.from * kSide);
}

void launch_kernel(DType dtype, const BackwardArguments& arguments, void* stream) {
  const std::int64_t* shape = arguments.mask_shape;
  const auto owners = [](std::int64_t length, std::int64_t blocks) { return length == 1 ? -1 : blocks; };
  const Owners of_axes{owners(shape[0], shape[0]), owners(shape[1], shape[1]),
                       owners(shape[2], arguments.tiles_of_head), owners(shape[3], common::ceil_div(shape[3], kSide))};
  const std::int64_t blocks = blocks_of(of_axes);
  if (blocks == 0) {
    return;
  }
  with_element(dtype, [&]<class T>(std::type_identity<T>) {
    launch(mask_kernel<T>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, arguments, of_axes);
  });
}

}  // namespace
}  // namespace plain

std::string MaskGradient::unsupported_reason(const Problem& problem, const Grouping& grouping) {
  return plain::supports(problem, grouping);
}

MaskGradient::MaskGradient(const Problem& problem, const Grouping& grouping)
    : dtype_(problem.dtype),
      scale_(static_cast<float>(problem.softmax_scale())),
      problem_(plain::tiled_problem(problem, grouping)),
      shape_{} {
  for (int axis = 0; axis < 4; ++axis) {
    const int from = axis - (4 - problem.mask.rank);
    shape_[static_cast<std::size_t>(axis)] = from < 0 ? 1 : problem.mask.shape[static_cast<std::size_t>(from)];
  }
}

void MaskGradient::write(const BackwardTensors& tensors, float* delta, void* stream) const {
  plain::BackwardArguments arguments{};
  arguments.problem = problem_;
  arguments.problem.mask.data = tensors.mask;
  arguments.tiles = plain::tiles_of_block(problem_);
  arguments.tiles_of_head = problem_.blocks * arguments.tiles;
  arguments.scale = scale_;
  arguments.lse_stride = problem_.seq_q;
  arguments.q = tensors.q;
  arguments.k = tensors.k;
  arguments.v = tensors.v;
  arguments.order = tensors.order;
  arguments.key_means = tensors.key_means;
  arguments.lse = static_cast<const float*>(tensors.lse);
  arguments.d_o = tensors.d_o;
  arguments.delta = delta;
  arguments.d_mask = static_cast<float*>(tensors.d_mask);
  std::copy(shape_.begin(), shape_.end(), arguments.mask_shape);
  plain::launch_kernel(dtype_, arguments, stream);
}

}  // namespace distr::cuda
