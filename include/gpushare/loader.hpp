// loader.hpp: the C++ API over loader.h: images, models, switchers. gpushare.hpp includes this header, and its
// rules on ownership, errors, threads and units hold here too.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_LOADER_HPP_
#define GPUSHARE_LOADER_HPP_

#include "gpushare/gpushare.hpp"

namespace gpushare {

// Which consecutive layers are sent, and executed, as one group; see gpushare_plan_solve.
struct Plan {
  std::vector<uint32_t> ends;  // of each group, exclusive
  Nanoseconds makespan{0};
};
// `execution_ns` has one time for each layer; if it is empty, each layer executes as long as its transmission
// takes.
inline Plan solve_plan(const gpushare_link_costs& link, const std::vector<uint64_t>& layer_bytes,
                       const std::vector<uint64_t>& execution_ns = {},
                       const gpushare_plan_params& params = GPUSHARE_PLAN_PARAMS_INIT) {
  if (!execution_ns.empty() && execution_ns.size() != layer_bytes.size())
    throw Error(GPUSHARE_INVALID_ARGUMENT, "execution_ns: one time for each layer, or none");
  Plan plan;
  plan.ends.resize(layer_bytes.size());
  uint32_t groups = 0;
  uint64_t makespan_ns = 0;
  check(gpushare_plan_solve(&params, &link, static_cast<uint32_t>(layer_bytes.size()), layer_bytes.data(),
                            execution_ns.empty() ? nullptr : execution_ns.data(), plan.ends.data(), &groups,
                            &makespan_ns));
  plan.ends.resize(groups);
  plan.makespan = Nanoseconds(static_cast<Nanoseconds::rep>(makespan_ns));
  return plan;
}

// A model's layers in host memory; see gpushare_image_*.
class Image {
 public:
  Image() = default;
  explicit Image(gpushare_image handle) : handle_(handle) {}
  gpushare_image get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
  gpushare_image_info info() const {
    gpushare_image_info info = GPUSHARE_IMAGE_INFO_INIT;
    check(gpushare_image_get_info(get(), &info));
    return info;
  }
  gpushare_layer_info layer(uint32_t index) const {
    gpushare_layer_info info = GPUSHARE_LAYER_INFO_INIT;
    check(gpushare_image_get_layer(get(), index, &info));
    return info;
  }
  // Empty when there is no such layer.
  std::optional<uint32_t> find_layer(const std::string& name) const {
    uint32_t out = 0;
    const int32_t status = gpushare_image_find_layer(get(), name.c_str(), &out);
    if (status == GPUSHARE_NOT_FOUND) return std::nullopt;
    check(status);
    return out;
  }
  void report_execution(uint32_t first, uint32_t end, Nanoseconds time) const {
    check(gpushare_image_report_execution(get(), first, end, detail::timeout_ns(time)));
  }

 private:
  detail::Handle<gpushare_image, gpushare_image_release> handle_;
};

// An image's layers in a session's memory. Destruction unloads the model, unless it belongs to a switcher.
class Model {
 public:
  Model() = default;
  explicit Model(gpushare_model handle, bool owned = true)
      : handle_(handle), owned_(owned ? handle : nullptr) {}
  gpushare_model get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != nullptr; }
  // Work enqueued on `stream` from now on finds layers [first, end) on the device.
  void make_usable(uint32_t first, uint32_t end, Stream stream) const {
    check(gpushare_model_make_usable(get(), first, end, stream.get()));
  }
  void mark_end(Stream stream) const { check(gpushare_model_mark_end(get(), stream.get())); }
  // False when the timeout passed before `layer` had arrived.
  bool wait(uint32_t layer, Nanoseconds timeout = no_timeout) const {
    const int32_t status = gpushare_model_wait(get(), layer, detail::timeout_ns(timeout));
    if (status == GPUSHARE_TIMED_OUT) return false;
    check(status);
    return true;
  }
  gpushare_model_info info() const {
    gpushare_model_info info = GPUSHARE_MODEL_INFO_INIT;
    check(gpushare_model_get_info(get(), &info));
    return info;
  }
  gpushare_layer_info layer(uint32_t index) const {
    gpushare_layer_info info = GPUSHARE_LAYER_INFO_INIT;
    check(gpushare_model_get_layer(get(), index, &info));
    return info;
  }
  // The layer's first element on the device.
  template <class T>
  T* data(uint32_t index) const {
    return detail::pointer<T>(layer(index).address);
  }
  void unload() {
    handle_ = nullptr;
    owned_.close();
  }

 private:
  gpushare_model handle_ = nullptr;
  detail::Handle<gpushare_model, gpushare_model_release> owned_;
};

// Host memory for images, and the link over which they are sent; see gpushare_loader_*.
class Loader {
 public:
  Loader() = default;
  explicit Loader(Runtime& runtime, gpushare_loader_params params = GPUSHARE_LOADER_PARAMS_INIT) {
    gpushare_loader out = nullptr;
    check(gpushare_loader_create(runtime.get(), &params, &out));
    handle_ = detail::Handle<gpushare_loader, gpushare_loader_release>(out);
  }
  gpushare_loader get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
  void calibrate() { check(gpushare_loader_calibrate(get())); }
  gpushare_link_costs link() const {
    gpushare_link_costs out = GPUSHARE_LINK_COSTS_INIT;
    check(gpushare_loader_get_link(get(), &out));
    return out;
  }
  gpushare_loader_info info() const {
    gpushare_loader_info info = GPUSHARE_LOADER_INFO_INIT;
    check(gpushare_loader_get_info(get(), &info));
    return info;
  }
  // A .safetensors file or an index of shards. `order`: all tensors in execution order; empty = as `order_by` says.
  // `once`: the image leaves the cache with its last user.
  Image open_image(const std::string& path, const std::vector<std::string>& order = {},
                   const std::string& checksums = {}, uint32_t order_by = GPUSHARE_ORDER_BY_BYTES,
                   bool once = false) {
    std::vector<const char*> names;
    names.reserve(order.size());
    for (const std::string& name : order) names.push_back(name.c_str());
    gpushare_image_params params = GPUSHARE_IMAGE_PARAMS_INIT;
    params.order = names.data();
    params.order_count = static_cast<uint32_t>(names.size());
    params.checksums = checksums.empty() ? nullptr : checksums.c_str();
    params.order_by = order_by;
    params.once = once ? 1 : 0;
    gpushare_image out = nullptr;
    check(gpushare_image_open(get(), path.c_str(), &params, &out));
    return Image(out);
  }
  Image create_image(const std::string& name, const std::vector<gpushare_layer_source>& layers) {
    gpushare_image out = nullptr;
    check(gpushare_image_create(get(), name.c_str(), static_cast<uint32_t>(layers.size()), layers.data(),
                                &out));
    return Image(out);
  }
  // Waits until the session is resident, and not for the layers, which arrive later.
  Model load(Session& session, const Image& image,
             const gpushare_load_params& params = GPUSHARE_LOAD_PARAMS_INIT) {
    gpushare_model out = nullptr;
    check(gpushare_session_load(session.get(), image.get(), &params, &out));
    return Model(out);
  }

 private:
  detail::Handle<gpushare_loader, gpushare_loader_release> handle_;
};

// One active session, any number on standby; see gpushare_switcher_*.
class Switcher {
 public:
  struct Turn {
    Iteration iteration;
    Model model;          // valid until the iteration ends
    bool loaded = false;  // the member's session is new
  };
  Switcher() = default;
  explicit Switcher(Loader& loader, gpushare_switcher_params params = GPUSHARE_SWITCHER_PARAMS_INIT) {
    gpushare_switcher out = nullptr;
    check(gpushare_switcher_create(loader.get(), &params, &out));
    handle_ = detail::Handle<gpushare_switcher, gpushare_switcher_release>(out);
  }
  gpushare_switcher get() const noexcept { return handle_.get(); }
  void close() { handle_.close(); }
  // `options` gives the needs in addition to the image; its other fields are as for a session.
  uint64_t add(const Image& image, const SessionOptions& options = {},
               const gpushare_load_params& load = GPUSHARE_LOAD_PARAMS_INIT) {
    const gpushare_session_params params = detail::session_params(options);
    uint64_t out = 0;
    check(gpushare_switcher_add(get(), &params, image.get(), &load, &out));
    return out;
  }
  void remove(uint64_t member) { check(gpushare_switcher_remove(get(), member)); }
  // Waits for the turn and switches if need be.
  Turn begin(uint64_t member) { return *begin(member, no_timeout); }
  // Empty when the timeout passed first.
  std::optional<Turn> begin(uint64_t member, Nanoseconds timeout) {
    gpushare_iteration iteration = nullptr;
    gpushare_model model = nullptr;
    uint32_t loaded = 0;
    const int32_t status =
        gpushare_switcher_begin(get(), member, detail::timeout_ns(timeout), &iteration, &model, &loaded);
    if (status == GPUSHARE_TIMED_OUT && timeout != no_timeout) return std::nullopt;
    check(status);
    return Turn{Iteration(iteration), Model(model, /*owned=*/false), loaded != 0};
  }
  gpushare_member_info member(uint64_t member) const {
    gpushare_member_info info = GPUSHARE_MEMBER_INFO_INIT;
    check(gpushare_switcher_get_member(get(), member, &info));
    return info;
  }
  gpushare_switcher_info info() const {
    gpushare_switcher_info info = GPUSHARE_SWITCHER_INFO_INIT;
    check(gpushare_switcher_get_info(get(), &info));
    return info;
  }

 private:
  detail::Handle<gpushare_switcher, gpushare_switcher_release> handle_;
};

}  // namespace gpushare

#endif  // GPUSHARE_LOADER_HPP_
