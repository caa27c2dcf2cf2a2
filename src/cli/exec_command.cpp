// `gpushare exec`: runs a program that knows nothing of gpushare under a limit of device memory, with the preload shim (src/shim) in it and
// in the programs that it starts.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/options.hpp"
#include "cli/program_check.hpp"
#include "shim/books.hpp"

namespace gpushare::cli {
namespace {

// The library and the proxy's folder, beside the tool as built or as installed; empty if they are not there.
struct ShimFiles {
  std::string library;
  std::string proxy_folder;
};
ShimFiles shim_files() {
  std::error_code error;
  const std::filesystem::path tool = std::filesystem::read_symlink("/proc/self/exe", error);
  for (const char* folder : {"../lib", "../" GPUSHARE_LIBRARY_FOLDER}) {
    const std::filesystem::path at = (tool.parent_path() / folder).lexically_normal();
    if (std::filesystem::exists(at / "libgpushare_preload.so", error) &&
        std::filesystem::exists(at / "gpushare/libcuda.so.1", error))
      return {at / "libgpushare_preload.so", at / "gpushare"};
  }
  return {};
}

// Where the loader finds the driver now, before the proxy stands before it; empty if there is none.
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

volatile sig_atomic_t g_child = 0;
void pass_on(int signal) {
  if (g_child > 0) ::kill(static_cast<pid_t>(g_child), signal);
}

class ExecCommand final : public Command {
 public:
  const char* name() const override { return "exec"; }
  const char* summary() const override {
    return "Run an unmodified CUDA program under a limit of device memory";
  }
  const char* help() const override {
    return "The program and those that it starts are a group: together they get at most --memory of each "
           "device, and the driver "
           "tells\n"
           "them that the device has no more. What is above is refused with the driver's own out-of-memory "
           "code. Put -- before "
           "the\n"
           "program. Its exit code is passed on; 128 + n if signal n ended it.\n"
           "\n"
           "Settings come from GPUSHARE_MEMORY and GPUSHARE_SHIM_FAIL, then /etc/gpushare/exec.conf, then "
           "gpushare/exec.conf "
           "in\n"
           "XDG_CONFIG_HOME (~/.config), then the options; the later ones win. A file has lines such as "
           "memory = 8GiB and\n"
           "fail = closed.\n"
           "\n"
           "A program that cannot be held (setuid, static) is refused. Where the shim itself cannot start, "
           "the program runs\n"
           "without a limit and one line on stderr says so; with --fail-closed it does not run, or gets no "
           "device memory.\n"
           "\n"
           "Examples:\n"
           "  gpushare exec --memory 8GiB -- sh -c 'echo limit $GPUSHARE_MEMORY'\n"
           "\n"
           "JSON: none; --json belongs to the program.\n"
           "\n"
           "Exit codes: the program's; 2 bad usage, a program that cannot be held; 3 no shim, with "
           "--fail-closed.\n";
  }
  void declare(CLI::App& app) override {
    app.add_option("--memory", memory_, "Most device memory that the group gets of each device: 8GiB, ...")
        ->type_name("SIZE");
    app.add_flag("--fail-closed", fail_closed_, "No limit, no program: see above");
    app.add_option("program", program_, "Program and its arguments, after --")
        ->type_name("PROGRAM")
        ->required();
  }

  base::Result<ExitCode> run() override {
    GPUSHARE_RETURN_IF_ERROR(read_settings());
    GPUSHARE_ASSIGN_OR_RETURN(const std::string path, find_program(program_[0]));
    GPUSHARE_RETURN_IF_ERROR(check_preloadable(path));
    const ShimFiles files = shim_files();
    if (files.library.empty()) {
      const char* why = "libgpushare_preload.so is not beside the tool (it is built on x86-64 Linux)";
      if (fail_closed_) return base::Status(GPUSHARE_UNAVAILABLE, why);
      std::fprintf(stderr, "gpushare exec: %s: the program runs without a limit\n", why);
    } else {
      GPUSHARE_RETURN_IF_ERROR(set_up(files));
    }
    return start(path);
  }

 private:
  base::Status read_settings() {
    std::string memory, fail;
    if (const char* value = std::getenv("GPUSHARE_MEMORY"); value != nullptr) memory = value;
    if (const char* value = std::getenv("GPUSHARE_SHIM_FAIL"); value != nullptr) fail = value;
    GPUSHARE_RETURN_IF_ERROR(read_file("/etc/gpushare/exec.conf", &memory, &fail));
    const char* config = std::getenv("XDG_CONFIG_HOME");
    const char* home = std::getenv("HOME");
    if (config != nullptr && *config != 0)
      GPUSHARE_RETURN_IF_ERROR(read_file(std::string(config) + "/gpushare/exec.conf", &memory, &fail));
    else if (home != nullptr && *home != 0)
      GPUSHARE_RETURN_IF_ERROR(read_file(std::string(home) + "/.config/gpushare/exec.conf", &memory, &fail));
    if (!memory_.empty()) memory = memory_;
    if (!fail.empty() && fail != "closed" && fail != "open")
      return {GPUSHARE_INVALID_ARGUMENT, "fail: '" + fail + "' is not allowed; it is open or closed"};
    if (fail == "closed") fail_closed_ = true;
    if (!memory.empty()) {
      GPUSHARE_ASSIGN_OR_RETURN(limit_bytes_, parse_size("--memory", memory));
    }
    return {};
  }

  static base::Status read_file(const std::string& path, std::string* memory, std::string* fail) {
    std::ifstream file(path);
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
      const std::string key = trimmed(line.substr(0, equals));
      const std::string value = equals == std::string::npos ? "" : trimmed(line.substr(equals + 1));
      if (equals == std::string::npos || (key != "memory" && key != "fail"))
        return {GPUSHARE_MALFORMED_INPUT,
                base::format("%s:%d: '%s' is not allowed; a line is memory = SIZE or fail = open|closed",
                             path.c_str(), number, line.c_str())};
      (key == "memory" ? *memory : *fail) = value;
    }
    return {};
  }

  // The group's page, in memory that this process keeps open while the program runs, and the environment.
  base::Status set_up(const ShimFiles& files) {
    const int file = ::memfd_create("gpushare-group", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, sizeof(shim::GroupPage)) != 0)
      return {GPUSHARE_HOST_OUT_OF_MEMORY,
              std::string("no memory for the group's page: ") + std::strerror(errno)};
    void* memory = ::mmap(nullptr, sizeof(shim::GroupPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
      return {GPUSHARE_HOST_OUT_OF_MEMORY,
              std::string("no memory for the group's page: ") + std::strerror(errno)};
    auto* page = static_cast<shim::GroupPage*>(memory);
    page->version = shim::kPageVersion;
    page->limit_bytes = limit_bytes_;
    page->magic = shim::kPageMagic;

    const std::string driver = std::getenv("GPUSHARE_CUDA_DRIVER") == nullptr ? driver_path() : "";
    if (!driver.empty()) ::setenv("GPUSHARE_CUDA_DRIVER", driver.c_str(), 1);
    ::setenv("GPUSHARE_SHIM_GROUP",
             base::format("/proc/%d/fd/%d", static_cast<int>(::getpid()), file).c_str(), 1);
    ::setenv("GPUSHARE_SHIM_FAIL", fail_closed_ ? "closed" : "open", 1);
    // For a process that cannot reach the page, as in a container of its own.
    if (limit_bytes_ != shim::kNoLimit)
      ::setenv("GPUSHARE_MEMORY", std::to_string(limit_bytes_).c_str(), 1);
    else
      ::unsetenv("GPUSHARE_MEMORY");
    put_before("LD_PRELOAD", files.library, ':');
    put_before("LD_LIBRARY_PATH", files.proxy_folder, ':');
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
    const pid_t child = ::fork();
    if (child < 0)
      return base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, std::string("fork: ") + std::strerror(errno));
    if (child == 0) {
      for (const int signal : {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGINT, SIGQUIT, SIGPIPE, SIGXFSZ})
        std::signal(signal, SIG_DFL);
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
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    g_child = 0;
    if (failed) return base::Status(GPUSHARE_NOT_FOUND, "'" + path + "': " + std::strerror(error));
    return static_cast<ExitCode>(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
  }

  std::string memory_;
  bool fail_closed_ = false;
  std::vector<std::string> program_;
  uint64_t limit_bytes_ = shim::kNoLimit;
};

}  // namespace

std::unique_ptr<Command> make_exec_command() {
  return std::make_unique<ExecCommand>();
}

}  // namespace gpushare::cli
