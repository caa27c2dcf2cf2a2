// Random events against sched::Scheduler, driven as an executor would: after every step the invariants hold
// (safety at every instant, never more promised than the effective capacity, while the capacity changes), and at the
// end everybody has run to the end of its work: nobody is lost, nobody starves.
// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <set>
#include <string>

#include "sched/scheduler.hpp"
#include "sched/session_states.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;
using namespace gpushare::sched;

namespace {

struct Model {
  bool goes_out = false;  // its copy is a page-out
  bool comes_in = false;  // a page-in
  uint64_t left = 0;      // iterations still to be made ready
  uint32_t flying = 0;    // dispatched, not finished
  bool ready = false;
  bool resident = false;
  bool paging = false;
  bool turns_back = false;  // the page-in is to
  bool dropping = false;
  bool never_pages = false;
};

// A cache as its driver knows it.
struct CacheModel {
  uint64_t first_part = 0;
  uint32_t users = 0;
  bool held = false;
  bool dropping = false;
};

// The memory of a shared lane.
struct LaneMemory {
  uint64_t bytes = 0, wanted = 0;
};

class Driver {
 public:
  Driver(test::Random& random, std::unique_ptr<Policy> policy, SchedulerOptions options, uint32_t depth)
      : random_(random), scheduler_(options, std::move(policy)), options_(options), depth_(depth) {
    uint64_t last = 0;  // each second one is the rest of the one before
    for (uint64_t id = kFirstCache; id < kFirstCache + 6; ++id) {
      const uint64_t first_part = id % 2 != 0 ? last : 0;
      const uint64_t bytes = test::uniform(random_, 0, options.capacity_bytes / 2);
      REQUIRE(scheduler_.add_cache(id, bytes, static_cast<double>(bytes), first_part).ok());
      caches_[id].first_part = first_part;
      last = id;
    }
  }

  // Wants or lets go of a cache, and with it its first part; or ends a drop.
  void step_caches() {
    auto chosen = caches_.begin();
    std::advance(chosen, static_cast<long>(test::uniform(random_, 0, caches_.size() - 1)));
    auto& [id, cache] = *chosen;
    if (cache.dropping) {
      cache.dropping = cache.held = false;
      scheduler_.cache_dropped(id, now_);
    } else if (cache.users > 0 && test::uniform(random_, 0, 1) != 0) {
      let_go(id);
    } else if (cache.users < 3) {
      ++cache.users;
      scheduler_.want_cache(id, last_id_, now_);
    }
    carry_out();
  }

  void set_policy(std::unique_ptr<Policy> policy) {
    scheduler_.set_policy(std::move(policy), now_);
    carry_out();
  }

  void arrive(uint64_t iterations) {
    SessionSpec spec;
    spec.id = ++last_id_;
    spec.name = std::to_string(spec.id);
    spec.cls = test::uniform(random_, 0, 3) == 0 ? SessionClass::kOpportunistic : SessionClass::kGuaranteed;
    spec.priority = static_cast<int32_t>(test::uniform(random_, 0, 4));
    spec.weight = static_cast<double>(test::uniform(random_, 1, 4));
    spec.persistent_bytes = test::uniform(random_, 0, options_.capacity_bytes / 4);
    spec.ephemeral_bytes = test::uniform(random_, 0, options_.capacity_bytes * 5 / 4);
    spec.may_queue = test::uniform(random_, 0, 7) != 0;
    spec.profiling = test::uniform(random_, 0, 15) == 0 && !options_.shared_lanes;
    if (options_.shared_lanes) spec.trust_group = test::uniform(random_, 0, 2);
    spec.alternates = test::uniform(random_, 0, 2) == 0;
    spec.may_page = test::uniform(random_, 0, 5) != 0;
    spec.never_pages = !spec.profiling && test::uniform(random_, 0, 9) == 0;
    if (test::uniform(random_, 0, 1) != 0) spec.remaining_ns = iterations * 10;
    if (test::uniform(random_, 0, 1) != 0) spec.iterations_total = iterations;
    const base::Status status = scheduler_.arrive(spec, now_);
    if (!status.ok()) {
      CHECK_FALSE(scheduler_.knows(spec.id));
      if (status.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY) CHECK_FALSE(spec.may_queue);
      return;
    }
    sessions_[spec.id].left = iterations;
    sessions_[spec.id].never_pages = spec.never_pages;
    carry_out();
  }

  // One random thing that may happen.
  void step() {
    now_ += test::uniform(random_, 0, 20);
    if (sessions_.empty()) return;
    auto chosen = sessions_.begin();
    std::advance(chosen, static_cast<long>(test::uniform(random_, 0, sessions_.size() - 1)));
    const SessionId id = chosen->first;
    Model& model = chosen->second;
    switch (test::uniform(random_, 0, 9)) {
      case 0:
      case 1:
        if (!model.ready && model.left > 0 && !scheduler_.owes(id)) {
          model.ready = true;
          --model.left;
          scheduler_.ready(id, now_);
        }
        break;
      case 2:
        if (model.ready && test::uniform(random_, 0, 3) == 0) {
          model.ready = false;
          ++model.left;
          scheduler_.not_ready(id, now_);
        }
        break;
      case 3:
        if (model.paging) end_move(id, true);
        break;
      case 4:
        if (test::uniform(random_, 0, 3) == 0) {
          const bool spare = test::uniform(random_, 0, 2) != 0;
          const bool done = scheduler_.set_spare(
              id, spare ? std::optional(static_cast<double>(test::uniform(random_, 0, 1000))) : std::nullopt,
              now_);
          if (model.dropping) CHECK_FALSE(done);
        }
        if (test::uniform(random_, 0, 9) == 0)
          scheduler_.set_priority(id, static_cast<int32_t>(test::uniform(random_, 0, 4)), now_);
        if (test::uniform(random_, 0, 9) == 0) scheduler_.wake(id, now_);
        if (test::uniform(random_, 0, 9) == 0) scheduler_.allow_paging(id, now_);
        break;
      case 5:
        if (test::uniform(random_, 0, 9) == 0) {
          const base::Status status =
              scheduler_.set_need(id, test::uniform(random_, 0, options_.capacity_bytes / 4),
                                  test::uniform(random_, 0, options_.capacity_bytes / 2), now_);
          if (!status.ok())
            CHECK((status.code() == GPUSHARE_DEVICE_OUT_OF_MEMORY ||
                   (status.code() == GPUSHARE_EXCEEDS_CAPACITY &&
                    scheduler_.capacity().target_bytes < options_.capacity_bytes)));
        }
        break;
      case 6:
        if (model.resident && !model.paging && model.flying == 0 && !model.ready &&
            test::uniform(random_, 0, 30) == 0)
          scheduler_.unplaced(id, now_);
        break;
      case 7:
        if (model.flying == 0 && test::uniform(random_, 0, 40) == 0) leave(id);
        break;
      case 8:
        if (test::uniform(random_, 0, 1) != 0) step_caches();
        [[fallthrough]];
      default:
        run_lanes();
        (void)finish_one();
    }
    carry_out();
  }

  void set_capacity(uint64_t bytes) {
    REQUIRE(scheduler_.set_capacity(bytes, now_).ok());
    REQUIRE(scheduler_.capacity().target_bytes == bytes);
    REQUIRE(scheduler_.capacity().effective_bytes == std::max(bytes, scheduler_.promised_bytes()));
    last_ = {bytes, scheduler_.capacity().effective_bytes};
    carry_out();
  }

  // Processes come, load code, and end: nobody is asked.
  void set_context_bytes(uint64_t bytes) {
    scheduler_.set_context_bytes(bytes, now_);
    REQUIRE(scheduler_.capacity().target_bytes == last_.target_bytes);
    REQUIRE(scheduler_.context_bytes() == bytes);
    last_.effective_bytes = std::max(last_.effective_bytes, scheduler_.promised_bytes());
    carry_out();
  }

  // Memory of shared lanes goes back late, and whoever has a turn may hang in it.
  void step_lanes() {
    if (test::uniform(random_, 0, 3) == 0) apply_lanes();
    if (!sessions_.empty()) {
      auto chosen = sessions_.begin();
      std::advance(chosen, static_cast<long>(test::uniform(random_, 0, sessions_.size() - 1)));
      if (test::uniform(random_, 0, 3) == 0) scheduler_.set_overdue(chosen->first, false, now_);
      carry_out();
    }
    if (test::uniform(random_, 0, 7) == 0) {
      run_lanes();
      for (const auto& [lane, flights] : flights_)
        if (!flights.empty()) {
          take_back(flights.front());
          break;
        }
    }
    scheduler_.look(now_);
    carry_out();
  }

  // Iterations in flight finish, copies end, and nothing new starts. Promises have then fallen to the capacity, as far as
  // sessions can be paged out.
  void rest() {
    nobody_wants_caches();
    for (const auto& [id, model] : sessions_) {
      scheduler_.set_overdue(id, false, now_);
      scheduler_.allow_paging(id, now_);
    }
    carry_out();
    int rounds = 0;
    for (bool moved = true; moved;) {
      moved = false;
      REQUIRE(++rounds < 1000);  // nobody goes back and forth
      while (finish_one()) carry_out();
      for (auto& [id, model] : sessions_) {
        if (!model.paging) continue;
        moved = true;
        end_move(id);
        break;
      }
      moved = end_one_drop() || moved;
      moved = apply_lanes() || moved;
      carry_out();
    }
    if (options_.paging && !stuck_)
      REQUIRE(scheduler_.promised_bytes() <= std::max(scheduler_.capacity().target_bytes, stays_bytes()));
  }

  // What nothing can make go: contexts, and the sessions that are never paged out.
  uint64_t stays_bytes() const {
    uint64_t bytes = scheduler_.context_bytes();
    std::map<LaneId, uint64_t> lanes;
    const auto rounded = [this](uint64_t need) {
      const uint64_t granule = std::max<uint64_t>(options_.granularity_bytes, 1);
      return (need + granule - 1) / granule * granule;
    };
    for (const auto& [id, model] : sessions_) {
      if (!model.never_pages || !model.resident) continue;
      const SessionView view = scheduler_.view(id);
      bytes += rounded(view.persistent_bytes);
      uint64_t& lane = lanes[scheduler_.lane_of(id)];
      lane = std::max(lane, rounded(view.ephemeral_bytes));
    }
    for (const auto& [lane, largest] : lanes) bytes += largest;
    return bytes;
  }

  // Everybody runs to the end; false if that takes too long.
  bool drain() {
    set_context_bytes(0);
    set_capacity(options_.capacity_bytes);
    nobody_wants_caches();
    for (uint64_t round = 0; round < 200'000 && !sessions_.empty(); ++round) {
      now_ += 5;
      apply_lanes();
      for (const auto& [id, model] : sessions_) {
        scheduler_.set_overdue(id, false, now_);
        scheduler_.allow_paging(id, now_);
      }
      std::vector<SessionId> moving;
      for (auto& [id, model] : sessions_) {
        if (!model.ready && model.left > 0) {
          model.ready = true;
          --model.left;
          scheduler_.ready(id, now_);
        }
        if (model.paging) moving.push_back(id);
      }
      for (const SessionId id : moving) end_move(id);
      carry_out();
      run_lanes();
      (void)finish_one();
      (void)end_one_drop();
      std::set<SessionId> done;
      for (const auto& [id, model] : sessions_)
        if (model.left == 0 && !model.ready && model.flying == 0) done.insert(id);
      for (const SessionId id : done) leave(id);
      carry_out();
    }
    for (const auto& [id, cache] : caches_) scheduler_.remove_cache(id, now_);
    return sessions_.empty();
  }

  Scheduler& scheduler() { return scheduler_; }
  size_t sessions() const { return sessions_.size(); }

 private:
  void leave(SessionId id) {
    scheduler_.leave(id, now_);
    sessions_.erase(id);
    stuck_ = false;
    CHECK_FALSE(scheduler_.knows(id));
  }

  // Its turn, while its iteration goes on.
  void take_back(SessionId id) {
    scheduler_.set_overdue(id, true, now_);
    std::vector<SessionId>& flights = flights_[scheduler_.lane_of(id)];
    while (sessions_.at(id).flying > 0) {
      std::erase(flights, id);
      --sessions_.at(id).flying;
      scheduler_.finished(id, test::uniform(random_, 1, 15), now_);
    }
  }

  // Ends a copy. A session that is being dropped leaves, or was copied all the same. A page-in that is to turn back does, or was
  // carried out already.
  void end_move(SessionId id, bool may_fail = false) {
    Model& model = sessions_.at(id);
    model.paging = false;
    const bool comes_in = std::exchange(model.comes_in, false);
    if (std::exchange(model.dropping, false) && test::uniform(random_, 0, 1) != 0)
      leave(id);
    else if (std::exchange(model.turns_back, false) && test::uniform(random_, 0, 3) != 0)
      turn_back(id);
    else if (may_fail && comes_in && test::uniform(random_, 0, 7) == 0)
      scheduler_.unplaced(id, now_);  // its driver found no place for it
    else if (may_fail && model.goes_out && test::uniform(random_, 0, 15) == 0)
      fail_move(id);
    else
      scheduler_.page_done(id, now_);
  }

  void turn_back(SessionId id) {
    if (test::uniform(random_, 0, 2) == 0)
      leave(id);
    else
      scheduler_.unplaced(id, now_);
  }

  // There is no room for it on the host: it stays where it is, until another session leaves.
  void fail_move(SessionId id) {
    scheduler_.page_out_failed(id, now_);
    stuck_ = true;
  }

  void run_lanes() {
    for (LaneId lane = 0; lane < scheduler_.lane_limit(); ++lane) {
      if (!scheduler_.lane_is_open(lane) || flights_[lane].size() >= depth_) continue;
      const auto picked = scheduler_.pick(lane, now_);
      if (!picked) continue;
      Model& model = sessions_.at(*picked);
      REQUIRE(model.ready);
      REQUIRE(model.resident);
      REQUIRE(scheduler_.lane_of(*picked) == lane);
      model.ready = false;
      ++model.flying;
      flights_[lane].push_back(*picked);
      if (options_.shared_lanes) {
        for (const auto& [other, flights] : flights_) REQUIRE((other == lane || flights.empty()));
        for (const auto& [id, other] : sessions_)  // who owes may still run there
          REQUIRE((!scheduler_.owes(id) || scheduler_.lane_of(id) != lane ||
                   scheduler_.trust_group_of(lane) == 0));
      }
      scheduler_.dispatched(*picked, lane, now_);
    }
  }

  void nobody_wants_caches() {
    for (const auto& [id, cache] : caches_)
      while (caches_.at(id).users > 0) let_go(id);
    carry_out();
  }

  void let_go(uint64_t id) {
    CacheModel& cache = caches_.at(id);
    --cache.users;
    scheduler_.unwant_cache(id, now_);
  }

  bool end_one_drop() {
    for (auto& [id, cache] : caches_) {
      if (!cache.dropping) continue;
      cache.dropping = cache.held = false;
      scheduler_.cache_dropped(id, now_);
      return true;
    }
    return false;
  }

  bool finish_one() {
    std::vector<LaneId> busy;
    for (const auto& [lane, flights] : flights_)
      if (!flights.empty()) busy.push_back(lane);
    if (busy.empty()) return false;
    auto& flights = flights_[busy[test::uniform(random_, 0, busy.size() - 1)]];
    const SessionId id = flights.front();
    flights.erase(flights.begin());
    --sessions_.at(id).flying;
    scheduler_.finished(id, test::uniform(random_, 1, 15), now_);
    return true;
  }

  void carry_out() {
    for (const Action& action : scheduler_.take_actions()) {
      switch (action.kind) {
        case ActionKind::kOpenLane:
          REQUIRE(flights_[action.lane].empty());
          size_lane(action.lane, scheduler_.lane_size(action.lane));
          break;
        case ActionKind::kCloseLane:
          REQUIRE(flights_[action.lane].empty());
          size_lane(action.lane, 0);
          break;
        case ActionKind::kResizeLane:
          size_lane(action.lane, scheduler_.lane_size(action.lane));
          break;
        case ActionKind::kAdmit:
          if (sessions_.contains(action.session)) sessions_.at(action.session).resident = true;
          break;
        case ActionKind::kPageOut:
          REQUIRE(sessions_.at(action.session).flying == 0);
          REQUIRE_FALSE(scheduler_.owes(action.session));
          sessions_.at(action.session).resident = false;
          sessions_.at(action.session).paging = sessions_.at(action.session).goes_out = true;
          break;
        case ActionKind::kDrop:
          REQUIRE(sessions_.at(action.session).flying == 0);
          sessions_.at(action.session).resident = false;
          sessions_.at(action.session).paging = sessions_.at(action.session).dropping = true;
          break;
        case ActionKind::kPageIn:
          sessions_.at(action.session).paging = true;
          sessions_.at(action.session).goes_out = sessions_.at(action.session).turns_back = false;
          sessions_.at(action.session).comes_in = true;
          break;
        case ActionKind::kTurnBack:
          sessions_.at(action.session).turns_back = sessions_.at(action.session).paging;
          break;
        case ActionKind::kFillCache:
          REQUIRE_FALSE(caches_.at(action.session).held);
          caches_.at(action.session).held = true;
          break;
        case ActionKind::kDropCache: {
          CacheModel& cache = caches_.at(action.session);
          REQUIRE(cache.held);
          for (const auto& [id, other] : caches_)
            if (id == action.session || other.first_part == action.session) REQUIRE(other.users == 0);
          cache.dropping = true;
          break;
        }
        case ActionKind::kTerms:
        case ActionKind::kMove:
          break;
      }
    }
    for (auto& [id, model] : sessions_) model.resident = scheduler_.state(id) == SessionState::kResident;
    const std::string broken = scheduler_.check();
    REQUIRE(broken == "");
    uint64_t in_lanes = 0;
    for (const auto& [lane, memory] : memory_) in_lanes += memory.bytes;
    REQUIRE(scheduler_.persistent_bytes() + in_lanes + scheduler_.context_bytes() <=
            scheduler_.promised_bytes());
    const Limit now = scheduler_.capacity();
    REQUIRE(scheduler_.promised_bytes() <= now.effective_bytes);
    REQUIRE(now.effective_bytes <= options_.capacity_bytes + scheduler_.context_bytes());
    REQUIRE(now.target_bytes == last_.target_bytes);
    REQUIRE(now.effective_bytes <= last_.effective_bytes);  // it only falls, until the target is raised
    last_ = now;
  }

  // As the daemon makes memory of shared lanes at once, and has it back when nobody has it mapped any more.
  void size_lane(LaneId lane, uint64_t bytes) {
    if (!options_.shared_lanes) return;
    LaneMemory& memory = memory_[lane];
    memory.wanted = bytes;
    if (bytes >= memory.bytes || bytes == 0) apply(lane, memory);
  }
  void apply(LaneId lane, LaneMemory& memory) {
    memory.bytes = memory.wanted;
    scheduler_.lane_applied(lane, memory.bytes, now_);
  }
  bool apply_lanes() {
    bool any = false;
    for (auto& [lane, memory] : memory_) {
      if (memory.bytes == memory.wanted) continue;
      any = true;
      apply(lane, memory);
    }
    return any;
  }

  test::Random& random_;
  Scheduler scheduler_;
  SchedulerOptions options_;
  uint32_t depth_;
  Limit last_{options_.capacity_bytes, options_.capacity_bytes};
  uint64_t now_ = 0;
  SessionId last_id_ = 0;
  bool stuck_ = false;  // a session that could not be paged out is there
  static constexpr uint64_t kFirstCache = 1'000'000;
  std::map<SessionId, Model> sessions_;
  std::map<uint64_t, CacheModel> caches_;
  std::map<LaneId, std::vector<SessionId>> flights_;
  std::map<LaneId, LaneMemory> memory_;
};

void soak(const std::string& policy, SchedulerOptions options, uint32_t depth, int steps,
          uint64_t& states_taken) {
  const uint64_t seed = test::seed();
  INFO("policy " << policy << ", depth " << depth << ", paging " << options.paging
                 << ", GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  Driver driver(random, std::move(*make_policy(policy)), options, depth);
  for (int i = 0; i < steps; ++i) {
    if (driver.sessions() < 25 && test::uniform(random, 0, 9) == 0)
      driver.arrive(test::uniform(random, 1, 40));
    driver.step();
    if (options.shared_lanes) driver.step_lanes();
    if (test::uniform(random, 0, 99) == 0)
      driver.set_capacity(test::uniform(random, options.capacity_bytes / 8, options.capacity_bytes));
    if (test::uniform(random, 0, 49) == 0)
      driver.set_context_bytes(test::uniform(random, 0, options.capacity_bytes / 4));
    if (test::uniform(random, 0, 499) == 0) driver.rest();
  }
  REQUIRE(driver.drain());
  states_taken |= driver.scheduler().states_taken();
  CHECK(driver.scheduler().promised_bytes() == 0);
  CHECK(driver.scheduler().lanes_open() == 0);
  CHECK(driver.scheduler().residents() == 0);
  CHECK(driver.scheduler().waiting() == 0);
}

// A policy of somebody's that is no order at all.
class Chaos final : public Policy {
 public:
  explicit Chaos(test::Random& random) : random_(random) {}
  std::string_view name() const override { return "chaos"; }
  Answers answers() const override {
    return {.before = true, .may_run = true, .gives_way = true, .may_join = true};
  }
  bool before(const SessionView&, const SessionView&) const override { return any(1) != 0; }
  uint64_t may_run(const SessionView&, const DeviceView&, uint64_t now_ns) const override {
    return now_ns + any(2);
  }
  GivesWay gives_way(const SessionView&, const SessionView&) const override {
    return static_cast<GivesWay>(any(3));
  }
  Share share(const SessionView&) const override {
    return {static_cast<Share::Kind>(any(2)), static_cast<double>(1 + any(7))};
  }
  MayJoin may_join(const SessionView&, const Joining&) const override {
    return any(3) == 0 ? MayJoin::kYes : static_cast<MayJoin>(any(2));
  }

 private:
  uint64_t any(uint64_t most) const { return test::uniform(random_, 0, most); }
  test::Random& random_;
};

}  // namespace

TEST_CASE("a policy without sense breaks no invariant, and the next policy takes over") {
  const uint64_t seed = test::seed();
  INFO("GPUSHARE_TEST_SEED=" << seed);
  test::Random random(seed);
  for (int round = 0; round < 5; ++round) {
    SchedulerOptions options;
    options.capacity_bytes = 1000;
    Driver driver(random, std::make_unique<Chaos>(random), options, 2);
    for (int i = 0; i < 10'000; ++i) {
      if (driver.sessions() < 25 && test::uniform(random, 0, 9) == 0)
        driver.arrive(test::uniform(random, 1, 40));
      driver.step();
      if (test::uniform(random, 0, 400) == 0) {
        const auto& names = policy_names();
        const uint64_t which = test::uniform(random, 0, names.size());
        driver.set_policy(which == names.size() ? std::make_unique<Chaos>(random)
                                                : std::move(*make_policy(names[which])));
      }
      if (test::uniform(random, 0, 99) == 0)
        driver.set_capacity(test::uniform(random, options.capacity_bytes / 8, options.capacity_bytes));
    }
    driver.set_policy(std::move(*make_policy(policy_names()[static_cast<size_t>(round)])));
    REQUIRE(driver.drain());
    CHECK(driver.scheduler().promised_bytes() == 0);
  }
}

TEST_CASE("random events keep every invariant and everybody gets through") {
  uint64_t states_taken = 0;
  for (const char* policy : policy_names()) {
    SchedulerOptions options;
    options.capacity_bytes = 1000;
    options.least_stay_ns = 200;
    soak(policy, options, 1, 60'000, states_taken);
    options.granularity_bytes = 16;
    options.lane_finder = LaneFinderKind::kBalanced;
    soak(policy, options, 3, 20'000, states_taken);
    options.paging = false;
    options.max_lanes = 2;
    options.lane_finder = LaneFinderKind::kCompact;
    soak(policy, options, 2, 20'000, states_taken);
    options = {};
    options.capacity_bytes = 1000;
    options.shared_lanes = true;
    soak(policy, options, 1, 30'000, states_taken);
  }
  // Each change of a session's bytes that the table lists has happened, but for those that need a driver which withdraws:
  // session_states_test.cpp takes these.
  for (size_t row = 0; row < kBytesTable.size(); ++row) {
    const auto [from, event, to] = kBytesTable[row];
    if (from == Bytes::kLeaving && event != BytesEvent::kStarted) continue;
    if (from == Bytes::kComing && event == BytesEvent::kUnplaced) continue;
    INFO(kBytesNames[static_cast<size_t>(kBytesTable[row].from)] << ", event "
                                                                 << static_cast<int>(kBytesTable[row].event));
    CHECK((states_taken >> row & 1) != 0);
  }
}
