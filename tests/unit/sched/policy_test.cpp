// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "sched/policy.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace gpushare::sched;

namespace {

std::unique_ptr<Policy> policy(const char* name) {
  return std::move(*make_policy(name));
}

SessionView view(SessionId id, uint64_t remaining_ns = kUnknown, int32_t priority = 0) {
  SessionView view;
  view.id = id;
  view.remaining_ns = remaining_ns;
  view.priority = priority;
  return view;
}

// The sum of speeds is 1 whatever runs together, except for the pairs named friendly.
class Pairs final : public Interference {
 public:
  double rate(SessionId session, std::span<const SessionId> beside) const override {
    double share = 1;
    for (const SessionId other : beside)
      if (!(session % 10 == 0 && other % 10 == 0)) share += 1;
    return 1 / share;
  }
};

// A device with sessions in lanes of their own.
class Residents final : public DeviceView {
 public:
  void add(SessionView session, LaneId lane) {
    views_.push_back(std::make_unique<SessionView>(session));
    list_.push_back({views_.back().get(), lane, true});
    ++changes_;
  }
  void remove(SessionId id) {
    std::erase_if(list_, [id](const ResidentView& each) { return each.session->id == id; });
    ++changes_;
  }
  void tell(std::shared_ptr<const Interference> known) { known_ = std::move(known); }
  std::span<const ResidentView> residents() const override { return list_; }
  uint64_t changes() const override { return changes_; }
  const Interference* interference() const override { return known_.get(); }
  MayJoin join(const Policy& policy, const SessionView& session) const {
    return policy.may_join(session, {list_.size(), false, this});
  }
  bool runs(const Policy& policy, const SessionView& session) const {
    return policy.may_run(session, *this, 0) == 0;
  }

 private:
  std::vector<std::unique_ptr<SessionView>> views_;
  std::vector<ResidentView> list_;
  uint64_t changes_ = 0;
  std::shared_ptr<const Interference> known_;
};

}  // namespace

TEST_CASE("policies are made by name and an unknown name lists them") {
  for (const char* name : policy_names()) CHECK(policy(name)->name() == name);
  const auto missing = make_policy("lottery");
  CHECK(missing.status().code() == GPUSHARE_NOT_FOUND);
  CHECK(missing.status().message().find("fifo, srtf, pack, fair, priority") != std::string::npos);
}

TEST_CASE("fifo lets one session in at a time, in the order of the line") {
  const auto fifo = policy("fifo");
  CHECK(fifo->may_join(view(1), {0, false}) == MayJoin::kYes);
  CHECK(fifo->may_join(view(1), {1, false}) == MayJoin::kNobody);
  CHECK(fifo->may_join(view(2), {0, true}) == MayJoin::kNobody);
  CHECK(fifo->share(view(1)).kind == Share::Kind::kWhole);
  CHECK(fifo->gives_way(view(2), view(1)) == GivesWay::kAfterLongStay);
  CHECK(goes_before(*fifo, view(1), view(2)));
}

TEST_CASE("srtf prefers what ends first, unknown lengths by service received") {
  const auto srtf = policy("srtf");
  const auto takes = [&](const SessionView& waiting, const SessionView& resident) {
    return srtf->gives_way(resident, waiting) == GivesWay::kAtOnce;
  };
  CHECK(srtf->before(view(2, 20), view(1, 50)));
  CHECK(srtf->before(view(2, 20), view(3)));
  CHECK(goes_before(*srtf, view(2, 20), view(5, 20)));  // ties by arrival
  SessionView young = view(9), old = view(1);
  old.service_ns = 10'000'000'000;
  CHECK(srtf->before(young, old));
  CHECK(takes(young, old));
  CHECK_FALSE(takes(old, young));
  CHECK(srtf->gives_way(young, old) == GivesWay::kNever);
  CHECK(takes(view(2, 10), view(1, 11)));
  CHECK_FALSE(takes(view(2, 10), view(1, 10)));
  CHECK_FALSE(takes(view(2), view(1)));  // equals do not page each other out
  CHECK(takes(view(2, 10), view(1)));
  old.alternates = true;  // by service alone no place is taken before the stay there is over
  CHECK(srtf->gives_way(old, young) == GivesWay::kAfterStay);
  SessionView returning = view(2, 999);
  returning.service_ns = 1;
  CHECK_FALSE(takes(returning, view(1, 1000)));  // a copy each way for nothing
  returning.remaining_ns = 900;
  CHECK(takes(returning, view(1, 1000)));
}

TEST_CASE("srtf's answers hold until the level of an unknown session ends") {
  const auto srtf = policy("srtf");
  const Residents nobody;
  SessionView session = view(1);
  CHECK(srtf->holds_ns(session, nobody) == 1'000'000'000);
  session.service_ns = 5'000'000'000;
  CHECK(srtf->holds_ns(session, nobody) == 3'000'000'000);
  CHECK(srtf->holds_ns(view(1, 70), nobody) == 70);
}

TEST_CASE("fair has no ranks and shares by weight") {
  const auto fair = policy("fair");
  CHECK_FALSE(fair->answers().before);
  SessionView heavy = view(1);
  heavy.weight = 4;
  CHECK(fair->share(heavy).kind == Share::Kind::kWeighted);
  CHECK(fair->share(heavy).weight == 4);
  CHECK(fair->gives_way(view(1), view(2)) == GivesWay::kAfterStay);
}

TEST_CASE("priority ranks class, then priority, and equals share") {
  const auto priority = policy("priority");
  const auto takes = [&](const SessionView& waiting, const SessionView& resident) {
    CHECK(priority->before(waiting, resident) ==
          (priority->gives_way(resident, waiting) == GivesWay::kAtOnce));
    return priority->before(waiting, resident);
  };
  CHECK(takes(view(2, 0, 7), view(1, 0, 1)));
  SessionView spare = view(4, 0, 100);
  spare.cls = SessionClass::kOpportunistic;
  CHECK(takes(view(5, 0, -3), spare));
  CHECK(priority->gives_way(view(5, 0, -3), spare) == GivesWay::kNever);
  CHECK_FALSE(takes(view(5, 0, 2), view(1, 0, 2)));
  CHECK(priority->gives_way(view(5, 0, 2), view(1, 0, 2)) == GivesWay::kAfterStay);
  CHECK(takes(view(5, 0, INT32_MAX), view(1, 0, INT32_MIN)));
  CHECK_FALSE(takes(view(5, 0, INT32_MIN), view(1, 0, INT32_MAX)));
  CHECK(priority->share(view(1)).kind == Share::Kind::kWeighted);
}

TEST_CASE("pack told of interference runs only what adds speed, and always the oldest") {
  const auto pack = policy("pack");
  Residents device;
  device.add(view(10), 0);
  CHECK(device.join(*pack, view(7)) == MayJoin::kYes);  // nothing known: memory alone decides
  device.tell(std::make_shared<Pairs>());
  CHECK(device.join(*pack, view(20)) == MayJoin::kYes);
  CHECK(device.join(*pack, view(7)) == MayJoin::kNo);
  device.add(view(20), 1);
  device.add(view(33), 2);
  CHECK(device.runs(*pack, view(10)));
  CHECK(device.runs(*pack, view(20)));
  CHECK_FALSE(device.runs(*pack, view(33)));
  device.remove(10);
  CHECK_FALSE(device.runs(*pack, view(33)));  // 20 is older
  device.remove(20);
  CHECK(device.runs(*pack, view(33)));
}

namespace {

gpushare_policy_ops empty_table() {
  gpushare_policy_ops ops{};
  ops.struct_size = sizeof(ops);
  return ops;
}

}  // namespace

TEST_CASE("a custom policy answers through its C table, and what is no answer is told once") {
  struct Seen {
    int released = 0;
    int32_t answer = 2;
    double share = 3;
    uint32_t residents = 0, passes = 0;
  } seen;
  gpushare_policy_ops ops = empty_table();
  ops.name = "mine";
  ops.user_data = &seen;
  ops.before = [](void*, const gpushare_candidate* a, const gpushare_candidate* b) -> int32_t {
    return a->priority > b->priority;
  };
  ops.may_run = [](void*, const gpushare_candidate* session, uint64_t now_ns) -> uint64_t {
    return now_ns + session->remaining_ns;
  };
  ops.gives_way = [](void* user, const gpushare_candidate*, const gpushare_candidate*) -> int32_t {
    return static_cast<Seen*>(user)->answer;
  };
  ops.share = [](void* user, const gpushare_candidate*) -> double { return static_cast<Seen*>(user)->share; };
  ops.may_join = [](void* user, const gpushare_candidate*, uint32_t residents, uint32_t passes) -> int32_t {
    static_cast<Seen*>(user)->residents = residents;
    static_cast<Seen*>(user)->passes = passes;
    return static_cast<Seen*>(user)->answer;
  };
  ops.release = [](void* user) { ++static_cast<Seen*>(user)->released; };
  {
    const auto mine = std::move(*make_custom_policy(&ops));
    CHECK(mine->name() == "mine");
    CHECK(mine->before(view(1, 0, 5), view(2, 0, 1)));
    CHECK(mine->may_run(view(1, 5), Residents(), 7) == 12);
    CHECK(mine->gives_way(view(1), view(2)) == GivesWay::kAfterStay);
    CHECK(mine->may_join(view(1), {4, true}) == MayJoin::kNobody);
    CHECK(seen.residents == 4);
    CHECK(seen.passes == 1);
    CHECK(mine->share(view(1)).weight == 3);
    CHECK(mine->holds_ns(view(4), Residents()) == 0);
    seen.share = GPUSHARE_SHARE_WHOLE;
    CHECK(mine->share(view(1)).kind == Share::Kind::kWhole);
    seen.share = GPUSHARE_SHARE_IN_LINE;
    CHECK(mine->share(view(1)).kind == Share::Kind::kInLine);

    std::vector<std::string> lines;
    base::set_log_sink(
        [](void* user, int32_t, const char* text) {
          static_cast<std::vector<std::string>*>(user)->emplace_back(text);
        },
        &lines, base::kError);
    seen.answer = 4;
    CHECK(mine->gives_way(view(1), view(2)) == GivesWay::kNever);
    seen.answer = -1;
    CHECK(mine->may_join(view(1), {4, true}) == MayJoin::kNo);
    seen.share = -3;
    CHECK(mine->share(view(1)).kind == Share::Kind::kInLine);
    base::set_log_sink(nullptr, nullptr, base::kWarning);
    REQUIRE(lines.size() == 1);  // said once
    CHECK(lines[0].find("'mine': gives_way returned 4") != std::string::npos);
  }
  CHECK(seen.released == 1);
}

TEST_CASE("a custom policy that throws counts as no, and what it leaves out has the default answer") {
  gpushare_policy_ops ops = empty_table();
  ops.may_run = [](void*, const gpushare_candidate*, uint64_t) -> uint64_t { throw std::runtime_error("x"); };
  ops.gives_way = [](void*, const gpushare_candidate*, const gpushare_candidate*) -> int32_t {
    throw std::runtime_error("gives_way");
  };
  base::set_log_sink([](void*, int32_t, const char*) {}, nullptr, base::kError);
  const auto bad = std::move(*make_custom_policy(&ops));
  CHECK(bad->name() == "custom");
  CHECK(bad->may_run(view(4), Residents(), 3) == kUnknown);
  CHECK(bad->gives_way(view(1), view(2)) == GivesWay::kNever);
  CHECK_FALSE(bad->answers().before);
  CHECK_FALSE(bad->before(view(1), view(2)));
  CHECK_FALSE(bad->answers().may_join);
  CHECK(bad->share(view(1)).kind == Share::Kind::kWeighted);
  base::set_log_sink(nullptr, nullptr, base::kWarning);
}

TEST_CASE("a custom policy's table is checked and not released when refused") {
  CHECK(make_custom_policy(nullptr).status().code() == GPUSHARE_INVALID_ARGUMENT);
  static int released;
  released = 0;
  gpushare_policy_ops ops{};
  ops.release = [](void*) { ++released; };
  ops.struct_size = 8;
  CHECK(make_custom_policy(&ops).status().code() == GPUSHARE_INVALID_ARGUMENT);
  ops.struct_size = sizeof(ops);
  CHECK(make_custom_policy(&ops).status().message().find("may_join") != std::string::npos);
  ops.reserved = 1;
  ops.share = [](void*, const gpushare_candidate*) -> double { return 1; };
  CHECK(make_custom_policy(&ops).status().message().find("reserved") != std::string::npos);
  CHECK(released == 0);
}
