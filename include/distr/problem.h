// SPDX-License-Identifier: Apache-2.0
// What attention is asked for: sizes, strides, element type, mask. How it is approximated is grouping.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace distr {
inline namespace v0 {

enum class DType : std::uint8_t { f16, bf16, f32, f64 };

/// Bytes of one element.
[[nodiscard]] std::size_t size_of(DType dtype) noexcept;

/// Converts `count` contiguous elements, rounding to nearest even; NaN and infinity stay what they are.
void convert(const void* source, DType source_type, void* target, DType target_type, std::int64_t count) noexcept;

/// Which corner of the score matrix the causal diagonal is anchored to when seq_q != seq_k.
enum class Causal : std::uint8_t {
  none,          ///< every query sees every key
  top_left,      ///< query i sees keys j <= i (PyTorch's SDPA)
  bottom_right,  ///< query i sees keys j <= i + seq_k - seq_q (FlashAttention)
};

enum class MaskKind : std::uint8_t {
  none,
  boolean,   ///< one byte an element: nonzero = keep
  additive,  ///< added to the scaled scores; -inf hides a key
};

/// Element strides of a tensor [batch, heads, rows, dim]; the stride of the last axis is always 1.
struct Strides {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t row = 0;

  bool operator==(const Strides&) const = default;
};

/// A mask of rank 0 to 4 that broadcasts to [batch, heads_q, seq_q, seq_k] by NumPy's rules: axes are aligned at the
/// right, and an axis of length 1 repeats. Strides are in elements, of any sign, 0 included.
struct Mask {
  MaskKind kind = MaskKind::none;
  DType dtype = DType::f32;  ///< of an additive mask; boolean masks are bytes
  int rank = 0;
  std::array<std::int64_t, 4> shape{};    ///< the first `rank` entries count
  std::array<std::int64_t, 4> strides{};  ///< likewise

  bool operator==(const Mask&) const = default;
};

/// The largest head_dim and head_dim_v.
inline constexpr std::int64_t kMaxHeadDim = 512;

/// The largest distance between keys, of Problem's window and of Grouping's `window`, `sinks` and `key_offset`.
inline constexpr std::int64_t kMaxDistance = std::int64_t{1} << 40;

/// Sequences of several lengths, one behind the other: batch entry b is sequence b, whose rows and keys are those from
/// Lengths::starts_q[b] and starts_k[b] on. Q [total_q, heads_q, head_dim], K [total_k, heads_kv, head_dim] and so on,
/// by their strides of head and row; LSE [heads_q, total_q].
struct PackedRows {
  std::int64_t total_q = 0, total_k = 0;  ///< rows of Q and of K; up to 2^31 - 1

  bool operator==(const PackedRows&) const = default;
};

/// softmax(scale * Q K^T + mask) V, with `softcap` softmax(softcap * tanh(scale * Q K^T / softcap) + mask) V, over
///   Q [batch, heads_q, seq_q, head_dim], K [batch, heads_kv, seq_k, head_dim], V [batch, heads_kv, seq_k, head_dim_v],
///   O [batch, heads_q, seq_q, head_dim_v]; query head h reads KV head h / (heads_q / heads_kv).
/// Scores are fp32, and fp64 where the dtype is: where all of a row are finite before they are scaled, so is its
/// softmax, however large they are. Sums of columns are of the dtype in the tensor-core kernels. batch, seq_q and
/// seq_k may be 0. A query that sees no key gets O = 0 and LSE = -inf. A hidden key contributes nothing, whatever its
/// values are (NaN and infinity included). Where V is finite, so is O, also where sums of values exceed fp32 (1e38 in
/// every row); gradients need not be, where a product or sum on the way to them exceeds it. The tensor-core kernels of
/// CUDA, "sm80/..." and "sm90/...", need finite values: a value of V that is not finite makes NaN of rows that hide it
/// or give it weight 0, one of K may do so in a column that `energy` drops or where `lsh` sums columns (NaN where
/// infinity would do), and in the backward one of Q, K or V makes NaN of gradients that should not see it.
struct Problem {
  DType dtype = DType::f32;  ///< of Q, K, V and O
  std::int64_t batch = 1;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;    ///< divides heads_q
  std::int64_t seq_q = 0;       ///< Nq
  std::int64_t seq_k = 0;       ///< Nk
  std::int64_t head_dim = 0;    ///< d, 1 to kMaxHeadDim
  std::int64_t head_dim_v = 0;  ///< dv, 1 to kMaxHeadDim
  Strides q, k, v, o;           ///< see contiguous()
  std::optional<double> scale;  ///< of the scores, finite in fp32; 1/sqrt(head_dim) when empty
  Causal causal = Causal::none;
  Mask mask;  ///< excludes `causal`
  /// A sliding window: query i sees the keys i + c - window_left to i + c + window_right, less those that `causal` or
  /// the mask hides; 0 to kMaxDistance, empty: unlimited. c is the causal corner's, 0 or seq_k - seq_q, and in calls
  /// that are not causal window_offset, of a magnitude of at most kMaxDistance (empty: 0). Not Grouping::window, whose
  /// keys are those near a query in an approximation, as far as this window shows them. `automatic` is exact with a
  /// window that hides a key.
  std::optional<std::int64_t> window_left = std::nullopt;
  std::optional<std::int64_t> window_right = std::nullopt;
  std::optional<std::int64_t> window_offset = std::nullopt;  ///< the key beside query 0
  /// What no score exceeds: softcap * tanh(score / softcap), before the mask (Gemma 2). Positive and normal in fp32; 0:
  /// scores are not capped. `skip` refuses it.
  double softcap = 0;
  /// Lengths that are data (Lengths), which are not read to plan a call. Causality and a window count from an entry's
  /// own: at the bottom right, which is also where a window of a call stands that is not causal. They exclude a mask
  /// and window_offset, are for exact attention, and `automatic` is exact with them. key_lengths: of entry b only the
  /// keys 0 to Lengths::keys[b] - 1 are there, seq_k being the most that there may be. packed: seq_q and seq_k are the
  /// longest lengths, and the strides of the batch are not read.
  bool key_lengths = false;  ///< excludes `packed`; in the forward alone
  std::optional<PackedRows> packed = std::nullopt;
  /// Of dQ, dK and dV, which must not overlap; empty: those of Q, K and V.
  std::optional<Strides> d_q = std::nullopt, d_k = std::nullopt, d_v = std::nullopt;

  /// `scale`, or its default.
  [[nodiscard]] double softmax_scale() const noexcept;
  /// O(Nq) vectors such as LSE [batch, heads_q, seq_q], [heads_q, total_q] where packed, are always contiguous; their
  /// type is fp32, and fp64 when dtype is f64.
  [[nodiscard]] DType lse_dtype() const noexcept { return dtype == DType::f64 ? DType::f64 : DType::f32; }

  bool operator==(const Problem&) const = default;
};

/// `problem` with the strides of contiguous Q, K, V and O of its sizes; where packed, those of [rows, heads, dim].
[[nodiscard]] Problem contiguous(Problem problem) noexcept;

/// Throws Error(invalid_argument) naming the first value that is out of range and what is allowed.
void validate(const Problem& problem);

}  // namespace v0
}  // namespace distr
