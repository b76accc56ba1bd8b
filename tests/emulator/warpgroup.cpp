// SPDX-License-Identifier: Apache-2.0
#include "emulator/warpgroup.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "emulator/copies.h"
#include "emulator/shared_memory.h"
#include "emulator/thread_block.h"

namespace distr::emulator {
namespace {

// In accumulators while a product is under way. A NaN that every operation changes, and a number, as a kernel may have
// a way out for NaN.
constexpr std::uint32_t kPoisons[] = {0x7FA0DEAD, 0x3F5EAD00};

WarpgroupProducts& products() {
  auto& own = thread_block().products[static_cast<std::size_t>(thread_block().thread().index / 128)];
  if (own == nullptr) {
    own = std::make_unique<WarpgroupProducts>();
    own->poison = kPoisons[thread_block().random().below(2)];
  }
  return *own;
}

int member_index() { return thread_block().thread().index % 128; }

// The 16-bit element (m, k) of an operand.
class Reader {
 public:
  explicit Reader(const SharedMatrix& matrix) : k_major_(matrix.k_major) {
    const auto field = [&](int bit, std::uint64_t mask) {
      return static_cast<std::uint32_t>(matrix.descriptor >> bit & mask);
    };
    start_ = field(0, 0x3FFF) * 16;
    leading_ = field(16, 0x3FFF) * 16;
    stride_ = field(32, 0x3FFF) * 16;
    constexpr std::uint32_t kBytes[] = {0, 128, 64, 32};
    row_bytes_ = kBytes[field(62, 3)];
    if (field(49, 7) != 0) {
      thread_block().fail("a descriptor with a base offset, which is not emulated");
    }
  }
  // The address of eight elements along the rows: m, k .. k + 7 or m .. m + 7, k.
  [[nodiscard]] std::uint32_t piece(int m, int k) const {
    return swizzled(start_ + (k_major_ ? k_major(m, k) : mn_major(m, k)), row_bytes_);
  }

 private:
  // Eight rows of 16 bytes lie side by side where there is no pattern, else 16-byte pieces of a row.
  [[nodiscard]] std::uint32_t k_major(int m, int k) const {
    const auto row = static_cast<std::uint32_t>(m);
    const auto piece = static_cast<std::uint32_t>(k) / 8;
    return row_bytes_ == 0 ? row % 8 * 16 + row / 8 * stride_ + piece * leading_
                           : row % 8 * row_bytes_ + row / 8 * stride_ + piece * 16;
  }
  [[nodiscard]] std::uint32_t mn_major(int m, int k) const {
    const auto piece = static_cast<std::uint32_t>(m) / 8;
    const auto row = static_cast<std::uint32_t>(k);
    const std::uint32_t pieces = row_bytes_ / 16;
    return row_bytes_ == 0 ? piece * stride_ + row % 8 * 16 + row / 8 * leading_
                           : piece % pieces * 16 + piece / pieces * leading_ + row % 8 * row_bytes_ + row / 8 * stride_;
  }

  bool k_major_;
  std::uint32_t start_ = 0, leading_ = 0, stride_ = 0, row_bytes_ = 0;
};

// act(address, m, k) for each piece of an operand of `count` rows or columns.
template <class Act>
void for_pieces(const SharedMatrix& matrix, int count, const Act& act) {
  const Reader reader(matrix);
  for (int outer = 0; outer < (matrix.k_major ? count : 16); ++outer) {
    for (int inner = 0; inner < (matrix.k_major ? 16 : count); inner += 8) {
      matrix.k_major ? act(reader.piece(outer, inner), outer, inner) : act(reader.piece(inner, outer), inner, outer);
    }
  }
}

// From now on the operand may be read at any time.
void begin_read(const SharedMatrix& matrix, int count) {
  SharedMemory& memory = shared_memory();
  for_pieces(matrix, count, [&memory](std::uint32_t address, int, int) {
    static_cast<void>(memory.at(address, 16, 16, "wgmma"));
    memory.begin_read(address, 16, "wgmma");
  });
}

// to[k][m] of all m.
template <std::size_t kMax>
void read_operand(const SharedMatrix& matrix, int count, const float* widened, float (&to)[16][kMax]) {
  SharedMemory& memory = shared_memory();
  for_pieces(matrix, count, [&](std::uint32_t address, int m, int k) {
    std::uint16_t piece[8];
    std::memcpy(piece, memory.at(address, 16, 16, "wgmma"), 16);
    memory.end_read(address, 16);
    for (int i = 0; i < 8; ++i) {
      (matrix.k_major ? to[k + i][m] : to[k][m + i]) = widened[piece[i]];
    }
  });
}

// Four rows of the product: the sums over k of a[k][row + n] b[k], for the blocks of 16 of its columns. Four, as each
// sum waits for the one before it. `b` is aligned as Vector.
constexpr int kRows = 4;
void multiply_rows(const float (&a)[16][64], const float (&b)[16][256], int row, int columns,
                   float (&lines)[kRows][256]) {
  for (int first = 0; first < columns; first += 16) {
    Vector low[kRows] = {};
    Vector high[kRows] = {};
    for (int k = 0; k < 16; ++k) {
      const auto* const of_b = reinterpret_cast<const Vector*>(&b[k][first]);
      for (int n = 0; n < kRows; ++n) {
        low[n] += a[k][row + n] * of_b[0];
        high[n] += a[k][row + n] * of_b[1];
      }
    }
    for (int n = 0; n < kRows; ++n) {
      std::memcpy(&lines[n][first], low + n, sizeof(Vector));
      std::memcpy(&lines[n][first + 8], high + n, sizeof(Vector));
    }
  }
}

void execute(AsyncProduct& product) {
  const ProductCall& call = product.call;
  const float* const widened = widened_values(call.element);
  static thread_local float a[16][64];
  alignas(Vector) static thread_local float b[16][256];
  read_operand(call.right, call.columns, widened, b);
  if (call.a == nullptr) {
    read_operand(call.left, 64, widened, a);
  } else {
    for (int thread = 0; thread < 128; ++thread) {
      for (int i = 0; i < 4; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
        const int k = thread % 4 * 2 + i / 2 * 8;
        const std::uint32_t pair = product.a[thread][i];
        a[k][row] = widened[pair & 0xffff];
        a[k + 1][row] = widened[pair >> 16];
      }
    }
  }
  float* const sums = product.accumulators->sums.data();
  const int columns = call.columns;
  for (int row = 0; row < 64; row += kRows) {
    float lines[kRows][256];
    multiply_rows(a, b, row, columns, lines);
    for (int n = 0; n < kRows; ++n) {
      float* const to = sums + (row + n) * columns;
      for (int column = 0; column < columns; ++column) {
        to[column] = call.add ? to[column] + lines[n][column] : lines[n][column];
      }
    }
  }
}

// act(pointer to two of a thread's accumulators, pointer to their sums) for all of them.
template <class Act>
void for_pairs(Accumulators& accumulators, int thread, float* d, const Act& act) {
  const int columns = accumulators.columns;
  float* const sums = accumulators.sums.data() + (thread / 32 * 16 + thread % 32 / 4) * columns + thread % 4 * 2;
  for (int n = 0; n < columns / 8; ++n) {
    act(d + n * 4, sums + n * 8);
    act(d + n * 4 + 2, sums + n * 8 + 8 * columns);
  }
}

bool same(const ProductCall& x, const ProductCall& y) {
  return x.columns == y.columns && (x.a == nullptr) == (y.a == nullptr) && x.left.descriptor == y.left.descriptor &&
         x.left.k_major == y.left.k_major && x.right.descriptor == y.right.descriptor &&
         x.right.k_major == y.right.k_major && x.add == y.add && x.element == y.element;
}

AsyncProduct& product_at(WarpgroupProducts& all, std::uint64_t number) {
  return all.products[static_cast<std::size_t>(number - all.first)];
}

void require_poison(const float* d, int columns, std::uint32_t poison) {
  std::uint32_t changed = 0;
  for (int i = 0; i < columns / 2; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, d + i, 4);
    changed |= bits ^ poison;
  }
  if (changed != 0) {
    thread_block().fail("an accumulator of wgmma was written to while the product was under way");
  }
}

// The thread sees the end of its oldest product. Its accumulators are poisoned up to the last product that adds to
// them.
void retire(WarpgroupProducts& all, WarpgroupProducts::Member& member, int index) {
  AsyncProduct& product = product_at(all, member.retired);
  for (; all.executed <= member.retired; ++all.executed) {
    execute(product_at(all, all.executed));
  }
  const auto thread = static_cast<std::size_t>(index);
  if (const std::uint32_t* const a = product.a_places[thread];
      a != nullptr && std::memcmp(a, product.a[thread], sizeof product.a[thread]) != 0) {
    thread_block().fail("an operand of wgmma in registers was written to while the product was under way");
  }
  Accumulators& accumulators = *product.accumulators;
  ++product.retired;
  ++member.retired;
  for (std::uint64_t n = member.retired; n < member.issued; ++n) {
    if (product_at(all, n).accumulators.get() == &accumulators) {
      return;  // more is added
    }
  }
  float* const d = accumulators.places[thread];
  require_poison(d, accumulators.columns, all.poison);
  static constexpr std::uint32_t kNan = 0x7FFFFFFF;  // which wgmma makes, whatever its operands' NaN
  for_pairs(accumulators, index, d, [](float* to, const float* sums) {
    to[0] = std::isnan(sums[0]) ? std::bit_cast<float>(kNan) : sums[0];
    to[1] = std::isnan(sums[1]) ? std::bit_cast<float>(kNan) : sums[1];
  });
}

}  // namespace

void product_fence() {
  products().members[member_index()].fenced = true;
  thread_block().yield();
}

void begin_product(const ProductCall& call) {
  WarpgroupProducts& all = products();
  const int index = member_index();
  WarpgroupProducts::Member& member = all.members[index];
  if (!member.fenced) {
    thread_block().fail("wgmma without wgmma.fence since the last wait");
  }
  const std::uint64_t number = member.issued;
  if (number == all.first + all.products.size()) {
    all.products.emplace_back().call = call;
    begin_read(call.right, call.columns);
    if (call.a == nullptr) {
      begin_read(call.left, 64);
    }
  }
  AsyncProduct& product = product_at(all, number);
  if (!same(product.call, call)) {
    thread_block().fail("wgmma with other operands than in other threads of the warpgroup");
  }
  std::shared_ptr<Accumulators> accumulators;
  for (std::uint64_t n = number; n > member.retired && accumulators == nullptr; --n) {
    if (product_at(all, n - 1).accumulators->places[static_cast<std::size_t>(index)] == call.d) {
      accumulators = product_at(all, n - 1).accumulators;
    }
  }
  if (accumulators != nullptr && accumulators->columns != call.columns) {
    thread_block().fail("wgmma adds to accumulators that a product of another shape is written to");
  }
  if (accumulators != nullptr) {
    if (product.accumulators == nullptr) {
      product.accumulators = accumulators;
    }
  } else {
    if (product.accumulators == nullptr) {
      product.accumulators = std::make_shared<Accumulators>();
      product.accumulators->columns = call.columns;
      product.accumulators->sums.resize(static_cast<std::size_t>(64 * call.columns));
    }
    product.accumulators->places[static_cast<std::size_t>(index)] = call.d;
    for_pairs(*product.accumulators, index, call.d, [poison = std::bit_cast<float>(all.poison)](float* d, float* sums) {
      sums[0] = d[0];
      sums[1] = d[1];
      d[0] = d[1] = poison;
    });
  }
  if (accumulators != nullptr && accumulators != product.accumulators) {
    thread_block().fail("wgmma with other accumulators than in other threads of the warpgroup");
  }
  if (call.a != nullptr) {
    product.a_places[index] = call.a;
    std::memcpy(product.a[index], call.a, sizeof product.a[index]);
  }
  ++product.issued;
  ++member.issued;
  if (product.issued == 128) {
    thread_block().wake(&all);
  }
}

void product_commit() {
  WarpgroupProducts::Member& member = products().members[member_index()];
  member.groups.push_back(member.issued);
  thread_block().yield();
}

void product_wait(std::size_t pending) {
  WarpgroupProducts& all = products();
  const int index = member_index();
  WarpgroupProducts::Member& member = all.members[index];
  member.fenced = false;
  while (member.groups.size() > pending) {
    while (member.retired < member.groups.front()) {
      while (product_at(all, member.retired).issued < 128) {
        thread_block().sleep(&all, "wgmma of the whole warpgroup: product", member.retired);
      }
      retire(all, member, index);
    }
    member.groups.erase(member.groups.begin());
  }
  while (!all.products.empty() && all.products.front().retired == 128) {
    all.products.pop_front();
    ++all.first;
  }
  thread_block().yield();
}

void require_no_products() {
  const auto& own = thread_block().products[static_cast<std::size_t>(thread_block().thread().index / 128)];
  if (own == nullptr) {
    return;
  }
  const WarpgroupProducts::Member& member = own->members[member_index()];
  if (member.retired < member.issued) {
    thread_block().fail("the thread ends while its products are under way");
  }
}

// For a warp. A block starts with as many registers for every thread as an SM has for it, in eights, and shares these
// alone: more would be waited for without end.
void set_registers(int registers) {
  Warp& own = thread_block().warp();
  if (registers % 8 != 0 || registers < 24 || registers > 240) {
    thread_block().fail("setmaxnreg " + std::to_string(registers) + "; allowed: multiples of 8 from 24 to 240");
  }
  own.registers = registers;
  constexpr int kRegisters = 65536;  // of an SM
  int all = 0;
  int threads = 0;
  for (const Warp& warp : thread_block().warps()) {
    all += 32 * warp.registers;
    threads += 32;
  }
  if (const int most = threads * (kRegisters / threads / 8 * 8); all > most) {
    thread_block().fail("the warps of the block ask for " + std::to_string(all) + " registers; allowed: up to " +
                        std::to_string(most));
  }
  warp_sync(kAllLanes);
}

}  // namespace distr::emulator
