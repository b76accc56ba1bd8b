// SPDX-License-Identifier: Apache-2.0
// The subcommands. Each adds itself to the application; main.cpp lists them.
#pragma once

#include <CLI/CLI.hpp>

namespace distr::cli {

void add_attend(CLI::App& app);
void add_bench(CLI::App& app);
void add_blocks(CLI::App& app);
void add_compare(CLI::App& app);
void add_errors(CLI::App& app);
void add_info(CLI::App& app);
void add_tune(CLI::App& app);

}  // namespace distr::cli
