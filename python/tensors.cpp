// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

#include "plan_cache.h"

namespace distr::binding {
namespace {

std::string text(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::string result = "[";
  for (const std::int64_t size : sizes) {
    result += (result.size() == 1 ? "" : ", ") + std::to_string(size);
  }
  return result + "]";
}

DType dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Double:
      return DType::f64;
    default:
      invalid(std::string("the dtype of ") + name + " is " + torch::headeronly::toString(tensor.scalar_type()) +
              "; allowed: Half, BFloat16, Float, Double");
  }
}

// "cuda:1"
std::string text(const torch::stable::Device& device) {
  return device.is_cuda() ? "cuda:" + std::to_string(device.index()) : device.is_cpu() ? "cpu" : "another device";
}

void require_device(const Tensor& q, const char* name, const Tensor& tensor) {
  if (tensor.device() != q.device()) {
    invalid(std::string(name) + " is on " + text(tensor.device()) + "; allowed: " + text(q.device()) + ", where q is");
  }
}

bool has_unit_rows(const Tensor& tensor) { return tensor.size(-1) <= 1 || tensor.stride(-1) == 1; }

bool is_aligned(const Tensor& tensor) {
  constexpr std::uintptr_t kAlignment = 16;  // of the widest loads from a GPU's memory
  return !tensor.is_cuda() || reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
}

// Throws torch's own words for a failure, looked up where torch runs: before 2.13 it keeps them for its log.
void check(AOTITorchError error) {
  if (error == TORCH_SUCCESS) {
    return;
  }
  using Words = const char*();
  auto* const words = reinterpret_cast<Words*>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  throw std::runtime_error(words == nullptr ? "its log may say why" : words());
}

// What `allocate` returns; its failure in words.
template <class Allocate>
Tensor allocated(const Tensor& like, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception& error) {
    throw Error(Status::out_of_memory, (like.is_cuda() ? "CUDA out of memory. On " : "out of memory: on ") +
                                           text(like.device()) + " torch cannot allocate a tensor: " + error.what());
  }
}

// The shortest way to torch's allocators: new_empty() takes the dispatcher's, and empty_like() is looked up by name.
Tensor empty_strided(const Tensor& q, Sizes sizes, Sizes strides, ScalarType type) {
  const auto rank = static_cast<std::int64_t>(sizes.size());
  const auto dtype = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(type));
  std::int32_t device_type = 0;
  check(aoti_torch_get_device_type(q.get(), &device_type));
  return allocated(q, [&] {
    AtenTensorHandle made = nullptr;
    check(
        aoti_torch_empty_strided(rank, sizes.data(), strides.data(), dtype, device_type, q.get_device_index(), &made));
    return Tensor(made);
  });
}

// torch's CUDA part is a library of its own, absent from torch without CUDA: hence not linked, but found where it is.
void* current_cuda_stream(std::int32_t device) {
  using GetStream = AOTITorchError(std::int32_t device_index, void** stream);
  static GetStream* const get_stream = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<GetStream*>(symbol);
  }();
  void* stream = nullptr;
  if (get_stream == nullptr || get_stream(device, &stream) != TORCH_SUCCESS) {
    throw Error(Status::unsupported,
                "torch does not tell its current CUDA stream; allowed: a torch that was built with CUDA");
  }
  return stream;
}

void run_in_torch(int threads, const std::function<void(int)>& body) {
  torch::stable::parallel_for(0, threads, 1, [&body](std::int64_t begin, std::int64_t end) {
    for (std::int64_t thread = begin; thread < end; ++thread) {
      body(static_cast<int>(thread));
    }
  });
}

Problem make_problem(const Tensor& q, const Tensor& k, const Tensor& v, const Settings& settings) {
  for (const auto& [name, tensor] : {std::pair{"q", &q}, std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (tensor->dim() != 4) {
      invalid(std::string("the shape of ") + name + " is " + text(tensor->sizes()) +
              "; allowed: [batch, heads, rows, columns]");
    }
  }
  const std::int64_t heads_k = settings.grouped_heads ? k.size(1) : q.size(1);
  require(q, "k", k, q.scalar_type(), {q.size(0), heads_k, k.size(2), q.size(3)});
  require(q, "v", v, q.scalar_type(), {q.size(0), k.size(1), k.size(2), v.size(3)});
  Problem problem;
  problem.dtype = dtype_of("q", q);
  problem.batch = q.size(0);
  problem.heads_q = q.size(1);
  problem.heads_kv = k.size(1);
  problem.seq_q = q.size(2);
  problem.seq_k = k.size(2);
  problem.head_dim = q.size(3);
  problem.head_dim_v = v.size(3);
  if (problem.heads_q == 0 && problem.heads_kv == 0) {  // to the library, what is empty has no batch
    problem.batch = 0;
    problem.heads_q = problem.heads_kv = 1;
  }
  problem.q = strides_of(q);
  problem.k = strides_of(k);
  problem.v = strides_of(v);
  problem.scale = settings.scale;
  problem.causal = settings.causal;
  problem.window_left = settings.sliding.left;
  problem.window_right = settings.sliding.right;
  if (settings.sliding.left.has_value() || settings.sliding.right.has_value()) {
    problem.window_offset = settings.grouping.key_offset;
  }
  problem.softcap = settings.softcap;
  return problem;
}

Mask make_mask(const Tensor& q, const Tensor& tensor) {
  require_device(q, "the mask", tensor);
  if (tensor.dim() > 4) {
    invalid("the shape of the mask is " + text(tensor.sizes()) + "; allowed: at most 4 axes");
  }
  Mask mask;
  if (tensor.scalar_type() == ScalarType::Bool) {
    mask.kind = MaskKind::boolean;
  } else {
    mask.kind = MaskKind::additive;
    mask.dtype = dtype_of("the mask", tensor);
  }
  mask.rank = static_cast<int>(tensor.dim());
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), mask.shape.begin());
  std::copy(tensor.strides().begin(), tensor.strides().end(), mask.strides.begin());
  return mask;
}

void set_near(Grouping& grouping, const NearKeys& near) {
  grouping.window = near.window;
  grouping.sinks = near.sinks;
  grouping.key_offset = near.key_offset;
  grouping.skip = near.skip;
  grouping.finish = near.finish;
  grouping.part = near.part;
}

// A tensor of some blocks of d values for each head, contiguous; it may be flat.
Tensor by_blocks(const Tensor& q, const char* name, const Tensor& tensor, ScalarType type,
                 const std::array<std::int64_t, 4>& shape) {
  if (tensor.dim() == 3) {
    require(q, name, tensor, type, {q.size(0), shape[1], shape[2] * shape[3]});
  } else {
    require(q, name, tensor, type, {q.size(0), shape[1], shape[2], shape[3]});
  }
  return packed(tensor);
}

PlanKey key_of(Operation operation, const Call& call) {
  return {operation,
          call.problem,
          call.grouping,
          call.execution.device,
          call.device_index,
          call.execution.threads,
          call.execution.deterministic};
}

}  // namespace

void invalid(const std::string& message) { throw Error(Status::invalid_argument, message); }

ScalarType lse_type(const Problem& problem) {
  return problem.lse_dtype() == DType::f64 ? ScalarType::Double : ScalarType::Float;
}

void require(const Tensor& q, const char* name, const Tensor& tensor, ScalarType type, Sizes shape) {
  require_device(q, name, tensor);
  if (tensor.scalar_type() != type) {
    invalid(std::string("the dtype of ") + name + " is " + torch::headeronly::toString(tensor.scalar_type()) +
            "; allowed: " + torch::headeronly::toString(type));
  }
  const auto sizes = tensor.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    invalid(std::string("the shape of ") + name + " is " + text(sizes) + "; allowed: " + text(shape));
  }
}

Strides strides_of(const Tensor& tensor) { return {tensor.stride(0), tensor.stride(1), tensor.stride(2)}; }

Tensor empty(const Tensor& q, Sizes sizes, ScalarType type) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t axis = sizes.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= std::max<std::int64_t>(sizes[axis], 1);
  }
  return empty_strided(q, sizes, strides, type);
}

Tensor empty_rows_first(const Tensor& q, Sizes sizes) {
  const auto length = [&](std::size_t axis) { return std::max<std::int64_t>(sizes[axis], 1); };
  const std::int64_t row = length(1) * length(3);
  return empty_strided(q, sizes, {row * length(2), length(3), row, 1}, q.scalar_type());
}

Tensor packed(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

Tensor with_unit_rows(const Tensor& tensor) {
  if (has_unit_rows(tensor) && is_aligned(tensor)) {
    return tensor;
  }
  Tensor copy = empty(tensor, tensor.sizes(), tensor.scalar_type());
  torch::stable::copy_(copy, tensor);
  return copy;
}

Tensor dense_like(const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return empty_strided(tensor, tensor.sizes(), tensor.strides(), tensor.scalar_type());
  }
  Tensor result = allocated(tensor, [&] { return torch::stable::empty_like(tensor); });
  return has_unit_rows(result) ? result : empty(tensor, tensor.sizes(), tensor.scalar_type());
}

std::pair<Tensor, Tensor> laid_out_alike(const Tensor& first, const Tensor& second) {
  const auto have = [](const Tensor& tensor, const Tensor& layout) {
    const auto strides = tensor.strides(), wanted = layout.strides();
    return std::equal(strides.begin(), strides.end(), wanted.begin(), wanted.end()) && is_aligned(tensor);
  };
  if (have(first, first) && have(second, first) && has_unit_rows(first)) {
    return {first, second};
  }
  const Tensor layout = dense_like(first);
  const auto laid_out = [&](const Tensor& tensor) {
    if (have(tensor, layout)) {
      return tensor;
    }
    Tensor copy = allocated(layout, [&] { return torch::stable::empty_like(layout); });
    torch::stable::copy_(copy, tensor);
    return copy;
  };
  return {laid_out(first), laid_out(second)};
}

std::optional<Part> part_of(std::optional<std::int64_t> first_row, std::optional<std::int64_t> first_key) {
  if (first_row.has_value() != first_key.has_value()) {
    invalid("one of first_row and first_key was given; allowed: both or neither");
  }
  return first_row ? std::optional(Part{*first_row, *first_key}) : std::nullopt;
}

Settings settings_of(const std::string& causal, std::optional<double> scale, const std::string& strategy,
                     std::int64_t group_size, std::int64_t block_size, const std::string& estimator,
                     const std::string& order_from, std::int64_t seed, const NearKeys& near,
                     const SlidingWindow& sliding, double softcap) {
  Grouping grouping;
  grouping.strategy = named("strategy", strategy, kStrategies).strategy;
  grouping.group_size = group_size;
  grouping.block = block_size;
  grouping.estimator = named("estimator", estimator, kEstimators).value;
  grouping.order_from = named("order_from", order_from, kOrdersFrom).value;
  grouping.seed = static_cast<std::uint64_t>(seed);
  set_near(grouping, near);
  return {named("causal", causal, kCorners).value, scale, grouping, true, sliding, softcap};
}

Settings unpack(std::int64_t packed, std::int64_t packed_near, std::optional<std::int64_t> key_offset, double skip,
                std::optional<double> scale, std::int64_t seed, std::int64_t packed_window, double softcap) {
  if (packed < 0 || packed_near < 0 || packed_window < 0) {
    invalid("the settings are " + std::to_string(std::min({packed, packed_near, packed_window})) +
            "; allowed: 0 and above, as pack(), pack_near() and pack_window_size() make them");
  }
  const auto take = [&packed](std::int64_t values) {
    const std::int64_t value = packed % values;
    packed /= values;
    return value;
  };
  const auto take_of = [&take](const auto& values) {
    return values[static_cast<std::size_t>(take(std::ssize(values)))];
  };
  Grouping grouping;
  const Causal causal = take_of(kCorners).value;
  grouping.strategy = take_of(kStrategies).strategy;
  grouping.estimator = take_of(kEstimators).value;
  grouping.order_from = take_of(kOrdersFrom).value;
  const bool grouped_heads = take(2) == 1;
  grouping.group_size = take(1024);
  grouping.block = take(std::int64_t{1} << 40);
  grouping.seed = static_cast<std::uint64_t>(seed);
  packed = packed_near;
  NearKeys near;
  near.finish = take(2) == 1;
  const auto take_distance = [&take] {
    const std::int64_t value = take(std::int64_t{1} << 31);  // 0: none
    return value == 0 ? std::nullopt : std::optional(value - 1);
  };
  near.window = take_distance();
  near.sinks = packed;
  near.key_offset = key_offset;
  near.skip = skip;
  set_near(grouping, near);
  packed = packed_window;
  const std::optional<std::int64_t> left = take_distance();
  return {causal, scale, grouping, grouped_heads, {left, take_distance()}, softcap};
}

Call make_call(const Tensor& q, const Tensor& k, const Tensor& v, const Settings& settings) {
  Call call{make_problem(q, k, v, settings), settings.grouping, {}, 0, {}};
  if (q.is_cuda()) {
    call.device_index = q.get_device_index();
    call.guard.emplace(call.device_index);
    call.execution.device = Device::cuda;
    call.execution.stream = current_cuda_stream(call.device_index);
    call.execution.check_memory = false;  // torch knows where its tensors are
  } else {
    call.execution.threads = static_cast<int>(torch::stable::get_num_threads());
    call.execution.parallel = run_in_torch;
  }
  return call;
}

void add_mask(Call& call, const Tensor& q, const OptionalTensor& mask) {
  call.problem.mask = mask ? make_mask(q, *mask) : Mask{};
}

Plan plan_of(Operation operation, const Call& call) {
  return PlanCache::instance().find_or_make(
      key_of(operation, call), [&] { return plan(operation, call.problem, call.grouping, call.execution); });
}

Plan plan_of_order(const Call& call, const Plan& forward) {
  return PlanCache::instance().find_or_make(key_of(Operation::grouping, call),
                                            [&] { return forward.for_operation(Operation::grouping); });
}

OptionalTensor order_for(const Plan& plan, const Tensor& q, const OptionalTensor& order) {
  if (!order) {
    return {};
  }
  auto shape = order_shape(plan.problem(), plan.grouping());
  shape[1] = q.size(1);
  return by_blocks(q, "the order", *order, ScalarType::Int, shape);
}

OptionalTensor key_means_for(const Plan& plan, const Tensor& q, const OptionalTensor& key_means) {
  if (!needs_key_means(plan.grouping()) || !key_means) {
    return {};
  }
  auto shape = key_means_shape(plan.problem(), plan.grouping());
  shape[1] = q.size(1) == 0 ? 0 : shape[1];  // where the problem has one head that is empty
  return by_blocks(q, "key_means", *key_means, ScalarType::Float, shape);
}

Workspace add_workspace(Call& call, std::size_t bytes, const Tensor& q, std::size_t behind) {
  const std::size_t own = call.execution.device == Device::cuda ? (bytes + 255) / 256 * 256 : 0;  // aligned behind
  if (own + behind == 0) {
    return {};
  }
  Tensor memory = empty(q, {static_cast<std::int64_t>(own + behind)}, ScalarType::Byte);
  auto* const first = static_cast<std::byte*>(memory.mutable_data_ptr());
  if (own > 0) {
    call.execution.workspace = first;
    call.execution.workspace_bytes = own;
  }
  return {std::move(memory), first + own};
}

}  // namespace distr::binding
