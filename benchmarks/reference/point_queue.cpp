// SPDX-License-Identifier: Apache-2.0
#include "reference/point_queue.hpp"

#include <cmath>

#include "reference/hull_core.hpp"
#include "reference/kinetic_core.hpp"
#include "reference/scan_core.hpp"

namespace gpushare::reference {
namespace {

// The scan up to this many points, the kinetic tournament above; back when a quarter is left, so that a size
// at the border does not switch at every event. Measured: benchmarks/results/serving-decisions.md.
constexpr size_t kScanLimit = 64;

class AutomaticCore {
 public:
  void put(uint32_t slot, double alpha, double beta) {
    if (!tournament_ && scan_.size() == kScanLimit) {
      for (size_t i = 0; i < scan_.size(); ++i) kinetic_.put(scan_.slot(i), scan_.alpha(i), scan_.beta(i));
      scan_.clear();
      tournament_ = true;
      held_ = kScanLimit;
    }
    if (!tournament_) {
      scan_.put(slot, alpha, beta);
      return;
    }
    kinetic_.put(slot, alpha, beta);
    ++held_;
  }
  void remove(uint32_t slot) {
    if (!tournament_) {
      scan_.remove(slot);
      return;
    }
    kinetic_.remove(slot);
    if (--held_ > kScanLimit / 4) return;
    kinetic_.for_each([this](uint32_t of, double alpha, double beta) { scan_.put(of, alpha, beta); });
    kinetic_.clear();
    tournament_ = false;
  }
  uint32_t best(double w, double* value) {
    return tournament_ ? kinetic_.best(w, value) : scan_.best(w, value);
  }
  void clear() { *this = AutomaticCore(); }

 private:
  ScanCore scan_;
  KineticCore kinetic_;
  bool tournament_ = false;
  size_t held_ = 0;  // in the tournament
};

// Handles are slots: the one freed last is given out first, so that an insert after an erase lands where the
// erase was.
template <class Core>
class CoreQueue final : public PointQueue {
 public:
  Handle insert(double alpha, double beta, uint64_t id) override {
    if (!std::isfinite(alpha) || !std::isfinite(beta)) return kNoHandle;
    Handle slot;
    if (free_.empty()) {
      slot = static_cast<Handle>(ids_.size());
      ids_.push_back(0);
      if (slot / 64 == live_.size()) live_.push_back(0);
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    ids_[slot] = id;
    live_[slot / 64] |= uint64_t{1} << slot % 64;
    ++size_;
    core_.put(slot, alpha, beta);
    return slot;
  }
  bool erase(Handle handle) override {
    if (handle >= ids_.size() || (live_[handle / 64] >> handle % 64 & 1) == 0) return false;
    live_[handle / 64] &= ~(uint64_t{1} << handle % 64);
    free_.push_back(handle);
    --size_;
    core_.remove(handle);
    return true;
  }
  std::optional<Best> best(double w) override {
    if (size_ == 0 || !(w >= 0) || !std::isfinite(w)) return std::nullopt;
    Best result{};
    result.handle = core_.best(w, &result.value);
    result.id = ids_[result.handle];
    return result;
  }
  size_t size() const override { return size_; }
  void clear() override {
    core_.clear();
    ids_.clear();
    live_.clear();
    free_.clear();
    size_ = 0;
  }

 private:
  Core core_;
  std::vector<uint64_t> ids_;
  std::vector<uint64_t> live_;  // bits: small enough to stay in cache where the ids do not
  std::vector<Handle> free_;
  size_t size_ = 0;
};

}  // namespace

size_t PointQueue::pop(double w, size_t count, std::vector<uint64_t>& out) {
  size_t taken = 0;
  for (; taken < count; ++taken) {
    const std::optional<Best> top = best(w);
    if (!top) break;
    out.push_back(top->id);
    erase(top->handle);
  }
  return taken;
}

std::unique_ptr<PointQueue> make_point_queue(PointBackend backend) {
  switch (backend) {
    case PointBackend::kScan:
      return std::make_unique<CoreQueue<ScanCore>>();
    case PointBackend::kKinetic:
      return std::make_unique<CoreQueue<KineticCore>>();
    case PointBackend::kHull:
      return std::make_unique<CoreQueue<HullCore>>();
    case PointBackend::kAutomatic:
      break;
  }
  return std::make_unique<CoreQueue<AutomaticCore>>();
}

}  // namespace gpushare::reference
