// SPDX-License-Identifier: Apache-2.0
// What a kernel reads of its thread, block and grid.
#pragma once

#include <vector_types.h>

extern thread_local constinit uint3 threadIdx;
extern thread_local constinit uint3 blockIdx;
extern thread_local constinit dim3 blockDim;
extern thread_local constinit dim3 gridDim;
