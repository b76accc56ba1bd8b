# SPDX-License-Identifier: Apache-2.0
# The CUDA backend: sets DISTR_CUDA_FOUND, and DISTR_CUDA_SOURCES to its sources or to the empty backend;
# DISTR_CUDA_LIBRARIES is what pkg-config must name for a static libdistr.
set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual CACHE STRING
  "What kernels are compiled for: machine code for sm_80 (serves 86 and 89) and sm_90, PTX for what comes later")
option(DISTR_REGISTER_TABLE "Keep the compiler's report on every kernel, for tools/register_table.py" OFF)
set(DISTR_CUDA_FOUND OFF)
if(DISTR_CUDA OR DISTR_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(DISTR_CUDA_FOUND ON)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)
      set(message "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}; allowed for the CUDA kernels: 12.5 and later")
      if(NOT DISTR_CUDA STREQUAL "AUTO")
        message(FATAL_ERROR "${message}")
      endif()
      message(STATUS "${message}; they are left out")
      set(DISTR_CUDA_FOUND OFF)
    endif()
    foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
      if(architecture MATCHES "^([0-9]+)" AND CMAKE_MATCH_1 LESS 80)
        message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES holds ${architecture}; allowed: 80 and later")
      endif()
    endforeach()
  elseif(NOT DISTR_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "DISTR_CUDA is ${DISTR_CUDA}, but no CUDA compiler was found; set CMAKE_CUDA_COMPILER to nvcc")
  endif()
endif()

if(DISTR_CUDA_FOUND)
  if(DISTR_REGISTER_TABLE)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/register_table.py --compile
      $CACHE{CMAKE_CUDA_COMPILER_LAUNCHER})
  endif()
  set(DISTR_CUDA_SOURCES
    src/cuda/device.cu
    src/cuda/entries.cu
    src/cuda/grouping_energy.cu
    src/cuda/grouping_identity.cu
    src/cuda/grouping_lsh.cu
    src/cuda/memory.cu
    src/cuda/plain/backward.cu
    src/cuda/plain/forward.cu
    src/cuda/plain/mask_gradient.cu
    src/cuda/plain/plain.cpp
    src/cuda/prepare/fuse.cu
    src/cuda/prepare/operand.cu
    src/cuda/prepare/query_rows.cu
    src/cuda/prepare/transpose.cu
    src/cuda/sm80/backward_launch.cu
    src/cuda/sm80/backward_variants_bf16.cu
    src/cuda/sm80/backward_variants_f16.cu
    src/cuda/sm80/forward_launch.cu
    src/cuda/sm80/split_kv.cu
    src/cuda/sm80/variants_bf16.cu
    src/cuda/sm80/variants_f16.cu)
  set(DISTR_HOPPER_SOURCES
    src/cuda/prepare/estimate.cu
    src/cuda/sm90/backward_launch.cu
    src/cuda/sm90/backward_convert.cu
    src/cuda/sm90/backward_variants.cu
    src/cuda/sm90/forward_launch.cu
    src/cuda/sm90/tensor_map.cu
    src/cuda/sm90/variants.cu)
  # Spills are warnings, hence errors with DISTR_WERROR.
  set(strict_sources ${DISTR_CUDA_SOURCES} ${DISTR_HOPPER_SOURCES})
  list(FILTER strict_sources EXCLUDE REGEX "cpp$")
  set_source_files_properties(${strict_sources} PROPERTIES COMPILE_OPTIONS -Xptxas=-warn-spills)
  # CMake 3.25 does not know that nvcc 13 speaks C++20.
  set(cuda_options -std=c++20 --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wextra,-Wshadow,-Wconversion)
  if(DISTR_WERROR)
    list(APPEND cuda_options -Werror=all-warnings -Xcompiler=-Werror)
  endif()
  get_filename_component(cudart_folder "${CUDA_cudart_static_LIBRARY}" DIRECTORY)
  set(DISTR_CUDA_LIBRARIES " -L${cudart_folder} -lcudart_static -ldl -lrt")
  target_compile_options(distr_options INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")
else()
  set(DISTR_CUDA_SOURCES src/cuda/absent.cpp)
endif()
