// SPDX-License-Identifier: Apache-2.0
// Reads and writes NumPy's .npy format. The header is a Python dict literal; a parser of just that form reads it, and
// nothing is ever unpickled.
#include "npy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

namespace distr::cli {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxNpyHeaderBytes = 1 << 20;
constexpr const char* kNeedNpy = "a .npy file of version 1.0, 2.0 or 3.0 is needed";
constexpr const char* kNeedHeader =
    "a dict such as {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } is allowed";
constexpr const char* kAllowedTypes =
    "allowed are f2, f4, f8, b1, i1, i2, i4, i8, u1, u2, u4 and u8 after an optional <, > or = (| for one byte)";

struct TypeCode {
  ElementType type;
  std::string_view code;
};

constexpr std::array<TypeCode, kElementTypeCount - 1> kTypeCodes{{{ElementType::f16, "f2"},
                                                                  {ElementType::f32, "f4"},
                                                                  {ElementType::f64, "f8"},
                                                                  {ElementType::boolean, "b1"},
                                                                  {ElementType::i8, "i1"},
                                                                  {ElementType::i16, "i2"},
                                                                  {ElementType::i32, "i4"},
                                                                  {ElementType::i64, "i8"},
                                                                  {ElementType::u8, "u1"},
                                                                  {ElementType::u16, "u2"},
                                                                  {ElementType::u32, "u4"},
                                                                  {ElementType::u64, "u8"}}};

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
};

class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  Header parse() {
    expect('{');
    while (!accept('}')) {
      parse_item();
      if (accept(',')) continue;
      expect('}');
      break;
    }
    skip_spaces();
    if (!text_.empty()) fail("text");
    if (!descr_) refuse(name_, "the header lacks the key 'descr'", kNeedHeader);
    if (!fortran_order_) refuse(name_, "the header lacks the key 'fortran_order'", kNeedHeader);
    if (!shape_) refuse(name_, "the header lacks the key 'shape'", kNeedHeader);
    return {*std::move(descr_), *fortran_order_, *std::move(shape_)};
  }

 private:
  void parse_item() {
    const std::string_view key = parse_string();
    expect(':');
    if (key == "descr") {
      set(descr_, key, parse_descr());
    } else if (key == "fortran_order") {
      set(fortran_order_, key, parse_bool());
    } else if (key == "shape") {
      set(shape_, key, parse_shape());
    } else {
      refuse(name_, "the header has the key " + quote(key), "descr, fortran_order and shape are allowed");
    }
  }

  template <typename Value>
  void set(std::optional<Value>& field, std::string_view key, Value value) {
    if (field) refuse(name_, "the header has the key " + quote(key) + " twice", "each key is allowed once");
    field = std::move(value);
  }

  // A structured type is a list of tuples.
  std::string parse_descr() {
    skip_spaces();
    if (text_.starts_with('[') || text_.starts_with('(') || text_.starts_with('{')) {
      refuse(name_, "structured dtype " + quote(text_), kAllowedTypes);
    }
    return std::string(parse_string());
  }

  bool parse_bool() {
    const std::string_view word = parse_word();
    if (word != "True" && word != "False") {
      refuse(name_, "fortran_order is " + quote(word), "True and False are allowed");
    }
    return word == "True";
  }

  std::vector<std::int64_t> parse_shape() {
    std::vector<std::int64_t> shape;
    bool comma = false;
    expect('(');
    while (!accept(')')) {
      if (shape.size() == kMaxRank) refuse(name_, "the shape has more than 8 dimensions", "at most 8 are allowed");
      shape.push_back(parse_dimension());
      comma = accept(',');
      if (comma) continue;
      expect(')');
      break;
    }
    if (shape.size() == 1 && !comma) {
      refuse(name_, "the shape (" + std::to_string(shape[0]) + ") is a number", "a tuple such as (3,) is allowed");
    }
    return shape;
  }

  std::int64_t parse_dimension() {
    const std::string_view word = parse_word();
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc{} || end != word.data() + word.size() || value < 0) {
      refuse(name_, "the shape holds " + quote(word), "whole numbers from 0 to 9223372036854775807 are allowed");
    }
    return value;
  }

  // A bare run of characters, up to what may follow a value.
  std::string_view parse_word() {
    skip_spaces();
    const std::string_view word = text_.substr(0, text_.find_first_of(" \t\r\n,:(){}[]'\""));
    if (word.empty()) fail("a value");
    text_.remove_prefix(word.size());
    return word;
  }

  std::string_view parse_string() {
    skip_spaces();
    if (!text_.starts_with('\'') && !text_.starts_with('"')) fail("a string");
    const std::size_t end = text_.find(text_[0], 1);
    if (end == std::string_view::npos) fail("a closed string");
    const std::string_view content = text_.substr(1, end - 1);
    if (content.find('\\') != std::string_view::npos) fail("a string without backslashes");
    text_.remove_prefix(end + 1);
    return content;
  }

  void skip_spaces() { text_.remove_prefix(std::min(text_.find_first_not_of(" \t\r\n"), text_.size())); }

  bool accept(char character) {
    skip_spaces();
    if (!text_.starts_with(character)) return false;
    text_.remove_prefix(1);
    return true;
  }

  void expect(char character) {
    if (!accept(character)) fail(quote({&character, 1}));
  }

  [[noreturn]] void fail(const std::string& expected) {
    const std::string found = text_.empty() ? "ends" : "continues with " + quote(text_);
    refuse(name_, "the header " + found + " where " + (expected == "text" ? "it should end" : expected + " should be"),
           kNeedHeader);
  }

  std::string_view text_;  // what is still to be read
  const std::string& name_;
  std::optional<std::string> descr_;
  std::optional<bool> fortran_order_;
  std::optional<std::vector<std::int64_t>> shape_;
};

struct Layout {
  ElementType type;
  bool big_endian;
};

std::optional<Layout> parse_type(std::string_view descr) {
  char order = '=';
  if (!descr.empty() && std::string_view("<>=|").find(descr[0]) != std::string_view::npos) {
    order = descr[0];
    descr.remove_prefix(1);
  }
  for (const auto& [type, code] : kTypeCodes) {
    if (code != descr) continue;
    if (order == '|' && size_of(type) > 1) return std::nullopt;
    return Layout{type, order == '>'};
  }
  return std::nullopt;
}

// The length of the header in bytes, and where it begins: behind a length of 2 bytes in version 1.0, of 4 later.
struct HeaderPlace {
  std::size_t begin;
  std::size_t size;
};

HeaderPlace find_header(std::string_view text, const std::string& name) {
  constexpr std::size_t kLengthAt = 8;
  if (text.empty()) refuse(name, "is empty", kNeedNpy);
  if (text.substr(0, kMagic.size()) != kMagic) {
    refuse(name, "begins with " + quote(text.substr(0, kMagic.size())), kNeedNpy);
  }
  if (text.size() < kLengthAt) refuse(name, "ends after " + std::to_string(text.size()) + " bytes", kNeedNpy);
  const int major = static_cast<unsigned char>(text[6]);
  const int minor = static_cast<unsigned char>(text[7]);
  if (major < 1 || major > 3 || minor != 0) {
    refuse(name, "has version " + std::to_string(major) + "." + std::to_string(minor), kNeedNpy);
  }
  const std::size_t begin = kLengthAt + (major == 1 ? 2 : 4);
  if (text.size() < begin) refuse(name, "ends after " + std::to_string(text.size()) + " bytes", kNeedNpy);
  std::size_t size = 0;
  for (std::size_t at = begin; at-- > kLengthAt;) size = size * 256 + static_cast<unsigned char>(text[at]);
  if (size > kMaxNpyHeaderBytes) {
    refuse(name, "has a header of " + std::to_string(size) + " bytes",
           "at most " + std::to_string(kMaxNpyHeaderBytes) + " are allowed");
  }
  if (size > text.size() - begin) {
    refuse(name,
           "has a header of " + std::to_string(size) + " bytes of which " + std::to_string(text.size() - begin) +
               " are there",
           "a file that was not cut short is needed");
  }
  return {begin, size};
}

// The first index runs fastest in `data`; the last index runs fastest in the result.
std::vector<std::byte> to_c_order(const std::vector<std::byte>& data, std::span<const std::int64_t> shape,
                                  std::size_t element_size) {
  std::array<std::size_t, kMaxRank> stride{};  // bytes, of the result
  std::array<std::size_t, kMaxRank> index{};
  std::size_t next_stride = element_size;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    stride[axis] = next_stride;
    next_stride *= static_cast<std::size_t>(shape[axis]);
  }
  std::vector<std::byte> result(data.size());
  std::size_t target = 0;
  for (std::size_t source = 0; source < data.size(); source += element_size) {
    std::memcpy(result.data() + target, data.data() + source, element_size);
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      target += stride[axis];
      if (++index[axis] < static_cast<std::size_t>(shape[axis])) break;
      target -= stride[axis] * index[axis];
      index[axis] = 0;
    }
  }
  return result;
}

void reverse_bytes_of_elements(std::vector<std::byte>& data, std::size_t element_size) {
  for (std::size_t at = 0; at < data.size(); at += element_size) {
    std::reverse(data.data() + at, data.data() + at + element_size);
  }
}

Tensor parse_bytes(std::span<const std::byte> bytes, const std::string& name) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const HeaderPlace place = find_header(text, name);
  Header header = HeaderParser(text.substr(place.begin, place.size), name).parse();
  const auto layout = parse_type(header.descr);
  if (!layout) refuse(name, "has dtype " + quote(header.descr), kAllowedTypes);

  const auto expected = byte_count(layout->type, header.shape);
  const std::string described = "shape " + shape_tuple(header.shape) + " of " + quote(header.descr);
  if (!expected) refuse(name, described + " is too large", "at most 9223372036854775807 bytes are allowed");
  const auto data = bytes.subspan(place.begin + place.size);
  if (data.size() != static_cast<std::size_t>(*expected)) {
    refuse(name, "has " + std::to_string(data.size()) + " bytes of data",
           described + " needs exactly " + std::to_string(*expected));
  }

  Tensor tensor{layout->type, std::move(header.shape), {data.begin(), data.end()}};
  if (layout->big_endian) reverse_bytes_of_elements(tensor.data, size_of(tensor.type));
  if (header.fortran_order && tensor.shape.size() > 1) {
    tensor.data = to_c_order(tensor.data, tensor.shape, size_of(tensor.type));
  }
  normalise_booleans(tensor);
  return tensor;
}

std::string descr_of(ElementType type) {
  const auto entry =
      std::find_if(kTypeCodes.begin(), kTypeCodes.end(), [&](const TypeCode& code) { return code.type == type; });
  return (size_of(type) == 1 ? "|" : "<") + std::string(entry->code);
}

// bf16 is the upper half of an f32.
std::vector<std::byte> widen_bf16(const std::vector<std::byte>& data) {
  std::vector<std::byte> result(2 * data.size());
  for (std::size_t at = 0; at < data.size(); at += 2) {
    result[2 * at + 2] = data[at];
    result[2 * at + 3] = data[at + 1];
  }
  return result;
}

}  // namespace

Tensor read_npy(const std::filesystem::path& path) { return parse_npy(read_regular_file(path), path.string()); }

Tensor parse_npy(std::span<const std::byte> bytes, const std::string& name) {
  try {
    return parse_bytes(bytes, name);
  } catch (const std::bad_alloc&) {
    refuse(name, std::to_string(bytes.size()) + " bytes do not fit into memory twice", "a smaller file is needed");
  }
}

std::vector<std::byte> format_npy(const Tensor& tensor) {
  constexpr std::size_t kAlignment = 64;  // of the data, so that the file can be mapped
  constexpr std::size_t kPrefixBytes = 10;
  require_consistent(tensor);
  if (tensor.type == ElementType::bf16) {
    return format_npy(Tensor{ElementType::f32, tensor.shape, widen_bf16(tensor.data)});
  }
  std::string header = "{'descr': '" + descr_of(tensor.type) +
                       "', 'fortran_order': False, 'shape': " + shape_tuple(tensor.shape) + ", }";
  const std::size_t unpadded = kPrefixBytes + header.size() + 1;
  header.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  header += '\n';

  std::string prefix(kMagic);
  prefix += {'\x01', '\x00', static_cast<char>(header.size() % 256), static_cast<char>(header.size() / 256)};
  const std::string front = prefix + header;
  std::vector<std::byte> bytes(front.size() + tensor.data.size());
  std::memcpy(bytes.data(), front.data(), front.size());
  std::copy(tensor.data.begin(), tensor.data.end(), bytes.begin() + static_cast<std::ptrdiff_t>(front.size()));
  return bytes;
}

}  // namespace distr::cli
