// SPDX-License-Identifier: Apache-2.0
// `distr attend`: attention of tensors in files, written to files.
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "computation.h"
#include "distr/version.h"
#include "inputs.h"
#include "npy.h"
#include "options.h"
#include "output_files.h"
#include "progress.h"
#include "report.h"
#include "safetensors.h"
#include "streamed.h"
#include "text.h"

namespace distr::cli {
namespace {

struct AttendOptions {
  InputOptions input;
  RunOptions run;
  GroupingOptions grouping;
  StreamFlags stream;
  std::string out, lse, order_out, halves_out;  // paths; empty: not given
  bool json = false;
};

struct Result {
  Grouping grouping;  // `auto` replaced
  std::string choice;
  std::string kernel;
  Device device = Device::cpu;
  std::vector<std::int32_t> order;   // empty: not needed
  std::vector<std::int32_t> halves;  // empty: nothing is skipped
  Tensor o, lse;
  double seconds_grouping = 0;
  double seconds_forward = 0;
  std::unique_ptr<Json> stream;  // of what was streamed; null: nothing
};

// The bytes of a file that holds one tensor, in the format of the path's extension.
std::vector<std::byte> format_file(const std::string& path, const std::string& name, Tensor tensor) {
  if (std::filesystem::path(path).extension() == ".npy") return format_npy(tensor);
  TensorMap tensors;
  tensors.emplace(name, std::move(tensor));
  return format_safetensors(tensors);
}

void reserve(OutputFiles& files, const std::string& flag, const std::string& path) {
  if (path.empty()) return;
  const auto extension = std::filesystem::path(path).extension();
  if (extension != ".npy" && extension != ".safetensors") {
    throw InputError(flag + ": " + quoted(path) + " has the extension " + quoted(extension.string()) +
                     "; allowed: .npy, .safetensors");
  }
  files.reserve(path);
}

// Whether the kernel or the user wants an order that was not given.
bool needs_order(const AttendOptions& options, const Grouping& grouping) {
  const bool is_callers = traits(grouping.strategy).order == OrderSource::caller && reads_order(grouping);
  if (is_callers && options.grouping.order.empty()) {
    throw InputError(std::string("--strategy: '") + name_of(grouping.strategy) +
                     "' computes no order; allowed: --order FILE with it");
  }
  return reads_order(grouping) ? options.grouping.order.empty() : !options.order_out.empty();
}

// Block 0 of `previous` is exact whatever the order given, and is written as 0 .. d-1.
void clear_first_blocks(const Problem& problem, Result& result) {
  const auto shape = order_shape(problem, result.grouping);
  for (std::int64_t head = 0; head < shape[0] * shape[1] && shape[2] > 0; ++head) {
    const auto row = result.order.begin() + head * shape[2] * shape[3];
    std::iota(row, row + shape[3], 0);
  }
}

// The plans of a run. They are made first, so that what no kernel serves is refused before anything is computed.
struct Plans {
  Plan forward;
  bool makes_order = false;      // where an order is wanted that was not given
  std::optional<Plan> grouping;  // there, and where there are means of the keys
};

// O and LSE in the types and shapes of their files.
void set_outputs(const Inputs& inputs, std::vector<std::byte> o, std::vector<std::byte> lse, Result& result) {
  const Problem& problem = inputs.problem;
  result.o = {element_type(inputs.file_type),
              inputs.shape_like_input({problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v}),
              converted(std::move(o), problem.dtype, inputs.file_type)};
  result.lse = {ElementType::f32, inputs.shape_like_input({problem.batch, problem.heads_q, problem.seq_q}),
                converted(std::move(lse), problem.lse_dtype(), DType::f32)};
}

// Runs what is to be run, with a time for each step.
void run(const Inputs& inputs, const Plans& plans, Computation& computation, Result& result) {
  Progress progress;
  const bool groups = plans.grouping.has_value();
  const bool skips = result.grouping.skip > 0;
  computation.mark();
  if (groups) {
    computation.execution().progress = progress.step("grouping");
    computation.make_order(*plans.grouping);
  }
  computation.mark();
  if (!plans.makes_order && !result.order.empty()) computation.use_order(result.order);
  computation.execution().progress = progress.step("attention");
  computation.mark();
  if (skips) {
    computation.forward_counting(plans.forward);
  } else {
    computation.forward(plans.forward);
  }
  computation.mark();
  const std::vector<double> laps = computation.laps();
  result.seconds_grouping = groups ? laps.at(0) * 1e-3 : 0;
  result.seconds_forward = laps.at(2) * 1e-3;
  if (skips) result.halves = computation.halves();

  set_outputs(inputs, computation.take_o(), computation.take_lse(), result);
  if (plans.makes_order) result.order = computation.order();
}

Result compute(const AttendOptions& options, const Inputs& inputs, Device device) {
  const Grouping wanted = grouping_of(options.grouping, inputs.problem.head_dim, options.run.seed);
  Execution execution;
  execution.device = device;
  execution.threads = options.run.threads;
  Plans plans{plan(Operation::forward, inputs.problem, wanted, execution), false, std::nullopt};
  Result result;
  result.grouping = plans.forward.grouping();
  result.choice = plans.forward.choice();
  result.kernel = plans.forward.kernel().name;
  result.device = device;
  plans.makes_order = needs_order(options, result.grouping);
  if (plans.makes_order || needs_key_means(result.grouping)) {
    plans.grouping = plans.forward.for_operation(Operation::grouping);
  }
  if (!options.grouping.order.empty()) {
    result.order = read_order(options.grouping.order, inputs, result.grouping);
    const bool is_computed = traits(result.grouping.strategy).order == OrderSource::computed;
    if (is_computed && result.grouping.order_from == OrderFrom::previous) clear_first_blocks(inputs.problem, result);
  }
  const auto outputs = options.lse.empty() ? Computation::Outputs::o : Computation::Outputs::o_and_lse;
  Computation computation(inputs, outputs, device, options.run.threads);
  run(inputs, plans, computation, result);
  return result;
}

// The same of tensors that stay in host memory, chunk by chunk; orders are computed with each chunk.
Result stream(const AttendOptions& options, const Inputs& inputs, Device device) {
  if (!options.order_out.empty()) {
    throw InputError(
        "--order-out: orders are not kept where chunks are streamed; allowed: without --devices and "
        "--chunk-heads");
  }
  const Problem& problem = inputs.problem;
  Progress progress;
  StreamOptions how = stream_options(options.stream, options.run, device);
  how.progress = progress.step("attention");
  StreamedAttention attention(problem, grouping_of(options.grouping, problem.head_dim, options.run.seed), how);
  Result result;
  result.grouping = attention.grouping();
  result.choice = attention.choice();
  result.kernel = attention.kernel().name;
  result.device = device;
  result.stream = std::make_unique<Json>(stream_json(attention, how));
  static_cast<void>(needs_order(options, result.grouping));  // says so where one is missing
  if (!options.grouping.order.empty()) result.order = read_order(options.grouping.order, inputs, result.grouping);
  const auto bytes = [&problem](std::int64_t columns, DType type) {
    const std::int64_t shape[] = {problem.batch, problem.heads_q, problem.seq_q, columns};
    return static_cast<std::size_t>(count_of(shape)) * size_of(type);
  };
  std::vector<std::byte> o(bytes(problem.head_dim_v, problem.dtype));
  std::vector<std::byte> lse(options.lse.empty() ? 0 : bytes(1, problem.lse_dtype()));
  if (result.grouping.skip > 0) result.halves.resize(static_cast<std::size_t>(count_of(halves_shape(problem))));
  ForwardTensors tensors = inputs.tensors();
  tensors.order = result.order.empty() ? nullptr : result.order.data();
  tensors.o = o.data();
  tensors.lse = lse.empty() ? nullptr : lse.data();
  tensors.halves = result.halves.empty() ? nullptr : result.halves.data();
  const auto start = std::chrono::steady_clock::now();
  const std::array pins{pinned(inputs.q, device), pinned(inputs.k, device), pinned(inputs.v, device),
                        pinned(o, device)};
  const auto ready = std::chrono::steady_clock::now();
  attention.run(tensors);
  (*result.stream)["seconds_pinning"] = std::chrono::duration<double>(ready - start).count();
  result.seconds_forward = std::chrono::duration<double>(std::chrono::steady_clock::now() - ready).count();
  set_outputs(inputs, std::move(o), std::move(lse), result);
  return result;
}

void write_files(const AttendOptions& options, const Inputs& inputs, Result& result, OutputFiles& files) {
  files.write(options.out, format_file(options.out, "o", std::move(result.o)));
  if (!options.lse.empty()) files.write(options.lse, format_file(options.lse, "lse", std::move(result.lse)));
  if (!options.order_out.empty()) {
    const auto shape = order_shape(inputs.problem, result.grouping);
    Tensor order{ElementType::i32, inputs.shape_like_input({shape.begin(), shape.end()}), {}};
    order.data.resize(result.order.size() * sizeof(std::int32_t));
    if (!result.order.empty()) std::memcpy(order.data.data(), result.order.data(), order.data.size());
    files.write(options.order_out, format_file(options.order_out, "order", std::move(order)));
  }
  if (!options.halves_out.empty()) {
    const auto shape = halves_shape(inputs.problem);
    Tensor halves{ElementType::i32, inputs.shape_like_input({shape.begin(), shape.end()}), {}};
    halves.data.resize(result.halves.size() * sizeof(std::int32_t));
    if (!result.halves.empty()) std::memcpy(halves.data.data(), result.halves.data(), halves.data.size());
    files.write(options.halves_out, format_file(options.halves_out, "halves", std::move(halves)));
  }
  files.commit();
}

void print_json(const AttendOptions& options, const Inputs& inputs, const Result& result, double seconds_total) {
  Json json = {{"version", version()}, {"op", "forward"}, {"kernel", result.kernel}};
  json.update(sizes_json(inputs.problem));
  json["causal_corner"] = name_of(inputs.problem.causal);
  json["mask"] = name_of(inputs.problem.mask.kind);
  json["scale"] = inputs.problem.softmax_scale();
  json.update(grouping_json(inputs.problem, result.grouping));
  const std::optional<double> kept = kept_share(result.halves);
  json["kept_share"] = kept.has_value() ? Json(*kept) : Json(nullptr);
  json["strategy_asked"] = name_of(options.grouping.grouping.strategy);
  json["choice"] = result.choice;
  json["seed"] = options.run.seed;
  json["device"] = name_of(result.device);
  json["gpu"] = result.device == Device::cuda ? Json(cuda_device().name) : Json(nullptr);
  json["threads"] = options.run.threads > 0 ? options.run.threads : processor_count();
  json["seconds_grouping"] = result.seconds_grouping;
  json["seconds_forward"] = result.seconds_forward;
  json["seconds_total"] = seconds_total;
  if (result.stream != nullptr) json["stream"] = *result.stream;
  json["inputs"] = inputs.paths;
  json["outputs"] = {{"o", options.out}};
  if (!options.lse.empty()) json["outputs"]["lse"] = options.lse;
  if (!options.order_out.empty()) json["outputs"]["order"] = options.order_out;
  if (!options.halves_out.empty()) json["outputs"]["halves"] = options.halves_out;
  std::cout << json_text(json) << '\n';
}

void print_summary(const AttendOptions& options, const Inputs& inputs, const Result& result, double seconds_total) {
  std::cout << "problem   " << sizes_text(inputs.problem) << '\n'
            << "grouping  " << grouping_text(result.grouping) << '\n'
            << "kernel    " << result.kernel << (result.device == Device::cuda ? " on " + cuda_device().name : "")
            << '\n';
  if (result.stream != nullptr) {
    std::cout << "chunks    " << (*result.stream)["chunks"] << ", with "
              << significant((*result.stream)["device_bytes"].get<double>() / 1e6, 3) << " MB on each device\n";
  }
  if (const std::optional<double> kept = kept_share(result.halves); kept.has_value()) {
    std::cout << "kept      " << significant(*kept, 3) << " of the far halves of tiles\n";
  }
  std::cout << "seconds   grouping " << significant(result.seconds_grouping) << ", attention "
            << significant(result.seconds_forward) << ", with files " << significant(seconds_total) << '\n'
            << "output    " << options.out << '\n';
  if (!options.lse.empty()) std::cout << "LSE       " << options.lse << '\n';
  if (!options.order_out.empty()) std::cout << "order     " << options.order_out << '\n';
  if (!options.halves_out.empty()) std::cout << "halves    " << options.halves_out << '\n';
}

void attend(const AttendOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const bool is_streamed = options.stream.any();
  const Device device =
      is_streamed ? require_stream_device(options.stream, options.run) : require_device(options.run.device);
  OutputFiles files;
  reserve(files, "--out", options.out);
  reserve(files, "--lse", options.lse);
  reserve(files, "--order-out", options.order_out);
  reserve(files, "--halves-out", options.halves_out);
  if (!options.halves_out.empty() && options.grouping.grouping.skip == 0) {
    throw InputError("--halves-out: nothing is skipped, so there is nothing to count; allowed: with a --skip above 0");
  }
  Inputs inputs = read_inputs(options.input, options.run);
  options.run.window_size.set(inputs.problem, options.grouping.grouping.key_offset);
  Result result = (is_streamed ? stream : compute)(options, inputs, device);
  write_files(options, inputs, result, files);
  if (options.grouping.grouping.strategy == Strategy::automatic) {
    std::cerr << "distr: strategy auto: " << result.choice << '\n';
  }
  const auto print = options.json ? print_json : print_summary;
  print(options, inputs, result, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace

void add_attend(CLI::App& app) {
  CLI::App* command = app.add_subcommand("attend", "Attention of tensors in files, exact or approximate");
  const auto options = std::make_shared<AttendOptions>();
  add_input_options(*command, options->input);
  const std::string type = "FILE.npy|safetensors";
  add_path(*command, "--out", options->out, type, "O, of Q's rank and type; .npy has no bf16 and holds f4 then (exact)")
      ->required()
      ->group(kOutputGroup);
  add_path(*command, "--lse", options->lse, type, "Log-sum-exp of each row's scores, f4 [B, H, Nq], axes as Q has them")
      ->group(kOutputGroup);
  add_path(*command, "--order-out", options->order_out, type,
           "The order of columns that was used, i4 [B, H, blocks, d]")
      ->group(kOutputGroup);
  add_path(*command, "--halves-out", options->halves_out, type,
           "With --skip: far halves of tiles kept, and all, for 64 rows; i4 [B, H, Nq / 64, 2]")
      ->group(kOutputGroup);
  command->add_flag("--json", options->json, "Print one JSON object instead of a summary")->group(kOutputGroup);
  add_grouping_options(*command, options->grouping);
  add_path(*command, "--order", options->grouping.order, type, "Use this order of columns, of any integer type")
      ->group(kGroupingGroup);
  add_run_options(*command, options->run);
  add_stream_flags(*command, options->stream);
  command->footer(
      "Example: distr attend --q q.npy --k k.npy --v v.npy --out o.npy --strategy energy --group-size 2\n"
      "Tensors in .safetensors output are named o, lse, order and halves. Existing files are replaced.");
  command->callback([options] { attend(*options); });
}

}  // namespace distr::cli
