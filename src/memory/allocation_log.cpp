// SPDX-License-Identifier: Apache-2.0
#include "memory/allocation_log.hpp"

#include "base/file_sink.hpp"
#include "base/flat_hash.hpp"

namespace gpushare::memory {

base::Status write_allocation_log(std::span<const AllocationEvent> events, const std::string& path) {
  base::FileSink sink(path);
  sink.write("Thread,Time,Action,Pointer,Size,Stream\n");
  base::FlatHashSet<Address> live;
  for (const AllocationEvent& event : events) {
    if (sink.failed()) break;
    const char* action = "allocate failure";
    if (event.action == AllocationEvent::Action::kAlloc) {
      action = "allocate";
      live.insert(event.address);
    } else if (event.action == AllocationEvent::Action::kFree) {
      action = "free";
      if (live.erase(event.address) == 0) continue;
    }
    const uint64_t us = event.time_ns / 1000, s = us / 1'000'000;
    char line[160];
    const int length = std::snprintf(
        line, sizeof(line), "%llu,%02llu:%02llu:%02llu.%06llu,%s,0x%llx,%llu,0x%llx\n",
        static_cast<unsigned long long>(event.thread), static_cast<unsigned long long>(s / 3600),
        static_cast<unsigned long long>(s / 60 % 60), static_cast<unsigned long long>(s % 60),
        static_cast<unsigned long long>(us % 1'000'000), action,
        static_cast<unsigned long long>(event.address), static_cast<unsigned long long>(event.bytes),
        static_cast<unsigned long long>(event.stream));
    sink.write(std::string_view(line, static_cast<size_t>(length)));
  }
  return sink.close();
}

}  // namespace gpushare::memory
