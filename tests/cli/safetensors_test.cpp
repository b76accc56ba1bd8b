// SPDX-License-Identifier: Apache-2.0
// The .safetensors reader and writer: round trips, hand-made headers, and refusals that name the value.
#include "safetensors.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <random>

#include "file_bytes.h"

namespace distr::cli {
namespace {

constexpr std::array kAllTypes{ElementType::f16,     ElementType::bf16, ElementType::f32, ElementType::f64,
                               ElementType::boolean, ElementType::i8,   ElementType::i16, ElementType::i32,
                               ElementType::i64,     ElementType::u8,   ElementType::u16, ElementType::u32,
                               ElementType::u64};

Bytes file_of(const std::string& header, const std::string& data, std::uint64_t header_size) {
  std::string length(8, '\0');
  std::memcpy(length.data(), &header_size, 8);
  return bytes_of(length + header + data);
}

Bytes file_of(const std::string& header, const std::string& data = "") { return file_of(header, data, header.size()); }

std::string entry(const std::string& key, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + key + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + ",\"data_offsets\":" + offsets + "}";
}

std::string safetensors_refusal(const Bytes& bytes) {
  try {
    (void)parse_safetensors(bytes, "in.st");
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

void expect_safetensors_refusal(const Bytes& bytes, const std::vector<std::string>& parts) {
  expect_refusal_with(safetensors_refusal(bytes), "in.st", parts);
}

void expect_same(const TensorMap& left, const TensorMap& right) {
  ASSERT_EQ(left.size(), right.size());
  for (const auto& [key, tensor] : left) {
    ASSERT_TRUE(right.contains(key)) << key;
    EXPECT_EQ(tensor.type, right.at(key).type);
    EXPECT_EQ(tensor.shape, right.at(key).shape);
    EXPECT_EQ(tensor.data, right.at(key).data);
  }
}

TensorMap every_type_and_rank() {
  const std::vector<std::vector<std::int64_t>> shapes{{}, {3}, {0}, {2, 0, 5}, {2, 3}, {1, 2, 1, 2, 1, 2, 1, 2}};
  TensorMap tensors;
  for (const ElementType type : kAllTypes) {
    for (const auto& shape : shapes) {
      tensors[name_of(type) + shape_tuple(shape)] = random_tensor(type, shape, static_cast<unsigned>(tensors.size()));
    }
  }
  return tensors;
}

TEST(Safetensors, RoundTripsEveryTypeAndRank) {
  const TensorMap tensors = every_type_and_rank();
  expect_same(parse_safetensors(format_safetensors(tensors), "x"), tensors);
  expect_same(parse_safetensors(format_safetensors({}), "x"), {});
  const TensorMap names{{"", random_tensor(ElementType::u8, {2}, 1)},
                        {"a\"b\\c\n\xc3\xa9", random_tensor(ElementType::f32, {1}, 2)}};
  expect_same(parse_safetensors(format_safetensors(names), "x"), names);
}

TEST(Safetensors, AlignsEachTensorToItsType) {
  const TensorMap tensors{{"a", random_tensor(ElementType::boolean, {3}, 1)},
                          {"b", random_tensor(ElementType::f64, {1}, 2)},
                          {"c", random_tensor(ElementType::f16, {3}, 3)}};
  const std::string file = string_of(format_safetensors(tensors));
  EXPECT_EQ(static_cast<unsigned char>(file[0]) % 8, 0);
  EXPECT_NE(file.find("\"data_offsets\":[0,8],\"dtype\":\"F64\""), std::string::npos) << file;
  EXPECT_NE(file.find("\"data_offsets\":[8,14],\"dtype\":\"F16\""), std::string::npos) << file;
  EXPECT_NE(file.find("\"data_offsets\":[14,17],\"dtype\":\"BOOL\""), std::string::npos) << file;
}

TEST(Safetensors, RefusesToWriteAContradiction) {
  EXPECT_THROW((void)format_safetensors({{"a", {ElementType::f32, {2}, Bytes(7)}}}), std::invalid_argument);
  EXPECT_THROW((void)format_safetensors({{"__metadata__", {ElementType::u8, {}, Bytes(1)}}}), std::invalid_argument);
  EXPECT_THROW((void)format_safetensors({{"\xff", {ElementType::u8, {}, Bytes(1)}}}), std::invalid_argument);
}

TEST(Safetensors, ReadsAHandMadeFile) {
  const std::string header = R"({"__metadata__":{"format":"pt"},)" + entry("late", "U8", "[2]", "[4,6]") + "," +
                             entry("early", "F32", "[]", "[0,4]") + "," + entry("none", "F32", "[0]", "[4,4]") + "}  ";
  expect_same(parse_safetensors(file_of(header, "abcdef"), "x"), {{"early", {ElementType::f32, {}, bytes_of("abcd")}},
                                                                  {"late", {ElementType::u8, {2}, bytes_of("ef")}},
                                                                  {"none", {ElementType::f32, {0}, {}}}});
  expect_same(parse_safetensors(file_of("{}"), "x"), {});
}

TEST(Safetensors, BooleansBecomeZeroOrOne) {
  const Bytes file = file_of("{" + entry("m", "BOOL", "[3]", "[0,3]") + "}", std::string("\0\2\xff", 3));
  EXPECT_EQ(string_of(parse_safetensors(file, "x").at("m").data), std::string("\0\1\1", 3));
}

TEST(Safetensors, RefusesHeaderLengths) {
  expect_safetensors_refusal({}, {"is empty"});
  expect_safetensors_refusal(bytes_of("1234567"), {"7 bytes"});
  expect_safetensors_refusal(file_of("{}", "", 3), {"3 bytes of which 2"});
  expect_safetensors_refusal(file_of("{}", "", 100'000'001), {"100000001", "at most 100000000"});
  expect_safetensors_refusal(file_of("{}", "", ~std::uint64_t{0}), {"18446744073709551615"});
  expect_safetensors_refusal(file_of("{}", "", std::uint64_t{1} << 63), {"9223372036854775808"});
  expect_safetensors_refusal(file_of("", ""), {"begins with ''"});
}

TEST(Safetensors, RefusesWhatIsNoJsonObject) {
  for (const std::string header : {"[]", "null", "1", " {}", "\xef\xbb\xbf{}", "\"{}\""}) {
    expect_safetensors_refusal(file_of(header), {"begins with"});
  }
  for (const std::string header : {"{", "{}}", "{} x", "{\"a\"}", "{'a':1}", "{\"a\":1,}", "{\"a\":}", "{\"\xff\":1}",
                                   "{\"a\":NaN}", "{/**/}", "{\"a\":\"\n\"}", R"({"a":"\ud800"})", "{,}"}) {
    expect_safetensors_refusal(file_of(header), {"no JSON at byte"});
  }
  expect_safetensors_refusal(file_of("{\"a\":1e999}"), {"too large"});
  expect_safetensors_refusal(file_of(std::string("{}\0 {}", 6)), {"zero byte"});
}

// In time that grows with the file, where its square would be minutes.
TEST(Safetensors, ReadsAHeaderOfManyTensors) {
  constexpr int kCount = DISTR_SANITIZED != 0 ? 10'000 : 100'000;
  std::string header = "{";
  for (int n = 0; n < kCount; ++n) {
    header += (n == 0 ? "" : ",") + entry("tensor " + std::to_string(n), "F32", "[0]", "[0,0]");
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse_safetensors(file_of(header + "}"), "x").size(), kCount);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Safetensors, RefusesDeepNesting) {
  constexpr int kDepth = 1'000'000;
  std::string objects;
  for (int level = 0; level < kDepth; ++level) objects += "{\"a\":";
  expect_safetensors_refusal(file_of(objects), {"nested too deep"});
  expect_safetensors_refusal(file_of("{\"a\":" + std::string(kDepth, '[')), {"nested too deep"});
  expect_safetensors_refusal(file_of(R"({"a":{"shape":[[1]]}})"), {"nested too deep"});
  expect_safetensors_refusal(file_of(R"({"__metadata__":{"a":{"b":{}}}})"), {"nested too deep"});
}

TEST(Safetensors, RefusesDuplicateKeys) {
  const std::string tensor = entry("a", "U8", "[0]", "[0,0]");
  expect_safetensors_refusal(file_of("{" + tensor + "," + tensor + "}"), {"\"a\"", "twice"});
  expect_safetensors_refusal(file_of("{" + tensor + "," + entry("\\u0061", "U8", "[0]", "[0,0]") + "}"),
                             {"\"a\"", "twice"});
  expect_safetensors_refusal(file_of(R"({"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}})"),
                             {"\"dtype\"", "twice"});
  expect_safetensors_refusal(file_of(R"({"__metadata__":{"x":"1","x":"2"}})"), {"\"x\"", "twice"});
  expect_safetensors_refusal(file_of(R"({"__metadata__":{},"__metadata__":{}})"), {"\"__metadata__\"", "twice"});
  // The same keys in different tensors are no duplicates.
  EXPECT_EQ(safetensors_refusal(file_of("{" + tensor + "," + entry("b", "U8", "[0]", "[0,0]") + "}")), "");
}

TEST(Safetensors, RefusesEntries) {
  for (const std::string value : {"1", "null", "[]", "\"F32\""}) {
    expect_safetensors_refusal(file_of("{\"w\":" + value + "}"), {"tensor 'w'", value});
  }
  expect_safetensors_refusal(file_of(R"({"w":{"dtype":"U8","shape":[0]}})"), {"'w' lacks data_offsets"});
  expect_safetensors_refusal(file_of("{\"w\":{}}"), {"'w' lacks dtype"});
  expect_safetensors_refusal(file_of(R"({"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1}})"), {"'w'", "'x'"});
  for (const std::string dtype : {"F8_E4M3", "F8_E5M2", "f32", "C64", "", "F32 "}) {
    expect_safetensors_refusal(file_of("{" + entry("w", dtype, "[4]", "[0,4]") + "}", "abcd"),
                               {"'w'", "'" + dtype + "'", "allowed are F16 BF16 F32"});
  }
  expect_safetensors_refusal(file_of(R"({"w":{"dtype":5,"shape":[0],"data_offsets":[0,0]}})"), {"dtype", "'5'"});
  const std::string long_name(5000, 'n');
  expect_safetensors_refusal(file_of("{" + entry(long_name, "F8_E4M3", "[4]", "[0,4]") + "}", "abcd"), {"nnn...'"});
  expect_safetensors_refusal(file_of("{" + entry("\xc3\xa9\\n", "F8_E4M3", "[4]", "[0,4]") + "}", "abcd"),
                             {R"('\xc3\xa9\x0a')"});
}

TEST(Safetensors, RefusesShapes) {
  const std::vector<std::pair<std::string, std::string>> cases{{"[-1]", "'-1'"},
                                                               {"[1.0]", "'1.0'"},
                                                               {"[\"1\"]", "1"},
                                                               {"[null]", "'null'"},
                                                               {"[true]", "'true'"},
                                                               {"4", "'4'"},
                                                               {"{}", "'{}'"},
                                                               {"[9223372036854775808]", "'9223372036854775808'"},
                                                               {"[18446744073709551616]", "1.8446744073709552e+19"},
                                                               {"[4611686018427387904,4]", "4611686018427387904"},
                                                               {"[9223372036854775807,9223372036854775807,0]", "most"},
                                                               {"[1,1,1,1,1,1,1,1,4]", "9 dimensions"}};
  for (const auto& [shape, part] : cases) {
    expect_safetensors_refusal(file_of("{" + entry("w", "U8", shape, "[0,4]") + "}", "abcd"), {"'w'", part});
  }
}

TEST(Safetensors, RefusesOffsets) {
  for (const std::string offsets : {"[0,5]", "[4,0]", "[0]", "[0,2,4]", "[]", "[0,9223372036854775807]"}) {
    expect_safetensors_refusal(file_of("{" + entry("w", "U8", "[4]", offsets) + "}", "abcd"),
                               {"'w'", offsets, "end <= 4"});
  }
  expect_safetensors_refusal(file_of("{" + entry("w", "U8", "[4]", "[-4,0]") + "}", "abcd"), {"'-4'"});
  expect_safetensors_refusal(file_of("{" + entry("w", "U8", "[4]", "[0.0,4]") + "}", "abcd"), {"'0.0'"});
  expect_safetensors_refusal(file_of("{" + entry("w", "U8", "[4]", "\"0,4\"") + "}", "abcd"), {"a list"});
  expect_safetensors_refusal(file_of("{" + entry("w", "F32", "[2]", "[0,4]") + "}", "abcd"),
                             {"4 bytes", "(2,)", "exactly 8"});
  expect_safetensors_refusal(file_of("{" + entry("w", "U8", "[3]", "[0,4]") + "}", "abcd"), {"4 bytes", "exactly 3"});
}

TEST(Safetensors, RefusesHolesAndOverlaps) {
  const auto two = [](const std::string& first, const std::string& second) {
    return file_of("{" + entry("a", "U8", "[2]", first) + "," + entry("b", "U8", "[2]", second) + "}", "abcdef");
  };
  expect_safetensors_refusal(two("[0,2]", "[3,5]"), {"'b'", "byte 3", "byte 2"});
  expect_safetensors_refusal(two("[0,2]", "[1,3]"), {"'b'", "byte 1", "byte 2"});
  expect_safetensors_refusal(two("[0,2]", "[0,2]"), {"byte 0", "byte 2"});
  expect_safetensors_refusal(two("[2,4]", "[4,6]"), {"'a'", "byte 2", "byte 0"});
  expect_safetensors_refusal(two("[0,2]", "[2,4]"), {"2 bytes after the last tensor"});
  expect_safetensors_refusal(file_of("{}", "x"), {"1 bytes after"});
  expect_safetensors_refusal(
      file_of("{" + entry("z", "U8", "[0]", "[1,1]") + "," + entry("a", "U8", "[2]", "[0,2]") + "}", "ab"), {"byte 2"});
}

TEST(Safetensors, RefusesEveryTruncation) {
  const Bytes whole = format_safetensors(
      {{"a", random_tensor(ElementType::f32, {2, 3}, 1)}, {"b", random_tensor(ElementType::boolean, {5}, 2)}});
  EXPECT_EQ(safetensors_refusal(whole), "");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    expect_safetensors_refusal({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}, {});
  }
  Bytes longer = whole;
  longer.push_back(std::byte{0});
  expect_safetensors_refusal(longer, {"1 bytes after"});
}

TEST(Safetensors, SurvivesDamage) {
  std::mt19937 generator(11);
  const Bytes whole = format_safetensors(
      {{"a", random_tensor(ElementType::f32, {2, 3}, 1)}, {"b", random_tensor(ElementType::i16, {5}, 2)}});
  for (int round = 0; round < 10'000; ++round) {
    Bytes damaged = whole;
    const auto flips = 1 + generator() % 3;
    for (std::size_t flip = 0; flip < flips; ++flip) {
      damaged[generator() % damaged.size()] ^= static_cast<std::byte>(1U << (generator() % 8));
    }
    try {
      for (const auto& [key, tensor] : parse_safetensors(damaged, "x")) require_consistent(tensor);
    } catch (const InputError&) {
    }
  }
}

TEST(Safetensors, ReadsFilesAndRefusesOthers) {
  std::string pattern = (std::filesystem::temp_directory_path() / "safetensors_test.XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const std::filesystem::path folder = pattern;
  const TensorMap tensors = every_type_and_rank();
  std::ofstream(folder / "a.safetensors", std::ios::binary) << string_of(format_safetensors(tensors));
  expect_same(read_safetensors(folder / "a.safetensors"), tensors);
  for (const auto& [path, part] : {std::pair{folder / "none", "No such file"}, std::pair{folder, "is a folder"},
                                   std::pair{std::filesystem::path("/dev/null"), "device"}}) {
    try {
      (void)read_safetensors(path);
      ADD_FAILURE() << path;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      EXPECT_TRUE(std::string(error.what()).starts_with(path.string() + ": ")) << error.what();
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace distr::cli
