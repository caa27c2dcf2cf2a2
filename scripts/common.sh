# Shared by scripts/build, scripts/test, scripts/demo and .ci/run: where we are, what must be installed, how to build a preset.
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
jobs=${GPUSHARE_JOBS:-$(nproc)}
test_jobs=$((2 * jobs))  # more than half of the tests' time is spent waiting: for a device, a turn, a process

say() { printf '\n==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Boost is apart: need_boost.
build_packages=(build-essential cmake ninja-build pkg-config python3 libabsl-dev nlohmann-json3-dev libcli11-dev)
test_packages=(catch2 libbenchmark-dev libmimalloc-dev libjemalloc-dev python3-cffi python3-numpy python3-pytest libtorch-dev
  python3-grpcio python3-protobuf python3-yaml)

# missing_packages <package>...: prints those that are not installed, one a line.
missing_packages() {
  local package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || printf '%s\n' "$package"
  done
}

# apt <arguments>: apt-get, which never removes a package. Waits while another program has apt's lock, up to GPUSHARE_APT_WAIT_S seconds.
# (apt's own option for that, DPkg::Lock::Timeout, knows one lock of three.)
apt() {
  local end=$((SECONDS + ${GPUSHARE_APT_WAIT_S:-900})) told= log status
  log=$(mktemp)
  while :; do
    status=0
    "${sudo[@]}" env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -qq --no-remove "$@" >"$log" 2>&1 || status=$?
    if [ $status -eq 0 ] || [ $SECONDS -ge $end ] || ! grep -qE 'Could not get lock|Unable to lock|Unable to acquire' "$log"; then break; fi
    [ -n "$told" ] || say "waiting for apt: $(sed -n 's/^E: \(Could not get lock.*\)/\1/p' "$log" | head -n 1)"
    told=1
    sleep 2
  done
  [ $status -eq 0 ] || cat "$log" >&2
  rm -f "$log"
  return $status
}

# private_apt <folder> <arguments>: apt-get with lists, packages and locks in the folder, without root. The system's stay as they are.
private_apt() {
  local folder=$1
  shift
  mkdir -p "$folder"/{lists/partial,archives/partial}
  touch "$folder/status"
  apt-get -qq -o Dir::State="$folder" -o Dir::State::status="$folder/status" -o Dir::Cache="$folder" -o APT::Sandbox::User="$(id -un)" "$@"
}

# download_package <package> <suite> <folder>: the package's file, of another release of Debian than the system's.
download_package() {
  mkdir -p "$3"
  (
    cd "$3"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' | head -n 1) $2 main" >sources
    options=(-o Dir::Etc::sourcelist="$PWD/sources" -o Dir::Etc::sourceparts=/dev/null)
    private_apt "$PWD/apt" "${options[@]}" update && private_apt "$PWD/apt" "${options[@]}" download "$1"
    status=$?
    rm -rf apt
    exit $status
  )
}

# may_install <what>...: sets `sudo`, the words that let apt install; ends the script and names what is missing if nothing does.
may_install() {
  sudo=()
  [ "$(id -u)" -eq 0 ] && return 0
  { command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; } ||
    die "packages are missing and this user cannot install them; ask an administrator to run: apt-get install $*"
  sudo=(sudo)
}

# need_packages <package>...: installs what is missing with apt where we may, otherwise says exactly what to install.
need_packages() {
  command -v dpkg-query >/dev/null || die "this script knows Debian and Ubuntu only; install these packages' equivalents: $*"
  local missing sudo
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -eq 0 ] && return 0
  may_install "${missing[@]}"
  say "installing ${missing[*]}"
  apt update || say "apt-get update failed; trying with the lists of packages that are here"
  apt install -y --no-install-recommends "${missing[@]}" ||
    die "apt-get install failed, see above; no package was removed. By hand: apt-get install ${missing[*]}"
}

boost_folders=(/usr/local /usr)

# find_boost: sets boost_root to a folder whose include/ has Boost 1.81 or newer, which brought the flat hash tables; fails if there is none.
find_boost() {
  local version
  for boost_root in ${BOOST_ROOT:+"$BOOST_ROOT"} "${boost_folders[@]}" "$root/build/boost/usr"; do
    version=$(sed -n 's/^#define BOOST_VERSION \([0-9]*\).*/\1/p' "$boost_root/include/boost/version.hpp" 2>/dev/null) || true
    [ "${version:-0}" -lt 108100 ] || return 0
  done
  return 1
}

# need_boost: find_boost, after installing the system's package if that removes no other. Else the package's files are unpacked into build/boost:
# Debian 12's libboost1.81-dev and libboost-dev, which is 1.74, exclude each other.
need_boost() {
  find_boost && return 0
  local package=libboost-dev sudo=()
  grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release && package=libboost1.81-dev
  if (may_install "$package") 2>/dev/null; then
    may_install "$package"
    apt update || true
    if apt-get -qq --simulate --no-remove install "$package" >/dev/null 2>&1; then
      say "installing $package"
      apt install -y --no-install-recommends "$package" && find_boost && return 0
    fi
  fi
  say "unpacking the headers of $package into build/boost: installing it would remove other packages, or is not allowed"
  rm -rf "$root/build/boost" && mkdir -p "$root/build/boost"
  # libboost-dev itself is empty and depends on that of a version.
  [ "$package" != libboost-dev ] || package=$(apt-cache depends libboost-dev | sed -n 's/^ *Depends: \(libboost[0-9.]*-dev\)$/\1/p')
  (cd "$root/build/boost" && apt-get -qq download "$package" && dpkg-deb --extract "$package"_*.deb .) >&2 && find_boost ||
    die "Boost 1.81 or newer is needed, and $package could not be had. Name the folder of another one, the parent of include/boost: BOOST_ROOT=/opt/boost $0"
}

need_cmake() {
  local version
  version=$(cmake --version | sed -n '1s/.* //p')
  [ "$(printf '3.25\n%s\n' "$version" | sort -V | head -n 1)" = 3.25 ] ||
    die "cmake $version is too old, 3.25 or newer is needed (Debian 12 and Ubuntu 24.04 have it; elsewhere: pip install cmake)"
}

# need_to_build [package]...: all that building needs, and these packages.
need_to_build() {
  need_packages "${build_packages[@]}" "$@"
  need_boost
  need_cmake
}

# build_preset <preset> [cmake -D options and, after --, targets]
build_preset() {
  local preset=$1 log
  shift
  local options=() targets=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
  if [ $# -gt 1 ]; then shift; targets=(--target "$@"); fi
  need_boost
  say "configuring build/$preset"
  log=$(mktemp)
  cmake --preset "$preset" -G Ninja -DBOOST_ROOT="$boost_root" -DGPUSHARE_WERROR="${GPUSHARE_WERROR:-OFF}" "${options[@]}" >"$log" 2>&1 ||
    { cat "$log" >&2; rm -f "$log"; die "configuring $preset failed"; }
  rm -f "$log"
  say "building build/$preset with $jobs jobs"
  cmake --build "build/$preset" --parallel "$jobs" "${targets[@]}" >&2
}

# build_release <tests and benchmarks: ON or OFF> [as build_preset]: build/release as scripts/build, scripts/demo and scripts/test have it. CMake keeps
# options from one call to the next, so each that one of these scripts sets, all set.
# Source files of several folders are compiled together: the headers that they share are read once, and the templates that they share are
# compiled once. Warnings are for those who change the code: GPUSHARE_WERROR=ON. CONTRIBUTING.md has the figures.
build_release() {
  local tests=$1
  shift
  build_preset release -DCMAKE_UNITY_BUILD=ON -DGPUSHARE_WARNINGS="${GPUSHARE_WERROR:-OFF}" -DGPUSHARE_BUILD_CLI=ON -DGPUSHARE_BUILD_EXAMPLES=ON \
    -DGPUSHARE_BUILD_TESTS="$tests" -DGPUSHARE_BUILD_BENCHMARKS="$tests" "$@"
}
