// The C++ API beside sessions and iterations: version, policies, log, backends, placement, plans, the out-of-memory callback.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstring>
#include <gpushare/gate.hpp>
#include <gpushare/gpushare.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"

namespace gs = gpushare;

namespace {

// Frees the block that it is shown, once.
struct Spare {
  gs::Runtime* runtime;
  gs::Address block;
  int asked;
};
int32_t free_spare(void* user_data, uint64_t /*session_id*/, uint64_t /*bytes*/) {
  auto* spare = static_cast<Spare*>(user_data);
  ++spare->asked;
  if (spare->block == 0) return 0;
  spare->runtime->free(spare->block);
  spare->block = 0;
  return 1;
}

// A framework's allocator.
void allocator() {
  gs::RuntimeOptions options;
  options.device = "sim";
  gs::Runtime runtime = gs::Runtime::open(options);
  gs::Session session = runtime.open_session({});
  gs::Allocator allocator(runtime);
  allocator.set_default_session(&session);
  void* const none = gs::Allocator::no_native_stream;
  allocator.begin_pool({0, 1}, [](void*) { return true; });
  const gs::Address pooled = allocator.alloc(1000, none);
  CHECK(allocator.base(pooled).address != pooled);
  allocator.end_pool({0, 1});
  allocator.free(pooled, none);
  allocator.release_pool({0, 1});
  gs::Iteration step = session.begin_iteration();
  const gs::Address kept = allocator.alloc(1000, none);
  allocator.record_use(kept, step.stream().native());
  allocator.end_iteration(step);
  CHECK(!step);
  CHECK(allocator.info(&session).current_bytes >= 1000);
  allocator.reset_peaks();
  (void)allocator.trim();
  allocator.set_memory_fraction(1.0);
  allocator.set_default_session(nullptr);
  allocator.bind_thread(&session);
  allocator.bind_thread(nullptr);
  allocator.close_session(std::move(session));
  CHECK(runtime.info().sessions_resident == 1);
  allocator.free(kept, none);
  CHECK(runtime.info().sessions_resident == 0);
}

// Four iterations that fail: weights and session stay, the iterations' memory goes.
void abandoned(gs::Runtime& runtime, const gs::SessionOptions& need) {
  gs::Session session = runtime.open_session(need);
  char* const weights = session.alloc_model<char>(64);
  std::memset(weights, 7, 64);
  const uint64_t held = session.info().persistent_bytes;
  const auto goes_on = [&](const char* what) {
    const gpushare_session_info info = session.info();
    check(info.state == GPUSHARE_SESSION_RESIDENT && info.status == GPUSHARE_OK, what);
    check(info.ephemeral_bytes == 0 && info.persistent_bytes == held && weights[63] == 7, what);
    session.run([](gs::Iteration&) {}).get();
  };
  try {
    gs::Iteration iteration = session.begin_iteration();
    iteration.alloc_bytes(1 << 20);
    throw std::runtime_error("boom");
  } catch (const std::runtime_error&) {
    goes_on("an exception that leaves an iteration");
  }
  const auto fails = [&](const auto& function, const char* what) {
    try {
      session.run(function).get();
      check(false, what);
    } catch (const gs::Error& error) {
      check(error.status() == GPUSHARE_CALLBACK_FAILED, what);
      check(std::string(error.what()).find("threw: boom") != std::string::npos, error.what());
    }
    goes_on(what);
  };
  const auto throws = [](gs::Iteration& iteration) {
    iteration.alloc_bytes(1 << 20);
    throw std::runtime_error("boom");
  };
  const auto launches = [](gs::Iteration& iteration) {
    iteration.stream().launch_host([] { throw std::runtime_error("boom"); });
  };
  fails(throws, "a submitted iteration that throws");
  fails(launches, "a host function of a submitted iteration");
  {
    gs::Iteration iteration = session.begin_iteration();
    iteration.stream().launch_host([] { throw std::runtime_error("boom"); });
    iteration.stream().synchronize();
  }
  check(status_of([&] { session.begin_iteration(); }) == GPUSHARE_CALLBACK_FAILED, "the next begin tells");
  session.begin_iteration().end();  // and the one after it goes on
  goes_on("a host function that throws");
}

}  // namespace

int main() {
  check(gs::version() == GPUSHARE_VERSION_STRING && gs::version_number() == GPUSHARE_VERSION, "version");
  check(gs::policies() == std::vector<std::string>{"fifo", "srtf", "pack", "fair", "priority"}, "policies");
  check(!gs::devices().empty() && gs::devices()[0].status == GPUSHARE_OK, "devices");
  gs::set_log([](void*, int32_t, const char*) {}, nullptr, GPUSHARE_LOG_DEBUG);
  gs::set_log(nullptr);
  check(status_of([] { gs::set_log(nullptr, nullptr, 99); }) == GPUSHARE_INVALID_ARGUMENT, "no such level");
  check(status_of([] { gs::load_backend("relative.so"); }) == GPUSHARE_INVALID_ARGUMENT, "a relative path");
  check(status_of([] { gs::load_backend("/nowhere/backend.so"); }) == GPUSHARE_NOT_FOUND, "no plug-in");
  gpushare_backend_ops none{};
  check(status_of([&] { gs::register_backend(none); }) == GPUSHARE_INVALID_ARGUMENT, "an empty table");

  // Two that never meet share a place; the third lives beside both.
  const gs::Placement placed = gs::solve_placement({{0, 2, 4096}, {2, 4, 4096}, {0, 4, 1024}});
  check(placed.offsets.size() == 3 && placed.offsets[0] == placed.offsets[1] && placed.arena_bytes == 5120,
        "placement");
  check(status_of([] {
          gs::solve_placement({{2, 1, 8}});
        }) == GPUSHARE_INVALID_ARGUMENT,
        "a lifetime that ends first");
  check(gs::solve_placement({}).arena_bytes == 0, "nothing to place");

  // 1 GB/s and a millisecond each way: one group arrives after 2 ms and is done after 4, two are done after 3.
  gpushare_link_costs link = GPUSHARE_LINK_COSTS_INIT;
  link.bytes_per_s = 1'000'000'000;
  const gs::Plan plan = gs::solve_plan(link, {1'000'000, 1'000'000}, {1'000'000, 1'000'000});
  check(plan.ends == std::vector<uint32_t>{1, 2} && plan.makespan == std::chrono::milliseconds(3), "plan");
  link.group_overhead_ns = 10'000'000;  // now one group is less than two
  check(gs::solve_plan(link, {1'000'000, 1'000'000}).ends == std::vector<uint32_t>{2}, "a plan of one group");
  check(status_of([&] { gs::solve_plan(link, {1, 2}, {1}); }) == GPUSHARE_INVALID_ARGUMENT, "a time too few");

  gs::RuntimeOptions options;
  options.device = "host";
  options.capacity_bytes = 16 << 20;
  gs::Runtime runtime = gs::Runtime::open(options);
  gs::SessionOptions need;
  need.persistent_bytes = 8 << 20;
  need.ephemeral_bytes = 2 << 20;
  gs::Session session = runtime.open_session(need);
  Spare spare{&runtime, session.alloc_bytes(gs::Kind::model, 6 << 20), 0};
  runtime.set_out_of_memory_callback(free_spare, &spare);
  const gs::Address block = session.alloc_bytes(gs::Kind::model, 12 << 20);  // fits once the spare is gone
  check(spare.asked == 1 && spare.block == 0, "asked once, and tried again");
  check(runtime.block_info(block).bytes == 12 << 20 && runtime.block_info(block).address == block, "a block");
  check(status_of([&] { runtime.block_info(block + 1); }) == GPUSHARE_NOT_FOUND, "an address inside a block");
  runtime.set_out_of_memory_callback(nullptr, nullptr);
  check(status_of([&] { session.alloc_bytes(gs::Kind::model, 8 << 20); }) != GPUSHARE_OK && spare.asked == 1,
        "nobody is asked");

  // An exception abandons its iteration, wherever it was thrown, and the session goes on.
  need.persistent_bytes = 1 << 20;
  abandoned(runtime, need);

  // With fail_on_error an exception of a host function ends its session, with the message.
  need.fail_on_error = true;
  gs::Session thrower = runtime.open_session(need);
  {
    gs::Iteration iteration = thrower.begin_iteration();
    iteration.stream().launch_host([] { throw std::runtime_error("boom"); });
    (void)status_of([&] { iteration.end(); });
  }
  check(runtime.synchronize(), "synchronized");
  check(thrower.info().status == GPUSHARE_CALLBACK_FAILED, "a host function that throws");
  try {
    thrower.run([](gs::Iteration&) {}).get();
    check(false, "a failed session runs nothing");
  } catch (const gs::Error& error) {
    check(std::string(error.what()).find("threw: boom") != std::string::npos, error.what());
  }
  gs::Session pushed = runtime.open_session(need);
  try {
    pushed.run([](gs::Iteration&) { throw std::runtime_error("boom"); }).get();
    check(false, "an iteration that throws");
  } catch (const gs::Error& error) {
    check(std::string(error.what()).find("threw: boom") != std::string::npos, error.what());
  } catch (const std::exception& error) {
    check(std::string(error.what()) == "boom", error.what());
  }
  gs::Session pulled = runtime.open_session(need);
  try {
    const gs::Iteration iteration = pulled.begin_iteration();
    throw std::runtime_error("boom");
  } catch (const std::runtime_error&) {
    check(pulled.info().status == GPUSHARE_CALLBACK_FAILED, "an exception that leaves an iteration");
  }
  need.fail_on_error = false;
  need.cls = gs::opportunistic;
  gs::Session spare_time = runtime.open_session(need);
  const gs::Gate gate(spare_time);
  gate.enter(std::chrono::milliseconds(1));
  check(gate.info().open == 1 && gate.info().entries == 0, "nobody guaranteed has run: the flag says so");
  gs::set_target_slowdown(runtime, 0.05);
  gs::set_target_slowdown(session, 0.02);
  {
    gs::Iteration iteration = session.begin_iteration();
    check(!gate.try_enter(nullptr, std::chrono::milliseconds(1)), "a guaranteed session learns");
    check(gate.info().target_slowdown == 0.02 && gate.info().learning == 1, "its target");
    iteration.end();
  }
  {
    gs::Iteration iteration = spare_time.begin_iteration();
    const gs::Stream stream = iteration.stream();
    gate.enter(stream, std::chrono::milliseconds(1));
    gate.done(std::chrono::milliseconds(1));
  }
  check(status_of([&] { gs::set_target_slowdown(spare_time, 0.1); }) == GPUSHARE_INVALID_ARGUMENT,
        "for guaranteed ones");
  spare_time.close();
  check(status_of([&] { gate.enter(std::chrono::milliseconds(1)); }) == GPUSHARE_CANCELLED,
        "its session is gone");
  session.close();
  runtime.close();
  allocator();
  return failures == 0 ? 0 : 1;
}
