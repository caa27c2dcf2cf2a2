// measure_switch_processes [copy_gbps] [rounds] [execution/load]: how long a worker process's iteration takes when its
// model is on the device already, when the device was another process's a moment ago (two workers of a daemon
// with room for one model), and when the other process is stopped and this one started. Host device over a
// capped link; execution takes a given time without using a core, as a GPU would.
//
// The daemon is a process of its own, so are the workers: this program again, see main().
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "daemon/server.hpp"
#include "daemon/worker.hpp"
#include "loader/model_sizes.hpp"
#include "own_process.hpp"

namespace {

using namespace gpushare;

// Executes layers in order, each for its share (by bytes) of execute_ms, as a device would: `arrived(i)` returns
// once layer i is there. Ends when the last one is done.
template <class Arrived>
base::Status execute(const std::vector<uint64_t>& bytes, double execute_ms, Arrived&& arrived) {
  uint64_t total = 0;
  for (const uint64_t size : bytes) total += size;
  auto done = std::chrono::steady_clock::now();
  double fraction = 0;  // of a nanosecond, carried on
  for (size_t i = 0; i < bytes.size(); ++i) {
    GPUSHARE_RETURN_IF_ERROR(arrived(static_cast<uint32_t>(i)));
    done = std::max(done, std::chrono::steady_clock::now());
    fraction += execute_ms * 1e6 * static_cast<double>(bytes[i]) / static_cast<double>(total);
    const auto whole = static_cast<int64_t>(fraction);
    fraction -= static_cast<double>(whole);
    done += std::chrono::nanoseconds(whole);
  }
  std::this_thread::sleep_until(done);
  return {};
}

double since_ms(uint64_t begin_ns) {
  return static_cast<double>(base::host_now_ns() - begin_ns) / 1e6;
}

// ---- the processes ------------------------------------------------------------------------------------------

int fail(const char* what, const base::Status& status) {
  std::fprintf(stderr, "measure_switch_processes: %s: %s\n", what, status.to_string().c_str());
  return 1;
}

// Serves until stdin ends.
int run_daemon(const char* socket, const char* copy_gbps, uint64_t capacity_bytes, uint64_t standby_bytes) {
  daemon::ServerOptions options;
  options.socket = socket;
  options.device = base::format("host?total_gib=4&copy_gbps=%s", copy_gbps);
  options.capacity_bytes = capacity_bytes;
  options.standby_bytes = standby_bytes;
  const auto server = daemon::Server::start(std::move(options));
  if (!server.ok()) return fail("daemon", server.status());
  std::printf("ready\n");
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  return 0;
}

// For every line of stdin one iteration ("i"), or only a wait for all layers ("l"); answers with its milliseconds
// from asking for the turn to the last layer.
int run_worker(const char* socket, const char* model, double execute_ms) {
  daemon::WorkerOptions options;
  options.socket = socket;
  options.name = std::filesystem::path(model).filename();
  options.path = model;
  options.execute_ns = static_cast<uint64_t>(execute_ms * 1e6);
  const auto attached = daemon::Worker::attach(options);
  if (!attached.ok()) return fail("attach", attached.status());
  daemon::Worker& worker = **attached;
  std::vector<uint64_t> bytes;
  for (const daemon::TableLayer& layer : worker.layers()) bytes.push_back(layer.bytes);
  std::printf("ready\n");
  std::fflush(stdout);
  for (int c; (c = std::getchar()) != EOF;) {
    if (c != 'i' && c != 'l') continue;
    const uint64_t begin_ns = base::host_now_ns();
    base::Status status = worker.begin();
    if (status.ok() && c == 'l') status = worker.wait_layers(0, static_cast<uint32_t>(bytes.size()));
    if (status.ok() && c == 'i')
      status = execute(bytes, execute_ms, [&](uint32_t i) { return worker.wait_layers(i, i + 1); });
    const double ms = since_ms(begin_ns);
    const uint32_t there = worker.arrived_at_begin();
    if (status.ok()) status = worker.end();
    if (!status.ok()) return fail("iteration", status);
    std::printf("%f %u\n", ms, there);
    std::fflush(stdout);
  }
  return 0;
}

// Without a daemon: reads the model, sends it in one piece, executes.
int run_alone(const char* model, const char* copy_gbps, double execute_ms) {
  const auto run = [&]() -> base::Status {
    GPUSHARE_ASSIGN_OR_RETURN(const auto device,
                              device::Device::open(base::format("host?total_gib=4&copy_gbps=%s", copy_gbps)));
    loader::ChunkPool pool(*device, 16ull << 20);
    GPUSHARE_ASSIGN_OR_RETURN(const auto image, loader::load_image(pool, model, {}));
    GPUSHARE_ASSIGN_OR_RETURN(const device::Address block, device->alloc(image->bytes()));
    GPUSHARE_ASSIGN_OR_RETURN(const device::Stream stream, device->create_stream());
    const auto layers = static_cast<uint32_t>(image->layers().size());
    GPUSHARE_ASSIGN_OR_RETURN(const auto transmission,
                              loader::Transmission::start(*device, stream, image, block, {layers}));
    std::vector<uint64_t> bytes;
    for (const loader::Layer& layer : image->layers()) bytes.push_back(layer.bytes);
    GPUSHARE_RETURN_IF_ERROR(execute(bytes, execute_ms, [&](uint32_t i) { return transmission->wait(i); }));
    return device->free(block);
  };
  const base::Status status = run();
  return status.ok() ? 0 : fail("alone", status);
}

// ---- the driver ---------------------------------------------------------------------------------------------

struct Process : benchmarks::OwnProcess {
  using OwnProcess::OwnProcess;
  ~Process() {
    std::fclose(in);
    std::fclose(out);
    waitpid(pid, nullptr, 0);
  }
  void expect_ready() {
    char line[64];
    if (std::fgets(line, sizeof(line), out) == nullptr) std::exit(1);  // it has said why
  }
  // One iteration, or with 'l' a load. `out_there`: layers that were on the device when it began.
  double iterate(unsigned* out_there, char what = 'i') {
    std::fputc(what, in);
    std::fflush(in);
    double ms = 0;
    if (std::fscanf(out, "%lf %u", &ms, out_there) != 2) std::exit(1);
    return ms;
  }
};

// A safetensors file of these sizes.
void write_model(const std::string& path, const std::vector<uint64_t>& sizes, char fill) {
  std::string json = "{";
  uint64_t begin = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    json += (i > 0 ? "," : "") +
            base::format("\"l%zu\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}", i,
                         static_cast<unsigned long long>(sizes[i]), static_cast<unsigned long long>(begin),
                         static_cast<unsigned long long>(begin + sizes[i]));
    begin += sizes[i];
  }
  json += "}";
  std::ofstream file(path, std::ios::binary);
  for (size_t i = 0; i < 8; ++i) file.put(static_cast<char>(json.size() >> (8 * i)));
  file << json;
  const std::string block(1 << 20, fill);
  for (uint64_t left = begin; left > 0; left -= std::min<uint64_t>(left, block.size()))
    file.write(block.data(), static_cast<std::streamsize>(std::min<uint64_t>(left, block.size())));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(const std::string& model, const std::string& copy_gbps, int rounds, double ratio, bool standby) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("gpushare-switch-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  std::vector<uint64_t> sizes = bench::model_layer_bytes(model);
  const bool made = sizes.empty();
  if (made) sizes = bench::made_layer_bytes(300);
  uint64_t bytes = 0;
  for (const uint64_t size : sizes) bytes = (bytes + 255) / 256 * 256 + size;
  const std::string paths[] = {folder / "a.safetensors", folder / "b.safetensors"};
  for (int i = 0; i < 2; ++i) write_model(paths[i], sizes, static_cast<char>('a' + i));
  const double load_ms = static_cast<double>(bytes) / std::atof(copy_gbps.c_str()) / 1e6;
  const double execute_ms = load_ms * ratio;
  const std::string execute_text = std::to_string(execute_ms);
  const std::string socket = folder / "socket";

  std::vector<double> there, switched, loaded, restarted;
  unsigned layers_there = 0;  // when a switch began
  {
    // Room for one model and a half; with standby, that half for first layers.
    Process daemon({"daemon", socket, copy_gbps, std::to_string(bytes * 3 / 2),
                    std::to_string(standby ? bytes / 2 : 0)});
    daemon.expect_ready();
    Process a({"worker", socket, paths[0], execute_text}), b({"worker", socket, paths[1], execute_text});
    a.expect_ready();
    b.expect_ready();
    for (int round = 0; round <= rounds; ++round) {
      for (Process* worker : {&a, &b}) {
        unsigned found = 0;
        const double load = worker->iterate(&found, 'l');
        (void)(worker == &a ? b : a).iterate(&found, 'l');
        const double first = worker->iterate(&found);
        if (found == sizes.size() || (found != 0 && !standby))
          std::exit(fail("the model was there after a switch", {}));
        layers_there = found;
        const double second = worker->iterate(&found);
        if (found != sizes.size()) std::exit(fail("the model was not there", {}));
        if (round == 0) continue;  // the first touches everything
        switched.push_back(first);
        there.push_back(second);
        loaded.push_back(load);
      }
    }
  }
  for (int round = 0; round <= std::min(rounds, 3); ++round) {
    const uint64_t begin_ns = base::host_now_ns();
    { Process alone({"alone", paths[round % 2], copy_gbps, execute_text}); }
    if (round > 0) restarted.push_back(since_ms(begin_ns));
  }
  std::filesystem::remove_all(folder);
  const double overhead_ms = median(switched) - median(there);
  std::printf(
      "%-10s %6zu %7u %8.1f %8.1f %8.1f | %8.1f %8.1f %8.1f | %8.1f %8.1f%% %8.1f%% %8.1f%% | %8.1f\n",
      (made ? "made" : model).c_str(), sizes.size(), layers_there, static_cast<double>(bytes) / 1e6, load_ms,
      execute_ms, median(loaded), median(there), median(switched), overhead_ms, 100 * overhead_ms / load_ms,
      100 * overhead_ms / median(loaded),
      100 * static_cast<double>(sizes.front()) / static_cast<double>(bytes), median(restarted));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string role = argc > 1 ? argv[1] : "";
  if (role == "daemon" && argc == 6)
    return run_daemon(argv[2], argv[3], std::strtoull(argv[4], nullptr, 10),
                      std::strtoull(argv[5], nullptr, 10));
  if (role == "worker" && argc == 5) return run_worker(argv[2], argv[3], std::atof(argv[4]));
  if (role == "alone" && argc == 5) return run_alone(argv[2], argv[3], std::atof(argv[4]));
  const std::string copy_gbps = argc > 1 ? argv[1] : "1.2";
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  const double ratio = argc > 3 ? std::atof(argv[3]) : 1.0;
  if (std::atof(copy_gbps.c_str()) <= 0 || rounds < 1 || ratio <= 0) {
    std::fprintf(stderr,
                 "usage: measure_switch_processes [copy_gbps above 0] [rounds] [execution/load above 0]\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  std::printf(
      "host, link capped at %s GB/s, %d rounds, ms, medians; load and execute as they should be; standby: "
      "layers there when a switch began, with a budget of half a model\n",
      copy_gbps.c_str(), rounds);
  std::printf("%-10s %6s %7s %8s %8s %8s | %8s %8s %8s | %8s %9s %9s %9s | %8s\n", "model", "layers",
              "standby", "MB", "load", "execute", "loaded", "there", "switch", "overhead", "/load", "/loaded",
              "layer 0", "restart");
  for (const char* model : {"resnet101", "bert_base"})
    for (const bool standby : {false, true}) measure(model, copy_gbps, rounds, ratio, standby);
  return 0;
}
