// SPDX-License-Identifier: Apache-2.0
#include "text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <ostream>

#include "tensor.h"

namespace distr::cli {
namespace {

std::uint64_t parse_digits(const std::string& option, const std::string& text, std::uint64_t low, std::uint64_t high) {
  std::uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || value < low || value > high) {
    throw InputError(option + ": " + quoted(text) + " is not allowed; allowed: an integer from " + std::to_string(low) +
                     " to " + std::to_string(high));
  }
  return value;
}

}  // namespace

std::int64_t parse_integer(const std::string& option, const std::string& text, std::int64_t low, std::int64_t high) {
  return static_cast<std::int64_t>(
      parse_digits(option, text, static_cast<std::uint64_t>(low), static_cast<std::uint64_t>(high)));
}

std::uint64_t parse_unsigned(const std::string& option, const std::string& text) {
  return parse_digits(option, text, 0, std::numeric_limits<std::uint64_t>::max());
}

double parse_finite(const std::string& option, const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || !std::isfinite(value)) {
    throw InputError(option + ": " + quoted(text) + " is not allowed; allowed: a finite number");
  }
  return value;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t start = 0;
  for (std::size_t comma = text.find(','); comma != std::string::npos; comma = text.find(',', start)) {
    parts.push_back(text.substr(start, comma - start));
    start = comma + 1;
  }
  parts.push_back(text.substr(start));
  return parts;
}

std::string quoted(const std::string& text) { return "'" + shortened(on_one_line(text)) + "'"; }

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t length : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(length);
  }
  return text + "]";
}

std::string significant(double value, int digits) {
  char buffer[64];
  const double magnitude = std::fabs(value);
  if (value == 0) return "0";
  if (!std::isfinite(value) || magnitude < 1e-4 || magnitude >= 1e7) {
    std::snprintf(buffer, sizeof buffer, "%.*e", digits - 1, value);
  } else {
    const int whole_digits = static_cast<int>(std::floor(std::log10(magnitude))) + 1;
    std::snprintf(buffer, sizeof buffer, "%.*f", std::max(0, digits - whole_digits), value);
  }
  return buffer;
}

std::string general(double value, int digits) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
  return buffer;
}

void Table::add_column(std::string head, Align align) {
  const std::size_t width = head.size();
  columns_.push_back({std::move(head), align, width});
}

void Table::add_row(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  for (std::size_t i = 0; i < cells.size(); ++i) columns_[i].width = std::max(columns_[i].width, cells[i].size());
  rows_.push_back(std::move(cells));
}

void Table::print(std::ostream& out) const {
  std::vector<std::string> heads;
  for (const Column& column : columns_) heads.push_back(column.head);
  print_row(out, heads);
  for (const auto& row : rows_) print_row(out, row);
}

void Table::print_row(std::ostream& out, const std::vector<std::string>& cells) const {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::string padding(columns_[i].width - cells[i].size(), ' ');
    if (i > 0) line += "  ";
    line += columns_[i].align == Align::left ? cells[i] + padding : padding + cells[i];
  }
  line.erase(line.find_last_not_of(' ') + 1);
  out << line << '\n';
}

}  // namespace distr::cli
