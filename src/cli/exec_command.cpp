// `gpushare exec`: runs a program that knows nothing of gpushare under a limit of device memory, with the preload shim (src/shim) in it and
// in the programs that it starts.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/exec_watch.hpp"
#include "cli/options.hpp"
#include "cli/program_check.hpp"
#include "cli/shim_files.hpp"
#include "daemon/kernel_limits.hpp"
#include "shim/books.hpp"
#include "shim/settings.hpp"

namespace gpushare::cli {
namespace {

// A cgroup of the program's own, on which the daemon can set the driver's limit (daemon/kernel_limits.hpp), for as long as this
// process lives. Without the rights for that, or without cgroups of version 2, there is none, and the shim alone holds the program.
class OwnCgroup {
 public:
  OwnCgroup() {
    constexpr char kRoot[] = "/sys/fs/cgroup";
    constexpr long kCgroup2 = 0x63677270;
    struct statfs system {};
    if (::statfs(kRoot, &system) != 0 || system.f_type != kCgroup2) return;
    std::ifstream file("/proc/self/cgroup");
    const std::string within = daemon::cgroup_in({std::istreambuf_iterator<char>(file), {}});
    if (within.empty()) return;
    const std::string path =
        kRoot + (within == "/" ? "" : within) + "/" + daemon::kCgroupName + std::to_string(::getpid());
    if (::mkdir(path.c_str(), 0755) != 0) return;
    path_ = path;
    processes_ = path + "/cgroup.procs";
  }
  // Descendants that live on keep it.
  ~OwnCgroup() {
    if (!path_.empty()) ::rmdir(path_.c_str());
  }
  OwnCgroup(const OwnCgroup&) = delete;
  OwnCgroup& operator=(const OwnCgroup&) = delete;
  // In a child of fork, before it runs the program.
  void enter() const {
    if (processes_.empty()) return;
    const int file = ::open(processes_.c_str(), O_WRONLY | O_CLOEXEC);
    if (file >= 0 && ::write(file, "0", 1) == 1) ::close(file);
  }

 private:
  std::string path_, processes_;
};

// The path at which the loader finds the driver without the proxy; empty if there is none.
std::string driver_path() {
  void* const handle = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  link_map* map = nullptr;
  if (handle == nullptr || ::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) return {};
  std::string path = map->l_name;
  ::dlclose(handle);
  return path;
}

void put_before(const char* variable, const std::string& value, char separator) {
  const char* old = std::getenv(variable);
  const std::string all = old != nullptr && *old != 0 ? value + separator + old : value;
  ::setenv(variable, all.c_str(), 1);
}

// The descriptors of a process behind which there is a group's page.
std::vector<std::filesystem::path> group_pages(const std::string& process) {
  std::vector<std::filesystem::path> pages;
  std::error_code error, gone;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + process + "/fd", error))
    if (std::filesystem::read_symlink(entry.path(), gone).native().rfind("/memfd:gpushare-group", 0) == 0)
      pages.push_back(entry.path());
  return pages;
}

volatile sig_atomic_t g_child = 0;
void pass_on(int signal) {
  if (g_child > 0) ::kill(static_cast<pid_t>(g_child), signal);
}
void wake_up(int) {}

// Waits until the child has ended, and meanwhile looks whether the programs are held. Returns the child's status.
// Descendants whose own parents have ended come to this process, and go with the same calls. `awake`: the signals that
// end a pause, which are blocked otherwise.
int await_end(pid_t child, ExecWatch* watch, const sigset_t& awake) {
  for (;;) {
    int status = 0;
    pid_t ended = 0;
    do ended = ::waitpid(-1, &status, WNOHANG);
    while (ended > 0 && ended != child);
    if (ended == child || (ended < 0 && errno != EINTR)) return status;
    const int pause_ms = watch != nullptr ? watch->look() : -1;
    const timespec time{pause_ms / 1000, pause_ms % 1000 * 1'000'000L};
    ::ppoll(nullptr, 0, pause_ms >= 0 ? &time : nullptr, &awake);
  }
}

class ExecCommand final : public Command {
 public:
  const char* name() const override { return "exec"; }
  const char* summary() const override {
    return "Run an unmodified CUDA program under a limit of device memory";
  }
  const char* help() const override {
    return R"(The program and those that it starts are a group: together they get at most --memory of each device, and the driver tells
them that the device has no more. An allocation above the limit fails with the driver's own out-of-memory code. Put --
before the program. Its exit code is passed on; 128 + n if signal n ended it.

With --soft the smaller of the two sizes is what may lie on a device, the larger is all that the group gets: plain
allocations that do not fit on the device lie in pinned host memory, under the same addresses and slower.

Where a daemon serves the device (gpushare daemon), the group is a session of it: its memory is promised, and its work
for the device waits for its turns, by weight, class and priority. With --cap it gets no more than that part of the
device's time, also while the device is idle.

With --pageable the daemon may move the group's memory to pinned host memory while others have the device, so that
programs run in turns of which each wants the whole device. It comes back under the same addresses.

Settings come from the environment (GPUSHARE_MEMORY, _SOFT, _PINNED, _WEIGHT, _CAP, _CLASS, _PRIORITY, _PAGEABLE,
_SMALL_HEAP, _SOCKET, _SHIM_FAIL), then /etc/gpushare/exec.conf, then gpushare/exec.conf in XDG_CONFIG_HOME
(~/.config), then the options; the later ones win. A file has lines such as memory = 8GiB, weight = 2 and fail = closed.

A program that cannot be held (setuid, static, musl) is refused. A program is held when the shim in it has reported,
before the program's own code runs. Where that does not come, the program runs without a limit and one line on stderr
says so; with --fail-closed it does not run or is ended. The same holds for the programs that it starts.

Examples:
  gpushare exec --memory 8GiB -- sh -c 'echo limit $GPUSHARE_MEMORY'
  gpushare exec --memory 8GiB --weight 2 --class opportunistic -- sh -c 'echo $GPUSHARE_WEIGHT'

--change PID gives the group of a running gpushare exec other limits, those of --memory (with --soft) and --pinned, and
another --weight, --cap, --class and --priority. A program that holds more gets nothing further until it has freed enough.

JSON: none; --json belongs to the program.

Exit codes: the program's; 2 bad usage, a program that cannot be held; 3 no shim in it, with --fail-closed.
)";
  }
  void declare(CLI::App& app) override {
    app.add_option("--memory", option("memory"),
                   "Most device memory that the group gets of each device: 8GiB, ...")
        ->type_name("SIZE");
    app.add_option("--soft", option("soft"), "With --memory: above the smaller of the two, host memory")
        ->type_name("SIZE");
    app.add_option(
           "--pinned", option("pinned"),
           "Most pinned host memory of the group [with --memory, a quarter of the host's or container's]")
        ->type_name("SIZE");
    app.add_option("--weight", option("weight"),
                   "Share of the device's time beside others, under a daemon [1]")
        ->type_name("N");
    app.add_option(
           "--cap", option("cap"),
           "The most of each device's time, under a daemon: 30%. Also while nobody else wants it [100%]")
        ->type_name("PERCENT");
    app.add_option("--class", option("class"), "guaranteed, or opportunistic: gives way at once [guaranteed]")
        ->type_name("CLASS");
    app.add_option("--priority", option("priority"), "For policies that know it; higher goes first [0]")
        ->type_name("N");
    app.add_option("--socket", option("socket"),
                   "The daemon's socket [GPUSHARE_SOCKET, else as gpushare daemon]")
        ->type_name("PATH");
    app.add_flag_callback(
        "--pageable", [this] { option("pageable") = "1"; },
        "Under a daemon: outside its turns its memory may go to the host, for other programs");
    app.add_flag_callback(
        "--small-heap", [this] { option("small-heap") = "1"; },
        "Plain allocations of up to 32 KiB come from chunks of 2 MiB, without a call of the driver");
    app.add_flag("--fail-closed", fail_closed_, "No limit, no program: see above");
    app.add_option("--change", change_,
                   "Gives the group of that gpushare exec other limits, or another share")
        ->type_name("PID");
    app.add_option("program", program_, "Program and its arguments, after --")->type_name("PROGRAM");
  }

  base::Result<ExitCode> run() override {
    GPUSHARE_RETURN_IF_ERROR(read_settings());
    if (!change_.empty()) return change_group();
    if (program_.empty()) return bad_option("program", "", "name one, after --");
    GPUSHARE_ASSIGN_OR_RETURN(const std::string path, find_program(program_[0]));
    GPUSHARE_RETURN_IF_ERROR(check_preloadable(path));
    const char* const around = std::getenv("GPUSHARE_SHIM_GROUP");
    if (around != nullptr && *around != 0) {
      const char* const why =
          "it begins a group of its own, inside another group, whose limits do not count the new one's "
          "programs";
      if (fail_closed_) return base::Status(GPUSHARE_UNAVAILABLE, std::string(why) + " (--fail-closed)");
      std::fprintf(stderr, "gpushare exec: %s\n", why);
    }
    const base::Result<ShimFiles> files = find_shim_files();
    if (files.ok()) {
      GPUSHARE_RETURN_IF_ERROR(set_up(*files));
    } else {
      if (fail_closed_) return files.status();
      std::fprintf(stderr, "gpushare exec: the program runs without a limit: %s\n",
                   files.status().message().c_str());
    }
    return start(path);
  }

 private:
  // A setting: its name in files and as an option, its variable, and its value from the strongest source so far.
  struct Setting {
    const char* name;
    const char* variable;
    std::string value = {}, option = {};
  };
  std::string& option(const char* name) { return setting(name)->option; }
  Setting* setting(std::string_view name) {
    for (Setting& each : settings_)
      if (name == each.name) return &each;
    return nullptr;
  }

  base::Status read_settings() {
    for (Setting& each : settings_)
      if (const char* value = std::getenv(each.variable); value != nullptr) each.value = value;
    GPUSHARE_RETURN_IF_ERROR(read_file("/etc/gpushare/exec.conf"));
    const char* config = std::getenv("XDG_CONFIG_HOME");
    const char* home = std::getenv("HOME");
    if (config != nullptr && *config != 0)
      GPUSHARE_RETURN_IF_ERROR(read_file(std::string(config) + "/gpushare/exec.conf"));
    else if (home != nullptr && *home != 0)
      GPUSHARE_RETURN_IF_ERROR(read_file(std::string(home) + "/.config/gpushare/exec.conf"));
    for (Setting& each : settings_)
      if (!each.option.empty()) each.value = each.option;
    const std::string &fail = setting("fail")->value, &cls = setting("class")->value,
                      &memory = setting("memory")->value, &weight = setting("weight")->value,
                      &priority = setting("priority")->value;
    if (!fail.empty() && fail != "closed" && fail != "open")
      return {GPUSHARE_INVALID_ARGUMENT, "fail: '" + fail + "' is not allowed; it is open or closed"};
    if (fail == "closed") fail_closed_ = true;
    for (const std::string name : {"pageable", "small-heap"})
      if (const std::string& value = setting(name)->value; !value.empty() && value != "0" && value != "1")
        return {GPUSHARE_INVALID_ARGUMENT, name + ": '" + value + "' is not allowed; it is 0 or 1"};
    if (!cls.empty() && cls != "guaranteed" && cls != "opportunistic")
      return bad_option("--class", cls, "it is guaranteed or opportunistic");
    GPUSHARE_ASSIGN_OR_RETURN(limits_,
                              parse_limits(memory, setting("soft")->value, setting("pinned")->value));
    if (!weight.empty()) GPUSHARE_RETURN_IF_ERROR(parse_number("--weight", weight, 0, false, 1e6).status());
    if (const std::string& cap = setting("cap")->value; !cap.empty())
      GPUSHARE_RETURN_IF_ERROR(parse_share("--cap", cap).status());
    if (!priority.empty()) {
      GPUSHARE_RETURN_IF_ERROR(parse_number("--priority", priority, -1e9, true, 1e9).status());
      if (priority.find('.') != std::string::npos)
        return bad_option("--priority", priority, "it is a whole number");
    }
    return {};
  }

  static base::Result<double> parse_share(const char* option, const std::string& text) {
    const base::Result<double> share = base::parse_percent(text);
    if (!share.ok())
      return bad_option(option, text, "give a percentage such as 30%, above 0% and at most 100%");
    return share;
  }

  static base::Result<shim::Limits> parse_limits(const std::string& memory, const std::string& soft,
                                                 const std::string& pinned) {
    uint64_t memory_bytes = shim::kNoLimit, soft_bytes = shim::kNoLimit, pinned_bytes = shim::kNoLimit;
    if (!memory.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(memory_bytes, parse_size("--memory", memory));
      pinned_bytes = shim::default_pinned_bytes();
    }
    if (!soft.empty()) {
      if (memory.empty()) return bad_option("--soft", soft, "with --memory: one is the limit of the other");
      GPUSHARE_ASSIGN_OR_RETURN(soft_bytes, parse_size("--soft", soft));
    }
    if (!pinned.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(pinned_bytes, parse_size("--pinned", pinned));
    }
    return shim::make_limits(memory_bytes, soft_bytes, pinned_bytes);
  }

  base::Status read_file(const std::string& path) {
    errno = 0;
    std::ifstream file(path);
    int why = errno;
    int number = 0;
    const auto trimmed = [](const std::string& text) {
      const size_t first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
      return first == std::string::npos ? std::string() : text.substr(first, last - first + 1);
    };
    for (std::string line; std::getline(file, line);) {
      ++number;
      line = trimmed(line.substr(0, line.find('#')));
      if (line.empty()) continue;
      const size_t equals = line.find('=');
      Setting* found = equals == std::string::npos ? nullptr : setting(trimmed(line.substr(0, equals)));
      if (found == nullptr) {
        std::string names;
        for (const Setting& each : settings_) names += (names.empty() ? "" : ", ") + std::string(each.name);
        return {GPUSHARE_MALFORMED_INPUT,
                base::format("%s:%d: '%s' is not allowed; a line is NAME = VALUE, of: %s", path.c_str(),
                             number, line.c_str(), names.c_str())};
      }
      found->value = trimmed(line.substr(equals + 1));
    }
    // A file that is there and cannot be read may hold a limit.
    if (file.bad()) why = errno;
    if (file.bad() || (!file.is_open() && why != ENOENT && why != ENOTDIR))
      return {GPUSHARE_IO_ERROR, "cannot read '" + path + "': " + std::strerror(why)};
    return {};
  }

  // The page of a group that runs: a file of that `gpushare exec`, which may be another user's.
  base::Result<ExitCode> change_group() {
    // The command line alone counts here. Files and variables set up groups that begin, and must not change one that runs.
    const std::string &memory = option("memory"), &soft = option("soft"), &pinned = option("pinned");
    const std::string &weight = option("weight"), &cls = option("class"), &priority = option("priority"),
                      &cap = option("cap");
    if (memory.empty() && pinned.empty() && weight.empty() && cls.empty() && priority.empty() && cap.empty())
      return bad_option(
          "--change", change_,
          "with what holds from now on: --memory, --pinned, --weight, --cap, --class, --priority");
    GPUSHARE_ASSIGN_OR_RETURN(const shim::Limits limits, parse_limits(memory, soft, pinned));
    GPUSHARE_ASSIGN_OR_RETURN(const uint64_t process, parse_count("--change", change_, INT32_MAX, 1));
    for (const std::filesystem::path& each : group_pages(std::to_string(process))) {
      const int file = ::open(each.c_str(), O_RDWR | O_CLOEXEC);
      struct stat info {};
      if (file < 0 || ::fstat(file, &info) != 0 ||
          info.st_size != static_cast<off_t>(sizeof(shim::GroupPage)))
        continue;
      void* mapped = ::mmap(nullptr, sizeof(shim::GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      ::close(file);
      if (mapped == MAP_FAILED) continue;
      auto* page = static_cast<shim::GroupPage*>(mapped);
      const bool good = page->magic == shim::kPageMagic && page->version == shim::kPageVersion;
      if (good) {
        if (!soft.empty()) __atomic_store_n(&page->limits.spill_bytes, limits.spill_bytes, __ATOMIC_RELEASE);
        if (!memory.empty())
          __atomic_store_n(&page->limits.device_bytes, limits.device_bytes, __ATOMIC_RELEASE);
        if (!pinned.empty())
          __atomic_store_n(&page->limits.pinned_bytes, limits.pinned_bytes, __ATOMIC_RELEASE);
        change_share(page->share, weight, cap, cls, priority);
      }
      ::munmap(mapped, sizeof(shim::GroupPage));
      if (good) return kExitOk;
    }
    return bad_option("--change", change_, "that process is not gpushare exec of this version, or not yours");
  }

  // The values were checked with the settings.
  static void change_share(shim::Share& share, const std::string& weight, const std::string& cap,
                           const std::string& cls, const std::string& priority) {
    uint32_t said = 0;
    const auto put = [&said](uint64_t& word, double number, uint32_t which) {
      uint64_t bits = 0;
      std::memcpy(&bits, &number, sizeof bits);
      __atomic_store_n(&word, bits, __ATOMIC_RELEASE);
      said |= which;
    };
    if (!weight.empty())
      put(share.weight, *parse_number("--weight", weight, 0, false, 1e6), shim::Share::kWeight);
    if (!cap.empty()) put(share.cap, *parse_share("--cap", cap), shim::Share::kCap);
    if (!cls.empty()) {
      __atomic_store_n(&share.cls, cls == "opportunistic" ? 1U : 0U, __ATOMIC_RELEASE);
      said |= shim::Share::kClass;
    }
    if (!priority.empty()) {
      const double number = *parse_number("--priority", priority, -1e9, true, 1e9);
      __atomic_store_n(&share.priority, static_cast<int32_t>(number), __ATOMIC_RELEASE);
      said |= shim::Share::kPriority;
    }
    __atomic_fetch_or(&share.said, said, __ATOMIC_ACQ_REL);
  }

  // The group's page, in memory that this process keeps open while the program runs, and the environment. Programs inherit
  // the descriptor (shim/group.cpp), under a number that they and shells do not take for files of their own.
  base::Status set_up(const ShimFiles& files) {
    // This group's programs are not of the group under which this process itself may run.
    for (const std::filesystem::path& outer : group_pages("self")) ::close(std::stoi(outer.filename()));
    const int made = ::memfd_create("gpushare-group", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int file = ::fcntl(made, F_DUPFD, 200);
    if (file < 0) file = ::fcntl(made, F_DUPFD, 3);  // no such numbers here (ulimit -n)
    ::close(made);
    if (file < 0 || ::ftruncate(file, sizeof(shim::GroupPage)) != 0 ||
        ::fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
      return {GPUSHARE_HOST_OUT_OF_MEMORY,
              std::string("no memory for the group's page: ") + std::strerror(errno)};
    void* memory = ::mmap(nullptr, sizeof(shim::GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
      return {GPUSHARE_HOST_OUT_OF_MEMORY,
              std::string("no memory for the group's page: ") + std::strerror(errno)};
    auto* page = static_cast<shim::GroupPage*>(memory);
    page->version = shim::kPageVersion;
    page->limits = limits_;
    page->magic = shim::kPageMagic;
    page_ = page;

    const std::string driver = std::getenv("GPUSHARE_CUDA_DRIVER") == nullptr ? driver_path() : "";
    if (!driver.empty()) ::setenv("GPUSHARE_CUDA_DRIVER", driver.c_str(), 1);
    ::setenv("GPUSHARE_SHIM_GROUP",
             base::format("/proc/%d/fd/%d", static_cast<int>(::getpid()), file).c_str(), 1);
    ::setenv("GPUSHARE_SHIM_FAIL", fail_closed_ ? "closed" : "open", 1);
    // For a process that cannot reach the page, as in a container of its own.
    const auto pass = [](const char* variable, uint64_t bytes) {
      if (bytes != shim::kNoLimit)
        ::setenv(variable, (std::to_string(bytes) + "B").c_str(), 1);
      else
        ::unsetenv(variable);
    };
    pass("GPUSHARE_MEMORY", limits_.device_bytes);
    pass("GPUSHARE_SOFT",
         limits_.spill_bytes != 0 ? limits_.device_bytes + limits_.spill_bytes : shim::kNoLimit);
    pass("GPUSHARE_PINNED", limits_.pinned_bytes);
    for (const char* name : {"weight", "cap", "class", "priority", "socket", "pageable", "small-heap"})
      if (const Setting& each = *setting(name); !each.value.empty())
        ::setenv(each.variable, each.value.c_str(), 1);
    // The processes of the group have one claim on the daemon, whichever of them comes first.
    uint64_t group = 0;
    while (group == 0)
      if (::getrandom(&group, sizeof group, 0) != sizeof group)
        return {GPUSHARE_IO_ERROR, std::string("getrandom: ") + std::strerror(errno)};
    ::setenv("GPUSHARE_GROUP", base::format("%016llx", static_cast<unsigned long long>(group)).c_str(), 1);
    const std::filesystem::path library = files.library;
    put_before("LD_LIBRARY_PATH", files.proxy_folder, ':');
    // Spaces separate the names in LD_PRELOAD as colons do. A name without a folder is looked up in LD_LIBRARY_PATH.
    if (files.library.find(' ') != std::string::npos) {
      put_before("LD_LIBRARY_PATH", library.parent_path(), ':');
      put_before("LD_PRELOAD", library.filename(), ':');
    } else {
      put_before("LD_PRELOAD", files.library, ':');
    }
    return leave_settings(*page);
  }

  // For descendants whose environment is cleared (shim/process.hpp).
  base::Status leave_settings(shim::GroupPage& page) {
    std::string text;
    const auto add = [&text](const char* variable) {
      if (const char* value = std::getenv(variable); value != nullptr)
        text += std::string(variable) + '=' + value + '\0';
    };
    for (const Setting& each : settings_) add(each.variable);
    for (const char* variable : {"GPUSHARE_GROUP", "GPUSHARE_CUDA_DRIVER", "XDG_RUNTIME_DIR"}) add(variable);
    if (text.size() >= sizeof page.environment)
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("the settings take %zu bytes, and there is place for %zu: choose shorter paths",
                           text.size(), sizeof page.environment)};
    std::memcpy(page.environment, text.data(), text.size());
    // Descendants whose own parent has ended come to this process, and so still find the page.
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    return {};
  }

  base::Result<ExitCode> start(const std::string& path) {
    std::vector<char*> arguments;
    for (std::string& word : program_) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    int report[2];  // closed by a successful exec
    if (::pipe2(report, O_CLOEXEC) != 0)
      return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, std::string("pipe: ") + std::strerror(errno));
    // Signals for the program that reach only this process are passed on; those of the terminal reach both by themselves.
    for (const int signal : {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) std::signal(signal, pass_on);
    for (const int signal : {SIGINT, SIGQUIT}) std::signal(signal, SIG_IGN);
    std::signal(SIGCHLD, wake_up);
    sigset_t child_ends, awake;
    ::sigemptyset(&child_ends);
    ::sigaddset(&child_ends, SIGCHLD);
    ::sigprocmask(SIG_BLOCK, &child_ends, &awake);
    std::optional<OwnCgroup> cgroup;
    if (page_ != nullptr && page_->limits.device_bytes != shim::kNoLimit) cgroup.emplace();
    const pid_t child = ::fork();
    if (child < 0)
      return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, std::string("fork: ") + std::strerror(errno));
    if (child == 0) {
      for (const int signal : {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGINT, SIGQUIT, SIGPIPE, SIGXFSZ, SIGCHLD})
        std::signal(signal, SIG_DFL);
      ::sigprocmask(SIG_SETMASK, &awake, nullptr);
      if (cgroup) cgroup->enter();
      ::execv(path.c_str(), arguments.data());
      const int error = errno;
      if (::write(report[1], &error, sizeof error) < 0) ::_exit(126);
      ::_exit(127);
    }
    g_child = child;
    ::close(report[1]);
    int error = 0;
    const bool failed = ::read(report[0], &error, sizeof error) == sizeof error;
    ::close(report[0]);
    std::unique_ptr<ExecWatch> watch;
    if (page_ != nullptr && !failed)
      watch = std::make_unique<ExecWatch>(*page_, driver_file(), child, program_[0], fail_closed_);
    ::sigdelset(&awake, SIGCHLD);  // whoever started this tool may have blocked it
    const int status = await_end(child, watch.get(), awake);
    g_child = 0;
    if (failed) return base::Status(GPUSHARE_NOT_FOUND, "'" + path + "': " + std::strerror(error));
    if (watch != nullptr && watch->end()) return kExitUnavailable;
    return static_cast<ExitCode>(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
  }

  // The driver's file as the kernel names it; empty if it is not known.
  static std::string driver_file() {
    const char* named = std::getenv("GPUSHARE_CUDA_DRIVER");
    std::error_code error;
    const std::filesystem::path file = std::filesystem::canonical(named != nullptr ? named : "", error);
    return error ? std::string() : file.string();
  }

  Setting settings_[11] = {{"memory", "GPUSHARE_MEMORY"},
                           {"soft", "GPUSHARE_SOFT"},
                           {"pinned", "GPUSHARE_PINNED"},
                           {"weight", "GPUSHARE_WEIGHT"},
                           {"class", "GPUSHARE_CLASS"},
                           {"priority", "GPUSHARE_PRIORITY"},
                           {"cap", "GPUSHARE_CAP"},
                           {"socket", "GPUSHARE_SOCKET"},
                           {"fail", "GPUSHARE_SHIM_FAIL"},
                           {"pageable", "GPUSHARE_PAGEABLE"},
                           {"small-heap", "GPUSHARE_SMALL_HEAP"}};
  std::string change_;
  bool fail_closed_ = false;
  std::vector<std::string> program_;
  shim::Limits limits_{shim::kNoLimit, 0, shim::kNoLimit};
  const shim::GroupPage* page_ = nullptr;  // of this group, once there is one
};

}  // namespace

std::unique_ptr<Command> make_exec_command() {
  return std::make_unique<ExecCommand>();
}

}  // namespace gpushare::cli
