# Toolchain file: builds for 64-bit ARM on another processor, with Debian's g++-aarch64-linux-gnu. The environment variable GPUSHARE_SYSROOT names a folder
# with the headers and libraries that are not the compiler's: Abseil, nlohmann_json, CLI11 (scripts/wheel --arch aarch64 makes one).
# SPDX-License-Identifier: Apache-2.0
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CXX_FLAGS_INIT -Wno-psabi)  # no notes about the ABI of GCC before 10.1
set(CMAKE_FIND_ROOT_PATH "$ENV{GPUSHARE_SYSROOT}")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_SYSROOT_DIR} "$ENV{GPUSHARE_SYSROOT}")
set(ENV{PKG_CONFIG_LIBDIR} "$ENV{GPUSHARE_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig")
