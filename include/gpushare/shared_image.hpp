// shared_image.hpp: images that the daemon shares, in C++: RAII over shared_image.h. Included by gpushare.hpp, whose rules
// hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_SHARED_IMAGE_HPP_
#define GPUSHARE_SHARED_IMAGE_HPP_

#include <string>

#include "gpushare/gpushare.hpp"

namespace gpushare {

class SharedImage {
 public:
  struct Options {
    std::string path;
    Nanoseconds iteration{0};  // how long one is likely to execute; 0: as long as the load
    Nanoseconds timeout = no_timeout;
  };
  static SharedImage open(gpushare_session session, const Options& options) {
    gpushare_shared_image_params params = GPUSHARE_SHARED_IMAGE_PARAMS_INIT;
    params.path = options.path.c_str();
    params.iteration_ns =
        options.iteration.count() < 0 ? 0 : static_cast<uint64_t>(options.iteration.count());
    params.timeout_ns = detail::timeout_ns(options.timeout);
    gpushare_shared_image out = nullptr;
    check(gpushare_session_open_shared_image(session, &params, &out));
    return SharedImage(out);
  }
  // Blocks until layers [first, end) are on the device, inside an iteration of the session.
  void wait(uint32_t first, uint32_t end, Nanoseconds timeout = no_timeout) const {
    check(gpushare_shared_image_wait(handle_.get(), first, end, detail::timeout_ns(timeout)));
  }
  gpushare_shared_image_info info() const {
    gpushare_shared_image_info out = GPUSHARE_SHARED_IMAGE_INFO_INIT;
    check(gpushare_shared_image_get_info(handle_.get(), &out));
    return out;
  }
  gpushare_layer_info layer(uint32_t index) const {
    gpushare_layer_info out = GPUSHARE_LAYER_INFO_INIT;
    check(gpushare_shared_image_get_layer(handle_.get(), index, &out));
    return out;
  }
  gpushare_shared_image handle() const { return handle_.get(); }

 private:
  explicit SharedImage(gpushare_shared_image handle) : handle_(handle) {}
  detail::Handle<gpushare_shared_image, gpushare_shared_image_release> handle_;
};

}  // namespace gpushare

#endif  // GPUSHARE_SHARED_IMAGE_HPP_
