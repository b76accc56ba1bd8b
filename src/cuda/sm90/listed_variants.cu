// SPDX-License-Identifier: Apache-2.0
// The list of compiled shapes of forward kernels that take some of the keys, for what no kernel below takes:
//   d = 64    r = 64                Q K^T, Q~ K^T, in fp16
//   d = 128   r = 128; r = 64       Q K^T, Q~ K^T, in fp16 and bf16; k_hat gathered, in bf16
// and in bf16 of near keys, and then of all far ones:
//   d = 64    Q~ K^T
//   d = 128   r = 64: k_hat gathered, without LSE; k_hat made beforehand
// and, for all that skips far keys, d = 64 by blocks of two consumers that vote and share an SM, and d = 128 by three;
// of one grouping for the whole sequence, d = 128 with r = 64.
// Columns are padded with zeros, so each serves every smaller r, d and dv as well.
#include <array>

#include "cuda/sm90/listed_keys.cuh"
#include "cuda/sm90/variants.cuh"
#include "cuda/sm90/variants.h"
#include "cuda/sm90/voted_keys.cuh"
#include "cuda/stages.cuh"

namespace distr::cuda::sm90 {
namespace {

template <class T, int kColumns, int kValues, class KeyLoader>
constexpr Variant kListedVariant = variant<Config<T, kColumns, kValues, 2, ScaleIn::softmax, KeyLoader, 1, Stages>>();

using RunsOfTma = Runs<TmaKeys, KeyLoad::runs_tma>;

template <int kNearColumns, int kColumns, int kValues, class KeyLoader, ScaleIn kScaleIn>
constexpr Variant kNearFarVariant =
    variant<NearFarConfig<__nv_bfloat16, kNearColumns, kColumns, kValues, kScaleIn, KeyLoader, Stages>>();

template <class T, int kColumns, class KeyLoader>
constexpr Variant kVotedVariant = variant<Config<T, kColumns, kColumns, kColumns <= 64 ? 2 : 3, ScaleIn::softmax,
                                                 KeyLoader, kColumns <= 64 ? 2 : 1, Stages>>();

template <class T>
constexpr Variant kVotedGroups = variant<Config<T, 64, 128, 3, ScaleIn::softmax, VotedGroupedKeys, 1, Stages>>();

constexpr std::array kListedVariants = {
    kListedVariant<__half, 64, 64, ListedTmaKeys>,
    kListedVariant<__half, 128, 128, ListedTmaKeys>,
    kListedVariant<__nv_bfloat16, 128, 128, ListedTmaKeys>,
    kListedVariant<__nv_bfloat16, 64, 128, ListedGatherKeys>,
    kVotedVariant<__half, 64, VotedExactKeys>,
    kVotedVariant<__half, 64, VotedKeys>,
    kVotedVariant<__half, 128, VotedKeys>,
    kVotedGroups<__half>,
    kVotedVariant<__nv_bfloat16, 64, VotedExactKeys>,
    kVotedVariant<__nv_bfloat16, 64, VotedKeys>,
    kVotedVariant<__nv_bfloat16, 128, VotedKeys>,
    kVotedGroups<__nv_bfloat16>,
    kNearFarVariant<64, 64, 64, RunsOfTma, ScaleIn::softmax>,
    kNearFarVariant<64, 64, 64, RunsOfTma, ScaleIn::queries>,
    kNearFarVariant<128, 64, 128, RunsOfTma, ScaleIn::softmax>,
    kNearFarVariant<128, 64, 128, Runs<GatherKeys, KeyLoad::runs_gather>, ScaleIn::queries>};

}  // namespace

std::span<const Variant> listed_variants() { return kListedVariants; }

}  // namespace distr::cuda::sm90
