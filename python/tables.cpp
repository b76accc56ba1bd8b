// SPDX-License-Identifier: Apache-2.0
// Usage: distrattention_tables FILE. Writes distr/version.h's version and distr/grouping.h's tables and defaults as the
// Python module distrattention/_tables.py, which the build installs: the package has them without loading the library.
#include <fstream>
#include <iostream>

#include "distr/grouping.h"
#include "distr/version.h"

namespace {

template <class Table>
void print_names(std::ostream& out, const char* name, const Table& table) {
  out << name << " = (";
  for (const auto& entry : table) {
    out << '"' << entry.name << "\", ";
  }
  out << ")\n";
}

}  // namespace

int main(int count, char** arguments) {
  using namespace distr;
  std::ofstream out(count == 2 ? arguments[1] : "");
  out << "# Written by the build from include/distr/grouping.h and version.h.\n"
         "VERSION = \""
      << DISTR_VERSION_MAJOR << '.' << DISTR_VERSION_MINOR << '.' << DISTR_VERSION_PATCH
      << "\"\n"
         "# name: (members of a group, where the order comes from, whether K is read for it, whether there is an "
         "estimator, the default of G)\n"
         "STRATEGIES = {\n";
  for (const StrategyTraits& entry : kStrategies) {
    out << "    \"" << entry.name << "\": (\"" << name_in(kMembers, entry.members) << "\", \""
        << name_in(kOrderSources, entry.order) << "\", " << (entry.reads_keys ? "True" : "False") << ", "
        << (entry.has_estimator ? "True" : "False") << ", " << entry.group_size << "),\n";
  }
  out << "}\n";
  print_names(out, "ESTIMATORS", kEstimators);
  print_names(out, "ORDERS_FROM", kOrdersFrom);
  const Grouping defaults;
  out << "DEFAULTS = {\"strategy\": \"" << traits(defaults.strategy).name
      << "\", \"group_size\": " << defaults.group_size << ", \"block_size\": " << defaults.block
      << ", \"estimator\": \"" << name_in(kEstimators, defaults.estimator) << "\", \"order_from\": \""
      << name_in(kOrdersFrom, defaults.order_from) << "\", \"seed\": " << defaults.seed
      << ", \"window\": None, \"sinks\": " << defaults.sinks << ", \"skip\": " << defaults.skip
      << ", \"finish\": " << (defaults.finish ? "True" : "False") << "}\n"
      << "MAX_DISTANCE = " << kMaxDistance << "\n";
  out.close();
  if (!out) {
    std::cerr << "distrattention_tables: FILE cannot be written\n";
    return 1;
  }
}
