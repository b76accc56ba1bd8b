// SPDX-License-Identifier: Apache-2.0
// How attention is approximated: which columns of Q and K share a group (paper, Sections 3.2 and 3.3).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "distr/problem.h"

namespace distr {
inline namespace v0 {

/// A value and what the command and the Python package call it.
template <class Value>
struct Named {
  Value value;
  const char* name;
};

enum class Strategy : std::uint8_t {
  automatic,  ///< at group_size > 1 `energy` where that pays, which costs quality; else exact; see explain()
  exact,      ///< no grouping
  lsh,        ///< the paper's: columns of Q with neighbouring hashes share a group, their K columns are summed
  energy,     ///< keep the ceil(d/G) columns that weigh most in the scores, drop the rest
  given,      ///< keep the first ceil(d/G) columns of an order that the caller brings, drop the rest
};

/// How a strategy's order of the columns comes about.
enum class OrderSource : std::uint8_t {
  none,      ///< attention is exact and reads no order
  computed,  ///< make_grouping() computes it
  caller,    ///< the caller brings it; make_grouping() refuses the strategy
};

inline constexpr std::array kOrderSources{Named<OrderSource>{OrderSource::none, "none"},
                                          Named<OrderSource>{OrderSource::computed, "computed"},
                                          Named<OrderSource>{OrderSource::caller, "caller"}};

/// Which columns of the order make a group.
enum class Members : std::uint8_t {
  one,         ///< entry g alone; the columns behind the r-th are dropped
  group_size,  ///< the G entries g G .. g G + G - 1
};

inline constexpr std::array kMembers{Named<Members>{Members::one, "one"},
                                     Named<Members>{Members::group_size, "group_size"}};

/// A row of the table of strategies: all that the library, the command and the package know of one by name.
struct StrategyTraits {
  Strategy strategy;
  const char* name;  ///< as the command and the Python package have it
  Members members;
  OrderSource order;
  bool reads_keys;          ///< make_grouping() reads K
  bool has_estimator;       ///< Grouping::estimator matters
  std::int64_t group_size;  ///< G of the command and the package where a call names none, if d allows it
};

/// In the order of the enumeration.
inline constexpr std::array kStrategies{
    StrategyTraits{Strategy::automatic, "auto", Members::one, OrderSource::computed, true, false, 1},
    StrategyTraits{Strategy::exact, "exact", Members::one, OrderSource::none, false, false, 1},
    StrategyTraits{Strategy::lsh, "lsh", Members::group_size, OrderSource::computed, false, true, 2},
    StrategyTraits{Strategy::energy, "energy", Members::one, OrderSource::computed, true, false, 2},
    StrategyTraits{Strategy::given, "given", Members::one, OrderSource::caller, false, false, 2},
};

/// The name of a value in its table, whose rows are in the order of the enumeration.
template <class Value, std::size_t size>
[[nodiscard]] constexpr const char* name_in(const std::array<Named<Value>, size>& table, Value value) noexcept {
  return table[static_cast<std::size_t>(value)].name;
}

[[nodiscard]] constexpr const StrategyTraits& traits(Strategy strategy) noexcept {
  return kStrategies[static_cast<std::size_t>(strategy)];
}

/// What stands for the Q columns of an LSH group (the paper's q-hat).
enum class Estimator : std::uint8_t {
  sample,  ///< the group's first column, as the paper writes (Section 3.2)
  mean,    ///< the group's mean: a smaller error at the same cost
};

/// Which rows a block's order is computed from.
enum class OrderFrom : std::uint8_t {
  automatic,  ///< `previous` in causal calls whose strategy computes an order, else `own`; see Plan::grouping()
  own,        ///< the block's own rows, and for energy all keys (the paper): row n sees a little of its future
  previous,   ///< the block before, and for energy the keys before the block: strictly causal; block 0 is exact
              ///< (in `given` it has its order as the others do)
};

inline constexpr std::array kEstimators{Named<Estimator>{Estimator::sample, "sample"},
                                        Named<Estimator>{Estimator::mean, "mean"}};
inline constexpr std::array kOrdersFrom{Named<OrderFrom>{OrderFrom::automatic, "auto"},
                                        Named<OrderFrom>{OrderFrom::own, "own"},
                                        Named<OrderFrom>{OrderFrom::previous, "previous"}};

/// Where a call lies in a longer one of which it is a part: the positions there of its query 0 and its key 0.
struct Part {
  std::int64_t first_row = 0;  ///< a multiple of Grouping::block
  std::int64_t first_key = 0;  ///< with near keys a multiple of 128, as these come in tiles

  bool operator==(const Part&) const = default;
};

struct Grouping {
  Strategy strategy = Strategy::automatic;
  std::int64_t group_size = 1;  ///< G, 1 (exact attention, whatever the strategy) to head_dim
  std::int64_t block = 128;     ///< l, the rows of Q that share one order; >= seq_q: one order for all
  Estimator estimator = Estimator::mean;
  OrderFrom order_from = OrderFrom::automatic;
  std::uint64_t seed = 0;  ///< of the projections of `lsh`

  /// Near keys have exact scores, in tiles of 128 keys: those that hold one of the first `sinks` keys, or one at most
  /// `window` keys from a row of the block (of 128 rows where one order serves all). Where either is set, a column that
  /// `energy` or `given` drops keeps its mean over the keys (key_means), so that far scores compare with near ones.
  std::optional<std::int64_t> window = std::nullopt;  ///< in keys, 0 to kMaxDistance; empty: none
  std::int64_t sinks = 0;                             ///< in keys, 0 to kMaxDistance
  /// The key that stands beside query 0, for `window`, in calls that are not causal; empty: Problem::window_offset, or
  /// key 0, and in causal calls the one that their corner says. For who masks a chunk of a prompt by a tensor.
  /// Magnitude at most kMaxDistance.
  std::optional<std::int64_t> key_offset = std::nullopt;
  /// 0, or a probability below 1: the forward leaves out 64 far keys for 64 rows where each of them would have less, by
  /// its score against the row's near keys alone. Needs near keys; the backward refuses it.
  double skip = 0;
  /// With `skip`, in `energy` and `given`: far scores only decide what is skipped, and what is kept is exact.
  bool finish = false;

  /// For forward() and backward() of some rows and some keys of a longer call, merge()d over the parts of the keys.
  /// Blocks, `window` and `sinks` then are the longer call's, and so are the order and the means that the caller
  /// brings: under `previous` block 0 is exact only where first_row is 0. A part has whole blocks, but for the longer
  /// call's last one; with near keys the longer call has several blocks, as those of a single one go by 128 rows. A
  /// part's strategy is named, it skips nothing and has no key_offset; where it is causal, first_row and first_key are
  /// as far apart as its corner says. backward() of the parts of some rows adds up to their dQ; one part's alone may
  /// hold terms that cancel in the sum.
  std::optional<Part> part = std::nullopt;

  bool operator==(const Grouping&) const = default;
};

/// Throws Error(invalid_argument) naming the value that is out of range and what is allowed. A causal call that is to
/// be approximated and is one block of more than 128 rows is refused unless its order is from `own`: that block would
/// be exact, and with it the call. `auto` takes exact attention there, and says so.
void validate(const Problem& problem, const Grouping& grouping);

/// r = ceil(d/G), the number of columns that q-hat and k-hat have.
[[nodiscard]] std::int64_t num_groups(const Problem& problem, const Grouping& grouping) noexcept;

/// Shape of the order tensor: [batch, heads_q, ceil(seq_q / block), head_dim], contiguous int32. Each row is a
/// permutation of the columns, whose group g has the entries that the strategy's StrategyTraits::members says (the last
/// group may be shorter).
[[nodiscard]] std::array<std::int64_t, 4> order_shape(const Problem& problem, const Grouping& grouping) noexcept;

/// Whether far scores keep the means of dropped columns, which make_grouping() computes: `energy` and `given` with near
/// keys.
[[nodiscard]] bool needs_key_means(const Grouping& grouping) noexcept;

/// Shape of the means over the keys: [batch, heads_kv, blocks or 1, head_dim], contiguous fp32. With order_from
/// `previous` those of a block are over the keys before it (none: 0), else there is one over all keys, masked or not.
[[nodiscard]] std::array<std::int64_t, 4> key_means_shape(const Problem& problem, const Grouping& grouping) noexcept;

/// Shape of the counts of kept halves of tiles: [batch, heads_q, ceil(seq_q / 64), 2], contiguous int32. Of the far
/// halves (64 keys) in which one of the 64 rows sees a far key: how many were kept, and how many there are.
[[nodiscard]] std::array<std::int64_t, 4> halves_shape(const Problem& problem) noexcept;

}  // namespace v0
}  // namespace distr
