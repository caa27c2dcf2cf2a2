// SPDX-License-Identifier: Apache-2.0
#include "sched/slo/knowledge.hpp"

#include <cmath>

namespace gpushare::sched::slo {
namespace {

// Distributions are computed anew after this many new durations or arrivals (the first 64 at once, so that a
// start is quick).
constexpr uint64_t kRefreshEvery = 64;
constexpr double kShareKeep = 1 - 1.0 / 512;  // the mix remembers about 512 arrivals

}  // namespace

base::Result<uint32_t> Knowledge::add_model(const ModelSpec& spec) {
  const auto wrong = [](const std::string& what) {
    return base::Status(GPUSHARE_INVALID_ARGUMENT, "model: " + what);
  };
  if (!(spec.c0_ns >= 0) || !std::isfinite(spec.c0_ns))
    return wrong(base::format("c0 is %g ns, not a finite number >= 0", spec.c0_ns));
  if (!(spec.c1 > 0) || !std::isfinite(spec.c1))
    return wrong(base::format("c1 is %g, not a finite number > 0", spec.c1));
  if (spec.batch_sizes.empty()) return wrong("no batch sizes");
  for (size_t i = 0; i < spec.batch_sizes.size(); ++i)
    if (spec.batch_sizes[i] == 0 || spec.batch_sizes[i] > 4096 ||
        (i > 0 && spec.batch_sizes[i] <= spec.batch_sizes[i - 1]))
      return wrong(
          base::format("batch size %zu is %u: they must ascend from 1 to 4096", i, spec.batch_sizes[i]));
  Model model;
  model.spec = spec;
  model.time = BatchTimeModel(spec.c0_ns, spec.c1);
  if (!spec.learn) model.time.freeze();
  models_.push_back(std::move(model));
  return static_cast<uint32_t>(models_.size() - 1);
}

uint32_t Knowledge::application(uint32_t model, uint32_t number) {
  Model& of = models_[model];
  const auto [at, fresh] = of.index_of.try_emplace(number, static_cast<uint32_t>(of.applications.size()));
  if (fresh) {
    of.applications.emplace_back(number, options_.histogram);
    of.applications.back().alone = of.mix_alone;  // until it has samples
    of.applications.back().mean_ns = of.mean_ns;
    of.fresh_application = true;
  }
  return at->second;
}

void Knowledge::arrived(uint32_t model, uint32_t application_index) {
  Model& of = models_[model];
  for (Application& each : of.applications) each.share *= kShareKeep;
  of.applications[application_index].share += 1 - kShareKeep;
  ++of.arrivals;
}

void Knowledge::observe(uint32_t model, uint32_t number, uint64_t execution_ns) {
  Model& of = models_[model];
  Application& application = of.applications[this->application(model, number)];
  application.histogram.record(execution_ns);
  if (application.histogram.count() <= 4) of.fresh_application = true;
  ++of.records;
}

void Knowledge::observe_batch(uint32_t model, uint32_t k, uint64_t longest_ns, uint64_t device_ns) {
  models_[model].time.observe(k, static_cast<double>(longest_ns), static_cast<double>(device_ns));
}

bool Knowledge::refresh(uint32_t model) {
  Model& of = models_[model];
  // A new application at once while there are few; among many it can wait for a few records.
  const bool fresh = of.fresh_application && (of.applications.size() <= 8 || of.records + of.arrivals >= 16);
  if (!fresh && of.records < kRefreshEvery && of.arrivals < 4 * kRefreshEvery &&
      of.time_version == of.time.version())
    return false;
  of.fresh_application = false;
  of.records = of.arrivals = 0;
  of.time_version = of.time.version();
  ++of.version;
  std::vector<const Distribution*> parts;
  std::vector<double> shares, equal;
  for (Application& each : of.applications) {
    each.known = each.histogram.count() > 0;
    if (!each.known) continue;
    if (each.seen != each.histogram.version()) {
      each.seen = each.histogram.version();
      each.alone = each.histogram.distribution(options_.bins);
      each.mean_ns = each.alone.mean_ns();
    }
    parts.push_back(&each.alone);
    shares.push_back(each.share + 1e-9);
    equal.push_back(1);
  }
  of.mix_alone = mixture(parts, shares).coarsened(4 * options_.bins);
  of.equal_alone = mixture(parts, equal).coarsened(4 * options_.bins);
  of.mean_ns = of.mix_alone.mean_ns();
  for (Application& each : of.applications) {
    if (each.known) continue;
    each.alone = of.mix_alone;
    each.mean_ns = of.mean_ns;
  }
  return true;
}

}  // namespace gpushare::sched::slo
