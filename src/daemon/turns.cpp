// The server's decisions: who is attached to which model, whose turn it is, which models are on the device.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "daemon/server.hpp"
#include "loader/grouping.hpp"
#include "loader/prefix.hpp"
#include "sched/standby.hpp"

namespace gpushare::daemon {
namespace {

// Residency's answers here can only be OK; anything else is a bug of ours, which must not end the daemon.
void expect(const base::Status& status, const char* what) {
  if (!status.ok()) base::log(base::kError, status.with_context(std::string("daemon: ") + what).to_string());
}

}  // namespace

base::Status Server::attach(Connection& c, const Request& request) {
  if (c.state != State::kConnected)
    return {GPUSHARE_INVALID_STATE, "this worker is attached already; a connection has one model"};
  const uint64_t granule = device_->info().mapping_granularity_bytes;
  if (request.scratch_bytes > capacity_bytes_)
    return {GPUSHARE_EXCEEDS_CAPACITY, "scratch memory of " + base::format_bytes(request.scratch_bytes) +
                                           " asked; the daemon has " + base::format_bytes(capacity_bytes_)};
  c.name = request.name;
  c.execute_ns = request.execute_ns;
  c.scratch_bytes = (request.scratch_bytes + granule - 1) / granule * granule;
  c.state = State::kReading;
  reader_->read(c.id, request.path);
  return {};
}

void Server::image_is_read(ImageReader::Done done) {
  const auto found = connections_.find(done.worker);
  if (found == connections_.end() || found->second->state != State::kReading) return;
  Connection& c = *found->second;
  c.state = State::kConnected;
  base::Status status = done.image.status();
  if (status.ok()) status = finish_attach(c, *std::move(done.image));
  if (!status.ok()) reply(c, status);
}

base::Status Server::finish_attach(Connection& c, const std::shared_ptr<const loader::Image>& image) {
  if (image->bytes() == 0)
    return {GPUSHARE_INVALID_ARGUMENT, "model " + image->name() + " has no bytes to load"};
  std::vector<TableLayer> table;
  for (const loader::Layer& layer : image->layers())
    table.push_back({layer.name, layer.offset_bytes, layer.bytes});
  GPUSHARE_ASSIGN_OR_RETURN(const Descriptor layers, make_table_file(encode_layers(table)));
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<Board> board, Board::create());

  // Workers of one image share its region.
  std::shared_ptr<Model> model;
  for (const auto& [id, other] : models_)
    if (other->image() == image) model = other;
  if (model == nullptr) model = std::make_shared<Model>(*device_, link_stream_, image, next_id_++);
  if (model->region_bytes() + c.scratch_bytes > capacity_bytes_) {
    return {GPUSHARE_EXCEEDS_CAPACITY,
            base::format("model %s of %s and scratch memory of %s do not fit into the daemon's %s",
                         image->name().c_str(), base::format_bytes(model->region_bytes()).c_str(),
                         base::format_bytes(c.scratch_bytes).c_str(),
                         base::format_bytes(capacity_bytes_).c_str())};
  }
  if (!models_.contains(model->id())) {
    GPUSHARE_RETURN_IF_ERROR(residency_->add(model->id(), model->region_bytes(), load_ns(*model)));
    models_.emplace(model->id(), model);
  }
  c.model = std::move(model);
  c.board = std::move(board);
  c.state = State::kAttached;

  Reply message = make_reply(c.sequence, {});
  message.image_bytes = image->bytes();
  message.region_bytes = c.model->region_bytes();
  message.scratch_bytes = c.scratch_bytes;
  message.worker = c.id;
  message.layers = static_cast<uint32_t>(image->layers().size());
  std::memcpy(message.device, worker_device_.c_str(), worker_device_.size());
  message.descriptors = 2;
  const int descriptors[] = {c.board->file(), layers.get()};
  send(c, message, descriptors);
  return {};
}

std::vector<loader::LayerCost> Server::layer_costs(const loader::Image& image, uint64_t execute_ns) const {
  std::vector<loader::LayerCost> layers = loader::layer_costs(image, link_, {});
  // Only the length of the whole iteration is known: layers are assumed to execute in proportion to their
  // bytes.
  double transmit_ms = 0;
  for (const loader::LayerCost& layer : layers) transmit_ms += layer.transmit_ms;
  const double ratio =
      execute_ns == 0 || transmit_ms <= 0 ? 1.0 : static_cast<double>(execute_ns) / 1e6 / transmit_ms;
  for (loader::LayerCost& layer : layers) layer.execute_ms = layer.transmit_ms * ratio;
  return layers;
}

base::Result<std::vector<uint32_t>> Server::plan(const loader::Image& image, uint64_t execute_ns,
                                                 uint32_t resident_layers) const {
  GPUSHARE_ASSIGN_OR_RETURN(loader::Grouping grouping, loader::plan_groups(layer_costs(image, execute_ns),
                                                                           link_.grouping(resident_layers)));
  return std::move(grouping.ends);
}

base::Status Server::load(Connection& c, Model& model) {
  if (options_.standby_bytes > 0 && model.kept_bytes() == 0) {
    loader::PrefixLimits limits;
    limits.most_bytes = options_.standby_bytes;
    limits.granule_bytes = device_->info().mapping_granularity_bytes;
    GPUSHARE_ASSIGN_OR_RETURN(
        const loader::PrefixChoice prefix,
        loader::choose_prefix(layer_costs(*model.image(), c.execute_ns), link_.grouping(), limits));
    model.set_prefix(prefix);
  }
  for (;;) {
    GPUSHARE_ASSIGN_OR_RETURN(std::vector<uint32_t> ends,
                              plan(*model.image(), c.execute_ns, model.kept_layers()));
    base::Status loading = model.load(std::move(ends), [this] { wake(); });
    // The device has other users: first layers go before a turn does.
    if (loading.code() != GPUSHARE_DEVICE_OUT_OF_MEMORY || !forget_standby()) return loading;
  }
}

// The length that a worker states affects only its own loads.
void Server::learn_iteration(Connection& c, uint64_t iteration_ns) {
  if (iteration_ns == 0 || iteration_ns > base::host_now_ns() - c.turn_began_ns) return;
  if (c.execute_ns == 0)
    c.execute_ns = iteration_ns;
  else
    c.execute_ns = c.execute_ns - c.execute_ns / 4 + iteration_ns / 4;
}

void Server::drop(const std::vector<sched::ModelId>& models) {
  for (const sched::ModelId id : models) {
    models_.at(id)->drop(/*keep_prefix=*/options_.standby_bytes > 0);
    ++counts_.drops;
  }
}

uint64_t Server::standby_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [id, model] : models_) bytes += model->kept_bytes();
  return bytes;
}

void Server::trim_standby(const Model* next) {
  const uint64_t now_ns = base::host_now_ns();
  std::vector<sched::StandbyWish> wishes;
  for (const auto& [id, model] : models_)
    if (model.get() != next && model->kept_bytes() > 0)
      wishes.push_back(
          {id, model->kept_bytes(), residency_->requests(id, now_ns) * model->prefix().saves_ms, true});
  const uint64_t room_bytes = capacity_bytes_ - std::min(capacity_bytes_, residency_->resident_bytes());
  const std::vector<sched::ModelId> granted =
      sched::grant_standby(wishes, std::min(options_.standby_bytes, room_bytes));
  for (const sched::StandbyWish& wish : wishes)
    if (std::find(granted.begin(), granted.end(), wish.model) == granted.end())
      models_.at(wish.model)->forget_prefix();
}

bool Server::forget_standby() {
  const bool any = standby_bytes() > 0;
  for (const auto& [id, model] : models_) model->forget_prefix();
  return any;
}

size_t Server::workers_of(const Model& model) const {
  return static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(), [&](const auto& entry) {
    return entry.second->model.get() == &model;
  }));
}

uint64_t Server::load_ns(const Model& model) const {
  return link_.send_ns(model.region_bytes());
}

bool Server::other_loading(const Model& model) const {
  return std::any_of(models_.begin(), models_.end(), [&](const auto& entry) {
    return entry.second.get() != &model && entry.second->state() == Model::State::kLoading;
  });
}

void Server::give_turns() {
  while (holder_ == nullptr && !waiting_.empty()) {
    Connection& next = *waiting_.front();
    // A load that is under way cannot be dropped to make room, and holds the link: it ends first.
    const bool needs_room = next.model->state() == Model::State::kOff || next.scratch_bytes > 0;
    if (needs_room && other_loading(*next.model)) break;
    waiting_.pop_front();
    next.state = State::kAttached;
    const base::Status given = give_turn(next);
    if (!given.ok()) reply(next, given);
  }
  const bool wanted = holder_ != nullptr && !waiting_.empty();
  if (holder_ != nullptr) holder_->board->set_wanted(wanted);
  if (!wanted) {
    wanted_since_ns_ = 0;
  } else if (wanted_since_ns_ == 0) {
    wanted_since_ns_ = base::host_now_ns();
  }
}

base::Status Server::give_turn(Connection& c) {
  Model& model = *c.model;
  if (model.state() == Model::State::kFailed) forget(model);
  GPUSHARE_ASSIGN_OR_RETURN(const sched::Residency::Decision decision,
                            residency_->request(model.id(), base::host_now_ns()));
  drop(decision.drops);
  if (decision.load) {
    // Models that nobody uses leave the budget for first layers free.
    const uint64_t most_bytes = capacity_bytes_ - std::min(capacity_bytes_, options_.standby_bytes);
    if (residency_->resident_bytes() > most_bytes && options_.standby_bytes > 0)
      drop(residency_->shed(residency_->resident_bytes() - most_bytes, model.id(), base::host_now_ns()));
    trim_standby(&model);
    base::Status loading = load(c, model);
    if (!loading.ok()) {
      forget(model);
      return loading;
    }
    ++counts_.loads;
    expect(residency_->pin(model.id()), "pinning a load");
  }
  expect(residency_->pin(model.id()), "pinning a turn");
  Descriptor scratch;
  base::Result<std::vector<Descriptor>> region = model.share();
  base::Status ready = region.status();
  if (ready.ok() && c.scratch_bytes > 0) ready = make_scratch(c, &scratch);
  if (!ready.ok()) {
    expect(residency_->unpin(model.id()), "unpinning a turn");
    return ready;
  }
  holder_ = &c;
  wanted_since_ns_ = 0;
  c.state = State::kTurn;
  c.turn_began_ns = base::host_now_ns();
  ++c.turns;
  ++counts_.turns;
  model.watch(c.board);

  Reply message = make_reply(c.sequence, {});
  message.image_bytes = model.image()->bytes();
  message.region_bytes = model.region_bytes();
  message.scratch_bytes = c.scratch_bytes;
  message.worker = c.id;
  message.arrived = model.arrived();
  message.prefix_bytes = model.prefix_bytes();
  if (scratch) region->push_back(std::move(scratch));
  std::vector<int> descriptors;
  for (const Descriptor& descriptor : *region) descriptors.push_back(descriptor.get());
  message.descriptors = static_cast<uint32_t>(descriptors.size());
  send(c, message, descriptors);
  return {};
}

// The worker's own memory for this turn, counted like a model that cannot be dropped.
base::Status Server::make_scratch(Connection& c, Descriptor* out_shared) {
  const uint64_t id = next_id_++;
  GPUSHARE_RETURN_IF_ERROR(residency_->add(id, c.scratch_bytes, 0));
  const auto decision = residency_->request(id, base::host_now_ns());
  base::Status status = decision.status();
  if (status.ok()) {
    drop(decision->drops);
    trim_standby(nullptr);
    const auto memory = device_->phys_create_shared(c.scratch_bytes);
    status = memory.status();
    if (status.ok()) {
      const auto exported = device_->phys_export(*memory, GPUSHARE_ACCESS_READ_WRITE);
      status = exported.status();
      if (status.ok()) {
        *out_shared = Descriptor(*exported);
        c.scratch = *memory;
        c.scratch_id = id;
        expect(residency_->pin(id), "pinning scratch memory");
        return {};
      }
      expect(device_->phys_release(*memory), "releasing scratch memory");
    }
  }
  expect(residency_->remove(id), "forgetting scratch memory");
  return status.with_context("scratch memory");
}

void Server::end_turn(Connection& c) {
  holder_ = nullptr;
  wanted_since_ns_ = 0;
  c.state = State::kAttached;
  c.turn_ns += base::host_now_ns() - c.turn_began_ns;
  c.model->unwatch(c.board.get());
  expect(residency_->unpin(c.model->id()), "unpinning a turn");
  if (c.scratch != nullptr) {
    expect(device_->phys_release(std::exchange(c.scratch, nullptr)), "releasing scratch memory");
    expect(residency_->unpin(c.scratch_id), "unpinning scratch memory");
    expect(residency_->remove(c.scratch_id), "forgetting scratch memory");
  }
  if (c.model->state() == Model::State::kFailed) forget(*c.model);
}

void Server::look_at_loads() {
  std::vector<std::shared_ptr<Model>> loading;
  for (const auto& [id, model] : models_)
    if (model->state() == Model::State::kLoading) loading.push_back(model);
  for (const std::shared_ptr<Model>& model : loading) {
    model->poll();
    if (model->state() == Model::State::kLoading) continue;
    expect(residency_->unpin(model->id()), "unpinning a load");
    if (model->state() == Model::State::kFailed) {
      base::log(base::kWarning, "daemon: " + model->failure().to_string());
      if (holder_ == nullptr || holder_->model != model) forget(*model);
    }
    if (workers_of(*model) == 0) retire(model);
  }
}

// Off the device, and known as such.
void Server::forget(Model& model) {
  expect(residency_->remove(model.id()), "forgetting a model");
  model.drop();
  expect(residency_->add(model.id(), model.region_bytes(), load_ns(model)), "adding a model");
}

// Nobody is attached to the model any more. A model that is being loaded is dropped when the load has ended.
void Server::retire(const std::shared_ptr<Model>& model) {
  if (model->state() == Model::State::kLoading) return;
  expect(residency_->remove(model->id()), "retiring a model");
  models_.erase(model->id());
}

}  // namespace gpushare::daemon
