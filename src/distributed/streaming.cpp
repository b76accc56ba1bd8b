// SPDX-License-Identifier: Apache-2.0
// Each device has two slots. Chunk n of a device goes into slot n % 2:
//   lane in       copies Q, K, V, once the chunk two before is computed (the thread waits for that, and then draws)
//   lane compute  orders and attention, when the inputs are there and the outputs of the chunk two before are away
//   lane out      copies O, LSE, when they are computed
#include "distributed/streaming.h"

#include <chrono>
#include <exception>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "distributed/validate.h"

namespace distr::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using Stage = StreamSpan::Stage;

constexpr std::size_t kSlots = 2;

// Runs the body on the device. What it throws begins with the device's name then.
void on(StreamDevice& device, const std::function<void()>& body) {
  try {
    device.within(body);
  } catch (const Error& error) {
    throw Error(error.status(), device.name() + ": " + error.what());
  } catch (const std::bad_alloc&) {
    throw Error(Status::out_of_memory, device.name() + ": out of host memory");
  }
}

// After a failure: nothing of a run is under way when the caller's memory may go.
void drain(StreamDevice& device) noexcept {
  try {
    device.finish();
  } catch (...) {
    // It fails with what failed before.
  }
}

// Places one behind the other.
class Layout {
 public:
  std::size_t add(std::size_t bytes) {
    constexpr std::size_t kAlignment = 256;
    return std::exchange(bytes_, bytes_ + (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

std::size_t bytes_of(const std::array<std::int64_t, 4>& shape, std::size_t element) {
  return static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]) * element;
}

// The rows of the tiles that all launches have; 0: they have different ones, or the kernel has no choice.
std::int64_t only_tile_rows(const Plan& plan) {
  const std::int64_t rows = plan.tiles().empty() ? 0 : plan.tiles().front().rows;
  const auto launches = plan.launches();
  const bool is_only = std::all_of(launches.begin(), launches.end(),
                                   [rows](const LaunchShape& launch) { return launch.tile.rows == rows; });
  return is_only ? rows : 0;
}

}  // namespace

// What the threads of one call share.
struct Streaming::Run {
  const Streaming& streaming;
  StreamWork work;
  const std::function<void(std::int64_t, std::int64_t)>& progress;
  std::vector<std::pair<HostTensor, std::size_t Places::*>> inputs{}, outputs{};
  bool has_lse = false, has_halves = false;
  Clock::time_point begin = Clock::now();
  Queue queue{static_cast<std::int64_t>(streaming.chunks_.size())};
  std::mutex mutex{};
  std::int64_t done = 0;
  std::exception_ptr failure{};

  void add_tensors(const ForwardTensors& tensors);
  void stream(Worker& worker);
  void copy_in(Worker& worker, const Chunk& chunk, std::byte* slot) const;
  void compute(Worker& worker, const Chunk& chunk, std::byte* slot) const;
  void copy_out(Worker& worker, const Chunk& chunk, std::byte* slot) const;

  void finished_one() {
    const std::lock_guard lock(mutex);
    ++done;
    if (progress) {
      progress(done, static_cast<std::int64_t>(streaming.chunks_.size()));
    }
  }
  void failed() noexcept {
    queue.stop();
    const std::lock_guard lock(mutex);
    if (failure == nullptr) {
      failure = std::current_exception();
    }
  }
};

Streaming::Streaming(const Problem& problem, const Grouping& grouping, std::int64_t chunk_heads,
                     std::vector<std::unique_ptr<StreamDevice>> devices)
    : problem_(problem) {
  validate_streamed(problem, grouping);
  chunks_ = chunks_of(problem, chunk_heads, devices.size());
  devices.front()->within([&] { whole_ = plan(Operation::forward, problem, grouping, devices.front()->execution()); });
  for (auto& device : devices) {
    Worker& worker = workers_.emplace_back();
    worker.device = std::move(device);
    on(*worker.device, [&] { prepare(worker); });
    device_bytes_ = std::max(device_bytes_, worker.places.bytes);
  }
}

bool Streaming::copies_order() const {
  return whole_->reads_order() && traits(whole_->grouping().strategy).order == OrderSource::caller;
}

// By the kernel and the tile of one call where they serve, so that the bits do not depend on the chunks.
ChunkPlans Streaming::plan_chunk(const Chunk& chunk, const Execution& execution) const {
  const Problem problem = problem_of(problem_, chunk);
  const Grouping& grouping = whole_->grouping();
  Execution as_whole = execution;
  as_whole.kernel = whole_->kernel().name;
  if (execution.device == Device::cuda) {  // the bits of a CPU do not depend on it, and chunks are smaller
    as_whole.tile_rows = only_tile_rows(*whole_);
  }
  std::optional<Plan> forward;
  try {
    forward = plan(Operation::forward, problem, grouping, as_whole);
  } catch (const Error&) {
    forward = plan(Operation::forward, problem, grouping, execution);
  }
  ChunkPlans plans{chunk.batches, chunk.heads, *forward, std::nullopt};
  if ((whole_->reads_order() && !copies_order()) || needs_key_means(grouping)) {
    plans.grouping = forward->for_operation(Operation::grouping);
  }
  return plans;
}

void Streaming::prepare(Worker& worker) const {
  const Execution execution = worker.device->execution();
  Places& places = worker.places;
  std::array<std::size_t, 7> sizes{};  // q, k, v, order, o, lse, halves: the most of any chunk
  std::size_t order_bytes = 0;
  std::size_t means_bytes = 0;
  const auto grow = [](std::size_t& size, std::size_t bytes) { size = std::max(size, bytes); };
  for (const Chunk& chunk : chunks_) {
    const bool is_known = std::any_of(worker.plans.begin(), worker.plans.end(), [&](const ChunkPlans& plans) {
      return plans.batches == chunk.batches && plans.heads == chunk.heads;
    });
    if (is_known) {
      continue;
    }
    const ChunkPlans& plans = worker.plans.emplace_back(plan_chunk(chunk, execution));
    const Problem& p = plans.forward.problem();
    const std::size_t element = size_of(p.dtype);
    grow(sizes[0], bytes_of({p.batch, p.heads_q, p.seq_q, p.head_dim}, element));
    grow(sizes[1], bytes_of({p.batch, p.heads_kv, p.seq_k, p.head_dim}, element));
    grow(sizes[2], bytes_of({p.batch, p.heads_kv, p.seq_k, p.head_dim_v}, element));
    grow(sizes[4], bytes_of({p.batch, p.heads_q, p.seq_q, p.head_dim_v}, element));
    grow(sizes[5], bytes_of({p.batch, p.heads_q, p.seq_q, 1}, size_of(p.lse_dtype())));
    if (whole_->grouping().skip > 0) {
      grow(sizes[6], bytes_of(halves_shape(p), sizeof(std::int32_t)));
    }
    if (whole_->reads_order()) {
      grow(copies_order() ? sizes[3] : order_bytes,
           bytes_of(order_shape(p, plans.forward.grouping()), sizeof(std::int32_t)));
    }
    if (needs_key_means(plans.forward.grouping())) {
      grow(means_bytes, bytes_of(key_means_shape(p, plans.forward.grouping()), sizeof(float)));
    }
    grow(places.workspace_bytes, plans.forward.workspace_bytes());
    grow(places.workspace_bytes, plans.grouping ? plans.grouping->workspace_bytes() : 0);
  }
  Layout slot;
  const std::array targets{&places.q, &places.k, &places.v, &places.order, &places.o, &places.lse, &places.halves};
  for (std::size_t n = 0; n < targets.size(); ++n) {
    *targets[n] = slot.add(sizes[n]);
  }
  places.slot_bytes = slot.bytes();
  Layout all;
  all.add(std::min(kSlots, chunks_.size()) * slot.bytes());
  places.own_order = all.add(order_bytes);
  places.key_means = all.add(means_bytes);
  places.workspace = all.add(places.workspace_bytes);
  places.bytes = all.bytes();
  worker.memory = worker.device->allocate(places.bytes);
}

void Streaming::Run::add_tensors(const ForwardTensors& tensors) {
  const Problem& p = streaming.problem_;
  const auto require = [](const void* data, const char* name, bool needed) {
    if (needed && data == nullptr) {
      throw_invalid(std::string(name) + " is null; allowed: memory of the problem's sizes");
    }
    return static_cast<std::byte*>(const_cast<void*>(data));  // that of inputs is only read
  };
  const auto of_heads = [](std::int64_t rows, std::int64_t columns, std::int64_t heads) {
    return Strides{heads * rows * columns, rows * columns, columns};
  };
  const std::int64_t sharing = p.heads_q / p.heads_kv;
  const std::size_t element = size_of(p.dtype);
  const bool has_queries = p.batch * p.seq_q > 0;
  const bool has_keys = p.batch * p.seq_k > 0;
  const auto shape = order_shape(p, streaming.whole_->grouping());
  if (work != StreamWork::compute) {
    inputs = {{{require(tensors.q, "Q", has_queries), element, p.seq_q, p.head_dim, 1, p.q}, &Places::q},
              {{require(tensors.k, "K", has_keys), element, p.seq_k, p.head_dim, sharing, p.k}, &Places::k},
              {{require(tensors.v, "V", has_keys), element, p.seq_k, p.head_dim_v, sharing, p.v}, &Places::v}};
    outputs = {{{require(tensors.o, "O", has_queries), element, p.seq_q, p.head_dim_v, 1, p.o}, &Places::o}};
  }
  if (streaming.copies_order()) {
    inputs.push_back({{require(tensors.order, "the order", has_queries), sizeof(std::int32_t), shape[2], shape[3], 1,
                       of_heads(shape[2], shape[3], p.heads_q)},
                      &Places::order});
  } else if (tensors.order != nullptr) {
    throw_invalid(std::string("there is an order with the strategy '") +
                  traits(streaming.whole_->grouping().strategy).name +
                  "'; allowed where tensors are streamed: null, or the strategy 'given' and a group size above 1");
  }
  has_lse = tensors.lse != nullptr;
  has_halves = tensors.halves != nullptr;
  if (has_halves && streaming.whole_->grouping().skip == 0) {
    throw_invalid("counts of kept halves are wanted, but nothing is skipped; allowed: null, or a skip above 0");
  }
  if (has_lse && work != StreamWork::compute) {
    outputs.push_back(
        {{static_cast<std::byte*>(tensors.lse), size_of(p.lse_dtype()), p.seq_q, 1, 1, of_heads(p.seq_q, 1, p.heads_q)},
         &Places::lse});
  }
  if (has_halves && work != StreamWork::compute) {
    const std::int64_t rows = halves_shape(p)[2];
    outputs.push_back(
        {{reinterpret_cast<std::byte*>(tensors.halves), sizeof(std::int32_t), rows, 2, 1, of_heads(rows, 2, p.heads_q)},
         &Places::halves});
  }
}

void Streaming::Run::copy_in(Worker& worker, const Chunk& chunk, std::byte* slot) const {
  for (const auto& [tensor, place] : inputs) {
    for (const Copy& copy : copies_of(tensor, chunk)) {
      worker.device->copy_in(slot + worker.places.*place + copy.packed, copy);
    }
  }
}

void Streaming::Run::copy_out(Worker& worker, const Chunk& chunk, std::byte* slot) const {
  for (const auto& [tensor, place] : outputs) {
    for (const Copy& copy : copies_of(tensor, chunk)) {
      worker.device->copy_out(slot + worker.places.*place + copy.packed, copy);
    }
  }
}

void Streaming::Run::compute(Worker& worker, const Chunk& chunk, std::byte* slot) const {
  if (work == StreamWork::copies) {
    return;
  }
  const auto plans = std::find_if(worker.plans.begin(), worker.plans.end(), [&](const ChunkPlans& each) {
    return each.batches == chunk.batches && each.heads == chunk.heads;
  });
  const Places& places = worker.places;
  auto* const order = reinterpret_cast<std::int32_t*>(streaming.copies_order() ? slot + places.order
                                                                               : worker.memory + places.own_order);
  auto* const means = needs_key_means(streaming.whole_->grouping())
                          ? reinterpret_cast<float*>(worker.memory + places.key_means)
                          : nullptr;
  ForwardTensors tensors;
  tensors.q = slot + places.q;
  tensors.k = slot + places.k;
  tensors.v = slot + places.v;
  tensors.order = order;
  tensors.key_means = means;
  tensors.o = slot + places.o;
  tensors.lse = has_lse ? slot + places.lse : nullptr;
  tensors.halves = has_halves ? reinterpret_cast<std::int32_t*>(slot + places.halves) : nullptr;
  Execution with = worker.device->execution();
  with.workspace = worker.memory + places.workspace;
  with.workspace_bytes = places.workspace_bytes;
  worker.device->compute([plans = *plans, tensors, order, means, with] {
    if (plans.grouping) {
      plans.grouping->run(GroupingTensors{tensors.q, tensors.k, order, means}, with);
    }
    plans.forward.run(tensors, with);
  });
}

void Streaming::Run::stream(Worker& worker) {
  StreamDevice& device = *worker.device;
  struct Marks {
    std::int64_t chunk;
    std::array<Mark, 3> begin, end;  // of the stages
  };
  std::vector<Marks> all;
  const Mark origin = device.mark(Lane::in);
  device.wait(origin);
  const double origin_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  for (std::size_t n = 0;; ++n) {
    if (n >= kSlots) {
      device.wait(all[n - kSlots].end[1]);
    }
    const std::optional<std::int64_t> index = queue.take();
    if (!index) {
      break;
    }
    const Chunk& chunk = streaming.chunks_[static_cast<std::size_t>(*index)];
    std::byte* const slot = worker.memory + n % kSlots * worker.places.slot_bytes;
    Marks marks{*index, {}, {}};
    marks.begin[0] = device.mark(Lane::in);
    copy_in(worker, chunk, slot);
    marks.end[0] = device.mark(Lane::in);
    device.wait(Lane::compute, marks.end[0]);
    if (n >= kSlots) {
      device.wait(Lane::compute, all[n - kSlots].end[2]);
    }
    marks.begin[1] = device.mark(Lane::compute);
    compute(worker, chunk, slot);
    marks.end[1] = device.mark(Lane::compute);
    device.wait(Lane::out, marks.end[1]);
    marks.begin[2] = device.mark(Lane::out);
    copy_out(worker, chunk, slot);
    marks.end[2] = device.mark(Lane::out);
    all.push_back(std::move(marks));
    if (n >= kSlots) {
      finished_one();
    }
  }
  device.finish();
  for (std::size_t n = all.size() - std::min(all.size(), kSlots); n < all.size(); ++n) {
    finished_one();
  }
  for (const Marks& marks : all) {
    for (std::size_t stage = 0; stage < marks.begin.size(); ++stage) {
      const double from = origin_ms + device.milliseconds(origin, marks.begin[stage]);
      worker.timeline.push_back({0, marks.chunk, static_cast<Stage>(stage), from,
                                 from + device.milliseconds(marks.begin[stage], marks.end[stage])});
    }
  }
}

void Streaming::run(const ForwardTensors& tensors, StreamWork work,
                    const std::function<void(std::int64_t, std::int64_t)>& progress) {
  Run run{*this, work, progress};
  run.add_tensors(tensors);
  timeline_.clear();
  std::vector<std::thread> threads;
  for (Worker& worker : workers_) {
    worker.timeline.clear();
    threads.emplace_back([&run, &worker] {
      try {
        on(*worker.device, [&] {
          try {
            run.stream(worker);
          } catch (...) {
            run.queue.stop();
            drain(*worker.device);
            throw;
          }
        });
      } catch (...) {
        run.failed();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (run.failure != nullptr) {
    std::rethrow_exception(run.failure);
  }
  for (std::size_t n = 0; n < workers_.size(); ++n) {
    for (StreamSpan span : workers_[n].timeline) {
      span.device = n;
      timeline_.push_back(span);
    }
  }
}

}  // namespace distr::distributed
