// SPDX-License-Identifier: Apache-2.0
#include "cli/pickle.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "gpushare/status.h"

extern char** environ;

namespace gpushare::cli {
namespace {

constexpr size_t kMostJsonBytes = size_t{4} << 30;

// The first byte of what it prints says what follows: '+' the JSON, '-' what is wrong. An allocation beyond 16 GiB fails,
// so that a file which asks for more memory than there is ends as an error.
constexpr char kReader[] = R"python(
import json, pickle, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
left, skipped = int(sys.argv[1]), set(sys.argv[2:])

class Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}; only plain data is read")

def plain(value):
    global left
    left -= 1
    if left < 0:
        raise ValueError("it has too many values")
    if isinstance(value, dict):
        return {str(key): None if key in skipped else plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, (bytes, bytearray)):
        return value.decode("latin-1")
    if value is None or isinstance(value, (bool, float, str)) or isinstance(value, int) and -2**63 <= value < 2**64:
        return value
    raise ValueError(f"it has a value of type {type(value).__name__} that JSON cannot have")

file = sys.stdin.buffer
try:
    text = "+" + json.dumps(plain(Plain(file).load()), allow_nan=False)
except MemoryError:
    text = "-it needs too much memory"
except Exception as error:
    text = f"-{error or type(error).__name__} (at byte {file.tell()} or before)"
sys.stdout.buffer.write(text.encode("ascii", "backslashreplace"))
)python";

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { reset(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }
  void reset() {
    if (number_ >= 0) close(number_);
    number_ = -1;
  }

 private:
  int number_;
};

bool fill(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t wrote = write(descriptor, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  return lseek(descriptor, 0, SEEK_SET) == 0;
}

// What the program printed, and how it ended.
struct Printed {
  std::string text;
  int status = 0;
};

base::Result<Printed> run(const std::vector<std::string>& words, std::string_view input) {
  const auto lacks = [](const char* what, int error) {
    return base::Status(GPUSHARE_UNAVAILABLE, base::format("%s: %s", what, std::strerror(error)));
  };
  // A file, so that a program which ends before it has read all holds up nobody.
  const Descriptor in(memfd_create("pickle", MFD_CLOEXEC));
  if (in.get() < 0 || !fill(in.get(), input)) return lacks("memfd", errno);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return lacks("pipe", errno);
  Descriptor from(ends[0]), to(ends[1]);
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, to.get(), STDOUT_FILENO);
  pid_t process = 0;
  const int failed = posix_spawnp(&process, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) return lacks(argv[0], failed);
  to.reset();
  Printed printed;
  char part[1 << 16];
  for (;;) {
    const ssize_t got = read(from.get(), part, sizeof part);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0 || printed.text.size() > kMostJsonBytes) break;
    printed.text.append(part, static_cast<size_t>(got));
  }
  from.reset();  // a program that prints more ends by that
  while (waitpid(process, &printed.status, 0) < 0 && errno == EINTR) {
  }
  return printed;
}

}  // namespace

bool is_pickle(std::string_view text) {
  return text.size() >= 2 && static_cast<unsigned char>(text[0]) == 0x80 && text[1] >= 2 && text[1] <= 5;
}

base::Result<std::string> pickle_as_json(std::string_view pickle, const std::string& name,
                                         const std::vector<std::string>& skipped, uint64_t most_values) {
  std::vector<std::string> words{"python3", "-I", "-S", "-c", kReader, std::to_string(most_values)};
  words.insert(words.end(), skipped.begin(), skipped.end());
  base::Result<Printed> ran = run(words, pickle);
  if (!ran.ok())
    return base::Status(GPUSHARE_UNAVAILABLE, name + ": a Python pickle, which python3 reads: " +
                                                  std::string(ran.status().message()) +
                                                  ". Install python3, or give the snapshot as JSON");
  std::string& text = ran->text;
  const bool whole = WIFEXITED(ran->status) && WEXITSTATUS(ran->status) == 0;
  if (whole && !text.empty() && text.size() <= kMostJsonBytes && text[0] == '+') return text.substr(1);
  return base::Status(
      GPUSHARE_MALFORMED_INPUT,
      name + ": a Python pickle that cannot be read: " +
          (whole && text.size() > 1 && text[0] == '-' ? text.substr(1) : "python3 ended early, see above"));
}

}  // namespace gpushare::cli
