// SPDX-License-Identifier: Apache-2.0
#include "cli/device_use.hpp"

#include <algorithm>

#include "base/status.hpp"

namespace gpushare::cli {

void DeviceUse::hold(const std::vector<Block>& blocks, uint64_t job, uint32_t lane) {
  for (const Block& block : blocks) {
    Held& held = held_[block.address];
    bytes_ += block.bytes - held.bytes;
    held = {block.bytes, job, lane};
  }
}

void DeviceUse::drop(const std::vector<Block>& blocks) {
  for (const Block& block : blocks) {
    const auto at = held_.find(block.address);
    if (at == held_.end()) continue;
    bytes_ -= at->second.bytes;
    held_.erase(at);
  }
}

void DeviceUse::model_arrived(uint64_t job, const std::vector<Block>& blocks, uint64_t apart_bytes) {
  if (!models_.try_emplace(job, Model{blocks, apart_bytes}).second) return;
  hold(blocks, job, kNoLane);
  apart_bytes_ += apart_bytes;
}

void DeviceUse::model_left(uint64_t job) {
  const auto at = models_.find(job);
  if (at == models_.end()) return;
  drop(at->second.blocks);
  apart_bytes_ -= at->second.apart_bytes;
  models_.erase(at);
}

std::vector<uint64_t> DeviceUse::jobs() const {
  std::vector<uint64_t> out;
  for (const auto& [job, model] : models_) out.push_back(job);
  return out;
}

void DeviceUse::work_began(uint64_t job, uint64_t lane, const std::vector<Block>& blocks,
                           uint64_t enqueued_ns, uint64_t now_ns) {
  Lane& at = lanes_.try_emplace(lane, Lane{static_cast<uint32_t>(lanes_.size()), {}, 0, 0}).first->second;
  drop(at.blocks);
  at.blocks = blocks;
  hold(blocks, job, at.number);
  if (at.last_job != 0 && enqueued_ns < at.last_end_ns && now_ns >= at.last_end_ns)
    (at.last_job == job ? stay_gaps_ : switch_gaps_).push_back(now_ns - at.last_end_ns);
  at.last_job = job;
}

void DeviceUse::work_ended(uint64_t lane, uint64_t now_ns) {
  const auto at = lanes_.find(lane);
  if (at == lanes_.end()) return;
  drop(at->second.blocks);
  at->second.blocks.clear();
  at->second.last_end_ns = now_ns;
}

void DeviceUse::keep_peak() {
  most_inside_ = std::max<uint64_t>(most_inside_, models_.size());
  most_apart_bytes_ = std::max(most_apart_bytes_, apart_bytes_);
  if (bytes_ <= peak_bytes_) return;
  peak_bytes_ = bytes_;
  peak_ = held_;
}

double DeviceUse::median(std::vector<uint64_t> values) {
  if (values.empty()) return -1;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return static_cast<double>(*middle);
}

memory::MemorySnapshot DeviceUse::peak(uint64_t capacity_bytes, const std::vector<std::string>& names) const {
  memory::MemorySnapshot out;
  out.capacity_bytes = capacity_bytes;
  uint64_t owner_job = 0;
  uint32_t owner_lane = kNoLane;
  for (const auto& [address, held] : peak_) {
    const bool in_lane = held.lane != kNoLane;
    const bool same = !out.segments.empty() &&
                      (in_lane ? held.lane == owner_lane : owner_lane == kNoLane && held.job == owner_job);
    if (!same) {
      memory::SegmentSnapshot segment;
      segment.address = address;
      segment.session = in_lane ? 0 : held.job;
      segment.name = in_lane ? base::format("lane %u", held.lane) : "session " + names[held.job - 1];
      out.segments.push_back(std::move(segment));
    }
    owner_job = held.job;
    owner_lane = held.lane;
    memory::BlockInfo block;
    block.address = address;
    block.bytes = held.bytes;
    block.kind = in_lane ? memory::Kind::kEphemeral : memory::Kind::kModel;
    block.session = held.job;
    if (in_lane) block.lane = held.lane;
    memory::SegmentSnapshot& segment = out.segments.back();
    segment.blocks.push_back(block);
    segment.bytes = address + held.bytes - segment.address;
  }
  return out;
}

}  // namespace gpushare::cli
