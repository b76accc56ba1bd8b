// SPDX-License-Identifier: Apache-2.0
// The command `distr`: its subcommands, and errors turned into exit statuses.
// Status 0: done; 1: failed; 2: bad usage or bad input; 3: the results could not be written.
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "commands.h"
#include "distr/error.h"
#include "distr/version.h"
#include "output_files.h"
#include "run_meta.h"
#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kBadInput = 2;
constexpr int kNotWritten = 3;

// CLI11 says only that a command is missing, even where a wrong one was given, and lists unknown words backwards.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> unknown = app.remaining(true);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !unknown.empty()) {
    return quoted(unknown.front()) + " is unknown (see --help)";
  }
  if (!app.get_subcommands().empty() || unknown.empty()) return shortened(on_one_line(error.what())) + " (see --help)";
  std::string commands;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    commands += (commands.empty() ? "" : ", ") + command->get_name();
  }
  return quoted(unknown.front()) + " is unknown; allowed: " + commands;
}

int complain(const CLI::App& app, const std::string& message, int status) {
  std::string command = "distr";
  for (const CLI::App* subcommand : app.get_subcommands()) command += " " + subcommand->get_name();
  std::cerr << command << ": " << on_one_line(message) << '\n';
  return status;
}

int status_of(Status status) {
  return status == Status::invalid_argument || status == Status::unsupported ? kBadInput : kFailed;
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    std::cout.flush();
    return std::cout ? kDone : complain(app, "standard output could not be written", kNotWritten);
  } catch (const CLI::Success& wish) {  // --help and --version
    return app.exit(wish);
  } catch (const CLI::ParseError& error) {
    return complain(app, usage_message(app, error), kBadInput);
  } catch (const InputError& error) {
    return complain(app, error.what(), kBadInput);
  } catch (const WriteError& error) {
    return complain(app, error.what(), kNotWritten);
  } catch (const Error& error) {
    return complain(app, error.what(), status_of(error.status()));
  } catch (const std::bad_alloc&) {
    return complain(app, "out of memory", kFailed);
  } catch (const std::exception& error) {
    return complain(app, error.what(), kFailed);
  }
}

}  // namespace
}  // namespace distr::cli

int main(int argc, char** argv) {
  try {
    distr::cli::remember_command(argc, argv);
    std::signal(SIGXFSZ, SIG_IGN);  // a write beyond a limit then fails with a message like any other
    CLI::App app("DistrAttention: self-attention with grouped head dimensions, exact or approximate.", "distr");
    app.set_version_flag("--version", std::string("distr ") + distr::version());
    app.require_subcommand(1);
    app.get_formatter()->column_width(34);
    distr::cli::add_attend(app);
    distr::cli::add_bench(app);
    distr::cli::add_blocks(app);
    distr::cli::add_compare(app);
    distr::cli::add_errors(app);
    distr::cli::add_info(app);
    distr::cli::add_tune(app);
    return distr::cli::run(app, argc, argv);
  } catch (...) {  // not even a message could be composed
    std::fputs("distr: failed\n", stderr);
    return distr::cli::kFailed;
  }
}
