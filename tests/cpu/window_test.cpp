// SPDX-License-Identifier: Apache-2.0
// Sliding windows on the CPU (method, 4); tests/cases.json has those that every backend is held to.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "kernel.h"
#include "support/oracle.h"

namespace distr {
namespace {

using test::Buffer;
using test::Case;
using test::Instance;

constexpr std::int64_t kTile = 128;    // of keys
constexpr std::int64_t kColumns = 64;  // a tile of fp32 is whole pages of memory, of up to 32 KiB
constexpr std::size_t kTileBytes = kTile * kColumns * sizeof(float);

Case square(std::int64_t rows, Causal causal) {
  return test::square(rows, kColumns, causal, {.strategy = Strategy::exact, .order_from = OrderFrom::own});
}

// A copy of [tiles * 128, 64] floats, of which the tiles first .. last - 1 alone can be read: another ends the program.
class GuardedTiles {
 public:
  GuardedTiles(const Buffer& source, std::int64_t tiles, std::int64_t first, std::int64_t last)
      : bytes_(static_cast<std::size_t>(tiles) * kTileBytes),
        memory_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) {
      throw std::bad_alloc();
    }
    auto* const at = static_cast<std::byte*>(memory_);
    std::copy_n(static_cast<const std::byte*>(source.data()), bytes_, at);
    const auto seal = [&](std::int64_t from, std::int64_t to) {
      EXPECT_EQ(::mprotect(at + static_cast<std::size_t>(from) * kTileBytes,
                           static_cast<std::size_t>(to - from) * kTileBytes, PROT_NONE),
                0);
    };
    seal(0, first);
    seal(last, tiles);
  }
  GuardedTiles(const GuardedTiles&) = delete;
  GuardedTiles& operator=(const GuardedTiles&) = delete;
  ~GuardedTiles() { ::munmap(memory_, bytes_); }

  [[nodiscard]] const void* data() const { return memory_; }

 private:
  std::size_t bytes_;
  void* memory_;
};

// 100 queries that stand beside the keys 1000 to 1099 of 2048 see 700 to 1199: the tiles 5 to 9.
TEST(CpuWindow, ReadsNoTileThatNoRowSees) {
  Case test_case = square(100, Causal::none);
  test_case.problem.seq_k = 16 * kTile;
  test_case.problem = contiguous(test_case.problem);
  test_case.problem.window_left = 300;
  test_case.problem.window_right = 100;
  test_case.problem.window_offset = 1000;
  const Problem& p = test_case.problem;
  Instance instance(test_case);
  ASSERT_EQ(test::check_forward(forward, instance), "");
  const GuardedTiles k(instance.k, 16, 5, 10);
  const GuardedTiles v(instance.v, 16, 5, 10);
  Buffer o = instance.output();
  Buffer lse = instance.lse_output();
  ForwardTensors tensors = instance.forward_into(o, lse);
  tensors.k = k.data();
  tensors.v = v.data();
  forward(p, test_case.grouping, tensors);
  EXPECT_TRUE(o == instance.o && lse == instance.lse);

  const auto gradients = [&](const void* keys, const void* values) {
    std::vector<float> result(static_cast<std::size_t>(p.seq_q + 2 * p.seq_k) * kColumns, -1);
    BackwardTensors of{
        instance.q_data(), keys, values, nullptr, instance.order.data(), instance.o.data(), instance.lse.data(),
        instance.o.data()};
    of.d_q = result.data();
    of.d_k = result.data() + p.seq_q * kColumns;
    of.d_v = result.data() + (p.seq_q + p.seq_k) * kColumns;
    backward(p, test_case.grouping, of);
    return result;
  };
  const std::vector<float> guarded = gradients(k.data(), v.data());
  EXPECT_EQ(guarded, gradients(instance.k_data(), instance.v_data()));
  const auto unseen = guarded.begin() + p.seq_q * kColumns;  // dK of the first 700 keys
  EXPECT_TRUE(std::all_of(unseen, unseen + 700 * kColumns, [](float x) { return x == 0; }));
  EXPECT_NE(*(unseen + 700 * kColumns), 0);
}

// O and LSE.
std::pair<Buffer, Buffer> attend(const Case& test_case) {
  Instance instance(test_case);
  forward(test_case.problem, test_case.grouping, instance.forward());
  return {instance.o, instance.lse};
}

TEST(CpuWindow, HasTheBitsOfCausalAttentionWhereItsRightSideIsThat) {
  for (const Causal causal : {Causal::top_left, Causal::bottom_right}) {
    Case expected = square(200, causal);
    expected.problem.seq_k = 300;
    expected.problem = contiguous(expected.problem);
    Case window = expected;
    window.problem.causal = Causal::none;
    window.problem.window_right = 0;
    window.problem.window_offset = causal == Causal::top_left ? 0 : 100;
    EXPECT_TRUE(attend(expected) == attend(window));
  }
}

TEST(CpuWindow, HasTheBitsOfNoWindowWhereItHidesNothing) {
  for (const Causal causal : {Causal::none, Causal::top_left}) {
    const Case expected = square(200, causal);
    Case window = expected;
    window.problem.window_left = window.problem.window_right = 199;
    EXPECT_TRUE(attend(expected) == attend(window));
    window.problem.window_left = 198;  // from the last row the first key
    EXPECT_FALSE(attend(expected) == attend(window));
  }
}

}  // namespace
}  // namespace distr
