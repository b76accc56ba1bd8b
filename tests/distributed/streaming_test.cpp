// SPDX-License-Identifier: Apache-2.0
// Chunks through devices that do their work late and in threads: the answer of one call, whatever the chunks; what a
// device fails with; and that one device does not take all chunks.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "distr/stream.h"
#include "distributed/streaming.h"
#include "distributed/threaded_device.h"
#include "support/cases.h"
#include "support/failure.h"

namespace distr {
namespace {

using distributed::Chunk;
using distributed::Streaming;
using test::Buffer;
using test::Case;
using test::Fault;
using test::Instance;
using test::Seen;

struct Results {
  Buffer o, lse;
  std::vector<std::int32_t> halves;

  explicit Results(const Instance& instance)
      : o(instance.output()), lse(instance.lse_output()), halves(instance.halves.size(), -1) {}

  // What to stream.
  ForwardTensors tensors(const Instance& instance) {
    ForwardTensors tensors;
    tensors.q = instance.q_data();
    tensors.k = instance.k_data();
    tensors.v = instance.v_data();
    const Grouping& grouping = instance.test_case.grouping;
    const bool is_callers = traits(grouping.strategy).order == OrderSource::caller && grouping.group_size > 1;
    tensors.order = is_callers ? instance.order.data() : nullptr;
    tensors.o = o.data();
    tensors.lse = lse.data();
    tensors.halves = halves.empty() ? nullptr : halves.data();
    return tensors;
  }
  bool operator==(const Results& other) const = default;
};

// make_grouping() and forward().
Results one_call(Instance& instance) {
  const Problem& p = instance.test_case.problem;
  const Grouping& g = instance.test_case.grouping;
  const Plan forward = plan(Operation::forward, p, g);
  Results results(instance);
  ForwardTensors tensors = results.tensors(instance);
  if (forward.reads_order() && (tensors.order == nullptr || !instance.key_means.empty())) {
    make_grouping(p, g,
                  {tensors.q, tensors.k, tensors.order == nullptr ? instance.order.data() : nullptr,
                   instance.key_means.empty() ? nullptr : instance.key_means.data()});
  }
  tensors.order = instance.order.data();
  tensors.key_means = instance.key_means.data();
  forward.run(tensors);
  return results;
}

std::vector<std::unique_ptr<distributed::StreamDevice>> devices(std::vector<Seen>& seen,
                                                                const std::map<std::size_t, Fault>& faults = {}) {
  std::vector<std::unique_ptr<distributed::StreamDevice>> made;
  for (std::size_t n = 0; n < seen.size(); ++n) {
    const auto fault = faults.find(n);
    made.push_back(test::make_threaded_device("device " + std::to_string(n), seen[n],
                                              fault == faults.end() ? Fault{} : fault->second));
  }
  return made;
}

// Many heads, of few rows.
Case many_heads(Strategy strategy = Strategy::energy) {
  Case test_case;
  test_case.name = "many heads";
  Problem& p = test_case.problem;
  p.batch = 2;
  p.heads_q = 12;
  p.heads_kv = 6;
  p.seq_q = p.seq_k = 70;
  p.head_dim = p.head_dim_v = 16;
  p = contiguous(p);
  test_case.grouping.strategy = strategy;
  test_case.grouping.block = 32;
  return test_case;
}

bool is_streamed(const Case& test_case) {
  const Problem& p = test_case.problem;
  return p.mask.kind == MaskKind::none && !p.window_left.has_value() && !p.window_right.has_value();
}

TEST(Streaming, IsOneCallForEveryCase) {
  int streamed = 0;
  for (const auto* list : {&test::cases(), &test::near_cases()}) {
    for (const Case& test_case : *list) {
      if (!is_streamed(test_case)) {
        continue;
      }
      SCOPED_TRACE(test_case.name);
      Instance instance(test_case);
      const Results expected = one_call(instance);
      std::vector<Seen> seen(2);
      const std::int64_t sharing = test_case.problem.heads_q / test_case.problem.heads_kv;
      Streaming streaming(test_case.problem, test_case.grouping, sharing, devices(seen));
      Results results(instance);
      streaming.run(results.tensors(instance), StreamWork::all, {});
      EXPECT_EQ(results.o, expected.o);
      EXPECT_EQ(results.lse, expected.lse);
      EXPECT_EQ(results.halves, expected.halves);
      ++streamed;
    }
  }
  EXPECT_GT(streamed, 40);
}

TEST(Streaming, IsOneCallForEverySizeOfChunk) {
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh, Strategy::energy, Strategy::given}) {
    Case test_case = many_heads(strategy);
    test_case.grouping.window = 3;
    test_case.grouping.sinks = 1;
    Instance instance(test_case);
    const Results expected = one_call(instance);
    for (const std::int64_t heads : {0, 2, 4, 10, 12, 24, 100}) {
      for (const std::size_t count : {std::size_t{1}, std::size_t{3}}) {
        SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(count) + " devices");
        std::vector<Seen> seen(count);
        Streaming streaming(test_case.problem, test_case.grouping, heads, devices(seen));
        for (int run = 0; run < 2; ++run) {  // what one leaves behind, the next must not mind
          Results results(instance);
          streaming.run(results.tensors(instance), StreamWork::all, {});
          EXPECT_EQ(results, expected);
        }
      }
    }
  }
}

TEST(Streaming, TakesHeadsThatLieBesideEachOther) {
  Case test_case = many_heads();
  Problem& p = test_case.problem;
  p.heads_kv = p.heads_q;
  p.causal = Causal::top_left;
  p.q = p.k = p.v = p.o = {12 * 70 * 16, 16, 12 * 16};  // in memory [B, N, H, d]
  test_case.grouping.order_from = OrderFrom::previous;
  Instance instance(test_case);
  const Results expected = one_call(instance);
  std::vector<Seen> seen(2);
  Streaming streaming(p, test_case.grouping, 5, devices(seen));
  Results results(instance);
  streaming.run(results.tensors(instance), StreamWork::all, {});
  EXPECT_EQ(results, expected);
}

TEST(Streaming, ChunksCoverAllHeadsOnce) {
  Problem p = many_heads().problem;
  for (const std::int64_t batch : {1, 2, 7}) {
    p.batch = batch;
    for (const std::int64_t heads : {0, 2, 4, 6, 8, 10, 12, 13, 24, 30, 1000}) {
      std::set<std::pair<std::int64_t, std::int64_t>> covered;
      std::int64_t all = 0;
      for (const Chunk& chunk : distributed::chunks_of(p, heads, 2)) {
        EXPECT_TRUE(heads == 0 || chunk.batches * chunk.heads <= heads);
        EXPECT_EQ(chunk.heads % 2, 0);
        EXPECT_EQ(chunk.head % 2, 0);
        all += chunk.batches * chunk.heads;
        for (std::int64_t b = 0; b < chunk.batches; ++b) {
          for (std::int64_t h = 0; h < chunk.heads; ++h) {
            covered.emplace(chunk.batch + b, chunk.head + h);
          }
        }
      }
      EXPECT_EQ(all, batch * 12);
      EXPECT_EQ(static_cast<std::int64_t>(covered.size()), batch * 12);
    }
  }
}

TEST(Streaming, TakesNothingWhereThereIsNothing) {
  Case test_case = many_heads();
  test_case.problem.batch = 0;
  std::vector<Seen> seen(2);
  Streaming streaming(test_case.problem, test_case.grouping, 2, devices(seen));
  streaming.run({}, StreamWork::all, {});
  EXPECT_TRUE(streaming.chunks().empty());
  EXPECT_EQ(seen[0].calls + seen[1].calls, 0);
}

TEST(Streaming, DevicesShareTheChunksAndHoldTwoOfThem) {
  const Case test_case = many_heads();
  Instance instance(test_case);
  std::vector<Seen> seen(3);
  Streaming streaming(test_case.problem, test_case.grouping, 2, devices(seen));
  Results results(instance);
  std::vector<std::int64_t> told;
  streaming.run(results.tensors(instance), StreamWork::all, [&](std::int64_t done, std::int64_t total) {
    EXPECT_EQ(total, 12);
    told.push_back(done);
  });
  int calls = 0;
  for (const Seen& each : seen) {
    EXPECT_GT(each.calls, 0);  // none took all
    EXPECT_LE(each.calls_ahead, 2);
    EXPECT_EQ(each.bytes, streaming.device_bytes());
    calls += each.calls;
  }
  EXPECT_EQ(calls, 12);
  ASSERT_EQ(told.size(), 12U);
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_EQ(told.back(), 12);
  const Problem chunk = distributed::problem_of(test_case.problem, streaming.chunks().front());
  const std::size_t tensors = sizeof(float) * static_cast<std::size_t>(70 * (2 * 16 + 16 + 16 + 2 * 16 + 2));
  const std::size_t order = sizeof(std::int32_t) * 2 * 3 * 16;
  const std::size_t workspace = workspace_bytes(Operation::forward, chunk, test_case.grouping) +
                                workspace_bytes(Operation::grouping, chunk, test_case.grouping);
  EXPECT_LE(streaming.device_bytes(), 2 * (tensors + order + workspace + 7 * 256));
}

TEST(Streaming, TimelineHasEachStepOfEachChunkInOrder) {
  const Case test_case = many_heads();
  Instance instance(test_case);
  std::vector<Seen> seen(2);
  Streaming streaming(test_case.problem, test_case.grouping, 4, devices(seen));
  Results results(instance);
  streaming.run(results.tensors(instance), StreamWork::all, {});
  std::map<std::int64_t, std::vector<StreamSpan>> spans;
  for (const StreamSpan& span : streaming.timeline()) {
    EXPECT_LE(span.begin, span.end);
    EXPECT_GE(span.begin, 0);
    EXPECT_LT(span.device, 2U);
    spans[span.chunk].push_back(span);
  }
  EXPECT_EQ(spans.size(), 6U);
  for (const auto& [chunk, of_chunk] : spans) {
    ASSERT_EQ(of_chunk.size(), 3U);
    EXPECT_LE(of_chunk[0].end, of_chunk[1].begin);
    EXPECT_LE(of_chunk[1].end, of_chunk[2].begin);
  }
}

TEST(Streaming, PartsOfTheWorkAreLeftOut) {
  const Case test_case = many_heads();
  Instance instance(test_case);
  std::vector<Seen> seen(1);
  Streaming streaming(test_case.problem, test_case.grouping, 4, devices(seen));
  Results results(instance);
  streaming.run(results.tensors(instance), StreamWork::copies, {});
  EXPECT_EQ(seen[0].calls, 0);
  EXPECT_GT(seen[0].copies_in, 0);
  const int copies_in = seen[0].copies_in, copies_out = seen[0].copies_out;
  streaming.run(results.tensors(instance), StreamWork::compute, {});
  EXPECT_EQ(seen[0].calls, 6);
  EXPECT_EQ(seen[0].copies_in, copies_in);
  EXPECT_EQ(seen[0].copies_out, copies_out);
}

TEST(Streaming, AFailureNamesTheDeviceAndStopsAll) {
  Case test_case = many_heads();
  test_case.problem.batch = 40;  // much more than is done when the first device fails
  test_case.problem = contiguous(test_case.problem);
  Instance instance(test_case);
  for (const Fault::What what : {Fault::What::copy_in, Fault::What::compute, Fault::What::copy_out}) {
    std::vector<Seen> seen(2);
    Streaming streaming(test_case.problem, test_case.grouping, 2, devices(seen, {{1, {what, 4}}}));
    Results results(instance);
    const auto [status, words] = test::failure([&] { streaming.run(results.tensors(instance), StreamWork::all, {}); });
    EXPECT_EQ(status, Status::device_failure);
    EXPECT_EQ(words, "device 1: it broke");
    EXPECT_LT(seen[0].calls + seen[1].calls, 120);
    for (const Seen& each : seen) {
      EXPECT_EQ(each.finished, 1);  // nothing is under way that could write to O
    }
  }
}

TEST(Streaming, MemoryThatADeviceLacksNamesIt) {
  const Case test_case = many_heads();
  std::vector<Seen> seen(2);
  const auto [status, words] = test::failure([&] {
    const Streaming streaming(test_case.problem, test_case.grouping, 2, devices(seen, {{1, {Fault::What::memory, 0}}}));
  });
  EXPECT_EQ(status, Status::out_of_memory);
  EXPECT_EQ(words, "device 1: it broke");
}

TEST(StreamedAttention, RunsOnTheCpu) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Instance instance(test::with_dtype(many_heads(), dtype));
    const Results expected = one_call(instance);
    StreamOptions options;
    options.device = Device::cpu;
    options.chunk_heads = 4;
    StreamedAttention attention(instance.test_case.problem, instance.test_case.grouping, options);
    Results results(instance);
    attention.run(results.tensors(instance));
    EXPECT_EQ(results, expected);
    EXPECT_EQ(attention.chunks(), 6);
    EXPECT_EQ(attention.timeline().size(), 18U);
    EXPECT_EQ(attention.grouping().strategy, Strategy::energy);
  }
}

TEST(StreamedAttention, RefusesWhatItCannotTake) {
  const Case test_case = many_heads();
  const auto refused = [&](const std::string& start, const std::function<void(Case&, StreamOptions&)>& change) {
    Case changed = test_case;
    StreamOptions options;
    options.device = Device::cpu;
    change(changed, options);
    const auto [status, words] =
        test::failure([&] { const StreamedAttention attention(changed.problem, changed.grouping, options); });
    EXPECT_EQ(status, Status::invalid_argument) << words;
    EXPECT_EQ(words.substr(0, start.size()), start);
  };
  refused("there is a mask", [](Case& c, StreamOptions&) { c.problem.mask.kind = MaskKind::boolean; });
  refused("lengths are data, which is not streamed", [](Case& c, StreamOptions&) {
    c.problem.causal = Causal::none;
    c.grouping = {.strategy = Strategy::exact};
    c.problem.key_lengths = true;
  });
  refused("chunk_heads is 3; allowed: 0, multiples of 2", [](Case&, StreamOptions& o) { o.chunk_heads = 3; });
  refused("chunk_heads is -2; allowed", [](Case&, StreamOptions& o) { o.chunk_heads = -2; });
  refused("devices are {}; allowed: {0} on the CPU", [](Case&, StreamOptions& o) { o.devices.clear(); });
  refused("devices are {0, 1}; allowed: {0} on the CPU", [](Case&, StreamOptions& o) { o.devices = {0, 1}; });
  refused("the row stride of K is 8; allowed", [](Case& c, StreamOptions&) { c.problem.k.row = 8; });
  refused("the strides of O are 0,", [](Case& c, StreamOptions&) { c.problem.o.batch = 0; });
  refused("batch is -1", [](Case& c, StreamOptions&) { c.problem.batch = -1; });
}

TEST(StreamedAttention, RefusesTensorsBeforeItWrites) {
  Instance instance(many_heads());
  StreamOptions options;
  options.device = Device::cpu;
  StreamedAttention attention(instance.test_case.problem, instance.test_case.grouping, options);
  Results results(instance);
  const Results untouched = results;
  const auto refused = [&](const std::string& start, const std::function<void(ForwardTensors&)>& change) {
    ForwardTensors tensors = results.tensors(instance);
    change(tensors);
    const auto [status, words] = test::failure([&] { attention.run(tensors); });
    EXPECT_EQ(status, Status::invalid_argument) << words;
    EXPECT_EQ(words.substr(0, start.size()), start);
    EXPECT_EQ(results, untouched);
  };
  refused("K is null", [](ForwardTensors& t) { t.k = nullptr; });
  refused("O is null", [](ForwardTensors& t) { t.o = nullptr; });
  refused("there is an order with the strategy 'energy'", [&](ForwardTensors& t) { t.order = instance.order.data(); });
  std::int32_t halves = 0;
  refused("counts of kept halves are wanted", [&](ForwardTensors& t) { t.halves = &halves; });
}

}  // namespace
}  // namespace distr
