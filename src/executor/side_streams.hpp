// side_streams.hpp: the streams of a runtime that belong to no lane. Other folders do not include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.hpp"

namespace gpushare::executor {

class StreamImpl;

// Threads: any. Its lock is a leaf: nothing else is taken or called with it held.
class SideStreams {
 public:
  void add(const std::shared_ptr<StreamImpl>& stream);
  // The streams that somebody still holds.
  std::vector<std::shared_ptr<StreamImpl>> all() const;
  // A stream of the device's has been made for one, and has been destroyed.
  void made();
  void gone();
  // The runtime closes: take_all() gives the streams, wait_until_none() waits for streams that others release now.
  std::vector<std::weak_ptr<StreamImpl>> take_all();
  void wait_until_none();

 private:
  mutable base::Mutex mutex_;
  base::ConditionVariable none_left_;
  std::vector<std::weak_ptr<StreamImpl>> streams_ GPUSHARE_GUARDED_BY(mutex_);
  uint32_t open_ GPUSHARE_GUARDED_BY(mutex_) = 0;  // with a stream of the device's
};

}  // namespace gpushare::executor
