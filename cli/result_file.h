// SPDX-License-Identifier: Apache-2.0
// Result files, {"meta": {...}, "rows": [...]}, as bench/result_file.py writes them: a line for each entry of the meta
// and for each row, so that a file can be read and compared line by line.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace distr::cli {

// Bytes that are no UTF-8, as in odd file names, are replaced.
[[nodiscard]] inline std::string line_of(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// The file's text.
[[nodiscard]] inline std::string result_text(const nlohmann::ordered_json& result) {
  std::string text;
  for (auto part = result.begin(); part != result.end(); ++part) {
    text += (text.empty() ? "{\n" : ",\n") + line_of(part.key()) + ": ";
    const bool is_object = part->is_object();
    if (!is_object && !part->is_array()) {
      text += line_of(*part);
      continue;
    }
    std::string inner;
    for (auto entry = part->begin(); entry != part->end(); ++entry) {
      inner += (inner.empty() ? "\n " : ",\n ") + (is_object ? line_of(entry.key()) + ": " : "") + line_of(*entry);
    }
    text += (is_object ? "{" : "[") + inner + "\n" + (is_object ? "}" : "]");
  }
  return text + "\n}\n";
}

}  // namespace distr::cli
