// SPDX-License-Identifier: Apache-2.0
// Result files, {"meta": {...}, "rows": [...]}, as bench/result_file.py writes them: a line for each entry of the meta
// and for each row, so that a file can be read and compared line by line.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace distr::cli {

// The file's text. Bytes that are no UTF-8, as in odd file names, are replaced.
[[nodiscard]] inline std::string result_text(const nlohmann::ordered_json& result) {
  const auto line = [](const nlohmann::ordered_json& value) {
    return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  };
  std::string text;
  for (const auto& [key, value] : result.items()) {
    text += (text.empty() ? "{\n" : ",\n") + line(key) + ": ";
    if (!value.is_structured()) {
      text += line(value);
      continue;
    }
    std::string inner;
    for (const auto& [name, entry] : value.items()) {
      inner += (inner.empty() ? "\n " : ",\n ") + (value.is_object() ? line(name) + ": " : "") + line(entry);
    }
    text += (value.is_object() ? "{" : "[") + inner + "\n" + (value.is_object() ? "}" : "]");
  }
  return text + "\n}\n";
}

}  // namespace distr::cli
