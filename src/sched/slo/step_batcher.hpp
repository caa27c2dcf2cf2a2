// step_batcher.hpp: continuous batching. Requests of a language model join and leave a batch between its iterations
// (steps). Before each step the batcher chooses which members decode a token, how many tokens of which prompts are
// processed, who joins and whose memory is given back. A state machine like Batcher: the step server and the simulator
// drive the same objects.
//
// A step takes a + b D + p C + r K, with D decoding members, C prompt tokens, and K tokens that the decoding members
// have behind them and read again. The real times of steps refine a, b, p and r. A member holds its start bytes, and
// its step bytes for each token since; all members together never plan above the memory limit.
//
// Policies (make_step_batcher): gpushare (the default) and fifo. A policy derives from StepBatcher and overrides choose().
//
// Threads: the driver serialises calls. No call blocks or reads a clock. Every request that arrived is answered once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/flat_hash.hpp"
#include "base/saturate.hpp"
#include "base/status.hpp"
#include "sched/slo/batcher.hpp"

namespace gpushare::sched::slo {

struct StepRequest {
  RequestId id = 0;  // unique among the requests held
  uint64_t arrival_ns = 0;
  uint64_t prompt_tokens = 1;
  uint64_t expected_tokens = 0;  // the tokens that it will generate; 0: unknown
  uint64_t start_bytes = 0;      // the bytes that it holds for its prompt from joining on
  uint64_t step_bytes = 0;       // further bytes for each generated token
  uint64_t first_deadline_ns = kNever;
  uint64_t token_ns = kNever;  // token k after the first is due k times token_ns after the first token came
  double cost = 1;             // the cost of being late
};

struct StepMember {
  RequestId id = 0;
  uint64_t prefill = 0;  // tokens to process in this step; 0: it decodes one token
  uint64_t before = 0;   // the tokens that earlier steps have processed since it joined
  uint64_t total =
      0;  // the tokens to process before it decodes: its prompt, and those that it had generated when it was returned
  uint64_t tokens = 0;  // generated so far
};

struct Step {
  std::vector<StepMember> members;
  // Requests that are not members any more, because they were cancelled or returned to the queue. The driver frees
  // their memory first.
  std::vector<RequestId> left;
  uint64_t expected_ns = 0;
  Worth worth;
  uint64_t wake_ns = kNever;  // of an empty step: ask again then, if nothing happens before
  bool empty() const { return members.empty() && left.empty(); }
};

// What a step did, by member. A span may be empty: no member is done, all is well, bytes are as planned.
struct StepResult {
  int32_t status = 0;  // not OK: the step failed, and so did all of its members
  std::span<const uint8_t> done;
  std::span<const int32_t> statuses;
  std::span<const uint64_t> bytes;  // that the member holds now; UINT64_MAX: as planned
};

// What the step after one is worth, as far as that is known. Both are expected to last as long.
struct NextStep {
  std::vector<Worth> members;  // by member of the first step: of the token after it, if the member goes on
  Worth others;                // of the members that are not in the first step
  Waiting waiting;
  size_t places = 0;  // for those that wait, if all members go on
  // With what the first step has done so far: who ended there is not counted, and leaves a place.
  Worth worth(uint64_t now_ns, const StepResult& first = {}) const;
};

// News of a request: a token, or the end.
struct StepEvent {
  RequestId id = 0;
  bool ended = false;
  int32_t status = 0;
  std::optional<DropReason> dropped;
  uint64_t tokens = 0;  // generated so far
  uint64_t at_ns = 0;
  uint64_t due_ns = 0;  // when the last of them was due, or the one that did not come
  bool late = false;    // one of its tokens was late
};

struct StepOptions {
  size_t max_pending = 100'000;
  uint32_t max_members = 256;
  uint64_t max_prefill_tokens = 0;  // in a step, of all prompts; 0: no limit
  uint64_t memory_bytes = 0;        // of all members; 0: no limit
  // Model of time; 0: unknown, learned.
  double step_ns = 0, decode_ns = 0, prefill_ns = 0, read_ns = 0;
};

// What a step has to do, in the terms of the model of time.
struct StepWork {
  double decoding = 0;  // members
  double prefill = 0;   // tokens of prompts
  double read = 0;      // tokens that decoding members have behind them
};

struct StepStats {
  uint64_t accepted = 0, refused = 0, in_time = 0, late = 0, failed = 0, expired = 0, cancelled = 0,
           returned = 0;
  uint64_t steps = 0, tokens = 0, prefilled_tokens = 0;  // tokens: generated
  uint64_t lost_tokens = 0;  // tokens processed by members that were returned, whose memory is gone
  uint64_t busy_ns = 0;
  uint64_t pending = 0, members = 0, bytes = 0, most_bytes = 0;
};

// a, b, p and r of the cost model, by least squares of relative errors over the last steps. A figure that the steps do
// not determine stays near what was told.
class StepTime {
 public:
  explicit StepTime(const StepOptions& told);
  double ns(const StepWork& work) const {
    return value_[0] + value_[1] * work.decoding + value_[2] * work.prefill + value_[3] * work.read;
  }
  double step_ns() const { return value_[0]; }
  double decode_ns() const { return value_[1]; }
  double prefill_ns() const { return value_[2]; }
  double read_ns() const { return value_[3]; }
  // The factor of the model's time within which 49 of 50 steps end.
  double margin() const { return margin_; }
  void observe(const StepWork& work, double took_ns);

 private:
  void fit();
  struct Sample {
    StepWork work;
    double took;
  };
  static constexpr size_t kWindow = 256;
  std::vector<Sample> samples_;
  size_t next_ = 0;
  uint64_t seen_ = 0;
  std::array<double, 4> told_, value_;
  double margin_ = 1.1;
};

class StepBatcher {
 public:
  virtual ~StepBatcher() = default;
  std::string_view name() const { return name_; }

  // Errors, nothing held: INVALID_ARGUMENT, ALREADY_EXISTS, QUEUE_FULL, TIMED_OUT (its first deadline has passed),
  // EXCEEDS_CAPACITY (its bytes are above memory_bytes of the options).
  base::Status arrive(const StepRequest& request, uint64_t now_ns);
  // True: the request generates nothing more and is answered CANCELLED; a member is answered once a step has said that
  // it left.
  bool cancel(RequestId id, uint64_t now_ns);
  // Cancels all members, and waiting requests, at most 1,024 of them a call. True while others wait. No request joins
  // any more.
  bool cancel_some(uint64_t now_ns);
  // Sets the memory limit from the next step on: at most the options' memory_bytes, if that is not 0. Members above the
  // limit are returned.
  base::Status set_memory(uint64_t bytes);
  // Drops waiting requests whose first deadline has passed, about 1,024 of them at most. If more have passed,
  // expires_ns() is in the past.
  void expire(uint64_t now_ns);
  // The first deadline of a waiting request.
  uint64_t expires_ns() const { return deadlines_.empty() ? kNever : std::get<0>(*deadlines_.begin()); }

  // The next step; end_step follows unless it is empty.
  const Step& begin_step(uint64_t now_ns);
  // The step after the one that begin_step() made last.
  const NextStep& next_step() const { return next_step_; }
  // device_ns 0: what the step took is not known, and nothing is learned from it.
  void end_step(const StepResult& result, uint64_t device_ns, uint64_t now_ns);
  // Called instead of end_step for a step that could not be run: nothing was processed, and it has not been said that
  // members left.
  void undo_step();
  // Appends the news since the last call, in their order.
  void take_events(std::vector<StepEvent>& out);

  StepStats stats() const;
  const StepTime& time() const { return time_; }

 protected:
  enum class Place : uint8_t { kWaiting, kMember, kLeaving };
  struct Held {
    StepRequest request;
    Place place = Place::kWaiting;
    int32_t ends = 0;  // it is to be answered with this; 0: a member that leaves goes back to the queue
    bool late = false;
    bool chosen = false;     // for the step that is being made, or runs
    uint64_t prefill = 0;    // in that step
    uint64_t processed = 0;  // of total()
    uint64_t tokens = 0;
    uint64_t generated = 0;  // tokens when it joined last
    uint64_t bytes = 0;
    uint64_t first_ns = 0;     // when its first token came
    uint64_t last_due_ns = 0;  // when its last token was due
    uint64_t total() const { return request.prompt_tokens + generated; }
    bool decodes() const { return processed == total(); }
    bool decodes_after(uint64_t more) const { return total() - processed <= more; }
    uint64_t due_ns() const;
    uint64_t join_bytes() const;
    // That it reads when it decodes.
    uint64_t context() const { return processed + (tokens - generated); }
  };
  using Key = std::pair<uint64_t, RequestId>;
  // First deadline, arrival, id: of equal deadlines (all that have none) the one that waits longest is the first.
  using DeadlineKey = std::tuple<uint64_t, uint64_t, RequestId>;

  StepBatcher(std::string name, const StepOptions& options);
  // A policy's part: calls decode, prefill, join and give_back until the step is as it wants. These calls refuse what
  // does not fit into memory.
  virtual void choose(uint64_t now_ns) = 0;

  Held& held(RequestId id) { return *held_.find(id)->second; }
  // Members in the order in which they joined; valid until the next give_back.
  const std::vector<Held*>& members() const { return members_; }
  // By first deadline and by arrival.
  const std::set<DeadlineKey>& by_deadline() const { return deadlines_; }
  const std::set<Key>& by_arrival() const { return arrivals_; }
  const StepOptions& options() const { return options_; }
  size_t decoding() const { return decoding_; }        // in the step so far
  uint64_t prefilling() const { return prefilling_; }  // tokens
  double planned_ns() const { return time_.ns(work()); }
  uint64_t limit() const { return memory_; }
  // Bytes left for members, this step's tokens counted.
  uint64_t room() const { return memory_ > planned_bytes_ ? memory_ - planned_bytes_ : 0; }
  bool decode(Held& member);
  // Adds at most `tokens` of what the member has to process; false if that is 0 or does not fit.
  bool prefill(Held& member, uint64_t tokens);
  // Makes a waiting request a member; false if it does not fit.
  bool join(Held& request);
  // Returns a member to the queue and gives its memory back. The member must not be in the step already.
  void give_back(Held& member);
  // The member whose memory is given back first. By default the one that arrived last and is not in the step; null:
  // there is none.
  virtual Held* victim();
  double mean_tokens() const { return mean_tokens_; }  // that finished requests generated

 private:
  base::Status check(const StepRequest& request) const;
  static DeadlineKey deadline_key(const Held& of);
  void enqueue(Held& of);
  void dequeue(Held& of);
  void answer(Held& of, int32_t status, std::optional<DropReason> dropped, uint64_t now_ns);
  void end_member(Held& of, const StepMember& member, size_t index, const StepResult& result,
                  uint64_t now_ns);
  StepWork work() const {
    return {static_cast<double>(decoding_), static_cast<double>(prefilling_), static_cast<double>(reading_)};
  }
  bool choose_for(Held& member, uint64_t bytes, uint64_t prefill);
  void leave(Held& of, int32_t ends);
  void keep_within_limit();
  Worth worth_of_step();
  void foresee_next();
  uint64_t next_begins_ns() const { return base::add_saturated(begun_ns_, step_.expected_ns); }
  void free_the_stuck();
  uint64_t most_memory() const { return options_.memory_bytes == 0 ? UINT64_MAX : options_.memory_bytes; }

  const std::string name_;
  const StepOptions options_;
  uint64_t memory_;
  StepTime time_;
  base::FlatHashMap<RequestId, std::unique_ptr<Held>> held_;
  std::set<DeadlineKey> deadlines_;  // of those that wait
  std::set<Key> arrivals_;           // of the same; the key is that of the first arrival
  std::vector<Held*> members_;
  std::vector<RequestId> leaving_;  // cancelled members that no step has told of
  Step step_;
  NextStep next_step_;
  bool running_ = false;
  bool closing_ = false;   // cancel_some() was called
  uint64_t begun_ns_ = 0;  // when begin_step() was called last
  size_t decoding_ = 0;
  uint64_t prefilling_ = 0, reading_ = 0, planned_bytes_ = 0, bytes_ = 0;
  double mean_tokens_ = 0;
  std::vector<StepEvent> events_;
  StepStats stats_;
};

// Errors: NOT_FOUND listing the names, INVALID_ARGUMENT naming the option.
base::Result<std::unique_ptr<StepBatcher>> make_step_batcher(std::string_view policy,
                                                             const StepOptions& options);

}  // namespace gpushare::sched::slo
