// SPDX-License-Identifier: Apache-2.0
#include <fstream>
#include <sstream>
#include <string>

#include "memory/placement.hpp"
#include "memory/replay.hpp"
#include "memory/trace_io.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using memory::ReplayAllocator;

namespace {

std::string error_of(const std::string& text) {
  const auto loaded = memory::parse_trace(text, "t");
  REQUIRE_FALSE(loaded.ok());
  CHECK(loaded.status().code() == GPUSHARE_MALFORMED_INPUT);
  return loaded.status().message();
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const std::string kRmm = "Thread,Time,Action,Pointer,Size,Stream\n";

}  // namespace

TEST_CASE("lifetimes become operations, frees before allocations at equal times") {
  const auto loaded = memory::parse_trace("id,lower,upper,size\na,0,4,100\nb,2,4,50\nc,4,6,120\n", "t");
  REQUIRE(loaded.ok());
  const memory::Trace& trace = loaded->trace;
  CHECK(trace.block_count == 3);
  CHECK(trace.peak_live_bytes == 150);  // c begins when a and b are gone
  REQUIRE(trace.ops.size() == 6);
  CHECK_FALSE(trace.ops[1].is_free);
  CHECK(trace.ops[2].is_free);
  CHECK(trace.ops[3].is_free);
  CHECK(trace.ops[4].size_bytes == 120);
  const auto buffers = memory::lifetimes(trace);
  CHECK(buffers[2].lower == 4);
  CHECK(memory::peak_bytes(buffers, 1) == 150);
}

TEST_CASE("a byte order mark before a trace is no part of it") {
  for (const char* text : {"id,lower,upper,size\na,0,4,100\n",
                           "Thread,Time,Action,Pointer,Size,Stream\n1,0,allocate,0x10,4,0x0\n",
                           R"({"device_traces": [[{"action": "alloc", "addr": 16, "size": 4}]]})"}) {
    INFO(text);
    CHECK(memory::parse_trace(std::string("\xEF\xBB\xBF") + text, "t").ok());
  }
}

TEST_CASE("columns may come in any order, lines may end in CRLF") {
  const auto loaded = memory::parse_trace("size,id,upper,lower\r\n7,x,9,1\r\n\r\n", "t");
  REQUIRE(loaded.ok());
  CHECK(loaded->trace.peak_live_bytes == 7);
}

TEST_CASE("a block that lives through the whole trace is persistent") {
  const auto loaded = memory::parse_trace("id,lower,upper,size\na,0,9,1\nb,0,4,1\nc,5,9,1\n", "t");
  REQUIRE(loaded.ok());
  CHECK(loaded->trace.persistent == std::vector<bool>{true, false, false});
}

TEST_CASE("errors in lifetimes name line, field and what is allowed") {
  CHECK(
      has(error_of("id,lower,upper,size\n1,0,x,4\n"), "t:2: field 'upper' is 'x'; allowed: a whole number"));
  CHECK(has(error_of("id,lower,upper,size\n1,0,2,0\n"),
            "field 'size' is '0'; allowed: a whole number of bytes from 1"));
  CHECK(has(error_of("id,lower,upper,size\n1,0,2,-4\n"), "field 'size' is '-4'"));
  CHECK(has(error_of("id,lower,upper,size\n1,0,2,99999999999999999999\n"), "field 'size'"));
  CHECK(has(error_of("id,lower,upper,size\n1,0,2,1e3\n"), "field 'size'"));
  CHECK(has(error_of("id,lower,upper,size\n1,5,5,4\n"), "field 'upper' is '5'; allowed: a time above lower"));
  CHECK(has(error_of("id,lower,upper,size\n1,0,2\n"), "t:2: has 3 fields; allowed: 4"));
  CHECK(has(error_of("id,lower,upper,size\n1,0,2,3,4,5,6,7,8,9\n"), "has 10 fields; allowed: 4"));
  CHECK(has(error_of("id,lower,upper,size\n1,0,2,3\n1,0,2,3\n"),
            "t:3: field 'id' is '1'; allowed: an id not used"));
  CHECK(has(error_of("id,lower,upper,size\n,0,2,3\n"), "field 'id'"));
  CHECK(has(error_of("id,lower,upper,size\n1,0,2,3\n\n2,0,2,3\n"), "t:3: has 1 fields"));
  CHECK(has(error_of("id,lower,upper,weight\n"), "field 'header' is 'weight'"));
  CHECK(has(error_of("id,lower,upper,upper\n"), "each once"));
  CHECK(has(error_of("id,lower,upper\n"), "allowed: id,lower,upper,size"));
  CHECK(has(error_of("garbage\n"), "first line is 'garbage'"));
  CHECK(has(error_of(""), "is empty"));
  CHECK(has(error_of("\x01\x02\n"), "first line is '\?\?'"));  // nothing unprintable reaches a terminal
}

TEST_CASE("an RMM log is read in log order; failures and empty blocks take no memory") {
  const auto loaded = memory::parse_trace(kRmm +
                                              "1,10:00:00.000001,allocate,0x7f00,256,0x0\n"
                                              "2,10:00:00.000002,allocate,0x8f00,512,0\n"
                                              "2,10:00:00.000003,allocate failure,0x0,99999,0x1\n"
                                              "2,10:00:00.000003,allocate,0x0,0,0x1\n"
                                              "1,10:00:00.000004,free,0x7f00,256,0x0\n"
                                              "1,10:00:00.000005,allocate,0x7f00,128,0x0\n",
                                          "t");
  REQUIRE(loaded.ok());
  CHECK(loaded->format == memory::TraceFormat::kRmm);
  CHECK(loaded->trace.block_count == 3);
  CHECK(loaded->trace.peak_live_bytes == 768);
}

TEST_CASE(
    "RMM logs as they are written: appended, from the middle, out of order, cut, and of the old layout") {
  // An address is handed out again before its free is written, and both frees come later.
  const auto order = memory::parse_trace(
      kRmm + "1,1,allocate,0x7f,100,0\n2,2,allocate,0x7f,60,0\n1,3,free,0x7f,100,0\n2,4,free,0x7f,60,0\n",
      "t");
  REQUIRE(order.ok());
  CHECK(order->early_frees == 1);
  CHECK(order->trace.ops.size() == 4);
  CHECK(order->trace.peak_live_bytes == 100);
  const auto middle = memory::parse_trace(kRmm +
                                              "1,1,free,0x1,5,0\n1,1,free,(nil),0,0\n1,1,allocate "
                                              "failure,(nil),999,0\n" +
                                              kRmm + "1,2,allocate,0x1,5,0\n1,3,fr",
                                          "t");
  REQUIRE(middle.ok());
  CHECK(middle->skipped_frees == 1);
  CHECK(middle->cut);
  CHECK(middle->trace.ops.size() == 1);
  const std::string old =
      "Event Type,Device ID,Address,Stream,Size (bytes),Free Memory,Total Memory,Current "
      "Allocs,Start,End,Elapsed,Location\nAlloc,0,0x7f,0,720984,0,0,1,41.7,41.7,0.1,/x/"
      "a.cu:85\nFree,0,0x7f,0,0,0,0,0,"
      "41.8,41.8,0.1,/x/a.cu:90\n";
  const auto early = memory::parse_trace(old, "t");
  REQUIRE(early.ok());
  CHECK(early->trace.ops.size() == 2);
  CHECK(early->trace.peak_live_bytes == 720984);
  CHECK(has(error_of(old + "Alloc,1,0x7f,0,5,0,0,1,4,4,0.1,x\n"), "t:4: field 'Device ID' is '1'"));
}

TEST_CASE(
    "a snapshot of several devices has a trace for each; a lost free ends at the next use of its address") {
  const auto devices = memory::parse_snapshot_devices(
      R"({"device_traces": [[{"action": "alloc", "addr": 1, "size": 2}, {"action": "alloc", "addr": 1, "size": 3}], [],
          [{"action": "alloc", "addr": 1, "size": 7}]]})",
      "t");
  REQUIRE(devices.ok());
  REQUIRE(devices->size() == 2);
  CHECK((*devices)[0].early_frees == 1);
  CHECK((*devices)[0].trace.peak_live_bytes == 3);
  CHECK((*devices)[1].device == 2);
  CHECK(memory::parse_trace("(dp0\nVsegments\n", "t").status().message().find("protocol 0 or 1") !=
        std::string::npos);
}

TEST_CASE("errors in RMM logs name line, field and what is allowed") {
  CHECK(has(error_of(kRmm + "1,2,take,0x1,5,0\n"), "t:2: field 'Action' is 'take'; allowed: allocate, free"));
  CHECK(has(error_of(kRmm + "1,2,allocate,zz,5,0\n"), "field 'Pointer' is 'zz'"));
  CHECK(has(error_of(kRmm + "1,2,allocate,0x,5,0\n"), "field 'Pointer' is '0x'"));
  CHECK(has(error_of(kRmm + "1,2,allocate,0x1,five,0\n"), "field 'Size' is 'five'"));
  CHECK(has(error_of(kRmm + "1,2,allocate,0x1,5,s\n"), "field 'Stream' is 's'"));
  CHECK(has(error_of(kRmm + "1,2,allocate,0x1,5,0\n1,2,free,0x1,6,0\n"), "field 'Size' is '6'"));
  CHECK(has(error_of(kRmm + "1,2,allocate\n"), "has 3 fields; allowed: 6"));
}

TEST_CASE("a PyTorch snapshot's device trace is read; frees count when completed") {
  const std::string text = R"({"segments": [], "device_traces": [[], [
      {"action": "segment_alloc", "addr": 4096, "size": 2097152, "stream": 0},
      {"action": "free_completed", "addr": 77, "size": 512, "stream": 0},
      {"action": "alloc", "addr": 4096, "size": 512, "stream": 0},
      {"action": "free_requested", "addr": 4096, "size": 512, "stream": 0},
      {"action": "alloc", "addr": 8192, "size": 1024, "stream": 0},
      {"action": "free_completed", "addr": 4096, "size": 512, "stream": 0},
      {"action": "oom", "size": 512, "device_free": 0}]]})";
  const auto loaded = memory::parse_trace(text, "t");
  REQUIRE(loaded.ok());
  CHECK(loaded->trace.ops.size() == 3);
  CHECK(loaded->trace.peak_live_bytes == 1536);
  CHECK(loaded->skipped_frees == 1);
  CHECK(memory::parse_snapshot_json(text, "t", 1).ok());
  CHECK_FALSE(memory::parse_snapshot_json(text, "t", 5).ok());
}

TEST_CASE("without completed frees, requested frees count") {
  const auto loaded = memory::parse_trace(
      R"({"device_traces": [[{"action": "alloc", "addr": 1, "size": 2}, {"action": "free_requested", "addr": 1}]]})",
      "t");
  REQUIRE(loaded.ok());
  CHECK(loaded->trace.ops.size() == 2);
}

TEST_CASE("errors in snapshots name the event, field and what is allowed") {
  CHECK(has(error_of("{"), "not JSON"));
  CHECK(has(error_of("{}"), "field 'device_traces' is missing"));
  CHECK(has(error_of(R"({"device_traces": [3]})"), "device_traces[0] is not a list"));
  CHECK(has(error_of(R"({"device_traces": [[]]})"), "holds no events"));
  CHECK(has(error_of(R"({"device_traces": [[3]]})"), "device_traces[0][0]: is not an object"));
  CHECK(has(error_of(R"({"device_traces": [[{"action": 4}]]})"), "field 'action' is missing or wrong"));
  CHECK(has(error_of(R"({"device_traces": [[{"action": "alloc", "addr": -1}]]})"), "field 'addr'"));
  CHECK(
      has(error_of(R"({"device_traces": [[{"action": "alloc", "addr": 1, "size": 1.5}]]})"), "field 'size'"));
  CHECK(has(error_of(R"({"device_traces": [[{"action": "x"}], [{"action": "x"}]]})"), "choose one device"));
}

TEST_CASE("files: absent is NOT_FOUND, a pickle is told from text") {
  CHECK(memory::read_trace("/no/such/file.csv").status().code() == GPUSHARE_NOT_FOUND);
  CHECK(memory::parse_trace("\x80\x02}q.", "t").status().code() == GPUSHARE_UNSUPPORTED);
}

TEST_CASE("every allocator replays a trace within its arena, and planned is no worse than the heap") {
  // Synthetic: layers of activations kept for a backward pass, workspaces that come and go.
  memory::TraceBuilder builder;
  std::vector<uint32_t> kept;
  for (uint64_t layer = 0; layer < 200; ++layer) {
    kept.push_back(builder.allocate(1000 + 7919 * layer % 60'000));
    const uint32_t workspace = builder.allocate(40'000 + 104'729 * layer % 300'000);
    builder.free(workspace);
  }
  while (!kept.empty()) {
    const uint32_t gradient = builder.allocate(builder.size_bytes(kept.back()));
    const uint32_t workspace = builder.allocate(90'000);
    builder.free(kept.back());
    builder.free(workspace);
    builder.free(gradient);
    kept.pop_back();
  }
  const memory::Trace trace = builder.take();
  memory::ReplayOptions options;
  options.time_ns = 1'000'000;
  options.plan_work_limit = 20'000'000;
  const auto heap = memory::replay(trace, ReplayAllocator::kHeap, options);
  const auto lane = memory::replay(trace, ReplayAllocator::kLane, options);
  const auto planned = memory::replay(trace, ReplayAllocator::kPlanned, options);
  REQUIRE(heap.ok());
  REQUIRE(lane.ok());
  REQUIRE(planned.ok());
  CHECK(planned->min_arena_bytes <= heap->min_arena_bytes);
  CHECK(lane->min_arena_bytes == heap->min_arena_bytes);  // nothing in this trace is persistent
  CHECK(planned->min_arena_ratio >= 1.0);
  CHECK(heap->operations == trace.ops.size());
  CHECK(heap->ns_per_op > 0);
  CHECK_FALSE(memory::replay({}, ReplayAllocator::kHeap).ok());
  CHECK(memory::parse_replay_allocator("planned").ok());
  CHECK(has(memory::parse_replay_allocator("tlsf").status().message(), "heap, lane, planned"));
}

TEST_CASE("the packing bars hold on the public traces") {
  struct Bar {
    const char* name;
    double online, planned;
  };
  for (const Bar bar :
       {Bar{"pangu_2.6B", 1.121, 1.02}, Bar{"iopddl_S_1", 1.009, 1.009}, Bar{"resnet50", 1.002, 1.002}}) {
    const std::string path = std::string(GPUSHARE_SHARED_DATA) + "/alloc/" + bar.name + ".csv";
    if (!std::ifstream(path).good()) {
      WARN(path << " is absent: its bar is not checked");
      continue;
    }
    const auto loaded = memory::read_trace(path);
    REQUIRE(loaded.ok());
    memory::ReplayOptions options;
    options.time_ns = 0;
    options.plan_work_limit = 0;  // the simple orders and the online run
    INFO(bar.name);
    CHECK(memory::replay(loaded->trace, ReplayAllocator::kHeap, options)->min_arena_ratio <= bar.online);
    CHECK(memory::replay(loaded->trace, ReplayAllocator::kLane, options)->min_arena_ratio <= bar.online);
    CHECK(memory::replay(loaded->trace, ReplayAllocator::kPlanned, options)->min_arena_ratio <= bar.planned);
  }
}
