// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees, and what a mask adds to its scores (method, 4).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "common/element.h"
#include "distr/problem.h"

namespace distr::common {

// c: query i of a causal problem sees the keys j <= i + c.
[[nodiscard]] inline std::int64_t causal_offset(const Problem& problem) noexcept {
  return problem.causal == Causal::bottom_right ? problem.seq_k - problem.seq_q : 0;
}

// Query i sees the keys i + first .. i + last of those that there are, except those that the mask hides.
struct Band {
  std::int64_t first, last;
};

inline constexpr std::int64_t kUnlimited = std::int64_t{1} << 61;  // longer than any tensor, and may be added to

// Whether sequences have lengths that are data (sequence.h).
[[nodiscard]] inline bool has_lengths(const Problem& problem) noexcept {
  return problem.key_lengths || problem.packed.has_value();
}

// The key beside query 0.
[[nodiscard]] inline std::int64_t band_offset(const Problem& problem) noexcept {
  return problem.causal != Causal::none ? causal_offset(problem)
         : has_lengths(problem)         ? problem.seq_k - problem.seq_q
                                        : problem.window_offset.value_or(0);
}

[[nodiscard]] inline Band band_of(const Problem& problem) noexcept {
  const bool is_causal = problem.causal != Causal::none;
  const std::int64_t offset = band_offset(problem);
  const std::int64_t last = problem.window_right.has_value() ? offset + *problem.window_right : kUnlimited;
  return {problem.window_left.has_value() ? offset - *problem.window_left : -kUnlimited,
          is_causal ? std::min(last, offset) : last};
}

// The keys first .. end - 1, which may be none.
struct KeySpan {
  std::int64_t first, end;
};

// The keys that one of the rows from i on sees, except those that the mask hides.
[[nodiscard]] inline KeySpan visible_keys(const Problem& problem, std::int64_t i, std::int64_t rows = 1) noexcept {
  const Band band = band_of(problem);
  return {std::clamp<std::int64_t>(i + band.first, 0, problem.seq_k),
          std::clamp<std::int64_t>(i + rows + band.last, 0, problem.seq_k)};
}

// Whether a window hides a key that a query would see without.
[[nodiscard]] inline bool has_window(const Problem& problem) noexcept {
  const bool is_causal = problem.causal != Causal::none;
  return problem.seq_q > 0 && (visible_keys(problem, problem.seq_q - 1).first > 0 ||
                               (!is_causal && visible_keys(problem, 0).end < problem.seq_k));
}

[[nodiscard]] inline std::string reason_against_softcap(const Problem& problem) {
  return problem.softcap != 0 ? "caps no scores; softcap is for other kernels" : "";
}

// A mask that is broadcast to [batch, heads_q, seq_q, seq_k] by strides of 0 along the axes that repeat.
class MaskView {
 public:
  MaskView(const Mask& mask, const void* data) noexcept : kind_(mask.kind), dtype_(mask.dtype), data_(data) {
    for (int axis = 0; axis < mask.rank; ++axis) {
      const auto from = static_cast<std::size_t>(axis);
      if (mask.shape[from] != 1) {
        strides_[static_cast<std::size_t>(4 - mask.rank) + from] = mask.strides[from];
      }
    }
  }

  [[nodiscard]] bool none() const noexcept { return kind_ == MaskKind::none; }

  // What the mask adds to the score of (query i, key j); -inf hides the key.
  [[nodiscard]] double operator()(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const noexcept {
    if (none()) {
      return 0;
    }
    const std::int64_t index = b * strides_[0] + h * strides_[1] + i * strides_[2] + j * strides_[3];
    if (kind_ == MaskKind::additive) {
      return load(data_, dtype_, index);
    }
    return static_cast<const std::uint8_t*>(data_)[index] != 0 ? 0 : -std::numeric_limits<double>::infinity();
  }

  // Adds the mask to the scores of query i and the keys first .. first + count - 1.
  void add(float* scores, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t first,
           std::int64_t count) const noexcept {
    const std::int64_t start = b * strides_[0] + h * strides_[1] + i * strides_[2] + first * strides_[3];
    if (kind_ == MaskKind::boolean) {
      const auto* keep = static_cast<const std::uint8_t*>(data_) + start;
      for (std::int64_t j = 0; j < count; ++j) {
        scores[j] = keep[j * strides_[3]] != 0 ? scores[j] : -std::numeric_limits<float>::infinity();
      }
    } else if (kind_ == MaskKind::additive) {
      with_element(dtype_, [&]<class T>(std::type_identity<T>) {
        const T* bias = static_cast<const T*>(data_) + start;
        for (std::int64_t j = 0; j < count; ++j) {
          scores[j] = add_bias(scores[j], to_double(bias[j * strides_[3]]));
        }
      });
    }
  }

 private:
  // A key hidden by -inf stays hidden whatever its score is, NaN and infinity included; a finite bias hides nothing,
  // even the lowest there is, where the sum would overflow.
  [[nodiscard]] static float add_bias(float score, double bias) noexcept {
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    return bias == -std::numeric_limits<double>::infinity()
               ? -std::numeric_limits<float>::infinity()
               : std::max(score + static_cast<float>(std::max(bias, static_cast<double>(kLowest))),
                          score < kLowest ? score : kLowest);
  }

  MaskKind kind_;
  DType dtype_;
  const void* data_;
  std::array<std::int64_t, 4> strides_{};
};

}  // namespace distr::common
