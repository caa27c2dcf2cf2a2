// help.hpp: the text of --help, the same look for the tool and every command.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace gpushare::cli {

// What it is, how it is called, its commands and options wrapped to `width` columns, then the app's footer as
// it stands.
std::string render_help(const CLI::App& app, size_t width = 110);

}  // namespace gpushare::cli
