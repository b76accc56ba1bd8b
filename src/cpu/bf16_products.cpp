// SPDX-License-Identifier: Apache-2.0
// What the kernels for bf16 multiply: asked of the CPU and of the operating system at run time.
#include <cstdint>

#include "cpu/entries.h"

#if defined(__x86_64__) && defined(__linux__)
#define DISTR_CPU_ASKS_FOR_TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define DISTR_CPU_ASKS_FOR_TILES 0
#endif

namespace distr::cpu {
namespace {

#if DISTR_CPU_ASKS_FOR_TILES
bool cpu_has_tiles() {
  constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24;  // in edx
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmxBf16) != 0 && (edx & kAmxTile) != 0;
}

// Whether the registers' state is enabled: an operating system or a hypervisor may withhold it from a CPU that reports
// the instructions.
bool system_has_tiles() {
  constexpr unsigned kXgetbv = 1U << 27;                    // in ecx: the instruction may be used
  constexpr unsigned kTileState = (1U << 17) | (1U << 18);  // the configuration and the data
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kXgetbv) == 0) {
    return false;
  }
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (eax & kTileState) == kTileState;
}

// Linux lets a process use the registers once it has asked for room to save them in, and may refuse.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return cpu_has_tiles() && system_has_tiles() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
[[maybe_unused]] bool may_use_tiles() { return false; }
#endif

// Of a CPU whose code has pairs. Numbers are rounded to bf16 by AVX512_BF16 in either case. Its product alone takes
// longer than fp32's on Intel's CPUs (docs/kernels/cpu-bf16.md).
Products find_products() {
#if defined(__x86_64__)
  if (static_cast<bool>(__builtin_cpu_supports("avx512bf16"))) {  // an int or a bool, as compilers have it
    if (may_use_tiles()) {
      return Products::of_pairs_in_tiles;
    }
    if (static_cast<bool>(__builtin_cpu_is("amd"))) {
      return Products::of_pairs;
    }
  }
#endif
  return Products::of_floats;
}

}  // namespace

Products products_of_bf16() {
  if (!target_has_pairs()) {
    return Products::of_floats;
  }
  static const Products found = find_products();
  return found;
}

}  // namespace distr::cpu
