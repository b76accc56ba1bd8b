// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include "names.h"
#include "text.h"

namespace distr::cli {

Json sizes_json(const Problem& problem) {
  const bool has_window = problem.window_left.has_value() || problem.window_right.has_value();
  const Json window = {problem.window_left.value_or(-1), problem.window_right.value_or(-1)};
  return {{"batch", problem.batch},
          {"heads", problem.heads_q},
          {"kv_heads", problem.heads_kv},
          {"seq_q", problem.seq_q},
          {"seq_k", problem.seq_k},
          {"head_dim", problem.head_dim},
          {"head_dim_v", problem.head_dim_v},
          {"dtype", name_of(problem.dtype)},
          {"causal", problem.causal != Causal::none},
          {"window_size", has_window ? window : Json(nullptr)},
          {"softcap", problem.softcap != 0 ? Json(problem.softcap) : Json(nullptr)}};
}

Json grouping_json(const Problem& problem, const Grouping& grouping) {
  const bool exact = grouping.strategy == Strategy::exact;
  Json json = {{"strategy", name_of(grouping.strategy)}, {"estimator", nullptr}, {"group_size", 1}, {"block", nullptr}};
  if (traits(grouping.strategy).has_estimator) json["estimator"] = name_of(grouping.estimator);
  if (!exact) {
    json["group_size"] = grouping.group_size;
    json["block"] = grouping.block;
  }
  json["order_from"] = exact ? Json(nullptr) : Json(name_of(grouping.order_from));
  const bool has_near = grouping.window.has_value() || grouping.sinks > 0;
  json["window"] = grouping.window.has_value() ? Json(*grouping.window) : Json(nullptr);
  json["sinks"] = has_near ? Json(grouping.sinks) : Json(nullptr);
  json["key_offset"] = grouping.key_offset.has_value() ? Json(*grouping.key_offset) : Json(nullptr);
  json["skip"] = grouping.skip > 0 ? Json(grouping.skip) : Json(nullptr);
  json["finish"] = grouping.skip > 0 ? Json(grouping.finish) : Json(nullptr);
  json["num_groups"] = exact ? problem.head_dim : num_groups(problem, grouping);
  return json;
}

std::string sizes_text(const Problem& problem) {
  std::string text = "B " + std::to_string(problem.batch) + ", H " + std::to_string(problem.heads_q);
  if (problem.heads_kv != problem.heads_q) text += " (K and V " + std::to_string(problem.heads_kv) + ")";
  text += ", Nq " + std::to_string(problem.seq_q) + ", Nk " + std::to_string(problem.seq_k);
  text += ", d " + std::to_string(problem.head_dim) + ", dv " + std::to_string(problem.head_dim_v);
  text += std::string(", ") + name_of(problem.dtype);
  if (problem.causal != Causal::none) text += std::string(", causal ") + name_of(problem.causal);
  if (problem.window_left.has_value() || problem.window_right.has_value()) {
    text += ", window size " + std::to_string(problem.window_left.value_or(-1)) + "," +
            std::to_string(problem.window_right.value_or(-1));
  }
  if (problem.softcap != 0) text += ", softcap " + general(problem.softcap, 4);
  if (problem.mask.kind != MaskKind::none) text += std::string(", mask ") + name_of(problem.mask.kind);
  return text;
}

std::string near_text(const Grouping& grouping) {
  std::string text;
  if (grouping.window.has_value()) text += ", window " + std::to_string(*grouping.window);
  if (grouping.sinks > 0) text += ", sinks " + std::to_string(grouping.sinks);
  if (grouping.key_offset.has_value()) text += ", key offset " + std::to_string(*grouping.key_offset);
  if (grouping.skip > 0) text += ", skip " + general(grouping.skip, 4);
  return text + (grouping.finish ? ", finish" : "");
}

std::string grouping_text(const Grouping& grouping) {
  std::string text = name_of(grouping.strategy);
  if (grouping.strategy == Strategy::exact) return text + near_text(grouping);
  if (traits(grouping.strategy).has_estimator) text += std::string(" (") + name_of(grouping.estimator) + ")";
  text += ", G " + std::to_string(grouping.group_size) + ", l " + std::to_string(grouping.block);
  return text + ", order from " + name_of(grouping.order_from) + near_text(grouping);
}

std::string json_text(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace); }

}  // namespace distr::cli
