// batch_time.hpp: how long a batch takes. l_B = c0 + c1 k max l_r (Orloj, 000, eq 4.3-4.4): k requests padded
// to the longest. Models of another shape (sums, steps, powers of the size, a table) deviate from that line by
// the size of the batch, and a factor of each size says by how much.
//
// The fit is robust: of the last `memory` batches it minimises the sum of relative deviations (least absolute values),
// so that batches that stalled, however long, move c0 and c1 no more than any other batch.
//
// Threads: the owner serialises calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gpushare::sched::slo {

// Until eight batches were seen, the values given stay.
class BatchTimeModel {
 public:
  explicit BatchTimeModel(double c0_ns = 0, double c1 = 1, size_t memory = 256);

  double c0_ns() const { return c0_ns_; }
  double c1() const { return c1_; }
  // The two parts of a batch's time: the part that does not depend on its longest request, and the factor of the
  // longest request's time.
  double fixed_ns(unsigned k) const { return factor(k) * c0_ns_; }
  double per_longest(unsigned k) const { return factor(k) * c1_ * k; }
  // Duration of a batch of `k` whose longest request takes `longest_ns` alone.
  double duration_ns(unsigned k, double longest_ns) const {
    return factor(k) * (c0_ns_ + c1_ * k * longest_ns);
  }
  // By how much batches of `k` deviate from the line.
  double factor(unsigned k) const { return plain_ ? 1 : factor_[kind_of(k)]; }
  // How much batches deviate from the line: five ascending ratios of their real time to the model's, each for a fifth
  // of the batches. Empty while they hardly deviate. Empty also where times are inferred, because the deviations are
  // then those of the requests.
  std::span<const double> deviations() const { return {deviations_.data(), deviations_.size()}; }
  // Learns from a finished batch; a measurement that is not a positive number is ignored. `told`: longest_ns was
  // measured. Otherwise longest_ns is an expectation that was inferred with this same model. Then c1 stays within a
  // factor of four of its first value, because c1 and the inferred times could drift apart for ever without changing
  // any prediction. And c0 and c1 keep their proportion until batches differ by more than the small movements of an
  // expectation.
  void observe(unsigned k, double longest_ns, double measured_ns, bool told = true);
  // Batches now take `factor` times what they took: scales the model and forgets the batches before.
  void rescale(double factor);
  // Sets c0, found elsewhere.
  void set_fixed(double c0_ns);
  // Keeps c0 and c1 as they are from now on.
  void freeze() { frozen_ = true; }
  // Raised when c0, c1 or a size's factor has moved by more than a thousandth since the version was last raised.
  uint64_t version() const { return version_; }

 private:
  static constexpr size_t kKinds = 64;  // of sizes: each up to 16, then eight an octave
  struct Seen {
    double x = 0;  // k * longest_ns
    double took_ns = 0;
    uint8_t kind = 0;
  };
  static size_t kind_of(unsigned k);
  void fit(double x, bool told);
  bool fit_line(bool told);
  void scale_line(bool told);
  void bound_fixed();
  bool fit_factors();
  bool fit_deviations(bool told);

  double c0_ns_, c1_;
  double first_c1_;
  size_t memory_;
  std::vector<Seen> seen_;  // a ring once it is full
  size_t next_ = 0;
  size_t since_fit_ = 0;
  bool frozen_ = false;
  bool plain_ = true;  // all factors are 1
  std::array<double, kKinds> factor_{};
  std::vector<double> deviations_;
  std::vector<double> weights_;  // scratch
  double published_c0_, published_c1_;
  uint64_t version_ = 1;
};

}  // namespace gpushare::sched::slo
