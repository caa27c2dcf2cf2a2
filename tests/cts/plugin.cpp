// The backend of gpushare-conformance: a plug-in, named by the environment.
//   GPUSHARE_CTS_LIBRARY  the shared library that exports gpushare_backend_entry_v1
//   GPUSHARE_CTS_SPEC     the device, such as "mine" or "mine:0?memory=4G"
//   GPUSHARE_CTS_EXCUSES  a file; lines "unsupported TEST = REASON", "xfail TEST = REASON", "tag TAG", "# ..." (may be absent)
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "cts.hpp"
#include "device/registry.hpp"

namespace gpushare::cts {
namespace {

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "gpushare-conformance: %s\n", why.c_str());
  std::exit(2);
}

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

void read_excuses(const char* path, Backend& backend) {
  std::ifstream file(path);
  if (!file) give_up(std::string("GPUSHARE_CTS_EXCUSES: cannot read ") + path);
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const size_t word = line.find(' '), equals = line.find(" = ");
    const std::string kind = line.substr(0, word);
    if (kind == "tag" && word != std::string::npos) {
      backend.tags.push_back(line.substr(word + 1));
      continue;
    }
    if ((kind != "unsupported" && kind != "xfail") || equals == std::string::npos || equals <= word)
      give_up(std::string(path) + ":" + std::to_string(number) +
              ": expected 'unsupported TEST = REASON', 'xfail TEST = REASON' or 'tag TAG'");
    (kind == "xfail" ? backend.xfail : backend.unsupported)
        .push_back({line.substr(word + 1, equals - word - 1), line.substr(equals + 3)});
  }
}

Backend load() {
  const char* library = setting("GPUSHARE_CTS_LIBRARY");
  const char* spec = setting("GPUSHARE_CTS_SPEC");
  if (library == nullptr || spec == nullptr)
    give_up(
        "runs what gpushare/backend.h promises as tests over a backend of yours; set GPUSHARE_CTS_LIBRARY to "
        "its shared library,\n"
        "GPUSHARE_CTS_SPEC to the device (its name, then :index and ?options if any), and "
        "GPUSHARE_CTS_EXCUSES to a file with what\n"
        "it does not support. Tests are chosen by name or wildcard on the command line.");
  if (const base::Status loaded = device::load_backend(std::filesystem::absolute(library).string());
      !loaded.ok())
    give_up(loaded.message());
  Backend backend{spec, spec, {}, {}, {}};
  backend.name = backend.name.substr(0, backend.name.find_first_of(":?"));
  if (const char* excuses = setting("GPUSHARE_CTS_EXCUSES")) read_excuses(excuses, backend);
  return backend;
}

}  // namespace

const Backend& backend() {
  static const Backend plugin = load();
  return plugin;
}

}  // namespace gpushare::cts
