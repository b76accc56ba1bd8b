# SPDX-License-Identifier: Apache-2.0
# Language level, warnings and sanitizers, for this project's own targets only: nothing global leaks into a project
# that includes this one.
include(GNUInstallDirs)

add_library(distr_options INTERFACE)
target_compile_features(distr_options INTERFACE cxx_std_20)
set(warnings -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion)
if(DISTR_WERROR)
  list(APPEND warnings -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 sees uninitialised values and overlaps inside std::string, and in intrinsics that are undefined on purpose.
  list(APPEND warnings -Wno-maybe-uninitialized -Wno-restrict -Wno-psabi)
endif()
target_compile_options(distr_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>")
if(DISTR_SANITIZE)  # all but targets of the property DISTR_UNSANITIZED
  set(flags "-fsanitize=${DISTR_SANITIZE};-fno-sanitize-recover=all")
  target_compile_options(distr_options INTERFACE
    "$<$<NOT:$<BOOL:$<TARGET_PROPERTY:DISTR_UNSANITIZED>>>:${flags}>" -fno-omit-frame-pointer)
  target_link_options(distr_options INTERFACE -fsanitize=${DISTR_SANITIZE})
endif()

# Compiles the sources of a target as one unit, but those with options of their own. Compile commands are of single
# sources, for clang-tidy, which joins them itself.
function(distr_one_unit target)
  if(NOT CMAKE_EXPORT_COMPILE_COMMANDS)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  endif()
endfunction()
