// SPDX-License-Identifier: Apache-2.0
// `distr blocks`: the paper's rule for the block sizes l and m on a GPU, beside its Table 2.
#include "distr/blocks.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "options.h"
#include "report.h"
#include "settings.h"
#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

constexpr std::int64_t kKilobyte = 1024;  // the paper's: 1000 bytes do not give its numbers
constexpr std::int64_t kMaxSharedMemory = std::int64_t{1} << 24;
constexpr std::int64_t kMaxTensorCores = 64, kMaxWarps = 32, kMaxElementBytes = 8;

// Shared memory of one SM, which has 4 tensor cores on all of these.
struct Gpu {
  const char* name;
  std::int64_t kilobytes;
};

constexpr Gpu kGpus[] = {{"3090", 100}, {"4090", 100}, {"L40", 100}, {"A100", 164}, {"H100", 228}, {"H200", 228}};

struct Pair {
  std::int64_t l, m;
};

constexpr std::int64_t kPaperDims[] = {32, 64, 128};

// The paper's Table 2, for d = 32, 64, 128.
struct PaperRows {
  const char* gpu;
  std::array<Pair, 3> flash, ours, best;
};

constexpr PaperRows kTable2[] = {
    {"4090",
     {{{128, 128}, {128, 128}, {128, 32}}},
     {{{256, 64}, {128, 128}, {128, 32}}},
     {{{128, 128}, {128, 128}, {128, 32}}}},
    {"3090",
     {{{128, 128}, {128, 128}, {128, 32}}},
     {{{256, 64}, {128, 128}, {128, 32}}},
     {{{128, 128}, {128, 128}, {128, 32}}}},
    {"L40",
     {{{128, 128}, {128, 128}, {128, 32}}},
     {{{256, 64}, {128, 128}, {128, 32}}},
     {{{256, 64}, {128, 128}, {128, 32}}}},
};

struct Rule {
  BlockRule rule;
  const char* key;    // in JSON
  const char* label;  // in the table
  const char* step;   // of l and m
};

constexpr Rule kRules[] = {
    {BlockRule::literal, "literal", "literal", "multiple of 16"},
    {BlockRule::powers_of_two, "powers_of_two", "powers of two", "power of two"},
    {BlockRule::registers, "registers", "registers", "power of two"},
};

struct BlocksOptions {
  const Gpu* gpu = nullptr;
  std::optional<std::int64_t> shared_memory, tensor_cores;
  BlockKernel kernel;
  std::vector<std::int64_t> head_dims{std::begin(kPaperDims), std::end(kPaperDims)};
  bool json = false;
};

struct RuleRow {
  std::int64_t head_dim;
  const Rule* rule;
  BlockChoice choice;

  // Of S [l, m] and O [l, d].
  [[nodiscard]] std::int64_t accumulators(Pair pair) const { return pair.l * (pair.m + head_dim); }
  [[nodiscard]] Pair pair() const { return {choice.l, choice.m}; }
};

std::string pair_text(Pair pair) { return "(" + std::to_string(pair.l) + ", " + std::to_string(pair.m) + ")"; }

const char* constraint_name(BlockConstraint constraint) {
  switch (constraint) {
    case BlockConstraint::shared_memory:
      return "shared memory";
    case BlockConstraint::cap:
      return "cap of 256";
    case BlockConstraint::registers:
      return "registers";
  }
  return "";
}

std::string limit_text(const Rule& rule, const BlockLimit& limit) {
  return std::string(constraint_name(limit.constraint)) + (limit.rounded ? std::string(", ") + rule.step : "");
}

std::string gpu_names() {
  std::string names;
  for (const Gpu& gpu : kGpus) names += (names.empty() ? "" : ", ") + std::string(gpu.name);
  return names;
}

const Gpu* parse_gpu(const std::string& word) {
  for (const Gpu& gpu : kGpus) {
    if (word == gpu.name) return &gpu;
  }
  throw InputError("--gpu: " + quoted(word) + " is unknown; allowed: " + gpu_names());
}

// Bytes, or kilobytes of 1024 bytes with the suffix KB.
std::int64_t parse_memory(const std::string& word) {
  const char* const option = "--shared-memory";
  if (word.size() > 2 && word.ends_with("KB")) {
    return kKilobyte * parse_integer(option, word.substr(0, word.size() - 2), 1, kMaxSharedMemory / kKilobyte);
  }
  return parse_integer(option, word, 1, kMaxSharedMemory);
}

GpuProperties properties_of(const BlocksOptions& options) {
  if (options.gpu != nullptr && (options.shared_memory || options.tensor_cores)) {
    throw InputError("--gpu names the sizes; allowed: --gpu, or --shared-memory and --tensor-cores");
  }
  GpuProperties gpu;
  if (options.gpu != nullptr) {
    gpu.shared_memory = options.gpu->kilobytes * kKilobyte;
  } else if (options.shared_memory) {
    gpu.shared_memory = *options.shared_memory;
  } else {
    throw InputError("no GPU is given; needed: --gpu or --shared-memory");
  }
  gpu.tensor_cores = options.tensor_cores.value_or(gpu.tensor_cores);
  return gpu;
}

const PaperRows* paper_rows(const BlocksOptions& options) {
  for (const PaperRows& rows : kTable2) {
    if (options.gpu != nullptr && std::string(rows.gpu) == options.gpu->name) return &rows;
  }
  return nullptr;
}

// Where `head_dim` stands in the rows of Table 2; empty: it does not.
std::optional<std::size_t> paper_column(std::int64_t head_dim) {
  const auto place = std::find(std::begin(kPaperDims), std::end(kPaperDims), head_dim);
  if (place == std::end(kPaperDims)) return std::nullopt;
  return static_cast<std::size_t>(place - std::begin(kPaperDims));
}

std::vector<std::pair<const char*, Pair>> printed_pairs(const PaperRows& rows, std::size_t column) {
  return {{"flash", rows.flash.at(column)}, {"ours", rows.ours.at(column)}, {"best", rows.best.at(column)}};
}

Json row_json(const RuleRow& row) {
  const auto rounded_by = [&row](const BlockLimit& limit) {
    return limit.rounded ? Json(row.rule->step) : Json(nullptr);
  };
  return {{"head_dim", row.head_dim},
          {"rule", row.rule->key},
          {"l", row.choice.l},
          {"m", row.choice.m},
          {"l_binds", constraint_name(row.choice.l_limit.constraint)},
          {"l_rounded_by", rounded_by(row.choice.l_limit)},
          {"m_binds", constraint_name(row.choice.m_limit.constraint)},
          {"m_rounded_by", rounded_by(row.choice.m_limit)},
          {"accumulators", row.accumulators(row.pair())}};
}

void print_json(const BlocksOptions& options, const GpuProperties& gpu, const std::vector<RuleRow>& rows) {
  Json json = {{"gpu", options.gpu == nullptr ? Json(nullptr) : Json(options.gpu->name)},
               {"shared_memory", gpu.shared_memory},
               {"tensor_cores", gpu.tensor_cores},
               {"registers_per_thread", gpu.registers_per_thread},
               {"warps", options.kernel.warps},
               {"element_bytes", options.kernel.element_bytes},
               {"rows", Json::array()},
               {"paper", Json::array()}};
  for (const RuleRow& row : rows) json["rows"].push_back(row_json(row));
  const PaperRows* const paper = paper_rows(options);
  for (const std::int64_t head_dim : options.head_dims) {
    const auto column = paper_column(head_dim);
    if (paper == nullptr || !column) continue;
    Json entry = {{"head_dim", head_dim}};
    for (const auto& [name, pair] : printed_pairs(*paper, *column)) entry[name] = {pair.l, pair.m};
    json["paper"].push_back(entry);
  }
  std::cout << json_text(json) << '\n';
}

// Where the paper prints another pair that takes as many registers as the third rule's.
void print_ties(const PaperRows& paper, const std::vector<RuleRow>& rows) {
  for (const RuleRow& row : rows) {
    const auto column = paper_column(row.head_dim);
    if (row.rule->rule != BlockRule::registers || !column) continue;
    const Pair printed = paper.ours.at(*column);
    if (printed.l == row.choice.l || row.accumulators(printed) != row.accumulators(row.pair())) continue;
    std::cout << "Tie at d = " << row.head_dim << ": the paper's " << pair_text(printed) << " and "
              << pair_text(row.pair()) << " both hold " << row.accumulators(printed)
              << " accumulators; the larger l comes first.\n";
  }
}

void print_table(const BlocksOptions& options, const GpuProperties& gpu, const std::vector<RuleRow>& rows) {
  const PaperRows* const paper = paper_rows(options);
  Table table;
  table.add_column("d", Table::Align::right);
  table.add_column("rule", Table::Align::left);
  for (const char* head : {"l", "m", "accumulators"}) table.add_column(head, Table::Align::right);
  for (const char* head : {"l is bound by", "m is bound by"}) table.add_column(head, Table::Align::left);
  const auto add_row = [&table](const RuleRow& row, const std::string& name, Pair pair, const std::string& l_limit,
                                const std::string& m_limit) {
    table.add_row({std::to_string(row.head_dim), name, std::to_string(pair.l), std::to_string(pair.m),
                   std::to_string(row.accumulators(pair)), l_limit, m_limit});
  };
  for (const RuleRow& row : rows) {
    add_row(row, row.rule->label, row.pair(), limit_text(*row.rule, row.choice.l_limit),
            limit_text(*row.rule, row.choice.m_limit));
    const auto column = paper_column(row.head_dim);
    if (paper == nullptr || !column || row.rule->rule != BlockRule::registers) continue;
    for (const auto& [name, pair] : printed_pairs(*paper, *column)) {
      add_row(row, std::string("Table 2, ") + name, pair, "-", "-");
    }
  }
  std::cout << (options.gpu == nullptr ? std::string("GPU") : std::string("GPU ") + options.gpu->name) << ": "
            << gpu.shared_memory << " bytes of shared memory and " << gpu.tensor_cores << " tensor cores an SM; "
            << options.kernel.warps << " warps a block, " << options.kernel.element_bytes << " bytes an element\n\n";
  table.print(std::cout);
  std::cout
      << "\nAll rules take the largest l, then the largest m. literal: multiples of 16 for which\n"
         "warps * shared memory / (bytes * (l d + 2 m d)) >= 2 * tensor cores; powers of two: also powers of two\n"
         "up to 256; registers: also l (m + d) fp32 accumulators in "
      << gpu.registers_per_thread << " registers of each thread.\n";
  if (paper != nullptr) print_ties(*paper, rows);
}

void blocks(const BlocksOptions& options) {
  const GpuProperties gpu = properties_of(options);
  std::vector<RuleRow> rows;
  for (const std::int64_t head_dim : options.head_dims) {
    for (const Rule& rule : kRules) {
      rows.push_back({head_dim, &rule, choose_blocks(gpu, head_dim, rule.rule, options.kernel)});
    }
  }
  options.json ? print_json(options, gpu, rows) : print_table(options, gpu, rows);
}

}  // namespace

void add_blocks(CLI::App& app) {
  CLI::App* command = app.add_subcommand("blocks", "The paper's rule for the block sizes l and m, and its Table 2");
  const auto options = std::make_shared<BlocksOptions>();
  add_parsed(*command, "--gpu", "3090|4090|L40|A100|H100|H200", "Whose sizes are taken",
             [options](const std::string& word) { options->gpu = parse_gpu(word); });
  add_parsed(*command, "--shared-memory", "BYTES|KB", "Instead: of one SM; 102400 or 100KB",
             [options](const std::string& word) { options->shared_memory = parse_memory(word); });
  add_integer(*command, "--tensor-cores", "With --shared-memory: of one SM [4]", 1, kMaxTensorCores,
              [options](std::int64_t value) { options->tensor_cores = value; });
  add_integer(*command, "--warps", "Of one thread block", 1, kMaxWarps, [options](std::int64_t value) {
    options->kernel.warps = value;
  })->default_str(std::to_string(options->kernel.warps));
  add_integer(*command, "--element-bytes", "Of Q, K and V", 1, kMaxElementBytes, [options](std::int64_t value) {
    options->kernel.element_bytes = value;
  })->default_str(std::to_string(options->kernel.element_bytes));
  const auto parse_dims = [options](const std::string& words) {
    options->head_dims.clear();
    for (const std::string& word : split(words)) {
      options->head_dims.push_back(parse_integer("--head-dim", word, 1, kMaxHeadDim));
    }
  };
  add_parsed(*command, "--head-dim", "INT,...", "d", parse_dims)->default_str(numbers_of(options->head_dims));
  command->add_flag("--json", options->json, "Print one JSON object instead of a table");
  command->footer("Example: distr blocks --gpu H200");
  command->callback([options] { blocks(*options); });
}

}  // namespace distr::cli
