// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/cuda_backend.hpp"

#include "device/cuda/cuda_device.hpp"
#include "device/support/ops_table.hpp"

namespace gpushare::device {
namespace {

struct CudaClasses {
  static constexpr const char* kName = "cuda";
  using Device = cuda::Device;
  using Stream = cuda::Stream;
  using Event = cuda::Event;
};
using Table = OpsTable<CudaClasses>;

int32_t probe(uint32_t* out_device_count) {
  return Table::guard("probe", [&]() -> base::Status {
    if (out_device_count == nullptr) return null_output();
    GPUSHARE_ASSIGN_OR_RETURN(const cuda::Driver* driver, cuda::Driver::get(""));
    int count = 0;
    GPUSHARE_RETURN_IF_ERROR(cuda::to_status(driver->cuDeviceGetCount(&count), "cuDeviceGetCount"));
    if (count <= 0)
      return {GPUSHARE_UNAVAILABLE, "no CUDA: the driver shows no device (see CUDA_VISIBLE_DEVICES)"};
    *out_device_count = static_cast<uint32_t>(count);
    return {};
  });
}

int32_t stream_capture_drop(gpushare_backend_stream* stream, uint32_t* out_dropped) {
  return Table::on_stream(stream, "stream_capture_drop", [&](cuda::Stream& s) -> base::Status {
    return out_dropped == nullptr ? null_output() : Table::store(s.drop_capture(), out_dropped);
  });
}

int32_t stream_adopt(gpushare_backend_device* device, void* native, gpushare_backend_stream** out_stream) {
  return Table::output(device, "stream_adopt", out_stream, [&](cuda::Device& d) {
    return d.adopt_stream(static_cast<cuda::api::CUstream>(native));
  });
}

int32_t context_bytes(uint32_t index, const char* options, uint64_t* out_bytes) {
  return Table::guard("context_bytes", [&]() -> base::Status {
    if (options == nullptr || out_bytes == nullptr) return null_output();
    return Table::store(cuda::Device::context_bytes(index, options), out_bytes);
  });
}

cuda::Partition* to(gpushare_backend_partition* handle) {
  return reinterpret_cast<cuda::Partition*>(handle);
}

int32_t partition_info(gpushare_backend_device* device, gpushare_backend_partition_info* out_info) {
  return Table::on_live(device, "partition_info", [&](cuda::Device& d) -> base::Status {
    if (out_info == nullptr || out_info->struct_size < sizeof(uint32_t)) return null_output();
    return d.partitions().info(out_info);
  });
}

int32_t partition_create(gpushare_backend_device* device, uint32_t compute_units,
                         gpushare_backend_partition** out_partition, uint32_t* out_compute_units) {
  return Table::on_live(device, "partition_create", [&](cuda::Device& d) -> base::Status {
    if (out_partition == nullptr || out_compute_units == nullptr) return null_output();
    GPUSHARE_ASSIGN_OR_RETURN(cuda::Partition * partition, d.create_partition(compute_units));
    *out_partition = reinterpret_cast<gpushare_backend_partition*>(partition);
    *out_compute_units = partition->compute_units();
    return {};
  });
}

int32_t partition_destroy(gpushare_backend_device* device, gpushare_backend_partition* partition) {
  return Table::on_any(device, "partition_destroy",
                       [&](cuda::Device& d) { return d.destroy_partition(to(partition)); });
}

int32_t partition_stream_create(gpushare_backend_partition* partition, int32_t priority,
                                gpushare_backend_stream** out_stream) {
  return Table::guard("partition_stream_create", [&]() -> base::Status {
    if (partition == nullptr) return null_handle("partition");
    if (out_stream == nullptr) return null_output();
    return Table::store(to(partition)->device().create_stream(priority, to(partition)), out_stream);
  });
}

}  // namespace

const gpushare_backend_ops* cuda_backend() {
  static const gpushare_backend_ops ops = [] {
    gpushare_backend_ops table = Table::make();
    table.probe = probe;
    table.fault_set = nullptr;
    table.stream_capture_drop = stream_capture_drop;
    table.stream_adopt = stream_adopt;
    table.context_bytes = context_bytes;
    Table::add_ipc(table);
    table.partition_info = partition_info;
    table.partition_create = partition_create;
    table.partition_destroy = partition_destroy;
    table.partition_stream_create = partition_stream_create;
    return table;
  }();
  return &ops;
}

}  // namespace gpushare::device
