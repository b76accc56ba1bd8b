// SPDX-License-Identifier: Apache-2.0
#include "gpu/properties.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include "common/near.h"
#include "gpu/device_run.h"
#include "gpu/large_strides.h"
#include "gpu/lengths_property.h"
#include "gpu/sums_property.h"
#include "gpu/tiles_property.h"
#include "support/oracle.h"

namespace distr::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Case case_of(std::string name, DType dtype, std::int64_t seq_q, std::int64_t seq_k, std::int64_t d) {
  Case result;
  result.name = std::move(name);
  result.problem.dtype = dtype;
  result.problem.seq_q = seq_q;
  result.problem.seq_k = seq_k;
  result.problem.head_dim = result.problem.head_dim_v = d;
  result.problem = contiguous(result.problem);
  result.grouping.strategy = Strategy::exact;
  result.grouping.group_size = 1;
  return result;
}

void set_all(Buffer& buffer, double value) {
  for (std::int64_t n = 0; n < buffer.count(); ++n) {
    buffer.set(n, value);
  }
}

void set_row(Buffer& buffer, std::int64_t row, std::int64_t columns, double value) {
  for (std::int64_t c = 0; c < columns; ++c) {
    buffer.set(row * columns + c, value);
  }
}

// Keys with an additive fp32 mask of `bias`, later `rest` from the middle on.
Extreme biased(const char* name, DType dtype, double bias, double rest) {
  Case test_case = case_of(name, dtype, 70, 130, 32);
  test_case.problem.mask = {MaskKind::additive, DType::f32, 1, {130}, {1}};
  Instance instance(test_case);
  for (std::int64_t n = 0; n < 130; ++n) {
    instance.mask.set(n, n < 65 ? bias : rest);
  }
  return {name, instance};
}

// All queries 1 and all keys 0 but for one, whose scores are `score`; V infinite at `infinite`.
Extreme infinite_value(const char* name, DType dtype, std::int64_t special, double score, std::int64_t infinite) {
  constexpr std::int64_t kDim = 16;
  Case test_case = case_of(name, dtype, 70, 300, kDim);
  test_case.problem.scale = 1;
  Instance instance(test_case);
  set_all(instance.q, 1);
  set_all(instance.k, 0);
  set_row(instance.k, special, kDim, score / kDim);
  set_row(instance.v, infinite, kDim, kInfinity);
  return {name, instance};
}

std::string difference(const Buffer& a, const Buffer& b, const char* what) {
  return a == b ? "" : std::string(what) + " differs";
}

std::string lse_is_optional(const ForwardKernel& kernel, DType dtype) {
  const auto serves = [&](const char* name) {
    const Case test_case = with_dtype(find(name), dtype);
    return kernel.supports(test_case.problem, test_case.grouping).empty() && !rounds_the_scale(kernel.name, test_case);
  };
  const char* const name = serves("GQA") ? "GQA" : "lsh, mean";
  if (!serves(name)) {
    return kNotAsked;
  }
  Instance instance(with_dtype(find(name), dtype));
  const Problem& p = instance.test_case.problem;
  const Grouping& g = instance.test_case.grouping;
  run_on_device(kernel, p, g, instance.forward());
  Buffer o = instance.output();
  ForwardTensors tensors = instance.forward();
  tensors.o = o.data();
  tensors.lse = nullptr;
  run_on_device(kernel, p, g, tensors);
  return difference(o, instance.o, "O without LSE");
}

std::string group_size_one_is_exact(const ForwardKernel& kernel, DType dtype) {
  bool asked = false;
  for (const char* name : {"causal, square", "odd sizes", "additive mask"}) {
    Case grouped = with_dtype(find(name), dtype);
    const Case exact = grouped;
    for (const Strategy strategy : {Strategy::lsh, Strategy::energy}) {
      grouped.grouping.strategy = strategy;
      if (!kernel.supports(grouped.problem, grouped.grouping).empty()) {
        continue;
      }
      asked = true;
      Instance instance(grouped);
      run_on_device(kernel, grouped.problem, grouped.grouping, instance.forward());
      Buffer o = instance.output();
      Buffer lse = instance.lse_output();
      run_on_device(kernel, exact.problem, exact.grouping, instance.forward_into(o, lse));
      if (!(o == instance.o && lse == instance.lse)) {
        return std::string(name) + ": G = 1 is not exact attention bit for bit";
      }
    }
  }
  return asked ? "" : kNotAsked;
}

// Masks read through negative and zero strides equal the same mask laid out plainly.
std::string masks_of_any_strides(const ForwardKernel& kernel, DType dtype) {
  bool asked = false;
  for (const MaskKind kind : {MaskKind::boolean, MaskKind::additive}) {
    Case plain = with_dtype(find("boolean mask"), dtype);
    Problem& p = plain.problem;
    p.mask = {kind, DType::f32, 2, {p.seq_q, p.seq_k}, {p.seq_k, 1}};
    Problem backwards = p;
    backwards.mask = {kind, DType::f32, 4, {1, p.heads_q, p.seq_q, p.seq_k}, {99, 0, -p.seq_k, -1}};
    if (!kernel.supports(p, plain.grouping).empty() || !kernel.supports(backwards, plain.grouping).empty()) {
      continue;
    }
    asked = true;
    Instance instance(plain);
    const auto count = static_cast<std::size_t>(p.seq_q * p.seq_k);
    std::vector<float> bias(count);
    std::vector<std::uint8_t> keep(count);
    for (std::size_t n = 0; n < count; ++n) {
      bias[count - 1 - n] = static_cast<float>(instance.mask.at(static_cast<std::int64_t>(n)));
      keep[count - 1 - n] = instance.boolean_mask[n];
    }
    run_on_device(kernel, p, plain.grouping, instance.forward());
    Buffer o = instance.output();
    Buffer lse = instance.lse_output();
    ForwardTensors tensors = instance.forward_into(o, lse);
    tensors.mask = kind == MaskKind::boolean ? static_cast<const void*>(&keep[count - 1])
                                             : static_cast<const void*>(&bias[count - 1]);
    run_on_device(kernel, backwards, plain.grouping, tensors);
    if (!(o == instance.o && lse == instance.lse)) {
      return kind == MaskKind::boolean ? "a boolean mask of negative strides reads otherwise"
                                       : "an additive mask of negative strides reads otherwise";
    }
  }
  return asked ? "" : kNotAsked;
}

// Rows up to `last` of O and LSE, with the rows of Q, K and V behind it set to `later`.
Result rows_up_to(const ForwardKernel& kernel, const Case& test_case, std::int64_t last, double later) {
  Instance instance(test_case);
  const Problem& p = test_case.problem;
  for (Buffer* buffer : {&instance.q, &instance.k, &instance.v}) {
    for (std::int64_t n = (last + 1) * p.head_dim; n < buffer->count(); ++n) {
      buffer->set(n, later);
    }
  }
  for (const GroupingKernel& grouping : cuda_backend().grouping) {
    if (grouping.supports(p, test_case.grouping).empty()) {
      run_on_device(grouping, p, test_case.grouping, {instance.q_data(), instance.k_data(), instance.order.data()});
      break;
    }
  }
  run_on_device(kernel, p, test_case.grouping, instance.forward());
  Result result = written(p, instance.o, instance.lse);
  result.o.resize(static_cast<std::size_t>((last + 1) * p.head_dim_v));
  result.lse.resize(static_cast<std::size_t>(last + 1));
  return result;
}

std::string sees_the_future(const ForwardKernel& kernel, const Case& test_case) {
  const Result unchanged = rows_up_to(kernel, test_case, test_case.problem.seq_q - 1, 0);
  for (const std::int64_t last : {0, 63, 64, 100, 127, 128, 250, 400, 450}) {
    if (last >= test_case.problem.seq_q - 1) {
      break;
    }
    for (const double later : {-40.0, -4000.0, kNan, kInfinity}) {
      if (!std::isfinite(later) && needs_finite_values(kernel.name)) {
        continue;
      }
      const Result after = rows_up_to(kernel, test_case, last, later);
      if (!std::ranges::equal(after.o, std::span(unchanged.o).first(after.o.size())) ||
          !std::ranges::equal(after.lse, std::span(unchanged.lse).first(after.lse.size()))) {
        return "rows up to " + std::to_string(last) + " of " + std::to_string(test_case.problem.seq_q) +
               " change when later ones become " + std::to_string(later);
      }
    }
  }
  return "";
}

std::string causal_never_sees_the_future(const ForwardKernel& kernel, DType dtype) {
  bool asked = false;
  for (const Strategy strategy : {Strategy::exact, Strategy::lsh, Strategy::energy}) {
    // The long one has scores that rise from tile to tile, and later rows whose sums leave the range of the early
    // ones'.
    for (const bool is_long : {false, true}) {
      Case test_case = is_long ? case_of("future", dtype, 600, 600, 64) : case_of("future", dtype, 300, 300, 32);
      if (is_long) {
        test_case.problem.scale = 0.5;
      }
      test_case.problem.causal = Causal::top_left;
      test_case.grouping.strategy = strategy;
      test_case.grouping.group_size = strategy == Strategy::exact ? 1 : 2;
      test_case.grouping.block = is_long ? 128 : 64;
      test_case.grouping.order_from = OrderFrom::previous;
      if (!kernel.supports(test_case.problem, test_case.grouping).empty()) {
        continue;
      }
      asked = true;
      if (const std::string fault = sees_the_future(kernel, test_case); !fault.empty()) {
        return fault;
      }
    }
  }
  return asked ? "" : kNotAsked;
}

// The status and words of what a call throws; no words if it does not.
std::pair<Status, std::string> failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
  return {};
}

}  // namespace

// Tensor cores multiply what is hidden by 0, which makes NaN of an infinity and of NaN.
bool needs_finite_values(const std::string& kernel) {
  return kernel.starts_with("sm80/") || kernel.starts_with("sm90/");
}

bool rounds_the_scale(const std::string& kernel, const Case& test_case) {
  const Problem& problem = test_case.problem;
  const Grouping& grouping = test_case.grouping;
  if (problem.dtype != DType::bf16 || grouping.strategy == Strategy::exact) {
    return false;
  }
  const bool without_row_max = !common::has_near_keys(grouping) && problem.mask.kind == MaskKind::none &&
                               problem.softcap == 0 && !problem.window_left.has_value();
  return kernel.starts_with("sm90/forward") || (kernel.starts_with("sm80/forward") && without_row_max);
}

std::vector<Extreme> extremes(DType dtype) {
  constexpr double kLowest = std::numeric_limits<float>::lowest();
  return {biased("the lowest finite bias hides nothing", dtype, kLowest, kLowest),
          biased("the lowest finite bias on half of the keys", dtype, kLowest, 0),
          biased("equal huge biases", dtype, -1e17, -1e17),
          infinite_value("probability 0 times infinity", dtype, 7, -1000, 7),
          infinite_value("an infinity is forgotten when its weight underflows", dtype, 290, 1000, 3)};
}

std::string check_extreme(const ForwardKernel& kernel, Instance instance) {
  const Problem& p = instance.test_case.problem;
  run_on_device(kernel, p, instance.test_case.grouping, instance.forward());
  const Result got = written(p, instance.o, instance.lse);
  const Result truth = textbook(instance, Precision::float64);
  const Result plain = textbook(instance, Precision::plain);
  return judge(got.o, truth.o, largest_error(plain.o, truth.o), p.dtype);
}

std::vector<Instance> with_non_finite(const Case& test_case) {
  std::vector<Instance> result;
  for (const double value : {kNan, kInfinity, -kInfinity}) {
    for (const auto buffer : {&Instance::q, &Instance::k, &Instance::v}) {
      Instance instance(test_case);
      (instance.*buffer).set((instance.*buffer).count() / 2, value);
      instance.make_order();
      instance.test_case.name += ", " + std::to_string(value) + " in " +
                                 (buffer == &Instance::q   ? "Q"
                                  : buffer == &Instance::k ? "K"
                                                           : "V");
      result.push_back(instance);
    }
  }
  return result;
}

// An infinity in a far key of one head, where the last tile of queries has rows for one group of 64 alone: what is kept
// of another head, and its O, stay as they are.
std::string infinities_stay_in_their_head(const ForwardKernel& kernel, DType dtype) {
  constexpr std::int64_t kFarKey = 600;
  Case test_case = with_dtype(find("skip, energy"), dtype);
  test_case.problem.seq_q = 160;
  test_case.problem = contiguous(test_case.problem);
  const Problem& p = test_case.problem;
  if (!kernel.supports(p, test_case.grouping).empty()) {
    return kNotAsked;
  }
  const auto second_head = [&](Instance& instance) {
    run_on_device(kernel, p, test_case.grouping, instance.forward());
    const std::int64_t values = p.seq_q * p.head_dim_v;
    std::vector<double> result;
    for (std::int64_t n = values; n < 2 * values; ++n) {
      result.push_back(instance.o.at(n));
    }
    result.insert(result.end(), instance.halves.begin() + static_cast<std::ptrdiff_t>(instance.halves.size() / 2),
                  instance.halves.end());
    return result;
  };
  Instance instance(test_case);
  const std::vector<double> before = second_head(instance);
  set_row(instance.k, kFarKey, p.head_dim, kInfinity);
  return second_head(instance) == before ? "" : "an infinity in the first head's K changes the second head";
}

bool reaches_everything(const Instance& instance) {
  const Case& test_case = instance.test_case;
  return test_case.problem.causal == Causal::none && test_case.problem.mask.kind == MaskKind::none &&
         test_case.grouping.strategy == Strategy::exact && test_case.name.find("nan in") != std::string::npos;
}

std::vector<Property<ForwardKernel>> properties() {
  return {{"LSE is optional", lse_is_optional},
          {"G = 1 is exact", group_size_one_is_exact},
          {"masks of any strides", masks_of_any_strides},
          {"rows far apart", check_large_strides},
          {"an infinity stays in its head", infinities_stay_in_their_head},
          {"names its tiles", names_its_tiles},
          {"causal with previous never sees the future", causal_never_sees_the_future},
          {"long sums lose little",
           [](const ForwardKernel& kernel, DType dtype) { return long_sums_lose_little(kernel, dtype); }},
          {"lengths are clamped", lengths_are_clamped},
          {"sequences end anywhere",
           [](const ForwardKernel& kernel, DType dtype) { return sequences_end_anywhere(kernel, dtype); }}};
}

std::string check_unsupported() {
  Instance instance(with_dtype(find("lsh, mean"), DType::f32));
  const Problem& p = instance.test_case.problem;
  const Grouping& g = instance.test_case.grouping;
  Execution execution;
  execution.device = Device::cuda;
  const auto [status, words] = failure([&] { forward(p, g, instance.forward(), execution); });
  if (status != Status::invalid_argument || words != "Q is in host memory; allowed: memory of the CUDA device") {
    return "host memory: " + words;
  }
  Problem f64 = p;
  f64.dtype = DType::f64;
  const auto [unsupported, reason] = failure([&] { forward(f64, g, instance.forward(), execution); });
  if (unsupported != Status::unsupported || reason.find("plain/forward: computes in fp32") == std::string::npos) {
    return "f64: " + reason;
  }
  Case half = with_dtype(find("lsh, mean"), DType::bf16);
  half.grouping.block = 48;  // which Hopper's own kernels do not take
  const auto backward_kernel = [&half](bool deterministic) {
    return explain(Operation::backward, half.problem, half.grouping, Device::cuda, deterministic).kernel;
  };
  if (backward_kernel(true) != "sm80/backward" || backward_kernel(false) != "sm80/backward_atomics") {
    return "deterministic: " + backward_kernel(true) + ", else: " + backward_kernel(false);
  }
  for (const auto& [kernel, verdict] :
       explain(Operation::backward, half.problem, half.grouping, Device::cuda).verdicts) {
    const bool serves = kernel.name == std::string_view("sm80/backward");
    if (verdict.empty() ? !kernel.deterministic : serves) {
      return kernel.name + ": " + verdict;
    }
  }
  const std::size_t needed = workspace_bytes(Operation::backward, p, g, execution);
  const Case& test_case = instance.test_case;
  Buffer any(p.batch * p.heads_q * (p.seq_q + p.seq_k) * p.head_dim, test_case.problem.dtype);
  BackwardTensors tensors{instance.q_data(), instance.k_data(), instance.v_data(), nullptr, instance.order.data()};
  tensors.o = tensors.lse = tensors.d_o = any.data();
  tensors.d_q = tensors.d_k = tensors.d_v = any.data();
  execution.workspace_bytes = needed - 1;
  const auto [memory, too_small] = failure([&] { backward(p, g, tensors, execution); });
  if (needed == 0 || memory != Status::out_of_memory) {
    return "a workspace that is too small: " + too_small;
  }
  return "";
}

}  // namespace distr::test
