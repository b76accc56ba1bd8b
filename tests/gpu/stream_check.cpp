// SPDX-License-Identifier: Apache-2.0
#include "gpu/stream_check.h"

#include <cstddef>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>
#include <vector>

#include "distr/device.h"
#include "distr/stream.h"
#include "gpu/device_run.h"
#include "support/cases.h"

namespace distr::test {
namespace {

constexpr std::int64_t kHeads = 5, kChunkHeads = 2, kRows = 200, kColumns = 64;

std::vector<Case> streamed_cases() {
  std::vector<Case> cases;
  const auto add = [&cases](const char* name, Strategy strategy) -> Case& {
    Case& made = cases.emplace_back();
    made.name = name;
    Problem& p = made.problem;
    p.heads_q = p.heads_kv = kHeads;
    p.seq_q = p.seq_k = kRows;
    p.head_dim = p.head_dim_v = kColumns;
    p = contiguous(p);
    made.grouping.strategy = strategy;
    made.grouping.block = 128;
    return made;
  };
  add("exact", Strategy::exact);
  add("lsh", Strategy::lsh);
  add("given", Strategy::given);
  Case& causal = add("energy, causal, heads last", Strategy::energy);
  causal.problem.causal = Causal::top_left;
  causal.grouping.order_from = OrderFrom::previous;
  causal.problem.q = causal.problem.k = causal.problem.v =
      causal.problem.o = {kRows * kHeads * kColumns, kColumns, kHeads * kColumns};
  Case& near = add("energy, near keys", Strategy::energy);
  near.grouping.window = 20;
  near.grouping.sinks = 1;
  Case& batch = add("exact, two entries", Strategy::exact);
  batch.problem.batch = 2;
  batch.problem = contiguous(batch.problem);
  return cases;
}

ForwardTensors host_tensors(const Instance& instance, Buffer& o, Buffer& lse) {
  ForwardTensors tensors;
  tensors.q = instance.q_data();
  tensors.k = instance.k_data();
  tensors.v = instance.v_data();
  tensors.o = o.data();
  tensors.lse = lse.data();
  if (instance.test_case.grouping.strategy == Strategy::given) {
    tensors.order = instance.order.data();
  }
  return tensors;
}

std::size_t bytes_of(const Buffer& buffer) {
  return static_cast<std::size_t>(buffer.count()) * size_of(buffer.dtype());
}

// One call, on the device.
void one_call(const Instance& instance, Buffer& o, Buffer& lse) {
  const Problem& p = instance.test_case.problem;
  void* const stream = thread_stream();
  std::vector<CudaMemory> memory;
  const auto place = [&](const void* data, std::size_t bytes) {
    memory.emplace_back(bytes);
    if (data != nullptr) {
      memory.back().copy_from(data, bytes, stream);
    }
    return memory.back().data();
  };
  Execution execution = on_device();
  const Plan forward = plan(Operation::forward, p, instance.test_case.grouping, execution);
  const Grouping& g = forward.grouping();
  ForwardTensors tensors;
  tensors.q = place(instance.q_data(), bytes_of(instance.q));
  tensors.k = place(instance.k_data(), bytes_of(instance.k));
  tensors.v = place(instance.v_data(), bytes_of(instance.v));
  auto* const order =
      static_cast<std::int32_t*>(place(instance.order.data(), instance.order.size() * sizeof(std::int32_t)));
  auto* const means = static_cast<float*>(place(nullptr, instance.key_means.size() * sizeof(float)));
  const Plan grouping =
      forward.reads_order() && g.strategy != Strategy::given ? forward.for_operation(Operation::grouping) : forward;
  execution.workspace_bytes = std::max(forward.workspace_bytes(), grouping.workspace_bytes());
  execution.workspace = place(nullptr, execution.workspace_bytes);
  if (grouping.operation() == Operation::grouping) {
    grouping.run(GroupingTensors{tensors.q, tensors.k, order, needs_key_means(g) ? means : nullptr}, execution);
  }
  tensors.order = order;
  tensors.key_means = means;
  const void* const o_on_device = tensors.o = place(o.data(), bytes_of(o));
  const void* const lse_on_device = tensors.lse = place(lse.data(), bytes_of(lse));
  forward.run(tensors, execution);
  for (const CudaMemory& each : memory) {
    if (each.data() == o_on_device) {
      each.copy_to(o.data(), bytes_of(o), stream);
    } else if (each.data() == lse_on_device) {
      each.copy_to(lse.data(), bytes_of(lse), stream);
    }
  }
}

std::vector<int> all_devices() {
  std::vector<int> devices(static_cast<std::size_t>(cuda_device_count()));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

// One, one twice, and all where there are several.
std::vector<std::vector<int>> lists_of_devices() {
  std::vector<std::vector<int>> lists{{0}, {0, 0}};
  if (all_devices().size() > 1) {
    lists.push_back(all_devices());
  }
  return lists;
}

std::string check_case(const Case& test_case) {
  const Instance instance(test_case);
  Buffer o = instance.output(), lse = instance.lse_output();
  one_call(instance, o, lse);
  for (const std::vector<int>& devices : lists_of_devices()) {
    StreamOptions options;
    options.devices = devices;
    options.chunk_heads = kChunkHeads;
    StreamedAttention attention(test_case.problem, test_case.grouping, options);
    if (attention.chunks() != 3 * test_case.problem.batch) {
      return "there are " + std::to_string(attention.chunks()) + " chunks";
    }
    for (int run = 0; run < 2; ++run) {
      Buffer streamed = instance.output(), streamed_lse = instance.lse_output();
      attention.run(host_tensors(instance, streamed, streamed_lse));
      if (!(streamed == o)) {
        return "O differs from one call's";
      }
      if (!(streamed_lse == lse)) {
        return "LSE differs from one call's";
      }
    }
  }
  return "";
}

// Q, K and V in one piece of pinned memory.
std::string check_pinned(const Case& test_case) {
  const Instance instance(test_case);
  Buffer o = instance.output(), lse = instance.lse_output();
  one_call(instance, o, lse);
  constexpr std::size_t kPage = 4096;
  const std::size_t each = (bytes_of(instance.q) + kPage - 1) / kPage * kPage;
  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{kPage}); }
  };
  const std::unique_ptr<std::byte[], Delete> memory(
      static_cast<std::byte*>(::operator new[](4 * each, std::align_val_t{kPage})));
  const CudaPin pin(memory.get(), 4 * each);
  if (!pin.reason().empty()) {
    return "memory cannot be pinned: " + pin.reason();
  }
  ForwardTensors tensors = host_tensors(instance, o, lse);
  std::size_t at = 0;
  for (const void** tensor : {&tensors.q, &tensors.k, &tensors.v}) {
    std::memcpy(memory.get() + at, *tensor, bytes_of(instance.q));
    *tensor = memory.get() + at;
    at += each;
  }
  std::memset(memory.get() + at, 0xFF, each);
  tensors.o = memory.get() + at;
  Buffer streamed_lse = instance.lse_output();
  tensors.lse = streamed_lse.data();
  StreamOptions options;
  options.chunk_heads = kChunkHeads;
  StreamedAttention(test_case.problem, test_case.grouping, options).run(tensors);
  if (std::memcmp(tensors.o, o.data(), bytes_of(o)) != 0 || !(streamed_lse == lse)) {
    return "O or LSE differs from one call's";
  }
  return "";
}

// Tensors in the memory of device 0, whose work all devices share.
std::string check_from_device(const Case& test_case) {
  const Instance instance(test_case);
  Buffer o = instance.output(), lse = instance.lse_output();
  one_call(instance, o, lse);
  Buffer streamed = instance.output(), streamed_lse = instance.lse_output();
  ForwardTensors tensors = host_tensors(instance, streamed, streamed_lse);
  void* const stream = thread_stream();
  std::vector<CudaMemory> memory;
  for (const void** tensor : {&tensors.q, &tensors.k, &tensors.v}) {
    memory.emplace_back(bytes_of(instance.q)).copy_from(*tensor, bytes_of(instance.q), stream);
    *tensor = memory.back().data();
  }
  CudaMemory o_memory(bytes_of(o)), lse_memory(bytes_of(lse));
  tensors.o = o_memory.data();
  tensors.lse = lse_memory.data();
  StreamOptions options;
  options.devices = all_devices();
  options.chunk_heads = kChunkHeads;
  for (const int device : options.devices) {
    const CudaDeviceScope scope(device);
    cuda_reach(0);
  }
  StreamedAttention(test_case.problem, test_case.grouping, options).run(tensors);
  o_memory.copy_to(streamed.data(), bytes_of(o), stream);
  lse_memory.copy_to(streamed_lse.data(), bytes_of(lse), stream);
  return streamed == o && streamed_lse == lse ? "" : "from device 0's memory: O or LSE differs from one call's";
}

std::string check_missing_device(const Case& test_case) {
  StreamOptions options;
  options.devices = {0, 1000};
  try {
    const StreamedAttention attention(test_case.problem, test_case.grouping, options);
  } catch (const Error& error) {
    const std::string words = error.what();
    const bool is_told = words.starts_with("the CUDA device is 1000; allowed: 0 to ");
    return is_told && error.status() == Status::invalid_argument ? "" : words;
  }
  return "device 1000 was taken";
}

}  // namespace

std::string check_streaming(DType dtype) {
  for (const Case& original : streamed_cases()) {
    const Case test_case = with_dtype(original, dtype);
    const std::string fault = check_case(test_case);
    if (!fault.empty()) {
      return test_case.name + ": " + fault;
    }
  }
  const Case test_case = with_dtype(streamed_cases().front(), dtype);
  if (const std::string fault = check_pinned(test_case); !fault.empty()) {
    return "pinned: " + fault;
  }
  const std::string fault = check_from_device(test_case);
  return fault.empty() ? check_missing_device(test_case) : fault;
}

}  // namespace distr::test
