// SPDX-License-Identifier: Apache-2.0
#include "computation.h"

#include <array>
#include <cstring>
#include <utility>

#include "options.h"

namespace distr::cli {
namespace {

constexpr std::size_t kCaches = 4;  // so much is written over; it also keeps the GPU busy while calls are prepared

template <typename Element>
std::size_t bytes_of(const std::array<std::int64_t, 4>& shape) {
  return static_cast<std::size_t>(count_of(shape)) * sizeof(Element);
}

template <typename Element>
std::vector<Element> content_of(const Buffer& buffer) {
  const std::vector<std::byte> bytes = buffer.read();
  std::vector<Element> content(bytes.size() / sizeof(Element));
  if (!content.empty()) std::memcpy(content.data(), bytes.data(), bytes.size());
  return content;
}

}  // namespace

void Buffer::resize(std::size_t bytes) {
  bytes_ = bytes;
  if (device_ == Device::cpu) {
    host_.resize(bytes);
  } else if (bytes > cuda_.bytes()) {
    cuda_ = CudaMemory();  // frees the old memory before the new is asked for
    cuda_ = CudaMemory(bytes);
  }
}

void Buffer::write(std::span<const std::byte> content) {
  resize(content.size());
  if (content.empty()) return;
  if (device_ == Device::cpu) {
    std::memcpy(host_.data(), content.data(), content.size());
  } else {
    cuda_.copy_from(content.data(), content.size());
  }
}

std::vector<std::byte> Buffer::read() const {
  if (device_ == Device::cpu) return host_;
  std::vector<std::byte> content(bytes_);
  if (bytes_ > 0) cuda_.copy_to(content.data(), bytes_);
  return content;
}

std::vector<std::byte> Buffer::take() {
  std::vector<std::byte> content = device_ == Device::cpu ? std::exchange(host_, {}) : read();
  *this = Buffer(device_);
  return content;
}

void* Buffer::data() {
  if (bytes_ == 0) return nullptr;
  return device_ == Device::cpu ? host_.data() : cuda_.data();
}

Computation::Computation(const Inputs& inputs, Outputs outputs, Device device, int threads)
    : inputs_(inputs),
      order_(device),
      key_means_(device),
      halves_(device),
      o_(device),
      lse_(device),
      d_q_(device),
      d_k_(device),
      d_v_(device),
      workspace_(device) {
  execution_.device = device;
  execution_.threads = threads;
  if (device == Device::cuda) stopwatch_.emplace();
  tensors_.q = place(inputs.q);
  tensors_.k = place(inputs.k);
  tensors_.v = place(inputs.v);
  tensors_.mask = place(inputs.mask);
  const Problem& problem = inputs.problem;
  const std::int64_t o_shape[] = {problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v};
  o_.resize(static_cast<std::size_t>(count_of(o_shape)) * size_of(problem.dtype));
  if (outputs != Outputs::o) {
    const std::int64_t lse_shape[] = {problem.batch, problem.heads_q, problem.seq_q};
    lse_.resize(static_cast<std::size_t>(count_of(lse_shape)) * size_of(problem.lse_dtype()));
  }
  if (outputs == Outputs::gradients) {
    d_q_.resize(inputs.q.size());
    d_k_.resize(inputs.k.size());
    d_v_.resize(inputs.v.size());
  }
}

const void* Computation::place(const std::vector<std::byte>& tensor) {
  if (execution_.device == Device::cpu) return tensor.data();
  placed_.emplace_back(execution_.device).write(tensor);
  return placed_.back().data();
}

Plan Computation::decide(Operation operation, const Grouping& grouping) const {
  return plan(operation, inputs_.problem, grouping, execution_);
}

Plan Computation::prepared(const Plan& plan, Operation operation) {
  Plan own = plan.operation() == operation ? plan : plan.for_operation(operation);
  if (execution_.device == Device::cpu) return own;  // there the calls allocate their own
  if (own.workspace_bytes() > workspace_.size()) workspace_.resize(own.workspace_bytes());
  execution_.workspace = workspace_.data();
  execution_.workspace_bytes = workspace_.size();
  return own;
}

void Computation::use_order(std::span<const std::int32_t> order) { order_.write(std::as_bytes(order)); }

void Computation::make_order(const Plan& plan) {
  const Plan own = prepared(plan, Operation::grouping);
  GroupingTensors tensors;
  tensors.q = tensors_.q;
  tensors.k = tensors_.k;
  if (traits(own.grouping().strategy).order != OrderSource::caller) {
    order_.resize(bytes_of<std::int32_t>(order_shape(own.problem(), own.grouping())));
    tensors.order = static_cast<std::int32_t*>(order_.data());
  }
  key_means_.resize(0);
  if (needs_key_means(own.grouping())) {
    key_means_.resize(bytes_of<float>(key_means_shape(own.problem(), own.grouping())));
    tensors.key_means = static_cast<float*>(key_means_.data());
  }
  own.run(tensors, execution_);
}

ForwardTensors Computation::forward_tensors() {
  ForwardTensors tensors = tensors_;
  tensors.order = order_data();
  tensors.key_means = means_data();
  tensors.o = o_.data();
  tensors.lse = lse_.data();
  return tensors;
}

void Computation::forward(const Plan& plan) { prepared(plan, Operation::forward).run(forward_tensors(), execution_); }

void Computation::forward_counting(const Plan& plan) {
  halves_.resize(bytes_of<std::int32_t>(halves_shape(plan.problem())));
  ForwardTensors tensors = forward_tensors();
  tensors.halves = static_cast<std::int32_t*>(halves_.data());
  prepared(plan, Operation::forward).run(tensors, execution_);
}

void Computation::backward(const Plan& plan) {
  const Plan own = prepared(plan, Operation::backward);
  BackwardTensors tensors;
  tensors.q = tensors_.q;
  tensors.k = tensors_.k;
  tensors.v = tensors_.v;
  tensors.mask = tensors_.mask;
  tensors.order = order_data();
  tensors.key_means = means_data();
  tensors.o = tensors.d_o = o_.data();
  tensors.lse = lse_.data();
  tensors.d_q = d_q_.data();
  tensors.d_k = d_k_.data();
  tensors.d_v = d_v_.data();
  own.run(tensors, execution_);
}

std::vector<std::int32_t> Computation::order() const { return content_of<std::int32_t>(order_); }

std::vector<float> Computation::key_means() const { return content_of<float>(key_means_); }

std::vector<std::int32_t> Computation::halves() const { return content_of<std::int32_t>(halves_); }

void Computation::mark() {
  if (stopwatch_) {
    stopwatch_->mark();
  } else {
    marks_.push_back(Clock::now());
  }
}

std::vector<double> Computation::laps() {
  if (stopwatch_) return stopwatch_->laps();
  std::vector<double> result;
  for (std::size_t n = 0; n + 1 < marks_.size(); ++n) {
    result.push_back(std::chrono::duration<double, std::milli>(marks_[n + 1] - marks_[n]).count());
  }
  marks_.clear();
  return result;
}

void Computation::flush_caches() {
  if (execution_.device == Device::cpu) return;
  if (!other_content_) other_content_.emplace(kCaches * static_cast<std::size_t>(cuda_device().cache));
  other_content_->fill(0);
}

std::int64_t Computation::extra_bytes() const {
  return execution_.device == Device::cpu
             ? 0
             : static_cast<std::int64_t>(order_.size() + key_means_.size() + workspace_.size());
}

void Computation::release() {
  order_ = Buffer(execution_.device);
  key_means_ = Buffer(execution_.device);
  workspace_ = Buffer(execution_.device);
}

std::optional<double> kept_share(std::span<const std::int32_t> halves) {
  std::int64_t kept = 0, seen = 0;
  for (std::size_t n = 0; n + 1 < halves.size(); n += 2) {
    kept += halves[n];
    seen += halves[n + 1];
  }
  if (seen == 0) return std::nullopt;
  return static_cast<double>(kept) / static_cast<double>(seen);
}

}  // namespace distr::cli
