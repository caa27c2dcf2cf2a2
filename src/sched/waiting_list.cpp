// SPDX-License-Identifier: Apache-2.0
#include "sched/waiting_list.hpp"

#include "sched/scheduler_impl.hpp"

namespace gpushare::sched {

namespace {

constexpr uint64_t kNever = kUnknown;  // the need of a blocked session

}  // namespace

struct WaitingList::Chunk {
  struct Entry {
    SessionRecord* session;
    uint64_t persistent_bytes;
    uint64_t total_bytes;  // P + E
    uint32_t overtaken;    // added to the chunk's
    bool always;           // considered whatever it needs
    bool claims;
  };
  size_t number = 0;  // its place among the chunks
  // Over its entries.
  uint64_t least_persistent_bytes = kNever;
  uint64_t least_total_bytes = kNever;
  uint32_t overtaken = 0;  // of all of them, on top of their own
  uint32_t most_overtaken = 0;
  bool always = false;
  bool claims = false;
  std::vector<Entry> entries;

  static Entry entry_of(SessionRecord& session) {
    const bool blocked = session.blocked || session.stopped;
    return {&session,
            blocked ? kNever : session.persistent_bytes,
            blocked ? kNever : session.persistent_bytes + session.ephemeral_bytes,
            0,
            !blocked && (session.claiming || session.compute_units > 0),
            session.claiming};
  }
};

WaitingList::WaitingList() = default;
WaitingList::~WaitingList() = default;

void WaitingList::refresh(Chunk& chunk) {
  chunk.least_persistent_bytes = chunk.least_total_bytes = kNever;
  chunk.most_overtaken = 0;
  chunk.always = chunk.claims = false;
  for (const Chunk::Entry& entry : chunk.entries) {
    chunk.least_persistent_bytes = std::min(chunk.least_persistent_bytes, entry.persistent_bytes);
    chunk.least_total_bytes = std::min(chunk.least_total_bytes, entry.total_bytes);
    chunk.most_overtaken = std::max(chunk.most_overtaken, entry.overtaken);
    chunk.always = chunk.always || entry.always;
    chunk.claims = chunk.claims || entry.claims;
  }
}

void WaitingList::renumber(size_t from) {
  for (size_t i = from; i < chunks_.size(); ++i) chunks_[i]->number = i;
}

WaitingList::Position WaitingList::insert(SessionRecord& session, const Policy& policy) {
  if (chunks_.empty()) chunks_.push_back(std::make_unique<Chunk>());
  // The last chunk whose first entry is not behind the session.
  size_t low = 1, high = chunks_.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (goes_before(policy, session.view, chunks_[middle]->entries.front().session->view))
      high = middle;
    else
      low = middle + 1;
  }
  Chunk* chunk = chunks_[low - 1].get();
  size_t first = 0, last = chunk->entries.size();
  while (first < last) {
    const size_t middle = (first + last) / 2;
    if (goes_before(policy, session.view, chunk->entries[middle].session->view))
      last = middle;
    else
      first = middle + 1;
  }
  if (chunk->entries.size() == kMostEntries) {
    auto second = std::make_unique<Chunk>();
    const auto half = chunk->entries.begin() + kMostEntries / 2;
    second->entries.assign(half, chunk->entries.end());
    chunk->entries.erase(half, chunk->entries.end());
    second->overtaken = chunk->overtaken;
    for (const Chunk::Entry& entry : second->entries) entry.session->chunk = second.get();
    refresh(*chunk);
    refresh(*second);
    chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(low), std::move(second));
    renumber(low);
    if (first > kMostEntries / 2) {
      chunk = chunks_[low].get();
      first -= kMostEntries / 2;
    }
  }
  Chunk::Entry entry = Chunk::entry_of(session);
  // The chunk's count is taken off: the difference may wrap, the sum does not.
  entry.overtaken = session.overtaken - chunk->overtaken;
  if (session.overtaken < chunk->overtaken) {  // entries keep counts of at least 0: spread the chunk's
    for (Chunk::Entry& each : chunk->entries) each.overtaken += chunk->overtaken;
    chunk->overtaken = 0;
    entry.overtaken = session.overtaken;
  }
  chunk->entries.insert(chunk->entries.begin() + static_cast<std::ptrdiff_t>(first), entry);
  session.chunk = chunk;
  ++size_;
  refresh(*chunk);
  return {chunk->number, first};
}

WaitingList::Position WaitingList::erase(Position position) {
  Chunk& chunk = *chunks_[position.chunk];
  const auto entry = chunk.entries.begin() + static_cast<std::ptrdiff_t>(position.index);
  entry->session->overtaken = entry->overtaken + chunk.overtaken;
  entry->session->chunk = nullptr;
  chunk.entries.erase(entry);
  --size_;
  if (chunk.entries.empty()) {
    chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(position.chunk));
    renumber(position.chunk);
    return {position.chunk, 0};
  }
  refresh(chunk);
  return position.index < chunk.entries.size() ? position : Position{position.chunk + 1, 0};
}

void WaitingList::update(SessionRecord& session) {
  Chunk& chunk = *session.chunk;
  Chunk::Entry& entry = chunk.entries[position_of(session).index];
  const uint32_t overtaken = entry.overtaken;
  entry = Chunk::entry_of(session);
  entry.overtaken = overtaken;
  refresh(chunk);
}

WaitingList::Position WaitingList::next(Position position) const {
  return position.index + 1 < chunks_[position.chunk]->entries.size()
             ? Position{position.chunk, position.index + 1}
             : Position{position.chunk + 1, 0};
}

SessionRecord& WaitingList::at(Position position) const {
  return *chunks_[position.chunk]->entries[position.index].session;
}

WaitingList::Position WaitingList::position_of(const SessionRecord& session) const {
  const Chunk& chunk = *session.chunk;
  size_t index = 0;
  while (chunk.entries[index].session != &session) ++index;
  return {chunk.number, index};
}

std::vector<SessionRecord*> WaitingList::sessions() const {
  std::vector<SessionRecord*> out;
  out.reserve(size_);
  for (const auto& chunk : chunks_)
    for (const Chunk::Entry& entry : chunk->entries) out.push_back(entry.session);
  return out;
}

WaitingList::Position WaitingList::first_fit(Position from, const Room& room) const {
  for (size_t i = from.chunk; i < chunks_.size(); ++i) {
    const Chunk& chunk = *chunks_[i];
    if (!chunk.always && !room.holds(chunk.least_persistent_bytes, chunk.least_total_bytes)) continue;
    for (size_t j = i == from.chunk ? from.index : 0; j < chunk.entries.size(); ++j) {
      const Chunk::Entry& entry = chunk.entries[j];
      if (entry.always || room.holds(entry.persistent_bytes, entry.total_bytes)) return {i, j};
    }
  }
  return end();
}

WaitingList::Position WaitingList::first_overtaken(Position from, uint32_t most) const {
  for (size_t i = from.chunk; i < chunks_.size(); ++i) {
    const Chunk& chunk = *chunks_[i];
    if (chunk.overtaken + chunk.most_overtaken < most) continue;
    for (size_t j = i == from.chunk ? from.index : 0; j < chunk.entries.size(); ++j)
      if (chunk.overtaken + chunk.entries[j].overtaken >= most) return {i, j};
  }
  return end();
}

bool WaitingList::barred(Position position, uint32_t most) const {
  if (most != 0 && first_overtaken(begin(), most) < position) return true;
  for (size_t i = 0; i <= position.chunk && i < chunks_.size(); ++i) {
    const Chunk& chunk = *chunks_[i];
    if (!chunk.claims) continue;
    const size_t last = i < position.chunk ? chunk.entries.size() : position.index;
    for (size_t j = 0; j < last; ++j)
      if (chunk.entries[j].claims) return true;
  }
  return false;
}

bool WaitingList::any_claims() const {
  return std::any_of(chunks_.begin(), chunks_.end(), [](const auto& chunk) { return chunk->claims; });
}

void WaitingList::overtake(Position position) {
  for (size_t i = 0; i < position.chunk; ++i) ++chunks_[i]->overtaken;
  if (position.index == 0) return;
  Chunk& chunk = *chunks_[position.chunk];
  for (size_t j = 0; j < position.index; ++j) ++chunk.entries[j].overtaken;
  refresh(chunk);
}

}  // namespace gpushare::sched
