// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes. A new head dim is one line here.
#pragma once

#include <array>

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/sm80/backward_dkdv.cuh"
#include "cuda/sm80/backward_dq.cuh"
#include "cuda/sm80/backward_dq_atomics.cuh"
#include "cuda/sm80/backward_variants.h"
#include "cuda/sm80/heuristics.h"

namespace distr::cuda::sm80 {

// How many thread blocks run at once, where some take longer than others; else 0.
template <class C>
[[nodiscard]] std::int64_t resident_ctas(const DeviceProblem& problem) {
  return problem.causal ? std::int64_t{C::kCtasPerSm} * device_properties().num_sms : 0;
}

// When the kernel of dK and dV starts: when the launch before is done, or beside that of dQ, on which it does not
// count.
enum class Start : std::uint8_t { in_order, beside_dq };

template <class... Parameters, class... Arguments>
void launch_at(Start start, void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, void* stream,
               const Arguments&... arguments) {
  if (start == Start::beside_dq) {
    launch_dependent(kernel, grid, threads, shared, stream, arguments...);
  } else {
    launch(kernel, grid, threads, shared, stream, arguments...);
  }
}

template <class C>
void launch_dkdv(BackwardParameters p, Start start, void* stream) {
  const DeviceProblem& problem = p.problem;
  const std::int64_t heads = problem.batch * problem.heads_kv;
  const std::int64_t ctas = heads * ((problem.seq_k + C::kKeys - 1) / C::kKeys);
  const std::int64_t row_bytes = (problem.head_dim + problem.head_dim_v) * 2 + (C::kAccumulatesDq ? C::kDim * 4 : 0);
  if (ctas > 0) {
    p.interleaved = interleaved_backward_heads(heads, problem.heads_q / problem.heads_kv * problem.seq_q * row_bytes,
                                               ctas * C::kParts, resident_ctas<C>(problem));
    allow_shared_memory<backward_dkdv<C>, sizeof(typename C::Storage)>();
    launch_at(start, backward_dkdv<C>, dim3(static_cast<unsigned>(ctas), C::kParts), C::kThreads,
              sizeof(typename C::Storage), stream, p);
  }
}

// dQ, and beside it dK and dV, whose thread blocks take the room that those of dQ leave.
template <class T, int kDim, Masks kServes>
void launch_backward(const BackwardParameters& parameters, void* stream) {
  using Queries = DqShape<T, kDim, kServes>;
  BackwardParameters p = parameters;
  const DeviceProblem& problem = p.problem;
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t ctas = heads * ((problem.seq_q + Queries::kRows - 1) / Queries::kRows);
  if (ctas > 0) {
    p.interleaved = interleaved_backward_heads(heads, problem.seq_k * (problem.head_dim + problem.head_dim_v) * 2, ctas,
                                               resident_ctas<Queries>(problem));
    allow_shared_memory<backward_dq<Queries>, sizeof(typename Queries::Storage)>();
    launch(backward_dq<Queries>, dim3(static_cast<unsigned>(ctas)), Queries::kThreads,
           sizeof(typename Queries::Storage), stream, p);
  }
  launch_dkdv<DkDvShape<T, kDim, kServes, Gradients::of_keys>>(parameters,
                                                               ctas > 0 ? Start::beside_dq : Start::in_order, stream);
}

// Packed sequences: as many thread blocks for each as the longest has tiles.
template <class T, int kDim, Masks kServes>
void launch_backward_of_sequences(const BackwardParameters& parameters, void* stream) {
  using Keys = DkDvShape<T, kDim, kServes, Gradients::of_keys>;
  using Queries = DqShape<T, kDim, kServes>;
  BackwardParameters p = parameters;
  const DeviceProblem& problem = p.problem;
  const std::int64_t of_keys = problem.heads_kv * ((problem.seq_k + Keys::kKeys - 1) / Keys::kKeys);
  const std::int64_t of_queries = problem.heads_q * ((problem.seq_q + Queries::kRows - 1) / Queries::kRows);
  p.interleaved = 1;
  const auto ctas = [&](std::int64_t of_sequence) { return static_cast<unsigned>(problem.batch * of_sequence); };
  if (of_queries > 0) {
    allow_shared_memory<sequences_dq<Queries>, sizeof(typename Queries::Storage)>();
    launch(sequences_dq<Queries>, dim3(ctas(of_queries)), Queries::kThreads, sizeof(typename Queries::Storage), stream,
           p, static_cast<unsigned>(of_queries));
  }
  if (of_keys > 0) {
    allow_shared_memory<sequences_dkdv<Keys>, sizeof(typename Keys::Storage)>();
    launch_at(of_queries > 0 ? Start::beside_dq : Start::in_order, sequences_dkdv<Keys>,
              dim3(ctas(of_keys), Keys::kParts), Keys::kThreads, sizeof(typename Keys::Storage), stream, p,
              static_cast<unsigned>(of_keys));
  }
}

template <class T, int kDim, Masks kServes>
void launch_backward_atomics(const BackwardParameters& parameters, void* stream) {
  using Convert = ConvertDqShape<T, kDim>;
  BackwardParameters p = parameters;
  const DeviceProblem& problem = p.problem;
  const std::int64_t heads = problem.batch * problem.heads_q;
  const std::int64_t ctas = heads * ((problem.seq_q + Convert::kRows - 1) / Convert::kRows);
  if (ctas > 0) {
    check(cudaMemsetAsync(p.dq_accum, 0, static_cast<std::size_t>(heads * p.stats_rows) * kDim * sizeof(float),
                          static_cast<cudaStream_t>(stream)),
          "cudaMemsetAsync");
  }
  launch_dkdv<DkDvShape<T, kDim, kServes, Gradients::all>>(p, Start::in_order, stream);
  if (ctas > 0) {
    p.interleaved = 1;
    allow_shared_memory<convert_dq<Convert>, sizeof(typename Convert::Storage)>();
    launch(convert_dq<Convert>, dim3(static_cast<unsigned>(ctas)), Convert::kThreads,
           problem.exact ? 0 : sizeof(typename Convert::Storage), stream, p);
  }
}

template <class C>
constexpr BackwardShape shape_of(int rows, int keys, int parts = 1) {
  return {rows, keys, parts, C::kThreads, static_cast<int>(sizeof(typename C::Storage)), C::kCtasPerSm};
}

// kGives: whether there is a kernel that adds dQ by atomic additions; else the two kernels serve in its place.
template <class T, int kDim, Masks kServes, Gradients kGives>
constexpr BackwardVariant backward_variant() {
  using Keys = DkDvShape<T, kDim, kServes, Gradients::of_keys>;
  using Queries = DqShape<T, kDim, kServes>;
  BackwardVariant result{kDim,
                         kServes == Masks::tensors,
                         Keys::kWindows,
                         shape_of<Keys>(Keys::kRows, Keys::kKeys, Keys::kParts),
                         shape_of<Queries>(Queries::kRows, Queries::kKeys),
                         {},
                         {},
                         &launch_backward<T, kDim, kServes>,
                         nullptr,
                         nullptr};
  if constexpr (kServes == Masks::none && kDim == 128 &&
                std::is_same_v<T, __nv_bfloat16>) {  // narrower ones are padded
    result.launch_sequences = &launch_backward_of_sequences<T, kDim, kServes>;
  }
  if constexpr (kGives == Gradients::all) {
    using All = DkDvShape<T, kDim, kServes, Gradients::all>;
    using Convert = ConvertDqShape<T, kDim>;
    result.of_all = shape_of<All>(All::kRows, All::kKeys, All::kParts);
    result.convert = shape_of<Convert>(Convert::kRows, 0);
    static_assert(All::kRows != Queries::kRows);  // by which Execution::tile_rows tells them apart
    result.launch_atomics = &launch_backward_atomics<T, kDim, kServes>;
  }
  return result;
}

// From the narrowest to the widest, those that serve masks behind the others. kGives: of d = 64 and 128 without masks,
// where atomic additions are measured (bf16).
template <class T, Gradients kGives>
inline constexpr std::array kBackwardVariants = {
    backward_variant<T, 64, Masks::none, kGives>(),
    backward_variant<T, 64, Masks::tensors, Gradients::of_keys>(),
    backward_variant<T, 128, Masks::none, kGives>(),
    backward_variant<T, 128, Masks::tensors, Gradients::of_keys>(),
    backward_variant<T, 256, Masks::tensors, Gradients::of_keys>(),
};

}  // namespace distr::cuda::sm80
