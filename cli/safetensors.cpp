// SPDX-License-Identifier: Apache-2.0
// Reads and writes the .safetensors format.
#include "safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

namespace distr::cli {
namespace {

using HeaderJson = nlohmann::json;

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kMetadataKey = "__metadata__";
constexpr const char* kNeedSafetensors = "a .safetensors file is needed";
constexpr const char* kNeedEntry = "dtype, shape and data_offsets are allowed and needed";
constexpr const char* kNeedContiguous = "tensors must follow each other without holes and overlaps";

// In the order of ElementType.
constexpr std::array<std::string_view, kElementTypeCount> kTypeNames{"F16", "BF16", "F32", "F64", "BOOL", "I8", "I16",
                                                                     "I32", "I64",  "U8",  "U16", "U32",  "U64"};

struct Entry {
  std::string key;
  Tensor tensor;  // data still empty
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string excerpt(const HeaderJson& value) {
  return quote(value.dump(-1, ' ', false, HeaderJson::error_handler_t::replace));
}

std::string_view find_header_text(std::string_view file, const std::string& name) {
  if (file.empty()) refuse(name, "is empty", kNeedSafetensors);
  if (file.size() < kLengthBytes) refuse(name, "has " + std::to_string(file.size()) + " bytes", kNeedSafetensors);
  std::uint64_t size = 0;
  std::memcpy(&size, file.data(), kLengthBytes);
  if (size > kMaxHeaderBytes) {
    refuse(name, "has a header of " + std::to_string(size) + " bytes",
           "at most " + std::to_string(kMaxHeaderBytes) + " are allowed");
  }
  if (size > file.size() - kLengthBytes) {
    refuse(name,
           "has a header of " + std::to_string(size) + " bytes of which " + std::to_string(file.size() - kLengthBytes) +
               " are there",
           "a file that was not cut short is needed");
  }
  const std::string_view header = file.substr(kLengthBytes, size);
  if (!header.starts_with('{')) {
    refuse(name, "has a header that begins with " + quote(header.substr(0, 8)), "a JSON object is needed");
  }
  // The JSON parser would take a zero byte for the end, and ignore the rest.
  if (header.find('\0') != std::string_view::npos) {
    refuse(name, "has a zero byte in its header", "a JSON object is needed");
  }
  return header;
}

// The JSON parser would keep the last of equal keys, and would follow any nesting: so these are refused before it runs.
// What is no JSON is left to it.
class HeaderCheck final : public nlohmann::json_sax<HeaderJson> {
 public:
  explicit HeaderCheck(const std::string& name) : name_(name) {}

  bool start_object(std::size_t /*elements*/) override {
    open();
    keys_[depth_].clear();
    return true;
  }
  bool key(std::string& value) override {
    if (!keys_[depth_].insert(value).second) {
      refuse(name_, "has the key " + excerpt(value) + " twice", "each key is allowed once");
    }
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*elements*/) override { return open(); }
  bool end_array() override { return close(); }
  bool null() override { return true; }
  bool boolean(bool /*value*/) override { return true; }
  bool number_integer(std::int64_t /*value*/) override { return true; }
  bool number_unsigned(std::uint64_t /*value*/) override { return true; }
  bool number_float(double /*value*/, const std::string& /*text*/) override { return true; }
  bool string(std::string& /*value*/) override { return true; }
  bool binary(HeaderJson::binary_t& /*value*/) override { return true; }
  bool parse_error(std::size_t /*byte*/, const std::string& /*token*/,
                   const HeaderJson::exception& /*error*/) override {
    return false;
  }

 private:
  bool open() {
    if (++depth_ >= keys_.size()) {
      refuse(name_, "has a header that is nested too deep", "tensors with dtype, shape and data_offsets are allowed");
    }
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  const std::string& name_;
  std::size_t depth_ = 0;
  std::array<std::set<std::string>, 4> keys_;  // of the objects now open, by their depth
};

HeaderJson parse_header(std::string_view header, const std::string& name) {
  HeaderCheck check(name);
  static_cast<void>(HeaderJson::sax_parse(header.begin(), header.end(), &check));
  try {
    return HeaderJson::parse(header.begin(), header.end());
  } catch (const HeaderJson::parse_error& error) {
    refuse(name, "has a header that is no JSON at byte " + std::to_string(error.byte), "a JSON object is needed");
  } catch (const HeaderJson::exception&) {
    refuse(name, "has a header with a number that is too large", "a JSON object is needed");
  }
}

std::vector<std::int64_t> parse_integers(const HeaderJson& list, const std::string& what, const std::string& name) {
  constexpr auto kMaximum = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!list.is_array()) refuse(name, what + " is " + excerpt(list), "a list of whole numbers is needed");
  std::vector<std::int64_t> result;
  for (const HeaderJson& element : list) {
    if (!element.is_number_unsigned() || element.get<std::uint64_t>() > kMaximum) {
      refuse(name, what + " holds " + excerpt(element), "whole numbers from 0 to 9223372036854775807 are allowed");
    }
    result.push_back(element.get<std::int64_t>());
  }
  return result;
}

ElementType parse_type(const HeaderJson& value, const std::string& what, const std::string& name) {
  if (value.is_string()) {
    const auto found = std::find(kTypeNames.begin(), kTypeNames.end(), value.get_ref<const std::string&>());
    if (found != kTypeNames.end()) return static_cast<ElementType>(found - kTypeNames.begin());
  }
  std::string allowed;
  for (const std::string_view type : kTypeNames) allowed += " " + std::string(type);
  refuse(name, what + " is " + (value.is_string() ? quote(value.get<std::string>()) : excerpt(value)),
         "allowed are" + allowed);
}

Entry parse_entry(const std::string& key, const HeaderJson& value, std::int64_t data_bytes, const std::string& name) {
  const std::string tensor_name = "tensor " + quote(key);
  if (!value.is_object()) refuse(name, tensor_name + " is " + excerpt(value), kNeedEntry);
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(field)) refuse(name, tensor_name + " lacks " + field, kNeedEntry);
  }
  for (const auto& [field, ignored] : value.items()) {
    if (field != "dtype" && field != "shape" && field != "data_offsets") {
      refuse(name, tensor_name + " has the key " + quote(field), kNeedEntry);
    }
  }
  Entry entry;
  entry.key = key;
  entry.tensor.type = parse_type(value["dtype"], "dtype of " + tensor_name, name);
  entry.tensor.shape = parse_integers(value["shape"], "shape of " + tensor_name, name);
  const auto offsets = parse_integers(value["data_offsets"], "data_offsets of " + tensor_name, name);
  if (entry.tensor.shape.size() > kMaxRank) {
    refuse(name, tensor_name + " has " + std::to_string(entry.tensor.shape.size()) + " dimensions",
           "at most 8 are allowed");
  }
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    refuse(name, "data_offsets of " + tensor_name + " are " + excerpt(value["data_offsets"]),
           "begin <= end <= " + std::to_string(data_bytes) + " is needed");
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  const auto expected = byte_count(entry.tensor.type, entry.tensor.shape);
  const std::string described = "shape " + shape_tuple(entry.tensor.shape) + " of " + name_of(entry.tensor.type);
  if (!expected) {
    refuse(name, tensor_name + " has " + described, "at most 9223372036854775807 bytes are allowed");
  }
  if (entry.end - entry.begin != *expected) {
    refuse(name, tensor_name + " has " + std::to_string(entry.end - entry.begin) + " bytes",
           described + " needs exactly " + std::to_string(*expected));
  }
  return entry;
}

void check_contiguous(std::vector<Entry>& entries, std::int64_t data_bytes, const std::string& name) {
  std::sort(entries.begin(), entries.end(), [](const Entry& left, const Entry& right) {
    return std::pair(left.begin, left.end) < std::pair(right.begin, right.end);
  });
  std::int64_t end = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != end) {
      refuse(name,
             "tensor " + quote(entry.key) + " begins at byte " + std::to_string(entry.begin) +
                 " where the data before it end at byte " + std::to_string(end),
             kNeedContiguous);
    }
    end = entry.end;
  }
  if (end != data_bytes) {
    refuse(name, "has " + std::to_string(data_bytes - end) + " bytes after the last tensor", kNeedContiguous);
  }
}

TensorMap parse_tensors(std::span<const std::byte> bytes, const std::string& name) {
  const std::string_view header_text = find_header_text(text_of(bytes), name);
  const auto data = bytes.subspan(kLengthBytes + header_text.size());
  const auto data_bytes = static_cast<std::int64_t>(data.size());
  const HeaderJson header = parse_header(header_text, name);
  std::vector<Entry> entries;
  for (const auto& [key, value] : header.items()) {
    if (key != kMetadataKey) entries.push_back(parse_entry(key, value, data_bytes, name));
  }
  check_contiguous(entries, data_bytes, name);

  TensorMap tensors;
  for (Entry& entry : entries) {
    const auto part =
        data.subspan(static_cast<std::size_t>(entry.begin), static_cast<std::size_t>(entry.end - entry.begin));
    entry.tensor.data.assign(part.begin(), part.end());
    normalise_booleans(entry.tensor);
    tensors.emplace(std::move(entry.key), std::move(entry.tensor));
  }
  return tensors;
}

// Wide types first: each tensor is then aligned to its type, as the format's own writer does it.
std::vector<const TensorMap::value_type*> in_file_order(const TensorMap& tensors) {
  std::vector<const TensorMap::value_type*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const auto* left, const auto* right) {
    return size_of(left->second.type) > size_of(right->second.type);
  });
  return order;
}

std::string dump_utf8(const HeaderJson& header) {
  try {
    return header.dump();
  } catch (const HeaderJson::type_error&) {
    throw std::invalid_argument("the name of a tensor must be UTF-8");
  }
}

}  // namespace

TensorMap read_safetensors(const std::filesystem::path& path) {
  return parse_safetensors(read_regular_file(path), path.string());
}

TensorMap parse_safetensors(std::span<const std::byte> bytes, const std::string& name) {
  try {
    return parse_tensors(bytes, name);
  } catch (const std::bad_alloc&) {
    refuse(name, std::to_string(bytes.size()) + " bytes do not fit into memory twice", "a smaller file is needed");
  }
}

std::vector<std::byte> format_safetensors(const TensorMap& tensors) {
  const auto order = in_file_order(tensors);
  HeaderJson header = HeaderJson::object();
  std::size_t end = 0;
  for (const auto* entry : order) {
    const auto& [key, tensor] = *entry;
    require_consistent(tensor);
    if (key == kMetadataKey) throw std::invalid_argument("a tensor cannot have the name __metadata__");
    const std::size_t begin = std::exchange(end, end + tensor.data.size());
    header[key] = {{"dtype", kTypeNames[static_cast<std::size_t>(tensor.type)]},
                   {"shape", tensor.shape},
                   {"data_offsets", {begin, end}}};
  }
  std::string text = dump_utf8(header);
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');  // aligns the data

  const std::uint64_t text_size = text.size();
  std::vector<std::byte> bytes(kLengthBytes + text.size() + end);
  std::memcpy(bytes.data(), &text_size, kLengthBytes);
  std::memcpy(bytes.data() + kLengthBytes, text.data(), text.size());
  auto next = bytes.begin() + static_cast<std::ptrdiff_t>(kLengthBytes + text.size());
  for (const auto* entry : order) next = std::copy(entry->second.data.begin(), entry->second.data.end(), next);
  return bytes;
}

}  // namespace distr::cli
