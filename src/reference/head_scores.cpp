// SPDX-License-Identifier: Apache-2.0
#include "reference/head_scores.h"

#include <cmath>

namespace distr::reference {
namespace {

std::size_t half_of(std::int64_t j) { return static_cast<std::size_t>(j / common::kSkipKeys); }

}  // namespace

HeadScores::HeadScores(const Problem& problem, const Grouping& grouping, const ScoreTensors& tensors, const Head& head)
    : problem_(problem),
      grouping_(grouping),
      tensors_(tensors),
      head_(head),
      mask_(problem.mask, tensors.mask),
      k_(load_k(problem, tensors.k, head)),
      q_(0, 0),
      q_hat_(0, 0),
      k_hat_(0, 0) {}

void HeadScores::enter_block_of(std::int64_t i) {
  near_ = common::near_tiles(problem_, grouping_, i);
  if (i / grouping_.block == block_) {
    return;
  }
  block_ = i / grouping_.block;
  groups_ = common::block_groups(problem_, grouping_, tensors_.order, head_.b, head_.h, block_);
  q_ = load_q_block(problem_, grouping_, tensors_.q, head_, block_);
  q_hat_ = estimate(q_, groups_, grouping_.estimator);
  k_hat_ = fuse(k_, groups_);
  dropped_keys_.assign(static_cast<std::size_t>(problem_.head_dim), 0);
  if (common::has_key_means(grouping_) && !common::is_exact_block(grouping_, block_)) {
    const float* means = tensors_.key_means + common::key_means_at(problem_, grouping_, head_.b, head_.h_kv, block_);
    for (std::int64_t position = groups_.count; position < groups_.columns; ++position) {
      const auto c = static_cast<std::size_t>(groups_.order[position]);
      dropped_keys_[c] = static_cast<double>(means[c]);
    }
  }
}

void HeadScores::exact_row(std::int64_t i, std::vector<double>& s) {
  enter_block_of(i);
  scores(problem_, mask_, {head_.b, head_.h, i}, q_of(i), k_, 0, s);
}

void HeadScores::row(std::int64_t i, std::vector<double>& s) {
  enter_block_of(i);
  scores(problem_, mask_, {head_.b, head_.h, i}, q_hat_of(i), k_hat_, dropped_score(i), s);
  if (!common::has_near_keys(grouping_)) {
    return;
  }
  std::vector<double> exact;
  scores(problem_, mask_, {head_.b, head_.h, i}, q_of(i), k_, 0, exact);
  for (std::size_t j = 0; j < s.size(); ++j) {
    s[j] = is_near(static_cast<std::int64_t>(j)) ? exact[j] : s[j];
  }
}

double HeadScores::dropped_score(std::int64_t i) const {
  return common::has_near_keys(grouping_) ? dot(q_of(i), dropped_keys_.data(), problem_.head_dim) : 0;
}

double HeadScores::cap_slope(std::int64_t i, std::int64_t j) const {
  if (problem_.softcap == 0) {
    return 1;
  }
  const double product = is_near(j) ? dot(q_of(i), k_.row(j), k_.columns)
                                    : dot(q_hat_of(i), k_hat_.row(j), k_hat_.columns) + dropped_score(i);
  return reference::cap_slope(problem_, problem_.softmax_scale() * product);
}

void HeadScores::vote(const std::vector<double>& s, std::vector<char>& kept, std::vector<char>& seen) const {
  std::vector<double> near_scores(s.size(), -kInfinity);
  for (std::size_t j = 0; j < s.size(); ++j) {
    near_scores[j] = is_near(static_cast<std::int64_t>(j)) ? s[j] : -kInfinity;
  }
  std::vector<double> p;
  const double lse = softmax(near_scores, p);  // L_i
  for (std::int64_t j = 0; j < problem_.seq_k; ++j) {
    const double score = s[static_cast<std::size_t>(j)];
    if (is_near(j) || score == -kInfinity) {
      continue;
    }
    seen[half_of(j)] = 1;
    if (lse == -kInfinity || !(score <= lse + std::log(grouping_.skip))) {
      kept[half_of(j)] = 1;
    }
  }
}

Halves HeadScores::skipped_rows(std::int64_t first, std::vector<std::vector<double>>& s) {
  const auto halves = static_cast<std::size_t>(common::ceil_div(problem_.seq_k, common::kSkipKeys));
  std::vector<char> kept(halves);
  std::vector<char> seen(halves);
  std::vector<common::NearTiles> near;
  std::vector<std::vector<double>> exact(s.size());
  for (std::size_t n = 0; n < s.size(); ++n) {
    const std::int64_t i = first + static_cast<std::int64_t>(n);
    row(i, s[n]);
    vote(s[n], kept, seen);
    near.push_back(near_);
    if (grouping_.finish) {
      exact_row(i, exact[n]);
    }
  }
  for (std::size_t n = 0; n < s.size(); ++n) {
    for (std::int64_t j = 0; j < problem_.seq_k; ++j) {
      double& score = s[n][static_cast<std::size_t>(j)];
      if (!near[n].has_key(j) && kept[half_of(j)] == 0) {
        score = -kInfinity;
      } else if (grouping_.finish) {
        score = exact[n][static_cast<std::size_t>(j)];
      }
    }
  }
  Halves result;
  for (std::size_t n = 0; n < halves; ++n) {
    result.kept += kept[n];
    result.seen += seen[n];
  }
  return result;
}

}  // namespace distr::reference
