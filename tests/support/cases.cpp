// SPDX-License-Identifier: Apache-2.0
#include "support/cases.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

#include "common/element.h"
#include "kernel.h"
#include "support/normal.h"
#include "support/planted.h"

namespace distr::test {
namespace {

using Json = nlohmann::json;

template <class Enum>
Enum parse(const Json& json, const char* key, const std::map<std::string, Enum>& names, Enum absent) {
  return json.contains(key) ? names.at(json.at(key).get<std::string>()) : absent;
}

Strides strides_of(const std::string& layout, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
  if (layout == "bnhd") {
    return {rows * heads * columns, columns, heads * columns};
  }
  if (layout == "packed") {
    return {rows * 3 * heads * columns, columns, 3 * heads * columns};
  }
  if (layout == "gaps") {
    return {heads * rows * (columns + 5) + 11, rows * (columns + 5) + 3, columns + 5};
  }
  return {heads * rows * columns, rows * columns, columns};
}

Mask parse_mask(const Json& json, const Problem& problem) {
  Mask mask;
  mask.kind = json.at("kind") == "additive" ? MaskKind::additive : MaskKind::boolean;
  const std::array<std::int64_t, 4> full{problem.batch, problem.heads_q, problem.seq_q, problem.seq_k};
  const auto shape = json.at("shape").get<std::vector<std::int64_t>>();
  mask.rank = static_cast<int>(shape.size());
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    mask.shape[axis] = shape[axis] == 0 ? full[4 - shape.size() + axis] : shape[axis];
  }
  const bool transposed = json.value("transposed", false);
  std::int64_t stride = 1;
  for (std::size_t n = 0; n < shape.size(); ++n) {
    const std::size_t axis = transposed ? n : shape.size() - 1 - n;
    mask.strides[axis] = stride;
    stride *= mask.shape[axis];
  }
  return mask;
}

Case parse_case(const Json& json) {
  Case result;
  result.name = json.at("name");
  Problem& problem = result.problem;
  problem.batch = json.value("batch", 1);
  problem.heads_q = json.value("heads", 1);
  problem.heads_kv = json.value("heads_kv", problem.heads_q);
  problem.seq_q = json.at("seq_q");
  problem.seq_k = json.value("seq_k", problem.seq_q);
  problem.head_dim = json.at("dim");
  problem.head_dim_v = json.value("dim_v", problem.head_dim);
  if (json.contains("scale")) problem.scale = json.at("scale").get<double>();
  problem.causal = parse<Causal>(
      json, "causal", {{"top_left", Causal::top_left}, {"bottom_right", Causal::bottom_right}}, Causal::none);
  const auto [left, right] = json.value("window_size", std::array<std::int64_t, 2>{-1, -1});  // -1: unlimited
  problem.window_left = left < 0 ? std::nullopt : std::optional(left);
  problem.window_right = right < 0 ? std::nullopt : std::optional(right);
  if (const auto offset = json.find("window_offset"); offset != json.end()) problem.window_offset = *offset;
  problem.softcap = json.value("softcap", 0.0);
  const std::string layout = json.value("layout", "contiguous");
  result.packed = layout == "packed";
  problem.q = strides_of(layout, problem.heads_q, problem.seq_q, problem.head_dim);
  problem.k = strides_of(layout, problem.heads_kv, problem.seq_k, problem.head_dim);
  problem.v = strides_of(layout, problem.heads_kv, problem.seq_k, problem.head_dim_v);
  problem.o = strides_of(result.packed ? "bnhd" : layout, problem.heads_q, problem.seq_q, problem.head_dim_v);
  if (json.contains("mask")) {
    problem.mask = parse_mask(json.at("mask"), problem);
    result.mask_hides_all = json.at("mask").at("kind") == "hidden";
    result.mask_follows_dtype = json.at("mask").value("dtype", "") != "f32";
  }
  result.values = parse<Values>(json, "values",
                                {{"heavy", Values::heavy},
                                 {"huge", Values::huge},
                                 {"tiny", Values::tiny},
                                 {"constant", Values::constant},
                                 {"best_first", Values::best_first},
                                 {"best_last", Values::best_last},
                                 {"best_middle", Values::best_middle},
                                 {"low", Values::low},
                                 {"patches", Values::patches},
                                 {"low_columns", Values::low_columns},
                                 {"high_columns", Values::high_columns}},
                                Values::normal);
  Grouping& grouping = result.grouping;
  grouping.strategy = Strategy::exact;
  for (const StrategyTraits& entry : kStrategies) {
    grouping.strategy = json.value("strategy", "exact") == entry.name ? entry.strategy : grouping.strategy;
  }
  grouping.group_size = json.value("group_size", grouping.strategy == Strategy::exact ? 1 : 2);
  grouping.block = json.value("block", 128);
  grouping.estimator = parse<Estimator>(json, "estimator", {{"sample", Estimator::sample}}, Estimator::mean);
  grouping.order_from = parse<OrderFrom>(json, "order_from", {{"previous", OrderFrom::previous}}, OrderFrom::own);
  grouping.seed = json.value("seed", std::uint64_t{0});
  if (json.contains("window")) {
    grouping.window = json.at("window").get<std::int64_t>();
  }
  if (json.contains("key_offset")) {
    grouping.key_offset = json.at("key_offset").get<std::int64_t>();
  }
  grouping.sinks = json.value("sinks", std::int64_t{0});
  grouping.skip = json.value("skip", 0.0);
  grouping.finish = json.value("finish", false);
  return result;
}

using Random = std::mt19937_64;

double normal(Random& random) { return Normal()(random); }

double shaped(double x, Values values) {
  switch (values) {
    case Values::heavy:
      return x * x * x;
    case Values::huge:
      return 100 * x;
    case Values::tiny:
      return 1e-3 * x;
    case Values::constant:
      return 0.5;
    default:
      return x;
  }
}

// The first values of a seed, and its generator behind them.
struct Drawn {
  std::uint64_t seed = 0;
  std::vector<double> values = {};
  Random random = {};
};

// Those of the last seed are kept: a case is wanted in several dtypes.
const Drawn& drawn(std::uint64_t seed, std::int64_t count) {
  thread_local Drawn last;
  if (last.seed != seed || last.values.size() != static_cast<std::size_t>(count)) {
    last = {seed, {}, Random(seed)};
    for (std::int64_t n = 0; n < count; ++n) {
      last.values.push_back(normal(last.random));
    }
  }
  return last;
}

// Takes the buffer's values from `from` on, which it moves behind them.
void fill(Buffer& buffer, const double*& from, Values values) {
  for (std::int64_t index = 0; index < buffer.count(); ++index) {
    buffer.set(index, shaped(*from++, values));
  }
}

std::vector<Case> read_cases(const char* list, std::size_t at_least) {
  const char* const elsewhere = std::getenv("DISTR_CASES_FILE");  // for programs that run far from the sources
  const Json json = Json::parse(std::ifstream(elsewhere != nullptr ? elsewhere : DISTR_CASES));
  std::vector<Case> result;
  for (const Json& one : json.at(list)) {
    result.push_back(parse_case(one));
  }
  if (result.size() < at_least) {  // a test over an empty list would pass
    throw std::runtime_error("tests/cases.json holds " + std::to_string(result.size()) + " cases in " + list);
  }
  return result;
}

}  // namespace

const std::vector<Case>& cases() {
  static const std::vector<Case> all = read_cases("cases", 60);
  return all;
}

const std::vector<Case>& near_cases() {
  static const std::vector<Case> all = read_cases("near", 25);
  return all;
}

const Case& find(const std::string& name) {
  for (const auto* list : {&cases(), &near_cases()}) {
    for (const Case& test_case : *list) {
      if (test_case.name == name) {
        return test_case;
      }
    }
  }
  throw std::invalid_argument("tests/cases.json has no case " + name);
}

Case square(std::int64_t rows, std::int64_t head_dim, Causal causal, const Grouping& grouping) {
  Case result;
  result.name = "square";
  result.problem.seq_q = result.problem.seq_k = rows;
  result.problem.head_dim = result.problem.head_dim_v = head_dim;
  result.problem.causal = causal;
  result.problem = contiguous(result.problem);
  result.grouping = grouping;
  return result;
}

Case with_dtype(Case test_case, DType dtype) {
  test_case.problem.dtype = dtype;
  if (test_case.problem.mask.kind == MaskKind::additive && test_case.mask_follows_dtype) {
    test_case.problem.mask.dtype = dtype;
  }
  return test_case;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f32:
      return "f32";
    case DType::f64:
      break;
  }
  return "f64";
}

Buffer::Buffer(std::int64_t count, DType dtype)
    : count_(count),
      dtype_(dtype),
      bytes_(static_cast<std::size_t>(count) * size_of(dtype) + 2 * kMargin, std::byte{0xFF}) {}  // 0xFF..: NaN

double Buffer::at(std::int64_t index) const { return common::load(data(), dtype_, index); }

void Buffer::set(std::int64_t index, double value) { common::store(data(), dtype_, index, value); }

bool Buffer::canaries_intact() const {
  for (std::size_t n = 0; n < kMargin && !bytes_.empty(); ++n) {
    if (bytes_[n] != std::byte{0xFF} || bytes_[bytes_.size() - 1 - n] != std::byte{0xFF}) {
      return false;
    }
  }
  return true;
}

std::int64_t extent(const Strides& strides, std::int64_t batch, std::int64_t heads, std::int64_t rows,
                    std::int64_t columns) {
  if (batch == 0 || rows == 0) {
    return 0;
  }
  return (batch - 1) * strides.batch + (heads - 1) * strides.head + (rows - 1) * strides.row + columns;
}

Instance::Instance(Case wanted, std::uint64_t seed) : test_case(std::move(wanted)) {
  const Problem& p = test_case.problem;
  if (test_case.packed) {
    q = Buffer(p.batch * p.q.batch, p.dtype);
    k_offset = p.heads_q * p.head_dim;
    v_offset = 2 * k_offset;
  } else {
    q = Buffer(extent(p.q, p.batch, p.heads_q, p.seq_q, p.head_dim), p.dtype);
    k = Buffer(extent(p.k, p.batch, p.heads_kv, p.seq_k, p.head_dim), p.dtype);
    v = Buffer(extent(p.v, p.batch, p.heads_kv, p.seq_k, p.head_dim_v), p.dtype);
  }
  const Drawn& values = drawn(std::hash<std::string>{}(test_case.name) + seed, q.count() + k.count() + v.count());
  const double* from = values.values.data();
  fill(q, from, test_case.values);
  fill(k, from, test_case.values);
  fill(v, from, Values::normal);
  if (!test_case.packed) {
    plant_values(*this);
  }
  std::int64_t mask_count = 1;
  for (int axis = 0; axis < p.mask.rank; ++axis) {
    mask_count *= p.mask.shape[static_cast<std::size_t>(axis)];
  }
  mask = Buffer(mask_count, p.mask.dtype);
  Random random = values.random;
  std::bernoulli_distribution keep(0.7);
  for (std::int64_t index = 0; index < mask_count; ++index) {
    const bool kept = keep(random) && !test_case.mask_hides_all;
    boolean_mask.push_back(kept ? 1 : 0);
    mask.set(index, kept ? normal(random) : -std::numeric_limits<double>::infinity());
  }
  make_order();
  o = output();
  lse = lse_output();
}

void Instance::make_order() {
  const auto count = [](const std::array<std::int64_t, 4>& shape) {
    return static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]);
  };
  const Problem& problem = test_case.problem;
  const Grouping& grouping = test_case.grouping;
  order.assign(count(order_shape(problem, grouping)), -1);
  key_means.assign(needs_key_means(grouping) ? count(key_means_shape(problem, grouping)) : 0, -1.0F);
  halves.assign(grouping.skip > 0 ? count(halves_shape(problem)) : 0, -1);
  if (makes_order(grouping) || !key_means.empty()) {
    Execution execution;
    execution.threads = 1;
    reference_backend()
        .grouping[0]
        .plan(problem, grouping, execution)
        .run({q_data(), k_data(), order.data(), key_means.data()}, execution);
  }
  if (!makes_order(grouping)) {
    std::mt19937 random(static_cast<unsigned>(order.size()));
    for (auto row = order.begin(); row != order.end(); row += problem.head_dim) {
      std::iota(row, row + problem.head_dim, 0);
      std::shuffle(row, row + problem.head_dim, random);
    }
  }
}

Buffer Instance::output() const {
  const Problem& p = test_case.problem;
  return {extent(p.o, p.batch, p.heads_q, p.seq_q, p.head_dim_v), p.dtype};
}

Buffer Instance::lse_output() const {
  const Problem& p = test_case.problem;
  return {p.batch * p.heads_q * p.seq_q, p.lse_dtype()};
}

ForwardTensors Instance::forward() { return forward_into(o, lse); }

ForwardTensors Instance::forward_into(Buffer& o_buffer, Buffer& lse_buffer) {
  return {q_data(),          k_data(),         v_data(),
          mask_data(),       order.data(),     o_buffer.data(),
          lse_buffer.data(), key_means.data(), halves.empty() ? nullptr : halves.data()};
}

const void* Instance::q_data() const { return q.data(); }

const void* Instance::k_data() const {
  const auto bytes = static_cast<std::size_t>(k_offset) * size_of(test_case.problem.dtype);
  return test_case.packed ? static_cast<const std::byte*>(q.data()) + bytes : k.data();
}

const void* Instance::v_data() const {
  const auto bytes = static_cast<std::size_t>(v_offset) * size_of(test_case.problem.dtype);
  return test_case.packed ? static_cast<const std::byte*>(q.data()) + bytes : v.data();
}

const void* Instance::mask_data() const {
  return test_case.problem.mask.kind == MaskKind::boolean ? static_cast<const void*>(boolean_mask.data()) : mask.data();
}

}  // namespace distr::test
