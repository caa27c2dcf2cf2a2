// SPDX-License-Identifier: Apache-2.0
#include "framework/allocator.hpp"

#include <algorithm>
#include <array>
#include <set>

#include "base/no_destroy.hpp"
#include "base/no_memory.hpp"
#include "base/thread_local.hpp"
#include "base/units.hpp"
#include "base/without_throwing.hpp"

namespace gpushare::framework {
namespace {

using Entry = memory::Journal::Entry;

// Allocations of one iteration after which those that were freed are forgotten.
constexpr size_t kManyPlaces = size_t{1} << 16;

uint64_t key_of(const void* native) {
  return reinterpret_cast<uint64_t>(native);
}

// The sessions that the calling thread is bound to, one for each allocator. A session's id does not come again, and an
// allocator's neither, so that what is left here when they go does no harm.
struct ThreadBinding {
  uint64_t allocator = 0, session = 0;
};
GPUSHARE_THREAD_LOCAL std::array<ThreadBinding, 6> t_bindings;

// Ids of the allocators that there are.
struct Live {
  base::Mutex mutex;
  std::set<uint64_t> ids GPUSHARE_GUARDED_BY(mutex);
  uint64_t next GPUSHARE_GUARDED_BY(mutex) = 1;
};
Live& live() {
  static base::NoDestroy<Live> live;  // allocators may go when statics are destroyed
  return *live;
}
uint64_t new_id() {
  base::MutexLock lock(live().mutex);
  live().ids.insert(live().next);
  return live().next++;
}

ThreadBinding* binding_of(uint64_t allocator) {
  for (ThreadBinding& binding : t_bindings)
    if (binding.allocator == allocator) return &binding;
  return nullptr;
}

base::Status foreign_session(const executor::Session& session) {
  return {GPUSHARE_INVALID_ARGUMENT,
          "session '" + session.name() + "' belongs to another runtime than the allocator"};
}

}  // namespace

struct Allocator::Word : memory::LaneDoor::Lister {
  // Throws bad_alloc.
  static Word& take() {
    base::MutexLock lock(spare().mutex);
    Word* const word = spare().first;
    if (word == nullptr) return *new Word;
    spare().first = word->next;
    return *word;
  }
  void give_back() {
    base::MutexLock lock(spare().mutex);
    next = std::exchange(spare().first, this);
  }

 private:
  struct Spare {
    base::Mutex mutex;
    Word* first GPUSHARE_GUARDED_BY(mutex) = nullptr;
  };
  static Spare& spare() {
    static base::NoDestroy<Spare> spare;
    return *spare;
  }
  Word* next = nullptr;
};

Allocator::Allocator(std::shared_ptr<executor::Runtime> runtime, memory::Kind kind)
    : runtime_(std::move(runtime)), kind_(kind), id_(new_id()), word_(Word::take()) {
  decide_open();
}

Allocator::~Allocator() {
  close_doors();
  word_.give_back();
  while (const auto member = members_.take_any()) {
    if (!member->closing.load()) continue;
    base::without_throwing([&] { (void)member->session->close(); });
  }
  base::MutexLock lock(live().mutex);
  live().ids.erase(id_);
}

void Allocator::close_doors() {
  base::MutexLock lock(open_mutex_);
  closed_ = true;
  word_.name.store(nullptr, std::memory_order_relaxed);
  word_.owner.store(0, std::memory_order_relaxed);
}

void Allocator::set_name(const void* name) {
  base::MutexLock lock(open_mutex_);
  if (!closed_) word_.name.store(name, std::memory_order_relaxed);
}

void Allocator::decide_open() {
  base::MutexLock lock(open_mutex_);
  const bool open = !closed_ && !pools_.begun() && deferred_count_.load(std::memory_order_relaxed) == 0 &&
                    limit_bytes_.load(std::memory_order_relaxed) == UINT64_MAX;
  word_.owner.store(open ? id_ : 0, std::memory_order_relaxed);
}

void Allocator::Member::lend(memory::LanePass pass) {
  if (pass.door == nullptr || closing.load()) return;
  journal.most = prune_at;
  if (pass.door->lend(pass.key, journal)) door = pass.door;
}

void Allocator::Member::take_back() {
  if (door != nullptr) std::exchange(door, nullptr)->take_back(journal);
}

std::shared_ptr<Allocator::Member> Allocator::member_of(const std::shared_ptr<executor::Session>& session) {
  if (session == nullptr) return nullptr;
  const uint64_t key = session->id();
  if (auto member = members_.find(key)) return member;
  auto made = std::make_shared<Member>(session, id_);
  bool prune = false;
  {
    base::MutexLock lock(mutex_);
    if (auto member = members_.find(key)) return member;  // another thread was first
    members_.assign(key, made);
    prune = ++members_made_ >= members_at_prune_;
  }
  if (prune) {  // sessions that were closed since
    size_t left = 0;
    for (const auto& member : members_.values()) {
      if (member->session->closed())
        members_.erase(member->session->id());
      else
        ++left;
    }
    base::MutexLock lock(mutex_);
    members_made_ = left;
    members_at_prune_ = std::max<size_t>(64, 2 * left);
  }
  return made;
}

base::Status Allocator::set_default_session(std::shared_ptr<executor::Session> session) {
  if (session != nullptr && session->runtime() != runtime_.get()) return foreign_session(*session);
  std::shared_ptr<Member> member = member_of(session);
  has_default_ = member != nullptr;
  base::MutexLock lock(mutex_);
  default_.swap(member);
  return {};
}

base::Result<std::shared_ptr<Allocator::NativeStream>> Allocator::find_stream(void* native) {
  if (native == kNoStream) return std::shared_ptr<NativeStream>();
  auto known = streams_.find(key_of(native));
  // A lane's stream may have gone, and its native handle come again.
  if (known != nullptr && (!known->stream->is_lane() || known->stream->native().ok())) return known;
  auto stream = runtime_->adopt_stream(native);
  if (!stream.ok()) {
    if (native == nullptr && stream.status().code() == GPUSHARE_UNSUPPORTED)
      return std::shared_ptr<NativeStream>();
    return stream.status().with_context("the native stream is none of the runtime's");
  }
  known = std::make_shared<NativeStream>(NativeStream{std::move(*stream), nullptr, native});
  streams_.assign(key_of(native), known);
  return known;
}

base::Status Allocator::adopt_stream(std::shared_ptr<executor::Session> session, void* native) {
  if (session->runtime() != runtime_.get()) return foreign_session(*session);
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<NativeStream> known, find_stream(native));
  if (known == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "no native stream was given"};
  if (known->stream->is_lane())
    return {GPUSHARE_INVALID_ARGUMENT,
            "the native stream is a lane's, which belongs to the session that has the lane"};
  streams_.assign(key_of(native),
                  std::make_shared<NativeStream>(NativeStream{known->stream, member_of(session), native}));
  return {};
}

base::Status Allocator::forget_stream(void* native) {
  if (native != kNoStream && streams_.erase(key_of(native)) != nullptr) return {};
  return {GPUSHARE_NOT_FOUND, "the allocator has not seen this native stream"};
}

base::Status Allocator::bind_thread(const std::shared_ptr<executor::Session>& session) {
  ThreadBinding* binding = binding_of(id_);
  if (session == nullptr) {
    if (binding != nullptr) *binding = {};
    return {};
  }
  if (session->runtime() != runtime_.get()) return foreign_session(*session);
  if (binding == nullptr) binding = binding_of(0);
  if (binding == nullptr) {
    base::MutexLock lock(live().mutex);
    for (ThreadBinding& old : t_bindings)
      if (!live().ids.contains(old.allocator)) *(binding = &old) = {};
  }
  if (binding == nullptr)
    return {GPUSHARE_INVALID_STATE,
            base::format("the thread is bound to sessions of %zu allocators; unbind one", t_bindings.size())};
  (void)member_of(session);
  *binding = {id_, session->id()};
  return {};
}

std::shared_ptr<Allocator::Member> Allocator::owner_of(const NativeStream* stream) {
  if (stream != nullptr && stream->member != nullptr) return stream->member;
  if (const auto session = runtime_->owner(stream == nullptr ? nullptr : stream->stream.get()))
    return member_of(session);
  if (const ThreadBinding* binding = binding_of(id_)) {
    if (auto member = members_.find(binding->session)) return member;
  }
  if (!has_default_.load(std::memory_order_relaxed)) return nullptr;
  base::MutexLock lock(mutex_);
  return default_;
}

Allocator::Listed Allocator::list(Member& member, uint64_t iteration, memory::LanePass pass, uint64_t bytes) {
  base::MutexLock lock(member.mutex);
  member.take_back();
  memory::Journal& journal = member.journal;
  if (member.iteration != iteration) {
    member.iteration = iteration;
    ++member.iterations;
    journal.turn_page();
    member.prune_at = kManyPlaces;
  }
  if (journal.count >= member.prune_at) prune(member);
  // From the third iteration on, the allocator expects what happened in the iteration before.
  journal.expected = member.iterations > 2 ? journal.before_count : 0;
  const Listed listed{journal.count, member.moves, journal.expects(bytes)};
  journal.add(bytes, 0);
  member.lend(pass);
  return listed;
}

base::Status Allocator::complete(Member& member, uint64_t iteration, memory::LanePass pass,
                                 const Listed& listed, uint64_t bytes, memory::Address address) {
  base::MutexLock lock(member.mutex);
  if (member.iteration != iteration) return {};
  member.take_back();
  base::Status status;
  if (member.moves == listed.moves && listed.index < member.journal.count) {
    member.journal.entries[listed.index].address = address;
  } else {
    try {
      member.journal.add(bytes, address);
    } catch (const std::bad_alloc&) {
      status = base::no_memory();
    }
  }
  member.lend(pass);
  return status;
}

base::Result<memory::Address> Allocator::place(Member& member, const NativeStream* stream, uint64_t bytes,
                                               uint64_t alignment) {
  executor::Session& session = *member.session;
  memory::LanePass pass;
  const uint64_t iteration = session.open_iteration(&pass);
  if (iteration == 0) return session.alloc(kind_, bytes, alignment);
  const Listed listed = list(member, iteration, pass, bytes);
  bool outlives = listed.outlives;
  base::Result<memory::Address> result = outlives ? session.alloc(memory::Kind::kFramework, bytes, alignment)
                                                  : session.alloc_ephemeral(bytes, alignment);
  if (outlives && result.status().code() == GPUSHARE_DEVICE_OUT_OF_MEMORY) {
    outlives = false;  // a guess: if it is wrong the lane has room
    result = session.alloc_ephemeral(bytes, alignment);
  }
  const int32_t code = result.status().code();
  if (code == GPUSHARE_INVALID_STATE)  // the iteration has just ended
    return session.alloc(kind_, bytes, alignment);
  if (code == GPUSHARE_DEVICE_OUT_OF_MEMORY || code == GPUSHARE_QUOTA_EXCEEDED) {
    // A hole between the session's persistent blocks may serve: the session's promise holds it, and no lane can have it.
    if (auto among = session.alloc(memory::Kind::kFramework, bytes, alignment); among.ok()) result = among;
  }
  if (!result.ok()) return result;
  if (outlives) member.predicted.fetch_add(1, std::memory_order_relaxed);
  if (base::Status status = complete(member, iteration, pass, listed, bytes, *result); !status.ok()) {
    (void)runtime_->free(*result);
    return status;
  }
  // The thread's next blocks of this stream need not come here. (Null is no lane's stream where streams have handles.)
  if (pass.door != nullptr && stream != nullptr && stream->stream->is_lane() && stream->native != nullptr) {
    memory::LaneDoor::LastUsed& last = memory::LaneDoor::last_used();
    last.use(pass);
    last.lister = &word_;
  }
  return result;
}

void Allocator::prune(Member& member) {
  // Blocks that other threads are about to be given have no address yet: those threads list them anew.
  memory::Journal& journal = member.journal;
  const auto begin = journal.entries.begin();
  const auto end =
      std::remove_if(begin, begin + static_cast<ptrdiff_t>(journal.count), [this](const Entry& entry) {
        memory::BlockInfo block;
        return entry.address == 0 || !runtime_->look_up(entry.address, &block) ||
               block.bytes != entry.bytes();
      });
  journal.count = static_cast<size_t>(end - begin);
  member.iterations = 0;  // the order of the calls is lost: what outlives an iteration is learned anew
  ++member.moves;
  member.prune_at = std::max(kManyPlaces, 2 * journal.count);
}

base::Status Allocator::check_limit(uint64_t bytes) {
  const uint64_t limit = limit_bytes_.load(std::memory_order_relaxed);
  GPUSHARE_ASSIGN_OR_RETURN(const executor::RuntimeInfo info, runtime_->info());
  const uint64_t used = info.persistent_bytes + info.ephemeral_bytes;
  const uint64_t wanted =
      limited_bytes_.load(std::memory_order_relaxed);  // this allocation and those of other threads
  if (wanted <= limit && used <= limit - wanted) return {};
  return {GPUSHARE_QUOTA_EXCEEDED, "asked for " + base::format_bytes(bytes) + "; " +
                                       base::format_bytes(used) + " of the allocator's limit of " +
                                       base::format_bytes(limit) +
                                       " are in use. Free something, or raise the memory fraction"};
}

base::Result<memory::Address> Allocator::alloc_for(Member& member, const NativeStream* stream, uint64_t bytes,
                                                   uint64_t alignment, void* native) {
  // Freed bytes are in the order of the session's own stream. On a lane's stream that is this one. Frees what cannot be ordered.
  const auto order = [&](memory::Address address) -> base::Status {
    if (stream == nullptr || stream->stream->is_lane()) return {};
    base::Status status = base::no_memory();
    try {
      status = member.session->order_stream(*stream->stream);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): status says it
    }
    if (!status.ok()) (void)runtime_->free(address);
    return status;
  };
  if (pools_.any()) {
    if (const auto pool = pools_.choose(native))
      return pools_.alloc(*pool, native, bytes, alignment,
                          [&](uint64_t chunk, uint64_t aligned) -> base::Result<memory::Address> {
                            GPUSHARE_ASSIGN_OR_RETURN(
                                const memory::Address address,
                                member.session->alloc(memory::Kind::kFramework, chunk, aligned));
                            GPUSHARE_RETURN_IF_ERROR(order(address));
                            return address;
                          });
  }
  GPUSHARE_ASSIGN_OR_RETURN(const memory::Address address, place(member, stream, bytes, alignment));
  GPUSHARE_RETURN_IF_ERROR(order(address));
  return address;
}

void Allocator::tell(const Member& member, uint64_t bytes, const base::Status& why) {
  std::vector<std::shared_ptr<const OutOfMemoryObserver>> observers;
  {
    base::MutexLock lock(mutex_);
    observers = observers_;
  }
  for (const auto& observer : observers) (*observer)(member.session->id(), bytes, why);
}

base::Result<memory::Address> Allocator::alloc(uint64_t bytes, uint64_t alignment, void* native) {
  if (bytes == 0) return memory::Address{0};
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<NativeStream> stream, find_stream(native));
  const std::shared_ptr<Member> member = owner_of(stream.get());
  if (member == nullptr)
    return base::Status(GPUSHARE_NOT_FOUND,
                        "the allocation has no session: its stream is no lane's and adopted by none, the "
                        "thread has no iteration open "
                        "and is bound to none, and the allocator has no default session");
  base::Result<memory::Address> result = base::Status();
  if (limit_bytes_.load(std::memory_order_relaxed) != UINT64_MAX) {
    // Counted from the check to the allocation, so that two threads cannot pass the limit together.
    struct Counted {
      ~Counted() { in.fetch_sub(bytes, std::memory_order_relaxed); }
      std::atomic<uint64_t>& in;
      const uint64_t bytes;
    } const counted{limited_bytes_, bytes};
    limited_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    base::Status within = check_limit(bytes);
    result = within.ok() ? alloc_for(*member, stream.get(), bytes, alignment, native)
                         : base::Result<memory::Address>(within);
  } else {
    result = alloc_for(*member, stream.get(), bytes, alignment, native);
  }
  if (result.ok()) {
    member->allocations.fetch_add(1, std::memory_order_relaxed);
    return result;
  }
  member->failures.fetch_add(1, std::memory_order_relaxed);
  const int32_t code = result.status().code();
  if (code == GPUSHARE_DEVICE_OUT_OF_MEMORY || code == GPUSHARE_QUOTA_EXCEEDED ||
      code == GPUSHARE_HOST_OUT_OF_MEMORY)
    tell(*member, bytes, result.status());
  return result;
}

base::Status Allocator::free_block(memory::Address address, const NativeStream* stream) {
  if (stream != nullptr && !stream->stream->is_lane()) {
    const base::Status used = runtime_->record_use(address, *stream->stream);
    if (!used.ok() && used.code() != GPUSHARE_DEVICE_LOST) return used;
  }
  return runtime_->free(address);
}

base::Status Allocator::free(memory::Address address, void* native) {
  if (address == 0) return {};
  if (!pools_.any() && closing_.load(std::memory_order_relaxed) == 0 &&
      deferred_count_.load(std::memory_order_relaxed) == 0) {
    // Most blocks are freed on the stream that they belong to, whose order they are used again in.
    base::Status status;
    if (runtime_->free_at_home(address, native, &status)) return status;
  }
  auto stream = find_stream(native);
  if (!stream.ok()) return stream.status();
  if (deferred_count_.load(std::memory_order_relaxed) > 0) retry_deferred();
  uint64_t session_id = 0;
  if (closing_.load(std::memory_order_relaxed) > 0) {
    const auto held = base(address);
    memory::BlockInfo block;
    if (runtime_->look_up(held.ok() ? held->first : address, &block)) session_id = block.session;
  }
  base::Status status;
  if (!pools_.any() ||
      !pools_.free(address, native, [this](memory::Address chunk, void* of) { give_chunk(chunk, of); }))
    status = free_block(address, stream->get());
  memory::BlockInfo block;
  if (status.code() == GPUSHARE_INVALID_STATE && *stream != nullptr && runtime_->look_up(address, &block)) {
    // The stream captures a graph, so that the block's last use cannot be marked: it is freed later.
    base::MutexLock lock(mutex_);
    deferred_.emplace_back(address, native);
    ++deferred_count_;
    lock.unlock();
    decide_open();
    return {};
  }
  if (status.ok() && session_id != 0) close_drained(session_id);
  return status;
}

void Allocator::retry_deferred() {
  std::vector<std::pair<memory::Address, void*>> blocks;
  {
    base::MutexLock lock(mutex_);
    blocks.swap(deferred_);
    deferred_count_ = 0;
  }
  for (const auto& [address, native] : blocks) {
    const auto stream = find_stream(native);
    if (free_block(address, stream.ok() ? stream->get() : nullptr).code() != GPUSHARE_INVALID_STATE) continue;
    base::MutexLock lock(mutex_);
    deferred_.emplace_back(address, native);
    ++deferred_count_;
  }
  decide_open();
}

base::Status Allocator::record_use(memory::Address address, void* native) {
  if (address == 0) return {};
  GPUSHARE_ASSIGN_OR_RETURN(const std::shared_ptr<NativeStream> stream, find_stream(native));
  if (stream == nullptr) return {GPUSHARE_INVALID_ARGUMENT, "no native stream was given"};
  if (!pools_.any() || !pools_.record_use(address, native))
    return runtime_->record_use(address, *stream->stream);
  // The chunk goes back to its session after this use. A use cannot be marked while the stream captures a graph; the graph's
  // owner keeps the pool.
  if (const auto chunk = pools_.chunk_of(address)) (void)runtime_->record_use(chunk->first, *stream->stream);
  return {};
}

base::Result<std::pair<memory::Address, uint64_t>> Allocator::base(memory::Address address) {
  memory::BlockInfo block;
  if (runtime_->look_up(address, &block)) return std::make_pair(block.address, block.bytes);
  if (pools_.any())
    if (const auto chunk = pools_.chunk_of(address)) return *chunk;
  return runtime_->find(address).status();
}

base::Status Allocator::keep_all(executor::Iteration& iteration) {
  const auto member = members_.find(iteration.session_id());
  if (member == nullptr) return {};
  memory::LanePass pass;
  const uint64_t open = member->session->open_iteration(&pass);
  std::vector<Entry> entries;  // without the lock: a promotion may wait
  size_t count = 0;
  {
    base::MutexLock lock(member->mutex);
    member->take_back();
    if (open == 0 || member->iteration != open) return {};
    entries.swap(member->journal.entries);
    count = std::exchange(member->journal.count, 0);
    ++member->moves;
  }
  // Back in the journal whatever happens, so that a second try finds what the first has not kept. What other threads have
  // allocated meanwhile comes after it.
  struct Back {
    ~Back() {
      base::MutexLock lock(member.mutex);
      if (member.iteration != open) return;
      member.take_back();
      memory::Journal& journal = member.journal;
      base::without_throwing([&]() GPUSHARE_NO_THREAD_SAFETY_ANALYSIS {
        if (entries.size() < count + journal.count) entries.resize(count + journal.count);
        std::copy_n(journal.entries.begin(), journal.count, entries.begin() + static_cast<ptrdiff_t>(count));
        count += journal.count;
      });
      journal.entries.swap(entries);
      journal.count = count;
      ++member.moves;
    }
    Member& member;
    const uint64_t open;
    std::vector<Entry>& entries;
    size_t count;
  } const back{*member, open, entries, count};
  // The journal is walked backwards: if an address was given out several times, only the last block may live.
  for (size_t left = count; left > 0; --left) {
    if (pass.door != nullptr) left = pass.door->skip_dead(pass.key, entries.data(), left);
    if (left == 0) break;
    Entry& entry = entries[left - 1];
    if (entry.address == 0 || entry.lived()) continue;
    memory::BlockInfo block;
    if (!runtime_->look_up(entry.address, &block) || block.session != iteration.session_id() ||
        block.bytes != entry.bytes() || block.promoted)
      continue;
    if (block.kind == memory::Kind::kEphemeral) {
      const base::Status kept = iteration.keep(entry.address);
      if (kept.code() == GPUSHARE_NOT_FOUND) continue;  // another thread has freed it meanwhile
      if (!kept.ok()) return kept;
    }
    entry.bytes_and_lived |= Entry::kLived;
  }
  return {};
}

base::Status Allocator::close_session(const std::shared_ptr<executor::Session>& session) {
  if (session->runtime() != runtime_.get()) return foreign_session(*session);
  const std::shared_ptr<Member> member = member_of(session);
  {
    base::MutexLock lock(mutex_);
    if (default_ == member) {
      default_ = nullptr;
      has_default_ = false;
    }
  }
  if (!member->closing.exchange(true)) ++closing_;
  {
    base::MutexLock lock(member->mutex);
    member->take_back();  // each free may be the last
  }
  close_drained(session->id());
  return {};
}

void Allocator::close_drained(uint64_t session_id) {
  const auto member = members_.find(session_id);
  if (member == nullptr || !member->closing.load()) return;
  const executor::SessionInfo info = member->session->info();
  if (info.persistent_bytes + info.ephemeral_bytes + info.spilled_bytes > 0) {
    member->session->retire();
    return;
  }
  if (!member->session->close().ok() && !member->session->closed())
    return;  // inside one of its iterations: with the next block
  if (member->closing.exchange(false)) --closing_;
  members_.erase(session_id);
}

base::Status Allocator::begin_pool(PoolId id, PoolFilter filter) {
  base::Status status = pools_.begin(id, std::move(filter));
  decide_open();
  return status;
}

base::Status Allocator::end_pool(PoolId id) {
  GPUSHARE_RETURN_IF_ERROR(pools_.end(id));
  if (deferred_count_.load(std::memory_order_relaxed) > 0) retry_deferred();
  decide_open();
  return {};
}

base::Status Allocator::release_pool(PoolId id) {
  return pools_.release(id, [this](memory::Address chunk, void* native) { give_chunk(chunk, native); });
}

void Allocator::give_chunk(memory::Address chunk, void* native) {
  const auto stream = find_stream(native);
  uint64_t session_id = 0;
  if (memory::BlockInfo block; runtime_->look_up(chunk, &block)) session_id = block.session;
  (void)free_block(chunk, stream.ok() ? stream->get() : nullptr);
  if (session_id != 0 && closing_.load(std::memory_order_relaxed) > 0) close_drained(session_id);
}

base::Result<AllocatorInfo> Allocator::info(executor::Session* session) {
  AllocatorInfo out;
  out.limit_bytes = limit_bytes_.load(std::memory_order_relaxed);
  const auto count = [&](const Member& member) {
    out.allocations += member.allocations.load(std::memory_order_relaxed) +
                       member.journal.served.load(std::memory_order_relaxed);
    out.failures += member.failures.load(std::memory_order_relaxed);
    out.predicted += member.predicted.load(std::memory_order_relaxed);
  };
  if (session != nullptr) {
    if (session->runtime() != runtime_.get()) return foreign_session(*session);
    const executor::SessionInfo info = session->info();
    out.current_bytes = info.persistent_bytes + info.ephemeral_bytes;
    out.peak_bytes = info.peak_bytes;
    out.reserved_bytes = info.promised_persistent_bytes + info.promised_ephemeral_bytes;
    if (const auto member = members_.find(session->id())) count(*member);
    return out;
  }
  GPUSHARE_ASSIGN_OR_RETURN(const executor::RuntimeInfo info, runtime_->info());
  out.current_bytes = info.persistent_bytes + info.ephemeral_bytes;
  out.peak_bytes = info.peak_bytes;
  out.reserved_bytes = info.promised_bytes;
  for (const auto& member : members_.values()) count(*member);
  return out;
}

base::Status Allocator::reset_peaks(executor::Session* session) {
  if (session == nullptr) {
    runtime_->reset_peak();
    return {};
  }
  if (session->runtime() != runtime_.get()) return foreign_session(*session);
  session->reset_peak();
  return {};
}

base::Result<uint64_t> Allocator::trim() {
  if (deferred_count_.load(std::memory_order_relaxed) > 0) retry_deferred();
  return runtime_->trim();
}

base::Status Allocator::set_fraction(double fraction) {
  if (!(fraction > 0.0 && fraction <= 1.0))
    return {GPUSHARE_INVALID_ARGUMENT,
            base::format("the memory fraction is %g; it must be above 0 and at most 1", fraction)};
  GPUSHARE_ASSIGN_OR_RETURN(const executor::RuntimeInfo info, runtime_->info());
  limit_bytes_ = fraction == 1.0 ? UINT64_MAX
                                 : static_cast<uint64_t>(fraction * static_cast<double>(info.capacity_bytes));
  decide_open();
  return {};
}

void Allocator::add_observer(OutOfMemoryObserver observer) {
  auto added = std::make_shared<const OutOfMemoryObserver>(std::move(observer));
  base::MutexLock lock(mutex_);
  observers_.push_back(std::move(added));
}

}  // namespace gpushare::framework
