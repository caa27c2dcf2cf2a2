// steps.hpp: continuous batching in C++: RAII over steps.h. Included by gpushare.hpp, whose rules hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_STEPS_HPP_
#define GPUSHARE_STEPS_HPP_

#include <cstdint>
#include <memory>
#include <utility>

#include "gpushare/serving.hpp"
#include "gpushare/steps.h"

namespace gpushare {

// Requests that join and leave a batch between its iterations; see steps.h. Destroy the queue before its session. Destruction closes
// it: requests are answered CANCELLED.
class StepQueue {
 public:
  using Step = gpushare_step;
  using Answer = gpushare_step_answer;

  // `function(Iteration&, const Step&)` runs each step as an iteration of `session`. An exception fails the step's members.
  template <class F>
  StepQueue(const Session& session, F function,
            const gpushare_step_queue_params& params = GPUSHARE_STEP_QUEUE_PARAMS_INIT) {
    auto owned = std::make_unique<F>(std::move(function));
    gpushare_step_queue out = nullptr;
    check(gpushare_step_queue_create(
        session.get(), &params,
        [](void* user_data, gpushare_iteration handle, const gpushare_step* step) -> int32_t {
          Iteration iteration(handle, /*owned=*/false);
          (*static_cast<F*>(user_data))(iteration, *step);
          return GPUSHARE_OK;
        },
        owned.get(), [](void* user_data) { delete static_cast<F*>(user_data); }, &out));
    (void)owned.release();
    handle_ = detail::Handle<gpushare_step_queue, gpushare_step_queue_close>(out);
  }
  gpushare_step_queue get() const noexcept { return handle_.get(); }

  // If this returns true, `answer(const Answer&)` is called on a thread of the queue until an answer says `ended`. It returns false
  // for back-pressure (QUEUE_FULL) and for a request whose time is over (TIMED_OUT); the thread's last error says which. Steps
  // see no user_data of these requests: use their ids.
  template <class F>
  bool submit(const gpushare_step_request& request, F answer) {
    auto owned = std::make_unique<F>(std::move(answer));
    const int32_t status = gpushare_step_queue_submit(
        get(), &request,
        [](void* user_data, const gpushare_step_answer* news) {
          const std::unique_ptr<F> last(news->ended != 0 ? static_cast<F*>(user_data) : nullptr);
          (*static_cast<F*>(user_data))(*news);
        },
        owned.get());
    if (status == GPUSHARE_QUEUE_FULL || status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    (void)owned.release();
    return true;
  }
  // False if it was not held.
  bool cancel(uint64_t id) {
    const int32_t status = gpushare_step_queue_cancel(get(), id);
    if (status == GPUSHARE_NOT_FOUND) return false;
    check(status);
    return true;
  }
  void set_memory(uint64_t bytes) { check(gpushare_step_queue_set_memory(get(), bytes)); }
  gpushare_step_queue_info info() const {
    gpushare_step_queue_info out = GPUSHARE_STEP_QUEUE_INFO_INIT;
    check(gpushare_step_queue_get_info(get(), &out));
    return out;
  }
  // Refuses new requests and waits for the accepted ones. Returns false if the timeout passed before all were answered.
  bool drain(Nanoseconds timeout = no_timeout) {
    const int32_t status = gpushare_step_queue_drain(get(), detail::timeout_ns(timeout));
    if (status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }
  void close() { handle_.close(); }

 private:
  detail::Handle<gpushare_step_queue, gpushare_step_queue_close> handle_;
};

}  // namespace gpushare

#endif  // GPUSHARE_STEPS_HPP_
