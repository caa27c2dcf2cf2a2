// SPDX-License-Identifier: Apache-2.0
#include "loader/switcher.hpp"

#include <new>
#include <optional>
#include <utility>

#include "base/units.hpp"
#include "base/without_throwing.hpp"
#include "loader/opened_session.hpp"

namespace gpushare::loader {
namespace {

base::Status no_member(MemberId member) {
  return {GPUSHARE_NOT_FOUND,
          base::format("the switcher has no member %llu", static_cast<unsigned long long>(member))};
}

base::Status is_closed() {
  return {GPUSHARE_INVALID_STATE, "the switcher, or its runtime, is closed"};
}

// Whether the session's bytes are gone: the scheduler dropped them, or an iteration failed. Takes the executor's lock.
bool has_ended(const executor::Session& session) {
  if (session.dropped()) return true;
  const executor::SessionState state = session.info().state;
  return state == executor::SessionState::kCancelled || state == executor::SessionState::kFailed;
}

}  // namespace

// A turn's iteration: ends the turn with itself.
class Switcher::SwitchedIteration final : public executor::Iteration {
 public:
  SwitchedIteration(std::shared_ptr<Switcher> switcher, std::shared_ptr<executor::Iteration> of)
      : switcher_(std::move(switcher)), of_(std::move(of)) {}
  uint64_t session_id() const override { return of_->session_id(); }
  base::Result<memory::Address> alloc(uint64_t bytes, uint64_t alignment) override {
    return of_->alloc(bytes, alignment);
  }
  base::Status alloc_many(std::span<const uint64_t> bytes, uint64_t alignment, memory::Address* out,
                          size_t served) override {
    return of_->alloc_many(bytes, alignment, out, served);
  }
  memory::LanePass pass() const override { return of_->pass(); }
  base::Status keep(memory::Address address) override { return of_->keep(address); }
  base::Result<std::shared_ptr<executor::Stream>> stream() override { return of_->stream(); }
  base::Status end() override {
    if (ended_.exchange(true)) return {GPUSHARE_INVALID_STATE, "the iteration has ended already"};
    const Over over{*switcher_};
    return of_->end();
  }
  base::Status fail(base::Status why) override {
    if (ended_.exchange(true)) return {GPUSHARE_INVALID_STATE, "the iteration has ended already"};
    const Over over{*switcher_};
    return of_->fail(std::move(why));
  }

 private:
  // Gives the turn, whatever became of the iteration.
  struct Over {
    ~Over() {
      switcher.give_turn();
      switcher.standby_.refresh();  // what the last switch taught, now that nobody waits for this thread
    }
    Switcher& switcher;
  };

  const std::shared_ptr<Switcher> switcher_;
  const std::shared_ptr<executor::Iteration> of_;
  std::atomic<bool> ended_{false};
};

// A thread inside: close() waits for it.
class Switcher::Inside {
 public:
  explicit Inside(Switcher& of) GPUSHARE_REQUIRES(of.mutex_, has_members) : of_(of) { ++of_.users_; }
  ~Inside() {
    base::RoleLock lock(of_.mutex_, has_members);
    --of_.users_;
    of_.changed_.notify_all();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Switcher& of_;
};

Switcher::Switcher(std::shared_ptr<Loader> loader, SwitcherOptions options)
    : loader_(std::move(loader)),
      options_(options),
      standby_(*loader_, options.standby_bytes),
      residency_(options.policy) {}

base::Result<std::shared_ptr<Switcher>> Switcher::open(std::shared_ptr<Loader> loader,
                                                       SwitcherOptions options) {
  auto switcher = std::make_shared<Switcher>(std::move(loader), options);
  GPUSHARE_RETURN_IF_ERROR(switcher->loader_->runtime().attach(switcher));
  return switcher;
}

Switcher::~Switcher() {
  // No thread is inside, and no iteration is open: either would hold a pointer.
  base::RoleLock lock(mutex_, has_members);
  closed_ = true;
  auto members = std::move(members_);
  lock.unlock();
  for (const auto& [id, member] : members) drop(*member);
  standby_.clear();
  detach();
}

std::shared_ptr<Switcher::Member> Switcher::find(MemberId id) const {
  base::RoleLock lock(mutex_, has_members);
  const auto found = members_.find(id);
  return found == members_.end() ? nullptr : found->second;
}

std::shared_ptr<executor::Session> Switcher::session_of(const Member& member) const {
  base::RoleLock lock(mutex_, has_members);
  return member.session;
}

base::Result<MemberId> Switcher::add(MemberOptions options) {
  if (options.image == nullptr) return base::Status(GPUSHARE_INVALID_ARGUMENT, "a member needs an image");
  if (!loader_->made(*options.image))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        "image '" + options.image->name() + "' is of another loader than the switcher's");
  executor::SessionOptions& session = options.session;
  const auto runtime = loader_->runtime().info();
  if (!runtime.ok()) return runtime.status();
  const uint64_t capacity = runtime->capacity_bytes;
  const uint64_t image_bytes = options.image->bytes();
  if (image_bytes == 0)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "image '" + options.image->name() + "' has no bytes");
  if (session.persistent_bytes > capacity || session.ephemeral_bytes > capacity ||
      image_bytes > capacity - std::min(capacity, session.persistent_bytes) ||
      image_bytes + session.persistent_bytes > capacity - session.ephemeral_bytes)
    return base::Status(GPUSHARE_EXCEEDS_CAPACITY,
                        "member '" + session.name + "' needs " + base::format_bytes(image_bytes) +
                            " for its image, " + base::format_bytes(session.persistent_bytes) +
                            " persistent and " + base::format_bytes(session.ephemeral_bytes) +
                            " ephemeral bytes beside it; the runtime has " + base::format_bytes(capacity));
  auto member = std::make_shared<Member>();
  member->persistent_bytes = image_bytes + session.persistent_bytes;
  session.allow_queueing = false;
  session.may_page = false;  // before its load, which nobody may have to wait for with switching_ held
  const uint64_t load_ns = loader_->link().send_ns(image_bytes);
  base::RoleLock lock(mutex_, has_members);
  if (closed_) return is_closed();
  member->id = next_member_;
  member->ephemeral_bytes = session.ephemeral_bytes;
  if (session.name.empty())
    session.name = base::format("member-%llu", static_cast<unsigned long long>(member->id));
  member->options = std::move(options);
  residency_.add(member->id, member->persistent_bytes, load_ns);
  ++next_member_;
  const MemberId id = member->id;
  standby_.add(id, member->options.image, member->options.load.execution_ms, member->options.session.cls);
  members_.emplace(id, std::move(member));
  return id;
}

base::Status Switcher::stopped(const Member* member) const {
  if (member == nullptr) return {};
  if (closed_) return is_closed();
  if (member->removed)
    return {GPUSHARE_CANCELLED,
            base::format("member '%s' was removed", member->options.session.name.c_str())};
  return {};
}

base::Status Switcher::take_turn(const Member* member, const base::Deadline& deadline, uint64_t timeout_ns) {
  if (taken_ && holder_ == std::this_thread::get_id())
    return {GPUSHARE_INVALID_STATE,
            "this thread has an iteration of the switcher open: it would wait for itself. End it first"};
  Waiter waiter;
  line_.push_back(waiter);
  base::Status status;
  while (taken_ || &line_.front() != &waiter) {
    status = stopped(member);
    if (!status.ok()) break;
    if (timeout_ns > 0 && executor::NoWaitScope::active()) {
      status = {GPUSHARE_INVALID_STATE,
                "a turn of a switcher cannot be waited for inside a function that the device waits for"};
    } else if (timeout_ns == 0 || deadline.passed()) {
      status = {GPUSHARE_TIMED_OUT, "the switcher's turn did not come in time"};
    } else {
      (void)changed_.wait(mutex_, deadline);
      continue;
    }
    break;
  }
  line_.erase(line_.iterator_to(waiter));
  if (status.ok()) status = stopped(member);
  if (!status.ok()) {
    changed_.notify_all();
    return status;
  }
  taken_ = true;
  holder_ = std::this_thread::get_id();
  return {};
}

void Switcher::give_turn() noexcept {
  base::RoleLock lock(mutex_, has_members);
  taken_ = false;
  holder_ = {};
  changed_.notify_all();
}

base::Result<Switcher::Turn> Switcher::begin(MemberId id, uint64_t timeout_ns) {
  const base::Deadline deadline = base::Deadline::after(timeout_ns);
  const std::shared_ptr<Member> member = find(id);
  if (member == nullptr) return closed() ? is_closed() : no_member(id);
  std::optional<Inside> inside;
  {
    base::RoleLock lock(mutex_, has_members);
    if (closed_) return is_closed();
    inside.emplace(*this);
    GPUSHARE_RETURN_IF_ERROR(take_turn(member.get(), deadline, timeout_ns));
  }
  base::Result<Turn> turn = base::Status();
  try {
    turn = begin_in_turn(*member, deadline, timeout_ns);
  } catch (const std::bad_alloc&) {
    turn = base::Status(GPUSHARE_HOST_OUT_OF_MEMORY, "no host memory for a switch");
  }
  if (!turn.ok()) give_turn();
  return turn;
}

base::Result<Switcher::Turn> Switcher::begin_in_turn(Member& member, const base::Deadline& deadline,
                                                     uint64_t timeout_ns) {
  uint64_t loads = 0;
  {
    base::RoleLock lock(mutex_, has_members);
    loads = member.loads;
  }
  GPUSHARE_RETURN_IF_ERROR(
      make_active(member).with_context("switching to '" + member.options.session.name + "'"));
  uint64_t left_ns = timeout_ns;
  if (!deadline.never() && timeout_ns > 0) {
    const auto now = std::chrono::steady_clock::now();
    left_ns = now >= deadline.at()
                  ? 0
                  : static_cast<uint64_t>(
                        std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.at() - now).count());
  }
  Turn turn;
  std::shared_ptr<executor::Session> session;
  {
    base::RoleLock lock(mutex_, has_members);
    GPUSHARE_RETURN_IF_ERROR(stopped(&member));
    session = beginning_ = member.session;
    turn.model = member.model;
    turn.loaded = member.loads != loads;
  }
  base::Result<std::shared_ptr<executor::Iteration>> begun = session->begin(left_ns);
  {
    base::RoleLock lock(mutex_, has_members);
    beginning_.reset();
    if (base::Status why = stopped(&member); !begun.ok() && !why.ok()) return why;
  }
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<executor::Iteration> iteration, std::move(begun));
  try {
    turn.iteration = std::make_shared<SwitchedIteration>(shared_from_this(), iteration);
  } catch (const std::bad_alloc&) {
    (void)iteration->end();
    throw;
  }
  base::RoleLock lock(mutex_, has_members);
  ++member.iterations;
  return turn;
}

// Whether the member's session takes iterations and its weights are on the device or on their way.
bool Switcher::usable(const Member& member) const {
  std::shared_ptr<executor::Session> session;
  std::shared_ptr<Model> model;
  {
    base::RoleLock lock(mutex_, has_members);
    session = member.session;
    model = member.model;
  }
  if (session == nullptr) return false;
  if (has_ended(*session)) return false;
  const uint32_t last = static_cast<uint32_t>(member.options.image->layers().size()) - 1;
  return model->arrived(last).ok();
}

base::Status Switcher::make_active(Member& member) {
  const base::WorkLock switching(switching_);
  if (!switching) return base::WorkLock::refused();
  const uint64_t start_ns = base::host_now_ns();
  const uint64_t now_ns = loader_->runtime().device().now_ns();
  bool was_active = false;
  {
    base::RoleLock lock(mutex_, has_members);
    was_active = active_ == member.id;
  }
  if (!was_active) take_leave();
  const std::shared_ptr<executor::Session> session = session_of(member);
  const bool live = usable(member) && (was_active || session->set_spare(std::nullopt).ok());
  if (!live && session != nullptr) {
    drop(member);
    base::RoleLock lock(mutex_, has_members);
    residency_.drop(member.id);
  }
  std::vector<sched::ModelId> drops;
  {
    base::RoleLock lock(mutex_, has_members);
    residency_.request(member.id, now_ns);
    active_ = live ? member.id : 0;
    // The caller's limit decides which members may stay; for how many the device has room is the scheduler's decision.
    if (residency_.resident_bytes() > options_.keep_bytes && !live)
      drops = residency_.shed(residency_.resident_bytes() - options_.keep_bytes, member.id, now_ns);
  }
  drop_all(drops);
  if (!was_active) tell_worths(member.id);
  if (!live) {
    base::Status status = load(member);
    if (!status.ok()) {
      base::RoleLock lock(mutex_, has_members);
      residency_.drop(member.id);
      return status;
    }
  }
  {
    base::RoleLock lock(mutex_, has_members);
    active_ = member.id;
    if (last_active_ != member.id) {
      ++switches_;
      switch_ns_ = base::host_now_ns() - start_ns;
    }
    last_active_ = member.id;
  }
  if (!live) {
    take_leave();  // those that made room for it
    update_standby();
  }
  return {};
}

void Switcher::update_standby() {
  if (options_.standby_bytes == 0) return;
  const uint64_t now_ns = loader_->runtime().device().now_ns();
  std::vector<Standby::Use> uses;
  {
    base::RoleLock lock(mutex_, has_members);
    for (const auto& [id, member] : members_)
      uses.push_back({id, residency_.requests(id, now_ns), member->session == nullptr, id == active_});
  }
  standby_.update(uses);
}

base::Status Switcher::load(Member& member) {
  // The member's own first layers stay if they can, because it is about to use them.
  bool held = standby_.hold(member.id, true);
  base::Status status;
  try {
    status = load_from_first_layers(member, held);
  } catch (const std::bad_alloc&) {
    status = {GPUSHARE_HOST_OUT_OF_MEMORY, "no host memory for a switch"};
  }
  // They make room for others again, however the load ended.
  if (held) (void)standby_.hold(member.id, false);
  return status;
}

base::Status Switcher::load_from_first_layers(Member& member, bool& held) {
  GPUSHARE_ASSIGN_OR_RETURN(OpenedSession session, OpenedSession::of(open_session(member, held)));
  LoadOptions options = member.options.load;
  options.prefix = standby_.prefix(member.id);
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<Model> model,
                            loader_->load(session.get(), member.options.image, std::move(options)));
  (void)session->allow_paging();  // one that has ended says so when it begins
  base::RoleLock lock(mutex_, has_members);
  member.session = session.take();
  member.model = std::move(model);
  ++member.loads;
  return {};
}

base::Result<std::shared_ptr<executor::Session>> Switcher::open_session(Member& member, bool& held) {
  executor::SessionOptions options = member.options.session;
  options.persistent_bytes = member.persistent_bytes;
  {
    base::RoleLock lock(mutex_, has_members);
    options.ephemeral_bytes = member.ephemeral_bytes;
  }
  for (;;) {
    auto session = loader_->runtime().open_session(options);
    if (session.status().code() != GPUSHARE_DEVICE_OUT_OF_MEMORY) return session;
    if (std::exchange(held, false)) {
      (void)standby_.hold(member.id, false);
      continue;
    }
    // The scheduler counts bytes. Where there are enough of them, but in pieces (contiguous layout), kept members go one by one.
    const auto runtime = loader_->runtime().info();
    if (!runtime.ok() ||
        options.persistent_bytes + options.ephemeral_bytes >
            runtime->capacity_bytes - std::min(runtime->capacity_bytes, runtime->promised_bytes))
      return session;
    std::vector<sched::ModelId> drops;
    {
      base::RoleLock lock(mutex_, has_members);
      drops = residency_.shed(1, member.id, loader_->runtime().device().now_ns());
    }
    if (drops.empty()) return session;
    drop_all(drops);
  }
}

void Switcher::take_leave() {
  std::vector<sched::ModelId> gone;
  {
    base::RoleLock lock(mutex_, has_members);
    for (const auto& [id, member] : members_)
      if (member->session != nullptr && member->session->dropped()) {
        gone.push_back(id);
        residency_.drop(id);
      }
  }
  drop_all(gone);
}

void Switcher::tell_worths(MemberId active) {
  struct Kept {
    std::shared_ptr<Member> member;
    std::shared_ptr<executor::Session> session;
    double worth_ns;
  };
  std::vector<Kept> kept;
  {
    base::RoleLock lock(mutex_, has_members);
    const uint64_t now_ns = loader_->runtime().device().now_ns();
    for (const auto& [id, member] : members_)
      if (member->session != nullptr && id != active)
        kept.push_back({member, member->session, residency_.worth(id, now_ns)});
  }
  for (const auto& [member, session, worth_ns] : kept) {
    learn_need(*member, *session);
    (void)session->set_spare(worth_ns);
  }
}

// A need that was profiled is not profiled again.
void Switcher::learn_need(Member& member, const executor::Session& session) {
  if (member.options.session.ephemeral_bytes > 0) return;
  const executor::SessionInfo info = session.info();
  base::RoleLock lock(mutex_, has_members);
  if (info.iterations_done >= 2)
    member.ephemeral_bytes = std::max(member.ephemeral_bytes, info.promised_ephemeral_bytes);
}

void Switcher::drop_all(const std::vector<sched::ModelId>& members) {
  for (const sched::ModelId id : members)
    if (const std::shared_ptr<Member> member = find(id); member != nullptr) drop(*member);
}

void Switcher::drop(Member& member) noexcept {
  std::shared_ptr<executor::Session> session = session_of(member);
  if (session == nullptr) return;
  base::without_throwing([&] { learn_need(member, *session); });
  session.reset();
  std::shared_ptr<Model> model;
  {
    base::RoleLock lock(mutex_, has_members);
    session.swap(member.session);
    model.swap(member.model);
    if (session == nullptr) return;
    ++member.drops;
    if (active_ == member.id) active_ = 0;
  }
  standby_.learned(member.id);
  // Copies may still be under way: the block and the image wait for them.
  base::without_throwing([&] { (void)model->unload(); });
  base::without_throwing([&] { (void)session->close(); });
}

base::Status Switcher::remove(MemberId id) {
  const std::shared_ptr<Member> member = find(id);
  if (member == nullptr) return closed() ? is_closed() : no_member(id);
  std::shared_ptr<executor::Session> waits;
  std::optional<Inside> inside;
  {
    base::RoleLock lock(mutex_, has_members);
    if (member->removed) return no_member(id);
    if (closed_) return is_closed();
    if (taken_ && holder_ == std::this_thread::get_id())
      return {GPUSHARE_INVALID_STATE,
              "a member cannot be removed while this thread has an iteration of the switcher open"};
    if (executor::NoWaitScope::active())
      return {GPUSHARE_INVALID_STATE,
              "a member cannot be removed inside a function that the device waits for"};
    inside.emplace(*this);
    member->removed = true;
    changed_.notify_all();
    if (beginning_ != nullptr && beginning_ == member->session) waits = beginning_;
  }
  if (waits != nullptr) base::without_throwing([&] { (void)waits->cancel(); });
  {
    base::RoleLock lock(mutex_, has_members);
    (void)take_turn(nullptr, base::Deadline::after(GPUSHARE_NO_TIMEOUT), GPUSHARE_NO_TIMEOUT);
  }
  {
    const base::WorkLock switching(switching_, base::kMustWait);
    drop(*member);
    standby_.remove(id);
  }
  base::RoleLock lock(mutex_, has_members);
  residency_.remove(id);
  members_.erase(id);
  if (last_active_ == id) last_active_ = 0;
  taken_ = false;
  holder_ = {};
  changed_.notify_all();
  return {};
}

base::Status Switcher::close() {
  std::shared_ptr<executor::Session> waits;
  {
    base::RoleLock lock(mutex_, has_members);
    if (closed_) return is_closed();
    if ((taken_ && holder_ == std::this_thread::get_id()) || executor::NoWaitScope::active())
      return {
          GPUSHARE_INVALID_STATE,
          "a switcher cannot be closed inside an iteration of its own, or a function that the device waits "
          "for"};
    closed_ = true;
    changed_.notify_all();
    waits = beginning_;
  }
  if (waits != nullptr) base::without_throwing([&] { (void)waits->cancel(); });
  Members members;
  {
    base::RoleLock lock(mutex_, has_members);
    while (users_ > 0 || taken_) changed_.wait(mutex_);
    taken_ = true;
    members.swap(members_);
  }
  {
    const base::WorkLock switching(switching_, base::kMustWait);
    for (const auto& [id, member] : members) drop(*member);
    standby_.clear();
  }
  give_turn();
  return {};
}

void Switcher::runtime_closing() {
  Members members;
  {
    base::RoleLock lock(mutex_, has_members);
    closed_ = true;
    changed_.notify_all();
    while (users_ > 0) changed_.wait(mutex_);
    members.swap(members_);
  }
  const base::WorkLock switching(switching_, base::kMustWait);
  for (const auto& [id, member] : members) drop(*member);
  standby_.clear();
}

base::Result<MemberInfo> Switcher::info(MemberId id) const {
  const std::shared_ptr<Member> member = find(id);
  if (member == nullptr) return closed() ? is_closed() : no_member(id);
  MemberInfo info;
  std::shared_ptr<executor::Session> session;
  {
    base::RoleLock lock(mutex_, has_members);
    info.name = member->options.session.name;
    info.loads = member->loads;
    info.iterations = member->iterations;
    info.drops = member->drops;
    session = member->session;
    if (session != nullptr) info.state = active_ == id ? MemberState::kActive : MemberState::kKept;
  }
  info.standby_bytes = standby_.bytes(id);
  if (session == nullptr) return info;
  if (has_ended(*session)) {  // which the next switch will see
    info.state = MemberState::kStandby;
    ++info.drops;
  } else {
    info.device_bytes = session->info().promised_persistent_bytes;
  }
  return info;
}

bool Switcher::closed() const {
  base::RoleLock lock(mutex_, has_members);
  return closed_;
}

SwitcherInfo Switcher::info() const {
  SwitcherInfo info;
  std::vector<std::pair<MemberId, std::shared_ptr<executor::Session>>> sessions;
  MemberId active = 0;
  {
    base::RoleLock lock(mutex_, has_members);
    active = active_;
    for (const auto& [id, member] : members_)
      if (member->session != nullptr) sessions.emplace_back(id, member->session);
    info.members = members_.size();
    info.switches = switches_;
    info.waiting = line_.size();
    info.switch_ns = switch_ns_;
    info.standby_bytes = standby_.bytes();
  }
  for (const auto& [id, session] : sessions) {
    if (has_ended(*session)) continue;
    if (id == active)
      info.active = id;
    else
      ++info.kept;
  }
  return info;
}

}  // namespace gpushare::loader
