# Shared by scripts/build, scripts/test, scripts/demo and .ci/run: where we are, what must be installed, how to build a preset.
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
jobs=${GPUSHARE_JOBS:-$(nproc)}
test_jobs=$((2 * jobs))  # more than half of the tests' time is spent waiting: for a device, a turn, a process

say() { printf '\n==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Debian 12's libboost-dev is 1.74, before the flat hash tables.
boost_package=libboost-dev
grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release && boost_package=libboost1.81-dev
build_packages=(build-essential cmake ninja-build pkg-config python3 libabsl-dev "$boost_package" nlohmann-json3-dev libcli11-dev)
test_packages=(catch2 libbenchmark-dev libmimalloc-dev libjemalloc-dev python3-cffi python3-numpy python3-pytest libtorch-dev
  python3-grpcio python3-protobuf python3-yaml)

# missing_packages <package>...: prints those that are not installed, one a line.
missing_packages() {
  local package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || printf '%s\n' "$package"
  done
}

# need_packages <package>...: installs what is missing with apt where we may, otherwise says exactly what to install.
need_packages() {
  command -v dpkg-query >/dev/null || die "this script knows Debian and Ubuntu only; install these packages' equivalents: $*"
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -eq 0 ] && return 0
  local sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    { command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; } ||
      die "packages are missing and this user cannot install them; ask an administrator to run: apt-get install ${missing[*]}"
    sudo=(sudo)
  fi
  say "installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get install failed; run it by hand to see why: apt-get install ${missing[*]}"
}

need_cmake() {
  local version
  version=$(cmake --version | sed -n '1s/.* //p')
  [ "$(printf '3.25\n%s\n' "$version" | sort -V | head -n 1)" = 3.25 ] ||
    die "cmake $version is too old, 3.25 or newer is needed (Debian 12 and Ubuntu 24.04 have it; elsewhere: pip install cmake)"
}

# build_preset <preset> [cmake -D options and, after --, targets]
build_preset() {
  local preset=$1 log
  shift
  local options=() targets=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
  if [ $# -gt 1 ]; then shift; targets=(--target "$@"); fi
  say "configuring build/$preset"
  log=$(mktemp)
  cmake --preset "$preset" -G Ninja -DGPUSHARE_WERROR="${GPUSHARE_WERROR:-OFF}" "${options[@]}" >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; die "configuring $preset failed"; }
  rm -f "$log"
  say "building build/$preset with $jobs jobs"
  cmake --build "build/$preset" --parallel "$jobs" "${targets[@]}" >&2
}
