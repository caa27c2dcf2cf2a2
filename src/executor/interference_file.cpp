// SPDX-License-Identifier: Apache-2.0
#include "executor/interference_file.hpp"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <memory>

#include "base/file_sink.hpp"

namespace gpushare::executor {

uint64_t unix_seconds() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}

base::Status read_interference(const std::string& path, sched::MeasuredInterference& into) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"), &std::fclose);
  if (file == nullptr && errno == ENOENT) return {};
  if (file == nullptr) return {GPUSHARE_IO_ERROR, "interference_file " + path + " cannot be opened", errno};
  std::string text(sched::MeasuredInterference::kMostFileBytes + 1, '\0');
  const size_t size = std::fread(text.data(), 1, text.size(), file.get());
  if (std::ferror(file.get()) != 0)
    return {GPUSHARE_IO_ERROR, "interference_file " + path + " cannot be read", errno};
  if (size == text.size())
    return {GPUSHARE_MALFORMED_INPUT,
            base::format("interference_file %s is larger than %zu bytes", path.c_str(), size - 1)};
  return into.read(std::string_view(text).substr(0, size), path, unix_seconds());
}

base::Status write_interference(const std::string& path, const std::string& text) {
  base::FileSink sink(path);
  sink.write(text);
  return sink.close();
}

}  // namespace gpushare::executor
