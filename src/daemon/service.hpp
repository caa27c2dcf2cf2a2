// service.hpp: one scheduler for the sessions of all processes of a machine: `gpushare daemon`. Processes reach it
// through client::RemoteAuthority; protocol and leases are in src/client.
//
// One thread turns messages into events of sched::Scheduler and its decisions into messages. A turn is a lease:
// while nobody else wants the device, its holder begins and ends iterations without a message. The service
// reads the device time that the holder measured now and then, and believes at most the time for which the
// holder had the turn.
//
// Ephemeral memory is private to a process unless the operator lets lanes be shared: P and E of a session are both
// counted as bytes that it keeps while it is resident. So the scheduler's lanes are queues of turns; there is one a
// device unless max_lanes says otherwise, since contexts of different processes take turns on a device anyhow. With
// shared lanes each user has a lane, whose memory is made here (lanes.hpp) and mapped by the user's processes; only the
// session with the turn touches it.
//
// A process is dead when the kernel says so (pidfd), never because a socket closed: until then its bytes stay promised.
// A session that keeps its turn longer than the lease while another waits loses the turn, not its bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/status.hpp"
#include "client/channel.hpp"
#include "client/lease_page.hpp"
#include "client/protocol.hpp"
#include "client/status.hpp"
#include "daemon/contexts.hpp"
#include "daemon/gpu_identity.hpp"
#include "daemon/group_page.hpp"
#include "daemon/images.hpp"
#include "daemon/kernel_limits.hpp"
#include "daemon/lanes.hpp"
#include "daemon/ranges.hpp"
#include "daemon/user_limits.hpp"
#include "sched/scheduler.hpp"
#include "sched/time_cap.hpp"

namespace gpushare::daemon {

struct ServiceOptions {
  std::string socket;
  std::vector<std::string> devices = {"auto"};
  uint64_t capacity_bytes = 0;  // of each device; 0 = what is free at start, less a 64th
  std::string policy = "fair";
  uint32_t max_lanes = 1;  // turns at a time; more than 1 where kernels of several processes run side by side
  bool share_lanes =
      false;  // sessions of one user have their ephemeral memory together. Not with max_lanes above 1
  uint64_t lease_ns = 10'000'000'000;            // of a turn while another waits
  uint64_t least_stay_ns = sched::kLeastStayNs;  // of sessions that take turns in the device's memory
  uint64_t images_bytes = 4ull << 30;            // of host memory, for images that are open
  std::optional<sched::CoordinatorOptions> coordination;  // of each device; else no coordinator
  bool kill_overdue = false;  // a process that exceeded its lease, or does not let go of an image for as long
  bool all_users = false;     // else only the service's own user may connect
  uint32_t max_processes_per_user = 64;  // for each device
  uint32_t max_sessions_per_user = 1024;
  RankLimits ranks;
  KernelLimits::Places kernel_limits;
  // Makes a policy of the operator's own for each device; empty: the built-in one that `policy` names.
  std::function<base::Result<std::unique_ptr<sched::Policy>>()> make_policy;
};

class SharedDevice;
struct Claim;
struct RemoteSession;

// Leases of one process, or of all processes of a user that pass turns to each other.
struct LeaseTable {
  std::shared_ptr<client::LeasePage> page;
  std::vector<uint64_t> epochs;  // of the last lease, by slot; they go on when the slot is another session's
  std::vector<bool> used;
};

// A connection of a process.
struct Process {
  uint64_t id = 0;
  client::Descriptor socket;  // empty once it closed
  client::Descriptor pidfd;
  client::Peer peer;
  uint64_t connected_ns = 0;
  bool welcome = false;  // it said Hello
  bool dead = false;     // to be removed
  uint64_t instance = 0;
  std::string program;
  uint32_t pci_address = 0;  // of the device as it was asked for; 0: by name, or any
  SharedDevice* device = nullptr;
  std::shared_ptr<LeaseTable> leases;
  bool passes_turns = false;
  std::shared_ptr<sched::TimeCap> cap;          // of its sessions that are of no group; null: none
  std::map<uint64_t, RemoteSession*> sessions;  // by the process's number
};

// A message at hand. answer() says no word where the process asked for none.
using Refusals = std::map<std::string, uint64_t>;                    // how many, by the status's name
void count_refusal(Refusals& refusals, const base::Status& status);  // if the status is one

struct Request {
  Process& process;
  uint32_t sequence;
  std::vector<client::Descriptor>& descriptors;
  Refusals& refusals;
  void answer(const base::Status& status, uint32_t value = 0, const std::string& told = {},
              std::span<const int> files = {}) const;
};

// A session of a process.
struct RemoteSession {
  // kReady: waits for a turn. kOverdue: its turn was taken back, and it has not said that it is done.
  enum class Turn : uint8_t { kNone, kReady, kLeased, kOverdue };
  // What it does with its bytes where its claim pages out or in. kHere: nothing. kTold: it has not answered. kParts: nor then,
  // but it gets no blocks on the device from now on. kOut: it has answered, and gets none until it is in again.
  enum class Move : uint8_t { kHere, kTold, kParts, kOut };
  // Its images. kWaits: set aside until they are there. kHas: for its turn. kRetry: as kHas, but one could not be had: the turn
  // goes back, for another try.
  enum class ImageState : uint8_t { kNone, kWaits, kHas, kRetry };
  uint64_t number = 0;  // the process's
  Process* process = nullptr;
  Claim* claim = nullptr;
  std::string name;
  uint32_t slot = 0;
  Turn turn = Turn::kNone;
  Move move = Move::kHere;
  ImageState image_state = ImageState::kNone;
  size_t pieces = 0;  // of its shared lane that it was sent
  uint64_t epoch = 0;
  uint64_t seen_service_ns = 0, seen_iterations = 0;
  uint64_t unread_ns = 0;                   // of this turn, that its claim was not billed for yet
  uint64_t service_ns = 0, iterations = 0;  // that were believed
  std::vector<ImageUse*> images;            // none where it is of a group
  std::vector<uint64_t> wanted_images;      // by Images, of the scheduler
  sched::RangeId range = 0;                 // by Ranges; 0: it has said nothing of any
  sched::SessionClass cls = sched::SessionClass::kGuaranteed;  // as its process says

  bool ready() const { return turn == Turn::kReady; }
  bool leased() const { return turn == Turn::kLeased; }
  bool overdue() const { return turn == Turn::kOverdue; }
  bool pages() const { return move == Move::kTold || move == Move::kParts; }
  bool begun() const { return move == Move::kParts || move == Move::kOut; }
};

// The limits that the sessions of a group (Arrive::kOwnClaim) share. Each is a session of the scheduler, with memory
// and turns of its own.
struct GroupLimits {
  uint64_t group = 0;
  uint64_t memory_bytes = 0;  // 0 = no limit
  double weight = 0;          // likewise
  std::vector<Claim*> claims;
};

// A session of the scheduler: one of a process, or all sessions of a group (Arrive::group), which have memory, weight
// and turns together: the first makes the claim, and the claim is the last one's too. A group has the turn while one of
// its sessions has a lease.
struct Claim {
  // kReady: as the scheduler knows it, a member waits for a turn. kKept: it has the turn, which is left to it although others wait
  // (keeps()), as long as it begins its next iteration at once.
  enum class Turn : uint8_t { kNone, kReady, kHolds, kKept };
  // kHere: on the device, or not admitted yet. kFailing: a member cannot go out. kReturning: so the others come in again.
  // kHoming: bytes that it used from the host come in while it has turns; kHomingThenOut: and then it goes out at once.
  enum class Bytes : uint8_t { kHere, kGoing, kFailing, kOut, kComing, kReturning, kHoming, kHomingThenOut };
  uint64_t id = 0;     // the scheduler's
  uint64_t group = 0;  // 0: one session alone
  std::vector<std::unique_ptr<RemoteSession>> members;
  uint64_t persistent_bytes = 0, ephemeral_bytes = 0;
  bool shares_lane = false;  // E is of the lane of its user; else it is counted like P
  sched::SessionClass counts_as = sched::SessionClass::kGuaranteed;
  double weight = 1;                    // as its process said
  uint64_t limit_bytes = 0;             // by the coordinator; 0 = none
  std::shared_ptr<GroupLimits> limits;  // null: none
  std::shared_ptr<sched::TimeCap> cap;  // with others of its group or process; null: none
  std::unique_ptr<GroupPage>
      page;  // of a group of preloaded programs; null: it has none, or the daemon cannot use it
  sched::LaneId lane = sched::kNoLane;  // of turns
  Turn turn = Turn::kNone;
  Bytes bytes = Bytes::kHere;
  size_t pages = 0;          // members that were told to page out or in, and have not answered
  uint64_t part_bytes = 0;   // that its members have moved out, and that nobody is promised yet
  uint64_t short_bytes = 0;  // that it lacks and uses from the host: a page-out ended in part (end_in_part())
  bool has_room = false;     // it was told that room is made, and has not said that it has used it
  uint64_t granted_ns = 0;
  uint64_t believed_ns = 0;      // service since then
  uint64_t wanted_since_ns = 0;  // 0 = nobody else wants its turn
  bool slow = false;             // it did not begin at once in the turn that it kept last
  uint64_t returned_ns = 0;      // its turn before
  uint64_t watched_ns = 0;  // since when its lease is idle or not, with so many iterations; 0: nobody looked
  uint64_t watched_iterations = 0;
  bool watched_idle = false;
  uint64_t unread_ns = 0,
           unread_iterations = 0;  // of its members in this turn, that the scheduler does not know yet

  bool leased() const { return turn == Turn::kHolds || turn == Turn::kKept; }
  bool goes_out() const { return bytes == Bytes::kGoing || bytes == Bytes::kFailing; }
  bool comes_in() const { return bytes == Bytes::kComing || bytes == Bytes::kReturning; }
  bool pages_now() const { return goes_out() || comes_in() || bytes == Bytes::kHomingThenOut; }
};

void tell(const RemoteSession& session, client::MessageType type, uint64_t value = 0);
void tell(const Claim& claim, client::MessageType type);  // its members
// What the scheduler may still promise.
inline uint64_t free_bytes(const sched::Scheduler& scheduler) {
  const uint64_t capacity = scheduler.capacity().target_bytes;
  return capacity - std::min(capacity, scheduler.promised_bytes());
}

// The sessions of one device: events in, leases and messages out. Used by the service's thread alone.
class SharedDevice {
 public:
  // `granularity_bytes`: what the device maps; 0: it cannot share memory.
  SharedDevice(std::string device, uint64_t capacity_bytes, uint64_t granularity_bytes,
               const ServiceOptions& options, LogLimit& log_limit, std::unique_ptr<sched::Policy> policy,
               std::function<void()> wake);
  const std::string& name() const { return name_; }
  uint64_t capacity_bytes() const { return capacity_bytes_; }
  // As gpushare_backend_device_info has it; 0: none is known.
  uint32_t pci_address() const { return pci_address_; }
  void set_pci_address(uint32_t address) {
    pci_address_ = address;
    identity_ = identity_of(address);
    if (address == 0) return;
    KernelLimits::Places places = options_.kernel_limits;
    if (places.record.empty() && !options_.socket.empty()) places.record = options_.socket + ".limits";
    kernel_limits_ = std::make_unique<KernelLimits>(address, std::move(places));
  }
  std::string policy_name() const { return scheduler_.policy_name(); }

  // The leases that a process of the user gets.
  base::Result<std::shared_ptr<LeaseTable>> leases_for(uid_t user, bool passes_turns);
  // `page`: on which the process counts with others of its group; null: none.
  base::Status arrive(Process& process, const client::Arrive& message, std::unique_ptr<GroupPage> page,
                      uint32_t* out_slot);
  // What the session's process says of it: a message of kind EVENT. `request` answers it.
  void handle(RemoteSession& session, client::MessageType type, std::span<const std::byte> message,
              const Request& request);
  void remove(RemoteSession& session);
  // The connection of its process is gone, the process may live: it gets no turns.
  void disconnected(RemoteSession& session);
  // The connection of a process is gone, or the process is: after its sessions.
  void disconnected(Process& process) { images_.disconnected(process); }
  void died(Process& process) {
    images_.died(process);
    contexts_.ended(process);
  }
  base::Status set_context(const Process& process, uint64_t bytes, bool asks) {
    take_back_offers();
    return contexts_.set(process, bytes, asks);
  }
  uint64_t context_bytes(const Process& process) const { return contexts_.bytes(process); }
  Images& images() { return images_; }
  // 0: all that the device began with. As sched::Authority::set_capacity.
  base::Status set_capacity(uint64_t bytes);
  // Decides what can be decided. After any event.
  void pump();
  // Reads the holders' measurements, renews their leases and takes overdue ones back. Returns when to call again,
  // in nanoseconds from now; UINT64_MAX if only an event can change anything.
  uint64_t tick(uint64_t now_ns);
  size_t sessions() const { return claims_.size(); }  // of the scheduler
  client::DeviceStatus status() const;
  client::SessionStatus status_of(const RemoteSession& session) const;
  // Invariants, for tests; empty when they hold.
  std::string check() const;

 private:
#define GPUSHARE_ON_CALL(handler, fields)
#define GPUSHARE_ON_ANSWER(handler, fields)
#define GPUSHARE_ON_NEWS(handler, fields)
#define GPUSHARE_ON_EVENT(handler, fields) \
  void on_##handler(RemoteSession& session, const client::fields& message, const Request& request);
#define GPUSHARE_ON(name, fields, kind, handler) GPUSHARE_ON_##kind(handler, fields)
  GPUSHARE_MESSAGES(GPUSHARE_ON)
#undef GPUSHARE_ON
#undef GPUSHARE_ON_EVENT
#undef GPUSHARE_ON_NEWS
#undef GPUSHARE_ON_ANSWER
#undef GPUSHARE_ON_CALL
  base::Status need(RemoteSession& session, const client::Need& message);
  base::Status make_room(RemoteSession& session, sched::RoomAsk ask);
  // Somebody wants a turn or memory, or more is promised than should be: turns end at their boundaries.
  bool contended() const {
    return ready_ > 0 || scheduler_.waiting() > 0 ||
           scheduler_.promised_bytes() > scheduler_.capacity().target_bytes;
  }
  Claim* find_group(uint64_t group, uid_t user) const;
  // The limits that an arriving session has with others; null: none.
  std::shared_ptr<GroupLimits> limits_of(const client::Arrive& message);
  // Whether a group may need `more_bytes` more. Its preloaded programs lend bytes that they do not hold. `asks`: the
  // claim whose need grows; null: a new session. Errors: QUOTA_EXCEEDED.
  base::Status within(const GroupLimits* limits, const Claim* asks, const std::string& session,
                      uint64_t more_bytes, uint64_t now_ns);
  bool lend(Claim& lender, uint64_t bytes, uint64_t now_ns);
  // The driver's own limit follows that on the page of the claim's preloaded programs, if they have one.
  void follow_limit(const Claim& claim);
  // Preloaded programs get back what the group's other sessions no longer need.
  void take_back_loan(const GroupLimits* limits, uint64_t now_ns);
  // The part of the declared bytes that the first of a group's preloaded programs is promised: no more than the other
  // sessions leave.
  uint64_t left_for_page(const GroupLimits* limits, uint64_t bytes, GroupPage& page, uint64_t now_ns) const;
  // Divides the weight of a group among those of its sessions that use the device.
  void divide_weight(const GroupLimits* limits, uint64_t now_ns);
  void set_ready(Claim& claim, bool ready);
  // A session waits for a turn, or no longer.
  void now_ready(RemoteSession& session, uint64_t now_ns);
  void not_ready(RemoteSession& session, uint64_t now_ns);
  void announce(Claim& claim, uint64_t now_ns);
  // The cap of an arriving session, or of one that is to have this cap from now on; null: none.
  std::shared_ptr<sched::TimeCap> cap_of(Process& process, uint64_t group, double share, uint64_t now_ns);
  void set_cap(RemoteSession& session, double share, uint64_t now_ns);
  static bool capped(const Claim& claim) {
    return claim.cap != nullptr && claim.cap->binds();
  }
  // Sessions whose debts are repaid wait for a turn again. Returns whether there are any.
  bool announce_repaid(uint64_t now_ns);
  // The parts of arrive(): what can be refused without looking further; a claim for a session that joins none; the scheduler's
  // description of it.
  static base::Status check_arrival(const Process& process, const client::Arrive& message);
  base::Result<Claim*> make_claim(const Process& process, const client::Arrive& message,
                                  const std::string& name, GroupPage* page, uint64_t now_ns);
  sched::SessionSpec spec_of(const Process& process, const client::Arrive& message, const std::string& name,
                             Claim& claim, bool limited) const;
  void joined(Claim& claim, RemoteSession& session, bool was_there, bool runs, uint64_t now_ns);
  static void tell_terms(const RemoteSession& session, sched::SessionClass cls, uint64_t limit_bytes);
  void start_paging(Claim& claim, Claim::Bytes to);      // kGoing: out; else in
  void paged(Claim& claim, bool done, uint64_t now_ns);  // one of its members has answered
  // Promises others what the members of the claim have moved out, once all of them have begun to.
  void give_parts(Claim& claim, uint64_t now_ns);
  // A group cannot go out whole. Bytes that others have been promised stay on the host, where the group uses it until
  // there is room again.
  void end_in_part(Claim& claim, uint64_t now_ns);
  static void tell_out(const Claim& claim,
                       client::MessageType type);  // its members that have begun to go out
  bool regrow(Claim& claim, uint64_t now_ns);      // to all of its bytes; false: there is no room
  void come_home(Claim& claim);                    // it has been promised them
  bool regrow_all(uint64_t now_ns);                // true if one has
  // For members whose connections have closed: they do not go out, and others do that can. True if there were any.
  bool answer_for_silent();
  void carry_out(const sched::Action& action);
  void carry_out(const sched::Action& action, Claim& claim);
  void page_out(Claim& claim);
  void page_in(Claim& claim, uint64_t now_ns);
  bool carry_out_all();  // what the scheduler has decided; false: nothing
  // Shared lanes. Their E is promised in whole pieces.
  base::Status set_need(Claim& claim, uint64_t persistent_bytes, uint64_t ephemeral_bytes, uint64_t now_ns);
  uint64_t lane_need(uint64_t ephemeral_bytes) const;
  void size_lane(sched::LaneId lane, uint64_t bytes);
  // Sends the session the pieces that it needs of its lane; false if they could not be made.
  bool send_lane(Claim& claim);
  void unplace(Claim& claim, uint64_t now_ns);
  void leave_lane(Claim& claim);  // its process has unmapped it
  // Nobody has a turn in the shared lane of a session that is overdue.
  void set_overdue(RemoteSession& session, bool overdue);
  void grant(Claim& claim, sched::LaneId lane, uint64_t now_ns);
  void lease_to(RemoteSession& session, client::LeaseState state, uint64_t now_ns);
  void start_turn(Claim& claim, sched::LaneId lane, uint64_t granted_ns, uint64_t now_ns);
  bool want_back(Claim& claim, uint64_t now_ns);  // true if it is back
  // The turn stays although others wait for it.
  bool keeps(Claim& claim, uint64_t now_ns);
  // Says how long a turn that is asked back may still go on.
  void time_turn(Claim& claim, uint64_t now_ns);
  // Offers stand while the service sleeps. Before the service decides anything it takes them back, and notes the turns
  // that were passed.
  void take_back_offers();
  void make_offers();
  void offer(sched::LaneId lane, uint64_t now_ns);
  static bool passes(const Claim& claim) {
    return claim.group == 0 && claim.members.front()->process->passes_turns;
  }
  // An image could not be had in this turn.
  static bool retries(const Claim& claim) {
    return claim.members.front()->image_state == RemoteSession::ImageState::kRetry;
  }
  // How much service may still be believed.
  static uint64_t grace_ns(const Claim& claim, uint64_t now_ns) {
    const uint64_t held_ns = now_ns - std::min(now_ns, claim.granted_ns);
    return held_ns - std::min(held_ns, claim.believed_ns);
  }
  void collect(RemoteSession& session, uint64_t now_ns);
  void member_done(RemoteSession& session, uint64_t now_ns);
  // The device time that the holder has measured since the last call, at most as long as it had the turn.
  void read_service(Claim& claim, uint64_t now_ns, bool gives_back);
  void turn_over(Claim& claim, uint64_t now_ns);
  bool fill_lane(sched::LaneId lane,
                 uint64_t now_ns);  // asks its turn back, or gives it; true if something moved
  void tell_promised();
  // Of tick(): the lease of one holder. True if its turn was taken back.
  bool renew_or_end(Claim& claim, uint64_t now_ns, uint64_t* next_ns);
  void cut_off(Claim& claim, uint64_t now_ns);
  std::string why_not_on(const RemoteSession& session, std::string* out_state) const;
  std::string why_no_turn(const Claim& claim) const;  // of a session that waits for one
  // room.cpp
  base::Status make_room(const Claim& claim, const sched::RoomAsk& ask, uint64_t now_ns);
  bool may_give(const Claim& claim, const sched::RoomAsk& ask) const {
    return ask.from != sched::Giver::kSpare || scheduler_.is_spare(claim.id);
  }
  void next_room(uint64_t now_ns);                   // for the first in the line
  void tell_room(Claim& claim);                      // that it is made, or that there is none
  void give_up_room(Claim& claim, uint64_t now_ns);  // nobody is there to use what is made for it
  base::Status start_room(const Claim& claim, const sched::RoomAsk& ask, uint64_t now_ns);
  // Every session whose turn was asked back for room has ended the turn, or took too long.
  void room_drained(uint64_t now_ns);
  void room_step(uint64_t victim);
  void room_part();

  void kill_overdue(const Process& process) const;  // if the operator allows it
  client::Lease& lease(const RemoteSession& session) const {
    return session.process->leases->page->lease(session.slot);
  }
  static uint64_t& epoch_of(const RemoteSession& session) {
    return session.process->leases->epochs[session.slot];
  }
  // The turn of a lane that its holder passes on.
  struct Offer {
    RemoteSession* to = nullptr;  // null: to nobody
    uint64_t epoch = 0;
    uint64_t made_ns = 0;
  };

  // How long a lease is good without a sign of the daemon.
  static constexpr uint64_t kLeaseGoodNs = 2'000'000'000;
  // How long the device may be idle for a session that is behind others.
  static constexpr uint64_t kPatienceNs = sched::kIdleForTurnNs;
  // How long a turn may last for which nobody waits.
  static constexpr uint64_t kLongTurnNs = sched::kLongestTurnNs;
  // How long a session of a group keeps its part of the group's weight without wanting the device.
  static constexpr uint64_t kUsesNs = 1'000'000'000;

  const std::string name_;
  uint32_t pci_address_ = 0;
  GpuIdentity identity_;
  std::unique_ptr<KernelLimits> kernel_limits_;  // null: the device is no GPU
  const uint64_t capacity_bytes_;
  const uint64_t began_ns_ = base::host_now_ns();
  const ServiceOptions& options_;
  LogLimit& log_limit_;
  uint64_t next_id_ = 1;  // of claims and caches
  sched::Scheduler scheduler_;
  Images images_;
  Contexts contexts_{scheduler_, capacity_bytes_};
  Ranges ranges_{scheduler_, log_limit_, capacity_bytes_};
  std::unique_ptr<Lanes> lanes_;  // null: none are shared
  uint64_t retry_ns_ = 0;         // when a session that found no place is tried again; 0: all found one
  std::map<uint64_t, std::unique_ptr<Claim>> claims_;  // by the scheduler's number
  std::vector<Claim*> holders_;                        // by lane of turns
  std::vector<Offer> offers_;                          // likewise
  std::map<uid_t, std::weak_ptr<LeaseTable>> tables_;  // of processes that pass turns
  std::vector<std::weak_ptr<LeaseTable>>
      all_tables_;  // what is promised is told in each, also to a process without sessions
  std::map<uint64_t, std::weak_ptr<GroupLimits>> limits_;   // by the group's number
  std::map<uint64_t, std::weak_ptr<sched::TimeCap>> caps_;  // likewise
  std::vector<Claim*> in_debt_;  // they wait for a turn, and their caps for the debt to be repaid
  size_t ready_ = 0;             // claims that wait for a turn
  bool contended_ = false;       // when it was looked at last
  // Guaranteed claims that want room after that, by sched::served_before().
  std::deque<std::pair<uint64_t, sched::RoomAsk>> room_line_;
  bool room_for_lower_ = false;  // it waits for turns of opportunistic ones alone
  uint64_t room_for_ = 0;        // the claim that pages others out, and whom: claims and caches
  std::vector<uint64_t> room_victims_;
  uint64_t room_free_bytes_ = 0;  // so many bytes free are enough for it
  std::vector<uint64_t> silent_;  // claims with members that were to page out or in, and have no connection
  std::vector<uint64_t> short_;   // claims with short bytes
  sched::RoomAsk room_ask_;       // of the claim
  uint64_t room_until_ns_ = 0;    // it waits for turns to end first; 0 = it does not
  uint64_t turns_ = 0, cut_off_ = 0, service_ns_ = 0, page_outs_ = 0, page_ins_ = 0;
};

class Service {
 public:
  // Reads the devices' sizes, binds the socket and starts serving. Errors: UNSUPPORTED (a device without virtual memory, or
  // of virtual time), ALREADY_EXISTS (another daemon there), EXCEEDS_CAPACITY, INVALID_ARGUMENT, the device's.
  static base::Result<std::unique_ptr<Service>> start(ServiceOptions options);
  // Stops serving: processes find the connection closed and keep their memory.
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  const std::vector<std::unique_ptr<SharedDevice>>& devices() const { return devices_; }

 private:
  explicit Service(ServiceOptions options) : options_(std::move(options)) {}
  base::Status open();
  base::Status share(const std::string& spec);  // a device
  void serve();
  void sleep(uint64_t next_tick_ns) const;
  void handle_event(uint64_t id);
  uint64_t tick(uint64_t now_ns);  // returns when to call again
  void wake();
  void accept_processes();
  void receive(Process& process);
  // Errors: the message breaks the protocol, which ends the connection.
  base::Status handle(Process& process, std::span<const std::byte> message,
                      std::vector<client::Descriptor> descriptors);
  base::Status on_hello(const Request& request, const client::Hello& message);
  base::Status on_status_request(const Request& request, const client::StatusRequest& message);
  base::Status on_set_capacity(const Request& request, const client::SetCapacity& message);
  base::Status on_arrive(const Request& request, const client::Arrive& message);
  base::Status on_context(const Request& request, const client::SessionMessage& message);
  static base::Status on_image_close(const Request& request, const client::SessionMessage& message);
  static base::Status on_image_unmapped(const Request& request, const client::SessionMessage& message);
  base::Status welcome(Process& process, const client::Hello& message);
  void meet_again(Process& process, SharedDevice& device, uint64_t instance);
  // The connection was a runtime's that is closed: nothing is left of it but the process's context on the device.
  static bool is_closed(const Process& process, SharedDevice& device);
  // A process has one context on a device, whose bytes it has just told anew: its closed runtimes count no more.
  void forget_closed(const Process& process);
  // The device that the message means. Errors: NOT_FOUND.
  base::Result<SharedDevice*> find_device(const client::Hello& message) const;
  base::Status set_capacity(const Process& process, const client::SetCapacity& message);
  void disconnect(Process& process, const std::string& why);
  void died(Process& process);
  void sweep();
  // By age, those that have said Hello or those that have not.
  std::vector<Process*> connections_of(uid_t user, bool welcome) const;
  base::Status has_place(uid_t user) const;
  void make_place(uid_t user);
  size_t sessions_of(uid_t user) const;
  client::ServiceStatus status(uid_t user) const;

  const ServiceOptions options_;
  uint64_t started_ns_ = 0;
  LogLimit log_limit_;
  Patience patience_;
  std::vector<std::unique_ptr<SharedDevice>> devices_;
  client::Listener listener_;
  client::Descriptor wake_, epoll_;
  std::map<uint64_t, std::unique_ptr<Process>> processes_;
  uint64_t next_id_ = 1;
  uint64_t lost_processes_ = 0;
  Refusals refusals_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Sends without blocking; false if the process does not read.
bool send_to(const Process& process, std::span<const std::byte> message,
             std::span<const int> descriptors = {});

}  // namespace gpushare::daemon
