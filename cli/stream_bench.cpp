// SPDX-License-Identifier: Apache-2.0
#include "stream_bench.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "comparison.h"
#include "random_inputs.h"

namespace distr::cli {
namespace {

constexpr std::int64_t kDrawnHeads = 8;  // of the batch; the others repeat them, as drawing takes long
constexpr std::array kStages{"copy_in", "compute", "copy_out"};

// Host memory, pinned where a GPU copies it; or the memory of the GPU `from`.
class StreamedMemory {
 public:
  StreamedMemory(std::size_t bytes, Device device, std::optional<int> from) : bytes_(bytes), from_(from) {
    if (from.has_value()) {
      const CudaDeviceScope scope(*from);
      on_gpu_ = CudaMemory(bytes);
    } else {
      on_host_.emplace(bytes, device);
    }
  }
  [[nodiscard]] std::byte* data() {
    return on_host_.has_value() ? on_host_->data() : static_cast<std::byte*>(on_gpu_.data());
  }
  // Fills it with copies of what was drawn.
  void repeat(const std::vector<std::byte>& drawn) {
    for (std::size_t at = 0; at < bytes_; at += drawn.size()) {
      copy(data() + at, drawn.data(), std::min(drawn.size(), bytes_ - at));
    }
  }

 private:
  void copy(std::byte* to, const std::byte* drawn, std::size_t bytes) const {
    if (!from_.has_value()) {
      std::memcpy(to, drawn, bytes);
      return;
    }
    const CudaDeviceScope scope(*from_);
    CudaStream stream;
    stream.copy({to, bytes}, {drawn, bytes}, bytes);
    stream.wait();
  }

  std::size_t bytes_;
  std::optional<int> from_;
  std::optional<HostMemory> on_host_;
  CudaMemory on_gpu_;
};

// Q, K, V and O of a problem.
class StreamedTensors {
 public:
  StreamedTensors(const Problem& problem, Device device, std::optional<int> from, std::uint64_t seed)
      : q_(bytes(problem, problem.heads_q, problem.seq_q, problem.head_dim), device, from),
        k_(bytes(problem, problem.heads_kv, problem.seq_k, problem.head_dim), device, from),
        v_(bytes(problem, problem.heads_kv, problem.seq_k, problem.head_dim_v), device, from),
        o_(bytes(problem, problem.heads_q, problem.seq_q, problem.head_dim_v), device, from) {
    Problem drawn = problem;
    drawn.batch = 1;
    drawn.heads_q = drawn.heads_kv = std::min(kDrawnHeads, problem.batch * problem.heads_kv);
    const Inputs inputs = random_inputs(contiguous(drawn), seed);
    q_.repeat(inputs.q);
    k_.repeat(inputs.k);
    v_.repeat(inputs.v);
  }

  [[nodiscard]] ForwardTensors tensors() {
    ForwardTensors tensors;
    tensors.q = q_.data();
    tensors.k = k_.data();
    tensors.v = v_.data();
    tensors.o = o_.data();
    return tensors;
  }

 private:
  static std::size_t bytes(const Problem& problem, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
    return static_cast<std::size_t>(problem.batch * heads * rows * columns) * size_of(problem.dtype);
  }

  StreamedMemory q_, k_, v_, o_;
};

double milliseconds(StreamedAttention& attention, const ForwardTensors& tensors, StreamWork work) {
  const auto start = std::chrono::steady_clock::now();
  attention.run(tensors, work);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

Json timeline_json(const StreamedAttention& attention) {
  Json spans = Json::array();
  for (const StreamSpan& span : attention.timeline()) {
    spans.push_back({{"device", span.device},
                     {"chunk", span.chunk},
                     {"stage", kStages[static_cast<std::size_t>(span.stage)]},
                     {"begin_ms", span.begin},
                     {"end_ms", span.end}});
  }
  return spans;
}

struct Times {
  std::vector<double> all, copies, compute;  // ascending
};

Json row_of(const Problem& problem, const StreamedAttention& attention, const StreamOptions& options,
            const Times& times) {
  const double all = Row::median_of(times.all);
  const double copies = Row::median_of(times.copies);
  const double compute = Row::median_of(times.compute);
  Json row = {{"impl", "distr"}, {"kernel", attention.kernel().name}, {"op", "stream_forward"}};
  row.update(sizes_json(problem));
  row.update(grouping_json(problem, attention.grouping()));
  row["ms"] = all;
  row["ms_min"] = times.all.front();
  row["ms_max"] = times.all.back();
  row["runs"] = times.all.size();
  row["ms_copies"] = copies;
  row["ms_compute"] = compute;
  row["ratio_to_larger"] = all / std::max(copies, compute);
  row["tflops_exact_flops"] = exact_operations(problem, Work::forward) / (all * 1e-3) * 1e-12;
  const double q = static_cast<double>(problem.batch * problem.heads_q * problem.seq_q);
  const double k = static_cast<double>(problem.batch * problem.heads_kv * problem.seq_k);
  row["bytes"] = (q + k) * static_cast<double>(problem.head_dim + problem.head_dim_v) *
                 static_cast<double>(size_of(problem.dtype));
  row["chunk_heads"] = options.chunk_heads;
  row.update(stream_json(attention, options));
  return row;
}

}  // namespace

void add_stream_columns(Table& table) {
  for (const char* head : {"dtype", "causal", "strategy"}) table.add_column(head, Table::Align::left);
  for (const char* head : {"N", "d", "G", "ms", "copies", "compute", "ratio to larger", "chunks", "device MB"}) {
    table.add_column(head, Table::Align::right);
  }
}

void bench_streamed(const Problem& problem, std::span<const Grouping> settings, const StreamOptions& options,
                    std::optional<int> from, int repeats, std::uint64_t seed, Json& rows, Table& table) {
  StreamedTensors memory(problem, options.device, from, seed);
  if (from.has_value()) {
    for (const int device : options.devices) {
      const CudaDeviceScope scope(device);
      cuda_reach(*from);
    }
  }
  for (const Grouping& setting : settings) {
    StreamedAttention attention(problem, setting, options);
    const ForwardTensors tensors = memory.tensors();
    attention.run(tensors);  // warms up
    Times times;
    Json timeline;
    for (int n = 0; n < repeats; ++n) {
      times.all.push_back(milliseconds(attention, tensors, StreamWork::all));
      timeline = timeline_json(attention);
      times.copies.push_back(milliseconds(attention, tensors, StreamWork::copies));
      times.compute.push_back(milliseconds(attention, tensors, StreamWork::compute));
    }
    for (std::vector<double>* each : {&times.all, &times.copies, &times.compute}) std::sort(each->begin(), each->end());
    Json row = row_of(problem, attention, options, times);
    row["from"] = from.has_value() ? Json(*from) : Json("host");
    row["timeline"] = timeline;
    const bool exact = attention.grouping().strategy == Strategy::exact;
    table.add_row({name_of(problem.dtype), name_of(problem.causal), name_of(attention.grouping().strategy),
                   std::to_string(problem.seq_q), std::to_string(problem.head_dim),
                   exact ? "-" : std::to_string(attention.grouping().group_size), significant(row["ms"].get<double>()),
                   significant(row["ms_copies"].get<double>()), significant(row["ms_compute"].get<double>()),
                   significant(row["ratio_to_larger"].get<double>(), 3), std::to_string(attention.chunks()),
                   significant(static_cast<double>(attention.device_bytes()) / 1e6, 3)});
    rows.push_back(std::move(row));
  }
}

}  // namespace distr::cli
