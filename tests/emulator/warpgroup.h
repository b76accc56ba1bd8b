// SPDX-License-Identifier: Apache-2.0
// wgmma: asynchronous products of a warpgroup. A product is computed as late as possible, when a thread waits for it:
// its operands in shared memory are read then, its accumulators hold garbage until then, and its operands in registers
// must still have the values that they had when it was issued.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "emulator/warp.h"

namespace distr::emulator {

// An operand in shared memory. Its rows of 16-byte pieces lie along k or along the other axis.
struct SharedMatrix {
  std::uint64_t descriptor = 0;
  bool k_major = true;
};

struct ProductCall {
  float* d = nullptr;                // [columns / 2]
  int columns = 0;                   // N
  const std::uint32_t* a = nullptr;  // in registers; null: in shared memory
  SharedMatrix left, right;
  bool add = true;
  Element element = Element::f16;
};

// The accumulators of products that follow each other into the same registers.
struct Accumulators {
  int columns = 0;
  std::vector<float> sums;                                // [64][columns]
  std::vector<float*> places = std::vector<float*>(128);  // of each thread
};

struct AsyncProduct {
  ProductCall call;
  int issued = 0, retired = 0;  // by so many threads
  std::shared_ptr<Accumulators> accumulators;
  std::uint32_t a[128][4] = {};
  const std::uint32_t* a_places[128] = {};
};

struct WarpgroupProducts {
  struct Member {
    std::uint64_t issued = 0, retired = 0;  // products
    std::vector<std::uint64_t> groups;      // for each committed group that is not retired, the products up to its end
    bool fenced = false;                    // since the last wait
  };
  std::deque<AsyncProduct> products;  // number `first` and later
  std::uint64_t first = 0;
  std::uint64_t executed = 0;  // products
  Member members[128];
  std::uint32_t poison = 0;  // the value of accumulators while a product is under way
};

void product_fence();
void begin_product(const ProductCall& call);
void product_commit();
void product_wait(std::size_t pending);
// Fails if the thread ends while its products are under way.
void require_no_products();
void set_registers(int registers);

}  // namespace distr::emulator
