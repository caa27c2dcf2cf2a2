// service.hpp: one scheduler for the sessions of all processes of a machine: `gpushare daemon`. Processes reach it
// through client::RemoteAuthority; protocol and leases are in src/client.
//
// One thread turns messages into events of sched::Scheduler and its decisions into messages. A turn is a lease: while
// nobody else wants the device, its holder begins and ends iterations without a message. Now and then the service reads
// the device time that the holder has measured. It believes at most the time for which the holder had the turn.
//
// Ephemeral memory is private to a process unless the operator lets lanes be shared. Without shared lanes both P and E
// of a session count as bytes that it keeps while it is resident, and the scheduler's lanes are only queues of turns. A
// device has one lane unless max_lanes says otherwise, because contexts of different processes take turns on a device
// anyhow. With shared lanes each user has a lane, whose memory is made here (lanes.hpp) and mapped by the user's
// processes; only the session with the turn touches it.
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
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/patient.hpp"
#include "base/status.hpp"
#include "client/channel.hpp"
#include "client/lease_page.hpp"
#include "client/protocol.hpp"
#include "client/status.hpp"
#include "daemon/contexts.hpp"
#include "daemon/gates.hpp"
#include "daemon/gpu_identity.hpp"
#include "daemon/group_page.hpp"
#include "daemon/images.hpp"
#include "daemon/kernel_limits.hpp"
#include "daemon/lanes.hpp"
#include "daemon/ranges.hpp"
#include "daemon/step_watch.hpp"
#include "daemon/user_limits.hpp"
#include "sched/scheduler.hpp"
#include "sched/time_cap.hpp"

namespace gpushare::daemon {

struct ServiceOptions {
  std::string socket;
  std::vector<std::string> devices = {"auto"};
  bool leave_out_failed =
      false;  // devices that cannot be opened, with a line in the log; else there is no service
  bool first_alone = false;     // serves the first of them that opens in time, and no other
  uint64_t capacity_bytes = 0;  // of each device; 0 = the bytes that are free at start, less a 64th
  std::string policy = "fair";
  uint32_t max_lanes = 1;  // turns at a time; more than 1 where kernels of several processes run side by side
  bool share_lanes = false;  // sessions of one user share ephemeral memory. Not with max_lanes above 1
  uint64_t lease_ns = 10'000'000'000;            // the longest turn while another session waits
  uint64_t least_stay_ns = sched::kLeastStayNs;  // of sessions that take turns in the device's memory
  uint64_t images_bytes = 4ull << 30;            // of host memory, for images that are open
  std::optional<sched::CoordinatorOptions> coordination;  // of each device; else no coordinator
  // Kills a process that exceeded its lease, or that keeps an image mapped for as long.
  bool kill_overdue = false;
  bool all_users = false;                // false: only the service's own user may connect
  uint32_t max_processes_per_user = 64;  // for each device
  uint32_t max_sessions_per_user = 1024;
  RankLimits ranks;
  KernelLimits::Places kernel_limits;
  // The daemon waits so long for its devices to open. A device that opens later is served from then on.
  // Processes wait for a daemon in place of theirs three times as long.
  uint64_t open_patience_ns = 20'000'000'000;
  // Work of the service's thread at one device that lasts longer counts as a hang of the device's driver. The service
  // then answers nobody, and its end waits for the driver. `on_hang` is called once, on a thread of its own; empty:
  // nobody looks.
  uint64_t step_patience_ns = 60'000'000'000;
  StepWatch::OnHang on_hang;
  // For tests: called on the service's thread with what is wrong with a device's books after an event; empty: they are
  // not checked.
  std::function<void(const std::string& wrong)> on_fault;
  // Makes a policy of the operator's own for each device; empty: the built-in one that `policy` names.
  std::function<base::Result<std::unique_ptr<sched::Policy>>()> make_policy;
};

// Every GPU that the drivers name, opened by nobody yet. Blocks for 20 s at most. Errors: UNAVAILABLE (there is none; the
// message says why), NOT_READY (a driver does not answer).
base::Result<std::vector<std::string>> gpu_specs();

class SharedDevice;
struct Claim;
struct RemoteSession;

// Leases of one process, or of all processes of a user that pass turns to each other.
struct LeaseTable {
  std::shared_ptr<client::LeasePage> page;
  std::vector<uint64_t>
      epochs;  // of the last lease, by slot; they count on when another session gets the slot
  std::vector<bool> used;
};

// A connection of a process.
struct Process {
  uint64_t id = 0;
  client::Descriptor socket;  // empty once the connection is closed
  client::Descriptor pidfd;
  client::Peer peer;
  uint64_t connected_ns = 0;
  bool welcome = false;  // it said Hello
  bool dead = false;     // to be removed
  uint64_t instance = 0;
  std::string program;
  // The address of the device that it asked for; 0: it asked by name, or for any device.
  uint32_t pci_address = 0;
  SharedDevice* device = nullptr;
  std::shared_ptr<LeaseTable> leases;
  bool passes_turns = false;
  std::shared_ptr<sched::TimeCap> cap;          // the cap of its sessions that are in no group; null: none
  std::map<uint64_t, RemoteSession*> sessions;  // by the process's number
  // An arrival that is not answered yet, because the device is being opened. No further message of the process is read
  // meanwhile.
  struct Held {
    client::Arrive message;
    std::vector<client::Descriptor> descriptors;
  };
  std::optional<Held> held;
};

// The number of refusals so far, by the name of the status that was answered.
using Refusals = std::map<std::string, uint64_t>;
// Counts the status, unless it is OK.
void count_refusal(Refusals& refusals, const base::Status& status);

// A message that is being handled. answer() sends nothing if the process asked for no answer.
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
  // Its part in a page-out or page-in of its claim. kHere: none. kTold: it was told and has not answered. kParts: it
  // has not answered, but gets no blocks on the device from now on. kOut: it has answered, and gets no blocks until it
  // is in again.
  enum class Move : uint8_t { kHere, kTold, kParts, kOut };
  // Its images. kWaits: it is set aside until they are there. kHas: it has them for its turn. kRetry: as kHas, but one
  // image could not be had, so the turn goes back for another try.
  enum class ImageState : uint8_t { kNone, kWaits, kHas, kRetry };
  uint64_t number = 0;    // the process's
  uint64_t at_gates = 0;  // its number at Gates
  Process* process = nullptr;
  Claim* claim = nullptr;
  std::string name;
  uint32_t slot = 0;
  Turn turn = Turn::kNone;
  Move move = Move::kHere;
  ImageState image_state = ImageState::kNone;
  size_t pieces = 0;  // the pieces of its shared lane that it was sent
  uint64_t epoch = 0;
  uint64_t seen_service_ns = 0, seen_iterations = 0;
  uint64_t unread_ns = 0;                   // service of this turn for which its claim was not billed yet
  uint64_t service_ns = 0, iterations = 0;  // totals that were believed
  std::vector<ImageUse*> images;            // none if it is in a group
  std::vector<uint64_t> wanted_images;      // caches of the scheduler, kept by Images
  sched::RangeId range = 0;                 // its number in Ranges; 0: it has reported no range
  sched::SessionClass cls = sched::SessionClass::kGuaranteed;  // as its process says
  bool has_room = false;      // it was told that room is made, and has not said yet that it has used the room
  uint64_t room_told_ns = 0;  // when it was told

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

// A session of the scheduler. It stands for one session of a process, or for all sessions of a group (Arrive::group),
// which share memory, weight and turns. The group's first session makes the claim, and the claim goes with the last. A
// group has the turn while one of its sessions has a lease.
struct Claim {
  // kReady: the scheduler knows that a member waits for a turn. kKept: the claim has the turn, and keeps it although
  // others wait (keeps()), as long as it begins its next iteration at once.
  enum class Turn : uint8_t { kNone, kReady, kHolds, kKept };
  // kHere: on the device, or not admitted yet. kFailing: a member cannot go out. kReturning: after that, the other
  // members come in again. kHoming: bytes that it used from the host come in while it has turns. kHomingThenOut: as
  // kHoming, and then it goes out at once.
  enum class Bytes : uint8_t { kHere, kGoing, kFailing, kOut, kComing, kReturning, kHoming, kHomingThenOut };
  uint64_t id = 0;     // the scheduler's
  uint64_t group = 0;  // 0: one session alone
  std::vector<std::unique_ptr<RemoteSession>> members;
  uint64_t persistent_bytes = 0, ephemeral_bytes = 0;
  bool shares_lane = false;  // its E is memory of its user's lane; else its E is counted like P
  sched::SessionClass counts_as = sched::SessionClass::kGuaranteed;
  double weight = 1;                    // as its process said
  uint64_t limit_bytes = 0;             // by the coordinator; 0 = none
  std::shared_ptr<GroupLimits> limits;  // null: none
  std::shared_ptr<sched::TimeCap> cap;  // shared with others of its group or process; null: none
  std::unique_ptr<GroupPage>
      page;  // the page of a group of preloaded programs; null: there is none, or the daemon cannot use it
  sched::LaneId lane = sched::kNoLane;  // of turns
  Turn turn = Turn::kNone;
  Bytes bytes = Bytes::kHere;
  size_t pages = 0;  // members that were told to page out or in, and have not answered
  // Bytes that its members have moved out, and that are promised to no other session yet.
  uint64_t part_bytes = 0;
  uint64_t short_bytes = 0;  // bytes that it uses from the host: a page-out ended in part (end_in_part())
  uint64_t granted_ns = 0;
  uint64_t believed_ns = 0;      // service since granted_ns
  uint64_t wanted_since_ns = 0;  // since when others want its turn; 0 = no other does
  bool slow = false;             // it did not begin at once when it last kept its turn
  uint64_t returned_ns = 0;      // its turn before
  // Since when its lease has been seen idle or busy with the same count of iterations; 0: not looked at.
  uint64_t watched_ns = 0;
  uint64_t watched_iterations = 0;
  bool watched_idle = false;
  uint64_t unread_ns = 0,
           // Iterations of its members in this turn that the scheduler does not know of yet.
      unread_iterations = 0;

  bool leased() const { return turn == Turn::kHolds || turn == Turn::kKept; }
  bool goes_out() const { return bytes == Bytes::kGoing || bytes == Bytes::kFailing; }
  bool comes_in() const { return bytes == Bytes::kComing || bytes == Bytes::kReturning; }
  bool lends() const { return page != nullptr && page->limit().lent_bytes > 0; }
  bool pages_now() const { return goes_out() || comes_in() || bytes == Bytes::kHomingThenOut; }
};

void tell(const RemoteSession& session, client::MessageType type, uint64_t value = 0);
void tell(const Claim& claim, client::MessageType type);  // sends the message to its members
// The bytes that the scheduler may still promise.
inline uint64_t free_bytes(const sched::Scheduler& scheduler) {
  const uint64_t capacity = scheduler.capacity().target_bytes;
  return capacity - std::min(capacity, scheduler.promised_bytes());
}

// The sessions of one device: events in, leases and messages out. Used by the service's thread alone.
class SharedDevice {
 public:
  // `granularity_bytes`: the unit in which the device maps memory; 0: it cannot share memory.
  SharedDevice(std::string device, uint64_t capacity_bytes, uint64_t granularity_bytes,
               const ServiceOptions& options, LogLimit& log_limit, std::unique_ptr<sched::Policy> policy,
               std::function<void()> wake);
  const std::string& name() const { return name_; }
  uint64_t capacity_bytes() const { return capacity_bytes_; }
  // As gpushare_backend_device_info has it; 0: none is known.
  uint32_t pci_address() const { return pci_address_; }
  void set_pci_address(uint32_t address, GpuIdentity identity) {
    pci_address_ = address;
    identity_ = std::move(identity);
    if (address == 0) return;
    KernelLimits::Places places = options_.kernel_limits;
    if (places.record.empty() && !options_.socket.empty()) places.record = options_.socket + ".limits";
    kernel_limits_ = std::make_unique<KernelLimits>(address, std::move(places));
  }
  std::string policy_name() const { return scheduler_.policy_name(); }

  // The table of leases that a process of the user gets.
  base::Result<std::shared_ptr<LeaseTable>> leases_for(uid_t user, bool passes_turns);
  // True: the arrival is to be handled later, because memory that the session may share cannot be made yet.
  bool arrives_later(const client::Arrive& message, uint64_t now_ns) {
    return may_share_lane(message) && lanes_->opening(now_ns);
  }
  // `page`: the page on which the process and others of its group count their memory; null: none.
  base::Status arrive(Process& process, const client::Arrive& message, std::unique_ptr<GroupPage> page,
                      uint32_t* out_slot);
  // Handles a message of kind EVENT from the session's process. `request` answers it.
  void handle(RemoteSession& session, client::MessageType type, std::span<const std::byte> message,
              const Request& request);
  void remove(RemoteSession& session);
  // The connection of the session's process is gone, but the process may live. The session gets no more turns.
  void disconnected(RemoteSession& session);
  // A process or its connection is gone. Called after the same was said of its sessions.
  void disconnected(Process& process) { images_.disconnected(process); }
  void died(Process& process) {
    images_.died(process);
    contexts_.ended(process);
  }
  base::Status set_context(const Process& process, uint64_t bytes, bool asks);
  uint64_t context_bytes(const Process& process) const { return contexts_.bytes(process); }
  Images& images() { return images_; }
  // As sched::Authority::set_capacity; 0: the capacity with which the device began.
  base::Status set_capacity(uint64_t bytes);
  // Decides what can be decided. Called after each event.
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
  // True if a session wants a turn or memory, or if more is promised than should be. Turns then end at their
  // boundaries.
  bool contended() const {
    return ready_ > 0 || scheduler_.waiting() > 0 ||
           scheduler_.promised_bytes() > scheduler_.capacity().target_bytes;
  }
  Claim* find_group(uint64_t group, uid_t user) const;
  // The limits that an arriving session shares with others; null: none.
  std::shared_ptr<GroupLimits> limits_of(const client::Arrive& message);
  // OK if a group may need `more_bytes` more. The group's preloaded programs lend bytes that they do not hold. `asks`:
  // the claim whose need grows; null: a new session. Errors: QUOTA_EXCEEDED.
  base::Status within(const GroupLimits* limits, const Claim* asks, const std::string& session,
                      uint64_t more_bytes, uint64_t now_ns);
  bool lend(Claim& lender, uint64_t bytes, uint64_t now_ns);
  // Sets the driver's own limit to the limit on the page of the claim's preloaded programs, if they have one.
  void follow_limit(const Claim& claim);
  uint64_t left_in(const GroupLimits& limits) const;  // of its memory limit, which it has
  // The bytes that preloaded programs can have back; and gives them back. False: they cannot be promised.
  uint64_t loan_to_take_back(const Claim& lender) const;
  bool take_back_loan(Claim& lender, uint64_t bytes, uint64_t now_ns);
  // The part of the declared bytes that the first of a group's preloaded programs is promised: at most what the other
  // sessions leave.
  uint64_t left_for_page(const GroupLimits* limits, uint64_t bytes, GroupPage& page, uint64_t now_ns) const;
  // Divides the weight of a group among those of its sessions that use the device.
  void divide_weight(const GroupLimits* limits, uint64_t now_ns);
  void set_ready(Claim& claim, bool ready);
  // Notes that a session waits for a turn, or does so no longer.
  void now_ready(RemoteSession& session, uint64_t now_ns);
  void not_ready(RemoteSession& session, uint64_t now_ns);
  void announce(Claim& claim, uint64_t now_ns);
  // The cap of a session that arrives, or that is to have the cap `share` from now on; null: none.
  std::shared_ptr<sched::TimeCap> cap_of(Process& process, uint64_t group, double share, uint64_t now_ns);
  void set_cap(RemoteSession& session, double share, uint64_t now_ns);
  static bool capped(const Claim& claim) {
    return claim.cap != nullptr && claim.cap->binds();
  }
  // Lets sessions whose debts are repaid wait for a turn again. True if there are any.
  bool announce_repaid(uint64_t now_ns);
  // The parts of arrive(): what can be refused without looking further; a claim for a session that joins none; the scheduler's
  // description of it.
  static base::Status check_arrival(const Process& process, const client::Arrive& message);
  base::Result<Claim*> make_claim(const Process& process, const client::Arrive& message,
                                  const std::string& name, GroupPage* page, uint64_t now_ns);
  bool is_limited(const client::Arrive& message) const;
  // The arriving session is to have its E in a lane of others of its user, once the device is open.
  bool may_share_lane(const client::Arrive& message) const;
  sched::SessionSpec spec_of(const Process& process, const client::Arrive& message, const std::string& name,
                             Claim& claim) const;
  void joined(Claim& claim, RemoteSession& session, bool was_there, bool runs, uint64_t now_ns);
  void tell_terms(const RemoteSession& session, sched::SessionClass cls, uint64_t limit_bytes);
  void refresh_class(Claim& claim, uint64_t now_ns);
  void start_paging(Claim& claim, Claim::Bytes to);      // kGoing: out; else in
  void paged(Claim& claim, bool done, uint64_t now_ns);  // called when one of its members has answered
  // Lets others be promised the bytes that the claim's members have moved out, once all members have begun to move.
  void give_parts(Claim& claim, uint64_t now_ns);
  // Ends the page-out of a group that cannot go out whole. Bytes that others have been promised stay on the host, and
  // the group uses them there until there is room again.
  void end_in_part(Claim& claim, uint64_t now_ns);
  static void tell_out(const Claim& claim,
                       client::MessageType type);  // sends the message to members that have begun to go out
  bool regrow(Claim& claim, uint64_t now_ns);      // asks for all of its bytes again; false: there is no room
  void come_home(Claim& claim);                    // called when it has been promised them
  // Claims that are owed bytes get them when they are free: those that they use from the host (regrow()), then what they have
  // lent. give_back() returns true if a claim has grown.
  void owe(Claim& claim);
  void owe_loans(const GroupLimits* limits);  // what claims of the group have lent; null: none
  uint64_t owed_bytes(const Claim& claim) const;
  bool give_back(uint64_t now_ns);
  // Answers for members whose connections have closed: they do not go out, and members that can go out do. True if
  // there were any.
  bool answer_for_silent();
  void carry_out(const sched::Action& action);
  void carry_out(const sched::Action& action, Claim& claim);
  void page_out(Claim& claim);
  void page_in(Claim& claim, uint64_t now_ns);
  bool carry_out_all();  // carries out what the scheduler has decided; false: it was nothing
  // For shared lanes. Their E is promised in whole pieces.
  base::Status set_need(Claim& claim, uint64_t persistent_bytes, uint64_t ephemeral_bytes, uint64_t now_ns);
  uint64_t lane_need(uint64_t ephemeral_bytes) const;
  uint64_t bytes_on_device(const Claim& claim) const;  // all that it needs there
  void size_lane(sched::LaneId lane, uint64_t bytes);
  // Sends the session the pieces that it needs of its lane; false if they could not be made.
  bool send_lane(Claim& claim);
  void unplace(Claim& claim, uint64_t now_ns);
  void leave_lane(Claim& claim);  // called when its process has unmapped the lane
  // Notes whether the session is overdue. No session gets a turn in the shared lane of an overdue session.
  void set_overdue(RemoteSession& session, bool overdue);
  void grant(Claim& claim, sched::LaneId lane, uint64_t now_ns);
  void lease_to(RemoteSession& session, client::LeaseState state, uint64_t now_ns);
  void start_turn(Claim& claim, sched::LaneId lane, uint64_t granted_ns, uint64_t now_ns);
  bool want_back(Claim& claim, uint64_t now_ns);  // true if the turn is back
  // True if the claim keeps its turn although others wait for it.
  bool keeps(Claim& claim, uint64_t now_ns);
  bool several_lanes_run() const;  // several lanes have a holder
  // True if the claim, which has its lane's turn, has to wait for sessions of other lanes.
  bool outrun(const Claim& claim, uint64_t now_ns);
  // Reads what the holders of all lanes have measured, before any of them is compared with the others.
  void read_lanes(uint64_t now_ns);
  // Tells the claim how long a turn that is asked back may still go on.
  void time_turn(Claim& claim, uint64_t now_ns);
  // Takes all offers back and notes the turns that were passed. Offers stand only while the service sleeps, so it calls
  // this before it decides anything.
  void take_back_offers();
  void make_offers();
  void offer(sched::LaneId lane, uint64_t now_ns);
  static bool passes(const Claim& claim) {
    return claim.group == 0 && claim.members.front()->process->passes_turns;
  }
  // True if an image could not be had in this turn.
  static bool retries(const Claim& claim) {
    return claim.members.front()->image_state == RemoteSession::ImageState::kRetry;
  }
  // The service that may still be believed.
  static uint64_t grace_ns(const Claim& claim, uint64_t now_ns) {
    const uint64_t held_ns = now_ns - std::min(now_ns, claim.granted_ns);
    return held_ns - std::min(held_ns, claim.believed_ns);
  }
  void collect(RemoteSession& session, uint64_t now_ns);
  void member_done(RemoteSession& session, uint64_t now_ns);
  // Reads the device time that the holder has measured since the last call, and believes at most the time for which it
  // had the turn.
  // True if iterations have ended.
  bool read_service(Claim& claim, uint64_t now_ns, bool gives_back);
  void turn_over(Claim& claim, uint64_t now_ns);
  bool fill_lane(sched::LaneId lane,
                 uint64_t now_ns);  // asks the lane's turn back, or grants it; true if something moved
  void tell_promised();
  void tell_gates();  // processes, whether there are gates, and whether those must be asked
  bool guaranteed_at_gates(const RemoteSession& session) const;
  // The part of tick() for the lease of one holder. True if its turn was taken back.
  bool renew_or_end(Claim& claim, uint64_t now_ns, uint64_t* next_ns);
  void cut_off(Claim& claim, uint64_t now_ns);
  std::string why_not_on(const RemoteSession& session, std::string* out_state) const;
  std::string why_no_turn(const Claim& claim) const;  // for a session that waits for one
  // room.cpp
  base::Status make_room(RemoteSession& session, const sched::RoomAsk& ask, uint64_t now_ns);
  bool may_give(const Claim& claim, const sched::RoomAsk& ask) const {
    return ask.from != sched::Giver::kSpare || scheduler_.is_spare(claim.id);
  }
  void next_room(uint64_t now_ns);                // starts to make room for the first in the line
  static void tell_room(RemoteSession& session);  // says that the room is made, or that there is none
  bool has_room(uint64_t now_ns) const;           // room is kept for some session
  void room_used(RemoteSession& session, uint64_t now_ns);
  void give_up_room(RemoteSession& session, uint64_t now_ns);  // called when nobody is left to use the room
  base::Status start_room(RemoteSession& session, const sched::RoomAsk& ask, uint64_t now_ns);
  // Called when every session whose turn was asked back for room has ended the turn, or took too long.
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
  // The offer of a lane's turn, which the holder passes on.
  struct Offer {
    RemoteSession* to = nullptr;  // null: there is no offer
    uint64_t epoch = 0;
    uint64_t made_ns = 0;
  };

  // How long a lease holds without a sign of life from the daemon.
  static constexpr uint64_t kLeaseGoodNs = 2'000'000'000;
  // How long the device may be idle for a session that is behind others.
  static constexpr uint64_t kPatienceNs = sched::kIdleForTurnNs;
  // How long a turn may last for which no other session waits, in its lane or in another one.
  static constexpr uint64_t kLongTurnNs = sched::kLongestTurnNs;
  // After a restart of the daemon sessions that have borrowed may come later than the programs that have lent.
  static constexpr uint64_t kComeBackNs = 5'000'000'000;
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
  Gates gates_;
  uint64_t next_at_gates_ = 1;
  bool gates_watched_ = false, gates_ask_ = false;  // as the processes were told
  std::unique_ptr<Lanes> lanes_;                    // null: none are shared
  uint64_t retry_ns_ = 0;  // when a session that found no place is tried again; 0: all found one
  std::map<uint64_t, std::unique_ptr<Claim>> claims_;  // by the scheduler's number
  std::vector<Claim*> holders_;                        // by lane of turns
  std::vector<Offer> offers_;                          // likewise
  std::map<uid_t, std::weak_ptr<LeaseTable>> tables_;  // of processes that pass turns
  std::vector<std::weak_ptr<LeaseTable>>
      all_tables_;  // each has the promised bytes, also for a process without sessions
  std::map<uint64_t, std::weak_ptr<GroupLimits>> limits_;   // by the group's number
  std::map<uint64_t, std::weak_ptr<sched::TimeCap>> caps_;  // likewise
  std::vector<Claim*> in_debt_;  // claims that wait for a turn and whose caps have a debt
  size_t ready_ = 0;             // claims that wait for a turn
  bool contended_ = false;       // contended(), as of the last look
  uint64_t look_lanes_ns_ = 0;   // how soon holders of several lanes are looked at again
  // Guaranteed sessions that want room after room_for_, by sched::served_before().
  struct RoomWait {
    RemoteSession* session;
    sched::RoomAsk ask;
  };
  std::deque<RoomWait> room_line_;
  bool room_for_lower_ = false;         // room_for_ waits only for turns of opportunistic claims
  RemoteSession* room_for_ = nullptr;   // the session for which others are paged out
  std::vector<uint64_t> room_victims_;  // those: claims and caches
  uint64_t room_free_bytes_ = 0;        // the free bytes that are enough for room_for_
  std::vector<uint64_t> silent_;  // claims with members that were to page out or in, and have no connection
  std::vector<Claim*> owed_;      // claims that are owed bytes
  sched::RoomAsk room_ask_;       // of room_for_
  uint64_t room_until_ns_ = 0;    // room_for_ first waits for turns to end, until then; 0 = it does not wait
  uint64_t turns_ = 0, cut_off_ = 0, service_ns_ = 0, page_outs_ = 0, page_ins_ = 0;
};

class Service {
 public:
  // Reads the devices' sizes, binds the socket and starts serving. Blocks for ServiceOptions::open_patience_ns and what
  // NVML takes. Errors: UNSUPPORTED (a device without virtual memory, or of virtual time), ALREADY_EXISTS (another daemon
  // there), EXCEEDS_CAPACITY, INVALID_ARGUMENT, UNAVAILABLE (no device has opened in time), the device's.
  static base::Result<std::unique_ptr<Service>> start(ServiceOptions options);
  // Stops serving: processes find the connection closed and keep their memory.
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // The devices that are served from the start. Any thread.
  std::span<const std::unique_ptr<SharedDevice>> devices() const { return {devices_.data(), first_devices_}; }

 private:
  explicit Service(ServiceOptions options) : options_(std::move(options)) {}
  base::Status open();
  // devices.cpp
  struct Found {  // what is told of a device by opening it
    std::string name;
    gpushare_backend_device_info info{};
    bool sharable = false;
    uint64_t granularity_bytes = 0;
    GpuIdentity identity;
  };
  struct Late {
    std::string spec;
    std::unique_ptr<base::Asked<Found>> found;  // null: it has failed
    base::Status failure;
  };
  static base::Result<Found> find(const std::string& spec);
  base::Status open_devices();
  base::Status share(const std::string& spec, Found found);
  bool take_late();  // shares devices that have opened late; true: some have not
  std::string late(
      const std::string& name) const;  // why the device of that name is not served; empty: any other reason
  void serve();
  void pump();
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
  void arrive(const Request& request, const client::Arrive& message);
  void hold(const Request& request, const client::Arrive& message);
  // Handles arrivals that were held and need not wait any longer. True: some have to.
  bool handle_held(uint64_t now_ns);
  base::Status on_context(const Request& request, const client::SessionMessage& message);
  static base::Status on_image_close(const Request& request, const client::SessionMessage& message);
  static base::Status on_image_unmapped(const Request& request, const client::SessionMessage& message);
  base::Status welcome(Process& process, const client::Hello& message);
  void meet_again(Process& process, SharedDevice& device, uint64_t instance);
  // True if the connection belongs to a runtime that is closed, so that only the process's context on the device is
  // left of it.
  static bool is_closed(const Process& process, SharedDevice& device);
  // Called when the process has reported its context's bytes again. A process has one context on a device, so its
  // closed runtimes count no more.
  void forget_closed(const Process& process);
  // The device that the message means. Errors: NOT_FOUND; UNAVAILABLE (it has not opened).
  base::Result<SharedDevice*> find_device(const client::Hello& message) const;
  base::Status set_capacity(const Process& process, const client::SetCapacity& message);
  void disconnect(Process& process, const std::string& why);
  void died(Process& process);
  void sweep();
  // The user's connections that have said Hello, or those that have not, by age.
  std::vector<Process*> connections_of(uid_t user, bool welcome) const;
  base::Status has_place(uid_t user) const;
  void make_place(uid_t user);
  size_t sessions_of(uid_t user) const;
  client::ServiceStatus status(uid_t user) const;

  const ServiceOptions options_;
  uint64_t started_ns_ = 0;
  LogLimit log_limit_;
  Patience patience_;
  StepWatch watch_;
  std::vector<std::unique_ptr<SharedDevice>> devices_;  // of room for all, so that it does not move
  size_t first_devices_ = 0;
  std::vector<std::string> named_;              // the operator's devices, without those that are left out
  const SharedDevice* first_device_ = nullptr;  // the operator's first, once it is open
  std::vector<Late> late_;
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
