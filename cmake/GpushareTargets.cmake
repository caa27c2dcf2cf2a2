# Compile settings and the two helpers that every folder uses.
# SPDX-License-Identifier: Apache-2.0

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")
# Programs find the build's libraries relative to themselves. An absolute path goes to the linker as -Wl,-rpath,PATH, which breaks at a comma in it.
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
# Unity builds compile up to so many files together: as many as leave work for several cores. The headers and the templates that the files
# share are compiled once for all of them.
if(NOT DEFINED CMAKE_UNITY_BUILD_BATCH_SIZE)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 32)
endif()
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

configure_file("${PROJECT_SOURCE_DIR}/cmake/version.h.in"
               "${PROJECT_BINARY_DIR}/include/gpushare/version.h" @ONLY)

find_package(Threads REQUIRED)
# 1.81 brought the flat hash tables.
find_package(Boost 1.81 REQUIRED)

# Abseil's archives, not its shared libraries: linked in and hidden, so that a host program may carry another Abseil.
find_package(PkgConfig REQUIRED)
pkg_check_modules(GPUSHARE_ABSL REQUIRED absl_btree absl_inlined_vector)
set(gpushare_absl_archives)
foreach(library IN LISTS GPUSHARE_ABSL_STATIC_LIBRARIES)
  if(library MATCHES "^absl_")
    find_library(GPUSHARE_LIB_${library} NAMES lib${library}.a REQUIRED HINTS ${GPUSHARE_ABSL_STATIC_LIBRARY_DIRS})
    list(APPEND gpushare_absl_archives "${GPUSHARE_LIB_${library}}")
  endif()
endforeach()
add_library(gpushare_absl INTERFACE)
target_link_libraries(gpushare_absl INTERFACE ${gpushare_absl_archives} Threads::Threads)

# What every target of the project compiles with.
add_library(gpushare_options INTERFACE)
target_link_libraries(gpushare_options INTERFACE Boost::headers)
target_include_directories(gpushare_options INTERFACE
  "${PROJECT_SOURCE_DIR}/include" "${PROJECT_BINARY_DIR}/include")
# GCC collects its garbage from 512 MiB on instead of 128, which takes a fourteenth off the time to compile.
target_compile_options(gpushare_options INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=524288>)
if(GPUSHARE_WARNINGS)
  target_compile_options(gpushare_options INTERFACE
    -Wall -Wextra -Wpedantic -Wshadow -Wcast-align -Wno-unused-parameter
    $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
    # GCC 12 sees overlaps in "literal" + std::string (GCC bug 105651, mended in 13).
    $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
    $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety>
    # A unity build includes source files, so what they keep in unnamed namespaces looks like a header's.
    $<$<AND:$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>,$<COMPILE_LANG_AND_ID:CXX,GNU>>:-Wno-subobject-linkage>
    $<$<BOOL:${GPUSHARE_WERROR}>:-Werror>)
else()
  target_compile_options(gpushare_options INTERFACE -w)
endif()
if(GPUSHARE_SANITIZE)
  # With AddressSanitizer GCC 12 takes instrumented temporaries of the standard library for uninitialized (GCC bug 105562).
  target_compile_options(gpushare_options INTERFACE -fsanitize=${GPUSHARE_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all $<$<BOOL:$<TARGET_PROPERTY:GPUSHARE_TEST_CODE>>:-fno-sanitize=undefined>
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
  target_link_options(gpushare_options INTERFACE -fsanitize=${GPUSHARE_SANITIZE})
endif()
if(GPUSHARE_CHECK_WAITS)
  target_compile_definitions(gpushare_options INTERFACE GPUSHARE_CHECK_WAITS)
endif()
if(GPUSHARE_BUILD_FUZZERS)
  # Coverage for libFuzzer in every object; the fuzzers themselves add -fsanitize=fuzzer when linking.
  target_compile_options(gpushare_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# gpushare_add_core(<folder> LINKS <targets>... HOT <sources>... COLD <sources>...): the files of one folder under src/, as target
# gpushare_<folder>, usable by tests and linked into both libraries. LINKS are the folder's dependencies and go on to who links it.
# HOT files decide or compute, or each iteration and allocation passes them. COLD files are as fast as the device, the disk or the socket
# behind them, or run seldom: they are compiled for size, which halves it.
#
# A unity build takes the files of several folders together, as the targets ${gpushare_merged} and ${gpushare_merged}_hot (src/CMakeLists.txt):
# what the folders share is then compiled once for many files, and gpushare_<folder> stands for all of them.
function(gpushare_add_core name)
  cmake_parse_arguments(ARG "" "" "LINKS;HOT;COLD" ${ARGN})
  if(CMAKE_UNITY_BUILD)
    target_sources(${gpushare_merged} PRIVATE ${ARG_COLD})
    target_sources(${gpushare_merged}_hot PRIVATE ${ARG_HOT})
    add_library(gpushare_${name} INTERFACE)
    target_link_libraries(gpushare_${name} INTERFACE ${gpushare_merged})
  else()
    gpushare_add_split(gpushare_${name} LINKS ${ARG_LINKS} HOT ${ARG_HOT} COLD ${ARG_COLD})
    set_property(GLOBAL APPEND PROPERTY GPUSHARE_CORE_TARGETS gpushare_${name} gpushare_${name}_hot)
  endif()
endfunction()

# gpushare_add_split(<target> LINKS ... HOT ... COLD ...): a static library of both kinds of files. Options belong to a target, because
# CMake leaves a file with options of its own out of a unity build.
function(gpushare_add_split target)
  cmake_parse_arguments(ARG "" "" "LINKS;HOT;COLD" ${ARGN})
  add_library(${target}_hot OBJECT ${ARG_HOT})
  add_library(${target} STATIC ${ARG_COLD} $<TARGET_OBJECTS:${target}_hot>)
  foreach(part ${target} ${target}_hot)
    target_include_directories(${part} PUBLIC "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")
    target_link_libraries(${part} PUBLIC gpushare_options Threads::Threads ${ARG_LINKS})
  endforeach()
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Os>)
endfunction()

# gpushare_version_script(<target> <file>): the exports of a shared library. The path may hold any character but a quotation mark; after LINKER: or
# -Wl, a comma would end it.
function(gpushare_version_script target file)
  target_link_options(${target} PRIVATE "SHELL:-Xlinker \"--version-script=${file}\"")
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${file}")
endfunction()

# For the parsing and writing of options and JSON, which GCC takes several times as long to optimise as to parse, and nobody waits for.
if(GPUSHARE_SANITIZE)
  set(gpushare_fast_to_compile -O0)
else()
  set(gpushare_fast_to_compile $<$<NOT:$<CONFIG:Debug>>:-O1>)
endif()
function(gpushare_compile_fast target)
  target_compile_options(${target} PRIVATE ${gpushare_fast_to_compile})
endfunction()

# The code of tests, full of Catch2's assertions: never optimised, which halves its time to compile, and without the checks for undefined
# behaviour, which double it. What is tested is optimised and has them.
function(gpushare_test_code target)
  target_compile_options(${target} PRIVATE -O0)
  set_target_properties(${target} PROPERTIES GPUSHARE_TEST_CODE ON)
endfunction()
