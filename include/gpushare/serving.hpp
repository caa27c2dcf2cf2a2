// serving.hpp: requests with deadlines in C++: RAII over serving.h. Included by gpushare.hpp, whose rules hold
// here too. Times are nanoseconds as in C, deadlines on the clock of now_ns().
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_SERVING_HPP_
#define GPUSHARE_SERVING_HPP_

#include <functional>
#include <future>

#include "gpushare/gpushare.hpp"

namespace gpushare {

namespace detail {

inline gpushare_batcher_params batcher_params(const char* policy, uint64_t max_pending,
                                              uint64_t max_defer_ns) {
  gpushare_batcher_params params = GPUSHARE_BATCHER_PARAMS_INIT;
  params.policy = policy;
  params.max_pending = max_pending;
  params.max_defer_ns = max_defer_ns;
  return params;
}

inline gpushare_batcher_model batcher_model(uint64_t c0_ns, double c1, const std::vector<uint32_t>& sizes) {
  gpushare_batcher_model model = GPUSHARE_BATCHER_MODEL_INIT;
  model.c0_ns = c0_ns;
  model.c1 = c1;
  model.batch_sizes = sizes.data();
  model.batch_size_count = static_cast<uint32_t>(sizes.size());
  return model;
}

}  // namespace detail

// The clock of deadlines.
inline uint64_t now_ns() {
  return gpushare_now_ns();
}

// Deadline-aware batching, decisions only; gpushare_batcher_* describes each call. Move-only. The caller must
// serialise calls.
class Batcher {
 public:
  struct Batch {
    gpushare_batch info;
    std::vector<uint64_t> ids;
  };
  // null: "gpushare". max_pending 0: 100,000.
  explicit Batcher(const char* policy = nullptr, uint64_t max_pending = 0, uint64_t max_defer_ns = 0)
      : Batcher(detail::batcher_params(policy, max_pending, max_defer_ns)) {}
  explicit Batcher(const gpushare_batcher_params& params) {
    gpushare_batcher out = nullptr;
    check(gpushare_batcher_create(&params, &out));
    handle_ = detail::Handle<gpushare_batcher, gpushare_batcher_release>(out);
  }
  uint32_t add_model(uint64_t c0_ns, double c1, const std::vector<uint32_t>& batch_sizes = {}) {
    const gpushare_batcher_model model = detail::batcher_model(c0_ns, c1, batch_sizes);
    uint32_t out = 0;
    check(gpushare_batcher_add_model(handle_.get(), &model, &out));
    const uint32_t largest = batch_sizes.empty() ? 16 : batch_sizes.back();
    if (ids_.size() < largest) ids_.resize(largest);
    return out;
  }
  // False: back-pressure (QUEUE_FULL) or too late to finish (TIMED_OUT); the thread's last error says which.
  bool arrive(const gpushare_request& request, uint64_t now_ns) {
    const int32_t status = gpushare_batcher_arrive(handle_.get(), &request, now_ns);
    if (status == GPUSHARE_QUEUE_FULL || status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }
  // False if it was not waiting.
  bool cancel(uint64_t id, uint64_t now_ns) {
    const int32_t status = gpushare_batcher_cancel(handle_.get(), id, now_ns);
    if (status == GPUSHARE_NOT_FOUND) return false;
    check(status);
    return true;
  }
  // Empty if there is nothing to run now; *wake_ns then says when to ask again.
  std::optional<Batch> next(uint64_t now_ns, uint32_t in_flight, uint64_t* wake_ns = nullptr) {
    Batch batch{GPUSHARE_BATCH_INIT, {}};
    if (ids_.empty()) ids_.resize(1);
    const int32_t status =
        gpushare_batcher_next(handle_.get(), now_ns, in_flight, &batch.info, ids_.data(), ids_.size());
    if (wake_ns != nullptr) *wake_ns = batch.info.wake_ns;
    if (status == GPUSHARE_NOT_READY) return std::nullopt;
    check(status);
    batch.ids.assign(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(batch.info.count));
    return batch;
  }
  void started(uint64_t batch_id, uint64_t now_ns) {
    check(gpushare_batcher_started(handle_.get(), batch_id, now_ns));
  }
  void finished(uint64_t batch_id, uint64_t device_ns, uint64_t now_ns) {
    check(gpushare_batcher_finished(handle_.get(), batch_id, device_ns, now_ns));
  }
  // In place of finished and the observe functions. execution_ns: by member, what it took or would take alone; 0, or a
  // vector that ends before: not known.
  void finished_run(uint64_t batch_id, const std::vector<uint64_t>& execution_ns, uint64_t device_ns,
                    uint64_t now_ns) {
    check(gpushare_batcher_finished_run(handle_.get(), batch_id, execution_ns.data(), execution_ns.size(),
                                        device_ns, now_ns));
  }
  void rejected(uint64_t batch_id, uint64_t now_ns) {
    check(gpushare_batcher_rejected(handle_.get(), batch_id, now_ns));
  }
  void observe(uint32_t model, uint32_t application, uint64_t execution_ns) {
    check(gpushare_batcher_observe(handle_.get(), model, application, execution_ns));
  }
  // Reads the request's model, application and features only.
  void observe(const gpushare_request& request, uint64_t execution_ns) {
    check(gpushare_batcher_observe_request(handle_.get(), &request, execution_ns));
  }
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) {
    check(gpushare_batcher_observe_batch(handle_.get(), model, k, longest_ns, device_ns));
  }
  // execution_ns is empty if the times that the members take alone are not known.
  void observe_run(uint32_t model, const std::vector<uint32_t>& applications,
                   const std::vector<uint64_t>& execution_ns, uint64_t device_ns) {
    if (!execution_ns.empty() && execution_ns.size() != applications.size())
      throw Error(GPUSHARE_INVALID_ARGUMENT, "observe_run: as many execution times as applications, or none");
    check(gpushare_batcher_observe_run(handle_.get(), model, applications.data(),
                                       execution_ns.empty() ? nullptr : execution_ns.data(),
                                       applications.size(), device_ns));
  }
  gpushare_profile profile(uint32_t model, uint32_t application) const {
    gpushare_profile out = GPUSHARE_PROFILE_INIT;
    check(gpushare_batcher_get_profile(handle_.get(), model, application, &out));
    return out;
  }
  // All drops since the last call.
  std::vector<gpushare_drop> take_drops() {
    std::vector<gpushare_drop> out;
    gpushare_drop some[64];
    uint64_t count = 0;
    do {
      check(gpushare_batcher_take_drops(handle_.get(), some, 64, &count));
      out.insert(out.end(), some, some + count);
    } while (count == 64);
    return out;
  }
  uint64_t pending() const {
    uint64_t out = 0;
    check(gpushare_batcher_get_pending(handle_.get(), &out));
    return out;
  }

 private:
  detail::Handle<gpushare_batcher, gpushare_batcher_release> handle_;
  std::vector<uint64_t> ids_;
};

// Requests with deadlines in front of a runtime; see serving.h. Destroy the queue before the sessions of its
// models. Destruction closes it: waiting requests are answered CANCELLED.
class RequestQueue {
 public:
  using Batch = gpushare_queued_batch;
  using Outcome = gpushare_request_outcome;

  explicit RequestQueue(const Runtime& runtime, const char* policy = nullptr, uint64_t max_pending = 0)
      : RequestQueue(runtime, detail::batcher_params(policy, max_pending, 0)) {}
  RequestQueue(const Runtime& runtime, const gpushare_batcher_params& params) {
    gpushare_request_queue out = nullptr;
    check(gpushare_request_queue_create(runtime.get(), &params, &out));
    handle_ = detail::Handle<gpushare_request_queue, gpushare_request_queue_close>(out);
  }
  gpushare_request_queue get() const noexcept { return handle_.get(); }

  // `function(Iteration&, const Batch&)` runs each batch of the model as an iteration of `session`. An
  // exception fails that batch. c0 and c1 are initial values, for callers that know something of the batch
  // time.
  template <class F>
  uint32_t add_model(const Session& session, F function, uint64_t c0_ns = 0, double c1 = 1.0,
                     const std::vector<uint32_t>& batch_sizes = {}) {
    const gpushare_batcher_model model = detail::batcher_model(c0_ns, c1, batch_sizes);
    auto owned = std::make_unique<F>(std::move(function));
    uint32_t out = 0;
    check(gpushare_request_queue_add_model(
        get(), session.get(), &model,
        [](void* user_data, gpushare_iteration handle, const gpushare_queued_batch* batch) -> int32_t {
          Iteration iteration(handle, /*owned=*/false);
          (*static_cast<F*>(user_data))(iteration, *batch);
          return GPUSHARE_OK;
        },
        owned.get(), [](void* user_data) { delete static_cast<F*>(user_data); }, &out));
    (void)owned.release();
    return out;
  }

  // If this returns true, `answer(const Outcome&)` is called once, on a thread of the queue. It returns false
  // for back-pressure (QUEUE_FULL) and for a request that cannot finish in time (TIMED_OUT); the thread's last
  // error says which. request.arrival_ns 0 means now. Batches see no user_data of these requests: use their
  // ids.
  template <class F>
  bool submit(const gpushare_request& request, F answer) {
    auto owned = std::make_unique<F>(std::move(answer));
    const int32_t status = gpushare_request_queue_submit(
        get(), &request,
        [](void* user_data, const gpushare_request_outcome* outcome) {
          const std::unique_ptr<F> body(static_cast<F*>(user_data));
          (*body)(*outcome);
        },
        owned.get());
    if (status == GPUSHARE_QUEUE_FULL || status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    (void)owned.release();
    return true;
  }
  // The same with a future of the outcome; throws QUEUE_FULL and TIMED_OUT too.
  std::future<Outcome> submit(const gpushare_request& request) {
    std::promise<Outcome> promise;
    std::future<Outcome> future = promise.get_future();
    if (!submit(request,
                [kept = std::move(promise)](const Outcome& outcome) mutable { kept.set_value(outcome); })) {
      gpushare_error_info error = GPUSHARE_ERROR_INFO_INIT;
      (void)gpushare_last_error(&error);
      check(error.status);
    }
    return future;
  }
  // False if it was not waiting.
  bool cancel(uint64_t id) {
    const int32_t status = gpushare_request_queue_cancel(get(), id);
    if (status == GPUSHARE_NOT_FOUND) return false;
    check(status);
    return true;
  }
  void observe(uint32_t model, uint32_t application, uint64_t execution_ns) {
    check(gpushare_request_queue_observe(get(), model, application, execution_ns));
  }
  // Reads the request's model, application and features only.
  void observe(const gpushare_request& request, uint64_t execution_ns) {
    check(gpushare_request_queue_observe_request(get(), &request, execution_ns));
  }
  void observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) {
    check(gpushare_request_queue_observe_batch(get(), model, k, longest_ns, device_ns));
  }
  gpushare_profile profile(uint32_t model, uint32_t application) const {
    gpushare_profile out = GPUSHARE_PROFILE_INIT;
    check(gpushare_request_queue_get_profile(get(), model, application, &out));
    return out;
  }
  gpushare_request_queue_info info() const {
    gpushare_request_queue_info out = GPUSHARE_REQUEST_QUEUE_INFO_INIT;
    check(gpushare_request_queue_get_info(get(), &out));
    return out;
  }
  // Refuses new requests and waits for the accepted ones. Returns false if the timeout passed before all were
  // answered.
  bool drain(Nanoseconds timeout = no_timeout) {
    const int32_t status = gpushare_request_queue_drain(get(), detail::timeout_ns(timeout));
    if (status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }
  void close() { handle_.close(); }

 private:
  detail::Handle<gpushare_request_queue, gpushare_request_queue_close> handle_;
};

// A histogram of the last durations. The caller must serialise calls.
class Histogram {
 public:
  // window 0: 2,048.
  explicit Histogram(uint64_t window = 0, uint32_t drift_samples = 0) {
    gpushare_histogram_params params = GPUSHARE_HISTOGRAM_PARAMS_INIT;
    params.window = window;
    params.drift_samples = drift_samples;
    gpushare_histogram out = nullptr;
    check(gpushare_histogram_create(&params, &out));
    handle_ = Owned(out);
  }
  // Creates a histogram from a text that serialize() wrote.
  static Histogram parse(const std::string& text) {
    gpushare_histogram out = nullptr;
    check(gpushare_histogram_parse(text.data(), text.size(), &out));
    return Histogram(Owned(out));
  }
  gpushare_histogram get() const noexcept { return handle_.get(); }
  void record(uint64_t duration_ns) { check(gpushare_histogram_record(get(), duration_ns)); }
  void merge(const Histogram& other) { check(gpushare_histogram_merge(get(), other.get())); }
  void reset() { check(gpushare_histogram_reset(get())); }
  gpushare_histogram_info info() const {
    gpushare_histogram_info out = GPUSHARE_HISTOGRAM_INFO_INIT;
    check(gpushare_histogram_get_info(get(), &out));
    return out;
  }
  // The quantile of the longest of k durations.
  double quantile_ns(double q, uint32_t k = 1) const {
    double out = 0;
    check(gpushare_histogram_get_quantile(get(), q, k, &out));
    return out;
  }
  std::string serialize() const {
    uint64_t size = 0;
    (void)gpushare_histogram_serialize(get(), nullptr, 0, &size);
    std::string text(size, '\0');
    check(gpushare_histogram_serialize(get(), text.data(), size, &size));
    text.resize(size - 1);
    return text;
  }

 private:
  using Owned = detail::Handle<gpushare_histogram, gpushare_histogram_release>;
  explicit Histogram(Owned handle) : handle_(std::move(handle)) {}
  Owned handle_;
};

// Requests ordered by Orloj's score. The caller must serialise calls.
class ScoreQueue {
 public:
  struct Best {
    uint64_t id;
    double score;
  };
  ScoreQueue() {
    gpushare_score_queue out = nullptr;
    check(gpushare_score_queue_create(&out));
    handle_ = detail::Handle<gpushare_score_queue, gpushare_score_queue_release>(out);
  }
  uint32_t add_class(const gpushare_score_class& score_class) {
    uint32_t out = 0;
    check(gpushare_score_queue_add_class(handle_.get(), &score_class, &out));
    return out;
  }
  void set_class(uint32_t index, const gpushare_score_class& score_class) {
    check(gpushare_score_queue_set_class(handle_.get(), index, &score_class));
  }
  // Returns the entry that erase takes.
  uint32_t insert(uint32_t index, uint64_t deadline_ns, uint64_t id) {
    uint32_t out = 0;
    check(gpushare_score_queue_insert(handle_.get(), index, deadline_ns, id, &out));
    return out;
  }
  void erase(uint32_t entry) { check(gpushare_score_queue_erase(handle_.get(), entry)); }
  // Empty when the queue is.
  std::optional<Best> best(uint64_t at_ns) {
    Best best{};
    const int32_t status = gpushare_score_queue_best(handle_.get(), at_ns, &best.id, &best.score);
    if (status == GPUSHARE_NOT_READY) return std::nullopt;
    check(status);
    return best;
  }
  // The best `count`, best first.
  std::vector<uint64_t> pop(uint64_t at_ns, uint64_t count) {
    std::vector<uint64_t> ids(count < size() ? count : size());
    uint64_t taken = 0;
    if (!ids.empty()) check(gpushare_score_queue_pop(handle_.get(), at_ns, ids.size(), ids.data(), &taken));
    ids.resize(taken);
    return ids;
  }
  uint64_t size() const {
    uint64_t out = 0;
    check(gpushare_score_queue_get_size(handle_.get(), &out));
    return out;
  }

 private:
  detail::Handle<gpushare_score_queue, gpushare_score_queue_release> handle_;
};

}  // namespace gpushare

#endif  // GPUSHARE_SERVING_HPP_
