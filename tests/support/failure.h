// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "distr/error.h"

namespace distr::test {

// The status and the message of the error that a call throws; one that throws none fails the test.
template <class Call>
std::pair<Status, std::string> failure(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace distr::test
