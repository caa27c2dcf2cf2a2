// `gpushare top`: what the daemon is doing.
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <string>

#include "base/utf8.hpp"
#include "cli/command.hpp"
#include "cli/output.hpp"
#include "cli/stop_signals.hpp"
#include "cli/top_view.hpp"
#include "client/remote_authority.hpp"
#include "client/status.hpp"
#include "cluster/json.hpp"

namespace gpushare::cli {
namespace {

class TopCommand final : public Command {
 public:
  const char* name() const override { return "top"; }
  const char* summary() const override { return "Show the processes and sessions that share a device"; }
  const char* help() const override {
    return R"(Asks the daemon for its devices, processes and sessions: who has the turn, who waits and for what, bytes, and shares of
the device's time, now and since the daemon began. A user is shown his own processes and sessions; root and the daemon's
user are shown all. Updates every second on a terminal: s sorts by another column, / filters rows, q quits; NO_COLOR=1
leaves out the colours. Prints once otherwise, and with --once or --json.

States of a session: turn (has it), idle (keeps it, nothing runs), ready (waits for it), resting (has nothing to run),
queued (waits for memory), paging, paged_out, overdue (its turn was taken back after the lease).

Examples:
  gpushare top --socket shared.sock --once
  gpushare top --socket shared.sock --json -

JSON: version, socket, pid, uptime_s, lost_processes, devices[] {device, policy, capacity_bytes, effective_capacity_bytes,
promised_bytes, images_bytes, context_bytes, lanes, resident, waiting, turns, cut_off, service_s,
page_outs, page_ins, max_guaranteed, max_opportunistic, product, uuid, parent_uuid, mig_profile, driver_version,
total_bytes},
processes[] {pid, uid, program, device, state, sessions, context_bytes}, sessions[] {pid, session, name, device, state,
waits_for, lane, persistent_bytes, ephemeral_bytes, service_s, iterations, weight, cap, priority, class,
limit_bytes, share, group, held_bytes, spilled_bytes, pinned_bytes, owed_bytes, iteration_times[], iteration_time_s,
iteration_slowdowns[], slowdown_sum, requests_offered, requests_in_time, requests_late, requests_failed,
requests_refused, requests_dropped, requests_cancelled, requests_pending, predicted_miss_rate, price_per_s, held_by,
share_now, uid, user, command, container},
images[] {path, device, state, bytes, kept_bytes, layers, arrived, loads, sessions},
refusals[] {cause, count}.

Exit codes: 0 asked; 2 bad usage; 3 no daemon answers.
)";
  }
  void declare(CLI::App& app) override {
    app.add_option("--socket", socket_, "Path of the daemon's socket [as for 'gpushare daemon']")
        ->type_name("PATH");
    app.add_flag("--once", once_, "Print once");
    json_.declare(app);
  }
  base::Result<ExitCode> run() override {
    const std::string socket = socket_.empty() ? client::default_socket() : socket_;
    GPUSHARE_RETURN_IF_ERROR(check_files({}, {json_.file()}));
    const bool live = !once_ && !json_.wanted() && isatty(STDOUT_FILENO) == 1;
    const StopSignals signals;
    const Keys keys(live);
    const char* no_colour = std::getenv("NO_COLOR");
    look_.colours = live && (no_colour == nullptr || *no_colour == '\0');
    GPUSHARE_ASSIGN_OR_RETURN(client::ServiceStatus before, client::query_service(socket));
    if (!before.sessions.empty() && signals.wait(kLookS)) return kExitOk;
    for (;;) {
      GPUSHARE_ASSIGN_OR_RETURN(client::ServiceStatus status, client::query_service(socket));
      const std::vector<TopRow> rows = top_rows(status, before);
      GPUSHARE_RETURN_IF_ERROR(json_.write(top_json(status, rows, socket)));
      if (!live) {
        if (!json_.on_stdout()) GPUSHARE_RETURN_IF_ERROR(write_stdout(top_text(status, rows, look_)));
        return kExitOk;
      }
      const Clock::time_point until = Clock::now() + std::chrono::seconds(1);
      Keys::Next next = Keys::Next::kKey;
      while (next == Keys::Next::kKey && Clock::now() < until) {  // a key changes how this look is shown
        GPUSHARE_RETURN_IF_ERROR(show(status, rows));
        next = keys.next(signals, until, [&](char key) { return pressed(key); });
      }
      if (next == Keys::Next::kStop) return kExitOk;
      before = std::move(status);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Time between two looks, over which the shares of now are measured, where there is no earlier look.
  static constexpr double kLookS = 0.25;

  // The terminal gives keys at once and does not show them, for as long as this lives.
  class Keys {
   public:
    explicit Keys(bool live)
        : live_(live && isatty(STDIN_FILENO) == 1 && tcgetattr(STDIN_FILENO, &before_) == 0) {
      if (!live_) return;
      termios quiet = before_;
      quiet.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      (void)tcsetattr(STDIN_FILENO, TCSANOW, &quiet);
    }
    ~Keys() {
      if (live_) (void)tcsetattr(STDIN_FILENO, TCSANOW, &before_);
    }
    Keys(const Keys&) = delete;
    Keys& operator=(const Keys&) = delete;
    enum class Next { kTime, kKey, kStop };
    // Waits until then, or for a key, which goes to `pressed`.
    template <class Pressed>
    Next next(const StopSignals& signals, Clock::time_point until, const Pressed& pressed) const {
      constexpr double kSliceS = 0.05;
      for (double left = kSliceS; left > 0;) {
        if (signals.wait(std::min(left, kSliceS))) return Next::kStop;
        pollfd input{STDIN_FILENO, POLLIN, 0};
        if (live_ && poll(&input, 1, 0) > 0) {
          char key = 0;
          return read(STDIN_FILENO, &key, 1) == 1 && pressed(key) ? Next::kKey : Next::kStop;
        }
        left = std::chrono::duration<double>(until - Clock::now()).count();
      }
      return Next::kTime;
    }

   private:
    termios before_{};
    bool live_;
  };

  static void erase_last_character(std::string& text) {
    const auto continues = [](char each) { return (static_cast<unsigned char>(each) & 0xc0) == 0x80; };
    while (!text.empty() && continues(text.back())) text.pop_back();
    if (!text.empty()) text.pop_back();
  }
  // False: stop.
  bool pressed(char key) {
    constexpr char kBackspace = 127, kEscape = 27;
    if (types_filter_) {
      if (key == '\n' || key == kEscape)
        types_filter_ = false;
      else if (key == kBackspace)
        erase_last_character(look_.filter);
      else
        look_.filter += key;
      if (key == kEscape) look_.filter.clear();
      return true;
    }
    if (key == 's')
      look_.sort = static_cast<TopSort>((static_cast<size_t>(look_.sort) + 1) % std::size(kTopSorts));
    if (key == '/') types_filter_ = true, look_.filter.clear();
    return key != 'q';
  }
  base::Status show(const client::ServiceStatus& status, const std::vector<TopRow>& rows) {
    winsize size{};
    const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0;
    look_.width = known ? size.ws_col : 0;
    look_.height = known ? size.ws_row : 0;
    look_.head =
        types_filter_
            ? "filter: " + base::to_printable(look_.filter) + "_"
            : std::string("sorted by ") + kTopSorts[static_cast<size_t>(look_.sort)] +
                  (look_.filter.empty() ? "" : ", filter '" + base::to_printable(look_.filter) + "'") +
                  "   keys: s sort, / filter, q quit";
    return write_stdout_bytes("\033[H\033[J" + top_text(status, rows, look_));
  }

  std::string socket_;
  bool once_ = false, types_filter_ = false;
  TopLook look_;
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_top_command() {
  return std::make_unique<TopCommand>();
}

}  // namespace gpushare::cli
