// SPDX-License-Identifier: Apache-2.0
#include "inputs.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "npy.h"
#include "safetensors.h"
#include "text.h"

namespace distr::cli {
namespace {

using Path = std::filesystem::path;

// A tensor with the words that stand for it in messages.
struct InputTensor {
  std::string name;   // "q"
  std::string where;  // "q ('folder/q.npy')"
  Path path;
  Tensor tensor;
};

InputTensor named(std::string name, const Path& path, Tensor tensor) {
  std::string where = name + " (" + quoted(path.string()) + ")";
  return {std::move(name), std::move(where), path, std::move(tensor)};
}

// The first names.
std::string names_in(const TensorMap& tensors) {
  constexpr std::size_t kMost = 8;
  std::string names;
  std::size_t count = 0;
  for (auto entry = tensors.begin(); entry != tensors.end() && count < kMost; ++entry, ++count) {
    names += (names.empty() ? "" : ", ") + quoted(entry->first);
  }
  if (tensors.size() > count) names += " and " + std::to_string(tensors.size() - count) + " more";
  return names.empty() ? "none" : names;
}

Tensor take(TensorMap& tensors, const std::string& name, const Path& path) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) {
    throw InputError(quoted(path.string()) + " has no tensor '" + name + "'; it has: " + names_in(tensors));
  }
  return std::move(found->second);
}

// From a .npy file, or from the tensor of that name in a .safetensors file.
InputTensor read_named(const std::string& name, const Path& path) {
  if (path.extension() != ".safetensors") return named(name, path, read_npy(path));
  TensorMap tensors = read_safetensors(path);
  return named(name, path, take(tensors, name, path));
}

struct Files {
  InputTensor q, k, v;
  std::optional<InputTensor> mask;
};

Files read_one_file(const InputOptions& options) {
  if (!options.q.empty() || !options.k.empty() || !options.v.empty()) {
    throw InputError("--input and --q, --k or --v were both given; allowed: --input, or all of --q, --k and --v");
  }
  const Path path = options.file;
  TensorMap tensors = read_safetensors(path);
  Files files{named("q", path, take(tensors, "q", path)), named("k", path, take(tensors, "k", path)),
              named("v", path, take(tensors, "v", path)), std::nullopt};
  if (tensors.contains("mask")) files.mask = named("mask", path, take(tensors, "mask", path));
  if (files.mask && !options.mask.empty()) {
    throw InputError("--mask was given, and " + quoted(options.file) + " holds a mask too; allowed: one of them");
  }
  return files;
}

Files read_files(const InputOptions& options) {
  Files files;
  if (!options.file.empty()) {
    files = read_one_file(options);
  } else {
    const std::pair<const char*, const std::string&> needed[] = {
        {"--q", options.q}, {"--k", options.k}, {"--v", options.v}};
    for (const auto& [flag, path] : needed) {
      if (path.empty()) throw InputError(std::string(flag) + " is missing; needed: --q, --k and --v, or --input");
    }
    files = {read_named("q", options.q), read_named("k", options.k), read_named("v", options.v), std::nullopt};
  }
  if (!options.mask.empty()) files.mask = read_named("mask", options.mask);
  return files;
}

std::optional<DType> float_type(ElementType type) {
  switch (type) {
    case ElementType::f16:
      return DType::f16;
    case ElementType::bf16:
      return DType::bf16;
    case ElementType::f32:
      return DType::f32;
    case ElementType::f64:
      return DType::f64;
    default:
      return std::nullopt;
  }
}

DType require_float(const InputTensor& input) {
  const std::optional<DType> type = float_type(input.tensor.type);
  if (!type) {
    throw InputError(input.where + " has type " + name_of(input.tensor.type) + "; allowed: f16, bf16, f32, f64");
  }
  return *type;
}

void require_rank_and_type(const InputTensor& input, const InputTensor& q) {
  const std::size_t rank = input.tensor.shape.size();
  if (rank < 2 || rank > 4) {
    throw InputError(input.where + " has rank " + std::to_string(rank) + ", shape " + shape_text(input.tensor.shape) +
                     "; allowed: [N, d], [H, N, d] or [B, H, N, d]");
  }
  if (rank != q.tensor.shape.size()) {
    throw InputError(input.where + " has shape " + shape_text(input.tensor.shape) + ", of rank " +
                     std::to_string(rank) + "; allowed: the rank of q, which is " +
                     std::to_string(q.tensor.shape.size()));
  }
  if (require_float(input) != require_float(q)) {
    throw InputError(input.where + " has type " + name_of(input.tensor.type) + "; allowed: the type of q, which is " +
                     name_of(q.tensor.type));
  }
}

// [batch, heads, rows, dim], with 1 for axes that the tensor lacks.
std::array<std::int64_t, 4> shape_of_four(const Tensor& tensor) {
  std::array<std::int64_t, 4> shape{1, 1, 1, 1};
  std::copy_backward(tensor.shape.begin(), tensor.shape.end(), shape.end());
  return shape;
}

void require_equal(const char* axis, const InputTensor& left, std::int64_t left_length, const InputTensor& right,
                   std::int64_t right_length) {
  if (left_length != right_length) {
    throw InputError(left.where + " has shape " + shape_text(left.tensor.shape) + ", " + axis + " " +
                     std::to_string(left_length) + "; allowed: that of " + right.name + ", which is " +
                     std::to_string(right_length));
  }
}

Problem sizes_of(const Files& files) {
  for (const InputTensor* input : {&files.q, &files.k, &files.v}) require_rank_and_type(*input, files.q);
  const auto q = shape_of_four(files.q.tensor);
  const auto k = shape_of_four(files.k.tensor);
  const auto v = shape_of_four(files.v.tensor);
  require_equal("batch", files.k, k[0], files.q, q[0]);
  require_equal("batch", files.v, v[0], files.q, q[0]);
  require_equal("heads", files.v, v[1], files.k, k[1]);
  require_equal("length", files.v, v[2], files.k, k[2]);
  require_equal("head dimension", files.k, k[3], files.q, q[3]);
  Problem problem;
  problem.batch = q[0];
  problem.heads_q = q[1];
  problem.heads_kv = k[1];
  problem.seq_q = q[2];
  problem.seq_k = k[2];
  problem.head_dim = q[3];
  problem.head_dim_v = v[3];
  return problem;
}

Mask mask_of(const InputTensor& input) {
  const auto& shape = input.tensor.shape;
  if (shape.size() > 4) {
    throw InputError(input.where + " has rank " + std::to_string(shape.size()) + "; allowed: 0 to 4");
  }
  Mask mask;
  if (input.tensor.type == ElementType::boolean) {
    mask.kind = MaskKind::boolean;
  } else if (const auto type = float_type(input.tensor.type)) {
    mask.kind = MaskKind::additive;
    mask.dtype = *type;
  } else {
    throw InputError(input.where + " has type " + name_of(input.tensor.type) + "; allowed: bool, f16, bf16, f32, f64");
  }
  mask.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    mask.shape[axis] = shape[axis];
    mask.strides[axis] = shape[axis] == 1 ? 0 : stride;
    stride *= shape[axis];
  }
  return mask;
}

template <typename Integer>
std::vector<std::int32_t> permutations(const InputTensor& input, std::int64_t head_dim) {
  const std::size_t dim = static_cast<std::size_t>(head_dim);
  const std::size_t count = input.tensor.data.size() / sizeof(Integer);
  std::vector<Integer> values(count);
  if (count > 0) std::memcpy(values.data(), input.tensor.data.data(), count * sizeof(Integer));
  std::vector<std::int32_t> order(count);
  std::vector<std::size_t> seen_in_row(dim, 0);  // 1 + the last row that had the column
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t row = i / dim;
    const Integer value = values[i];
    const bool in_range = std::cmp_greater_equal(value, 0) && std::cmp_less(value, head_dim);
    if (!in_range || seen_in_row[static_cast<std::size_t>(value)] == row + 1) {
      throw InputError(input.where + " is no permutation in row " + std::to_string(row) + ": entry " +
                       std::to_string(i % dim) + " is " + std::to_string(value) +
                       (in_range ? ", which the row has already" : "") + "; allowed: each of 0 to " +
                       std::to_string(head_dim - 1) + " once");
    }
    seen_in_row[static_cast<std::size_t>(value)] = row + 1;
    order[i] = static_cast<std::int32_t>(value);
  }
  return order;
}

}  // namespace

ForwardTensors Inputs::tensors() const {
  ForwardTensors tensors;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.mask = mask.data();
  return tensors;
}

std::vector<std::int64_t> Inputs::shape_like_input(std::vector<std::int64_t> shape) const {
  shape.erase(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(4 - rank));
  return shape;
}

Inputs read_inputs(const InputOptions& input_options, const RunOptions& run_options) {
  Files files = read_files(input_options);
  Inputs inputs{};
  inputs.problem = sizes_of(files);
  inputs.file_type = require_float(files.q);
  inputs.rank = files.q.tensor.shape.size();
  inputs.problem.dtype = run_options.dtype.value_or(inputs.file_type);
  inputs.problem.causal = run_options.causal;
  inputs.problem.scale = run_options.scale;
  inputs.problem.softcap = run_options.softcap;
  if (files.mask) {
    inputs.problem.mask = mask_of(*files.mask);
    inputs.mask = std::move(files.mask->tensor.data);
    inputs.paths["mask"] = files.mask->path.string();
  }
  validate(inputs.problem);
  inputs.problem = contiguous(inputs.problem);
  const std::pair<InputTensor&, std::vector<std::byte>&> targets[] = {
      {files.q, inputs.q}, {files.k, inputs.k}, {files.v, inputs.v}};
  for (const auto& [file, target] : targets) {
    inputs.paths[file.name] = file.path.string();
    target = converted(std::exchange(file.tensor.data, {}), inputs.file_type, inputs.problem.dtype);
  }
  return inputs;
}

std::vector<std::int32_t> read_order(const Path& path, const Inputs& inputs, const Grouping& grouping) {
  const InputTensor order = read_named("order", path);
  const auto full = order_shape(inputs.problem, grouping);
  const std::vector<std::int64_t> full_shape(full.begin(), full.end());
  const std::vector<std::int64_t> short_shape = inputs.shape_like_input(full_shape);
  if (order.tensor.shape != full_shape && order.tensor.shape != short_shape) {
    throw InputError(order.where + " has shape " + shape_text(order.tensor.shape) +
                     "; allowed: " + shape_text(short_shape) + ", the columns for every block of rows");
  }
  const std::int64_t head_dim = inputs.problem.head_dim;
  switch (order.tensor.type) {
    case ElementType::i8:
      return permutations<std::int8_t>(order, head_dim);
    case ElementType::i16:
      return permutations<std::int16_t>(order, head_dim);
    case ElementType::i32:
      return permutations<std::int32_t>(order, head_dim);
    case ElementType::i64:
      return permutations<std::int64_t>(order, head_dim);
    case ElementType::u8:
      return permutations<std::uint8_t>(order, head_dim);
    case ElementType::u16:
      return permutations<std::uint16_t>(order, head_dim);
    case ElementType::u32:
      return permutations<std::uint32_t>(order, head_dim);
    case ElementType::u64:
      return permutations<std::uint64_t>(order, head_dim);
    default:
      throw InputError(order.where + " has type " + name_of(order.tensor.type) + "; allowed: any integer type");
  }
}

ElementType element_type(DType dtype) noexcept {
  switch (dtype) {
    case DType::f16:
      return ElementType::f16;
    case DType::bf16:
      return ElementType::bf16;
    case DType::f32:
      return ElementType::f32;
    case DType::f64:
      break;
  }
  return ElementType::f64;
}

std::int64_t count_of(std::span<const std::int64_t> shape) noexcept {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::int64_t count = 1;
  for (const std::int64_t length : shape) count *= length;
  return count;
}

std::vector<std::byte> converted(std::vector<std::byte> data, DType from, DType to) {
  if (from == to) return data;
  const std::size_t count = data.size() / size_of(from);
  std::vector<std::byte> result(count * size_of(to));
  convert(data.data(), from, result.data(), to, static_cast<std::int64_t>(count));
  return result;
}

}  // namespace distr::cli
