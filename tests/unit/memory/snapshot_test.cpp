// The exports: PyTorch's memory snapshot as pickle and JSON, and RMM's allocation log.
//
// SPDX-License-Identifier: Apache-2.0
#include "memory/snapshot.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "memory/allocation_log.hpp"
#include "memory/trace_io.hpp"
#include "support/catch.hpp"
#include "support/temporary_file.hpp"
#include "unit/memory/device_memory_fixture.hpp"

using namespace gpushare;
using memory::AllocationEvent;
using memory::Kind;
using memory::MemorySnapshot;
using memory::SnapshotFormat;

namespace {

constexpr memory::Address kBase = (uint64_t{1} << 62) + 4096;  // above 2^31, as on every device

MemorySnapshot example() {
  MemorySnapshot snapshot;
  snapshot.capacity_bytes = uint64_t{16} << 30;
  snapshot.layout = memory::Layout::kVirtual;
  memory::SegmentSnapshot heap;
  heap.address = kBase;
  heap.bytes = 1 << 21;
  heap.session = 7;
  heap.name = "session \"bert\"\\\n\xC3\xA9";
  heap.blocks.push_back({kBase + 4096, 1000, Kind::kFramework, 7, UINT32_MAX, false, false});
  heap.blocks.push_back({kBase, 512, Kind::kModel, 7, UINT32_MAX, false, false});
  snapshot.segments.push_back(heap);
  memory::SegmentSnapshot lane;
  lane.address = kBase + (1 << 21);
  lane.bytes = 1 << 21;
  lane.stream = 77;
  lane.name = "lane \xFF 0";  // not UTF-8
  lane.blocks.push_back({lane.address, 1 << 21, Kind::kEphemeral, 7, 0, true, false});
  snapshot.segments.push_back(lane);
  snapshot.events = {
      {AllocationEvent::Action::kFree, Kind::kModel, kBase + 512, 9, 1'000, 42, 77,
       7},  // allocated before the recording
      {AllocationEvent::Action::kAlloc, Kind::kModel, kBase, 512, 3'723'000'004'000, 42, 77, 7},
      {AllocationEvent::Action::kOutOfMemory, Kind::kEphemeral, 0, 1 << 30, 3'723'000'005'000, 42, 77, 7},
      {AllocationEvent::Action::kFree, Kind::kModel, kBase, 512, 3'723'000'006'000, 43, 77, 7}};
  return snapshot;
}

void check_content(const nlohmann::json& root) {
  REQUIRE(root["segments"].size() == 2);
  const auto& heap = root["segments"][0];
  CHECK(heap["address"] == kBase);
  CHECK(heap["total_size"] == 1 << 21);
  CHECK(heap["allocated_size"] == 512 + 1024);
  CHECK(heap["active_size"] == 512 + 1024);
  CHECK(heap["requested_size"] == 1512);
  CHECK(heap["device"] == 0);
  CHECK(heap["stream"] == 0);
  CHECK(heap["segment_type"] == "large");
  CHECK(heap["segment_pool_id"] == nlohmann::json::array({7, 0}));
  CHECK(heap["is_expandable"] == true);
  CHECK(heap["frames"][0]["name"] == "session \"bert\"\\\n\xC3\xA9");
  const auto& blocks = heap["blocks"];
  REQUIRE(blocks.size() == 4);  // model, hole, framework, hole
  uint64_t at = kBase;
  for (const auto& block : blocks) {
    CHECK(block["address"] == at);
    at += block["size"].get<uint64_t>();
  }
  CHECK(at == kBase + (1 << 21));
  CHECK(blocks[0]["state"] == "active_allocated");
  CHECK(blocks[1]["state"] == "inactive");
  CHECK(blocks[2]["requested_size"] == 1000);
  CHECK(blocks[2]["size"] == 1024);
  CHECK(root["segments"][1]["stream"] == 77);
  CHECK(root["segments"][1]["frames"][0]["name"] == "lane \xEF\xBF\xBD 0");
  REQUIRE(root["device_traces"].size() == 1);
  const auto& trace = root["device_traces"][0];
  REQUIRE(trace.size() == 6);
  CHECK(trace[0]["action"] == "free_requested");
  CHECK(trace[1]["action"] == "free_completed");
  CHECK(trace[2]["action"] == "alloc");
  CHECK(trace[2]["addr"] == kBase);
  CHECK(trace[2]["size"] == 512);
  CHECK(trace[2]["time_us"] == 3'723'000'004);
  CHECK(trace[3]["action"] == "oom");
  CHECK(trace[3].count("addr") == 0);
  CHECK(trace[3].count("device_free") == 1);
  CHECK(root["allocator_settings"]["capacity_bytes"] == uint64_t{16} << 30);
}

// Its allocation log and its JSON are read as traces of so much.
void check_read_back(const MemorySnapshot& snapshot, size_t blocks, size_t ops, uint64_t peak_live_bytes) {
  test::TemporaryFile log, json;
  REQUIRE(memory::write_allocation_log(snapshot.events, log.path()).ok());
  REQUIRE(write_snapshot(snapshot, SnapshotFormat::kJson, json.path()).ok());
  for (const std::string& path : {log.path(), json.path()}) {
    const auto loaded = memory::read_trace(path);
    INFO(loaded.status().to_string());
    REQUIRE(loaded.ok());
    CHECK(loaded->trace.block_count == blocks);
    CHECK(loaded->trace.ops.size() == ops);
    CHECK(loaded->trace.peak_live_bytes == peak_live_bytes);
    CHECK(loaded->skipped_frees == 0);
  }
}

}  // namespace

TEST_CASE("the JSON snapshot has PyTorch's fields") {
  test::TemporaryFile file;
  REQUIRE(write_snapshot(example(), SnapshotFormat::kJson, file.path()).ok());
  check_content(nlohmann::json::parse(file.text()));
}

TEST_CASE("Python reads the pickled snapshot, and it holds what the JSON holds") {
  test::TemporaryFile file, converted;
  REQUIRE(write_snapshot(example(), SnapshotFormat::kPickle, file.path()).ok());
  const std::string text = file.text();
  CHECK(text.substr(0, 2) == "\x80\x02");  // protocol 2
  CHECK(text.back() == '.');
  if (std::system("python3 -c 'import pickle' >/dev/null 2>&1") != 0) {
    WARN("no python3: the pickle was not loaded");
    return;
  }
  // An unpickler that may load nothing but plain containers.
  const std::string script =
      "python3 -c '\n"
      "import json, pickle, sys\n"
      "class Plain(pickle.Unpickler):\n"
      "    def find_class(self, *_): raise ValueError(\"not plain\")\n"
      "with open(sys.argv[1], \"rb\") as f:\n"
      "    root = Plain(f).load()\n"
      "    assert f.read() == b\"\"\n"
      "import pickletools\n"
      "for op, value, at in pickletools.genops(open(sys.argv[1], \"rb\").read()):\n"  // the viewer takes no longer ones
      "    assert op.name != \"LONG1\" or (value.bit_length() + 8) // 8 <= 8, value\n"
      "    assert op.name != \"LONG1\" or open(sys.argv[1], \"rb\").read()[at + 1] == (value.bit_length() + "
      "8) // 8\n"
      "assert isinstance(root[\"segments\"][0][\"segment_pool_id\"], tuple)\n"
      "json.dump(root, open(sys.argv[2], \"w\"))\n"
      "' ";
  REQUIRE(std::system((script + file.path() + " " + converted.path()).c_str()) == 0);
  check_content(nlohmann::json::parse(converted.text()));
}

TEST_CASE("an empty snapshot is still readable") {
  test::TemporaryFile file;
  REQUIRE(write_snapshot(MemorySnapshot{}, SnapshotFormat::kJson, file.path()).ok());
  const auto root = nlohmann::json::parse(file.text());
  CHECK(root["segments"].empty());
  CHECK(root["device_traces"] == nlohmann::json::parse("[[]]"));
}

TEST_CASE("exports tell why they could not write") {
  for (const auto& [path, code] :
       {std::pair<std::string, int>{"/nonexistent/x", ENOENT}, {"/dev/full", ENOSPC}}) {
    for (const auto format : {SnapshotFormat::kPickle, SnapshotFormat::kJson}) {
      const auto status = write_snapshot(example(), format, path);
      CHECK(status.code() == GPUSHARE_IO_ERROR);
      CHECK(status.native_code() == code);
      CHECK(status.message().find(path) != std::string::npos);
    }
    const auto status = memory::write_allocation_log(example().events, path);
    CHECK(status.code() == GPUSHARE_IO_ERROR);
    CHECK(status.native_code() == code);
  }
}

TEST_CASE("the allocation log is RMM's, without frees of blocks that it does not hold") {
  test::TemporaryFile file;
  REQUIRE(memory::write_allocation_log(example().events, file.path()).ok());
  std::istringstream lines(file.text());
  std::string line;
  REQUIRE(std::getline(lines, line));
  CHECK(line == "Thread,Time,Action,Pointer,Size,Stream");
  REQUIRE(std::getline(lines, line));
  CHECK(line == "42,01:02:03.000004,allocate,0x4000000000001000,512,0x4d");
  REQUIRE(std::getline(lines, line));
  CHECK(line == "42,01:02:03.000005,allocate failure,0x0,1073741824,0x4d");
  REQUIRE(std::getline(lines, line));
  CHECK(line == "43,01:02:03.000006,free,0x4000000000001000,512,0x4d");
  CHECK_FALSE(std::getline(lines, line));
}

TEST_CASE("what a device memory recorded comes back through the readers of traces") {
  test::Fixture f("sim?total_bytes=64MiB", memory::Layout::kAuto, 32 << 20, true);
  const device::Stream stream = f.stream();
  memory::PersistentHeap* heap = f.heap(1, 4 << 20);
  memory::Lane* lane = f.lane(0, 4 << 20, stream);
  const auto model = heap->alloc(Kind::kModel, 1000, 0);
  REQUIRE(lane->begin_iteration(*heap, false).ok());
  const auto a = lane->alloc(2000, 0);
  const auto b = lane->alloc(3000, 0);
  REQUIRE(lane->alloc(5 << 20, 0).status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  REQUIRE((f.memory->free(*a).ok() && b.ok()));
  REQUIRE(lane->end_iteration(nullptr).ok());  // frees b
  check_read_back(f.memory->snapshot(), 3, 5, 6000);
  CHECK(f.memory->free(*model).ok());
}

TEST_CASE("a block's end is recorded whoever ends it: its user, or the session that closes") {
  test::Fixture f("sim?total_bytes=64MiB", memory::Layout::kAuto, 32 << 20, true);
  const device::Stream stream = f.stream();
  memory::Lane* lane = f.lane(0, 4 << 20, stream);
  for (memory::SessionId session : {9, 10}) {  // the second gets the first one's addresses
    memory::PersistentHeap* heap = f.heap(session, 4 << 20);
    const size_t before = f.memory->snapshot().events.size();
    REQUIRE(heap->alloc(Kind::kModel, 1000, 0).ok());
    const auto freed = heap->alloc(Kind::kFramework, 1500, 0);
    REQUIRE(heap->alloc_spilled(Kind::kModel, 500, 0).ok());
    REQUIRE(lane->begin_iteration(*heap, false).ok());
    const auto kept_and_freed = lane->alloc(2000, 0);
    const auto kept = lane->alloc(3000, 0);
    REQUIRE((freed.ok() && kept_and_freed.ok() && kept.ok()));
    REQUIRE(lane->keep(*kept_and_freed).ok());
    REQUIRE(lane->keep(*kept).ok());
    REQUIRE(lane->end_iteration(nullptr).ok());
    REQUIRE(f.memory->snapshot().events.size() == before + 5);
    REQUIRE(f.memory->free(*kept_and_freed).ok());
    REQUIRE(f.memory->free(*freed).ok());
    REQUIRE(f.memory->close_heap(heap).ok());
    const auto events = f.memory->snapshot().events;
    REQUIRE(events.size() == before + 10);
    uint64_t bytes = 0;
    for (size_t i = before + 5; i < events.size(); ++i) {
      CHECK(events[i].action == AllocationEvent::Action::kFree);
      CHECK(events[i].session == session);
      bytes += events[i].bytes;
    }
    CHECK(bytes == 1000 + 1500 + 500 + 2000 + 3000);
  }
  const MemorySnapshot snapshot = f.memory->snapshot();
  check_read_back(snapshot, 10, 20, 8000);
  CHECK(f.memory->close_lane(lane).ok());
}
