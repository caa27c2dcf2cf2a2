// Loaders, images and plans.
// SPDX-License-Identifier: Apache-2.0
#include "c_api/loader.hpp"

#include <cmath>

#include "base/saturate.hpp"
#include "c_api/guard.hpp"
#include "c_api/tags.hpp"
#include "gpushare/gpushare.h"
#include "loader/grouping.hpp"

using namespace gpushare;

namespace {

uint64_t to_ns(double ms) {
  return base::to_uint64(std::round(ms * 1e6));
}

base::Result<loader::LoaderOptions> to_options(const gpushare_loader_params& params) {
  loader::LoaderOptions options;
  if (params.limit_bytes > 0) options.limit_bytes = params.limit_bytes;
  if (params.chunk_bytes > 0) options.chunk_bytes = params.chunk_bytes;
  if (params.keep_ns > 0) options.keep.ns = params.keep_ns;
  if (params.reads_in_flight > 0) options.read.reads_in_flight = params.reads_in_flight;
  if (params.read_bytes > 0) options.read.read_bytes = params.read_bytes;
  options.read.drop_page_cache = params.drop_page_cache != 0;
  switch (params.read_path) {
    case GPUSHARE_READ_AUTO:
      options.read.path = loader::ReadOptions::Path::kAuto;
      break;
    case GPUSHARE_READ_BUFFERED:
      options.read.path = loader::ReadOptions::Path::kBuffered;
      break;
    case GPUSHARE_READ_DIRECT:
      options.read.path = loader::ReadOptions::Path::kDirect;
      break;
    case GPUSHARE_READ_MAPPED:
      options.read.path = loader::ReadOptions::Path::kMapped;
      break;
    default:
      return base::Status(
          GPUSHARE_INVALID_ARGUMENT,
          base::format("read_path is %u, allowed are 0 (auto), 1 (buffered), 2 (direct), 3 (mapped)",
                       params.read_path));
  }
  if (params.link != nullptr) {
    GPUSHARE_ASSIGN_OR_RETURN(options.link, capi::read_link("params->link", params.link));
  }
  return options;
}

base::Status publish_image(const std::shared_ptr<loader::Loader>& loader,
                           std::shared_ptr<const loader::Image> image, gpushare_image* out) {
  return capi::publish(std::make_shared<capi::ImageObject>(capi::ImageObject{loader, std::move(image)}), out);
}

template <class Body>
int32_t on_loader(gpushare_loader loader, Body&& body) {
  return capi::guard([&]() -> base::Status {
    const auto pin = capi::find(loader);
    return pin ? body(pin.shared()) : capi::stale(loader);
  });
}

template <class Body>
int32_t on_image(gpushare_image image, Body&& body) {
  return capi::guard([&]() -> base::Status {
    const auto pin = capi::find(image);
    return pin ? body(*pin->image) : capi::stale(image);
  });
}

}  // namespace

base::Result<loader::LinkCosts> capi::read_link(const char* name, const gpushare_link_costs* in) {
  gpushare_link_costs read;
  GPUSHARE_RETURN_IF_ERROR(capi::read_struct(name, in, &read));
  if (read.bytes_per_s == 0)
    return base::Status(GPUSHARE_INVALID_ARGUMENT, std::string(name) + ": bytes_per_s is 0");
  loader::LinkCosts out;
  out.bytes_per_ms = static_cast<double>(read.bytes_per_s) / 1e3;
  out.call_overhead_ms = static_cast<double>(read.call_overhead_ns) / 1e6;
  out.group_overhead_ms = static_cast<double>(read.group_overhead_ns) / 1e6;
  out.device_bytes_per_ms = static_cast<double>(read.device_bytes_per_s) / 1e3;
  return out;
}

gpushare_layer_info capi::layer_info(const loader::Image& image, uint32_t layer, double execution_ms) {
  gpushare_layer_info out = GPUSHARE_LAYER_INFO_INIT;
  const loader::Layer& of = image.layers()[layer];
  out.layer = layer;
  out.name = of.name.c_str();
  out.bytes = of.bytes;
  out.offset_bytes = of.offset_bytes;
  out.execution_ns = to_ns(execution_ms);
  return out;
}

extern "C" {

int32_t gpushare_plan_solve(const gpushare_plan_params* params, const gpushare_link_costs* link,
                            uint32_t layers, const uint64_t* layer_bytes, const uint64_t* execution_ns,
                            uint32_t* out_ends, uint32_t* out_groups, uint64_t* out_makespan_ns) {
  return capi::guard([&]() -> base::Status {
    gpushare_plan_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    GPUSHARE_ASSIGN_OR_RETURN(const loader::LinkCosts costs, capi::read_link("link", link));
    if (layers == 0) return {GPUSHARE_INVALID_ARGUMENT, "layers is 0"};
    if (layer_bytes == nullptr) return capi::null_argument("layer_bytes");
    if (out_ends == nullptr) return capi::null_argument("out_ends");
    if (out_groups == nullptr) return capi::null_argument("out_groups");
    std::vector<loader::LayerCost> all;
    all.reserve(layers);
    for (uint32_t i = 0; i < layers; ++i) {
      const double transmit_ms = static_cast<double>(layer_bytes[i]) / costs.bytes_per_ms;
      all.push_back({layer_bytes[i], transmit_ms,
                     execution_ns == nullptr ? transmit_ms : static_cast<double>(execution_ns[i]) / 1e6});
    }
    loader::GroupingCosts grouping;
    grouping.call_overhead_ms = costs.call_overhead_ms;
    grouping.group_overhead_ms = costs.group_overhead_ms;
    grouping.link_busy_ms = static_cast<double>(read.link_busy_ns) / 1e6;
    grouping.lane_busy_ms = static_cast<double>(read.lane_busy_ns) / 1e6;
    grouping.resident_layers = read.resident_layers;
    grouping.group_cap_bytes = read.group_cap_bytes;
    GPUSHARE_ASSIGN_OR_RETURN(const loader::Grouping plan, loader::plan_groups(all, grouping));
    std::copy(plan.ends.begin(), plan.ends.end(), out_ends);
    *out_groups = static_cast<uint32_t>(plan.ends.size());
    if (out_makespan_ns != nullptr) *out_makespan_ns = to_ns(plan.makespan_ms);
    return {};
  });
}

int32_t gpushare_loader_create(gpushare_runtime runtime, const gpushare_loader_params* params,
                               gpushare_loader* out_loader) {
  return capi::guard([&]() -> base::Status {
    if (out_loader == nullptr) return capi::null_argument("out_loader");
    gpushare_loader_params read;
    GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
    GPUSHARE_ASSIGN_OR_RETURN(loader::LoaderOptions options, to_options(read));
    const auto pin = capi::find(runtime);
    if (!pin) return capi::stale(runtime);
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<loader::Loader> loader,
                              loader::Loader::open(pin.shared(), std::move(options)));
    return capi::publish(std::move(loader), out_loader);
  });
}

int32_t gpushare_loader_release(gpushare_loader loader) {
  return capi::release(loader);
}

int32_t gpushare_loader_calibrate(gpushare_loader loader) {
  return on_loader(loader, [](const auto& of) { return of->calibrate(); });
}

int32_t gpushare_loader_get_info(gpushare_loader loader, gpushare_loader_info* out_info) {
  return on_loader(loader, [&](const auto& of) -> base::Status {
    gpushare_loader_info out = GPUSHARE_LOADER_INFO_INIT;
    out.limit_bytes = of->images().limit_bytes();
    out.images_bytes = of->images().bytes();
    out.images = of->images().images();
    out.hits = of->images().hits();
    out.misses = of->images().misses();
    out.kept_bytes = of->chunks().kept_bytes();
    out.keep_ns = of->chunks().keep().ns;
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_loader_get_link(gpushare_loader loader, gpushare_link_costs* out_link) {
  return on_loader(loader, [&](const auto& of) -> base::Status {
    const loader::LinkCosts link = of->link();
    gpushare_link_costs out = GPUSHARE_LINK_COSTS_INIT;
    out.known = of->link_known() ? 1 : 0;
    out.bytes_per_s = base::to_uint64(link.bytes_per_ms * 1e3);
    out.call_overhead_ns = to_ns(link.call_overhead_ms);
    out.group_overhead_ns = to_ns(link.group_overhead_ms);
    out.device_bytes_per_s = base::to_uint64(link.device_bytes_per_ms * 1e3);
    return capi::write_struct("out_link", out, out_link);
  });
}

int32_t gpushare_image_open(gpushare_loader loader, const char* path, const gpushare_image_params* params,
                            gpushare_image* out_image) {
  return on_loader(loader, [&](const auto& of) -> base::Status {
    if (path == nullptr) return capi::null_argument("path");
    if (out_image == nullptr) return capi::null_argument("out_image");
    loader::ReadOptions options = of->read_options();
    if (params != nullptr) {
      gpushare_image_params read;
      GPUSHARE_RETURN_IF_ERROR(capi::read_struct("params", params, &read));
      if (read.order_count > 0 && read.order == nullptr) return capi::null_argument("params->order");
      for (uint32_t i = 0; i < read.order_count; ++i) {
        if (read.order[i] == nullptr)
          return {GPUSHARE_INVALID_ARGUMENT, base::format("params->order[%u] is null", i)};
        options.order.emplace_back(read.order[i]);
      }
      if (read.checksums != nullptr) options.checksums = read.checksums;
      if (read.order_by > GPUSHARE_ORDER_BY_NAMES)
        return {GPUSHARE_INVALID_ARGUMENT,
                base::format("params->order_by is %u; it is one of GPUSHARE_ORDER_BY_*", read.order_by)};
      if (read.order_by == GPUSHARE_ORDER_BY_NAMES) options.sort = loader::ReadOptions::Sort::kNames;
      options.once = read.once != 0;
    }
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<const loader::Image> image, of->open_image(path, options));
    return publish_image(of, std::move(image), out_image);
  });
}

int32_t gpushare_image_create(gpushare_loader loader, const char* name, uint32_t count,
                              const gpushare_layer_source* layers, gpushare_image* out_image) {
  return on_loader(loader, [&](const auto& of) -> base::Status {
    if (out_image == nullptr) return capi::null_argument("out_image");
    if (count == 0) return {GPUSHARE_INVALID_ARGUMENT, "count is 0: an image has layers"};
    if (layers == nullptr) return capi::null_argument("layers");
    std::vector<loader::Layer> layout;
    std::vector<const void*> sources;
    for (uint32_t i = 0; i < count; ++i) {
      layout.push_back(
          {layers[i].name != nullptr ? layers[i].name : base::format("layer-%u", i), 0, layers[i].bytes});
      sources.push_back(layers[i].data);
    }
    GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<const loader::Image> image,
                              of->create_image(name != nullptr ? name : "image", std::move(layout), sources));
    return publish_image(of, std::move(image), out_image);
  });
}

int32_t gpushare_image_release(gpushare_image image) {
  return capi::release(image);
}

int32_t gpushare_image_get_info(gpushare_image image, gpushare_image_info* out_info) {
  return on_image(image, [&](const loader::Image& of) -> base::Status {
    gpushare_image_info out = GPUSHARE_IMAGE_INFO_INIT;
    out.layers = static_cast<uint32_t>(of.layers().size());
    out.bytes = of.bytes();
    out.held_bytes = of.held_bytes();
    out.observations = of.profile().observations();
    out.replans = of.profile().replans();
    return capi::write_struct("out_info", out, out_info);
  });
}

int32_t gpushare_image_find_layer(gpushare_image image, const char* name, uint32_t* out_layer) {
  return on_image(image, [&](const loader::Image& of) -> base::Status {
    if (name == nullptr) return capi::null_argument("name");
    if (out_layer == nullptr) return capi::null_argument("out_layer");
    for (size_t i = 0; i < of.layers().size(); ++i) {
      if (of.layers()[i].name != name) continue;
      *out_layer = static_cast<uint32_t>(i);
      return {};
    }
    return {GPUSHARE_NOT_FOUND, "image '" + of.name() + "' has no layer '" + name + "'"};
  });
}

int32_t gpushare_image_report_execution(gpushare_image image, uint32_t first, uint32_t end,
                                        uint64_t execution_ns) {
  return on_image(image, [&](const loader::Image& of) -> base::Status {
    if (first >= end || end > of.layers().size())
      return {GPUSHARE_INVALID_ARGUMENT, base::format("layers [%u, %u) are none of the %zu of image '%s'",
                                                      first, end, of.layers().size(), of.name().c_str())};
    of.profile().observe(first, end, static_cast<double>(execution_ns) / 1e6);
    return {};
  });
}

int32_t gpushare_image_get_layer(gpushare_image image, uint32_t layer, gpushare_layer_info* out_info) {
  return on_image(image, [&](const loader::Image& of) -> base::Status {
    if (layer >= of.layers().size())
      return {GPUSHARE_INVALID_ARGUMENT,
              base::format("layer is %u, image '%s' has %zu", layer, of.name().c_str(), of.layers().size())};
    const std::vector<double> execute = of.profile().execution_ms();
    return capi::write_struct("out_info", capi::layer_info(of, layer, execute.empty() ? 0 : execute[layer]),
                              out_info);
  });
}

}  // extern "C"
