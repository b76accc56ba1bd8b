// SPDX-License-Identifier: Apache-2.0
// Strict parsing of option values, and short numbers and aligned tables for people.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

namespace distr::cli {

// Decimal digits only: no sign, no blank, no exponent. Throws InputError that names the value and the range.
[[nodiscard]] std::int64_t parse_integer(const std::string& option, const std::string& text, std::int64_t low,
                                         std::int64_t high);
[[nodiscard]] std::uint64_t parse_unsigned(const std::string& option, const std::string& text);

// A finite decimal number. Throws InputError otherwise.
[[nodiscard]] double parse_finite(const std::string& option, const std::string& text);

// The parts between commas; an empty part is kept, for the parser of the part to refuse.
[[nodiscard]] std::vector<std::string> split(const std::string& text);

// In quotes, with control characters escaped and the middle of a long text left out: a message stays one short line.
[[nodiscard]] std::string quoted(const std::string& text);

// "[2, 3, 4]"
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);

// `value` with so many significant digits, without an exponent where that stays short.
[[nodiscard]] std::string significant(double value, int digits = 4);

// printf's %.*g
[[nodiscard]] std::string general(double value, int digits);

// Columns aligned by their widest entry: words at the left, numbers at the right.
class Table {
 public:
  enum class Align : std::uint8_t { left, right };

  void add_column(std::string head, Align align);
  void add_row(std::vector<std::string> cells);
  void print(std::ostream& out) const;

 private:
  struct Column {
    std::string head;
    Align align;
    std::size_t width;
  };
  void print_row(std::ostream& out, const std::vector<std::string>& cells) const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace distr::cli
