// cluster.hpp: the C++ face of cluster.h: documents in and out as strings, errors as exceptions. Header-only; link libgpushare_cluster.
// SPDX-License-Identifier: Apache-2.0
#ifndef GPUSHARE_CLUSTER_HPP_
#define GPUSHARE_CLUSTER_HPP_

#include <memory>
#include <stdexcept>
#include <string>

#include "gpushare/cluster.h"

namespace gpushare {

// A call of libgpushare_cluster that failed: its status, and what() as the message of gpushare_cluster_last_error_message.
class ClusterError : public std::runtime_error {
 public:
  explicit ClusterError(int32_t status)
      : std::runtime_error(gpushare_cluster_last_error_message()), status_(status) {}
  int32_t status() const noexcept { return status_; }

 private:
  int32_t status_;
};

namespace detail {

struct ClusterTextFree {
  void operator()(char* text) const noexcept { gpushare_cluster_text_free(text); }
};

inline std::string cluster_text(int32_t status, char* text) {
  const std::unique_ptr<char, ClusterTextFree> owner(text);
  if (status != GPUSHARE_OK) throw ClusterError(status);
  return text;
}

}  // namespace detail

// See gpushare_cluster_schema.
inline std::string cluster_schema() {
  char* text = nullptr;
  const int32_t status = gpushare_cluster_schema(&text);
  return detail::cluster_text(status, text);
}

// See gpushare_cluster_plan. `choices` empty: the kind's default.
inline std::string cluster_plan(const std::string& document, const std::string& choices = {}) {
  char* text = nullptr;
  const int32_t status = gpushare_cluster_plan(document.data(), document.size(),
                                               choices.empty() ? nullptr : choices.c_str(), &text);
  return detail::cluster_text(status, text);
}

}  // namespace gpushare

#endif  // GPUSHARE_CLUSTER_HPP_
