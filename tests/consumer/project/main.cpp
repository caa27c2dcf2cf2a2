// SPDX-License-Identifier: Apache-2.0
#include <gpushare/gpushare.hpp>

int main() {
  gpushare::RuntimeOptions options;
  options.device = "host";
  options.capacity_bytes = 16 << 20;
  gpushare::Runtime runtime = gpushare::Runtime::open(options);
  gpushare::SessionOptions session;
  session.persistent_bytes = session.ephemeral_bytes = 1 << 20;
  gpushare::Session job = runtime.open_session(session);
  job.run([](gpushare::Iteration& iteration) { iteration.alloc<float>(100)[0] = 1.0F; }).get();
  return job.info().iterations_done == 1 ? 0 : 1;
}
