// Loading into sessions: readiness in every form, unloading at any time, profiles and plans, what goes wrong.
// SPDX-License-Identifier: Apache-2.0
#include "loader/model.hpp"

#include <atomic>
#include <thread>

#include "loader/profile.hpp"
#include "support/catch.hpp"
#include "support/model_folder.hpp"
#include "support/random.hpp"
#include "unit/loader/loading.hpp"

using namespace gpushare;
using test::kMiB;
using test::Loading;

TEST_CASE("a model is loaded into a session and usable layer by layer on its first iteration") {
  for (const test::Setup& setup : test::kSetups) {
    INFO(setup.device);
    Loading on(setup);
    const auto image = on.image("m", 12, 40'000, 3);
    const auto session = test::open_session(*on.runtime, test::need("s", image->bytes(), kMiB));
    std::atomic<uint32_t> groups{0}, out_of_order{0};
    loader::LoadOptions options;
    options.ends = {1, 5, 12};
    options.on_group = [&](size_t group, uint32_t first, uint32_t end) {
      if (group != groups.load() || first >= end) ++out_of_order;
      ++groups;
      if (group == 1) throw std::runtime_error("a callback may throw");
    };
    const auto model = on.loader->load(session, image, options);
    INFO(model.status().to_string());
    REQUIRE(model.ok());
    {
      const auto iteration = session->begin(GPUSHARE_NO_TIMEOUT);
      REQUIRE(iteration.ok());
      const auto stream = *(*iteration)->stream();
      for (uint32_t layer = 0; layer < 12; ++layer) {
        REQUIRE((*model)->make_usable(layer, layer + 1, *stream).ok());
        if (on.runtime->device().can(GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE))
          CHECK(Loading::wrong(**model, layer, 3, *stream) == "");
      }
      REQUIRE((*model)->mark_end(*stream).ok());
      CHECK((*model)->make_usable(0, 0, *stream).code() == GPUSHARE_INVALID_ARGUMENT);
      CHECK((*model)->make_usable(3, 13, *stream).code() == GPUSHARE_INVALID_ARGUMENT);
      REQUIRE((*iteration)->end().ok());
    }
    REQUIRE((*model)->wait(11, GPUSHARE_NO_TIMEOUT).ok());
    CHECK((*model)->wait(11, 0).ok());
    CHECK((*model)->wait(12, 0).code() == GPUSHARE_INVALID_ARGUMENT);
    CHECK(*(*model)->arrived(0));
    CHECK((*model)->arrived_ns(2).ok());
    CHECK(groups == 3);
    CHECK(out_of_order == 0);
    const auto block = on.runtime->find((*model)->address(0));
    REQUIRE(block.ok());
    CHECK(block->kind == memory::Kind::kModel);
    CHECK(block->bytes == image->bytes());
    CHECK(on.runtime->check() == "");
    // Unloading frees the block, once; late calls are told.
    REQUIRE((*model)->unload().ok());
    CHECK((*model)->unload().ok());
    CHECK(session->info().persistent_bytes == 0);
    CHECK((*model)->wait(0, 0).code() == GPUSHARE_INVALID_STATE);
    CHECK((*model)->arrived(0).status().code() == GPUSHARE_INVALID_STATE);
    REQUIRE(session->close().ok());
    CHECK(on.runtime->close().ok());
  }
}

TEST_CASE("models are unloaded, sessions and runtimes closed while copies are under way") {
  for (const char* device :
       {"host?total_bytes=268435456&copy_gbps=0.2", "sim?total_bytes=268435456&copy_gbps=1"}) {
    for (const auto layout : {memory::Layout::kVirtual, memory::Layout::kContiguous}) {
      for (int how = 0; how < 5; ++how) {
        INFO(device << " way " << how);
        Loading on({device, layout});
        const auto image = on.image("m", 6, 500'000, 1);
        const auto session = test::open_session(*on.runtime, test::need("s", image->bytes(), kMiB));
        auto model = on.loader->load(session, image, {});
        REQUIRE(model.ok());
        switch (how) {
          case 0:
            REQUIRE((*model)->unload().ok());
            break;
          case 1:  // the bytes go to another session while copies into them are under way
            REQUIRE(session->close().ok());
            break;
          case 2:
            REQUIRE(session->cancel().ok());
            (void)on.runtime->synchronize(GPUSHARE_NO_TIMEOUT);
            break;
          case 3:
            model = base::Status(GPUSHARE_UNKNOWN, "dropped");
            break;
          default:
            break;
        }
        if (how < 4) {
          const auto other = test::open_session(*on.runtime, test::need("t", image->bytes(), kMiB));
          const auto second = on.loader->load(other, image, {});
          REQUIRE(second.ok());
          REQUIRE((*second)->wait(5, GPUSHARE_NO_TIMEOUT).ok());
          const auto iteration = *other->begin(GPUSHARE_NO_TIMEOUT);
          const auto stream = *iteration->stream();
          if (on.runtime->device().can(GPUSHARE_DEVICE_CAP_HOST_ADDRESSABLE))
            for (uint32_t layer = 0; layer < 6; ++layer)
              CHECK(Loading::wrong(**second, layer, 1, *stream) == "");
          REQUIRE(iteration->end().ok());
        }
        CHECK(on.runtime->close().ok());  // nothing of the device is left with anybody
        if (model.ok()) CHECK((*model)->wait(0, 0).code() == GPUSHARE_INVALID_STATE);
        CHECK(on.loader->load(session, image, {}).status().code() == GPUSHARE_INVALID_STATE);
        CHECK(on.loader->open_image("/nowhere", {}).status().code() == GPUSHARE_INVALID_STATE);
      }
    }
  }
}

TEST_CASE("what cannot be loaded is refused and leaves nothing") {
  Loading on(test::kSetups[0]);
  Loading elsewhere(test::kSetups[0]);
  const auto image = on.image("m", 4, 1 << 20, 1);
  const auto session = test::open_session(*on.runtime, test::need("s", image->bytes(), kMiB));
  const auto stranger = test::open_session(*elsewhere.runtime, test::need("s", image->bytes(), kMiB));
  CHECK(on.loader->load(stranger, image, {}).status().code() == GPUSHARE_INVALID_ARGUMENT);
  for (const auto& ends : {std::vector<uint32_t>{4, 4}, {2}, {5}, {3, 2, 4}}) {
    loader::LoadOptions options;
    options.ends = ends;
    CHECK(on.loader->load(session, image, options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
  loader::LoadOptions times;
  times.execution_ms = {1, 2};
  CHECK(on.loader->load(session, image, times).status().code() == GPUSHARE_INVALID_ARGUMENT);
  times.execution_ms = {1, 2, 3, -1};
  CHECK(on.loader->load(session, image, times).status().code() == GPUSHARE_INVALID_ARGUMENT);
  const auto model = on.loader->load(session, image, {});
  REQUIRE(model.ok());
  const auto side = *elsewhere.runtime->create_stream(0);
  CHECK((*model)->make_usable(0, 1, *side).code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK((*model)->mark_end(*side).code() == GPUSHARE_INVALID_ARGUMENT);
  // The same for a session that has ended, and one too small that cannot grow.
  executor::SessionOptions small = test::need("small", kMiB, kMiB);
  small.quota_bytes = 2 * kMiB;
  const auto bounded = test::open_session(*on.runtime, small);
  CHECK(on.loader->load(bounded, image, {}).status().code() == GPUSHARE_QUOTA_EXCEEDED);
  REQUIRE(session->close().ok());
  CHECK(on.loader->load(session, image, {}).status().code() == GPUSHARE_INVALID_STATE);
  loader::LoaderOptions options;
  for (const uint64_t chunk_bytes : {uint64_t{0}, uint64_t{32} << 10, uint64_t{100'000}, uint64_t{2} << 30}) {
    options.chunk_bytes = chunk_bytes;
    CHECK(loader::Loader::open(on.runtime, options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  }
  options.chunk_bytes = 1 << 20;
  options.read.reads_in_flight = 65;
  CHECK(loader::Loader::open(on.runtime, options).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(on.loader->create_image("n", {{"a", 0, 10}}, std::vector<const void*>{nullptr}).status().code() ==
        GPUSHARE_INVALID_ARGUMENT);
  CHECK(on.loader->create_image("n", {{"a", 0, 10}}, {}).status().code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(on.runtime->check() == "");
  REQUIRE(on.runtime->close().ok());
  CHECK(loader::Loader::open(on.runtime, {}).status().code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("a copy that fails fails the load, and the next load works") {
  for (uint64_t call = 1; call <= 4; ++call) {
    Loading on(test::kSetups[1]);
    const auto image = on.image("m", 4, 100'000, 1);
    const auto session = test::open_session(*on.runtime, test::need("s", 2 * image->bytes(), kMiB));
    REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_LAUNCH_FAILS, call).ok());
    CHECK(on.loader->load(session, image, {}).status().code() == GPUSHARE_UNKNOWN);
    REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_NONE, 1).ok());
    CHECK(session->info().persistent_bytes == 0);
    const auto model = on.loader->load(session, image, {});
    REQUIRE(model.ok());
    CHECK((*model)->wait(3, GPUSHARE_NO_TIMEOUT).ok());
    CHECK(on.runtime->check() == "");
  }
  Loading on(test::kSetups[0]);
  const auto image = on.image("m", 4, 100'000, 1);
  const auto session = test::open_session(*on.runtime, test::need("s", image->bytes(), kMiB));
  REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_DEVICE_LOST, 2).ok());
  const auto lost = on.loader->load(session, image, {});
  if (lost.ok()) CHECK((*lost)->wait(3, GPUSHARE_NO_TIMEOUT).code() == GPUSHARE_DEVICE_LOST);
  CHECK(on.loader->load(session, image, {}).status().code() == GPUSHARE_DEVICE_LOST);
  REQUIRE(test::inject(on.runtime->device(), GPUSHARE_FAULT_NONE, 1).ok());
}

TEST_CASE("a wait for a layer keeps to its timeout") {
  Loading on({"host?total_bytes=268435456&copy_gbps=0.05", memory::Layout::kContiguous});
  const auto image = on.image("m", 2, 2'000'000, 1);
  const auto session = test::open_session(*on.runtime, test::need("s", image->bytes(), kMiB));
  loader::LoadOptions options;
  options.ends = {1, 2};
  base::Status inside;
  std::shared_ptr<loader::Model> known;
  std::atomic<bool> ready{false};
  options.on_group = [&](size_t group, uint32_t, uint32_t) {
    if (group == 0) {
      while (!ready) std::this_thread::yield();
      inside = known->wait(1, GPUSHARE_NO_TIMEOUT);
    }
  };
  const auto model = on.loader->load(session, image, options);
  REQUIRE(model.ok());
  known = *model;
  CHECK((*model)->wait(1, 0).code() == GPUSHARE_TIMED_OUT);
  CHECK((*model)->wait(1, 1'000'000).code() == GPUSHARE_TIMED_OUT);
  ready = true;
  CHECK((*model)->wait(1, 60'000'000'000).ok());
  CHECK(inside.code() == GPUSHARE_INVALID_STATE);
}

TEST_CASE("transmissions and calibration teach what the link does") {
  // On sim the clock is exact. One lane, so that a full device has none that could give way.
  Loading on({"sim?total_bytes=268435456&copy_gbps=10", memory::Layout::kContiguous}, 128 * kMiB, {}, 1);
  CHECK_FALSE(on.loader->link_known());
  const auto image = on.image("m", 8, 1 << 20, 1);
  const auto session = test::open_session(*on.runtime, test::need("s", image->bytes(), kMiB));
  {
    const auto model = on.loader->load(session, image, {});
    REQUIRE((*model)->wait(7, GPUSHARE_NO_TIMEOUT).ok());
    CHECK(on.loader->link_known());  // by the first wait for all of it
  }
  CHECK(on.loader->link().bytes_per_ms == Approx(10e6).epsilon(0.3));
  REQUIRE(on.loader->calibrate().ok());
  CHECK(on.loader->link().bytes_per_ms == Approx(10e6).epsilon(0.02));
  CHECK(on.runtime->info()->promised_bytes < 64 * kMiB);  // the calibration's session is gone
  // A full device has no room for a calibration.
  const auto full = test::open_session(
      *on.runtime, test::need("full", 128 * kMiB - on.runtime->info()->promised_bytes, kMiB));
  CHECK(on.loader->calibrate().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY);
  // Given costs stay.
  loader::LoaderOptions given;
  given.link = {0.01, 5e6, 0.02};
  Loading fixed({"sim?total_bytes=268435456&copy_gbps=10", memory::Layout::kContiguous}, 64 * kMiB, given);
  const auto same = fixed.image("m", 8, 1 << 20, 1);
  const auto user = test::open_session(*fixed.runtime, test::need("s", same->bytes(), kMiB));
  const auto model = fixed.loader->load(user, same, {});
  REQUIRE((*model)->wait(7, GPUSHARE_NO_TIMEOUT).ok());
  CHECK(fixed.loader->link().bytes_per_ms == 5e6);
}

TEST_CASE("executions marked by make_usable refine the profile and the plan") {
  Loading on({"sim?total_bytes=268435456&copy_gbps=1", memory::Layout::kContiguous});
  const auto image = on.image("m", 4, 1 << 20, 1);
  const auto session = test::open_session(*on.runtime, test::need("s", image->bytes(), kMiB));
  const auto model = on.loader->load(session, image, {});
  REQUIRE(model.ok());
  CHECK(image->profile().execution_ms().empty());
  // Layers 0, 1 take 4 ms together, layer 2 6 ms, layer 3 1 ms; the wait for the link is not counted.
  for (int run = 0; run < 6; ++run) {
    const auto iteration = *session->begin(GPUSHARE_NO_TIMEOUT);
    const auto stream = *iteration->stream();
    const uint64_t times_ns[] = {4'000'000, 6'000'000, 1'000'000};
    for (uint32_t part = 0; part < 3; ++part) {
      REQUIRE((*model)->make_usable(part == 0 ? 0 : part + 1, part + 2, *stream).ok());
      REQUIRE(test::enqueue(*stream, times_ns[part]).ok());
    }
    REQUIRE((*model)->mark_end(*stream).ok());
    REQUIRE(test::enqueue(*stream, 50'000'000).ok());  // not the model's
    REQUIRE(iteration->end().ok());
    REQUIRE(on.runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  }
  const std::vector<double> ms = image->profile().execution_ms();
  REQUIRE(ms.size() == 4);
  CHECK(ms[0] + ms[1] == Approx(4).epsilon(0.01));
  CHECK(ms[0] == Approx(ms[1]).epsilon(0.01));
  CHECK(ms[2] == Approx(6).epsilon(0.01));
  CHECK(ms[3] == Approx(1).epsilon(0.01));
  CHECK(image->profile().observations() >= 5 * 3);
}

TEST_CASE("what sending takes is told in 64 bits, however slow the link") {
  loader::LinkCosts link;
  CHECK(link.send_ns(1000) == 0);  // not known
  link.bytes_per_ms = 1e3;
  CHECK(link.send_ns(1000) == 1'000'000);
  link.bytes_per_ms = 1e-9;
  CHECK(link.send_ns(1ull << 40) == UINT64_MAX);
}

TEST_CASE("a profile shares time among layers, forgets slowly, and replans when it pays") {
  loader::Profile profile({1'000'000, 1'000'000, 2'000'000, 2'000'000});
  const loader::LinkCosts link{0.01, 1e6, 0.02};
  const auto first = profile.plan(link);
  REQUIRE(first.ok());
  profile.observe(0, 4, 6);  // by bytes
  CHECK(profile.execution_ms() == std::vector<double>{1, 1, 2, 2});
  profile.observe(0, 2, 6);  // a quarter of the way from 1 to 3
  CHECK(profile.execution_ms()[0] == Approx(1.5));
  CHECK(profile.execution_ms()[2] == Approx(2));
  // Nonsense is ignored.
  profile.observe(2, 2, 1);
  profile.observe(3, 5, 1);
  profile.observe(0, 1, -1);
  profile.observe(0, 1, std::numeric_limits<double>::quiet_NaN());
  CHECK(profile.observations() == 2);
  // A small change keeps the plan, a large one changes it.
  const auto kept = profile.plan(link);
  profile.observe(0, 4, 5.9);
  CHECK(*profile.plan(link) == *kept);
  const uint64_t replans = profile.replans();
  for (int i = 0; i < 60; ++i) profile.observe(0, 4, 0.0001);
  for (int i = 0; i < 60; ++i) profile.observe(3, 4, 50);
  const auto changed = profile.plan({0.5, 1e6, 0.5});  // dear calls and quick layers: one group does
  REQUIRE(changed.ok());
  CHECK(changed->size() == 1);
  CHECK(profile.replans() == replans + 1);
  // Layers never seen are taken to be as fast as those seen.
  loader::Profile partly({1000, 3000});
  partly.observe(0, 1, 2);
  CHECK(partly.execution_ms() == std::vector<double>{2, 6});
}

TEST_CASE("threads load, use, unload and close sessions at once") {
  for (const test::Setup& setup : {test::kSetups[0], test::kSetups[1]}) {
    Loading on(setup);
    const auto image = on.image("m", 5, 60'000, 2);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        test::Random random(test::seed() + static_cast<uint64_t>(t));
        for (int round = 0; round < 25; ++round) {
          executor::SessionOptions need = test::need("s" + std::to_string(t), image->bytes(), kMiB);
          const auto session = on.runtime->open_session(need);
          if (!session.ok()) continue;
          const auto model = on.loader->load(*session, image, {});
          if (!model.ok()) {
            ++wrong;
            continue;
          }
          const uint64_t what = test::uniform(random, 0, 3);
          if (what == 0) (void)(*model)->unload();
          if (what == 1) (void)(*session)->close();
          if (what > 1) {
            const auto iteration = (*session)->begin(GPUSHARE_NO_TIMEOUT);
            if (!iteration.ok()) {
              ++wrong;
              continue;
            }
            const auto stream = *(*iteration)->stream();
            for (uint32_t layer = 0; layer < 5; ++layer) {
              if (!(*model)->make_usable(layer, layer + 1, *stream).ok()) ++wrong;
              if (Loading::wrong(**model, layer, 2, *stream) != "") ++wrong;
            }
            (void)(*model)->mark_end(*stream);
            (void)(*iteration)->end();
          }
          (void)(*session)->close();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(on.runtime->check() == "");
    CHECK(on.runtime->info()->persistent_bytes == 0);
    CHECK(on.runtime->close().ok());
  }
}

TEST_CASE("a runtime that closes waits for a loader that another thread drops") {
  Loading loading({"host?total_bytes=268435456&copy_gbps=0.1", memory::Layout::kVirtual});
  const auto session = test::open_session(*loading.runtime, test::need("s", 32 * kMiB, kMiB));
  {
    const auto image = loading.image("m", 4, 4 * kMiB, 1);
    const auto model = loading.loader->load(session, image, {});
    REQUIRE(model.ok());
    REQUIRE((*model)->unload().ok());  // its copies go on for 160 ms; the loader keeps what they read
  }
  const std::weak_ptr<loader::Loader> gone = loading.loader;
  std::thread dropper([&] { loading.loader.reset(); });
  while (!gone.expired()) std::this_thread::yield();
  const base::Status closed = loading.runtime->close();
  dropper.join();
  INFO(closed.to_string());
  CHECK(closed.ok());
}

TEST_CASE("a runtime closes while another thread gives models back that are on their way") {
  for (int round = 0; round < 20; ++round) {
    Loading loading({"host?total_bytes=268435456&copy_gbps=2", memory::Layout::kVirtual});
    const auto session = test::open_session(*loading.runtime, test::need("s", 32 * kMiB, kMiB));
    const auto image = loading.image("m", 4, kMiB, 1);
    std::vector<std::shared_ptr<loader::Model>> models;
    for (int i = 0; i < 4; ++i) {
      const auto model = loading.loader->load(session, image, {});
      REQUIRE(model.ok());
      models.push_back(*model);
    }
    std::thread releaser([&] {
      for (auto& model : models) {
        (void)model->unload();
        model.reset();
        std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
      }
    });
    const base::Status closed = loading.runtime->close();
    releaser.join();
    INFO(closed.to_string());
    CHECK(closed.ok());
  }
}

TEST_CASE("the last of a model and of its loader may go inside a group's callback") {
  for (const test::Setup& setup : test::kSetups) {
    for (const bool wait : {true, false}) {
      INFO(setup.device << ", " << wait);
      const bool sim = std::string(setup.device).starts_with("sim");
      if (sim && wait) continue;  // its callbacks run while somebody waits for the device
      Loading on(setup);
      const auto session = test::open_session(*on.runtime, test::need("s", 16 * kMiB, kMiB));
      std::shared_ptr<loader::Model> last;
      std::atomic<bool> given{false}, gone{false};
      loader::LoadOptions options;
      options.ends = {1, 2, 3};
      options.on_group = [&](size_t group, uint32_t, uint32_t) {
        if (group != 0) return;
        while (!given) std::this_thread::yield();
        last.reset();
        gone = true;
      };
      {
        auto model = on.loader->load(session, on.image("m", 3, kMiB, 1), options);
        REQUIRE(model.ok());
        last = std::move(*model);
      }
      on.loader.reset();
      given = true;
      while (wait && !gone) std::this_thread::yield();
      while (wait && on.runtime->info()->persistent_bytes > 0) std::this_thread::yield();
      CHECK(on.runtime->close().ok());
      CHECK(gone);
    }
  }
}

// Memory that is not promised goes back to the device at once, so copies that outlive their session write to nothing.
TEST_CASE("a runtime that closes waits for a calibration's copies, and the calibration says so") {
  for (const memory::Layout layout : {memory::Layout::kVirtual, memory::Layout::kContiguous}) {
    for (int round = 0; round < 3; ++round) {
      Loading on({"host?total_bytes=268435456&copy_gbps=4", layout}, 96 * kMiB);
      REQUIRE(on.runtime->set_capacity(64 * kMiB).ok());
      base::Status calibrated;
      std::thread calibrates([&] { calibrated = on.loader->calibrate(); });
      while (on.runtime->info()->persistent_bytes == 0) std::this_thread::yield();
      const base::Status closed = on.runtime->close();
      calibrates.join();
      INFO(closed.to_string());
      CHECK(closed.ok());
      INFO(calibrated.to_string());
      CHECK((calibrated.ok() || calibrated.code() == GPUSHARE_INVALID_STATE));
      CHECK(on.loader->calibrate().code() == GPUSHARE_INVALID_STATE);
    }
  }
}

TEST_CASE("a model that a thread waits for is not unloaded in a callback of its copies: the call says so") {
  Loading on(test::kSetups[0]);
  const auto session = test::open_session(*on.runtime, test::need("s", 16 * kMiB, kMiB));
  std::atomic<loader::Model*> loaded{nullptr};
  std::atomic<bool> waiting{false};
  base::Status unloaded;
  loader::LoadOptions options;
  options.ends = {1, 2, 3};
  options.on_group = [&](size_t group, uint32_t, uint32_t) {
    if (group != 0) return;
    while (!waiting) std::this_thread::yield();
    for (int i = 0; i < 2000; ++i)
      std::this_thread::yield();  // until the other thread is inside, most likely
    unloaded = loaded.load()->unload();
  };
  const auto model = on.loader->load(session, on.image("m", 3, kMiB, 1), options);
  REQUIRE(model.ok());
  loaded = model->get();
  waiting = true;
  const base::Status waited = (*model)->wait(2, GPUSHARE_NO_TIMEOUT);
  CHECK((waited.ok() || waited.code() == GPUSHARE_INVALID_STATE));
  CHECK(on.runtime->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  CHECK((*model)->unload().ok());
  INFO(unloaded.to_string());
  CHECK((unloaded.ok() || unloaded.code() == GPUSHARE_INVALID_STATE));
  CHECK(session->close().ok());
  CHECK(on.runtime->close().ok());
}

TEST_CASE("a model that goes gives its image's host memory back at once, for the next one") {
  const test::ModelFolder folder;
  test::Random random(test::seed());
  const std::string path = folder.make("m.safetensors", {300'000}, random);
  loader::LoaderOptions options;
  options.keep = {.ns = UINT64_MAX, .available_share = [] { return 1.0; }};
  Loading on(test::kSetups[0], 64 * kMiB, options);
  loader::ReadOptions once = on.loader->read_options();
  once.once = true;
  uint64_t kept = 0;
  for (int round = 0; round < 3; ++round) {
    const auto session = test::open_session(*on.runtime, test::need("s", kMiB, kMiB));
    auto image = on.loader->open_image(path, once);
    REQUIRE(image.ok());
    CHECK(on.loader->images().misses() == static_cast<uint64_t>(round) + 1);
    auto model = *on.loader->load(session, *image, {});
    image = base::Status(GPUSHARE_NOT_FOUND, "");
    REQUIRE(model->wait(0, GPUSHARE_NO_TIMEOUT).ok());
    CHECK(on.loader->images().images() == 1);
    model.reset();
    CHECK(on.loader->images().images() == 0);
    CHECK(on.loader->chunks().kept_bytes() >= 300'000);
    if (round == 0) kept = on.loader->chunks().kept_bytes();
    CHECK(on.loader->chunks().kept_bytes() == kept);
    REQUIRE(session->close().ok());
  }
}
