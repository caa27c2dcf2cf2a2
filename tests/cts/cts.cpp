// SPDX-License-Identifier: Apache-2.0
#include "cts.hpp"

#include <cstdlib>

#include "runner.hpp"

namespace gpushare::cts {
namespace {

std::vector<std::string>& mutable_test_names() {
  static std::vector<std::string> names;
  return names;
}

}  // namespace

Registration::Registration(const char* name) {
  mutable_test_names().emplace_back(name);
}

const std::vector<std::string>& test_names() {
  return mutable_test_names();
}

bool matches(const Excuse& excuse, const std::string& name) {
  if (!excuse.test.empty() && excuse.test.back() == '*') {
    const size_t length = excuse.test.size() - 1;
    return name.compare(0, length, excuse.test, 0, length) == 0;
  }
  return excuse.test == name;
}

std::vector<Excuse> unsupported() {
  std::vector<Excuse> excuses = backend().unsupported;
  // How the suite's own tests plant an excuse that must be found out.
  if (const char* planted = std::getenv("GPUSHARE_CTS_PLANT")) excuses.push_back({planted, "planted"});
  return excuses;
}

bool has_tag(const std::string& tag) {
  for (const std::string& other : backend().tags) {
    if (other == tag) return true;
  }
  return false;
}

std::string device_spec() {
  const char* spec = std::getenv("GPUSHARE_CTS_SPEC");
  return spec != nullptr ? spec : backend().spec;
}

void run(const char* name, TestFunction function) {
  if (std::getenv(kNoExcuses) == nullptr) {
    for (const auto& list : {unsupported(), backend().xfail}) {
      for (const Excuse& excuse : list) {
        if (!matches(excuse, name)) continue;
        SUCCEED("excused: " << excuse.reason);
        return;
      }
    }
  }
  Context context;
  auto device = device::Device::open(device_spec());
  INFO(device.status().to_string());
  REQUIRE(device.ok());
  context.device = std::move(*device);
  function(context);
  REQUIRE_OK(context.device->close());
}

device::Stream Context::stream(int32_t priority) {
  auto stream = device->create_stream(priority);
  INFO(stream.status().to_string());
  REQUIRE(stream.ok());
  return std::move(*stream);
}

device::Event Context::event(uint32_t flags) {
  auto event = device->create_event(flags);
  INFO(event.status().to_string());
  REQUIRE(event.ok());
  return std::move(*event);
}

void Context::upload(const device::Stream& stream, device::Address to, const std::vector<uint8_t>& bytes) {
  REQUIRE_OK(stream.copy(to, address_of(bytes.data()), bytes.size(), GPUSHARE_COPY_HOST_TO_DEVICE));
  REQUIRE_OK(stream.synchronize());
}

std::vector<uint8_t> Context::download(const device::Stream& stream, device::Address from, uint64_t bytes) {
  std::vector<uint8_t> out(bytes, 0xEE);
  REQUIRE_OK(stream.copy(address_of(out.data()), from, bytes, GPUSHARE_COPY_DEVICE_TO_HOST));
  REQUIRE_OK(stream.synchronize());
  return out;
}

std::vector<uint8_t> pattern(uint64_t bytes, uint64_t seed) {
  std::vector<uint8_t> out(bytes);
  for (uint64_t i = 0; i < bytes; ++i) {
    const uint64_t mixed = (i + seed * 0x9E3779B97F4A7C15ull) * 0xD1B54A32D192ED03ull;
    out[i] = static_cast<uint8_t>(mixed >> 56);
  }
  return out;
}

gpushare_backend_fault fault(uint32_t kind, uint64_t at_call, double factor) {
  gpushare_backend_fault value{};
  value.struct_size = sizeof(value);
  value.kind = kind;
  value.at_call = at_call;
  value.factor = factor;
  return value;
}

gpushare_backend_work work(uint64_t duration_ns, float demand) {
  gpushare_backend_work value{};
  value.struct_size = sizeof(value);
  value.duration_ns = duration_ns;
  value.demand = demand;
  return value;
}

}  // namespace gpushare::cts
