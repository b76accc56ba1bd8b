// SPDX-License-Identifier: Apache-2.0
// A tensor as files hold it, the exception for files that cannot be used, and what the readers of files share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace distr::cli {

enum class ElementType : std::uint8_t { f16, bf16, f32, f64, boolean, i8, i16, i32, i64, u8, u16, u32, u64 };

inline constexpr std::size_t kElementTypeCount = 13;
inline constexpr std::size_t kMaxRank = 8;

[[nodiscard]] std::size_t size_of(ElementType type) noexcept;
[[nodiscard]] const char* name_of(ElementType type) noexcept;  // "f16", "bool", "i32", ...

struct Tensor {
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;  // rank 0 to 8
  std::vector<std::byte> data;      // C order, the machine's byte order; booleans are 0 or 1
};

// Bad usage or bad input: one line that names the value and what is allowed; the command exits with 2.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws InputError("<name>: <wrong>; <allowed>").
[[noreturn]] void refuse(const std::string& name, const std::string& wrong, const std::string& allowed);

// What the user typed, but with control characters escaped.
[[nodiscard]] std::string on_one_line(std::string_view text);

// A text with its middle left out where it is longer than a message should be.
[[nodiscard]] std::string shortened(const std::string& text);

// What a file contains, for a message: quoted, all but printable ASCII escaped, cut if long.
[[nodiscard]] std::string quote(std::string_view content);

// The size of a tensor in bytes; nothing if the size, or the product of the non-zero dimensions, exceeds int64.
[[nodiscard]] std::optional<std::int64_t> byte_count(ElementType type, std::span<const std::int64_t> shape) noexcept;

// "(2, 3)", "(2,)", "()", as Python writes it.
[[nodiscard]] std::string shape_tuple(std::span<const std::int64_t> shape);

// Files hold booleans as bytes of which any but 0 is true; a C++ bool must be 0 or 1.
void normalise_booleans(Tensor& tensor) noexcept;

// Throws std::invalid_argument if data, shape and type of a tensor to be written contradict each other.
void require_consistent(const Tensor& tensor);

// All bytes of a regular file. Throws InputError if it is missing, unreadable, a folder, a pipe, ...
[[nodiscard]] std::vector<std::byte> read_regular_file(const std::filesystem::path& path);

}  // namespace distr::cli
