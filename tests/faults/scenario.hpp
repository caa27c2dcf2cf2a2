// scenario.hpp: a session's whole life beside a bystander's, to be run with a fault armed. Every call of the
// victim may fail, with a status that says what happened; the bystander must come out unharmed, the books
// must hold, and close() must find nothing left on the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "support/bytes.hpp"
#include "support/executor_fixture.hpp"

namespace gpushare::test {

class Scenario {
 public:
  // `patience_ns`: how long a session waits to be let in before that counts as failed.
  Scenario(const std::string& device, memory::Layout layout, uint64_t patience_ns = 1'000'000'000)
      : patience_ns_(patience_ns) {
    executor::RuntimeOptions options = options_of({device.c_str(), layout}, "priority");
    options.capacity_bytes = 64 * kMiB;
    runtime_ = open_runtime(std::move(options));
    executor::SessionOptions bystander = need("bystander", 4 * kMiB, 4 * kMiB);
    bystander.priority = 9;
    bystander_ = open_session(*runtime_, bystander);
    const auto block = bystander_->alloc(memory::Kind::kModel, kPatternBytes, 0);
    REQUIRE(block.ok());
    pattern_ = *block;
    auto iteration = bystander_->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    const auto stream = (*iteration)->stream();
    REQUIRE((*stream)->fill(pattern_, 0x5a, kPatternBytes).ok());
    REQUIRE((*iteration)->end().ok());
    REQUIRE(runtime_->synchronize(GPUSHARE_NO_TIMEOUT).ok());
  }

  executor::Runtime& runtime() { return *runtime_; }
  // The failures, in order.
  const std::vector<base::Status>& failures() const { return failures_; }
  bool failed_with(int32_t code) const {
    return std::any_of(failures_.begin(), failures_.end(), [&](const auto& f) { return f.code() == code; });
  }

  void run() {
    executor::SessionOptions options = need("victim", 12 * kMiB, 8 * kMiB);
    options.priority = 1;
    options.cls = sched::SessionClass::kOpportunistic;
    auto victim = keep(runtime_->open_session(options));
    if (victim == nullptr) return;
    (void)note(victim->alloc(memory::Kind::kModel, 10 * kMiB, 0).status());
    (void)note(victim->alloc(memory::Kind::kFramework, 5 * kMiB, 0).status());  // above its promise
    push(*victim);
    pull(*victim);
    rival(*victim);
    spill();
    (void)note(victim->close());
  }

  // Something that waits for the device.
  void use_device() {
    auto iteration = bystander_->begin(GPUSHARE_NO_TIMEOUT);
    if (iteration.ok()) (void)(*iteration)->end();
    (void)runtime_->synchronize(GPUSHARE_NO_TIMEOUT);
  }

  // Checks the bystander, the books and the end; `lost`: the device is gone.
  void verify(bool lost) {
    for (const base::Status& failure : failures_) {
      INFO(failure.to_string());
      CHECK_FALSE(failure.message().empty());
      CHECK(failure.code() != GPUSHARE_INTERNAL);
    }
    CHECK(runtime_->check().empty());
    if (lost) {
      CHECK(bystander_->begin(0).status().code() == GPUSHARE_DEVICE_LOST);
      CHECK(bystander_->info().state == executor::SessionState::kFailed);
      CHECK(runtime_->open_session(need("late", 0, kMiB)).status().code() == GPUSHARE_DEVICE_LOST);
    } else {
      verify_bystander();
      // And there is room for a new one, as large as what there was.
      auto later = open_session(*runtime_, need("later", 24 * kMiB, 10 * kMiB));
      REQUIRE(later->wait_admitted(GPUSHARE_NO_TIMEOUT).ok());
      CHECK(later->alloc(memory::Kind::kModel, 20 * kMiB, 0).ok());
      CHECK(later->close().ok());
      CHECK(bystander_->close().ok());
      const auto info = runtime_->info();
      REQUIRE(info.ok());
      CHECK(info->persistent_bytes == 0);
      CHECK(info->ephemeral_bytes == 0);
      CHECK(info->promised_bytes == 0);
    }
    const base::Status closed = runtime_->close();
    INFO(closed.to_string());
    CHECK(closed.ok());
  }

 private:
  static constexpr uint64_t kPatternBytes = 3 * kMiB;

  bool note(const base::Status& status) {
    if (!status.ok()) failures_.push_back(status);
    return status.ok();
  }
  std::shared_ptr<executor::Session> keep(base::Result<std::shared_ptr<executor::Session>> session) {
    return note(session.status()) ? *session : nullptr;
  }

  void push(executor::Session& session) {
    auto work = work_of([this](const std::shared_ptr<executor::Iteration>& iteration) -> base::Status {
      GPUSHARE_ASSIGN_OR_RETURN(const memory::Address block, iteration->alloc(3 * kMiB, 0));
      GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
      GPUSHARE_RETURN_IF_ERROR(stream->fill(block, 1, kMiB));
      return enqueue(*stream, 100'000);
    });
    auto ticket = session.submit(work);
    if (note(ticket.status())) (void)note((*ticket)->wait(GPUSHARE_NO_TIMEOUT));
  }

  void pull(executor::Session& session) {
    auto iteration = session.begin(GPUSHARE_NO_TIMEOUT);
    if (!note(iteration.status())) return;
    const auto stream = (*iteration)->stream();
    const auto small = (*iteration)->alloc(4 * kMiB, 0);
    if (note(small.status())) {
      (void)note((*stream)->fill(*small, 2, kMiB));
      auto side = runtime_->create_stream(0);
      if (note(side.status())) {
        (void)note(runtime_->record_use(*small, **side));
        (void)note((*side)->release());
      }
      (void)note((*iteration)->keep(*small));
    }
    (void)note((*iteration)->alloc(14 * kMiB, 0).status());  // above its promise
    (void)note((*iteration)->end());
  }

  // Outranks the victim and needs its place: where the layout can, the victim is paged out and back.
  void rival(executor::Session& victim) {
    if (runtime_->info()->layout != memory::Layout::kVirtual) return;
    executor::SessionOptions options = need("rival", 36 * kMiB, 4 * kMiB);
    options.priority = 5;
    auto rival = keep(runtime_->open_session(options));
    if (rival == nullptr) return;
    if (note(rival->wait_admitted(patience_ns_))) {
      auto iteration = rival->begin(GPUSHARE_NO_TIMEOUT);
      if (note(iteration.status())) {
        (void)note((*iteration)->alloc(4 * kMiB, 0).status());
        (void)note((*iteration)->end());
      }
    }
    (void)note(rival->close());
    if (note(victim.wait_admitted(patience_ns_))) pull(victim);
  }

  void spill() {
    executor::SessionOptions options = need("spiller", 2 * kMiB, 2 * kMiB);
    options.allow_spill = true;
    auto spiller = keep(runtime_->open_session(options));
    if (spiller == nullptr) return;
    (void)note(spiller->alloc(memory::Kind::kModel, 61 * kMiB, 0).status());
    (void)note(spiller->close());
  }

  void verify_bystander() {
    CHECK(bystander_->info().state == executor::SessionState::kResident);
    auto iteration = bystander_->begin(GPUSHARE_NO_TIMEOUT);
    REQUIRE(iteration.ok());
    CHECK((*iteration)->alloc(3 * kMiB, 0).ok());
    const auto stream = (*iteration)->stream();
    std::vector<uint8_t> bytes(kPatternBytes);
    REQUIRE((*stream)
                ->copy(reinterpret_cast<uintptr_t>(bytes.data()), pattern_, kPatternBytes,
                       GPUSHARE_COPY_DEVICE_TO_HOST)
                .ok());
    REQUIRE((*stream)->synchronize().ok());
    REQUIRE((*iteration)->end().ok());
    CHECK(all_are(bytes.data(), bytes.size(), 0x5a));
  }

  const uint64_t patience_ns_;
  std::shared_ptr<executor::Runtime> runtime_;
  std::shared_ptr<executor::Session> bystander_;
  memory::Address pattern_ = 0;
  std::vector<base::Status> failures_;
};

}  // namespace gpushare::test
