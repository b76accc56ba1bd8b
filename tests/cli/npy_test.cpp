// SPDX-License-Identifier: Apache-2.0
// The .npy reader and writer: round trips, hand-made headers, and refusals that name the value.
#include "npy.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>

#include "file_bytes.h"

namespace distr::cli {
namespace {

using Shape = std::vector<std::int64_t>;

constexpr std::array kNpyTypes{ElementType::f16, ElementType::f32, ElementType::f64, ElementType::boolean,
                               ElementType::i8,  ElementType::i16, ElementType::i32, ElementType::i64,
                               ElementType::u8,  ElementType::u16, ElementType::u32, ElementType::u64};

// A file with this header, unpadded, and these data.
Bytes npy(const std::string& header, const std::string& data, int version = 1) {
  std::string file = "\x93NUMPY";
  file += static_cast<char>(version);
  file += '\0';
  const int length_bytes = version == 1 ? 2 : 4;
  for (int at = 0; at < length_bytes; ++at) file += static_cast<char>(header.size() >> (8 * at) & 255);
  return bytes_of(file + header + data);
}

Bytes npy_of(const std::string& descr, const std::string& shape, const std::string& data,
             const std::string& fortran_order = "False") {
  return npy("{'descr': " + descr + ", 'fortran_order': " + fortran_order + ", 'shape': " + shape + "}", data);
}

// The message; empty if nothing was thrown.
std::string npy_refusal(const Bytes& bytes) {
  try {
    (void)parse_npy(bytes, "in.npy");
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

void expect_npy_refusal(const Bytes& bytes, const std::vector<std::string>& parts) {
  expect_refusal_with(npy_refusal(bytes), "in.npy", parts);
}

void expect_same(const Tensor& left, const Tensor& right) {
  EXPECT_EQ(left.type, right.type);
  EXPECT_EQ(left.shape, right.shape);
  EXPECT_EQ(left.data, right.data);
}

const std::vector<Shape> kShapes{{},        {1},    {5},          {2, 3},          {0},
                                 {3, 0, 2}, {1, 1}, {2, 3, 4, 5}, {2, 1, 3, 1, 2}, {1, 2, 1, 2, 1, 2, 1, 2}};

TEST(Npy, RoundTripsEveryTypeAndRank) {
  unsigned seed = 1;
  for (const ElementType type : kNpyTypes) {
    for (const Shape& shape : kShapes) {
      const Tensor tensor = random_tensor(type, shape, seed++);
      const Bytes file = format_npy(tensor);
      expect_same(parse_npy(file, "x"), tensor);
      EXPECT_EQ((file.size() - tensor.data.size()) % 64, 0U);
    }
  }
}

TEST(Npy, WritesWhatNumpyWrites) {
  const Tensor tensor{ElementType::f32, {2}, bytes_of(std::string("\0\0\x80\x3f\0\0\0\x40", 8))};
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
  const std::string padded = header + std::string(128 - 10 - 1 - header.size(), ' ') + "\n";
  EXPECT_EQ(string_of(format_npy(tensor)), string_of(npy(padded, string_of(tensor.data))));
  const std::string flags = string_of(format_npy({ElementType::boolean, {}, Bytes(1)}));
  EXPECT_NE(flags.find("'|b1'"), std::string::npos);
  EXPECT_NE(flags.find("'shape': (), }"), std::string::npos);
}

TEST(Npy, WidensBf16Exactly) {
  const Bytes bf16 = bytes_of(std::string("\x80\x3f\x49\xc0\x80\x7f", 6));  // 1, -3.140625, infinity
  const Tensor read = parse_npy(format_npy({ElementType::bf16, {3}, bf16}), "x");
  ASSERT_EQ(read.type, ElementType::f32);
  std::array<float, 3> values{};
  ASSERT_EQ(read.data.size(), sizeof values);
  std::memcpy(values.data(), read.data.data(), sizeof values);
  EXPECT_EQ(values, (std::array{1.0F, -3.140625F, std::numeric_limits<float>::infinity()}));
}

TEST(Npy, RefusesToWriteAContradiction) {
  EXPECT_THROW((void)format_npy({ElementType::f32, {2}, Bytes(7)}), std::invalid_argument);
  EXPECT_THROW((void)format_npy({ElementType::f32, {-1}, {}}), std::invalid_argument);
  EXPECT_THROW((void)format_npy({ElementType::u8, Shape(9, 1), Bytes(1)}), std::invalid_argument);
}

TEST(Npy, ReadsEveryByteOrder) {
  const std::string little("\x01\x02\x03\x04\x05\x06\x07\x08", 8);
  const std::string big("\x04\x03\x02\x01\x08\x07\x06\x05", 8);
  for (const std::string descr : {"'<f4'", "'=f4'", "'f4'", "\"<f4\""}) {
    expect_same(parse_npy(npy_of(descr, "(2,)", little), "x"), {ElementType::f32, {2}, bytes_of(little)});
  }
  expect_same(parse_npy(npy_of("'>f4'", "(2,)", big), "x"), {ElementType::f32, {2}, bytes_of(little)});
  expect_same(parse_npy(npy_of("'>u2'", "(1,)", "ab"), "x"), {ElementType::u16, {1}, bytes_of("ba")});
  expect_same(parse_npy(npy_of("'>i8'", "()", "abcdefgh"), "x"), {ElementType::i64, {}, bytes_of("hgfedcba")});
  for (const std::string descr : {"'|i1'", "'<i1'", "'>i1'", "'=i1'", "'i1'"}) {
    expect_same(parse_npy(npy_of(descr, "(2,)", "ab"), "x"), {ElementType::i8, {2}, bytes_of("ab")});
  }
}

TEST(Npy, BooleansBecomeZeroOrOne) {
  const Tensor tensor = parse_npy(npy_of("'|b1'", "(4,)", std::string("\0\1\2\xff", 4)), "x");
  EXPECT_EQ(string_of(tensor.data), std::string("\0\1\1\1", 4));
}

// Writes the elements with the first index fastest, by the definition.
std::string fortran_bytes(const Tensor& tensor) {
  const std::size_t size = size_of(tensor.type);
  std::string result(tensor.data.size(), '\0');
  for (std::size_t element = 0; element < tensor.data.size() / size; ++element) {
    std::size_t rest = element;  // C order: the last index is the remainder
    Shape index(tensor.shape.size());
    for (std::size_t axis = tensor.shape.size(); axis-- > 0;) {
      const auto length = static_cast<std::size_t>(tensor.shape[axis]);
      index[axis] = static_cast<std::int64_t>(rest % length);
      rest /= length;
    }
    std::size_t place = 0;
    for (std::size_t axis = tensor.shape.size(); axis-- > 0;) {
      place = place * static_cast<std::size_t>(tensor.shape[axis]) + static_cast<std::size_t>(index[axis]);
    }
    std::memcpy(result.data() + place * size, tensor.data.data() + element * size, size);
  }
  return result;
}

TEST(Npy, ReadsFortranOrder) {
  expect_same(parse_npy(npy_of("'u1'", "(2, 3)", "abcdef", "True"), "x"),
              {ElementType::u8, {2, 3}, bytes_of("acebdf")});
  const std::vector<std::pair<Shape, std::string>> shapes{{{}, "()"},
                                                          {{4}, "(4,)"},
                                                          {{2, 3}, "(2, 3)"},
                                                          {{2, 3, 4}, "(2,3,4)"},
                                                          {{3, 1, 2}, "(3,1,2)"},
                                                          {{2, 0}, "(2, 0)"},
                                                          {{2, 3, 4, 5}, "(2,3,4,5)"}};
  unsigned seed = 100;
  for (const auto& [shape, text] : shapes) {
    for (const auto& [type, descr] : {std::pair{ElementType::f16, "'<f2'"}, std::pair{ElementType::f64, "'<f8'"}}) {
      const Tensor tensor = random_tensor(type, shape, seed++);
      expect_same(parse_npy(npy_of(descr, text, fortran_bytes(tensor), "True"), "x"), tensor);
    }
  }
  expect_same(parse_npy(npy_of("'>u2'", "(2, 2)", "abcdefgh", "True"), "x"),
              {ElementType::u16, {2, 2}, bytes_of("bafedchg")});
}

TEST(Npy, ReadsVersions2And3) {
  const std::string header = "{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }";
  for (const int version : {1, 2, 3}) {
    expect_same(parse_npy(npy(header + "   \n", "ab", version), "x"), {ElementType::u8, {2}, bytes_of("ab")});
  }
  const std::string padded = header + std::string(70'000, ' ') + "\n";  // longer than version 1.0 allows
  expect_same(parse_npy(npy(padded, "ab", 2), "x"), {ElementType::u8, {2}, bytes_of("ab")});
}

TEST(Npy, ReadsEverySpellingOfTheHeader) {
  for (const std::string header : {R"({"shape":(2,),"descr":"u1","fortran_order":False})",
                                   "  { 'fortran_order' : False , 'shape' : ( 2 , ) , 'descr' : 'u1' , }  \n",
                                   "{'shape':(2,),\n\t'fortran_order':False,\r\n'descr':'u1',}"}) {
    expect_same(parse_npy(npy(header, "ab"), "x"), {ElementType::u8, {2}, bytes_of("ab")});
  }
  expect_same(parse_npy(npy_of("'u1'", "(1, 2,)", "ab"), "x"), {ElementType::u8, {1, 2}, bytes_of("ab")});
}

TEST(Npy, RefusesOtherFiles) {
  expect_npy_refusal({}, {"is empty"});
  expect_npy_refusal(bytes_of("PK\x03\x04 and so on"), {"'PK\\x03\\x04", ".npy"});
  expect_npy_refusal(bytes_of("\x93NUMPZ12345"), {"\\x93NUMPZ"});
  for (const int version : {0, 4, 255}) {
    expect_npy_refusal(npy("{}", "", version), {"version " + std::to_string(version) + ".0", "1.0, 2.0 or 3.0"});
  }
  Bytes minor = npy("{}", "");
  minor[7] = std::byte{1};
  expect_npy_refusal(minor, {"version 1.1"});
}

TEST(Npy, RefusesHeaderLengths) {
  const Bytes beyond = bytes_of(std::string("\x93NUMPY\x01\x00\x64\x00{}", 12));
  expect_npy_refusal(beyond, {"100 bytes", "of which 2 are there"});
  const Bytes huge = bytes_of(std::string("\x93NUMPY\x02\x00\x01\x00\x10\x00{}", 14));
  expect_npy_refusal(huge, {"1048577", "at most 1048576"});
  expect_npy_refusal(bytes_of(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{}", 14)), {"4294967295"});
}

TEST(Npy, RefusesTypes) {
  for (const std::string descr : {"|O", "O", "<c8", "<c16", "<U5",  "|S3",     "|V4", "<M8[ns]", "<f3", "f16",
                                  "<f", "",  "<",   "|f4",  "<<f4", "float32", "F4",  "<f4 ",    "b2",  "?"}) {
    expect_npy_refusal(npy_of("'" + descr + "'", "(1,)", "abcd"), {"'" + descr + "'", "allowed are f2, f4"});
  }
  expect_npy_refusal(npy_of("[('x', '<f4'), ('y', '<i4')]", "(1,)", "abcdefgh"), {"structured", "[('x', '<f4')"});
  expect_npy_refusal(npy_of("('<f4', (2,))", "(1,)", "abcdefgh"), {"structured"});
  expect_npy_refusal(npy_of("'" + std::string(5000, 'z') + "'", "(1,)", ""), {"zzz...'"});
  expect_npy_refusal(npy_of("'\n\x01\xff'", "(1,)", ""), {R"('\x0a\x01\xff')"});
}

TEST(Npy, RefusesShapes) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"(-1,)", "'-1'"},
      {"(2, -9223372036854775808)", "'-9223372036854775808'"},
      {"(9223372036854775808,)", "'9223372036854775808'"},
      {"(99999999999999999999999999, 2)", "'99999999999999999999999999'"},
      {"(1.5,)", "'1.5'"},
      {"(3L,)", "'3L'"},
      {"(+3,)", "'+3'"},
      {"(True,)", "'True'"},
      {"(1e3,)", "'1e3'"},
      {"(3)", "(3)"},
      {"3", "'('"},
      {"[3]", "'('"},
      {"(3", "')'"},
      {"(3,, 4)", "a value"},
      {"(,)", "a value"},
      {"(3 4)", "')'"},
      {"((3,),)", "a value"},
      {"'3'", "'('"},
      {"(1, 1, 1, 1, 1, 1, 1, 1, 1)", "more than 8"},
      {"(4611686018427387904, 2)", "too large"},
      {"(9223372036854775807, 9223372036854775807, 0)", "too large"},
      {"(2305843009213693952,)", "too large"}};
  for (const auto& [shape, part] : cases) expect_npy_refusal(npy_of("'<f4'", shape, "abcdefgh"), {part});
}

TEST(Npy, RefusesTheWrongNumberOfBytes) {
  expect_npy_refusal(npy_of("'<f4'", "(2, 3)", std::string(23, 'x')), {"23 bytes", "(2, 3)", "'<f4'", "exactly 24"});
  expect_npy_refusal(npy_of("'<f4'", "(2, 3)", std::string(25, 'x')), {"25 bytes", "exactly 24"});
  expect_npy_refusal(npy_of("'<f4'", "()", ""), {"0 bytes", "()", "exactly 4"});
  expect_npy_refusal(npy_of("'<f4'", "(0,)", "x"), {"1 bytes", "(0,)", "exactly 0"});
  expect_npy_refusal(npy_of("'<f8'", "(1000000000000,)", "x"), {"exactly 8000000000000"});
}

TEST(Npy, RefusesMalformedHeaders) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "ends"},
      {"{}", "'descr'"},
      {"{'descr': 'u1'}", "'fortran_order'"},
      {"{'descr': 'u1', 'fortran_order': False}", "'shape'"},
      {"{'descr': 'u1', 'descr': 'u1'}", "'descr' twice"},
      {"{'shape': (), 'shape': ()}", "'shape' twice"},
      {"{'extra': 'u1'}", "'extra'"},
      {"{'descr' 'u1'}", "':'"},
      {"{'descr': u1}", "a string"},
      {"{'descr': 'u1", "closed"},
      {"{'descr': 'u\\x31'}", "backslash"},
      {"{'descr': None}", "a string"},
      {"{'fortran_order': false}", "'false'"},
      {"{'fortran_order': 0}", "'0'"},
      {"{'fortran_order': }", "a value"},
      {"{,}", "a string"},
      {"[('descr', 'u1')]", "'{'"},
      {"{'descr': 'u1', 'fortran_order': False, 'shape': ()} x", "should end"},
      {"{'descr': 'u1', 'fortran_order': False, 'shape': ()}}", "should end"},
      {"{'descr': 'u1', 'fortran_order': False, 'shape': (),,}", "a string"},
      {"{'descr': 'u1' 'fortran_order': False}", "'}'"},
      {std::string("{'descr': 'u1'\0}", 16), "\\x00"},
      {std::string(100'000, '('), "'{'"}};
  for (const auto& [header, part] : cases) expect_npy_refusal(npy(header, "a", 2), {part});
}

TEST(Npy, RefusesEveryTruncation) {
  for (const int version : {1, 2}) {
    const Bytes whole =
        npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }  \n", std::string(24, 'x'), version);
    EXPECT_EQ(npy_refusal(whole), "");
    for (std::size_t size = 0; size < whole.size(); ++size) {
      expect_npy_refusal({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}, {});
    }
  }
}

TEST(Npy, SurvivesDamage) {
  std::mt19937 generator(7);
  const Bytes whole = format_npy(random_tensor(ElementType::f32, {2, 3}, 3));
  for (int round = 0; round < 20'000; ++round) {
    Bytes damaged = whole;
    const auto flips = 1 + generator() % 4;
    for (std::size_t flip = 0; flip < flips; ++flip) {
      damaged[generator() % damaged.size()] ^= static_cast<std::byte>(1U << (generator() % 8));
    }
    try {
      const Tensor tensor = parse_npy(damaged, "x");
      require_consistent(tensor);
    } catch (const InputError&) {
    }
  }
}

class NpyFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "npy_test.XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static std::string refusal_of(const std::filesystem::path& path) {
    try {
      (void)read_npy(path);
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  }

  std::filesystem::path folder_;
};

TEST_F(NpyFiles, ReadsAFile) {
  const Tensor tensor = random_tensor(ElementType::f64, {100, 200}, 5);
  const Bytes bytes = format_npy(tensor);
  std::ofstream(folder_ / "a.npy", std::ios::binary) << string_of(bytes);
  expect_same(read_npy(folder_ / "a.npy"), tensor);
  std::filesystem::create_symlink("a.npy", folder_ / "link.npy");
  expect_same(read_npy(folder_ / "link.npy"), tensor);
}

TEST_F(NpyFiles, RefusesWhatIsNoFile) {
  const auto pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::ofstream(folder_ / "empty.npy") << "";
  const std::vector<std::pair<std::filesystem::path, std::string>> cases{
      {folder_ / "none.npy", "No such file"},
      {folder_, "is a folder"},
      {pipe, "pipe"},
      {folder_ / "empty.npy", "is empty"},
      {"", "No such file"},
      {"/dev/zero", "device"},
      {folder_ / "empty.npy" / "x", "Not a directory"}};
  for (const auto& [path, part] : cases) {
    const std::string message = refusal_of(path);
    EXPECT_TRUE(message.starts_with(path.string() + ": ")) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_EQ(refusal_of("no\nsuch\tfile").find('\n'), std::string::npos);
}

TEST(Tensor, NamesAndSizes) {
  EXPECT_STREQ(name_of(ElementType::boolean), "bool");
  EXPECT_STREQ(name_of(ElementType::bf16), "bf16");
  EXPECT_STREQ(name_of(ElementType::u64), "u64");
  EXPECT_EQ(size_of(ElementType::bf16), 2U);
  EXPECT_EQ(size_of(ElementType::boolean), 1U);
  EXPECT_EQ(size_of(ElementType::u64), 8U);
}

}  // namespace
}  // namespace distr::cli
