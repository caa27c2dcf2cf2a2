// Bytes: needs, room and paging, lanes, spare sessions, and elastic ranges that ask ranges of other processes.
// SPDX-License-Identifier: Apache-2.0
#include "client/remote_authority.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "base/saturate.hpp"
#include "base/units.hpp"

namespace gpushare::client {

using sched::ActionKind;
using sched::kNoLane;
using sched::LaneId;
using sched::SessionId;

namespace {

base::Status not_known() {
  return {GPUSHARE_NOT_FOUND, "no such session"};
}

}  // namespace

uint64_t RemoteAuthority::rounded_ephemeral(uint64_t bytes) const {
  return base::Steps{steps_.large, steps_.large}.round_up(bytes);
}

base::Status RemoteAuthority::set_need(SessionId session, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                                       uint64_t) {
  persistent_bytes = steps_.round_up(persistent_bytes);
  ephemeral_bytes = rounded_ephemeral(ephemeral_bytes);
  for (;;) {
    Record* record = find(session);
    if (record == nullptr) return not_known();
    const uint64_t need = base::add_saturated(persistent_bytes, ephemeral_bytes);
    if (need > base::add_saturated(record->spec.persistent_bytes, record->spec.ephemeral_bytes) &&
        need > sched::quota_in_granules(record->spec.quota_bytes, steps_.large))
      return {GPUSHARE_QUOTA_EXCEEDED, "session '" + record->spec.name + "' would need " +
                                           base::format_bytes(need) + "; its quota is " +
                                           base::format_bytes(record->spec.quota_bytes)};
    if (shrink_need(*record, persistent_bytes, ephemeral_bytes)) return {};
    if (!gone_.ok()) {
      GPUSHARE_RETURN_IF_ERROR(await_daemon(record));
      continue;  // everything may have changed
    }
    const uint64_t told = told_of(*record, ephemeral_bytes);
    const base::Status answer = await(
        ask_need(*record, persistent_bytes, told,
                 [this, of = record, persistent_bytes, ephemeral_bytes, told](const base::Status& asked) {
                   if (asked.ok()) has_need(*of, persistent_bytes, ephemeral_bytes, told);
                 }));
    if (answer.ok() || gone_.ok()) return answer;
  }
}

// A lane that shrinks is counted as it was until its memory is back.
uint64_t RemoteAuthority::told_of(const Record& record, uint64_t ephemeral_bytes) {
  return record.lane == kNoLane ? ephemeral_bytes : std::max(ephemeral_bytes, record.told_ephemeral_bytes);
}

// A need that does not grow is never refused. False: it grows.
bool RemoteAuthority::shrink_need(Record& record, uint64_t persistent_bytes, uint64_t ephemeral_bytes) {
  const uint64_t told = told_of(record, ephemeral_bytes);
  const uint64_t had_persistent = record.spec.persistent_bytes, had_told = record.told_ephemeral_bytes;
  if (persistent_bytes > had_persistent || told > had_told) return false;
  has_need(record, persistent_bytes, ephemeral_bytes, told);
  if (record.growth != Growth::kNone)
    record.growth = Growth::kAskedAndFell;
  else if (record.is_known() && (persistent_bytes < had_persistent || told < had_told))
    tell_need(record);
  return true;
}

void RemoteAuthority::has_need(Record& record, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                               uint64_t told_bytes) {
  take_pieces(record);
  record.told_ephemeral_bytes = told_bytes;
  record.spec.persistent_bytes = persistent_bytes;
  const bool resize = record.spec.ephemeral_bytes != ephemeral_bytes;
  record.spec.ephemeral_bytes = ephemeral_bytes;
  if (resize && record.lane != kNoLane && !record.closes())
    actions_.push_back({ActionKind::kResizeLane, record.lane, sched::kNoSession, ephemeral_bytes});
}

void RemoteAuthority::put_need(const Record& record, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                               uint64_t* out_persistent, uint64_t* out_ephemeral) {
  const bool own = record.own_lane != OwnLane::kNo;
  *out_persistent = own ? base::add_saturated(persistent_bytes, ephemeral_bytes) : persistent_bytes;
  *out_ephemeral = record.own_lane == OwnLane::kYes ? 0 : ephemeral_bytes;
}

// One question at a time for a session; what its need fell by meanwhile is told after a refusal.
std::shared_ptr<RemoteAuthority::Question> RemoteAuthority::ask_need(Record& record,
                                                                     uint64_t persistent_bytes,
                                                                     uint64_t ephemeral_bytes, Then then) {
  const uint32_t sequence = next_sequence_++;
  auto message = make_message<MessageType::kNeed>(sequence);
  message.session = record.spec.id;
  put_need(record, persistent_bytes, ephemeral_bytes, &message.persistent_bytes, &message.ephemeral_bytes);
  record.growth = Growth::kAsked;
  return ask_about(
      record, bytes_of(message), sequence,
      [this, of = &record, then = std::move(then)](const base::Status& status, const Reply&) -> base::Status {
        const bool fell = std::exchange(of->growth, Growth::kNone) == Growth::kAskedAndFell;
        if (of->bytes == Bytes::kEnding)
          return {GPUSHARE_INVALID_STATE, "session '" + of->spec.name + "' has ended"};
        then(status);
        if (!status.ok() && fell && of->is_known()) tell_need(*of);
        return status;
      });
}

// A need that does not grow: nobody waits for the answer.
void RemoteAuthority::tell_need(const Record& record) {
  auto message = make_message<MessageType::kNeed>();  // sequence 0: no reply
  message.session = record.spec.id;
  put_need(record, record.spec.persistent_bytes, record.told_ephemeral_bytes, &message.persistent_bytes,
           &message.ephemeral_bytes);
  send(bytes_of(message));
}

base::Status RemoteAuthority::needs_own_lane(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return not_known();
  GPUSHARE_RETURN_IF_ERROR(gone_);  // its iteration runs in a shared lane: await_daemon()
  if (record->pieces == nullptr || record->own_lane != OwnLane::kNo) return {};
  record->own_lane = OwnLane::kBoth;
  return await(ask_need(*record, record->spec.persistent_bytes, record->told_ephemeral_bytes,
                        [of = record](const base::Status& answer) {
                          if (!answer.ok() && of->own_lane == OwnLane::kBoth) of->own_lane = OwnLane::kNo;
                        }));
}

void RemoteAuthority::has_own_lane(SessionId session, bool has, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->own_lane != OwnLane::kBoth) return;
  record->own_lane = has ? OwnLane::kYes : OwnLane::kNo;
  if (has) {
    count_shared(*record, false);  // its iteration is under way, but not in a shared lane any more
    record->pieces = nullptr;
  }
  if (record->is_known()) tell_need(*record);
}

base::Status RemoteAuthority::set_capacity(uint64_t, uint64_t) {
  return {GPUSHARE_UNSUPPORTED,
          "the capacity of a shared device is its operator's choice (gpushare daemon --set-capacity SIZE)"};
}

void RemoteAuthority::set_context_bytes(uint64_t bytes, uint64_t) {
  if (std::exchange(context_bytes_, bytes) != bytes) tell_context();
}

base::Status RemoteAuthority::set_coordination(const std::optional<sched::CoordinatorOptions>&, uint64_t) {
  return {GPUSHARE_UNSUPPORTED,
          "the coordinator of a shared device is its operator's choice (gpushare daemon --coordinate)"};
}

// The process's own affair: the daemon is not asked for more.
void RemoteAuthority::set_quota(SessionId session, uint64_t bytes) {
  if (Record* record = find(session)) record->spec.quota_bytes = bytes;
}

bool RemoteAuthority::set_spare(SessionId session, std::optional<double> worth_ns, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->bytes == Bytes::kDropping) return false;
  if (!worth_ns && !record->worth_ns) return true;
  record->worth_ns = worth_ns;
  if (record->is_known()) tell_worth(*record);
  return true;
}

void RemoteAuthority::tell_worth(Record& record) {
  tell(MessageType::kSetSpare, record, std::bit_cast<uint64_t>(record.worth_ns.value_or(-1)));
}

std::vector<SessionId> RemoteAuthority::dropping() const {
  std::vector<SessionId> out;
  for (const auto& [id, record] : sessions_)
    if (record->bytes == Bytes::kDropping) out.push_back(id);
  std::sort(out.begin(), out.end());
  return out;
}

void RemoteAuthority::set_link(double ns_per_byte) {
  if (!std::isfinite(ns_per_byte) || ns_per_byte <= 0) return;
  link_ns_per_byte_ = ns_per_byte;
  const auto known = std::find_if(sessions_.begin(), sessions_.end(),
                                  [](const auto& each) { return each.second->is_known(); });
  if (known == sessions_.end()) return;
  tell(MessageType::kSetLink, *known->second, std::bit_cast<uint64_t>(ns_per_byte));
}

void RemoteAuthority::unplaced(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || record->lane == kNoLane || record->closes()) return;
  close_lane(*record, end_page_in(*record) ? Bytes::kTurnedBack : Bytes::kUnplaced);
}

void RemoteAuthority::page_part(SessionId session, uint64_t bytes, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || !record->goes_out()) return;
  tell(MessageType::kPagePart, *record, bytes);
}

void RemoteAuthority::page_done(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  if (end_page_in(*record)) {
    record->bytes = Bytes::kResident;
    tell(MessageType::kPageDone, *record);
    mark(*record);
    if (record->known == Known::kNo && gone_.ok()) page_out_when_drained(*record);  // its claim was refused
  } else if (record->goes_out()) {
    close_lane(*record, Bytes::kLeft);
  }
}

void RemoteAuthority::page_out_failed(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || !record->goes_out()) return;
  record->bytes = Bytes::kResident;
  tell(MessageType::kPageOutFailed, *record);
  mark(*record);
}

// The daemon asks busy sessions with the others.
bool RemoteAuthority::make_room(SessionId session, const sched::RoomAsk& asked, uint64_t) {
  Record* record = find(session);
  if (record == nullptr || !record->is_known() || asked.from == sched::Giver::kBoundaries) return false;
  const bool ranges = asked.from == sched::Giver::kRanges, over = ranges && asked.bytes == 0;
  const uint32_t sequence = over ? 0 : next_sequence_++;
  auto message = make_message<MessageType::kRoom>(sequence);
  message.session = session;
  message.bytes = asked.bytes;
  message.elsewhere_bytes = asked.elsewhere_bytes;
  message.from = static_cast<uint32_t>(asked.from);
  message.commit = asked.commit ? 1 : 0;
  if (over) {
    send(bytes_of(message));
    return false;
  }
  bool coming = true;
  const std::thread::id me = std::this_thread::get_id();
  const base::Status answer = await(
      ask_about(*record, bytes_of(message), sequence,
                [&, of = record, me](const base::Status& said, const Reply& reply) -> base::Status {
                  if (!said.ok()) return said;
                  if (!ranges) {
                    of->room_pending = true;
                    ++of->rooms_coming;
                    if (std::find(of->room_users.begin(), of->room_users.end(), me) == of->room_users.end())
                      of->room_users.push_back(me);
                  } else {
                    *asked.out_silent = text_of(reply.text);
                    coming = reply.value != 0;
                  }
                  return {};
                }));
  return answer.ok() && coming;
}

bool RemoteAuthority::making_room(SessionId session) const {
  const Record* record = find(session);
  return record != nullptr && record->room_pending;
}

void RemoteAuthority::set_ranges(SessionId session, uint64_t bytes, uint64_t answer_ns,
                                 double price_ns_per_byte) {
  Record* record = find(session);
  if (record == nullptr || (record->range_bytes == bytes && record->range_answer_ns == answer_ns)) return;
  record->range_bytes = bytes;
  record->range_answer_ns = answer_ns;
  record->range_price = price_ns_per_byte;
  if (record->is_known()) tell_ranges(*record);
}

void RemoteAuthority::tell_ranges(const Record& record) {
  auto message = make_message<MessageType::kRangeHas>();
  message.session = record.spec.id;
  message.bytes = record.range_bytes;
  message.answer_ns = record.range_answer_ns;
  message.price_ns_per_byte = record.range_price;
  send(bytes_of(message));
}

void RemoteAuthority::answer_ranges(SessionId session, uint64_t bytes) {
  if (Record* record = find(session)) tell(MessageType::kRangeAnswer, *record, bytes);
}

void RemoteAuthority::room_used(SessionId session, uint64_t) {
  Record* record = find(session);
  if (record == nullptr) return;
  std::erase(record->room_users, std::this_thread::get_id());
  if (record->is_known()) tell(MessageType::kRoomUsed, *record);
}

void RemoteAuthority::open_lane(Record& record) {
  const LaneId lane = lane_ids_.take();
  if (lane == lanes_.size()) lanes_.emplace_back();
  lanes_[lane] = &record;
  record.lane = lane;
  actions_.push_back({ActionKind::kOpenLane, lane, sched::kNoSession, record.spec.ephemeral_bytes});
}

void RemoteAuthority::free_lane(LaneId lane) {
  lanes_[lane] = nullptr;
  lane_ids_.give_back(lane);
}

void RemoteAuthority::close_lane(Record& record, Bytes to) {
  const bool under_way = record.closes();
  record.bytes = to;
  if (under_way) return;
  if (record.lane == kNoLane) return lane_closed(record);
  actions_.push_back({ActionKind::kCloseLane, record.lane, sched::kNoSession, 0});
}

void RemoteAuthority::start_page_in(Record& record) {
  record.bytes = Bytes::kComing;
  count_shared(record, true);
  open_lane(record);
  actions_.push_back({ActionKind::kPageIn, record.lane, record.spec.id, record.spec.persistent_bytes});
}

bool RemoteAuthority::end_page_in(Record& record) {
  if (record.bytes != Bytes::kComing) return false;
  count_shared(record, false);
  return true;
}

// The daemon is not believed to know what is in flight here: a turn that another process passed on may be news to it.
void RemoteAuthority::page_out_when_drained(Record& record) {
  if (record.in_flight > 0) {
    record.bytes = Bytes::kDraining;
    return;
  }
  record.bytes = record.worth_ns ? Bytes::kDropping : Bytes::kLeaving;
  const ActionKind kind = record.worth_ns ? ActionKind::kDrop : ActionKind::kPageOut;
  actions_.push_back({kind, record.lane, record.spec.id, record.spec.persistent_bytes});
}

void RemoteAuthority::lane_applied(LaneId lane, uint64_t bytes, uint64_t) {
  Record* record = lane < lanes_.size() ? lanes_[lane] : nullptr;
  if (record == nullptr) return;
  if (record == &given_up_) {
    if (bytes == 0) free_lane(lane);
    return;
  }
  if (!record->closes()) {
    const uint64_t held = std::max(record->spec.ephemeral_bytes, bytes);
    if (held >= record->told_ephemeral_bytes || !record->is_known()) return;
    record->told_ephemeral_bytes = held;
    take_pieces(*record);
    if (record->pieces != nullptr) record->pieces->cut(held);
    tell_need(*record);
    return;
  }
  if (bytes == 0) lane_closed(*record);
}

void RemoteAuthority::lane_closed(Record& record) {
  if (record.lane != kNoLane) free_lane(record.lane);
  record.lane = kNoLane;
  record.told_ephemeral_bytes = 0;
  take_pieces(record);
  if (record.pieces != nullptr) record.pieces = std::make_shared<base::Pieces>();
  if (record.bytes == Bytes::kEnding) {
    tell(MessageType::kLeave, record);
    forget(record);
    return;
  }
  const Bytes was = record.bytes;
  record.bytes = was == Bytes::kUnplaced ? Bytes::kWaiting : Bytes::kOut;
  if (record.is_known()) tell(was == Bytes::kLeft ? MessageType::kPageDone : MessageType::kUnplaced, record);
  if (record.known == Known::kNo && gone_.ok()) declare_queued(record);
  mark(record);
}

void RemoteAuthority::give_lane_up(Record& record) {
  lanes_[record.lane] = &given_up_;
  actions_.push_back({ActionKind::kCloseLane, record.lane, sched::kNoSession, 0});
  record.lane = kNoLane;
  record.told_ephemeral_bytes = 0;
}

std::shared_ptr<base::Pieces> RemoteAuthority::lane_pieces(LaneId lane) const {
  return lane < lanes_.size() && lanes_[lane] != nullptr ? lanes_[lane]->pieces : nullptr;
}

void RemoteAuthority::take_piece(Record& record, std::vector<Descriptor> descriptors, uint64_t bytes) {
  if (record.pieces == nullptr || descriptors.size() != 1 || bytes == 0) return;
  record.pieces->add(descriptors.front().release(), bytes);
}

void RemoteAuthority::take_pieces(Record& record) {
  if (record.pieces == nullptr) return;
  std::vector<Event> mine;
  const auto take = [&](std::deque<Event>& events) {
    const auto is_piece = [&](const Event& event) {
      return event.type == MessageType::kLaneHere && event.session == record.spec.id;
    };
    for (Event& event : events)
      if (is_piece(event)) mine.push_back(std::move(event));
    std::erase_if(events, is_piece);
  };
  take(record.early);
  {
    base::MutexLock lock(inbox_mutex_);
    take(events_);
  }
  for (Event& event : mine) take_piece(record, std::move(event.descriptors), event.value);
}

sched::Limit RemoteAuthority::capacity() const {
  const uint64_t said = connection_->page->capacity();
  const uint64_t target = said == 0 ? capacity_bytes_ : std::min(said, capacity_bytes_);
  return {target, std::max(target, promised_bytes())};
}

uint64_t RemoteAuthority::promised_bytes() const {
  return std::min(connection_->page->promised(), capacity_bytes_);
}

uint64_t RemoteAuthority::lane_bytes(LaneId lane) const {
  return lane < lanes_.size() && lanes_[lane] != nullptr
             ? std::max(lanes_[lane]->spec.ephemeral_bytes, lanes_[lane]->told_ephemeral_bytes)
             : 0;
}

}  // namespace gpushare::client
