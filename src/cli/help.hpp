// help.hpp: the text of --help, the same look for the tool and every command.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace gpushare::cli {

// Help text of a command: its purpose, its usage, its commands and options wrapped to `width` columns, then the
// app's footer unchanged.
std::string render_help(const CLI::App& app, size_t width = 110);

}  // namespace gpushare::cli
