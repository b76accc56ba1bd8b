// SPDX-License-Identifier: Apache-2.0
#include "names.h"

#include <array>

#include "tensor.h"
#include "text.h"

namespace distr::cli {
namespace {

template <typename Enum>
constexpr std::array<Named<Enum>, 0> kNames{};
template <>
constexpr auto kNames<Strategy> = [] {
  std::array<Named<Strategy>, kStrategies.size()> names{};
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = {kStrategies[i].strategy, kStrategies[i].name};
  return names;
}();
template <>
constexpr auto kNames<Estimator> = kEstimators;
template <>
constexpr auto kNames<OrderFrom> = kOrdersFrom;
template <>
constexpr auto kNames<Causal> = std::to_array<Named<Causal>>({{Causal::none, "none"},
                                                              {Causal::top_left, "top-left"},
                                                              {Causal::bottom_right, "bottom-right"}});
template <>
constexpr auto kNames<DType> =
    std::to_array<Named<DType>>({{DType::f16, "f16"}, {DType::bf16, "bf16"}, {DType::f32, "f32"}, {DType::f64, "f64"}});
template <>
constexpr auto kNames<Device> = std::to_array<Named<Device>>({{Device::cpu, "cpu"}, {Device::cuda, "cuda"}});
template <>
constexpr auto kNames<Operation> = std::to_array<Named<Operation>>({{Operation::grouping, "grouping"},
                                                                    {Operation::forward, "forward"},
                                                                    {Operation::backward, "backward"}});
template <>
constexpr auto kNames<MaskKind> = std::to_array<Named<MaskKind>>({{MaskKind::none, "none"},
                                                                  {MaskKind::boolean, "bool"},
                                                                  {MaskKind::additive, "float"}});

}  // namespace

template <typename Enum>
const char* name_of(Enum value) {
  for (const auto& name : kNames<Enum>) {
    if (name.value == value) return name.name;
  }
  return "unknown";
}

template <typename Enum>
std::string all_names(const char* separator) {
  std::string words;
  for (const auto& name : kNames<Enum>) {
    if (!words.empty()) words += separator;
    words += name.name;
  }
  return words;
}

template <typename Enum>
Enum parse_name(const std::string& option, const std::string& word) {
  for (const auto& name : kNames<Enum>) {
    if (word == name.name) return name.value;
  }
  throw InputError(option + ": " + quoted(word) + " is unknown; allowed: " + all_names<Enum>());
}

template const char* name_of(Strategy);
template const char* name_of(Estimator);
template const char* name_of(OrderFrom);
template const char* name_of(Causal);
template const char* name_of(DType);
template const char* name_of(Device);
template const char* name_of(Operation);
template const char* name_of(MaskKind);

template std::string all_names<Strategy>(const char*);
template std::string all_names<Estimator>(const char*);
template std::string all_names<OrderFrom>(const char*);
template std::string all_names<Causal>(const char*);
template std::string all_names<DType>(const char*);
template std::string all_names<Device>(const char*);
template std::string all_names<MaskKind>(const char*);

template Strategy parse_name(const std::string&, const std::string&);
template Estimator parse_name(const std::string&, const std::string&);
template OrderFrom parse_name(const std::string&, const std::string&);
template Causal parse_name(const std::string&, const std::string&);
template DType parse_name(const std::string&, const std::string&);
template Device parse_name(const std::string&, const std::string&);
template MaskKind parse_name(const std::string&, const std::string&);

}  // namespace distr::cli
