// Loading and switching over the cuda backend, on the stand-in for the driver: bytes and readiness, each driver call
// refused at its n-th time, a copy that poisons the context, captures of CUDA graphs. After each the driver holds
// nothing and nothing was done wrong.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "loader/switcher.hpp"
#include "unit/device/cuda/standin_support.hpp"
#include "unit/loader/loading.hpp"

using namespace gpushare;
using namespace standin_test;  // NOLINT(google-build-using-namespace)
using test::kMiB;
using test::Loading;

namespace {

constexpr memory::Layout kLayouts[] = {memory::Layout::kVirtual, memory::Layout::kContiguous};
constexpr uint32_t kModelLayers = 6;

test::Setup setup(memory::Layout layout) {
  return {"cuda:0?driver=" GPUSHARE_CUDA_STANDIN "&total_bytes=268435456", layout};
}

// The first failure of a scenario, where going on makes no sense.
struct Outcome {
  base::Status status;
  std::string wrong;  // bytes that differ
};

// One iteration that uses every layer and looks at its bytes.
Outcome use(executor::Session& session, loader::Model& model, int seed) {
  const auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
  if (!iteration.ok()) return {iteration.status(), {}};
  Outcome out;
  const auto stream = (*iteration)->stream();
  out.status = stream.status();
  for (uint32_t layer = 0; layer < kModelLayers && out.status.ok() && out.wrong.empty(); ++layer) {
    out.status = model.make_usable(layer, layer + 1, **stream);
    if (!out.status.ok()) break;
    std::vector<char> back(model.image()->layers()[layer].bytes);
    out.status = (*stream)->copy(reinterpret_cast<uintptr_t>(back.data()), model.address(layer), back.size(),
                                 GPUSHARE_COPY_DEVICE_TO_HOST);
    if (out.status.ok()) out.status = (*stream)->synchronize();
    if (out.status.ok()) out.wrong = Loading::difference(back, seed, layer);
  }
  const base::Status marked = out.status.ok() ? model.mark_end(**stream) : base::Status();
  const base::Status ended = (*iteration)->end();
  if (out.status.ok()) out.status = marked.ok() ? ended : marked;
  return out;
}

// Opens a session, loads, uses and unloads. A copy that failed late is told by wait.
Outcome load_once(Loading& on, const std::shared_ptr<const loader::Image>& image, int seed) {
  const auto session = on.runtime->open_session(test::need("s", image->bytes(), kMiB));
  if (!session.ok()) return {session.status(), {}};
  loader::LoadOptions options;
  options.ends = {1, 4, kModelLayers};
  std::atomic<int> groups{0};
  options.on_group = [&groups](size_t, uint32_t, uint32_t) { ++groups; };
  Outcome out;
  {
    const auto model = on.loader->load(*session, image, options);
    out.status = model.status();
    if (out.status.ok()) {
      out = use(**session, **model, seed);
      const base::Status arrived = (*model)->wait(kModelLayers - 1, GPUSHARE_NO_TIMEOUT);
      if (out.status.ok()) out.status = arrived;
      const base::Status unloaded = (*model)->unload();
      if (out.status.ok()) out.status = unloaded;
    }
  }
  const base::Status closed = (*session)->close();
  if (out.status.ok()) out.status = closed;
  // The callbacks run before the session's memory is anybody else's.
  if (out.status.ok() && groups != 3) out.wrong = "callbacks: " + std::to_string(groups);
  return out;
}

struct DriverCall {
  const char* name;
  int result;  // CUresult
};
constexpr DriverCall kCalls[] = {
    {"cuMemcpyHtoDAsync", 999}, {"cuMemcpyHtoDAsync", 2},  {"cuMemHostAlloc", 2},
    {"cuMemAlloc", 2},          {"cuMemCreate", 2},        {"cuMemMap", 2},
    {"cuMemSetAccess", 2},      {"cuEventCreate", 2},      {"cuEventRecord", 999},
    {"cuStreamWaitEvent", 999}, {"cuLaunchHostFunc", 999}, {"cuStreamCreateWithPriority", 2}};

}  // namespace

TEST_CASE("a model is loaded over the driver: bytes, readiness in every form, waits of every kind") {
  for (const memory::Layout layout : kLayouts) {
    for (const char* wait : {"", "&wait=spin", "&wait=callback"}) {
      const std::string device = std::string(setup(layout).device) + wait;
      INFO(device);
      {
        Loading on({device.c_str(), layout});
        const auto image = on.image("m", kModelLayers, 150'000, 3);
        const Outcome out = load_once(on, image, 3);
        INFO(out.status.to_string() << " " << out.wrong);
        CHECK(out.status.ok());
        CHECK(out.wrong.empty());
        CHECK(on.runtime->check() == "");
        REQUIRE(on.loader->calibrate().ok());
        CHECK(on.loader->link().bytes_per_ms > 0);
        CHECK(on.runtime->close().ok());
      }
      check_clean();
    }
  }
}

TEST_CASE(
    "a driver call refused while a model is loaded, for every n: a clear status, then the next load works") {
  const memory::Layout layout = GENERATE(from_range(std::begin(kLayouts), std::end(kLayouts)));
  const DriverCall call = GENERATE(from_range(std::begin(kCalls), std::end(kCalls)));
  for (uint64_t n = 1;; ++n) {
    INFO("layout " << static_cast<int>(layout) << ": " << call.name << " fails at call " << n);
    REQUIRE(n < 1000);
    bool fired = false;
    {
      Loading on(setup(layout));
      const uint64_t before = standin_calls(call.name);
      standin_fail_call(call.name, n, call.result);
      // The image is pinned memory: without room for it there is none.
      std::vector<loader::Layer> layers;
      const std::vector<char> bytes(150'000);
      std::vector<const void*> sources(kModelLayers, bytes.data());
      for (uint32_t l = 0; l < kModelLayers; ++l) layers.push_back({std::to_string(l), 0, bytes.size()});
      const auto refused = on.loader->create_image("refused", std::move(layers), sources);
      Outcome out{refused.status(), {}};
      if (refused.ok()) out = load_once(on, *refused, 0);
      fired = standin_calls(call.name) - before >= n;
      standin_clear_faults();
      INFO(out.status.to_string() << " " << out.wrong);
      if (!out.status.ok()) {
        CHECK(fired);
        CHECK_FALSE(out.status.message().empty());
      }
      const auto info = on.runtime->info();
      REQUIRE(info.ok());
      // A stream whose end cannot be marked is a lost device to the runtime; else nothing has happened.
      if (out.status.code() != GPUSHARE_DEVICE_LOST) {
        CHECK(on.runtime->check() == "");
        const auto image = on.image("m", kModelLayers, 150'000, 5);
        const Outcome again = load_once(on, image, 5);
        INFO("again: " << again.status.to_string() << " " << again.wrong);
        CHECK(again.status.ok());
        CHECK(again.wrong.empty());
      }
      (void)on.runtime->close();
    }
    check_clean();
    if (!fired) break;
  }
}

TEST_CASE("a copy that poisons the context: everybody is told the cause, and all can be closed") {
  for (const memory::Layout layout : kLayouts) {
    for (uint64_t n = 1; n <= 8; ++n) {
      INFO("layout " << static_cast<int>(layout) << ", copy " << n);
      {
        Loading on(setup(layout));
        const auto image = on.image("m", kModelLayers, 150'000, 3);
        standin_fail_work("cuMemcpyHtoDAsync", n, 700);
        const Outcome out = load_once(on, image, 3);
        standin_clear_faults();
        INFO(out.status.to_string());
        CHECK(out.status.code() == GPUSHARE_DEVICE_LOST);
        CHECK(out.status.message().find("CUDA_ERROR_ILLEGAL_ADDRESS") != std::string::npos);
        const Outcome again = load_once(on, image, 3);
        CHECK(again.status.code() == GPUSHARE_DEVICE_LOST);
        (void)on.runtime->close();
      }
      check_clean();
    }
  }
}

TEST_CASE("models take turns on a device with room for one, also when a driver call is refused in a switch") {
  for (const memory::Layout layout : kLayouts) {
    for (const char* call : {"", "cuMemcpyHtoDAsync", "cuEventRecord", "cuMemMap", "cuEventCreate"}) {
      INFO("layout " << static_cast<int>(layout) << ", refused: " << call);
      {
        Loading on(setup(layout), 8 * kMiB);
        const auto switcher = *loader::Switcher::open(on.loader, {});
        loader::MemberId members[2];
        for (int seed = 0; seed < 2; ++seed) {
          loader::MemberOptions member;
          member.session = test::need("m" + std::to_string(seed), 0, kMiB);
          member.image = on.image("m" + std::to_string(seed), kModelLayers, 600'000, seed);
          members[seed] = *switcher->add(std::move(member));
        }
        uint64_t refusals = 0;
        bool lost = false;
        for (int round = 0; round < 24 && !lost; ++round) {
          const int seed = round % 2;
          if (*call != '\0' && round % 4 == 2) standin_fail_call(call, 1 + static_cast<uint64_t>(round), 999);
          auto turn = switcher->begin(members[seed], GPUSHARE_NO_TIMEOUT);
          if (!turn.ok()) {
            ++refusals;
            CHECK_FALSE(turn.status().message().empty());
            lost = turn.status().code() == GPUSHARE_DEVICE_LOST;
            continue;
          }
          const auto stream = *turn->iteration->stream();
          std::string wrong;
          base::Status status;
          for (uint32_t layer = 0; layer < kModelLayers && wrong.empty() && status.ok(); ++layer) {
            status = turn->model->make_usable(layer, layer + 1, *stream);
            if (status.ok()) wrong = Loading::wrong(*turn->model, layer, seed, *stream);
          }
          const base::Status ended = turn->iteration->end();
          lost = ended.code() == GPUSHARE_DEVICE_LOST;
          if (*call == '\0') {
            INFO(status.to_string());
            CHECK(status.ok());
            CHECK(ended.ok());
            CHECK(wrong.empty());
          }
          CHECK(wrong.find("differs") == std::string::npos);
        }
        standin_clear_faults();
        if (*call == '\0') {
          CHECK(refusals == 0);
          CHECK(switcher->info().switches == 24);
        }
        if (!lost) {
          CHECK(on.runtime->check() == "");
          for (const loader::MemberId member : members) {
            auto turn = switcher->begin(member, GPUSHARE_NO_TIMEOUT);
            INFO(turn.status().to_string());
            REQUIRE(turn.ok());
            CHECK(turn->iteration->end().ok());
          }
        }
        CHECK(switcher->close().ok());
        (void)on.runtime->close();
      }
      check_clean();
    }
  }
}

TEST_CASE(
    "what was pinned serves the calibration, the next image and every switch, which cost the driver next to "
    "nothing") {
  REQUIRE(standin_configure("costs", 1) == 0);
  for (const memory::Layout layout : kLayouts) {
    INFO("layout " << static_cast<int>(layout));
    {
      loader::LoaderOptions options;
      options.keep.ns = UINT64_MAX;
      options.keep.available_share = [] { return 1.0; };
      Loading on(setup(layout), 32 * kMiB, options);
      const uint64_t before = standin_calls("cuMemHostAlloc");
      on.image("first", kModelLayers, 2 * kMiB, 1).reset();
      on.image("second", kModelLayers, 600'000, 2).reset();  // the first one gives way to it
      const uint64_t pinned = standin_calls("cuMemHostAlloc");
      CHECK(pinned > before);
      REQUIRE(on.loader->calibrate().ok());
      const auto switcher = *loader::Switcher::open(on.loader, {});
      loader::MemberId members[2];
      for (int seed = 0; seed < 2; ++seed) {
        loader::MemberOptions member;
        member.session = test::need("m" + std::to_string(seed), 0, kMiB);
        member.image = on.image("m" + std::to_string(seed), kModelLayers, 700'000, seed);
        members[seed] = *switcher->add(std::move(member));
      }
      uint64_t cost = 0;
      constexpr int kRounds = 10;
      for (int round = -2; round < kRounds; ++round) {
        if (round == 0) cost = standin_cost_ns();
        auto turn = switcher->begin(members[round & 1], GPUSHARE_NO_TIMEOUT);
        REQUIRE(turn.ok());
        CHECK(turn->model->wait(kModelLayers - 1, GPUSHARE_NO_TIMEOUT).ok());
        REQUIRE(turn->iteration->end().ok());
      }
      // A switch sends 4.2 MB, 84 us at 50 GB/s.
      CHECK((standin_cost_ns() - cost) / kRounds <= 4'000);
      CHECK(standin_calls("cuMemHostAlloc") == pinned);
      CHECK(switcher->info().switches == kRounds + 2);
      CHECK(switcher->close().ok());
      REQUIRE(on.runtime->close().ok());
    }
    check_clean();
  }
  REQUIRE(standin_configure("costs", 0) == 0);
}

TEST_CASE("no load pins anything, and into memory that is there it takes a twentieth of the link's time") {
  REQUIRE(standin_configure("costs", 1) == 0);
  for (const memory::Layout layout : kLayouts) {
    INFO("layout " << static_cast<int>(layout));
    {
      Loading on(setup(layout), 128 * kMiB);
      CUcontext context = nullptr;
      REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
      REQUIRE(cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
      const auto image = on.image("m", kModelLayers, 16 * kMiB, 1);  // what it takes to pin is spent here
      for (const bool memory_is_there : {false, true}) {
        const uint64_t pinned = standin_calls("cuMemHostAlloc"), cost = standin_cost_ns();
        const auto session = on.runtime->open_session(test::need("s", image->bytes(), kMiB));
        REQUIRE(session.ok());
        const auto model = on.loader->load(*session, image, {});
        REQUIRE(model.ok());
        CHECK((*model)->wait(kModelLayers - 1, GPUSHARE_NO_TIMEOUT).ok());
        CHECK(standin_calls("cuMemHostAlloc") == pinned);
        const uint64_t link_ns = image->bytes() / 50;  // at 50 GB/s
        if (memory_is_there) CHECK(standin_cost_ns() - cost <= link_ns / 20);
        CHECK((*model)->unload().ok());
        REQUIRE((*session)->close().ok());
        REQUIRE(cuCtxSynchronize() == CUDA_SUCCESS);  // memory whose last work has not ended is not there
      }
      REQUIRE(on.runtime->close().ok());
      REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
      REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    }
    check_clean();
  }
  REQUIRE(standin_configure("costs", 0) == 0);
}

TEST_CASE("layers that have arrived can be used in a capture, others are refused there and then") {
  for (const memory::Layout layout : kLayouts) {
    {
      Loading on(setup(layout));
      CUcontext context = nullptr;
      REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
      REQUIRE(cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
      const auto image = on.image("m", kModelLayers, 150'000, 3);
      const auto session = test::open_session(*on.runtime, test::need("s", 2 * image->bytes() + kMiB, kMiB));
      const auto out = session->alloc(memory::Kind::kFramework, 1, 0);
      REQUIRE(out.ok());
      std::atomic<bool> gate{false};
      loader::LoadOptions options;
      options.ends = {1, kModelLayers};
      options.on_group = [&gate](size_t group, uint32_t, uint32_t) {
        while (group == 1 && !gate) std::this_thread::yield();
      };
      const auto model = on.loader->load(session, image, options);
      REQUIRE(model.ok());
      REQUIRE((*model)->wait(0, GPUSHARE_NO_TIMEOUT).ok());
      const auto iteration = *session->begin(GPUSHARE_NO_TIMEOUT);
      const auto stream = *iteration->stream();
      const auto native = static_cast<CUstream>(*stream->native());
      REQUIRE(cuStreamBeginCapture_v2(native, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
      CHECK((*model)->make_usable(0, 1, *stream).ok());
      const base::Status refused = (*model)->make_usable(1, kModelLayers, *stream);
      INFO(refused.to_string());
      CHECK(refused.code() == GPUSHARE_INVALID_STATE);
      CHECK(refused.message().find("captures a CUDA graph") != std::string::npos);
      const base::Status loading = on.loader->load(session, image, {}).status();
      INFO(loading.to_string());
      CHECK(loading.code() == GPUSHARE_INVALID_STATE);
      CHECK(loading.message().find("captures a CUDA graph") != std::string::npos);
      gate = true;
      REQUIRE((*model)->wait(kModelLayers - 1, GPUSHARE_NO_TIMEOUT).ok());
      CHECK((*model)->make_usable(1, kModelLayers, *stream).ok());
      REQUIRE(cuMemcpyDtoDAsync_v2(*out, (*model)->address(2), 1, native) == CUDA_SUCCESS);
      CHECK((*model)->mark_end(*stream).ok());
      CUgraph graph = nullptr;
      CUgraphExec exec = nullptr;
      REQUIRE(cuStreamEndCapture(native, &graph) == CUDA_SUCCESS);
      REQUIRE(cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS);
      REQUIRE(cuGraphDestroy(graph) == CUDA_SUCCESS);
      REQUIRE(cuGraphLaunch(exec, native) == CUDA_SUCCESS);
      char found = 0;
      REQUIRE(stream->copy(reinterpret_cast<uintptr_t>(&found), *out, 1, GPUSHARE_COPY_DEVICE_TO_HOST).ok());
      REQUIRE(stream->synchronize().ok());
      CHECK(found == Loading::value(3, 2, 0));
      REQUIRE(iteration->end().ok());
      REQUIRE(cuGraphExecDestroy(exec) == CUDA_SUCCESS);
      REQUIRE((*model)->unload().ok());
      REQUIRE(session->close().ok());
      REQUIRE(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
      REQUIRE(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
      CHECK(on.runtime->close().ok());
    }
    check_clean();
  }
}
