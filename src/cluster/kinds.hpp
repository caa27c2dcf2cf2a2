// kinds.hpp: the kinds of documents, and how one joins: a file that defines its `<name>_kind()`, which is declared and
// listed here, an example under examples/cluster, and its files in CMakeLists.txt. Nothing else knows the kinds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/fields.hpp"
#include "cluster/model/device.hpp"
#include "cluster/scheduler.hpp"

namespace gpushare::cluster {

namespace shares {
class RealJobs;
struct RoundsProblem;
}  // namespace shares

inline constexpr uint64_t kDocumentVersion = 1;

// Something on a row of a timeline.
struct PlaySpan {
  std::string row;   // a device, a stream, a job
  std::string name;  // what is there
  double begin_s = 0;
  double end_s = 0;
};

// The times of jobs that really ran.
struct RealRun {
  std::vector<double> end_s;  // of each job, from the begin of the run; negative: it did not end
  uint64_t pauses = 0;
  double utilization = 0;  // device time with a job over all device time
  std::vector<PlaySpan> spans;
};

// How a document is played through.
struct PlayOptions {
  std::optional<double> noise;       // in place of the document's; what it is of, the kind's schema says
  std::optional<uint64_t> rounds;    // in place of the document's, for kinds that have rounds
  std::string objective;             // for kinds that choose one; "": the kind's default
  uint64_t seed = 1;                 // of all noise
  std::function<uint64_t()> now_ns;  // for the time of decisions; may be empty
  // Schedulers of the caller's own for training jobs, beside those of the kind.
  struct Own {
    std::string name;
    std::function<std::unique_ptr<Scheduler>()> make;  // a fresh one for each run
  };
  std::vector<Own> own;
  // For the kind shares, whose jobs then really run: fresh jobs for each scheduler. Empty: virtual time.
  std::function<base::Result<std::unique_ptr<shares::RealJobs>>(const shares::RoundsProblem&)> real_jobs;
  // For the kind trials, which then really run under the scheduler: blocks until all have ended. Empty: virtual time.
  std::function<base::Result<RealRun>(const std::vector<JobInfo>&, const std::vector<Device>&, Scheduler&)>
      real_trials;
};

// A document that was read, to be decided by any of its kind's schedulers.
class Problem {
 public:
  virtual ~Problem() = default;
  // As solve, playing the document through with noise: `choice` is one of the kind's run_choices. Appends to `spans`
  // unless it is null.
  virtual base::Status play(std::string_view choice, const PlayOptions& options, OrderedJson& result,
                            std::vector<PlaySpan>* spans) = 0;
  // Adds the fields of the kind to `result`. `choice` is one of the kind's. Work that cannot be served or run is named
  // in the result and is no error. Errors: INVALID_ARGUMENT with the path of a field that the scheduler needs and the
  // document lacks.
  virtual base::Status solve(std::string_view choice, OrderedJson& result) = 0;
};

struct Kind {
  const char* name;
  const char*
      chooses;  // "scheduler" or "objective": what `choices` are, and the field of a result that names one
  std::vector<const char*> choices;
  std::vector<const char*> defaults;     // taken when nothing is said
  std::vector<const char*> run_choices;  // schedulers that play a document
  std::vector<const char*> run_defaults;
  bool needs_devices;  // else the document may leave them out
  // Reads the kind's own fields, and describes them for the schema. Errors go to `document`; what comes back is then not
  // used.
  std::unique_ptr<Problem> (*read)(Fields& document, const std::vector<Device>& devices);
  bool devices_fail = false;  // it plays devices that go down and come back
};

const Kind& services_kind();
const Kind& trials_kind();
const Kind& retraining_kind();
const Kind& shares_kind();
const Kind& application_kind();
const Kind& reservations_kind();

// Reads the fields that every kind has: version, kind and devices.
std::vector<Device> read_frame(Fields& document, const Kind& kind);

// All of them, in the order in which help lists them.
const std::vector<const Kind*>& kinds();

}  // namespace gpushare::cluster
