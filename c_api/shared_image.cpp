// Images that the daemon shares.
// SPDX-License-Identifier: Apache-2.0
#include "executor/shared_image.hpp"

#include <memory>

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

extern "C" {

int32_t gpushare_session_open_shared_image(gpushare_session session,
                                           const gpushare_shared_image_params* params,
                                           gpushare_shared_image* out_image) {
  return capi::guard<true>([&]() -> base::Status {
    std::shared_ptr<executor::Session> object;
    if (const auto pin = capi::find(session))
      object = pin.shared();
    else
      return capi::stale(session);
    if (out_image == nullptr) return capi::null_argument("out_image");
    gpushare_shared_image_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    if (read.path == nullptr) return capi::null_argument("params->path");
    executor::SharedImageOptions options;
    options.path = read.path;
    options.iteration_ns = read.iteration_ns;
    options.timeout_ns = read.timeout_ns;
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<executor::SharedImage> image, object->open_image(options));
    return capi::publish(std::move(image), out_image);
  });
}

int32_t gpushare_shared_image_release(gpushare_shared_image image) {
  return capi::guard([&]() -> base::Status {
    std::shared_ptr<executor::SharedImage> object;
    if (!capi::table_of<gpushare_shared_image>().remove(image, &object)) return capi::stale(image);
    object->close();
    return {};
  });
}

int32_t gpushare_shared_image_wait(gpushare_shared_image image, uint32_t first, uint32_t end,
                                   uint64_t timeout_ns) {
  return capi::with(image,
                    [&](executor::SharedImage& object) { return object.wait(first, end, timeout_ns); });
}

int32_t gpushare_shared_image_get_info(gpushare_shared_image image, gpushare_shared_image_info* out_info) {
  return capi::with(image, [&](executor::SharedImage& object) -> base::Status {
    gpushare_shared_image_info info = GPUSHARE_SHARED_IMAGE_INFO_INIT;
    info.layers = static_cast<uint32_t>(object.layers().size());
    info.bytes = object.bytes();
    info.address = object.address();
    info.layers_arrived = object.arrived();
    return capi::write_struct("out_info", info, out_info);
  });
}

int32_t gpushare_shared_image_get_layer(gpushare_shared_image image, uint32_t layer,
                                        gpushare_layer_info* out_info) {
  return capi::with(image, [&](executor::SharedImage& object) -> base::Status {
    if (layer >= object.layers().size())
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("layer %u asked; there are [0, %zu)", layer, object.layers().size())};
    const client::TableLayer& found = object.layers()[layer];
    gpushare_layer_info info = GPUSHARE_LAYER_INFO_INIT;
    info.layer = layer;
    info.name = found.name.c_str();
    info.bytes = found.bytes;
    info.offset_bytes = found.offset_bytes;
    info.address = object.address() + found.offset_bytes;
    info.arrived = object.arrived() > layer ? 1 : 0;
    return capi::write_struct("out_info", info, out_info);
  });
}

}  // extern "C"
