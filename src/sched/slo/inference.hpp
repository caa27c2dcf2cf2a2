// inference.hpp: what requests take alone, from what batches took, where nothing else was ever told.
//
// A batch of k takes c0 + c1 k m, m being the time of its longest member. Members' times are independent. The reversed
// hazard of an application is the chance that a request took just this long if it took no longer; those of a batch's
// members add up. So a batch is one event at m among all batches whose longest took no more. The maximum-likelihood
// estimate of the distribution function has a closed form: each event adds 1 / (members of those batches) to its
// logarithm, counted from the longest down. An event of a batch with several applications is shared among them by
// their hazards (expectation maximisation). The shortest batch bounds what can be known; below it the distribution
// goes on as a lognormal one. The estimate is computed anew from all batches each time, so no guess leaves a trace.
// A change of all times is followed at once.
//
// c1 is the unit of the times, which only told batches change. c0 shows in batches of different sizes: if it is taken
// too small, small batches seem to have long requests. The estimate is the c0 at which the events' sizes are those that
// the hazards expect (a rank estimate). Until sizes differ, it is about the told one, or half of what batches take.
//
// Where there are many applications, those with few members in the batches remembered are rare: they are estimated as
// one, because the longest of a few batches says little of any of them. A rare application's own durations are the
// caller's to draw.
//
// Cost: an estimate is due after a sixteenth of the batches remembered. It sorts them a dozen times and passes over their
// events as often, and up to 64 times more over those of batches that took much longer than the mean of any member
// says; the applications that are not rare are at most 32. Memory: kMostParts, and one part for each batch.
//
// Threads: the owner serialises calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/flat_hash.hpp"

namespace gpushare::sched::slo {

class Inference {
 public:
  // Members of a batch that are of one application and have one objective, see Knowledge::Objective.
  struct Part {
    uint32_t application = 0;
    uint32_t objective = 0;
    uint32_t count = 0;
  };
  static constexpr size_t kMemory = 256;     // batches remembered
  static constexpr size_t kDurations = 120;  // of an estimate
  // In the place of an application: all that are not estimated by themselves.
  static constexpr uint32_t kRare = UINT32_MAX;

  // A finished batch; `parts` ascend by application.
  void add(const std::vector<Part>& parts, double took_ns);
  // The requests of `from` with this objective are, and always were, of the application `to`.
  void move(uint32_t from, uint32_t objective, uint32_t to);
  // c0 as it was told; 0: half of what batches take is supposed until they differ in size.
  void tell_c0(double c0_ns) { told_c0_ns_ = c0_ns; }
  // All batches take `factor` times what they took: forgets the batches, and scales the told c0.
  void rescale(double factor);
  // Forgets the batches with members of the application.
  void forget(uint32_t application);
  // Whether the newest four batches show that all batches take another time than before: each took more than 1.5 times
  // what any older one took of no fewer members and with all of its applications, or less than 0.7 of any of no more
  // members and no other applications. Keeps a few of the older ones, scaled, and returns the factor; else 1.
  double follow_change();
  size_t runs() const { return runs_.size(); }
  // Parts of the batches remembered.
  size_t parts() const { return parts_; }
  // Whether enough batches came since the last estimate.
  bool due() const { return fresh_ > 0 && 16 * fresh_ >= runs_.size(); }
  // Estimates the distributions, and c0 unless `fixed`; returns c0.
  double estimate(double c0_ns, double c1, bool fixed);
  struct Estimate {
    uint32_t application = 0;            // or kRare
    std::vector<uint64_t> durations_ns;  // kDurations quantiles, ascending
    double mean_ns = 0;
    double members = 0;  // of the batches that it was estimated from
    double events = 0;   // these batches, each by the chance that one of the members was its longest
  };
  // Each application with members in the batches remembered has one; those that are rare share one.
  const std::vector<Estimate>& estimates() const { return estimates_; }

 private:
  static constexpr size_t kPoints = 64;       // of times, at which distributions are tabulated
  static constexpr size_t kMostParts = 4096;  // remembered
  struct Piece : Part {
    double share = 0;  // the chance that one of its members was the batch's longest
    size_t event = 0;  // place in events_
  };
  struct Run {
    std::vector<Piece> pieces;
    double size = 0, log_size = 0, took_ns = 0, longest_ns = 0, log_longest = 0;
    size_t first = 0, end = 0;  // its events: places in events_
    bool odd = false;           // left out: it took many times what was expected, and few did
  };
  // A batch as an event of a group.
  struct Event {
    const Run* of = nullptr;
    size_t group = 0;
    double count = 0, share = 0, hazard = 0;
  };
  // An application, or all rare ones: it is estimated by itself.
  struct Group {
    uint32_t application = 0;
    size_t newest = SIZE_MAX;                 // place of the event that was added last
    double members = 0, logs = 0;             // sums of a pass
    std::vector<Event*> events;               // by what the longest took
    std::array<double, kPoints> log_below{};  // logarithms of its distribution function at points_ns_
  };
  static constexpr size_t kLeastRuns = 64;    // kept beyond that, the older ones as of kRare
  static constexpr size_t kFew = 32;          // applications: none of so many is rare
  static constexpr double kLeastEvents = 8;   // a rare application has fewer, counting its parts of batches
  static constexpr int kSearches = 10;        // halvings of the range of c0
  static constexpr int kRounds = 3;           // of expectation maximisation
  static constexpr double kBand = 0.15;       // logarithms of times as near as this count as alike
  static constexpr double kMostFixed = 0.9;   // c0 at most, as a part of what short batches took
  static constexpr double kLeastPart = 0.05;  // of a batch's time that its requests take at least
  static constexpr double kSupposed = 0.5;    // c0 that was not told, as a part of the batches' median
  static constexpr double kPrior = 0.6;       // how many events the c0 told or supposed counts for
  static constexpr double kMostSigma = 2;     // of the lognormal distribution below the shortest batch
  static constexpr double kOdd = 5;      // an odd batch took more than so many times the expected duration
  static constexpr size_t kOddPart = 4;  // where more than a fourth of the batches are odd, none is
  static constexpr size_t kInARow = 4, kToCompare = 16;  // batches, see follow_change
  static constexpr double kAbove = 1.5, kBelow = 0.7;

  void drop_oldest();
  // Divides the event among the pieces by their members.
  static void share_alike(Run& run);
  // Fills groups_, events_ and order_.
  void index();
  void add_events(Run& run, bool many);
  // Orders the batches by what their longest took.
  void set_longest(double c0_ns, double c1);
  // How much larger the events' batches are than expected, in sums of logarithms. It rises with c0.
  double imbalance(double c0_ns, double c1);
  // Shares each event among the groups of its batch by their hazards nearby.
  void share_events();
  void add_hazards();
  double find_c0(double c1);
  void estimate_all(double c0_ns, double c1);
  // True if batches are left out that the estimates are from.
  bool leave_out_odd(double c0_ns, double c1);
  // Fills points_ns_ and the groups' log_below.
  void tabulate();
  double expected_longest_ns(const Run& run) const;
  // Whether every application of `other` is in `run`.
  static bool holds(const Run& run, const Run& other);
  // The batch's time over the mean of those comparable among the first `older` batches; 1 if it is within their range.
  double change(const Run& run, size_t older) const;
  static double slope(const Group& group, const std::vector<double>& levels);
  static Estimate quantiles_of(const Group& group);

  std::deque<Run> runs_;
  size_t parts_ = 0;  // of runs_
  size_t fresh_ = 0;
  double told_c0_ns_ = 0;  // 0: it was not
  // The rest is rebuilt by each estimate.
  struct Place {
    double events = 0;  // batches, each by the part of its members that are of the application
    size_t group = SIZE_MAX;
  };
  base::FlatHashMap<uint32_t, Place> places_;  // by application
  std::vector<Group> groups_;
  std::vector<Event> events_;                // batch after batch
  std::vector<Run*> order_;                  // but for the odd ones
  std::vector<Estimate> estimates_;          // by group
  std::array<double, kPoints> points_ns_{};  // ascending
};

}  // namespace gpushare::sched::slo
