// This program measures how the cost of public calls grows with what the library holds: sessions of a runtime, in one lane
// and in lanes of their own, live blocks, entries of queues. It prints the table of benchmarks/results/growth.md.
//
//   measure_growth [--quick] [NAME]    rows whose name begins so; --quick: up to 100 of each
//
// A figure is the least CPU time of a call over seven blocks, and a ratio is the growth from the first column. Read the
// ratios: times differ between machines. SPDX-License-Identifier: Apache-2.0

#include <gpushare/allocator.h>
#include <gpushare/bulk.h>
#include <gpushare/gpushare.h>
#include <gpushare/heap.h>
#include <gpushare/loader.h>
#include <gpushare/range.h>
#include <gpushare/serving.h>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

void require(int32_t status, const char* what) {
  if (status == GPUSHARE_OK) return;
  std::fprintf(stderr, "%s: %s\n", what, gpushare_last_error_message());
  std::exit(1);
}

double thread_us() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

// One call of an operation, the how manyth it is.
using Call = std::function<void(uint64_t)>;

double least_us(const Call& call) {
  uint64_t done = 0, block = 1;
  for (double began = thread_us(); thread_us() - began < 3000 && block < 4096; block *= 2)
    for (uint64_t i = 0; i < block; ++i) call(done++);
  double least = 1e18;
  for (int i = 0; i < 7; ++i) {
    const double began = thread_us();
    for (uint64_t k = 0; k < block; ++k) call(done++);
    least = std::min(least, (thread_us() - began) / static_cast<double>(block));
  }
  return least;
}

// A runtime on the host device with open sessions.
class Sessions {
 public:
  Sessions(uint64_t count, uint32_t lanes, const char* policy) {
    gpushare_runtime_params params = GPUSHARE_RUNTIME_PARAMS_INIT;
    params.device = "host?total_bytes=137438953472";
    params.max_lanes = lanes;
    params.policy = policy;
    require(gpushare_runtime_open(&params, &runtime), "runtime_open");
    all.resize(count);
    for (gpushare_session& each : all) each = open();
  }
  ~Sessions() {
    for (const gpushare_session each : all) require(gpushare_session_close(each), "session_close");
    require(gpushare_runtime_close(runtime), "runtime_close");
  }
  Sessions(const Sessions&) = delete;
  Sessions& operator=(const Sessions&) = delete;
  gpushare_session open() const {
    gpushare_session_params params = GPUSHARE_SESSION_PARAMS_INIT;
    params.ephemeral_bytes = 1 << 20;
    gpushare_session session;
    require(gpushare_session_open(runtime, &params, &session), "session_open");
    return session;
  }
  static void iterate(gpushare_session session) {
    gpushare_iteration iteration;
    require(gpushare_iteration_begin(session, GPUSHARE_NO_TIMEOUT, &iteration), "begin");
    require(gpushare_iteration_end(iteration), "end");
  }
  gpushare_session at(uint64_t i) const { return all[i % all.size()]; }

  gpushare_runtime runtime;
  std::vector<gpushare_session> all;
};

struct Row {
  std::string name;
  const char* grows;
  std::vector<uint64_t> sizes;
  std::function<Call(uint64_t)> make;  // what the call needs lives as long as it
};

using SessionsCall = void (*)(const Sessions&, uint64_t);

void add_sessions(std::vector<Row>& rows, const char* name, SessionsCall call) {
  struct Kind {
    const char* grows;
    uint32_t lanes;
    const char* policy;
    std::vector<uint64_t> sizes;
  };
  for (const Kind& kind : {Kind{"sessions of one lane, fair", 1, "fair", {10, 100, 1000, 10'000}},
                           Kind{"sessions of one lane, priority", 1, "priority", {10, 100, 1000, 10'000}},
                           Kind{"lanes, fair", 0, "fair", {10, 100, 1000}}})
    rows.push_back({name, kind.grows, kind.sizes, [call, kind](uint64_t count) -> Call {
                      auto sessions = std::make_shared<Sessions>(count, kind.lanes, kind.policy);
                      return [sessions, call](uint64_t i) { call(*sessions, i); };
                    }});
}

void add_sessions(std::vector<Row>& rows) {
  add_sessions(rows, "session_open, session_close",
               [](const Sessions& of, uint64_t) { require(gpushare_session_close(of.open()), "close"); });
  add_sessions(rows, "iteration_begin, iteration_end, one session",
               [](const Sessions& of, uint64_t) { Sessions::iterate(of.at(0)); });
  add_sessions(rows, "iteration_begin, iteration_end, by turns",
               [](const Sessions& of, uint64_t i) { Sessions::iterate(of.at(i)); });
  add_sessions(rows, "session_get_info", [](const Sessions& of, uint64_t i) {
    gpushare_session_info info = GPUSHARE_SESSION_INFO_INIT;
    require(gpushare_session_get_info(of.at(i), &info), "session_get_info");
  });
  add_sessions(rows, "runtime_get_info", [](const Sessions& of, uint64_t) {
    gpushare_runtime_info info = GPUSHARE_RUNTIME_INFO_INIT;
    require(gpushare_runtime_get_info(of.runtime, &info), "runtime_get_info");
  });
  add_sessions(rows, "session_set_priority", [](const Sessions& of, uint64_t i) {
    require(gpushare_session_set_priority(of.at(i), static_cast<int32_t>(i % 2)), "set_priority");
  });
  add_sessions(rows, "session_set_weight", [](const Sessions& of, uint64_t i) {
    require(gpushare_session_set_weight(of.at(i), 1 + static_cast<double>(i % 2)), "set_weight");
  });
  add_sessions(rows, "session_set_remaining", [](const Sessions& of, uint64_t i) {
    require(gpushare_session_set_remaining(of.at(i), 1'000'000 + i), "set_remaining");
  });
  add_sessions(rows, "session_set_quota", [](const Sessions& of, uint64_t i) {
    require(gpushare_session_set_quota(of.at(i), (1 + i % 2) << 30), "set_quota");
  });
  add_sessions(rows, "session_explain_wait", [](const Sessions& of, uint64_t i) {
    char text[512];
    require(gpushare_session_explain_wait(of.at(i), text, sizeof(text)), "explain_wait");
  });
  add_sessions(rows, "session_wait_admitted", [](const Sessions& of, uint64_t i) {
    require(gpushare_session_wait_admitted(of.at(i), 0), "wait_admitted");
  });
  add_sessions(rows, "session_submit, ticket_wait, ticket_release", [](const Sessions& of, uint64_t i) {
    gpushare_ticket ticket;
    require(gpushare_session_submit(
                of.at(i), [](void*, gpushare_iteration) -> int32_t { return GPUSHARE_OK; }, nullptr, nullptr,
                &ticket),
            "submit");
    require(gpushare_ticket_wait(ticket, GPUSHARE_NO_TIMEOUT), "ticket_wait");
    require(gpushare_ticket_release(ticket), "ticket_release");
  });
  add_sessions(rows, "runtime_synchronize", [](const Sessions& of, uint64_t) {
    require(gpushare_runtime_synchronize(of.runtime, GPUSHARE_NO_TIMEOUT), "synchronize");
  });
  add_sessions(rows, "runtime_drain", [](const Sessions& of, uint64_t) {
    require(gpushare_runtime_drain(of.runtime, GPUSHARE_NO_TIMEOUT), "drain");
  });
  add_sessions(rows, "runtime_set_capacity", [](const Sessions& of, uint64_t i) {
    require(gpushare_runtime_set_capacity(of.runtime, (100 + i % 2) << 30), "set_capacity");
  });
  add_sessions(rows, "runtime_set_policy", [](const Sessions& of, uint64_t i) {
    require(gpushare_runtime_set_policy(of.runtime, i % 2 == 0 ? "srtf" : "fair", nullptr), "set_policy");
  });
  add_sessions(rows, "runtime_write_snapshot", [](const Sessions& of, uint64_t) {
    require(gpushare_runtime_write_snapshot(of.runtime, "/dev/null", GPUSHARE_SNAPSHOT_JSON),
            "write_snapshot");
  });
  add_sessions(rows, "stream_create, stream_release", [](const Sessions& of, uint64_t) {
    gpushare_stream stream;
    require(gpushare_stream_create(of.runtime, 0, &stream), "stream_create");
    require(gpushare_stream_release(stream), "stream_release");
  });
  add_sessions(rows, "runtime_write_metrics", [](const Sessions& of, uint64_t) {
    static std::vector<char> text(1 << 24);
    uint64_t size = 0;
    require(gpushare_runtime_write_metrics(of.runtime, text.data(), text.size(), &size), "write_metrics");
  });
}

// A session with live blocks of 512 bytes.
struct Blocks {
  explicit Blocks(uint64_t count) : sessions(1, 1, "fair"), addresses(count) {
    for (auto& each : addresses)
      require(gpushare_session_alloc(sessions.at(0), GPUSHARE_KIND_FRAMEWORK, 512, 0, &each),
              "session_alloc");
  }
  ~Blocks() {
    for (const auto each : addresses) require(gpushare_memory_free(sessions.runtime, each), "memory_free");
  }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  Sessions sessions;
  std::vector<gpushare_device_address> addresses;
};

void add_blocks(std::vector<Row>& rows, const char* name, void (*call)(const Blocks&, uint64_t)) {
  rows.push_back(
      {name, "live blocks of a session", {100, 1000, 10'000, 100'000}, [call](uint64_t count) -> Call {
         auto blocks = std::make_shared<Blocks>(count);
         return [blocks, call](uint64_t i) { call(*blocks, i); };
       }});
}

void add_blocks(std::vector<Row>& rows) {
  add_blocks(rows, "session_alloc, memory_free", [](const Blocks& of, uint64_t) {
    gpushare_device_address address;
    require(gpushare_session_alloc(of.sessions.at(0), GPUSHARE_KIND_FRAMEWORK, 4096, 0, &address),
            "session_alloc");
    require(gpushare_memory_free(of.sessions.runtime, address), "memory_free");
  });
  add_blocks(rows, "memory_get_info", [](const Blocks& of, uint64_t i) {
    gpushare_block_info info = GPUSHARE_BLOCK_INFO_INIT;
    require(
        gpushare_memory_get_info(of.sessions.runtime, of.addresses[i * 7919 % of.addresses.size()], &info),
        "memory_get_info");
  });
  add_blocks(rows, "iteration with iteration_alloc", [](const Blocks& of, uint64_t) {
    gpushare_iteration iteration;
    gpushare_device_address address;
    require(gpushare_iteration_begin(of.sessions.at(0), GPUSHARE_NO_TIMEOUT, &iteration), "begin");
    require(gpushare_iteration_alloc(iteration, 4096, 0, &address), "iteration_alloc");
    require(gpushare_iteration_end(iteration), "end");
  });
  add_blocks(rows, "iteration with iteration_alloc_many, memory_free_many", [](const Blocks& of, uint64_t) {
    const uint64_t bytes[] = {4096, 8192, 4096, 16384};
    gpushare_iteration iteration;
    gpushare_device_address addresses[4];
    require(gpushare_iteration_begin(of.sessions.at(0), GPUSHARE_NO_TIMEOUT, &iteration), "begin");
    require(gpushare_iteration_alloc_many(iteration, 4, bytes, 0, addresses), "alloc_many");
    require(gpushare_memory_free_many(of.sessions.runtime, 4, addresses, nullptr), "free_many");
    require(gpushare_iteration_end(iteration), "end");
  });
  add_blocks(rows, "runtime_write_snapshot", [](const Blocks& of, uint64_t) {
    require(gpushare_runtime_write_snapshot(of.sessions.runtime, "/dev/null", GPUSHARE_SNAPSHOT_JSON),
            "write_snapshot");
  });
}

template <class Handle, int32_t (*Release)(Handle)>
struct Held {
  ~Held() { require(Release(handle), "release"); }
  Handle handle{};
};

// A framework's allocator with live blocks of 512 bytes, none of them an iteration's.
struct Allocator {
  explicit Allocator(uint64_t count) : sessions(1, 1, "fair"), addresses(count) {
    const gpushare_allocator_params params = GPUSHARE_ALLOCATOR_PARAMS_INIT;
    require(gpushare_allocator_create(sessions.runtime, &params, &handle), "allocator_create");
    require(gpushare_allocator_set_default_session(handle, sessions.at(0)), "set_default_session");
    for (auto& each : addresses)
      require(gpushare_allocator_alloc(handle, 512, 0, nullptr, &each), "allocator_alloc");
  }
  ~Allocator() {
    for (const auto each : addresses) require(gpushare_allocator_free(handle, each, nullptr), "free");
    require(gpushare_allocator_release(handle), "allocator_release");
  }
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;
  Sessions sessions;
  gpushare_allocator handle = nullptr;
  std::vector<gpushare_device_address> addresses;
};

void add_allocator(std::vector<Row>& rows, const char* name, void (*call)(const Allocator&, uint64_t)) {
  rows.push_back(
      {name, "live blocks of an allocator", {100, 1000, 10'000, 100'000}, [call](uint64_t count) -> Call {
         auto allocator = std::make_shared<Allocator>(count);
         return [allocator, call](uint64_t i) { call(*allocator, i); };
       }});
}

void add_allocator(std::vector<Row>& rows) {
  add_allocator(rows, "allocator_alloc, allocator_free", [](const Allocator& of, uint64_t) {
    gpushare_device_address address;
    require(gpushare_allocator_alloc(of.handle, 4096, 0, nullptr, &address), "allocator_alloc");
    require(gpushare_allocator_free(of.handle, address, nullptr), "allocator_free");
  });
  add_allocator(rows, "allocator_get_info", [](const Allocator& of, uint64_t) {
    gpushare_allocator_info info = GPUSHARE_ALLOCATOR_INFO_INIT;
    require(gpushare_allocator_get_info(of.handle, nullptr, &info), "allocator_get_info");
  });
}

// One range with committed granules, and ranges of as many sessions with one granule each. The call commits a granule more.
struct Ranges {
  Ranges(uint64_t count, uint64_t granules) : sessions(count, 1, "fair"), all(count) {
    for (uint64_t i = 0; i < count; ++i) {
      gpushare_range_params params = GPUSHARE_RANGE_PARAMS_INIT;
      params.reserved_bytes = (granules + 1) * kGranule;
      require(gpushare_range_open(sessions.at(i), &params, &all[i]), "range_open");
      require(gpushare_range_commit(all[i], 0, granules * kGranule, 0), "range_commit");
    }
  }
  ~Ranges() {
    for (const gpushare_range each : all) require(gpushare_range_close(each), "range_close");
  }
  Ranges(const Ranges&) = delete;
  Ranges& operator=(const Ranges&) = delete;
  static constexpr uint64_t kGranule = 2 << 20;
  Sessions sessions;
  std::vector<gpushare_range> all;
};

void add_ranges(std::vector<Row>& rows) {
  rows.push_back(
      {"range_commit, range_decommit",
       "granules of a range",
       {10, 100, 1000, 10'000},
       [](uint64_t count) -> Call {
         auto ranges = std::make_shared<Ranges>(1, count);
         return [ranges, count](uint64_t) {
           require(gpushare_range_commit(ranges->all[0], count * Ranges::kGranule, Ranges::kGranule, 0),
                   "range_commit");
           require(gpushare_range_decommit(ranges->all[0], count * Ranges::kGranule, Ranges::kGranule),
                   "range_decommit");
         };
       }});
  rows.push_back(
      {"range_commit, range_decommit", "ranges", {10, 100, 1000}, [](uint64_t count) -> Call {
         auto ranges = std::make_shared<Ranges>(count, 1);
         return [ranges](uint64_t i) {
           const gpushare_range range = ranges->all[i % ranges->all.size()];
           require(gpushare_range_commit(range, Ranges::kGranule, Ranges::kGranule, 0), "range_commit");
           require(gpushare_range_decommit(range, Ranges::kGranule, Ranges::kGranule), "range_decommit");
         };
       }});
}

// A batcher of one model and four applications, whose batches of up to 16 always finish in time.
void add_batcher_next(std::vector<Row>& rows) {
  rows.push_back(
      {"batcher_arrive (16), batcher_next, batcher_finished",
       "pending requests",
       {100, 1000, 10'000, 100'000},
       [](uint64_t count) -> Call {
         auto batcher = std::make_shared<Held<gpushare_batcher, gpushare_batcher_release>>();
         gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
         require(gpushare_batcher_create(&params, &batcher->handle), "batcher_create");
         gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
         uint32_t index = 0;
         require(gpushare_batcher_add_model(batcher->handle, &model, &index), "add_model");
         auto next_id = std::make_shared<uint64_t>(1);
         const auto arrive = [batcher, next_id](uint64_t requests) {
           for (uint64_t i = 0; i < requests; ++i) {
             gpushare_request request = GPUSHARE_REQUEST_INIT;
             request.id = (*next_id)++;
             request.application = static_cast<uint32_t>(request.id % 4);
             request.deadline_ns = (uint64_t{1} << 50) + request.id * 7919 % 10'000'000;
             require(gpushare_batcher_arrive(batcher->handle, &request, 0), "arrive");
           }
         };
         for (uint32_t application = 0; application < 4; ++application)
           for (uint64_t i = 0; i < 256; ++i)
             require(gpushare_batcher_observe(batcher->handle, 0, application, 1'000'000 + i * 1000),
                     "observe");
         arrive(count);
         return [batcher, arrive](uint64_t) {
           gpushare_batch batch = GPUSHARE_BATCH_INIT;
           uint64_t ids[64];
           require(gpushare_batcher_next(batcher->handle, 1'000'000, 0, &batch, ids, 64), "next");
           require(gpushare_batcher_started(batcher->handle, batch.id, 1'000'000), "started");
           require(gpushare_batcher_finished(batcher->handle, batch.id, 1'000'000, 2'000'000), "finished");
           arrive(batch.count);
         };
       }});
}

void add_others(std::vector<Row>& rows) {
  rows.push_back({"heap_alloc, heap_free",
                  "live blocks of a heap",
                  {100, 1000, 10'000, 100'000},
                  [](uint64_t count) -> Call {
                    auto heap = std::make_shared<Held<gpushare_heap, gpushare_heap_release>>();
                    gpushare_heap_params params = GPUSHARE_HEAP_PARAMS_INIT;
                    params.capacity_bytes = uint64_t{1} << 40;
                    require(gpushare_heap_create(&params, &heap->handle), "heap_create");
                    uint64_t offset = 0;
                    for (uint64_t i = 0; i < count; ++i)
                      require(gpushare_heap_alloc(heap->handle, 256 + i * 7919 % 65536, &offset),
                              "heap_alloc");
                    return [heap](uint64_t i) {
                      uint64_t at = 0;
                      require(gpushare_heap_alloc(heap->handle, 256 + i * 104729 % 65536, &at), "heap_alloc");
                      require(gpushare_heap_free(heap->handle, at), "heap_free");
                    };
                  }});
  rows.push_back({"placement_solve", "buffers", {100, 1000, 10'000}, [](uint64_t count) -> Call {
                    auto lists =
                        std::make_shared<std::vector<std::vector<uint64_t>>>(4, std::vector<uint64_t>(count));
                    for (uint64_t i = 0; i < count; ++i) {
                      (*lists)[0][i] = i * 7919 % count;
                      (*lists)[1][i] = (*lists)[0][i] + 1 + i % 20;
                      (*lists)[2][i] = 256 * (1 + i * 104729 % 64);
                    }
                    return [lists, count](uint64_t) {
                      uint64_t arena = 0;
                      require(gpushare_placement_solve(count, (*lists)[0].data(), (*lists)[1].data(),
                                                       (*lists)[2].data(), 0, 0, (*lists)[3].data(), &arena),
                              "placement_solve");
                    };
                  }});
  rows.push_back({"plan_solve", "layers", {10, 100, 1000, 10'000}, [](uint64_t count) -> Call {
                    auto bytes = std::make_shared<std::vector<uint64_t>>(count);
                    for (uint64_t i = 0; i < count; ++i) (*bytes)[i] = 65'536 * (1 + i * 7919 % 64);
                    auto ends = std::make_shared<std::vector<uint32_t>>(count);
                    return [bytes, ends, count](uint64_t) {
                      const gpushare_plan_params params = GPUSHARE_PLAN_PARAMS_INIT;
                      gpushare_link_costs link = GPUSHARE_LINK_COSTS_INIT;
                      link.bytes_per_s = 12'000'000'000;
                      link.call_overhead_ns = 5000;
                      link.group_overhead_ns = 5000;
                      uint32_t groups = 0;
                      uint64_t makespan_ns = 0;
                      require(gpushare_plan_solve(&params, &link, static_cast<uint32_t>(count), bytes->data(),
                                                  nullptr, ends->data(), &groups, &makespan_ns),
                              "plan_solve");
                    };
                  }});
  rows.push_back({"batcher_arrive, batcher_cancel, batcher_take_drops",
                  "pending requests",
                  {100, 1000, 10'000},
                  [](uint64_t count) -> Call {
                    auto batcher = std::make_shared<Held<gpushare_batcher, gpushare_batcher_release>>();
                    gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
                    require(gpushare_batcher_create(&params, &batcher->handle), "batcher_create");
                    gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
                    uint32_t index = 0;
                    require(gpushare_batcher_add_model(batcher->handle, &model, &index), "add_model");
                    const auto arrive = [batcher](uint64_t id) {
                      gpushare_request request = GPUSHARE_REQUEST_INIT;
                      request.id = id;
                      request.deadline_ns = uint64_t{1} << 60;
                      require(gpushare_batcher_arrive(batcher->handle, &request, 0), "arrive");
                    };
                    for (uint64_t id = 1; id <= count; ++id) arrive(id);
                    return [batcher, arrive, count](uint64_t i) {
                      arrive(count + 1 + i);
                      require(gpushare_batcher_cancel(batcher->handle, count + 1 + i, 0), "cancel");
                      gpushare_drop drop;
                      uint64_t taken = 0;
                      require(gpushare_batcher_take_drops(batcher->handle, &drop, 1, &taken), "take_drops");
                    };
                  }});
}

void print(const Row& row, bool quick) {
  std::printf("| %s | %s |", row.name.c_str(), row.grows);
  double first = 0;
  for (size_t i = 0; i < 4; ++i) {
    if (i >= row.sizes.size() || (quick && row.sizes[i] > 100)) {
      std::printf(" |");
      continue;
    }
    const double us = least_us(row.make(row.sizes[i]));
    if (i == 0) first = us;
    std::printf(" %llu: %.2f us", static_cast<unsigned long long>(row.sizes[i]), us);
    if (i > 0) std::printf(" (%.1f)", us / first);
    std::printf(" |");
    std::fflush(stdout);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  std::string only;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0)
      quick = true;
    else
      only = argv[i];
  }
  std::vector<Row> rows;
  add_sessions(rows);
  add_blocks(rows);
  add_allocator(rows);
  add_ranges(rows);
  add_others(rows);
  add_batcher_next(rows);
  std::printf("| call | what grows | first | x10 | x100 | x1,000 |\n|---|---|---|---|---|---|\n");
  for (const Row& row : rows)
    if (row.name.compare(0, only.size(), only) == 0) print(row, quick);
  return 0;
}
