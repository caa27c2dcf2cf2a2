// `gpushare replay`: recorded allocations on the block heap, a lane and a planned lane: speed, and the memory
// they need.
// SPDX-License-Identifier: Apache-2.0
#include "cluster/json.hpp"
#include "memory/replay.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "base/units.hpp"
#include "cli/command.hpp"
#include "cli/options.hpp"
#include "cli/output.hpp"
#include "cli/pickle.hpp"
#include "cli/progress.hpp"
#include "memory/trace_io.hpp"
#include "sim/csv.hpp"

namespace gpushare::cli {
namespace {

constexpr uint64_t kMostTraceBytes = uint64_t{1} << 30;
constexpr uint32_t kMostPlannedBlocks = 200'000;

const char* name_of(memory::TraceFormat format) {
  switch (format) {
    case memory::TraceFormat::kLifetimes:
      return "lifetimes";
    case memory::TraceFormat::kRmm:
      return "rmm";
    case memory::TraceFormat::kSnapshot:
      return "snapshot";
  }
  return "";
}

std::string short_name(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

cluster::OrderedJson to_json(const std::string& file, const memory::LoadedTrace& loaded,
                             memory::ReplayAllocator allocator, const memory::ReplayResult& result,
                             bool timed) {
  const auto if_timed = [timed](double ns) { return timed ? cluster::OrderedJson(ns) : nullptr; };
  cluster::OrderedJson row = cluster::object({{"file", file},
                                              {"format", name_of(loaded.format)},
                                              {"allocator", memory::name_of(allocator)},
                                              {"operations", result.operations},
                                              {"ns_per_op", if_timed(result.ns_per_op)},
                                              {"p99_ns", if_timed(result.p99_ns)},
                                              {"peak_live_bytes", result.peak_live_bytes},
                                              {"min_arena_bytes", result.min_arena_bytes},
                                              {"min_arena_ratio", result.min_arena_ratio},
                                              {"skipped_frees", loaded.skipped_frees}});
  if (allocator == memory::ReplayAllocator::kPlanned) {
    row["solve_s"] = result.solve_s;
    row["method"] = result.method;
  }
  return row;
}

class ReplayCommand final : public Command {
 public:
  const char* name() const override { return "replay"; }
  const char* summary() const override {
    return "Replay recorded allocations: speed and memory needed by each allocator";
  }
  const char* help() const override {
    return R"(Trace files are recognised by their content:
  id,lower,upper,size                    CSV of buffer lifetimes, header in any order; live over [lower, upper)
  Thread,Time,Action,Pointer,Size,Stream RMM's allocation log (CSV)
  PyTorch's memory snapshot              the pickle of torch.cuda.memory._dump_snapshot (by python3), or the same as JSON

Allocators: heap (one block heap), lane (the same, blocks that outlive the iteration at the other end), planned (the
placement is solved once, then replayed in constant time).

ns/op is the median over whole replays, p99 that of single allocations; both move with the machine's load, so compare
within one run. The arena ratio is the least memory with which the trace can be served, over the most bytes live at
once: 1.000 is perfect.

Examples:
  gpushare replay --alloc examples/traces/training.csv
  gpushare replay --alloc examples/traces/training.csv --allocator heap,planned --json -
  gpushare replay --alloc examples/traces/training.csv --time-ms 0

JSON: version, results[] {file, format, allocator, operations, ns_per_op, p99_ns, peak_live_bytes, min_arena_bytes,
min_arena_ratio, skipped_frees, for planned also solve_s, method}, notes[]. ns_per_op and p99_ns are null with
--time-ms 0.

Exit codes: 0 ok; 1 an output could not be written, or memory ran out; 2 bad usage or a bad trace file.
)";
  }
  void declare(CLI::App& app) override {
    app.add_option("--alloc", files_, "Trace files")->type_name("FILE..")->required();
    app.add_option("--allocator", allocators_, "Which to replay on [heap,lane,planned]")->type_name("A,B,..");
    app.add_option("--granule", granule_, "Blocks start at multiples of it: a power of two from 16B [256B]")
        ->type_name("SIZE");
    add(app, "--time-ms", &time_ms_, count(600'000), "N",
        "About how long to time each; 0 = memory only [300]");
    json_.declare(app);
  }

  base::Result<ExitCode> run() override {
    memory::ReplayOptions options;
    std::vector<memory::ReplayAllocator> allocators;
    constexpr const char* kAllocators[] = {"heap", "lane", "planned"};
    GPUSHARE_ASSIGN_OR_RETURN(
        const std::vector<std::string> names,
        parse_names("--allocator", allocators_.empty() ? "heap,lane,planned" : allocators_, kAllocators));
    for (const std::string& name : names) {
      GPUSHARE_ASSIGN_OR_RETURN(const memory::ReplayAllocator allocator,
                                memory::parse_replay_allocator(name));
      allocators.push_back(allocator);
    }
    const base::Result<uint64_t> granule = base::parse_size(granule_);
    if (!granule.ok() && base::parse_bytes(granule_).ok()) return granule.status().with_context("--granule");
    if (!granule.ok() || *granule < 16 || (*granule & (*granule - 1)) != 0 || *granule > (uint64_t{2} << 20))
      return bad_option("--granule", granule_, "give a power of two from 16B to 2MiB");
    options.granule_bytes = *granule;
    options.time_ns = time_ms_ * 1'000'000;
    std::vector<NamedFile> traces;
    for (const std::string& file : files_) traces.push_back({"--alloc", file});
    GPUSHARE_RETURN_IF_ERROR(check_files(traces, {json_.file()}));

    Table table;
    for (const char* title : {"trace", "allocator"}) table.add_column(title, Table::Align::kLeft);
    for (const char* title : {"operations", "ns/op", "p99 ns", "peak live", "arena needed", "ratio"})
      table.add_column(title, Table::Align::kRight);
    cluster::OrderedJson results = cluster::OrderedJson::array();
    std::vector<std::string> notes;
    ProgressLine line;
    std::vector<std::pair<std::string, memory::LoadedTrace>> loads;
    for (const std::string& path : files_) {
      GPUSHARE_ASSIGN_OR_RETURN(std::vector<memory::LoadedTrace> devices, load(path));
      for (memory::LoadedTrace& one : devices)
        loads.emplace_back(
            devices.size() > 1 ? base::format("%s, device %d", path.c_str(), one.device) : path,
            std::move(one));
    }
    for (const auto& [file, loaded] : loads) {
      if (loaded.skipped_frees > 0)
        notes.push_back(
            base::format("%s: %llu frees of blocks allocated before the recording began were left out.",
                         file.c_str(), static_cast<unsigned long long>(loaded.skipped_frees)));
      if (loaded.early_frees > 0)
        notes.push_back(
            base::format("%s: %llu blocks end where their address was handed out again; their free was "
                         "written later or not at all.",
                         file.c_str(), static_cast<unsigned long long>(loaded.early_frees)));
      if (loaded.cut) notes.push_back(file + ": the last line is cut off and left out.");
      const uint32_t blocks = loaded.trace.block_count;
      for (const memory::ReplayAllocator allocator : allocators) {
        // The solver compares blocks with each other: a larger trace would take it minutes to hours.
        if (allocator == memory::ReplayAllocator::kPlanned && blocks > kMostPlannedBlocks) {
          const std::string why = base::format(
              "%s: planned: the trace has %u blocks, the solver takes at most %u; replay a part of it",
              file.c_str(), blocks, kMostPlannedBlocks);
          if (!allocators_.empty()) return base::Status(GPUSHARE_INVALID_ARGUMENT, why);
          notes.push_back(why + ".");
          continue;
        }
        if (line.due()) line.show(file + ": " + memory::name_of(allocator));
        base::Result<memory::ReplayResult> replayed = memory::replay(loaded.trace, allocator, options);
        if (!replayed.ok()) return replayed.status().with_context("'" + file + "'");
        const memory::ReplayResult& result = *replayed;
        const bool timed = options.time_ns > 0;
        results.push_back(to_json(file, loaded, allocator, result, timed));
        table.add_row({short_name(file), memory::name_of(allocator), std::to_string(result.operations),
                       timed ? base::format("%.1f", result.ns_per_op) : "-",
                       timed ? base::format("%.0f", result.p99_ns) : "-",
                       base::format_bytes(result.peak_live_bytes), base::format_bytes(result.min_arena_bytes),
                       base::format("%.4f", result.min_arena_ratio)});
      }
    }
    line.clear();
    GPUSHARE_RETURN_IF_ERROR(
        json_.write(cluster::object({{"results", std::move(results)}, {"notes", notes}})));
    if (json_.on_stdout()) return kExitOk;
    std::string out = table.to_string();
    if (!notes.empty()) out += "\nNotes\n";
    for (const std::string& note : notes) out += "- " + wrap(note, 108, 2) + '\n';
    GPUSHARE_RETURN_IF_ERROR(write_stdout(out));
    return kExitOk;
  }

 private:
  // A trace for each device of a snapshot.
  static base::Result<std::vector<memory::LoadedTrace>> load(const std::string& file) {
    GPUSHARE_ASSIGN_OR_RETURN(std::string text, sim::read_text(file, kMostTraceBytes));
    if (is_pickle(text)) {
      GPUSHARE_ASSIGN_OR_RETURN(text,
                                pickle_as_json(text, file, {"frames", "segments", "external_annotations"}));
    }
    const size_t start = text.find_first_not_of(" \t\r\n");
    if (start != std::string::npos && text[start] == '{') return memory::parse_snapshot_devices(text, file);
    GPUSHARE_ASSIGN_OR_RETURN(memory::LoadedTrace loaded, memory::parse_trace(text, file));
    std::vector<memory::LoadedTrace> one;
    one.push_back(std::move(loaded));
    return one;
  }

  std::vector<std::string> files_;
  std::string allocators_;
  std::string granule_ = "256B";
  uint64_t time_ms_ = 300;
  JsonOption json_;
};

}  // namespace

std::unique_ptr<Command> make_replay_command() {
  return std::make_unique<ReplayCommand>();
}

}  // namespace gpushare::cli
