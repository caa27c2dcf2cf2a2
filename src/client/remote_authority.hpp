// remote_authority.hpp: the daemon's scheduler, as the executor of one process sees it.
//
// Every session of the process is a session of the daemon's scheduler. Each resident session has a lane of its own in
// this process; only this process knows the lane's number. The process allocates P in its own device context and tells
// the daemon when the bytes are really free again. E is either allocated and counted like P, or it is memory of the
// daemon, which sends it in pieces (LaneHere) and which sessions of other processes use in their turns. A turn is a
// lease (lease_page.hpp).
//
// When the daemon has gone, sessions keep their memory, turns and growth wait, and a thread tries to reach a new
// daemon. If no daemon comes for RemoteOptions::wait_ns, standing() says so, and waits fail. Every session is declared
// to the new daemon. A session whose claim the new daemon refuses is paged out and waits. A shared lane is given up,
// and the new daemon sends another. So the process connects again only when no iteration is under way in a shared lane;
// calls of such an iteration that need the daemon fail at once.
//
// Threads: as sched::Authority: the driver serialises its calls. The authority's own thread receives messages. A
// question to the daemon is kept with a function for its answer, which take_events() calls. News of a session that
// comes before the answer is handled after it. The thread that needs the answer waits for it without the driver's lock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/flat_hash.hpp"
#include "base/mutex.hpp"
#include "base/pieces.hpp"
#include "base/service_thread.hpp"
#include "base/steps.hpp"
#include "client/channel.hpp"
#include "client/images.hpp"
#include "client/lease_page.hpp"
#include "client/protocol.hpp"
#include "sched/authority.hpp"
#include "sched/gate_link.hpp"
#include "sched/lane_ids.hpp"

namespace gpushare::client {

// Where a process looks for the daemon: GPUSHARE_SOCKET, else gpushare/daemon.sock in the user's run folder
// (XDG_RUNTIME_DIR) if it is there, else /run/gpushare/daemon.sock.
std::string default_socket();

struct RemoteOptions {
  std::string socket;
  std::string device;  // which of the daemon's devices; empty = its first
  // The group of processes that this one belongs to, and the limits that all of them have together (Arrive).
  uint64_t group = 0;  // 0 = none
  uint64_t group_memory_bytes = 0;
  double group_weight = 0;
  double cap = 0;  // the most of the device's time that the group, or this process, gets; 0 = no cap
  bool private_lanes = false;  // E is not shared with other processes
  // How long calls wait for a new daemon after one has gone, before they fail. nullopt: GPUSHARE_DAEMON_WAIT in
  // seconds, else kDaemonWaitNs.
  std::optional<uint64_t> wait_ns;
};

// A daemon that is replaced or restarted is back within seconds.
inline constexpr uint64_t kDaemonWaitNs = 60'000'000'000;

class RemoteAuthority final : public sched::Authority {
 public:
  // Errors: UNAVAILABLE (no daemon, or one of a user who is not trusted), the daemon's refusal.
  static base::Result<std::unique_ptr<RemoteAuthority>> open(RemoteOptions options);
  ~RemoteAuthority() override;

  const std::string& device() const { return device_; }  // the device that the process opens
  uint64_t capacity_bytes() const { return capacity_bytes_; }
  // The images that the daemon shares with this process; may outlive this object.
  const std::shared_ptr<Images>& images() const { return images_; }
  // P is rounded up to these steps of the process's memory, E to the large one. Set before the first event.
  void set_granularity(const base::Steps& steps) { steps_ = steps; }
  // `unlocked` runs a function without the driver's lock. arrive(), set_need() with a need that grows, make_room()
  // and needs_own_lane() wait for the daemon in such a function. While one waits, the driver may make any other call, so
  // everything that the lock guards may have changed when they return. Set before the first event.
  using Unlocked = std::function<void(const std::function<void()>&)>;
  void set_unlocked(Unlocked unlocked) { unlocked_ = std::move(unlocked); }
  // Tells the daemon that the process's context takes `bytes` of the device. Errors: DEVICE_OUT_OF_MEMORY (contexts
  // leave no room for it, so the context must go again). Called before the first event.
  base::Status claim_context(uint64_t bytes);

  base::Status arrive(const sched::SessionSpec& spec, uint64_t now_ns) override;
  void ready(sched::SessionId session, uint64_t now_ns) override;
  void wake(sched::SessionId session, uint64_t now_ns) override;
  void allow_paging(sched::SessionId session, uint64_t now_ns) override;
  void not_ready(sched::SessionId session, uint64_t now_ns) override;
  void dispatched(sched::SessionId session, sched::LaneId lane, uint64_t now_ns,
                  uint64_t iterations) override;
  void finished(sched::SessionId session, uint64_t device_ns, uint64_t now_ns, uint64_t iterations) override;
  void ran_alone(sched::SessionId session, sched::LaneId lane, uint64_t device_ns, uint64_t now_ns,
                 uint64_t iterations) override {
    ready(session, now_ns);
    dispatched(session, lane, now_ns, iterations);
    finished(session, device_ns, now_ns, iterations);
  }
  void note_iteration(sched::SessionId session, uint64_t device_ns, uint64_t waited_ns) override;
  void note_requests(sched::SessionId session, const base::RequestCounts& counts) override;
  void leave(sched::SessionId session, uint64_t now_ns) override;
  base::Status set_need(sched::SessionId session, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                        uint64_t now_ns) override;
  base::Status set_capacity(uint64_t bytes, uint64_t now_ns) override;
  void set_context_bytes(uint64_t bytes, uint64_t now_ns) override;
  base::Status set_coordination(const std::optional<sched::CoordinatorOptions>& options,
                                uint64_t now_ns) override;
  void set_quota(sched::SessionId session, uint64_t bytes) override;
  void set_priority(sched::SessionId session, int32_t priority, uint64_t now_ns) override;
  void set_class(sched::SessionId session, sched::SessionClass cls, uint64_t now_ns) override;
  void set_weight(sched::SessionId session, double weight) override;
  void set_remaining(sched::SessionId session, uint64_t remaining_ns, uint64_t now_ns) override;
  void set_worth(sched::SessionId session, double worth, uint64_t until_ns) override;
  bool set_spare(sched::SessionId session, std::optional<double> worth_ns, uint64_t now_ns) override;
  void set_link(double ns_per_byte) override;
  void set_policy(std::unique_ptr<sched::Policy>, uint64_t) override {}  // the daemon's operator chooses it
  void unplaced(sched::SessionId session, uint64_t now_ns) override;
  void page_part(sched::SessionId session, uint64_t bytes, uint64_t now_ns) override;
  void page_done(sched::SessionId session, uint64_t now_ns) override;
  bool make_room(sched::SessionId session, const sched::RoomAsk& ask, uint64_t now_ns) override;
  void room_used(sched::SessionId session, uint64_t now_ns) override;
  void page_out_failed(sched::SessionId session, uint64_t now_ns) override;
  void lane_applied(sched::LaneId lane, uint64_t bytes, uint64_t now_ns) override;
  std::optional<sched::SessionId> pick(sched::LaneId lane, uint64_t now_ns) override;
  std::optional<std::span<const sched::LaneId>> lanes_to_ask() const override;
  uint64_t look_again_ns() const override { return sched::kUnknown; }  // the daemon tells
  std::vector<sched::Action> take_actions() override;
  sched::SessionState state(sched::SessionId session) const override;
  size_t paged_out() const override;
  sched::LaneId lane_of(sched::SessionId session) const override;
  sched::SessionView view(sched::SessionId session) const override;
  std::string policy_name() const override { return policy_; }
  std::vector<sched::SessionId> dropping() const override;
  std::vector<sched::Claim> claims_on(std::span<const sched::Part> parts,
                                      uint64_t now_ns) const override;  // of this process
  // ---- what the daemon decides by itself
  void stop_making_room(sched::SessionId) override {}
  void look(uint64_t) override {}
  bool may_lend(sched::SessionId, sched::LaneId) const override { return false; }
  std::string coordinated_wait(sched::SessionId session) const override;
  std::string policy_wait(sched::SessionId) const override { return {}; }  // `gpushare top` tells
  std::shared_ptr<sched::MeasuredInterference> measure() override { return nullptr; }
  std::shared_ptr<sched::MeasuredInterference> measured() const override { return nullptr; }
  double link_ns_per_byte() const override { return link_ns_per_byte_; }
  uint64_t promised_bytes() const override;
  sched::Limit capacity() const override;
  uint64_t lane_bytes(sched::LaneId lane) const override;
  uint32_t lane_compute_units(sched::LaneId) const override { return 0; }
  uint32_t promised_compute_units() const override { return 0; }
  std::string check() const override;
  base::Status standing() const override;
  void set_on_change(std::function<void()> changed) override;
  void stop() override;
  bool wants_drained(sched::LaneId lane) const override;
  std::shared_ptr<base::Pieces> lane_pieces(sched::LaneId lane) const override;
  base::Status needs_own_lane(sched::SessionId session, uint64_t now_ns) override;
  void has_own_lane(sched::SessionId session, bool has, uint64_t now_ns) override;
  std::shared_ptr<base::Bell> bell(sched::SessionId session) const override;
  bool making_room(sched::SessionId session) const override;
  void set_ranges(sched::SessionId session, uint64_t bytes, uint64_t answer_ns,
                  double price_ns_per_byte) override;
  std::vector<RangesAsked> take_ranges_asked() override { return std::exchange(ranges_asked_, {}); }
  void answer_ranges(sched::SessionId session, uint64_t bytes) override;
  void work_began(sched::SessionId session, bool guaranteed, double target) override;
  void work_ended(sched::SessionId session, uint64_t device_ns) override;
  std::shared_ptr<sched::GateLink> open_gate(sched::SessionId session) override;

 private:
  // The daemon at one time.
  struct Connection {
    Descriptor socket;
    std::shared_ptr<LeasePage> page;
    Welcome welcome;
  };
  // The place of a session's bytes. The driver's sched::SessionState follows from it.
  enum class Bytes : uint8_t {
    kWaiting,   // for its first admission
    kUnplaced,  // as kWaiting, once the lane in which it found no place has closed
    kResident,  // on the device; without a lane if it gave a shared one up, and the new daemon is to send another
    kDraining,    // it begins no iteration, and goes out when nothing is in flight
    kLeaving,     // its page-out is under way
    kDropping,    // it is spare: the driver ends it without a copy
    kLeft,        // as kOut, once its lane has closed
    kOut,         // in host memory
    kComing,      // its page-in is under way
    kTurnedBack,  // as kOut, once the lane of the page-in that it gave up has closed
    kEnding,      // unknown to the driver; gone once its lane has closed
  };
  // Whether the session wants a turn, and has asked the daemon for one.
  enum class Turn : uint8_t { kNone, kWanted, kAsked };
  // Whether the daemon knows the session: kAsked from Arrive to its answer.
  enum class Known : uint8_t { kNo, kAsked, kYes };
  // Whether the session asks for a larger need, and whether its need fell meanwhile.
  enum class Growth : uint8_t { kNone, kAsked, kAskedAndFell };
  // Whether the session has given up sharing its lane: kBoth from needs_own_lane() until has_own_lane().
  enum class OwnLane : uint8_t { kNo, kBoth, kYes };
  struct Event {
    MessageType type;
    uint64_t session;
    uint64_t value;
    std::vector<Descriptor> descriptors;
    std::unique_ptr<Reply> reply;  // of kReply
  };
  struct Record : std::enable_shared_from_this<Record> {
    sched::SessionSpec spec;
    Bytes bytes = Bytes::kWaiting;
    Turn turn = Turn::kNone;
    Known known = Known::kNo;
    Growth growth = Growth::kNone;
    sched::LaneId lane = sched::kNoLane;
    uint64_t told_ephemeral_bytes = 0;  // as the daemon counts E
    uint32_t slot = 0;
    uint64_t epoch = 0;  // the epoch of the lease that this process has accepted; 0 = none
    uint32_t in_flight = 0;
    size_t wanting_at = 0;      // in wanting_, while it wants a turn
    bool dirty = false;         // it is in dirty_
    bool returned = false;      // a turn, which the daemon has yet to be told
    bool known_before = false;  // by this daemon or one before it
    bool room_pending = false;  // the daemon makes room
    // Rooms that the daemon has yet to say are made, and the threads that have asked and have not called room_used() since. Room may
    // come after the last of them has.
    uint32_t rooms_coming = 0;
    std::vector<std::thread::id> room_users;
    std::vector<std::pair<MessageType, uint64_t>>
        held_back;            // messages to send once the daemon knows the session
    uint32_t questions = 0;   // questions about the session that have no answer yet
    std::deque<Event> early;  // news that came while a question is unanswered; handled after the answer
    std::optional<double> worth_ns;  // it is spare
    double worth = 0;                // the worth of its next iteration, by set_worth()
    uint64_t worth_until_ns = 0;
    // As the daemon's coordinator has decided.
    sched::SessionClass counts_as = sched::SessionClass::kGuaranteed;
    uint64_t limit_bytes = 0;
    uint64_t range_bytes = 0, range_answer_ns = 0;  // as told by set_ranges()
    double range_price = 0;
    std::shared_ptr<base::Pieces>
        pieces;  // the pieces of its lane, if the lane is shared; null: its E is its own
    OwnLane own_lane = OwnLane::kNo;
    std::shared_ptr<sched::GateLink> gate;  // null: its launches go through none
    // Iterations in flight, in the order in which they end: those whose begin the daemon was not told, those whose end it will be
    // told, and again those that it was not told of.
    uint32_t untold_work = 0, told_work = 0, later_untold_work = 0;

    bool closes() const {  // true if the daemon hears of the change when the lane has closed
      return bytes == Bytes::kUnplaced || bytes == Bytes::kLeft || bytes == Bytes::kTurnedBack ||
             bytes == Bytes::kEnding;
    }
    bool goes_out() const { return bytes == Bytes::kLeaving || bytes == Bytes::kDropping; }
    bool is_known() const { return known == Known::kYes; }
    bool wants_turn() const { return turn != Turn::kNone; }
  };
  using Answered = std::function<base::Status(const base::Status&, const Reply&)>;
  // A question that the daemon has not answered yet. `answered` is called once, by take_events() or lose().
  struct Question {
    Answered answered;
    bool over = false;
    base::Status status;  // what `answered` made of the daemon's answer, or of the reason for none
  };

  explicit RemoteAuthority(RemoteOptions options) : options_(std::move(options)) {}
  static base::Result<std::shared_ptr<Connection>> connect(const RemoteOptions& options, uint64_t instance);
  static sched::SessionState state_of(const Record& record);
  Record* find(sched::SessionId session);
  const Record* find(sched::SessionId session) const;
  std::vector<Record*> by_id() const;
  uint64_t rounded_ephemeral(uint64_t bytes) const;
  Lease& lease(const Record& record) const { return connection_->page->lease(record.slot); }
  using Then = std::function<void(const base::Status&)>;
  // `then` is called with the daemon's answer.
  std::shared_ptr<Question> declare(Record& record, bool may_queue, Then then);
  void declare_queued(Record& record);
  void tell_next_worth(const Record& record);
  void is_declared(Record& record, const Reply& reply, const Arrive& said);
  std::shared_ptr<Question> ask(std::span<const std::byte> request, uint32_t sequence, Answered answered);
  // Asks about a session. News of the session is handled after the answer.
  std::shared_ptr<Question> ask_about(Record& record, std::span<const std::byte> request, uint32_t sequence,
                                      Answered answered);
  // Waits without the driver's lock.
  base::Status await(const std::shared_ptr<Question>& question);
  // Sleeps without the driver's lock until there is news, which it handles, or until the deadline has passed.
  void await_news(const base::Deadline& deadline);
  void wait_for_news(uint64_t seen_news, const base::Deadline& deadline);
  // OK once there is a daemon; waits for one as long as it may. `record`: the session whose call waits, and whose
  // iteration may stand in the way of a new connection; null: no session's.
  base::Status await_daemon(const Record* record);
  void answer(Question& question, base::Status status, const Reply& reply);
  void take_answer(const Reply& reply);
  void tell(MessageType type, Record& record, uint64_t value = 0);
  void tell_context();
  void tell_worth(Record& record);
  void tell_ranges(const Record& record);
  // Where the session goes through a gate, the daemon says what that may let in.
  void tell_gate(Record& record);
  void tell_work(MessageType type, const Record& record, uint64_t device_ns, double target);
  // Never waits: messages that the socket does not take yet are sent later.
  void send(std::span<const std::byte> message);
  void send_backlog();
  void mark(Record& record);
  void unmark(Record& record);
  void set_turn(Record& record, Turn turn);
  void forget(Record& record);  // destroys the record
  void accept_unwanted(Record& record);
  void say_unseen_returned(Record& record);
  void give_back(Record& record);
  void flush();
  void take_events();
  void handle(Event event);
#define GPUSHARE_ON_CALL(handler)
#define GPUSHARE_ON_EVENT(handler)
#define GPUSHARE_ON_ANSWER(handler)
#define GPUSHARE_ON_NEWS(handler) void on_##handler(Record& record, Event& event);
#define GPUSHARE_ON(name, fields, kind, handler) GPUSHARE_ON_##kind(handler)
  GPUSHARE_MESSAGES(GPUSHARE_ON)
#undef GPUSHARE_ON
#undef GPUSHARE_ON_NEWS
#undef GPUSHARE_ON_ANSWER
#undef GPUSHARE_ON_EVENT
#undef GPUSHARE_ON_CALL
  // Writes P and E as the daemon is to count them: an E that is the session's own is told as P.
  static void put_need(const Record& record, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                       uint64_t* out_persistent, uint64_t* out_ephemeral);
  std::shared_ptr<Question> ask_need(Record& record, uint64_t persistent_bytes, uint64_t ephemeral_bytes,
                                     Then then);
  void tell_need(const Record& record);
  static uint64_t told_of(const Record& record, uint64_t ephemeral_bytes);
  bool shrink_need(Record& record, uint64_t persistent_bytes, uint64_t ephemeral_bytes);
  void has_need(Record& record, uint64_t persistent_bytes, uint64_t ephemeral_bytes, uint64_t told_bytes);
  void open_lane(Record& record);
  void free_lane(sched::LaneId lane);
  void close_lane(Record& record, Bytes to);
  void lane_closed(Record& record);
  // Gives up a shared lane of a daemon that has gone. The lane closes, and the session has none until the next daemon
  // admits it.
  void give_lane_up(Record& record);
  void take_piece(Record& record, std::vector<Descriptor> descriptors, uint64_t bytes);
  // Takes the pieces that have come for the session.
  void take_pieces(Record& record);
  void count_shared(const Record& record, bool begins);
  void page_out_when_drained(Record& record);
  void give_way(Record& record);
  void declare_resident(Record& record);
  void start_page_in(Record& record);
  // Ends the page-in, done or given up. False: there was none.
  bool end_page_in(Record& record);
  void set_terms(Record& record, sched::SessionClass cls, uint64_t limit_bytes);
  void adopt(std::shared_ptr<Connection> connection);
  void lose(base::Status why);

  void listen();
  void reconnect();
  void tell_driver();
  void empty_poke() const;
  // Takes what has come from the socket into events_ and replies; true if there was an event. The error says that the
  // connection is gone.
  base::Result<bool> drain(Connection& connection) GPUSHARE_EXCLUDES(inbox_mutex_);
  base::Status take_message(std::span<const std::byte> message, std::vector<Descriptor> descriptors)
      GPUSHARE_REQUIRES(inbox_mutex_);
  void fill_inbox() GPUSHARE_REQUIRES(inbox_mutex_);  // something is there for take_events()
  void tell_news() GPUSHARE_REQUIRES(inbox_mutex_);   // whoever waits looks again
  void poke() const;

  const RemoteOptions options_;
  const std::shared_ptr<Images> images_ = std::make_shared<Images>();
  uint64_t instance_ = 0;
  std::string device_, policy_;
  uint64_t capacity_bytes_ = 0;
  base::Steps steps_;
  uint64_t context_bytes_ = 0;
  double link_ns_per_byte_ = 0;  // as the driver measured it

  // ---- of the driver
  std::shared_ptr<Connection> connection_;  // the last one, also when it is gone
  base::Status gone_;                       // OK, or why there is no daemon
  uint64_t wait_ns_ = kDaemonWaitNs;
  base::FlatHashMap<sched::SessionId, std::shared_ptr<Record>> sessions_;
  std::map<uint32_t, std::shared_ptr<Question>> questions_;  // by sequence
  std::deque<std::vector<std::byte>> backlog_;               // messages that the socket has not taken
  base::Deadline backlog_until_ =
      base::Deadline::after(GPUSHARE_NO_TIMEOUT);  // when an unanswering daemon counts as gone
  std::vector<Record*> lanes_;                     // by lane id; null = free
  sched::LaneIds lane_ids_;
  std::vector<Record*> wanting_;                    // a turn, in no order
  mutable std::vector<sched::LaneId> asked_lanes_;  // room for lanes_to_ask()
  Record given_up_;  // stands in lanes_ for a lane that its session has given up
  std::vector<sched::Action> actions_;
  std::vector<RangesAsked> ranges_asked_;
  std::vector<Record*> dirty_;  // sessions about which flush() has something to send
  uint32_t next_sequence_ = 1;

  // ---- shared with the listening thread
  mutable base::Mutex inbox_mutex_;
  std::deque<Event> events_ GPUSHARE_GUARDED_BY(inbox_mutex_);
  uint64_t news_ GPUSHARE_GUARDED_BY(inbox_mutex_) = 0;  // counts messages and answers
  base::ConditionVariable news_came_;
  base::Status lost_ GPUSHARE_GUARDED_BY(inbox_mutex_);                  // the connection that the driver has
  std::shared_ptr<Connection> fresh_ GPUSHARE_GUARDED_BY(inbox_mutex_);  // for the driver to adopt
  std::atomic<bool> inbox_full_{false};
  std::function<void()> changed_;
  Unlocked unlocked_;
  std::atomic<bool> has_backlog_{false};
  Descriptor poke_;  // an eventfd
  std::atomic<bool> stop_{false};
  std::atomic<bool> lost_known_{false};      // the driver knows of the loss, and begins no iteration any more
  std::atomic<uint64_t> gone_until_ns_{0};   // the host time at which waits for a daemon fail
  std::atomic<bool> overdue_told_{false};    // the driver was told that no daemon came in time
  std::atomic<uint32_t> busy_in_shared_{0};  // iterations and page-ins under way in shared lanes
  std::shared_ptr<Connection> listening_;    // used by the listening thread
  base::ServiceThread thread_;
};

}  // namespace gpushare::client
