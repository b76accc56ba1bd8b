// SPDX-License-Identifier: Apache-2.0
// The operations: make_grouping -> order -> forward -> O, LSE -> backward. Pointers are to the memory of the chosen
// device; every tensor has the type and strides that its Problem gives, unless said otherwise here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distr/error.h"
#include "distr/grouping.h"
#include "distr/problem.h"

namespace distr {
inline namespace v0 {

enum class Device : std::uint8_t { cpu, cuda };
enum class Operation : std::uint8_t { grouping, forward, backward };

/// Runs body(0) .. body(threads - 1), at the same time where it can, and returns when all have.
using ParallelRun = std::function<void(int threads, const std::function<void(int thread)>& body)>;

/// Where and with what a call runs. The results have the same bits for any number of threads, and in every run unless
/// `deterministic` is false.
struct Execution {
  Device device = Device::cpu;
  int threads = 0;                  ///< CPU; 0: one for each processor this process may use
  ParallelRun parallel;             ///< CPU; empty: threads of the call's own. Set it to share a host's thread pool
  void* stream = nullptr;           ///< CUDA: a cudaStream_t
  void* workspace = nullptr;        ///< workspace_bytes() bytes, aligned to 64; CPU: null lets the call allocate
  std::size_t workspace_bytes = 0;  ///< what `workspace` holds
  /// CUDA, backward: false lets dQ be summed in an order that changes from run to run, where there is a kernel for it
  /// (list()), which then is preferred. It may take more workspace: ask workspace_bytes() with the same value.
  bool deterministic = true;
  std::string kernel;          ///< the kernel to take, one of list(); empty: the first that serves
  std::int64_t tile_rows = 0;  ///< rows of Q of a tile, among Plan::tiles(); 0: those that the kernel prefers. The
                               ///< workspace depends on it
  /// CUDA: whether the driver is asked where each tensor is, so that host memory is refused in words; false where the
  /// caller knows that all are in the current device's memory, as a framework does.
  bool check_memory = true;
  /// Called now and then, by one thread at a time (the calling one, unless `parallel` is set), with the count of
  /// finished pieces of work of the step under way; a call may have several steps. Must not throw.
  std::function<void(std::int64_t done, std::int64_t total)> progress;
};

struct GroupingTensors {
  const void* q = nullptr;
  const void* k = nullptr;        ///< read by `energy`, and for key_means
  std::int32_t* order = nullptr;  ///< out: order_shape(); not written in `given`
  float* key_means = nullptr;     ///< out: key_means_shape(), where needs_key_means()
};

/// Of sequences whose lengths are data, in memory of the call's device. On the CPU values are checked; on CUDA, where
/// nothing reads them beforehand, kernels clamp them: a length to 0 to seq_k, a start to 0 to the total, a sequence to
/// seq_q rows and seq_k keys, and to none where the next start is smaller. Rows of O that are of no sequence are not
/// written. Nothing is read or written outside of the tensors, but where starts are negative or fall, rows may be left
/// out or be those of two sequences, and Hopper's backward may end in a device failure.
struct Lengths {
  const std::int32_t* keys = nullptr;      ///< [batch], where Problem::key_lengths; 0 to seq_k
  const std::int32_t* starts_q = nullptr;  ///< [batch + 1], where Problem::packed; from 0 to total_q, never falling
  const std::int32_t* starts_k = nullptr;  ///< likewise, to total_k
};

struct ForwardTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* mask = nullptr;           ///< when problem.mask.kind != none
  const std::int32_t* order = nullptr;  ///< from make_grouping(); not read at G = 1 and for `exact`
  void* o = nullptr;                    ///< out
  void* lse = nullptr;                  ///< out, natural log, [batch, heads_q, seq_q] of lse_dtype(); null: not wanted
  const float* key_means = nullptr;     ///< from make_grouping(), where needs_key_means()
  std::int32_t* halves = nullptr;       ///< out: halves_shape(); null: not wanted. Only with `skip`
  Lengths lengths = {};
};

struct BackwardTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* mask = nullptr;
  const std::int32_t* order = nullptr;
  const void* o = nullptr;      ///< from forward()
  const void* lse = nullptr;    ///< from forward()
  const void* d_o = nullptr;    ///< gradient of O, with O's strides
  const void* d_lse = nullptr;  ///< gradient of LSE; null: zero
  void* d_q = nullptr;          ///< out, with Q's strides
  void* d_k = nullptr;          ///< out, with K's strides
  void* d_v = nullptr;          ///< out, with V's strides
  void* d_mask = nullptr;       ///< out: of an additive mask, contiguous in the mask's shape, lse_dtype(); null: no
  const float* key_means = nullptr;  ///< from make_grouping(), where needs_key_means()
  Lengths lengths = {};
};

/// All three throw Error with
///   invalid_argument: a problem or grouping that validate() refuses, a tensor that is needed and null, output strides
///     under which elements overlap, an order that is no permutation (checked on the CPU);
///   unsupported: no kernel of the device serves the problem; the message has each kernel's reason;
///   out_of_memory: the workspace is smaller than workspace_bytes();
///   device_failure: the device reported an error.
/// Outputs are untouched when a call throws the first three. They are overwritten, not added to, and must not overlap
/// any input. workspace_bytes() on the CPU: each thread's tiles; for the grouping by `energy` with `previous` also
/// batch * heads_kv * blocks * head_dim floats; for backward also batch * heads_q * seq_q * head_dim floats, with near
/// keys twice that.

/// Chooses the order of the columns for every block of Q (paper, Section 3.2: hash and sort; or energies and sort), and
/// computes the means of the keys where needs_key_means(). Writes the identity for block 0 of `previous`, at G = 1 and
/// for `exact`. In `given` the order is the caller's, and the means are all there is to compute.
void make_grouping(const Problem& problem, const Grouping& grouping, const GroupingTensors& tensors,
                   const Execution& execution = {});

/// O = softmax(scale * q_hat k_hat^T + mask) V (paper, Equation 2 with Section 3.3), and LSE. Near keys and skipped
/// halves of tiles: method, 8. At G = 1 and for `exact` without `skip`: exact attention, bit for bit the same.
void forward(const Problem& problem, const Grouping& grouping, const ForwardTensors& tensors,
             const Execution& execution = {});

/// Gradients of forward() with the order and the means of the keys held constant; Error(invalid_argument) with `skip`.
/// P is rebuilt as exp(S - LSE), so O and LSE may be those of a merge() over shards of the keys; its relative error is
/// |LSE| times the rounding of LSE, and P is 1 at most. Where |LSE| exceeds 2^24, P is 1 for every key whose S equals
/// LSE; the tensor-core kernels ("sm80/...", "sm90/...") leave out rows with |LSE| above 2.9 million, whose P is 0 in
/// all gradients.
void backward(const Problem& problem, const Grouping& grouping, const BackwardTensors& tensors,
              const Execution& execution = {});

/// One shard's result: attention over a part of the keys.
struct Partial {
  const void* o = nullptr;                        ///< [batch, heads_q, seq_q, head_dim_v]
  const void* lse = nullptr;                      ///< [batch, heads_q, seq_q] of lse_dtype(), contiguous; null: none
  std::optional<DType> dtype = std::nullopt;      ///< of O; empty: the problem's
  std::optional<Strides> strides = std::nullopt;  ///< of O; empty: those of problem.o
};

/// Merges attention over disjoint parts of the keys, computed with one and the same order, into attention over all of
/// them: LSE = log sum_p exp(LSE_p), O = sum_p exp(LSE_p - LSE) O_p. A row that no part saw gets O = 0 and LSE = -inf.
/// `lse` may be null; O and LSE may be those of one of the first 64 parts. Where no part has LSE, `lse` is null and O
/// the plain sum of the parts, as the gradients of Q over parts of the keys want it. Of `execution` device, stream and
/// check_memory are read. Sums are in fp64 on the CPU and in fp32 on CUDA, in the order of the parts; there the types
/// are f16, bf16 and f32, and of more than 64 parts O is rounded to its type after every 63. Throws
/// Error(invalid_argument) for an invalid problem, for O that is null, for LSE of some parts alone, for `lse` where no
/// part has LSE, and on CUDA where it is null of more than 64 parts that have; Error(unsupported) for f64 on CUDA.
void merge(const Problem& problem, std::span<const Partial> parts, void* o, void* lse, const Execution& execution = {});

/// Bytes of workspace that the call would need. Throws what the call would throw.
[[nodiscard]] std::size_t workspace_bytes(Operation operation, const Problem& problem, const Grouping& grouping,
                                          const Execution& execution = {});

struct KernelInfo {
  std::string name;  ///< "backend/algorithm"
  Operation operation;
  Device device;
  bool deterministic = true;  ///< else it serves where Execution::deterministic is false
};

/// Every kernel of this build, in order of preference.
[[nodiscard]] std::vector<KernelInfo> list();

/// The value of the environment variable DISTR_DISABLE_KERNELS (see explain()); empty where there is none.
[[nodiscard]] std::string_view disabled_kernels() noexcept;

struct KernelVerdict {
  KernelInfo kernel;
  std::string reason;  ///< empty: it would serve; else why not
};

struct Explanation {
  Grouping grouping;                    ///< with what is `automatic` replaced by what would run
  std::string choice;                   ///< one sentence: what was chosen and why
  std::string kernel;                   ///< the kernel that would run; empty: none
  std::vector<KernelVerdict> verdicts;  ///< of every kernel of this operation and device
};

/// What a call would do, without doing it (`deterministic`: Execution's). Kernels whose names begin as one of those
/// does that the environment variable DISTR_DISABLE_KERNELS holds, with commas between them ("sm90/,plain/forward"),
/// are passed over, here and in calls (DISTR_LEAVE_OUT, the variable's old name, is read until version 0.2). Throws
/// Error(invalid_argument) for a problem that nothing could serve, and where one of them is the beginning of no name.
[[nodiscard]] Explanation explain(Operation operation, const Problem& problem, const Grouping& grouping,
                                  Device device = Device::cpu, bool deterministic = true);

/// The grouping with what is `automatic` replaced by what a call on the device would come to. Throws as validate().
[[nodiscard]] Grouping resolve_strategy(const Problem& problem, const Grouping& grouping, Device device);

/// The vector instruction set that the CPU kernels use on this machine, "AVX3" for instance (Highway's names); "AVX3
/// and AMX" where those for bf16 multiply in its tile registers.
[[nodiscard]] std::string instruction_set();

/// Names of the devices that could run `device`'s kernels; empty: none.
[[nodiscard]] std::vector<std::string> device_names(Device device);

}  // namespace v0
}  // namespace distr
