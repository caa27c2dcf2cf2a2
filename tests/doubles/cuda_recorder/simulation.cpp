// simulation.cpp: what the device does between two moments. An op runs at the time at which it was enqueued or later,
// never at the time at which somebody looked.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "page.hpp"

namespace recorder::device {
namespace {

struct Simulation {
  Page& page;
  State& s;

  Op& op(int p, uint64_t number) { return page.slots[p].ring[number % kRing]; }
  int streams(int p) { return static_cast<int>(std::min<uint32_t>(load(page.slots[p].streams), kStreams)); }

  void complete(int p, int i) {
    StreamState& stream = s.process[p].streams[i];
    op(p, stream.head).end_ns = s.now_ns;
    stream.completed = stream.head;
    stream.head = 0;
    stream.head_is_host_reached = 0;
  }

  void find_head(int p, int i, uint64_t published) {
    StreamState& stream = s.process[p].streams[i];
    while (stream.head == 0 && stream.examined < published) {
      const Op& next = op(p, ++stream.examined);
      if (next.stream != i) continue;
      stream.head = stream.examined;
      stream.remaining = next.work.cost_ns * kScale;
    }
  }

  // All that comes before the head of this stream by the order of the driver's calls has completed, and it was enqueued by now.
  bool ready(int p, int i) {
    const ProcessState& process = s.process[p];
    const uint64_t head = process.streams[i].head;
    if (head == 0) return false;
    const Op& first = op(p, head);
    if (first.arrived_ns > s.now_ns) return false;
    // The legacy default stream and those that block wait for one another.
    const Slot& slot = page.slots[p];
    if (i == 0) {
      for (int other = 1; other < streams(p); ++other)
        if (slot.traits[other].blocking != 0 && process.streams[other].head != 0 &&
            process.streams[other].head < head)
          return false;
    } else if (slot.traits[i].blocking != 0 && process.streams[0].head != 0 &&
               process.streams[0].head < head) {
      return false;
    }
    return first.work.kind != Kind::wait ||
           process.streams[first.work.wait_stream].completed >= first.work.wait_number;
  }

  // Completes what needs no time.
  void settle() {
    for (int p = 0; p < s.processes; ++p) {
      if (s.process[p].alive == 0) continue;
      const uint64_t published = load(page.slots[p].published);
      for (bool changed = true; changed;) {
        changed = false;
        for (int i = 0; i < streams(p); ++i) find_head(p, i, published);
        for (int i = 0; i < streams(p); ++i) {
          StreamState& stream = s.process[p].streams[i];
          if (!ready(p, i)) continue;
          const Op& first = op(p, stream.head);
          if (first.work.kind == Kind::host) {
            stream.head_is_host_reached = 1;
            const uint64_t released = load(first.released_ns);
            if (released == 0 || released > s.now_ns) continue;
          } else if (first.work.kind != Kind::record && first.work.kind != Kind::wait &&
                     stream.remaining != 0) {
            continue;
          }
          complete(p, i);
          changed = true;
          find_head(p, i, published);
        }
      }
    }
  }

  struct Running {
    int process, stream;
    uint64_t width;
  };

  // The compute ops of a process that are ready, first those of higher priority, then in the order of the calls.
  void ready_of(int p, std::vector<Running>* out) {
    const size_t begin = out->size();
    for (int i = 0; i < streams(p); ++i)
      if (ready(p, i) && op(p, s.process[p].streams[i].head).work.kind == Kind::compute)
        out->push_back({p, i, op(p, s.process[p].streams[i].head).work.width_percent});
    std::sort(out->begin() + static_cast<std::ptrdiff_t>(begin), out->end(),
              [&](const Running& a, const Running& b) {
                const int first = page.slots[p].traits[a.stream].priority,
                          second = page.slots[p].traits[b.stream].priority;
                return first != second
                           ? first < second
                           : s.process[p].streams[a.stream].head < s.process[p].streams[b.stream].head;
              });
  }

  // Chooses the ops that run now; `out_until` is the time of the next choice.
  void choose(std::vector<Running>* running, uint64_t* out_until) {
    running->clear();
    if (page.settings.side_by_side != 0) {
      for (int p = 0; p < s.processes; ++p)
        if (s.process[p].alive != 0) ready_of(p, running);
      return;
    }
    // Time slices: the processes with work take turns. Nobody waits for one that has none.
    std::vector<Running> own;
    int first = -1, others = 0;
    const bool expired = s.now_ns >= s.slice_end_ns;
    for (int step = 0; step < s.processes; ++step) {
      // The active one is looked at first while its slice lasts, and last when it has ended.
      const int p = (std::max(s.active, 0) + step + (expired ? 1 : 0)) % s.processes;
      if (s.process[p].alive == 0) continue;
      own.clear();
      ready_of(p, &own);
      if (own.empty()) continue;
      if (first < 0) {
        first = p;
        *running = own;
      } else {
        ++others;
      }
    }
    if (first < 0) return;
    if (first != s.active || expired) {
      s.switched_ns = s.now_ns;
      if (first != s.active) ++s.switches;
      if (first != s.active && s.active >= 0) s.switched_ns += page.settings.switch_ns;
      s.active = first;
      s.slice_end_ns = s.switched_ns + page.settings.slice_ns;
    }
    if (s.now_ns < s.switched_ns) {
      *out_until = std::min(*out_until, s.switched_ns);
      running->clear();
      return;
    }
    if (others > 0) *out_until = std::min(*out_until, s.slice_end_ns);
    // As many as fit beside one another.
    uint64_t width = 0;
    size_t fit = 0;
    while (fit < running->size() && (fit == 0 || width + (*running)[fit].width <= 100))
      width += (*running)[fit++].width;
    running->resize(fit);
  }

  void run(uint64_t to_ns) {
    std::vector<Running> running;
    for (;;) {
      settle();
      if (s.now_ns >= to_ns) return;
      uint64_t until = to_ns;
      choose(&running, &until);
      uint64_t width = 0;
      for (const Running& r : running) width += r.width;
      const uint64_t share = std::max<uint64_t>(width, 100);  // everyone runs at 100 / share of its speed
      for (const Running& r : running) {
        const uint64_t left = s.process[r.process].streams[r.stream].remaining;
        until = std::min(until, s.now_ns + (left * share + 100 * kScale - 1) / (100 * kScale));
      }
      // The copy engine does one copy after another, in the order in which they came.
      if (s.copy_process >= 0 && (s.process[s.copy_process].alive == 0 ||
                                  s.process[s.copy_process].streams[s.copy_stream].head == 0))
        s.copy_process = -1;
      uint64_t oldest = UINT64_MAX;
      for (int p = 0; p < s.processes; ++p) {
        if (s.process[p].alive == 0) continue;
        for (int i = 0; i < streams(p); ++i) {
          const uint64_t head = s.process[p].streams[i].head;
          if (head == 0) continue;
          const Op& first = op(p, head);
          if (first.arrived_ns > s.now_ns) {
            until = std::min(until, first.arrived_ns);
          } else if (first.work.kind == Kind::host && load(first.released_ns) > s.now_ns) {
            until = std::min(until, load(first.released_ns));
          } else if (s.copy_process < 0 && first.work.kind == Kind::copy && first.arrived_ns < oldest &&
                     ready(p, i)) {
            oldest = first.arrived_ns;
            s.copy_stream = i | p << 16;
          }
        }
      }
      if (s.copy_process < 0 && oldest != UINT64_MAX) {
        s.copy_process = s.copy_stream >> 16;
        s.copy_stream &= 0xffff;
      }
      if (s.copy_process >= 0)
        until = std::min(
            until,
            s.now_ns + (s.process[s.copy_process].streams[s.copy_stream].remaining + kScale - 1) / kScale);
      advance(running, share, std::max(until, s.now_ns + 1) - s.now_ns);
    }
  }

  void advance(const std::vector<Running>& running, uint64_t share, uint64_t elapsed) {
    s.now_ns += elapsed;
    if (!running.empty()) s.busy_ns += elapsed;
    for (const Running& r : running) {
      ProcessState& process = s.process[r.process];
      StreamState& stream = process.streams[r.stream];
      const uint64_t done = elapsed * kScale * 100 / share;
      process.compute_ns += elapsed * r.width / share;
      stream.remaining -= std::min(stream.remaining, done);
      if (stream.remaining == 0) {
        ++process.kernels;
        complete(r.process, r.stream);
      }
    }
    if (s.copy_process < 0) return;
    ProcessState& process = s.process[s.copy_process];
    StreamState& stream = process.streams[s.copy_stream];
    process.copy_ns += elapsed;
    stream.remaining -= std::min(stream.remaining, elapsed * kScale);
    if (stream.remaining != 0) return;
    ++process.copies;
    complete(s.copy_process, s.copy_stream);
    s.copy_process = -1;
  }
};

}  // namespace

void copy_state(const Page& page, State* to) {
  const State& from = page.states[page.current];
  std::memcpy(static_cast<void*>(to), &from, offsetof(State, process));
  for (int p = 0; p < from.processes; ++p) {
    const auto streams = std::min<uint32_t>(load(page.slots[p].streams), kStreams);
    std::memcpy(static_cast<void*>(&to->process[p]), &from.process[p],
                offsetof(ProcessState, streams) + streams * sizeof(StreamState));
  }
}

const State& catch_up(Page& page, int file, int own, bool look) {
  State& next = page.states[1 - page.current];
  copy_state(page, &next);
  const uint64_t now = device_ns(page), host = host_ns();
  look = look || host - page.looked_ns > 1'000'000;
  Simulation simulation{page, next};
  // A process that is found dead has worked until now, as a driver notices it no sooner.
  simulation.run(now);
  if (look) {
    page.looked_ns = host;
    for (int p = 0; p < next.processes; ++p) {
      struct flock lock;
      if (next.process[p].alive == 0 || p == own || !lock_byte(file, F_GETLK, p, &lock) ||
          lock.l_type != F_UNLCK)
        continue;
      next.process[p].alive = 0;
      next.process[p].ended_ns = next.now_ns;
      if (next.copy_process == p) next.copy_process = -1;
    }
  }
  store(page.current, 1 - page.current);
  return next;
}

}  // namespace recorder::device
