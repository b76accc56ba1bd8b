# SPDX-License-Identifier: Apache-2.0
# The CUDA backend: sets DISTR_CUDA_FOUND, and DISTR_CUDA_SOURCES to its sources or to the empty backend; DISTR_HOPPER,
# whether Hopper's own kernels are compiled; CMAKE_CUDA_ARCHITECTURES, by DISTR_CUDA_ARCHITECTURES.
# DISTR_CUDA_LIBRARIES is what pkg-config must name for a static libdistr.
include(${CMAKE_CURRENT_LIST_DIR}/cuda_architectures.cmake)
set(DISTR_CUDA_ARCHITECTURES "$ENV{DISTR_CUDA_ARCHITECTURES}" CACHE STRING
  "What CUDA kernels are compiled for: native (the GPUs here; where there is none, all), all, or a list, such as 80;90. \
Empty: CMAKE_CUDA_ARCHITECTURES, else native. The environment variable of this name sets it")
set(architectures native)
foreach(asked "${CMAKE_CUDA_ARCHITECTURES}" "${DISTR_CUDA_ARCHITECTURES}")
  if(asked)
    set(architectures "${asked}")
  endif()
endforeach()
option(DISTR_HOPPER_KERNELS "Compile Hopper's own kernels where 90 is not among the architectures too" OFF)
option(DISTR_LINE_INFO "Keep which lines the machine code of the CUDA kernels is of, for profilers" OFF)
option(DISTR_REGISTER_TABLE "Keep the compiler's report on every kernel, for tools/register_table.py" OFF)
set(DISTR_CUDA_FOUND OFF)
if(DISTR_CUDA OR DISTR_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE known)
    string(REGEX MATCHALL "[0-9]+" known "${known}")
    distr_cuda_architectures("${architectures}" "${known}" CMAKE_CUDA_ARCHITECTURES message)
    if(NOT message)
      enable_language(CUDA)
      find_package(CUDAToolkit REQUIRED)
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)
        set(message "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}; allowed for the CUDA kernels: 12.5 and later")
      endif()
    endif()
    if(NOT message)
      set(DISTR_CUDA_FOUND ON)
      list(JOIN CMAKE_CUDA_ARCHITECTURES ", " message)
      message(STATUS "CUDA kernels for ${message} (${architectures}; DISTR_CUDA_ARCHITECTURES chooses)")
    elseif(DISTR_CUDA STREQUAL "AUTO")
      message(STATUS "${message}; the CUDA kernels are left out")
    else()
      message(FATAL_ERROR "${message}")
    endif()
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
  # nvcc takes 4 to 5 s of CPU for the headers of a source, and CMake 3.25 has no unity builds of CUDA: a unit is one
  # source that includes others, and takes no longer than sm90/variants.cu beside it. Names in their anonymous
  # namespaces must not clash.
  function(distr_cuda_unit sources name)
    set(includes "")
    foreach(source IN LISTS ARGN)
      string(APPEND includes "#include \"cuda/${source}\"\n")
    endforeach()
    set(unit ${PROJECT_BINARY_DIR}/generated/cuda/${name}.cu)
    file(CONFIGURE OUTPUT ${unit} CONTENT "${includes}")
    set(${sources} ${${sources}} ${unit} PARENT_SCOPE)
  endfunction()
  set(DISTR_CUDA_SOURCES ${PROJECT_SOURCE_DIR}/src/cuda/plain/plain.cpp)
  distr_cuda_unit(DISTR_CUDA_SOURCES sm80_forward sm80/near_launch.cu sm80/variants_bf16.cu sm80/variants_f16.cu)
  distr_cuda_unit(DISTR_CUDA_SOURCES plain plain/backward.cu plain/forward.cu plain/mask_gradient.cu)
  distr_cuda_unit(DISTR_CUDA_SOURCES host device.cu entries.cu grouping_energy.cu grouping_identity.cu grouping_lsh.cu
    memory.cu merge.cu prepare/fuse.cu prepare/operand.cu prepare/query_rows.cu prepare/transpose.cu
    sm80/backward_launch.cu sm80/backward_variants_bf16.cu sm80/backward_variants_f16.cu sm80/forward_launch.cu
    sm80/sequences_launch.cu sm80/split_kv.cu streams.cu)
  # Hopper's own instructions are those of no other architecture: these sources are compiled for it alone.
  set(DISTR_HOPPER_SOURCES ${PROJECT_SOURCE_DIR}/src/cuda/sm90/variants.cu)
  distr_cuda_unit(DISTR_HOPPER_SOURCES sm90_backward sm90/backward_variants.cu sm90/backward_convert.cu
    prepare/dropped_scores.cu)
  distr_cuda_unit(DISTR_HOPPER_SOURCES sm90_launches prepare/estimate.cu sm90/backward_launch.cu
    sm90/backward_means.cu sm90/forward_launch.cu sm90/launches.cu sm90/listed_variants.cu sm90/screen_launch.cu
    sm90/screen_variants.cu sm90/tensor_map.cu)
  distr_cuda_code("${CMAKE_CUDA_ARCHITECTURES}" machine_code ptx)
  set(DISTR_HOPPER OFF)
  if(90 IN_LIST machine_code OR DISTR_HOPPER_KERNELS)
    set(DISTR_HOPPER ON)
  else()
    list(APPEND DISTR_CUDA_SOURCES ${PROJECT_SOURCE_DIR}/src/cuda/sm90/absent.cpp)
  endif()
  list(JOIN machine_code ", " machine_code)
  list(JOIN ptx ", " ptx)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/compiled_for.h.in ${PROJECT_BINARY_DIR}/generated/cuda/compiled_for.h)
  set_source_files_properties(${PROJECT_BINARY_DIR}/generated/cuda/host.cu PROPERTIES
    INCLUDE_DIRECTORIES ${PROJECT_BINARY_DIR}/generated)
  # Spills are warnings, hence errors with DISTR_WERROR.
  set(strict_sources ${DISTR_CUDA_SOURCES} ${DISTR_HOPPER_SOURCES})
  list(FILTER strict_sources EXCLUDE REGEX "cpp$")
  set_source_files_properties(${strict_sources} PROPERTIES COMPILE_OPTIONS -Xptxas=-warn-spills)
  # CMake 3.25 does not know that nvcc 13 speaks C++20.
  set(cuda_options -std=c++20 --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-Wshadow,-Wconversion)
  if(DISTR_LINE_INFO)
    list(APPEND cuda_options -lineinfo)
  endif()
  if(DISTR_WERROR)
    list(APPEND cuda_options -Werror=all-warnings -Xcompiler=-Werror)
  endif()
  get_filename_component(cudart_folder "${CUDA_cudart_static_LIBRARY}" DIRECTORY)
  set(DISTR_CUDA_LIBRARIES " -L${cudart_folder} -lcudart_static -ldl -lrt")
  target_compile_options(distr_options INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")
else()
  set(DISTR_CUDA_SOURCES ${PROJECT_SOURCE_DIR}/src/cuda/absent.cpp)
endif()
