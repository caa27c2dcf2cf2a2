// gate.hpp: a session's gate in C++: RAII over gate.h. Included by gpushare.hpp, whose rules hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_GATE_HPP_
#define GPUSHARE_GATE_HPP_

#include "gpushare/gate.h"
#include "gpushare/gpushare.hpp"

namespace gpushare {

// The gate that a session's launches go through. Threads: any.
class Gate {
 public:
  Gate() = default;
  explicit Gate(const Session& session) {
    gpushare_gate out = nullptr;
    check(gpushare_gate_open(session.get(), &out));
    handle_ = Handle(out);
    check(gpushare_gate_get_flag(out, &flag_));
  }
  gpushare_gate get() const noexcept { return handle_.get(); }

  // Before each launch of work that takes about `estimated` alone. A load and a branch where nothing is limited; else waits.
  void enter(const Stream& stream, Nanoseconds estimated) const {
    check(GPUSHARE_GATE_ENTER(get(), flag_, stream.get(), detail::timeout_ns(estimated)));
  }
  // Without a stream: done() follows.
  void enter(Nanoseconds estimated) const {
    check(GPUSHARE_GATE_ENTER(get(), flag_, nullptr, detail::timeout_ns(estimated)));
  }
  // False: not within the timeout.
  bool try_enter(const Stream* stream, Nanoseconds estimated, Nanoseconds timeout = Nanoseconds(0)) const {
    const int32_t status = gpushare_gate_enter(get(), stream == nullptr ? nullptr : stream->get(),
                                               detail::timeout_ns(estimated), detail::timeout_ns(timeout));
    if (status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }
  void done(Nanoseconds estimated) const { check(gpushare_gate_done(get(), detail::timeout_ns(estimated))); }
  gpushare_gate_info info() const {
    gpushare_gate_info out = GPUSHARE_GATE_INFO_INIT;
    check(gpushare_gate_get_info(get(), &out));
    return out;
  }

 private:
  using Handle = detail::Handle<gpushare_gate, gpushare_gate_release>;
  Handle handle_;
  const uint32_t* flag_ = nullptr;
};

// The slowdown that guaranteed sessions accept from opportunistic ones; 0: the default.
inline void set_target_slowdown(const Session& session, double target) {
  check(gpushare_session_set_target_slowdown(session.get(), target));
}
inline void set_target_slowdown(const Runtime& runtime, double target) {
  check(gpushare_runtime_set_target_slowdown(runtime.get(), target));
}

}  // namespace gpushare

#endif  // GPUSHARE_GATE_HPP_
