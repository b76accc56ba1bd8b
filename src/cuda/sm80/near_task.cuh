// SPDX-License-Identifier: Apache-2.0
// What a thread block of near_forward does with a half that has arrived: scores, P and O += P V (near.cuh).
#pragma once

#include <type_traits>

#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/near_vote.cuh"

namespace distr::cuda::sm80 {

// The state of one thread block.
template <class C>
class NearTask {
 public:
  using Storage = NearStorage<C>;
  using Scores = ScoreFragment<C>[C::kParts];
  using Output = float[C::kRowTiles][C::kDim / 8][4];
  static constexpr bool kKeepsSegment = C::kRowTiles * C::kDim <= 128;  // in registers, which else are too few
  using Segment = std::conditional_t<kKeepsSegment, KeySegment, const KeySegment&>;

  __device__ NearTask(const NearParameters& parameters, Storage& storage)
      : parameters_(parameters), storage_(storage) {}

  // This warp's first row of the thread block's.
  [[nodiscard]] __device__ static int first_row() { return thread() / 32 * 16 * C::kRowTiles; }

  // Q with its columns in order. All threads call it.
  __device__ void load_queries() {
    using T = typename C::Element;
    const ForwardParameters& p = parameters_.forward;
    const DeviceProblem& problem = p.problem;
    const Tile<C::kDim> ordered{ptx::shared_address(&storage_)};
    const Tile<C::kDim> raw{ptx::shared_address(&storage_.query_copy)};
    copy_tile<C::kRows, C::kDim, C::kThreads>(raw, query_rows<C>(p, state().work), problem.q.row,
                                              rows_left(state().work.row, p.row_end), problem.head_dim);
    ptx::cp_async_commit();
    const std::int32_t* order = p.order + order_index(problem, state().work.batch, state().work.head, state().work.row);
    for (int position = thread(); position < C::kDim; position += C::kThreads) {
      const int rank = state().positions.rank(position, problem.head_dim);
      const int column = rank < 0 ? static_cast<int>(problem.head_dim) : state().positions.exact ? rank : order[rank];
      storage_.columns[position % 16][position / 16] = static_cast<std::uint8_t>(column);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    const auto at = [&](const Tile<C::kDim>& tile, int row, int column) -> T& {
      auto* const bytes = reinterpret_cast<std::uint8_t*>(&storage_) + (tile.at(row, column / kChunk) - ordered.base);
      return reinterpret_cast<T*>(bytes)[column % kChunk];
    };
    static_assert(C::kThreads % C::kDim == 0);  // so a thread has one position of Q, in each kApart-th row
    constexpr int kApart = C::kThreads / C::kDim;
    constexpr int kBatch = 8;  // rows whose latencies overlap
    const int position = thread() % C::kDim;
    const int column = column_at(position);
    for (int row = thread() / C::kDim; row < C::kRows; row += kBatch * kApart) {
      T q[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        q[i] = column == problem.head_dim ? T(0.0F) : at(raw, row + i * kApart, column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        at(ordered, row + i * kApart, position) = q[i];
      }
    }
    __syncthreads();
  }

  // Stores what the means of dropped columns add to far scores of this warp's rows.
  __device__ void store_dropped() {
    const DeviceProblem& problem = parameters_.forward.problem;
    const bool has_means = problem.near.has_means && !state().positions.exact;
    const auto block = static_cast<unsigned>(state().work.row) / problem.rows_of_block;
    const float* means = parameters_.key_means + key_means_at(problem, state().work.batch, state().work.head_kv, block);
    const int lane = thread() % 32;
    const Tile<C::kDim> tile{0};
    for (int row = first_row() + lane / 4; row < first_row() + 16 * C::kRowTiles; row += 8) {
      float sum = 0;
      for (int position = state().positions.kept_steps * 16 + lane % 4;
           has_means && position < state().positions.all_steps * 16; position += 4) {
        const int column = column_at(position);
        const auto* chunk =
            reinterpret_cast<const typename C::Element*>(storage_.queries.bytes + tile.at(row, position / kChunk));
        sum = column == problem.head_dim ? sum : fmaf(static_cast<float>(chunk[position % kChunk]), means[column], sum);
      }
      sum = quad_sum(sum);
      if (lane % 4 == 0) {
        storage_.dropped[row] = sum * problem.scale_log2;
      }
    }
  }

  __device__ void begin_pass() { repeats_ = state().repeats; }

  // Whether the pass repeats rows.
  [[nodiscard]] __device__ bool repeats() const { return kKeepsSegment ? repeats_ : state().repeats; }

  // S += Q K^T over the positions 16 first .. 16 (first + kCount) - 1.
  template <int kCount>
  __device__ void add_scores(Scores& s, int stage, int first) const {
    const int lane = thread() % 32;
    const std::uint32_t q = Tile<C::kDim>{ptx::shared_address(&storage_)}.at(first_row() + lane % 16, lane / 16);
    const std::uint32_t k = key_tile<C>(storage_, stage).at(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      add_step(s, Tile<C::kDim>::move(q, 0, (first + step) * 2), Tile<C::kKeys>::move(k, (first + step) * 16, 0));
    }
  }

  // The same over the positions 16 first .. 16 end - 1.
  __device__ void add_scores(Scores& s, int stage, int first, int end) const {
    if (end - first == kSteps) {
      add_scores<kSteps>(s, stage, first);
    } else if (end - first == kSteps / 2) {
      add_scores<kSteps / 2>(s, stage, first);
    } else if (end - first == kSteps - kSteps / 4) {  // to finish, at G = 4
      add_scores<kSteps - kSteps / 4>(s, stage, first);
    } else {
#pragma unroll 2
      for (; first < end; ++first) {
        add_scores<1>(s, stage, first);
      }
    }
  }

  // S += Q K^T of 16 positions, of which this lane's parts of Q and K^T begin at q and k.
  __device__ void add_step(Scores& s, std::uint32_t q, std::uint32_t k) const {
    std::uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      ptx::ldmatrix_x4(a[m], Tile<C::kDim>::move(q, m * 16, 0));
    }
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < C::kPartKeys / 16; ++n) {
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, Tile<C::kKeys>::move(k, 0, part * C::kPartKeys / 8 + n * 2));
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_16x8x16(s[part].of[m][2 * n], a[m], b[0], b[1], typename C::Element{});
          ptx::mma_16x8x16(s[part].of[m][2 * n + 1], a[m], b[2], b[3], typename C::Element{});
        }
      }
    }
  }

  // Whether scores become logarithms to the base 2 before they are compared: for a mask, and where they may be so large
  // that their product with the scale is rounded by more than P allows (softmax.cuh).
  [[nodiscard]] __device__ bool scales_scores() const { return has_mask() || repeats(); }

  // S from the first 16 steps positions, hidden keys -inf.
  __device__ void scores(Scores& s, int half, int stage, int steps, bool is_whole) const {
#pragma unroll
    for (ScoreFragment<C>& part : s) {
      part = {};
    }
    add_scores(s, stage, 0, steps);
    if (scales_scores()) {
#pragma unroll
      for (ScoreFragment<C>& part : s) {
        scale_scores(part, parameters_.forward.problem.scale_log2);
      }
    }
    hide_scores(s, half, is_whole);
  }

  // Makes scores of hidden keys -inf, and applies a mask.
  __device__ void hide_scores(Scores& s, int half, bool is_whole) const {
    if (is_whole) {
      return;
    }
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      apply_mask<C>(s[part], parameters_.forward, state().work, first_row(), half * C::kKeys + part * C::kPartKeys,
                    thread() % 32);
    }
  }

  // Scores of a far half from all columns, behind those that are there already.
  __device__ void finish(Scores& s, int half, int stage, bool is_whole) const {
    if (scales_scores()) {
      scores(s, half, stage, state().positions.all_steps, is_whole);
    } else {
      add_scores(s, stage, state().positions.kept_steps, state().positions.all_steps);
      hide_scores(s, half, is_whole);
    }
  }

  // Takes a half into O. In halves of which nothing is hidden and with a fixed row max, at G = 2 and 4, the compiler
  // can mix exponentials with products.
  __device__ __forceinline__ void visit(const Segment& segment, int half, int stage, Output& o, Softmax<C>& softmax) {
    if (!segment.is_online && segment.is_whole && !repeats()) {
      if (segment.steps == kSteps / 2) {
        add_plain<kSteps / 2>(o, softmax, stage);
        return;
      }
      if (kKeepsSegment && segment.steps == kSteps / 4) {  // else registers are too few
        add_plain<kSteps / 4>(o, softmax, stage);
        return;
      }
    }
    Scores s;
    scores(s, half, stage, segment.steps, segment.is_whole);
    float maxima[C::kRowTiles][2];
    maxima_of<C>(maxima, s, ptx::max_nan);
    if (segment.is_far && parameters_.forward.problem.near.skips) {
      const bool keeps = vote<C>(maxima, [&](int row) { return storage_.limits[row]; });
      if (parameters_.halves != nullptr) {
        count_half<C>(parameters_, storage_, has_mask(), half, keeps, maxima);
      }
      if (!keeps) {
        return;
      }
      if (segment.steps < segment.copied_steps) {
        finish(s, half, stage, segment.is_whole);
        maxima_of<C>(maxima, s, ptx::max_nan);
      }
    }
    softmax.update_row_max(maxima, o);
    add_probabilities(o, s, softmax, stage);
  }

  // A far half of which nothing is hidden or skipped, with a fixed row max.
  template <int kCount>
  __device__ __forceinline__ void add_plain(Output& o, Softmax<C>& softmax, int stage) const {
    Scores s = {};
#pragma unroll 2
    for (int step = 0; step < kCount; ++step) {
      add_scores<1>(s, stage, step);
    }
    add_probabilities(o, s, softmax, stage);
  }

  // P of the scores, and O += P V.
  __device__ __forceinline__ void add_probabilities(Output& o, const Scores& s, Softmax<C>& softmax, int stage) const {
    std::uint32_t probabilities[C::kParts][C::kPartKeys / 16][C::kRowTiles][4];
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      softmax.exponentials(s[part], probabilities[part]);
    }
    const int lane = thread() % 32;
    const std::uint32_t value = value_tile<C>(storage_, stage).at(lane % 16, lane / 16);
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      accumulate<C, C::kPartKeys / 16>(o, probabilities[part], value, part * C::kPartKeys, 0);
    }
  }

  [[nodiscard]] __device__ bool has_mask() const {
    return C::kMasks && parameters_.forward.problem.mask.kind != MaskKind::none;
  }

 private:
  static constexpr int kSteps = C::kDim / 16;

  [[nodiscard]] __device__ static int thread() { return static_cast<int>(ptx::opaque(threadIdx.x)); }

  [[nodiscard]] __device__ int column_at(int position) const { return storage_.columns[position % 16][position / 16]; }

  [[nodiscard]] __device__ const NearState& state() const { return storage_.state; }

  const NearParameters& parameters_;
  Storage& storage_;
  bool repeats_ = false;
};

}  // namespace distr::cuda::sm80
