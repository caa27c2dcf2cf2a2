// top_view.hpp: what `gpushare top` shows of the daemon's status. No terminal, no socket.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "client/status.hpp"

namespace gpushare::cli {

enum class TopSort { kShareNow, kShare, kMemory, kPid, kName };
inline constexpr const char* kTopSorts[] = {"share now", "share", "memory", "pid", "name"};

struct TopLook {
  size_t width = 0;   // columns of the terminal; 0: as wide as it gets
  size_t height = 0;  // lines of the terminal; 0: as many as there are
  std::string head;   // a line above all others; empty: none
  bool colours = false;
  TopSort sort = TopSort::kShareNow;
  std::string filter;  // rows of sessions that have it in a cell; empty: all
};

// One session, with what /proc and the table of users say of its process.
struct TopRow {
  client::SessionStatus session;
  uint64_t uid = 0;
  std::string user, command, container;
  double share_now = 0;  // of the device's time between two looks
};

// Rows of the sessions of `now`. `before`: an earlier status of the same daemon, for share_now.
std::vector<TopRow> top_rows(const client::ServiceStatus& now, const client::ServiceStatus& before);

std::string top_text(const client::ServiceStatus& status, std::vector<TopRow> rows, const TopLook& look);
nlohmann::ordered_json top_json(const client::ServiceStatus& status, const std::vector<TopRow>& rows,
                                const std::string& socket);

}  // namespace gpushare::cli
