// First layers that stay on the device: how many the plan asks for, who may keep them, that a switch which uses them
// delivers the image's bytes, and that they go when room is short.
// SPDX-License-Identifier: Apache-2.0
#include "loader/standby.hpp"

#include <atomic>
#include <thread>

#include "loader/switcher.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "unit/loader/loading.hpp"

using namespace gpushare;
using loader::LayerCost;
using loader::MemberState;
using test::kMiB;
using test::Loading;

namespace {

constexpr uint64_t kGranule = 2 * kMiB;

double overhead_ms(std::span<const LayerCost> layers, loader::GroupingCosts costs, uint32_t resident) {
  costs.resident_layers = resident;
  const double with = loader::plan_groups(layers, costs)->makespan_ms;
  costs.resident_layers = static_cast<uint32_t>(layers.size());
  return with - loader::plan_groups(layers, costs)->makespan_ms;
}

// The first of its `layers` layers is as large as all others together, so nothing hides it.
struct KeepingFirstLayers : Loading {
  explicit KeepingFirstLayers(const test::Setup& setup, uint64_t capacity_bytes,
                              loader::SwitcherOptions options)
      : Loading(setup, capacity_bytes, given_link()), budget_bytes(options.standby_bytes) {
    switcher = *loader::Switcher::open(loader, options);
  }
  // 1 GB/s and small overheads, whatever the machine does: what is wanted depends on it.
  static loader::LoaderOptions given_link() {
    loader::LoaderOptions options;
    options.link = {0.001, 1e6, 0.001};
    return options;
  }
  loader::MemberId add(int seed, uint32_t layers = 5, uint64_t ephemeral_bytes = kMiB, double weight = 1) {
    const std::string name = "m" + std::to_string(seed);
    std::vector<uint64_t> sizes;
    for (uint32_t l = 0; l < layers; ++l) sizes.push_back((l == 0 ? layers - 1 : 1) * kMiB / 2 + l * 3);
    loader::MemberOptions member;
    member.session = test::need(name, 0, ephemeral_bytes);
    member.session.weight = weight;
    member.image = image(name, sizes, seed);
    images.push_back(member.image);
    const auto id = switcher->add(std::move(member));
    REQUIRE(id.ok());
    members.push_back(*id);
    return *id;
  }
  // One iteration that looks at every byte, and then, if asked to, spoils them all; what is wrong.
  std::string run(loader::MemberId member, int seed, bool spoil = false) {
    auto turn = switcher->begin(member, GPUSHARE_NO_TIMEOUT);
    if (!turn.ok()) return turn.status().to_string();
    last_groups = turn->model->group_ends();
    const auto stream = *turn->iteration->stream();
    const auto layers = static_cast<uint32_t>(turn->model->image()->layers().size());
    std::string out;
    for (uint32_t layer = 0; layer < layers && out.empty(); ++layer) {
      const base::Status usable = turn->model->make_usable(layer, layer + 1, *stream);
      if (!usable.ok())
        out = usable.to_string();
      else if (runtime->device().can(GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE))
        out = wrong(*turn->model, layer, seed, *stream);
    }
    if (spoil && !stream->fill(turn->model->address(0), 0xee, turn->model->image()->bytes()).ok())
      out += " cannot spoil it";
    const base::Status ended = turn->iteration->end();
    check();
    return ended.ok() ? out : ended.to_string();
  }
  uint64_t kept(loader::MemberId member) const { return switcher->info(member)->standby_bytes; }
  void check() {
    CHECK(runtime->check() == "");
    const auto now = *runtime->info();
    CHECK(now.promised_bytes <= now.capacity_bytes);
    CHECK(switcher->info().standby_bytes <= budget_bytes);
    // The device has whole members, and first layers within the budget.
    uint64_t whole = 0;
    for (const loader::MemberId id : members)
      if (const auto info = switcher->info(id); info.ok()) whole += info->device_bytes;
    CHECK(now.persistent_bytes <= whole + budget_bytes);
  }

  const uint64_t budget_bytes;
  std::shared_ptr<loader::Switcher> switcher;
  std::vector<loader::MemberId> members;
  std::vector<std::shared_ptr<const loader::Image>> images;  // of each member added
  std::vector<uint32_t> last_groups;
};

loader::SwitcherOptions budget(uint64_t standby_bytes, uint64_t keep_bytes = 0) {
  loader::SwitcherOptions options;
  options.standby_bytes = standby_bytes;
  options.keep_bytes = keep_bytes;
  return options;
}

}  // namespace

TEST_CASE("the smallest prefix that does, as trying all of them finds") {
  test::Random random(test::seed());
  int some = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<LayerCost> layers(test::uniform(random, 1, 24));
    loader::GroupingCosts costs;
    costs.call_overhead_ms = 0.01 * static_cast<double>(test::uniform(random, 0, 5));
    costs.group_overhead_ms = 0.01 * static_cast<double>(test::uniform(random, 0, 5));
    double load_ms = costs.call_overhead_ms;
    for (LayerCost& layer : layers) {
      layer.bytes = test::uniform(random, 0, 8) == 0 ? 100'000 : test::uniform(random, 0, 10'000);
      layer.transmit_ms = static_cast<double>(layer.bytes) / 1000;
      layer.execution_ms = layer.transmit_ms * static_cast<double>(test::uniform(random, 5, 20)) / 10;
      load_ms += layer.transmit_ms;
    }
    loader::PrefixLimits limits;
    if (test::uniform(random, 0, 1) == 0) limits.most_bytes = test::uniform(random, 0, 150'000);
    limits.granule_bytes = test::uniform(random, 0, 1) == 0 ? 256 : 4096;
    const auto choice = loader::choose_prefix(layers, costs, limits);
    REQUIRE(choice.ok());
    const double aim = loader::kStandbyAim * load_ms;
    const double without = overhead_ms(layers, costs, 0);
    const auto bytes_of = [&](uint32_t count) {
      uint64_t end = 0;
      for (uint32_t i = 0; i < count; ++i) end = (end + 255) / 256 * 256 + layers[i].bytes;
      return (end + limits.granule_bytes - 1) / limits.granule_bytes * limits.granule_bytes;
    };
    uint32_t most = 0;
    while (most < layers.size() && bytes_of(most + 1) <= limits.most_bytes) ++most;
    INFO("round " << round << ", " << layers.size() << " layers, at most " << most << ", chosen "
                  << choice->layers);
    if (choice->layers == 0) {
      CHECK(choice->bytes == 0);
      const bool no_need = without <= aim;
      CHECK((no_need || most == 0 || without - overhead_ms(layers, costs, most) <= aim / 5 + 1e-9));
      continue;
    }
    ++some;
    REQUIRE(choice->layers <= most);
    CHECK(choice->bytes == bytes_of(choice->layers));
    CHECK(without > aim);
    CHECK(choice->overhead_ms == Approx(overhead_ms(layers, costs, choice->layers)));
    CHECK(choice->saves_ms == Approx(without - choice->overhead_ms));
    const double best = overhead_ms(layers, costs, most);
    CHECK(choice->overhead_ms <= std::max(aim, best) + 1e-6 * load_ms);
    // No smaller one does as well.
    for (uint32_t fewer = 1; fewer < choice->layers; ++fewer)
      CHECK(overhead_ms(layers, costs, fewer) > std::max(aim, best));
  }
  CHECK(some > 50);
}

TEST_CASE("with a copy on the device the smallest prefix that does, and otherwise nearly the best") {
  test::Random random(test::seed());
  int exact = 0, near = 0, slow = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<LayerCost> layers(test::uniform(random, 1, 24));
    loader::LinkCosts link;
    link.bytes_per_ms = 1000;
    link.call_overhead_ms = 0.01 * static_cast<double>(test::uniform(random, 0, 5));
    link.group_overhead_ms = 0.01 * static_cast<double>(test::uniform(random, 0, 5));
    // From slower than the link to much quicker; and not known.
    link.device_bytes_per_ms =
        static_cast<double>(test::uniform(random, 0, 6) * test::uniform(random, 1, 6) * 300);
    double load_ms = link.call_overhead_ms;
    for (LayerCost& layer : layers) {
      layer.bytes = test::uniform(random, 0, 8) == 0 ? 100'000 : test::uniform(random, 0, 10'000);
      layer.transmit_ms = static_cast<double>(layer.bytes) / link.bytes_per_ms;
      layer.execution_ms = layer.transmit_ms * static_cast<double>(test::uniform(random, 5, 20)) / 10;
      load_ms += layer.transmit_ms;
    }
    loader::PrefixLimits limits;
    limits.copied = &link;
    const auto choice = loader::choose_prefix(layers, link.grouping(), limits);
    REQUIRE(choice.ok());
    INFO("round " << round << ", " << layers.size() << " layers, device " << link.device_bytes_per_ms);
    // By trying all of them.
    const auto with_copy = [&](uint32_t count) {
      uint64_t end = 0;
      for (uint32_t i = 0; i < count; ++i) end = (end + 255) / 256 * 256 + layers[i].bytes;
      const auto all = static_cast<uint32_t>(layers.size());
      return loader::plan_groups(layers, link.grouping(count, end))->makespan_ms -
             loader::plan_groups(layers, link.grouping(all))->makespan_ms;
    };
    const double aim = loader::kStandbyAim * load_ms, without = with_copy(0);
    double best = without;
    uint32_t enough = 0;
    for (uint32_t count = static_cast<uint32_t>(layers.size()); count > 0; --count) {
      best = std::min(best, with_copy(count));
      if (with_copy(count) <= aim) enough = count;
    }
    CHECK(choice->overhead_ms == Approx(with_copy(choice->layers)));
    if (without <= aim) {
      CHECK(choice->layers == 0);
    } else if (enough > 0) {
      ++exact;
      CHECK(choice->layers == enough);
    } else {
      ++near;
      CHECK(choice->overhead_ms <= best + std::max(aim / 5, without / 16) + 1e-6 * load_ms);
      slow += choice->layers == 0;
    }
  }
  CHECK(exact > 50);
  CHECK(near > 20);
  CHECK(slow > 5);  // a device that copies slower than the link sends: none is worth it
}

TEST_CASE("what copies on the device cost is measured, learned, and part of the plan") {
  // sim: 2 bytes of memory traffic a byte copied.
  KeepingFirstLayers on(test::kSetups[2], 64 * kMiB, budget(32 * kMiB));
  const auto measured = loader::calibrate(on.runtime->device());
  REQUIRE(measured.ok());
  CHECK(measured->device_bytes_per_ms > 0);
  CHECK(on.loader->link().device_bytes_per_ms == 0);  // the link was given, this was not
  const loader::MemberId a = on.add(1, 24),
                         b = on.add(2, 24);  // of 23.5 MiB, 11.5 of them in the first layer
  for (const loader::MemberId member : {a, b, a, b, a, b}) {
    const auto turn = on.switcher->begin(member, GPUSHARE_NO_TIMEOUT);
    REQUIRE(turn.ok());
    REQUIRE(turn->model->wait(23, GPUSHARE_NO_TIMEOUT).ok());  // virtual time goes on while somebody waits
    REQUIRE(turn->iteration->end().ok());
  }
  REQUIRE(on.kept(a) >= loader::Loader::kTeachingBytes);
  const loader::LinkCosts link = on.loader->link();
  CHECK(link.device_bytes_per_ms == Approx(measured->device_bytes_per_ms).epsilon(0.05));
  CHECK(link.bytes_per_ms == 1e6);  // given: not corrected
  // Until the copy is done neither the link nor the lane has anything to do.
  const loader::GroupingCosts costs = link.grouping(1, 10'000'000);
  CHECK(costs.link_busy_ms == Approx(link.call_overhead_ms + 1e7 / link.device_bytes_per_ms));
  CHECK(costs.lane_busy_ms == costs.link_busy_ms);
  CHECK(link.grouping(1, 0).link_busy_ms == 0);
}

TEST_CASE("members on standby keep their first layers, and switches with them deliver the image's bytes") {
  for (const test::Setup& setup : test::kSetups) {
    INFO(setup.device);
    KeepingFirstLayers on(setup, 16 * kMiB, budget(5 * kMiB));
    const loader::MemberId a = on.add(1), b = on.add(2);  // of 4 MiB, of which 2 are the first layer
    CHECK(on.run(a, 1) == "");
    CHECK(on.kept(a) == 0);  // it is all there
    CHECK(on.kept(b) > 0);   // nobody asked for it yet, but room is room
    CHECK(on.last_groups.front() > 0);
    for (int round = 0; round < 4; ++round) {
      // Changes that an iteration makes to its weights are lost with them: the first layers too come as the image has them.
      CHECK(on.run(b, 2, true) == "");
      CHECK(on.kept(a) >= 2 * kMiB);
      CHECK(on.kept(b) >= 2 * kMiB);
      CHECK(on.last_groups.front() == 1);
      CHECK(on.run(a, 1, true) == "");
      CHECK(on.last_groups.front() == 1);
    }
    CHECK(on.switcher->info(a)->device_bytes >= 4 * kMiB);
    CHECK(on.switcher->info(b)->device_bytes == 0);
    CHECK(on.switcher->info(b)->state == MemberState::kStandby);
    REQUIRE(on.switcher->remove(b).ok());
    on.check();
    CHECK(on.switcher->info().standby_bytes <= 3 * kMiB);
    REQUIRE(on.switcher->close().ok());
    CHECK(on.runtime->info()->promised_bytes == 0);
    CHECK(on.runtime->close().ok());
  }
}

TEST_CASE("without a budget nothing of a member on standby is on the device") {
  KeepingFirstLayers on(test::kSetups[0], 16 * kMiB, budget(0));
  const loader::MemberId a = on.add(1), b = on.add(2);
  for (int round = 0; round < 3; ++round) {
    CHECK(on.run(a, 1) == "");
    CHECK(on.run(b, 2) == "");
    CHECK(on.switcher->info().standby_bytes == 0);
    CHECK(on.runtime->info()->sessions_resident == 1);
  }
}

TEST_CASE("a budget for one is for a member that is away, stays with it, and goes to whom is wanted most") {
  KeepingFirstLayers on(test::kSetups[0], 24 * kMiB, budget(kGranule + kMiB));
  const loader::MemberId all[] = {on.add(1), on.add(2), on.add(3)};
  const auto holder = [&]() -> loader::MemberId {
    for (const loader::MemberId id : all)
      if (on.kept(id) > 0) return id;
    return 0;
  };
  for (int round = 0; round < 9; ++round)
    for (const loader::MemberId id : all) {
      const loader::MemberId before = holder();
      CHECK(on.run(id, static_cast<int>(id)) == "");
      CHECK(holder() != 0);
      CHECK(holder() != id);  // it is all there: others need it more
      // From here on no count of requests is a quarter above another.
      if (round > 5 && before != id) CHECK(holder() == before);
      CHECK(on.kept(holder()) == on.switcher->info().standby_bytes);
    }
  // A member that is wanted far more often gets the budget, also from another member that holds it.
  for (int i = 0; i < 200; ++i) REQUIRE((*on.switcher->begin(all[1], 0)).iteration->end().ok());
  CHECK(on.run(all[0], 1) == "");
  CHECK(holder() == all[1]);
  CHECK(on.run(all[2], 3) == "");
  CHECK(holder() == all[1]);
}

TEST_CASE("what executions teach is worked out behind a turn, not on the way of a switch") {
  KeepingFirstLayers on(test::kSetups[0], 24 * kMiB, budget(8 * kMiB));
  const loader::MemberId a = on.add(1), b = on.add(2);
  const auto executes = [&](double ms) {
    for (int i = 0; i < 64; ++i) on.images[0]->profile().observe(0, 5, ms);
  };
  CHECK(on.run(a, 1) == "");
  executes(1e-6);  // in no time, so all that is not on the device is waited for
  CHECK(on.run(b, 2) == "");
  const uint64_t all = on.kept(a);
  CHECK(all > kGranule + kMiB);
  CHECK(on.run(a, 1) == "");
  executes(1e6);  // long enough to hide all layers but the first
  CHECK(on.run(b, 2) == "");
  CHECK(on.kept(a) == all);
  CHECK(on.run(a, 1) == "");
  CHECK(on.run(b, 2) == "");
  CHECK(on.kept(a) < all);  // the first layer, or nothing where copies on the device were learned to be slow
}

TEST_CASE("first layers go before a member that needs room, and before anything else of the runtime") {
  // Room for one member and its work (4 + 2 MiB), and for one prefix beside it.
  KeepingFirstLayers on(test::kSetups[0], 10 * kMiB, budget(64 * kMiB));
  const loader::MemberId a = on.add(1), b = on.add(2);
  CHECK(on.run(a, 1) == "");
  CHECK(on.run(b, 2) == "");
  CHECK(on.run(a, 1) == "");
  CHECK(on.switcher->info().standby_bytes > 0);
  // A session that takes what the first layers had: they go with the next switch, which finds room all the same.
  executor::SessionOptions other = test::need("other", 2 * kMiB, 256);
  other.allow_queueing = true;
  auto queued = on.runtime->open_session(other);
  REQUIRE(queued.ok());
  CHECK(on.run(b, 2) == "");
  CHECK(on.run(a, 1) == "");
  CHECK((*queued)->wait_admitted(0).ok());
  REQUIRE((*queued)->close().ok());
  CHECK(on.run(b, 2) == "");
  CHECK(on.run(a, 1) == "");
  CHECK(on.kept(b) > 0);
}

TEST_CASE("first layers that were paged out for a session of a higher class are dropped, not used") {
  executor::RuntimeOptions options;
  KeepingFirstLayers on(test::kSetups[0], 16 * kMiB, budget(8 * kMiB));
  REQUIRE(on.runtime->set_policy(std::move(*sched::make_policy("priority"))).ok());
  const loader::MemberId a = on.add(1), b = on.add(2);
  CHECK(on.run(a, 1) == "");
  CHECK(on.run(b, 2) == "");
  CHECK(on.run(a, 1) == "");
  REQUIRE(on.kept(b) > 0);
  // All that is free, and what the first layers have.
  const auto info = *on.runtime->info();
  const auto guest = on.runtime->open_session(
      test::need("guest", info.capacity_bytes - info.promised_bytes + 2 * kGranule - 2 * kMiB, 256));
  if (guest.ok()) (void)(*guest)->wait_admitted(0);
  CHECK(on.run(a, 1) == "");
  if (guest.ok()) REQUIRE((*guest)->close().ok());
  CHECK(on.run(b, 2) == "");
  CHECK(on.run(a, 1) == "");
  CHECK(on.runtime->check() == "");
}

TEST_CASE("faults at every call of a switch with first layers leave the bytes right or an error") {
  for (const uint32_t kind :
       {uint32_t{GPUSHARE_FAULT_LAUNCH_FAILS}, uint32_t{GPUSHARE_FAULT_STREAM_CREATE_FAILS},
        uint32_t{GPUSHARE_FAULT_DEVICE_OUT_OF_MEMORY}, uint32_t{GPUSHARE_FAULT_MAP_FAILS}}) {
    for (uint64_t call = 1; call <= 8; call += test::kFaultStep) {
      INFO("fault " << kind << " at " << call);
      KeepingFirstLayers on(test::kSetups[0], 12 * kMiB, budget(5 * kMiB));
      const loader::MemberId a = on.add(1), b = on.add(2);
      REQUIRE(on.run(a, 1) == "");
      REQUIRE(on.run(b, 2) == "");
      REQUIRE(test::inject(on.runtime->device(), kind, call).ok());
      const auto failed = on.switcher->begin(a, GPUSHARE_NO_TIMEOUT);
      REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_NONE, 1).ok());
      if (failed.ok()) (void)failed->iteration->end();
      const auto probe = on.runtime->open_session(test::need("probe", 0, 256));
      if (probe.status().code() == GPUSHARE_DEVICE_LOST) continue;  // a lane's stream took the device along
      if (probe.ok()) REQUIRE((*probe)->close().ok());
      CHECK(on.run(b, 2) == "");
      CHECK(on.run(a, 1) == "");
      CHECK(on.run(b, 2) == "");
    }
  }
}

TEST_CASE("first layers give way again once the load that would have used them has failed") {
  bool failed = false;
  for (uint64_t call = 1; call <= 8 && !failed; ++call) {
    INFO("a launch fails at " << call);
    KeepingFirstLayers on(test::kSetups[0], 12 * kMiB, budget(5 * kMiB));
    const loader::MemberId a = on.add(1), b = on.add(2);
    REQUIRE(on.run(a, 1) == "");
    REQUIRE(on.run(b, 2) == "");
    REQUIRE(on.kept(a) > 0);
    REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_LAUNCH_FAILS, call).ok());
    const auto turn = on.switcher->begin(a, GPUSHARE_NO_TIMEOUT);
    REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_NONE, 1).ok());
    if (turn.ok()) (void)turn->iteration->end();
    if (turn.ok() || on.kept(a) == 0 ||
        on.runtime->synchronize(GPUSHARE_NO_TIMEOUT).code() == GPUSHARE_DEVICE_LOST)
      continue;
    failed = true;
    // Nothing else of the switcher's is on the device, or all of it gives way.
    const auto other = on.runtime->open_session(test::need("other", 10 * kMiB, 256));
    INFO(other.status().to_string());
    CHECK(other.ok());
    CHECK(on.kept(a) == 0);
  }
  CHECK(failed);
}

TEST_CASE("first layers give way again once their member's session could not be opened") {
  for (const test::Setup& setup : test::kSetups) {
    INFO(setup.device);
    KeepingFirstLayers on(setup, 12 * kMiB, budget(5 * kMiB));
    const loader::MemberId a = on.add(1), refused = on.add(2, 5, kMiB, -1);  // no session has such a weight
    REQUIRE(on.run(a, 1) == "");
    REQUIRE(on.kept(refused) > 0);
    for (int round = 0; round < 2; ++round)
      CHECK(on.switcher->begin(refused, GPUSHARE_NO_TIMEOUT).status().code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(on.kept(refused) > 0);
    // Nothing else of the switcher's is on the device.
    const auto other = on.runtime->open_session(test::need("other", 10 * kMiB, 256));
    INFO(other.status().to_string());
    CHECK(other.ok());
    CHECK(on.kept(refused) == 0);
    on.check();
  }
}

TEST_CASE("threads switch at random within a budget for some while members come and go") {
  for (const test::Setup& setup : {test::kSetups[0], test::kSetups[1]}) {
    INFO(setup.device);
    KeepingFirstLayers on(setup, 18 * kMiB, budget(2 * kGranule + kMiB, 6 * kMiB));
    constexpr int kMembers = 4;
    loader::MemberId members[kMembers];
    for (int i = 0; i < kMembers; ++i) members[i] = on.add(i + 1);
    std::atomic<int> wrong{0};
    std::mutex what_mutex;
    std::string what;
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&, t] {
        test::Random random(test::seed() + static_cast<uint64_t>(t));
        for (int round = 0; round < 10; ++round) {
          const auto pick = static_cast<int>(test::uniform(random, 0, kMembers - 1));
          auto turn = on.switcher->begin(members[pick], GPUSHARE_NO_TIMEOUT);
          std::string said = turn.ok() ? "" : turn.status().to_string();
          if (turn.ok()) {
            const auto stream = *turn->iteration->stream();
            for (uint32_t layer = 0; layer < 5 && said.empty(); ++layer) {
              (void)turn->model->make_usable(layer, layer + 1, *stream);
              if (on.runtime->device().can(GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE))
                said = Loading::wrong(*turn->model, layer, pick + 1, *stream);
            }
            if (test::uniform(random, 0, 4) == 0)
              (void)turn->iteration->fail({GPUSHARE_CALLBACK_FAILED, "planned"});
            else
              (void)turn->iteration->end();
          }
          if (on.switcher->info().standby_bytes > on.budget_bytes) said += " above the budget";
          if (said.empty()) continue;
          ++wrong;
          const std::lock_guard<std::mutex> lock(what_mutex);
          what = said;
        }
      });
    for (std::thread& thread : threads) thread.join();
    INFO(what);
    CHECK(wrong == 0);
    on.check();
    CHECK(on.switcher->close().ok());
    CHECK(on.runtime->info()->promised_bytes == 0);
  }
}
