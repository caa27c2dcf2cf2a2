// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"
#include "support/random.hpp"

namespace gpushare::cts {

CTS_TEST("ordering: a stream waits for another one's event") {
  Gate gate;
  std::vector<int> log;  // the events order the accesses; ThreadSanitizer checks that they do
  const auto first = cts.stream();
  const auto second = cts.stream();
  const auto event = cts.event();
  REQUIRE_OK(first.launch_host(Gate::block, &gate));
  REQUIRE_OK(first.launch_host([](void* l) { static_cast<std::vector<int>*>(l)->push_back(1); }, &log));
  REQUIRE_OK(first.record(event));
  REQUIRE_OK(second.wait(event));
  REQUIRE_OK(second.launch_host([](void* l) { static_cast<std::vector<int>*>(l)->push_back(2); }, &log));
  CHECK(second.query().code() == GPUSHARE_NOT_READY);
  gate.open();
  REQUIRE_OK(second.synchronize());
  CHECK(log == std::vector<int>{1, 2});
  REQUIRE_OK(first.synchronize());
}

CTS_TEST("ordering: a stream's own event is no obstacle") {
  const auto stream = cts.stream();
  const auto event = cts.event();
  int runs = 0;
  REQUIRE_OK(stream.launch_host([](void* n) { ++*static_cast<int*>(n); }, &runs));
  REQUIRE_OK(stream.record(event));
  REQUIRE_OK(stream.wait(event));
  REQUIRE_OK(stream.launch_host([](void* n) { ++*static_cast<int*>(n); }, &runs));
  REQUIRE_OK(stream.synchronize());
  CHECK(runs == 2);
}

CTS_TEST("ordering: a chain over many streams") {
  constexpr size_t kLinks = 32;
  struct Link {
    std::vector<size_t>* log;
    size_t index;
  };
  std::vector<size_t> log;
  std::vector<Link> links;
  for (size_t i = 0; i < kLinks; ++i) links.push_back({&log, i});
  std::vector<device::Stream> streams;
  std::vector<device::Event> events;
  for (size_t i = 0; i < kLinks; ++i) {
    streams.push_back(cts.stream());
    events.push_back(cts.event());
    if (i > 0) REQUIRE_OK(streams[i].wait(events[i - 1]));
    REQUIRE_OK(streams[i].launch_host(
        [](void* data) {
          const Link& link = *static_cast<Link*>(data);
          link.log->push_back(link.index);
        },
        &links[i]));
    REQUIRE_OK(streams[i].record(events[i]));
  }
  REQUIRE_OK(streams.back().synchronize());
  REQUIRE(log.size() == kLinks);
  for (size_t i = 0; i < kLinks; ++i) CHECK(log[i] == i);
}

CTS_TEST("ordering: two streams take turns") {
  int counter = 0;
  const auto count_up = [](void* n) { ++*static_cast<int*>(n); };
  const auto a = cts.stream();
  const auto b = cts.stream();
  const auto from_a = cts.event();
  const auto from_b = cts.event();
  for (int i = 0; i < 200; ++i) {
    REQUIRE_OK(a.wait(from_b));
    REQUIRE_OK(a.launch_host(count_up, &counter));
    REQUIRE_OK(a.record(from_a));
    REQUIRE_OK(b.wait(from_a));
    REQUIRE_OK(b.launch_host(count_up, &counter));
    REQUIRE_OK(b.record(from_b));
  }
  REQUIRE_OK(b.synchronize());
  CHECK(counter == 400);
}

CTS_TEST("ordering: data written on one stream are read on another") {
  constexpr uint64_t kBytes = 300'000;
  const auto bytes = pattern(kBytes, 3);
  std::vector<uint8_t> out(kBytes);
  const device::Address a = *cts.device->alloc(kBytes);
  const device::Address b = *cts.device->alloc(kBytes);
  {
    const auto up = cts.stream();
    const auto inside = cts.stream();
    const auto down = cts.stream();
    const auto uploaded = cts.event();
    const auto copied = cts.event();
    REQUIRE_OK(up.fill(a, 0, kBytes));
    REQUIRE_OK(up.copy(a, address_of(bytes.data()), kBytes, GPUSHARE_COPY_HOST_TO_DEVICE));
    REQUIRE_OK(up.record(uploaded));
    REQUIRE_OK(inside.wait(uploaded));
    REQUIRE_OK(inside.copy(b, a, kBytes, GPUSHARE_COPY_DEVICE_TO_DEVICE));
    REQUIRE_OK(inside.record(copied));
    REQUIRE_OK(down.wait(copied));
    REQUIRE_OK(down.copy(address_of(out.data()), b, kBytes, GPUSHARE_COPY_DEVICE_TO_HOST));
    REQUIRE_OK(down.synchronize());
  }
  CHECK(out == bytes);
  CHECK_OK(cts.device->free(a));
  CHECK_OK(cts.device->free(b));
}

// Random streams, records and waits: every node of the graph checks that those it depends on have run.
CTS_TEST("ordering: random graphs") {
  INFO("seed " << test::seed());
  test::Random random(test::seed());
  struct Node {
    std::vector<const Node*> after;
    bool done = false;
    bool in_order = true;
    static void visit(void* data) {
      Node& self = *static_cast<Node*>(data);
      for (const Node* node : self.after) self.in_order = self.in_order && node->done;
      self.done = true;
    }
  };
  constexpr size_t kStreams = 6;
  constexpr size_t kNodes = 400;
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<device::Stream> streams;
  std::vector<const Node*> last_on(kStreams, nullptr);
  for (size_t i = 0; i < kStreams; ++i) streams.push_back(cts.stream());
  std::vector<device::Event> events;
  std::vector<const Node*> recorded_after;
  for (size_t i = 0; i < kNodes; ++i) {
    const size_t on = test::uniform(random, 0, kStreams - 1);
    nodes.push_back(std::make_unique<Node>());
    Node& node = *nodes.back();
    if (last_on[on] != nullptr) node.after.push_back(last_on[on]);
    for (uint64_t waits = test::uniform(random, 0, 2); waits > 0 && !events.empty(); --waits) {
      const size_t which = test::uniform(random, 0, events.size() - 1);
      REQUIRE_OK(streams[on].wait(events[which]));
      node.after.push_back(recorded_after[which]);
    }
    REQUIRE_OK(streams[on].launch_host(Node::visit, &node));
    last_on[on] = &node;
    if (test::uniform(random, 0, 2) != 0) continue;
    if (events.size() < 20) {
      events.push_back(cts.event());
      recorded_after.push_back(nullptr);
    }
    const size_t which = test::uniform(random, 0, events.size() - 1);
    // A fresh event, or one that is recorded again.
    const size_t target = recorded_after.back() == nullptr ? events.size() - 1 : which;
    REQUIRE_OK(streams[on].record(events[target]));
    recorded_after[target] = &node;
  }
  for (const auto& stream : streams) REQUIRE_OK(stream.synchronize());
  for (const auto& node : nodes) {
    CHECK(node->done);
    CHECK(node->in_order);
  }
}

}  // namespace gpushare::cts
