// SPDX-License-Identifier: Apache-2.0
#include "distr/problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "distr/error.h"
#include "distr/grouping.h"

namespace distr {
namespace {

Problem valid() {
  Problem problem;
  problem.batch = 2;
  problem.heads_q = 4;
  problem.heads_kv = 2;
  problem.seq_q = 3;
  problem.seq_k = 5;
  problem.head_dim = 8;
  problem.head_dim_v = 6;
  return contiguous(problem);
}

// The message of the error that validate() throws; empty: none.
std::string fault(const std::function<void(Problem&, Grouping&)>& change) {
  Problem problem = valid();
  Grouping grouping;
  change(problem, grouping);
  try {
    validate(problem, grouping);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    return error.what();
  }
  return {};
}

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

TEST(Validate, AcceptsWhatIsAllowed) {
  EXPECT_EQ(fault([](Problem&, Grouping&) {}), "");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.batch = p.seq_q = p.seq_k = 0; }), "");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.head_dim = p.head_dim_v = 512; }), "");
  EXPECT_EQ(fault([](Problem&, Grouping& g) { g.group_size = 8; }), "");
  EXPECT_EQ(fault([](Problem&, Grouping& g) { g.block = kLargest; }), "");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.scale = -3; }), "");
}

TEST(Validate, NamesTheValueAndWhatIsAllowed) {
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.batch = -1; }), "batch is -1; allowed: 0 and above");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.heads_q = 0; }), "heads_q is 0; allowed: 1 and above");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.heads_kv = 0; }), "heads_kv is 0; allowed: 1 and above");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.heads_kv = 3; }),
            "heads_q is 4; allowed: a multiple of heads_kv, which is 3");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.seq_q = -1; }), "seq_q is -1; allowed: 0 and above");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.seq_k = -7; }), "seq_k is -7; allowed: 0 and above");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.head_dim = 0; }), "head_dim is 0; allowed: 1 to 512");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.head_dim_v = 513; }), "head_dim_v is 513; allowed: 1 to 512");
  EXPECT_EQ(fault([](Problem&, Grouping& g) { g.group_size = 0; }), "group_size is 0; allowed: 1 to 8");
  EXPECT_EQ(fault([](Problem&, Grouping& g) { g.group_size = 9; }), "group_size is 9; allowed: 1 to 8");
  EXPECT_EQ(fault([](Problem&, Grouping& g) { g.block = 0; }), "block is 0; allowed: 1 and above");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.scale = INFINITY; }),
            "scale is inf; allowed: a finite number that fp32 holds");
  EXPECT_NE(fault([](Problem& p, Grouping&) { p.scale = 1e39; }), "");
  EXPECT_NE(fault([](Problem& p, Grouping&) { p.scale = 3.4028235e38; }), "");  // which rounds to fp32's largest
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.scale = -std::numeric_limits<float>::max(); }), "");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.seq_k = kLargest / 4; }),
            "the size of K overflows; allowed: fewer than 2^63 bytes");
}

TEST(Validate, NamesWhatIsWrongWithASlidingWindow) {
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.window_left = -1; }), "window_left is -1; allowed: 0 to 1099511627776");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.window_right = kLargest; }),
            "window_right is 9223372036854775807; allowed: 0 to 1099511627776");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.window_offset = kMaxDistance + 1; }),
            "window_offset is 1099511627777; allowed: -1099511627776 to 1099511627776");
  EXPECT_EQ(fault([](Problem& p, Grouping&) {
              p.causal = Causal::top_left;
              p.window_offset = 2;
            }),
            "window_offset is 2 in a causal call, whose corner says where queries stand; allowed: none");
}

TEST(Validate, NamesWhatIsWrongWithACapOnScores) {
  const auto fault_of = [](double softcap, double skip = 0) {
    return fault([&](Problem& p, Grouping& g) {
      p.softcap = softcap;
      g.sinks = 1;
      g.skip = skip;
    });
  };
  const std::string allowed = "; allowed: 0 (scores are not capped), or a positive number that fp32 holds";
  EXPECT_EQ(fault_of(-1), "softcap is -1" + allowed);
  EXPECT_EQ(fault_of(INFINITY), "softcap is inf" + allowed);
  EXPECT_EQ(fault_of(NAN), "softcap is nan" + allowed);
  EXPECT_EQ(fault_of(1e-40), "softcap is 1e-40" + allowed);
  EXPECT_EQ(fault_of(1e39), "softcap is 1e+39" + allowed);
  EXPECT_EQ(fault_of(std::numeric_limits<float>::max()), "");
  EXPECT_EQ(fault_of(std::numeric_limits<float>::min()), "");
  EXPECT_EQ(fault_of(0), "");
  EXPECT_EQ(fault_of(50, 0.25), "softcap is 50 with skip, which is 0.250000; allowed: one of them");
}

TEST(Validate, ChecksTheGroupSizeWhateverTheStrategy) {
  for (const Strategy strategy : {Strategy::automatic, Strategy::exact, Strategy::lsh, Strategy::energy}) {
    EXPECT_NE(fault([&](Problem&, Grouping& g) {
                g.strategy = strategy;
                g.group_size = 9;
              }),
              "");
  }
}

TEST(Validate, RefusesACausalCallThatWouldBeExactThroughout) {
  const auto causal = [](Strategy strategy, std::int64_t rows, std::int64_t block, OrderFrom order_from,
                         std::int64_t group_size = 2, Causal corner = Causal::top_left) {
    return fault([=](Problem& p, Grouping& g) {
      p.causal = corner;
      p.seq_q = rows;
      g = {.strategy = strategy, .group_size = group_size, .block = block, .order_from = order_from};
    });
  };
  for (const Strategy strategy : {Strategy::lsh, Strategy::energy}) {
    for (const OrderFrom order_from : {OrderFrom::automatic, OrderFrom::previous}) {
      EXPECT_EQ(
          causal(strategy, 129, 200, order_from),
          "block is 200, one for all 129 rows of a causal call, whose orders come from the block before: it would "
          "be exact; allowed: a block of at most 128 rows, or order_from own");
      EXPECT_NE(causal(strategy, 129, 129, order_from, 2, Causal::bottom_right), "");
      EXPECT_EQ(causal(strategy, 129, 128, order_from), "");
      EXPECT_EQ(causal(strategy, 128, 200, order_from), "");
      EXPECT_EQ(causal(strategy, 129, 200, order_from, 1), "");
      EXPECT_EQ(causal(strategy, 129, 200, order_from, 2, Causal::none), "");
    }
    EXPECT_EQ(causal(strategy, 129, 200, OrderFrom::own), "");
  }
  for (const Strategy strategy : {Strategy::automatic, Strategy::exact, Strategy::given}) {
    EXPECT_EQ(causal(strategy, 129, 200, OrderFrom::automatic), "");
  }
}

TEST(Validate, PositionsOfAPart) {
  const auto part = [](std::int64_t first_row, std::int64_t first_key,
                       const std::function<void(Problem&, Grouping&)>& change) {
    return fault([&](Problem& p, Grouping& g) {
      g = {.strategy = Strategy::energy, .group_size = 2, .block = 64, .window = 1, .part = Part{first_row, first_key}};
      change(p, g);
    });
  };
  const auto as_it_is = [](Problem&, Grouping&) {};
  EXPECT_EQ(part(192, 128, as_it_is), "");
  EXPECT_EQ(part(-64, 0, as_it_is), "first_row is -64; allowed: 0 to 1099511627776");
  EXPECT_EQ(part(96, 0, as_it_is), "first_row is 96; allowed: a multiple of 64, the rows of a block");
  EXPECT_EQ(part(64, 64, as_it_is),
            "first_key is 64; allowed: a multiple of 128, the keys that are near or far together");
  EXPECT_EQ(part(64, 64, [](Problem&, Grouping& g) { g.window.reset(); }), "");
  EXPECT_EQ(part(3, 5, [](Problem&, Grouping& g) { g = {.strategy = Strategy::exact, .part = g.part}; }), "");
  EXPECT_EQ(part(0, 0, [](Problem&, Grouping& g) { g.strategy = Strategy::automatic; }),
            "the strategy of a part of a call is auto, which is for the whole to decide; allowed: another");
  for (const auto& change : {+[](Grouping& g) { g.skip = 0.1; }, +[](Grouping& g) { g.key_offset = 3; }}) {
    EXPECT_EQ(part(0, 0, [&](Problem&, Grouping& g) { change(g); }),
              "a part of a call has a skip or a key_offset; allowed: neither");
  }
  EXPECT_EQ(part(128, 128, [](Problem& p, Grouping&) { p.causal = Causal::top_left; }), "");
  EXPECT_EQ(part(128, 0, [](Problem& p, Grouping&) { p.causal = Causal::top_left; }),
            "first_row is 128 and first_key 0 in a causal call; allowed: positions as far from each other as its "
            "corner says, 0");
}

TEST(Validate, Masks) {
  const auto with_mask = [](std::initializer_list<std::int64_t> shape) {
    return [=](Problem& p, Grouping&) {
      p.mask.kind = MaskKind::boolean;
      p.mask.rank = static_cast<int>(shape.size());
      std::copy(shape.begin(), shape.end(), p.mask.shape.begin());
    };
  };
  EXPECT_EQ(fault(with_mask({})), "");
  EXPECT_EQ(fault(with_mask({5})), "");
  EXPECT_EQ(fault(with_mask({4, 1, 5})), "");
  EXPECT_EQ(fault(with_mask({2, 4, 3, 5})), "");
  EXPECT_EQ(fault(with_mask({3})),
            "the mask's shape [3] does not broadcast; allowed: axes aligned at the right of "
            "[batch, heads_q, seq_q, seq_k] = [2, 4, 3, 5], each of that length or 1");
  EXPECT_NE(fault(with_mask({2, 2, 3, 5})), "");
  EXPECT_NE(fault(with_mask({3, 0})), "");
  EXPECT_EQ(fault([](Problem& p, Grouping&) {
              p.mask.kind = MaskKind::additive;
              p.causal = Causal::top_left;
            }),
            "a mask and causal were both given; allowed: one of them");
  EXPECT_EQ(fault([](Problem& p, Grouping&) { p.mask.rank = 5; }), "the mask's rank is 5; allowed: 0 to 4");
}

TEST(Problem, DefaultScaleIsThatOfTheCallersHeadDim) { EXPECT_DOUBLE_EQ(valid().softmax_scale(), 1 / std::sqrt(8.0)); }

TEST(Grouping, Sizes) {
  Grouping grouping;
  grouping.group_size = 3;
  grouping.block = 2;
  EXPECT_EQ(num_groups(valid(), grouping), 3);
  EXPECT_EQ(order_shape(valid(), grouping), (std::array<std::int64_t, 4>{2, 4, 2, 8}));
}

}  // namespace
}  // namespace distr
