// SPDX-License-Identifier: Apache-2.0
// Orders of the columns on the CPU (method, 2): hash and sort for `lsh`, energies and sort for `energy`, one block of
// Q a task. The spread of K, which `energy` needs first, and the means of the keys, which far scores keep of dropped
// columns (method, 8), are one task for each KV head.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/near.h"
#include "common/parallel.h"
#include "common/projection.h"
#include "cpu/entries.h"
#include "cpu/tiling.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/grouping.cpp"
#include <hwy/foreach_target.h>
// After foreach_target:
#include <hwy/highway.h>

#include "cpu/matmul-inl.h"
#include "cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace distr::cpu::HWY_NAMESPACE {

using Columns = std::array<float, kMaxHeadDim>;

// sums[c] += (x[n, c] - shift[c])^2 over the rows; `columns` a multiple of the vector length.
inline void add_squares(const float* x, std::int64_t rows, std::int64_t columns, const float* shift, float* sums) {
  const hn::ScalableTag<float> tag;
  const std::int64_t lanes = vector_length();
  for (std::int64_t c = 0; c < columns; c += lanes) {
    auto sum = hn::LoadU(tag, sums + c);
    const auto shifts = hn::LoadU(tag, shift + c);
    for (std::int64_t n = 0; n < rows; ++n) {
      const auto difference = hn::Sub(hn::LoadU(tag, x + n * columns + c), shifts);
      sum = hn::MulAdd(difference, difference, sum);
    }
    hn::StoreU(sum, tag, sums + c);
  }
}

// sums[c] = the sum of x[n, c] over the rows.
inline void add_up_rows(const float* x, std::int64_t rows, std::int64_t columns, Columns& sums) {
  sums.fill(0);
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t c = 0; c < columns; ++c) {
      sums[static_cast<std::size_t>(c)] += x[n * columns + c];
    }
  }
}

// Mean and sum of squared differences from it, column by column, over the rows added so far (Chan, Golub and LeVeque,
// "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
struct Moments {
  Columns mean{};
  Columns squares{};
  std::int64_t rows = 0;

  // `new_mean`: the sums of the new rows.
  void add(const float* x, std::int64_t new_rows, std::int64_t columns, Columns new_mean) {
    scale_row(new_mean.data(), columns, 1.0F / static_cast<float>(new_rows));
    add_squares(x, new_rows, columns, new_mean.data(), squares.data());
    const auto share = static_cast<float>(new_rows) / static_cast<float>(rows + new_rows);
    const float weight = share * static_cast<float>(rows);
    for (std::size_t c = 0; c < static_cast<std::size_t>(columns); ++c) {
      const float step = new_mean[c] - mean[c];
      squares[c] += step * step * weight;
      mean[c] += step * share;
    }
    rows += new_rows;
  }
};

// Sums of the rows added so far, of more than 128 in fp64: their rounding must not grow with the number of keys.
struct KeySums {
  std::array<double, kMaxHeadDim> sums{};

  void add(const Columns& new_sums, std::int64_t columns) {
    for (std::size_t c = 0; c < static_cast<std::size_t>(columns); ++c) {
      sums[c] += static_cast<double>(new_sums[c]);
    }
  }

  void write_means(std::int64_t rows, std::int64_t columns, float* means) const {
    for (std::int64_t c = 0; c < columns; ++c) {
      means[c] = rows == 0 ? 0 : static_cast<float>(sums[static_cast<std::size_t>(c)] / static_cast<double>(rows));
    }
  }
};

template <class T>
class GroupingRun {
 public:
  GroupingRun(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors, void* workspace)
      : problem_(problem),
        grouping_(grouping),
        tensors_(tensors),
        blocks_(common::num_blocks(problem, grouping)),
        stride_(padded(problem.head_dim)),
        moment_blocks_(grouping.order_from == OrderFrom::own ? 1 : blocks_),
        moments_(static_cast<float*>(workspace)),
        tiles_(moments_ + (traits(grouping.strategy).reads_keys
                               ? problem.batch * problem.heads_kv * moment_blocks_ * stride_
                               : 0)) {}

  // Spread and means of the keys that decide each block's energies: all keys once, or block by block ever more of them.
  void find_moments(std::int64_t kv_head, int thread) {
    const bool needs_spread = traits(grouping_.strategy).reads_keys;
    const std::int64_t b = kv_head / problem_.heads_kv;
    const std::int64_t h_kv = kv_head % problem_.heads_kv;
    std::int64_t done = 0;
    Columns sums;
    KeySums key_sums;
    Moments moments;
    float* rows = tile(thread);
    const T* k = static_cast<const T*>(tensors_.k) + b * problem_.k.batch + h_kv * problem_.k.head;
    for (std::int64_t block = 0; block < moment_blocks_; ++block) {
      const std::int64_t end = common::order_keys(problem_, grouping_, block);
      for (std::int64_t count; done < end; done += count) {
        count = std::min(kTileKeys, end - done);
        load_rows(k + done * problem_.k.row, problem_.k.row, count, problem_.head_dim, stride_, rows, stride_);
        add_up_rows(rows, count, stride_, sums);
        key_sums.add(sums, stride_);
        if (needs_spread) {
          moments.add(rows, count, stride_, sums);
        }
      }
      if (needs_spread) {
        std::copy_n(moments.squares.data(), stride_, moments_of(kv_head, block));
      }
      if (common::has_key_means(grouping_)) {
        float* means = tensors_.key_means + common::key_means_at(problem_, grouping_, b, h_kv, block);
        key_sums.write_means(end, problem_.head_dim, means);
      }
    }
  }

  void order_block(std::int64_t index, int thread) {
    const std::int64_t block = index % blocks_;
    std::int32_t* order = tensors_.order + index * problem_.head_dim;
    if (common::is_exact_block(grouping_, block)) {
      std::iota(order, order + problem_.head_dim, 0);
      return;
    }
    const std::int64_t head = index / blocks_;
    switch (grouping_.strategy) {
      case Strategy::automatic:
      case Strategy::exact:
      case Strategy::given:
        break;  // resolved, every block exact, or the caller's
      case Strategy::lsh:
        return order_by_hash(head, block, tile(thread), order);
      case Strategy::energy:
        return order_by_energy(head, block, tile(thread), order);
    }
  }

 private:
  [[nodiscard]] float* tile(int thread) const { return tiles_ + thread * kTileQueries * stride_; }

  [[nodiscard]] float* moments_of(std::int64_t kv_head, std::int64_t block) const {
    return moments_ + (kv_head * moment_blocks_ + (moment_blocks_ == 1 ? 0 : block)) * stride_;
  }

  // Calls visit(n, rows) for tiles of the block's rows, loaded to `tile`; n counts within the block.
  template <class Visitor>
  void for_each_tile(std::int64_t head, std::int64_t block, float* tile, Visitor visit) {
    const std::int64_t from = common::order_block(grouping_, block);
    const std::int64_t rows = common::block_rows(problem_, grouping_, from);
    const T* q = static_cast<const T*>(tensors_.q) + head / problem_.heads_q * problem_.q.batch +
                 head % problem_.heads_q * problem_.q.head + from * grouping_.block * problem_.q.row;
    for (std::int64_t n = 0; n < rows; n += kTileQueries) {
      const std::int64_t count = std::min(kTileQueries, rows - n);
      load_rows(q + n * problem_.q.row, problem_.q.row, count, problem_.head_dim, stride_, tile, stride_);
      visit(n, count);
    }
  }

  // Columns by (rank of the bits [R^T Q_b > 0], column).
  void order_by_hash(std::int64_t head, std::int64_t block, float* tile, std::int32_t* order) {
    std::array<float, common::kHashBits * kMaxHeadDim> projections{};  // R^T Q_b [16, d]
    std::array<float, common::kHashBits * kTileQueries> r{};           // R^T [16, rows]
    std::array<const float*, kTileQueries> q_rows{};
    for (std::int64_t n = 0; n < kTileQueries; ++n) {
      q_rows[static_cast<std::size_t>(n)] = tile + n * stride_;
    }
    for_each_tile(head, block, tile, [&](std::int64_t first, std::int64_t count) {
      for (std::int64_t n = 0; n < count; ++n) {
        const auto row = common::projection_row(grouping_.seed, first + n);
        for (std::size_t t = 0; t < row.size(); ++t) {
          r[t * kTileQueries + static_cast<std::size_t>(n)] = row[t];
        }
      }
      multiply<float>({r.data(), kTileQueries, 1, q_rows.data(), projections.data(), kMaxHeadDim, common::kHashBits,
                       stride_, count, true});
    });
    std::array<std::uint32_t, kMaxHeadDim> keys{};  // hash, then column
    for (std::int64_t c = 0; c < problem_.head_dim; ++c) {
      std::uint32_t code = 0;
      for (std::size_t t = 0; t < common::kHashBits; ++t) {
        const float projection = projections[t * kMaxHeadDim + static_cast<std::size_t>(c)];
        code |= static_cast<std::uint32_t>(projection > 0) << t;
      }
      keys[static_cast<std::size_t>(c)] = common::gray_rank(code) << 16 | static_cast<std::uint32_t>(c);
    }
    std::sort(keys.begin(), keys.begin() + problem_.head_dim);
    std::transform(keys.begin(), keys.begin() + problem_.head_dim, order,
                   [](std::uint32_t key) { return static_cast<std::int32_t>(key & 0xFFFFU); });
  }

  // Columns by descending energy, ties to the lower column, NaN and infinity first.
  void order_by_energy(std::int64_t head, std::int64_t block, float* tile, std::int32_t* order) {
    const Columns zero{};
    Columns energy{};
    for_each_tile(head, block, tile, [&](std::int64_t /*first*/, std::int64_t count) {
      add_squares(tile, count, stride_, zero.data(), energy.data());
    });
    const float* moments = moments_of(head / (problem_.heads_q / problem_.heads_kv), block);
    for (std::size_t c = 0; c < static_cast<std::size_t>(problem_.head_dim); ++c) {
      const float e = energy[c] * moments[c];
      energy[c] = std::isnan(e) ? std::numeric_limits<float>::infinity() : e;
    }
    std::iota(order, order + problem_.head_dim, 0);
    std::sort(order, order + problem_.head_dim, [&](std::int32_t a, std::int32_t b) {
      const float energy_a = energy[static_cast<std::size_t>(a)];
      const float energy_b = energy[static_cast<std::size_t>(b)];
      return energy_a != energy_b ? energy_a > energy_b : a < b;
    });
  }

  const Problem& problem_;
  const Grouping& grouping_;
  const GroupingTensors& tensors_;
  std::int64_t blocks_;
  std::int64_t stride_;
  std::int64_t moment_blocks_;
  float* moments_;  // [batch * heads_kv, moment_blocks, d]
  float* tiles_;    // a thread's rows of Q or K, [128, d]
};

template <class T>
void grouping_of(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                 const Execution& execution) {
  GroupingRun<T> run(problem, grouping, tensors, execution.workspace);
  const StrategyTraits& strategy = traits(grouping.strategy);
  if (!is_exact(grouping) && (strategy.reads_keys || common::has_key_means(grouping))) {
    common::parallel_for(execution, problem.batch * problem.heads_kv,
                         [&](std::int64_t kv_head, int thread) { run.find_moments(kv_head, thread); });
  }
  if (strategy.order == OrderSource::caller && !is_exact(grouping)) {
    return;
  }
  common::parallel_for(execution, problem.batch * problem.heads_q * common::num_blocks(problem, grouping),
                       [&](std::int64_t index, int thread) { run.order_block(index, thread); });
}

void grouping(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
              const Execution& execution) {
  common::with_element(problem.dtype, [&]<class T>(std::type_identity<T>) {
    if constexpr (!std::is_same_v<T, double>) {
      grouping_of<T>(problem, grouping, tensors, execution);
    }
  });
}

}  // namespace distr::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace distr::cpu {

HWY_EXPORT(grouping);

KernelPlan<GroupingTensors> plan_grouping(const Problem& problem, const Grouping& grouping,
                                          const Execution& execution) {
  const std::int64_t stride = padded(problem.head_dim);
  const std::int64_t moment_blocks = grouping.order_from == OrderFrom::own ? 1 : common::num_blocks(problem, grouping);
  const std::int64_t tasks =
      problem.batch * problem.heads_q * std::max<std::int64_t>(1, common::num_blocks(problem, grouping));
  const std::int64_t threads = useful_threads(execution.threads, tasks);
  KernelPlan<GroupingTensors> plan = plan_of<GroupingTensors>(problem, grouping, tasks, threads);
  if (traits(grouping.strategy).reads_keys) {
    plan.workspace.add("spread of K", bytes_of(problem.batch * problem.heads_kv * moment_blocks * stride));
  }
  plan.workspace.add("tiles of each thread", bytes_of(threads * kTileQueries * stride));
  plan.run = [&problem, &grouping](const GroupingTensors& tensors, const Execution& with) {
    HWY_DYNAMIC_DISPATCH(grouping)(problem, grouping, tensors, with);
  };
  return plan;
}

}  // namespace distr::cpu
#endif
