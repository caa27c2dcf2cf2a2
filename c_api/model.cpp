// Models: an image's layers in a session's memory.
// SPDX-License-Identifier: Apache-2.0
#include "loader/model.hpp"

#include "c_api/abi.hpp"
#include "c_api/guard.hpp"
#include "c_api/loader.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"

using namespace gpushare;

namespace {

template <class Body>
int32_t on_model(gpushare_model model, Body&& body) {
  return capi::guard([&]() -> base::Status {
    const auto pin = capi::find(model);
    return pin ? body(*pin->model) : capi::stale(model);
  });
}

template <class Body>
int32_t on_model_and_stream(gpushare_model model, gpushare_stream stream, Body&& body) {
  return on_model(model, [&](loader::Model& of) -> base::Status {
    const auto pin = capi::find(stream);
    return pin ? body(of, *pin) : capi::stale(stream);
  });
}

base::Status no_layer(const loader::Image& image, uint32_t layer) {
  return {GPUSHARE_INVALID_ARGUMENT, base::format("layer is %u, image '%s' has %zu", layer,
                                                  image.name().c_str(), image.layers().size())};
}

}  // namespace

base::Result<loader::LoadOptions> capi::read_load_params(const gpushare_load_params* params, size_t layers) {
  loader::LoadOptions options;
  if (params == nullptr) return options;
  gpushare_load_params read;
  GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
  if (read.group_count > 0) {
    if (read.group_ends == nullptr) return capi::null_argument("params->group_ends");
    options.ends.assign(read.group_ends, read.group_ends + read.group_count);
  }
  if (read.execution_ns != nullptr)
    for (size_t i = 0; i < layers; ++i)
      options.execution_ms.push_back(static_cast<double>(read.execution_ns[i]) / 1e6);
  if (read.on_group != nullptr)
    options.on_group = [fn = read.on_group, user_data = read.on_group_user_data](size_t group, uint32_t first,
                                                                                 uint32_t end) {
      const base::CallbackCalls may_call;
      fn(user_data, static_cast<uint32_t>(group), first, end);
    };
  options.profile = read.no_profile == 0;
  return options;
}

extern "C" {

int32_t gpushare_session_load(gpushare_session session, gpushare_image image,
                              const gpushare_load_params* params, gpushare_model* out_model) {
  return capi::guard([&]() -> base::Status {
    if (out_model == nullptr) return capi::null_argument("out_model");
    const auto session_pin = capi::find(session);
    if (!session_pin) return capi::stale(session);
    const auto image_pin = capi::find(image);
    if (!image_pin) return capi::stale(image);
    GPUSHARE_ASSIGN_OR_RETURN(loader::LoadOptions options,
                              capi::read_load_params(params, image_pin->image->layers().size()));
    GPUSHARE_ASSIGN_OR_RETURN(
        std::shared_ptr<loader::Model> model,
        image_pin->loader->load(session_pin.shared(), image_pin->image, std::move(options)));
    return capi::publish(std::make_shared<capi::ModelObject>(capi::ModelObject{std::move(model), false}),
                         out_model);
  });
}

int32_t gpushare_model_make_usable(gpushare_model model, uint32_t first, uint32_t end,
                                   gpushare_stream stream) {
  return on_model_and_stream(model, stream, [&](loader::Model& of, const executor::Stream& on) {
    return of.make_usable(first, end, on);
  });
}

int32_t gpushare_model_mark_end(gpushare_model model, gpushare_stream stream) {
  return on_model_and_stream(model, stream,
                             [&](loader::Model& of, const executor::Stream& on) { return of.mark_end(on); });
}

int32_t gpushare_model_wait(gpushare_model model, uint32_t layer, uint64_t timeout_ns) {
  return on_model(model, [&](loader::Model& of) { return of.wait(layer, timeout_ns); });
}

int32_t gpushare_model_get_info(gpushare_model model, gpushare_model_info* out_info) {
  return on_model(model, [&](loader::Model& of) -> base::Status {
    gpushare_model_info out = GPUSHARE_MODEL_INFO_INIT;
    out.layers = static_cast<uint32_t>(of.image()->layers().size());
    out.groups = static_cast<uint32_t>(of.group_ends().size());
    out.address = of.address(0);
    out.bytes = of.image()->bytes();
    for (const uint32_t end : of.group_ends()) {
      GPUSHARE_ASSIGN_OR_RETURN(const bool there, of.arrived(end - 1));
      if (!there) break;
      out.layers_arrived = end;
    }
    if (out.layers_arrived == out.layers) {
      const auto took = of.arrived_ns(of.group_ends().size() - 1);
      if (took.ok()) out.load_ns = *took;
    }
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_model_get_layer(gpushare_model model, uint32_t layer, gpushare_layer_info* out_info) {
  return on_model(model, [&](loader::Model& of) -> base::Status {
    const loader::Image& image = *of.image();
    if (layer >= image.layers().size()) return no_layer(image, layer);
    GPUSHARE_ASSIGN_OR_RETURN(const bool there, of.arrived(layer));
    const std::vector<double> execute = image.profile().execution_ms();
    gpushare_layer_info out = capi::layer_info(image, layer, execute.empty() ? 0 : execute[layer]);
    out.address = of.address(layer);
    out.arrived = there ? 1 : 0;
    while (of.group_ends()[out.group] <= layer) ++out.group;
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_model_release(gpushare_model model) {
  return capi::guard([&]() -> base::Status {
    const auto pin = capi::find(model);
    if (!pin) return capi::stale(model);
    if (pin->borrowed)
      return {GPUSHARE_INVALID_ARGUMENT, "the model belongs to its switcher; it is not released"};
    base::Status unloaded = pin->model->unload();
    if (unloaded.code() == GPUSHARE_INVALID_STATE)
      return unloaded;  // inside a callback: the handle stays good
    return capi::table_of<gpushare_model>().remove(model) ? unloaded : capi::stale(model);
  });
}

}  // extern "C"
