// SPDX-License-Identifier: Apache-2.0
#include "support/planted.h"

namespace distr::test {
namespace {

// Of three halves of tiles one with large keys and two with small ones, so that it is clear which of them matter.
void make_patches(Instance& instance) {
  const Problem& p = instance.test_case.problem;
  if (instance.test_case.values != Values::patches) return;
  for (std::int64_t row = 0; row < p.batch * p.heads_kv * p.seq_k; ++row) {
    const std::int64_t j = row % p.seq_k;
    const std::int64_t head = row / p.seq_k;
    const std::int64_t at = head / p.heads_kv * p.k.batch + head % p.heads_kv * p.k.head + j * p.k.row;
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
      instance.k.set(at + c, instance.k.at(at + c) * (j / 64 % 3 == 1 ? 3 : 0.25));
    }
  }
}

// Makes one key of a head point the way all its queries lean, or all keys point the other way: every score is low.
void plant_scores(Instance& instance) {
  const Problem& p = instance.test_case.problem;
  const Values values = instance.test_case.values;
  const bool planted = values == Values::best_first || values == Values::best_last || values == Values::best_middle;
  if (!planted && values != Values::low) {
    return;
  }
  const std::int64_t best = values == Values::best_first ? 0 : values == Values::best_last ? p.seq_k - 1 : p.seq_k / 2;
  for (std::int64_t c = 0; c < p.head_dim; ++c) {
    for (std::int64_t i = 0; i < p.seq_q; ++i) {
      instance.q.set(i * p.q.row + c, instance.q.at(i * p.q.row + c) / 4 + 1);
    }
    if (planted) {
      instance.k.set(best * p.k.row + c, 4);
    }
    for (std::int64_t j = 0; !planted && j < p.seq_k; ++j) {
      instance.k.set(j * p.k.row + c, instance.k.at(j * p.k.row + c) / 4 - 4);
    }
  }
}

// Of the first head.
void plant_columns(Instance& instance) {
  const Problem& p = instance.test_case.problem;
  const Values values = instance.test_case.values;
  if (values != Values::low_columns && values != Values::high_columns) return;
  for (std::int64_t c = p.head_dim / 2; c < p.head_dim; ++c) {
    for (std::int64_t i = 0; i < p.seq_q; ++i) {
      instance.q.set(i * p.q.row + c, 4);
    }
    for (std::int64_t j = 0; j < p.seq_k; ++j) {
      instance.k.set(j * p.k.row + c, values == Values::low_columns ? -4 : 4);
    }
  }
}

}  // namespace

void plant_values(Instance& instance) {
  plant_scores(instance);
  make_patches(instance);
  plant_columns(instance);
}

}  // namespace distr::test
