// SPDX-License-Identifier: Apache-2.0
#include "emulator/warp.h"

#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "common/half.h"
#include "emulator/shared_memory.h"
#include "emulator/thread_block.h"

namespace distr::emulator {
namespace {

std::vector<float> all_widened(Element element) {
  std::vector<float> all(1 << 16);
  for (std::size_t n = 0; n < all.size(); ++n) {
    const auto bits = static_cast<std::uint16_t>(n);
    all[n] =
        element == Element::f16 ? common::to_float(common::Float16{bits}) : common::to_float(common::BFloat16{bits});
  }
  return all;
}

struct Ballot {
  bool holds;
  std::uint32_t result;
};

struct Message {
  std::uint64_t bits;
  int from;
  std::uint64_t result;
};

struct Matrices {
  std::uint32_t* registers;
  std::uint32_t shared;
  bool transposed;
};

// Element (row, column) of a matrix is in register `matrix` of lane row * 4 + column / 2; transposed: of the lane of
// (column, row).
std::uint16_t* half_of(Matrices* const (&all)[32], int matrix, int row, int column) {
  return reinterpret_cast<std::uint16_t*>(&all[row * 4 + column / 2]->registers[matrix]) + column % 2;
}

enum class Way { load, store };

template <Way kWay>
[[gnu::noinline]] void move(Matrices* const (&all)[32], std::uint32_t) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int row = 0; row < 8; ++row) {
      const std::uint32_t address = all[matrix * 8 + row]->shared;
      auto* const from = reinterpret_cast<std::uint16_t*>(
          shared_memory().at(address, 16, 16, kWay == Way::load ? "ldmatrix" : "stmatrix"));
      if constexpr (kWay == Way::load) {
        shared_memory().require_settled(address, 16, SharedMemory::Proxy::generic, "ldmatrix");
      }
      for (int column = 0; column < 8; ++column) {
        std::uint16_t* const half =
            all[0]->transposed ? half_of(all, matrix, column, row) : half_of(all, matrix, row, column);
        if constexpr (kWay == Way::load) {
          *half = from[column];
        } else {
          from[column] = *half;
        }
      }
      if constexpr (kWay == Way::store) {
        shared_memory().stored(address, 16,
                               thread_block().thread(thread_block().thread().warp * 32 + matrix * 8 + row));
      }
    }
  }
}

struct Product {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
  Element element;
};

[[gnu::noinline]] void multiply(Product* const (&all)[32], std::uint32_t) {
  const float* const widened = widened_values(all[0]->element);
  float a[16][16];
  Vector columns[16];  // the 8 of b, for every k
  auto* const b = reinterpret_cast<float(*)[8]>(columns);
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4;
    const int k = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      a[row + i % 2 * 8][k + i / 2 * 8] = widened[all[lane]->a[i] & 0xffff];
      a[row + i % 2 * 8][k + i / 2 * 8 + 1] = widened[all[lane]->a[i] >> 16];
    }
    for (int i = 0; i < 2; ++i) {
      b[k + i * 8][row] = widened[all[lane]->b[i] & 0xffff];
      b[k + i * 8 + 1][row] = widened[all[lane]->b[i] >> 16];
    }
  }
  constexpr int kRows = 4;  // side by side, as each sum waits for the one before it
  for (int first = 0; first < 16; first += kRows) {
    Vector sums[kRows] = {};
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < kRows; ++row) {
        sums[row] += a[first + row][k] * columns[k];
      }
    }
    for (int row = first; row < first + kRows; ++row) {
      for (int n = 0; n < 8; ++n) {
        all[row % 8 * 4 + n / 2]->d[row / 8 * 2 + n % 2] += sums[row - first][n];
      }
    }
  }
}

}  // namespace

const float* widened_values(Element element) {
  static const std::vector<float> halves = all_widened(Element::f16);
  static const std::vector<float> brains = all_widened(Element::bf16);
  return (element == Element::f16 ? halves : brains).data();
}

void warp_sync(std::uint32_t mask) {
  char nothing = 0;
  thread_block().meet<char>("__syncwarp", mask, nothing, [](char* const(&)[32], std::uint32_t) {});
}

bool elect_one_sync() {
  bool elected = false;
  thread_block().meet<bool>("an election", ~0U, elected, [](bool* const(&all)[32], std::uint32_t) { *all[13] = true; });
  return elected;
}

std::uint32_t ballot(std::uint32_t mask, bool holds) {
  Ballot own{holds, 0};
  thread_block().meet<Ballot>("a vote", mask, own, [](Ballot* const(&all)[32], std::uint32_t lanes) {
    std::uint32_t result = 0;
    for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      result |= all[lane]->holds ? 1U << lane : 0;
    }
    for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      all[std::countr_zero(rest)]->result = result;
    }
  });
  return own.result;
}

std::uint64_t shuffle(std::uint32_t mask, std::uint64_t bits, int from) {
  Message own{bits, from, bits};
  thread_block().meet<Message>("a shuffle", mask, own, [](Message* const(&all)[32], std::uint32_t lanes) {
    for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      Message& to = *all[std::countr_zero(rest)];
      if ((lanes >> to.from & 1) == 0) {
        thread_block().fail("a shuffle from lane " + std::to_string(to.from) + ", which takes no part");
      }
      to.result = all[to.from]->bits;
    }
  });
  return own.result;
}

void load_matrices(std::uint32_t (&r)[4], std::uint32_t shared, bool transposed) {
  Matrices own{r, shared, transposed};
  thread_block().meet<Matrices>("ldmatrix", kAllLanes, own, move<Way::load>);
}

void store_matrices(const std::uint32_t (&r)[4], std::uint32_t shared) {
  Matrices own{const_cast<std::uint32_t*>(r), shared, false};
  thread_block().meet<Matrices>("stmatrix", kAllLanes, own, move<Way::store>);
}

void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, Element element) {
  Product own{d, a, {b0, b1}, element};
  thread_block().meet<Product>("mma", kAllLanes, own, multiply);
}

}  // namespace distr::emulator
