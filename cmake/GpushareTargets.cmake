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
# Unity builds compile up to so many files together. With CMake's own 8 the headers and the templates of a folder are compiled twice as often.
if(NOT DEFINED CMAKE_UNITY_BUILD_BATCH_SIZE)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 16)
endif()
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
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
target_compile_options(gpushare_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wcast-align -Wno-unused-parameter
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
  # GCC 12 sees overlaps in "literal" + std::string (GCC bug 105651, mended in 13).
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety>
  # A unity build includes source files, so what they keep in unnamed namespaces looks like a header's.
  $<$<AND:$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>,$<COMPILE_LANG_AND_ID:CXX,GNU>>:-Wno-subobject-linkage>
  $<$<BOOL:${GPUSHARE_WERROR}>:-Werror>)
if(GPUSHARE_SANITIZE)
  # With AddressSanitizer GCC 12 takes instrumented temporaries of the standard library for uninitialized (GCC bug 105562).
  target_compile_options(gpushare_options INTERFACE -fsanitize=${GPUSHARE_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all $<$<BOOL:$<TARGET_PROPERTY:GPUSHARE_TEST_CODE>>:-fno-sanitize=undefined>
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
  target_link_options(gpushare_options INTERFACE -fsanitize=${GPUSHARE_SANITIZE})
endif()
if(GPUSHARE_BUILD_FUZZERS)
  # Coverage for libFuzzer in every object; the fuzzers themselves add -fsanitize=fuzzer when linking.
  target_compile_options(gpushare_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# gpushare_add_core(<folder> <sources>...): the objects of one folder under src/, as target gpushare_<folder>, usable by tests and
# linked into both libraries. Dependencies between folders are links: target_link_libraries(gpushare_memory PUBLIC gpushare_device).
function(gpushare_add_core name)
  add_library(gpushare_${name} STATIC ${ARGN})
  target_include_directories(gpushare_${name} PUBLIC "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(gpushare_${name} PUBLIC gpushare_options Threads::Threads)
  set_property(GLOBAL APPEND PROPERTY GPUSHARE_CORE_TARGETS gpushare_${name})
endfunction()

# gpushare_for_size(<target> HOT <sources>...): for folders most of whose files are as fast as the device, the disk or the socket behind
# them, or run seldom: half the size of -O3. HOT names the files that decide or compute, or that each iteration and allocation passes; they
# stay as they are. They are a target of their own, <target>_hot, so that a unity build compiles them together too. Comes after the
# target's links, which both need.
function(gpushare_for_size target)
  cmake_parse_arguments(ARG "" "" "HOT" ${ARGN})
  get_target_property(sources ${target} SOURCES)
  list(REMOVE_ITEM sources ${ARG_HOT})
  set_property(TARGET ${target} PROPERTY SOURCES ${sources})
  add_library(${target}_hot OBJECT ${ARG_HOT})
  foreach(property INCLUDE_DIRECTORIES LINK_LIBRARIES)
    set_property(TARGET ${target}_hot PROPERTY ${property} $<TARGET_PROPERTY:${target},${property}>)
  endforeach()
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_hot>)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Os>)
  get_property(cores GLOBAL PROPERTY GPUSHARE_CORE_TARGETS)
  if(target IN_LIST cores)
    set_property(GLOBAL APPEND PROPERTY GPUSHARE_CORE_TARGETS ${target}_hot)
  endif()
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
