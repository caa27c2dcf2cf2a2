// SPDX-License-Identifier: Apache-2.0
#include "cluster/kinds.hpp"

namespace gpushare::cluster {

// One line a kind.
const std::vector<const Kind*>& kinds() {
  static const std::vector<const Kind*> all = {
      &services_kind(), &trials_kind(),      &retraining_kind(),
      &shares_kind(),   &application_kind(), &reservations_kind(),
  };
  return all;
}

std::vector<Device> read_frame(Fields& document, const Kind& kind) {
  document.whole("version", kDocumentVersion, kDocumentVersion);
  document.one_of("kind", {kind.name});
  if (!kind.needs_devices && !document.has("devices")) return {};
  return read_devices(document, kind.devices_fail);
}

}  // namespace gpushare::cluster
