// SPDX-License-Identifier: Apache-2.0
// Element types, and what the readers of files share: messages, sizes, and the bytes of a file.
#include "tensor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <new>
#include <system_error>

namespace distr::cli {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the readers and writers copy little-endian bytes as they are");

struct TypeInfo {
  const char* name;
  std::size_t size;
};

// In the order of ElementType.
constexpr std::array<TypeInfo, kElementTypeCount> kTypes{{{"f16", 2},
                                                          {"bf16", 2},
                                                          {"f32", 4},
                                                          {"f64", 8},
                                                          {"bool", 1},
                                                          {"i8", 1},
                                                          {"i16", 2},
                                                          {"i32", 4},
                                                          {"i64", 8},
                                                          {"u8", 1},
                                                          {"u16", 2},
                                                          {"u32", 4},
                                                          {"u64", 8}}};
static_assert(static_cast<std::size_t>(ElementType::u64) + 1 == kElementTypeCount);

constexpr std::size_t kMaxQuotedBytes = 60;

void append_escaped(std::string& result, char character) {
  constexpr const char* kDigits = "0123456789abcdef";
  const auto code = static_cast<unsigned char>(character);
  result += "\\x";
  result += kDigits[code / 16];
  result += kDigits[code % 16];
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  [[nodiscard]] int value() const { return value_; }

 private:
  int value_;
};

[[noreturn]] void refuse_to_read(const std::string& name, int error) {
  refuse(name, "cannot be read: " + std::generic_category().message(error), "a readable regular file is needed");
}

// `expected_size` only spares reallocations: the end of the file is where read() says so.
std::vector<std::byte> read_to_end(int descriptor, std::size_t expected_size, const std::string& name) {
  constexpr std::size_t kMinimumStep = 1 << 16;
  std::vector<std::byte> bytes(expected_size + 1);
  std::size_t used = 0;
  while (true) {
    if (used == bytes.size()) bytes.resize(bytes.size() + std::max(kMinimumStep, bytes.size() / 2));
    const ssize_t count = ::read(descriptor, bytes.data() + used, bytes.size() - used);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse_to_read(name, errno);
    if (count == 0) break;
    used += static_cast<std::size_t>(count);
  }
  bytes.resize(used);
  return bytes;
}

}  // namespace

std::size_t size_of(ElementType type) noexcept { return kTypes[static_cast<std::size_t>(type)].size; }

const char* name_of(ElementType type) noexcept { return kTypes[static_cast<std::size_t>(type)].name; }

void refuse(const std::string& name, const std::string& wrong, const std::string& allowed) {
  throw InputError(shortened(on_one_line(name)) + ": " + wrong + "; " + allowed);
}

std::string on_one_line(std::string_view text) {
  std::string result;
  for (const char character : text) {
    if (static_cast<unsigned char>(character) < 0x20 || character == 0x7f) {
      append_escaped(result, character);
    } else {
      result += character;
    }
  }
  return result;
}

std::string shortened(const std::string& text) {
  constexpr std::size_t kLongest = 400;
  if (text.size() <= kLongest) return text;
  const auto continues = [&](std::size_t at) { return (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80; };
  std::size_t head = kLongest / 2;
  std::size_t tail = text.size() - kLongest / 2;
  while (head > 0 && continues(head)) --head;  // to the beginning of a character of UTF-8
  while (tail > head && continues(tail)) --tail;
  return text.substr(0, head) + "[... " + std::to_string(tail - head) + " bytes ...]" + text.substr(tail);
}

std::string quote(std::string_view content) {
  std::string result = "'";
  for (const char character : content.substr(0, kMaxQuotedBytes)) {
    if (character >= 0x20 && character < 0x7f) {
      result += character;
    } else {
      append_escaped(result, character);
    }
  }
  return result + (content.size() > kMaxQuotedBytes ? "...'" : "'");
}

std::optional<std::int64_t> byte_count(ElementType type, std::span<const std::int64_t> shape) noexcept {
  auto product = static_cast<std::int64_t>(size_of(type));
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    if (dimension == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, dimension, &product)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : product;
}

std::string shape_tuple(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(shape[axis]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

void normalise_booleans(Tensor& tensor) noexcept {
  if (tensor.type != ElementType::boolean) return;
  for (std::byte& value : tensor.data) value = value == std::byte{0} ? std::byte{0} : std::byte{1};
}

void require_consistent(const Tensor& tensor) {
  const auto expected = byte_count(tensor.type, tensor.shape);
  if (tensor.shape.size() > kMaxRank || !expected || static_cast<std::size_t>(*expected) != tensor.data.size()) {
    throw std::invalid_argument("a tensor of shape " + shape_tuple(tensor.shape) + " and type " + name_of(tensor.type) +
                                " cannot hold " + std::to_string(tensor.data.size()) + " bytes");
  }
}

std::vector<std::byte> read_regular_file(const std::filesystem::path& path) {
  const std::string name = path.string();
  // O_NONBLOCK: to open a pipe that nobody writes to would wait for ever. Regular files ignore it.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (file.value() < 0) refuse_to_read(name, errno);
  struct stat status {};
  if (::fstat(file.value(), &status) != 0) refuse_to_read(name, errno);
  if (S_ISDIR(status.st_mode)) refuse(name, "is a folder", "a regular file is needed");
  if (!S_ISREG(status.st_mode)) refuse(name, "is a pipe, socket or device", "a regular file is needed");
  try {
    return read_to_end(file.value(), static_cast<std::size_t>(status.st_size), name);
  } catch (const std::bad_alloc&) {
    refuse(name, std::to_string(status.st_size) + " bytes do not fit into memory", "a smaller file is needed");
  } catch (const std::length_error&) {
    refuse(name, std::to_string(status.st_size) + " bytes do not fit into memory", "a smaller file is needed");
  }
}

}  // namespace distr::cli
