// SPDX-License-Identifier: Apache-2.0
#include "support/lengths.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernel.h"

namespace distr::test {
namespace {

// Entry 2 b + 1 is the dense call's entry b; those between are neighbours.
std::int64_t entry_of(std::int64_t b) { return 2 * b + 1; }

// The longest is longer than most dense calls, by more than the keys are: then corners are to move either way.
constexpr std::int64_t kNeighbourRows[] = {5, 170, 0};
constexpr std::int64_t kNeighbourKeys[] = {0, 131, 3};

std::int64_t rows_of_entry(const Problem& dense, std::int64_t entry) {
  return entry % 2 == 1 ? dense.seq_q : kNeighbourRows[entry / 2 % 3];
}
std::int64_t keys_of_entry(const Problem& dense, std::int64_t entry) {
  return entry % 2 == 1 ? dense.seq_k : kNeighbourKeys[entry / 2 % 3];
}

std::vector<std::int32_t> starts(const Problem& dense, std::int64_t (*length)(const Problem&, std::int64_t)) {
  std::vector<std::int32_t> result{0};
  for (std::int64_t entry = 0; entry < entry_of(dense.batch); ++entry) {
    result.push_back(result.back() + static_cast<std::int32_t>(length(dense, entry)));
  }
  return result;
}

}  // namespace

const char* name_of(LengthsAs kind) { return kind == LengthsAs::keys ? "key lengths" : "packed sequences"; }

bool can_have_lengths(const Case& test_case, LengthsAs kind) {
  const Problem& p = test_case.problem;
  const Grouping& g = test_case.grouping;
  const bool is_plainly_exact = is_exact(g) && g.skip == 0 && !g.window.has_value() && g.sinks == 0;
  const bool has_window = p.window_left.has_value() || p.window_right.has_value();
  const bool stands_alike = !has_window || p.causal != Causal::none || p.window_offset.value_or(0) == p.seq_k - p.seq_q;
  return is_plainly_exact && stands_alike && p.mask.kind == MaskKind::none && p.batch > 0 && !test_case.packed &&
         (kind == LengthsAs::packed || p.seq_q > 0);
}

Problem with_lengths(const Problem& dense, LengthsAs kind) {
  Problem result = dense;
  result.window_offset.reset();
  result.batch = entry_of(dense.batch);
  if (kind == LengthsAs::keys) {
    result.key_lengths = true;
    result.seq_k = std::max<std::int64_t>(dense.seq_k, 131) + 9;
  } else {
    result.packed = {starts(dense, rows_of_entry).back(), starts(dense, keys_of_entry).back()};
    for (std::int64_t entry = 0; entry < result.batch; ++entry) {
      result.seq_q = std::max(result.seq_q, rows_of_entry(dense, entry));
      result.seq_k = std::max(result.seq_k, keys_of_entry(dense, entry));
    }
    result.seq_k += 9;
  }
  return contiguous(result);
}

template <class Tensors>
void WithLengths<Tensors>::visit(const Copy& copy,
                                 const std::function<void(std::int64_t dense, std::int64_t own)>& row) const {
  const std::vector<std::int32_t>& starts = copy.of_keys ? starts_k_ : starts_q_;
  for (std::int64_t b = 0; b < dense_.batch; ++b) {
    const std::int64_t entry = entry_of(b);
    const std::int64_t first =
        problem_.packed.has_value() ? starts[static_cast<std::size_t>(entry)] * copy.to.row : entry * copy.to.batch;
    for (std::int64_t h = 0; h < copy.heads; ++h) {
      for (std::int64_t i = 0; i < copy.rows; ++i) {
        row(b * copy.from.batch + h * copy.from.head + i * copy.from.row, first + h * copy.to.head + i * copy.to.row);
      }
    }
  }
}

template <class Tensors>
void* WithLengths<Tensors>::place(const void* dense, const Copy& copy, bool is_input) {
  if (dense == nullptr) {
    return nullptr;
  }
  const bool packed = problem_.packed.has_value();
  const std::int64_t rows = copy.of_keys ? (packed ? problem_.packed->total_k : problem_.seq_k)
                                         : (packed ? problem_.packed->total_q : problem_.seq_q);
  const std::int64_t count = extent(copy.to, packed ? 1 : problem_.batch, copy.heads, rows, copy.columns);
  std::vector<std::byte> own(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * copy.element,
                             std::byte{0xFF});
  if (!is_input) {
    outputs_.push_back(copy);
    outputs_.back().dense = static_cast<std::byte*>(const_cast<void*>(dense));
    outputs_.back().own = std::move(own);
    return outputs_.back().own.data();
  }
  visit(copy, [&](std::int64_t from, std::int64_t to) {
    std::memcpy(own.data() + static_cast<std::size_t>(to) * copy.element,
                static_cast<const std::byte*>(dense) + from * static_cast<std::int64_t>(copy.element),
                static_cast<std::size_t>(copy.columns) * copy.element);
  });
  inputs_.push_back(std::move(own));
  return inputs_.back().data();
}

template <class Tensors>
WithLengths<Tensors>::WithLengths(LengthsAs kind, const Problem& dense, const Tensors& tensors)
    : dense_(dense),
      problem_(with_lengths(dense, kind)),
      starts_q_(starts(dense, rows_of_entry)),
      starts_k_(starts(dense, keys_of_entry)) {
  const Problem& p = problem_;
  for (std::int64_t entry = 0; entry < p.batch; ++entry) {
    keys_.push_back(static_cast<std::int32_t>(keys_of_entry(dense, entry)));
  }
  const std::size_t element = size_of(p.dtype);
  const Copy q{nullptr, dense.q, p.q, p.heads_q, dense.seq_q, p.head_dim, false, element, {}};
  const Copy k{nullptr, dense.k, p.k, p.heads_kv, dense.seq_k, p.head_dim, true, element, {}};
  const Copy v{nullptr, dense.v, p.v, p.heads_kv, dense.seq_k, p.head_dim_v, true, element, {}};
  const Copy o{nullptr, dense.o, p.o, p.heads_q, dense.seq_q, p.head_dim_v, false, element, {}};
  const Strides dense_rows{p.heads_q * dense.seq_q, dense.seq_q, 1};
  const Strides own_rows =
      p.packed.has_value() ? Strides{0, p.packed->total_q, 1} : Strides{p.heads_q * p.seq_q, p.seq_q, 1};
  const Copy lse{nullptr, dense_rows, own_rows, p.heads_q, dense.seq_q, 1, false, size_of(p.lse_dtype()), {}};
  constexpr bool kIsForward = std::is_same_v<Tensors, ForwardTensors>;
  outputs_.reserve(3);  // pointers into them must last
  inputs_.reserve(8);
  tensors_.q = place(tensors.q, q, true);
  tensors_.k = place(tensors.k, k, true);
  tensors_.v = place(tensors.v, v, true);
  tensors_.o = place(tensors.o, o, !kIsForward);
  tensors_.lse = place(tensors.lse, lse, !kIsForward);
  if constexpr (!kIsForward) {
    tensors_.d_o = place(tensors.d_o, o, true);
    tensors_.d_lse = place(tensors.d_lse, lse, true);
    tensors_.d_q = place(tensors.d_q, q, false);
    tensors_.d_k = place(tensors.d_k, k, false);
    tensors_.d_v = place(tensors.d_v, v, false);
  }
  if (kind == LengthsAs::keys) {
    tensors_.lengths.keys = keys_.data();
  } else {
    tensors_.lengths.starts_q = starts_q_.data();
    tensors_.lengths.starts_k = starts_k_.data();
  }
}

template <class Tensors>
void WithLengths<Tensors>::take_results() const {
  for (const Copy& copy : outputs_) {
    visit(copy, [&](std::int64_t to, std::int64_t from) {
      std::memcpy(copy.dense + to * static_cast<std::int64_t>(copy.element),
                  copy.own.data() + static_cast<std::size_t>(from) * copy.element,
                  static_cast<std::size_t>(copy.columns) * copy.element);
    });
  }
}

template class WithLengths<ForwardTensors>;
template class WithLengths<BackwardTensors>;

}  // namespace distr::test
