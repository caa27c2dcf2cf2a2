// worker.hpp: models shared by processes in C++: RAII over worker.h. Included by gpushare.hpp, whose rules hold
// here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_WORKER_HPP_
#define GPUSHARE_WORKER_HPP_

#include <string>
#include <utility>

#include "gpushare/gpushare.hpp"

namespace gpushare {

// This process as a worker of a model daemon: one model, and turns on the device.
class Worker {
 public:
  struct Options {
    std::string socket;
    std::string name;
    std::string model;
    Nanoseconds iteration{0};  // how long one executes; 0: as long as the load
    uint64_t scratch_bytes = 0;
    Nanoseconds timeout = no_timeout;
  };
  // A turn ends when it is destroyed; errors on that path are dropped, so call end() to see them. The worker
  // must outlive the turn and must not be moved meanwhile.
  class Turn {
   public:
    explicit Turn(gpushare_worker worker) : worker_(worker) {}
    Turn(Turn&& other) noexcept : worker_(std::exchange(other.worker_, nullptr)) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() {
      if (worker_ != nullptr) (void)gpushare_worker_end(worker_);
    }
    void end() { check(gpushare_worker_end(std::exchange(worker_, nullptr))); }
    // Blocks until layers [first, end) are on the device.
    void wait_layers(uint32_t first, uint32_t end, Nanoseconds timeout = no_timeout) const {
      check(gpushare_worker_wait_layers(worker_, first, end, detail::timeout_ns(timeout)));
    }
    // True while another worker waits for the turn: end the turn at the next iteration boundary.
    bool wanted() const {
      uint32_t out = 0;
      check(gpushare_worker_get_wanted(worker_, &out));
      return out != 0;
    }

   private:
    gpushare_worker worker_;
  };

  static Worker attach(const Options& options) {
    gpushare_worker_params params = GPUSHARE_WORKER_PARAMS_INIT;
    params.socket = options.socket.c_str();
    params.name = options.name.c_str();
    params.model = options.model.c_str();
    params.iteration_ns =
        options.iteration.count() < 0 ? 0 : static_cast<uint64_t>(options.iteration.count());
    params.scratch_bytes = options.scratch_bytes;
    params.timeout_ns = detail::timeout_ns(options.timeout);
    gpushare_worker out = nullptr;
    check(gpushare_worker_attach(&params, &out));
    return Worker(out);
  }
  // Waits for the turn.
  Turn begin(Nanoseconds timeout = no_timeout) {
    check(gpushare_worker_begin(handle_.get(), detail::timeout_ns(timeout)));
    return Turn(handle_.get());
  }
  gpushare_worker_info info() const {
    gpushare_worker_info out = GPUSHARE_WORKER_INFO_INIT;
    check(gpushare_worker_get_info(handle_.get(), &out));
    return out;
  }
  gpushare_worker_layer layer(uint32_t index) const {
    gpushare_worker_layer out = GPUSHARE_WORKER_LAYER_INIT;
    check(gpushare_worker_get_layer(handle_.get(), index, &out));
    return out;
  }
  gpushare_worker handle() const { return handle_.get(); }

 private:
  explicit Worker(gpushare_worker handle) : handle_(handle) {}
  detail::Handle<gpushare_worker, gpushare_worker_detach> handle_;
};

}  // namespace gpushare

#endif  // GPUSHARE_WORKER_HPP_
