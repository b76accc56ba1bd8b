// SPDX-License-Identifier: Apache-2.0
#include "distributed/chunks.h"

#include <string>

#include "distr/error.h"

namespace distr::distributed {
namespace {

constexpr std::int64_t kChunksOfDevice = 12;  // what fills and drains the pipeline is then a small part

std::int64_t ceil_div(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

// The begin of part `index` of `parts` about equal ones of `count`.
std::int64_t begin_of(std::int64_t index, std::int64_t parts, std::int64_t count) { return count * index / parts; }

}  // namespace

std::vector<Chunk> chunks_of(const Problem& problem, std::int64_t chunk_heads, std::size_t devices) {
  const std::int64_t sharing = problem.heads_q / problem.heads_kv;
  const bool is_whole_entries = chunk_heads >= problem.heads_q;
  if (chunk_heads < 0 || (!is_whole_entries && chunk_heads % sharing != 0)) {
    throw Error(Status::invalid_argument, "chunk_heads is " + std::to_string(chunk_heads) +
                                              "; allowed: 0, multiples of " + std::to_string(sharing) +
                                              " (the heads of Q that share one of K and V), and " +
                                              std::to_string(problem.heads_q) + " and more (whole batch entries)");
  }
  const std::int64_t all = problem.batch * problem.heads_q;
  std::int64_t heads = chunk_heads;
  if (heads == 0) {
    const std::int64_t fair = ceil_div(all, kChunksOfDevice * static_cast<std::int64_t>(devices));
    heads = std::max<std::int64_t>(ceil_div(fair, sharing), 1) * sharing;
  }
  std::vector<Chunk> chunks;
  if (all == 0 || problem.seq_q == 0) {
    return chunks;
  }
  if (heads >= problem.heads_q) {
    const std::int64_t count = ceil_div(problem.batch, heads / problem.heads_q);
    for (std::int64_t n = 0; n < count; ++n) {
      const std::int64_t begin = begin_of(n, count, problem.batch);
      chunks.push_back({begin, begin_of(n + 1, count, problem.batch) - begin, 0, problem.heads_q});
    }
    return chunks;
  }
  const std::int64_t count = ceil_div(problem.heads_q, heads);
  for (std::int64_t batch = 0; batch < problem.batch; ++batch) {
    for (std::int64_t n = 0; n < count; ++n) {
      const std::int64_t begin = begin_of(n, count, problem.heads_kv) * sharing;
      const std::int64_t end = begin_of(n + 1, count, problem.heads_kv) * sharing;
      chunks.push_back({batch, 1, begin, end - begin});
    }
  }
  return chunks;
}

Problem problem_of(const Problem& problem, const Chunk& chunk) {
  Problem part = problem;
  part.batch = chunk.batches;
  part.heads_kv = chunk.heads / (problem.heads_q / problem.heads_kv);
  part.heads_q = chunk.heads;
  return contiguous(part);
}

std::size_t HostTensor::bytes(const Chunk& chunk) const noexcept {
  return static_cast<std::size_t>(chunk.batches * (chunk.heads / heads_of_one) * rows * columns) * element_bytes;
}

std::vector<Copy> copies_of(const HostTensor& tensor, const Chunk& chunk) {
  std::vector<Copy> copies;
  const std::int64_t heads = chunk.heads / tensor.heads_of_one;
  const std::int64_t of_head = tensor.rows * tensor.columns;
  if (heads * of_head == 0) {
    return copies;
  }
  const bool rows_touch = tensor.strides.row == tensor.columns || tensor.rows == 1;
  const bool heads_touch = rows_touch && (tensor.strides.head == of_head || heads == 1);
  const auto bytes = [&tensor](std::int64_t elements) {
    return static_cast<std::size_t>(elements) * tensor.element_bytes;
  };
  const std::int64_t step = heads_touch ? heads : 1;  // heads of a copy
  for (std::int64_t batch = 0; batch < chunk.batches; ++batch) {
    for (std::int64_t head = 0; head < heads; head += step) {
      const std::int64_t from = (chunk.batch + batch) * tensor.strides.batch +
                                (chunk.head / tensor.heads_of_one + head) * tensor.strides.head;
      Copy copy{tensor.data + from * static_cast<std::int64_t>(tensor.element_bytes), bytes(step * of_head),
                bytes((batch * heads + head) * of_head), bytes(step * of_head), 1};
      if (!rows_touch) {
        copy.pitch = bytes(tensor.strides.row);
        copy.width = bytes(tensor.columns);
        copy.rows = static_cast<std::size_t>(tensor.rows);
      }
      copies.push_back(copy);
    }
  }
  return copies;
}

}  // namespace distr::distributed
