// images.hpp: the images of one device. Each is read once, loaded into memory of the daemon, and shared with processes
// for reading only. The scheduler decides whether an image is on the device: its first layers and its rest are two
// caches (sched::Scheduler::add_cache). A session wants them from before its turn until after it; at other times they
// stay for speed alone.
//
// A session with images gets a turn only once all of them are on the device or on their way, and its process has been
// sent their memory. Sessions are given their images one after the other, so that no two can wait for each other.
// Memory is given back only when every process that had it mapped has said that it unmapped the memory, or is dead.
//
// The service's thread calls everything. A thread of its own opens the device, opened with the first image, and reads
// files.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.hpp"
#include "base/patient.hpp"
#include "base/status.hpp"
#include "client/board.hpp"
#include "client/images.hpp"
#include "client/protocol.hpp"
#include "client/status.hpp"
#include "daemon/own_context.hpp"
#include "daemon/shared_image.hpp"
#include "device/device.hpp"
#include "loader/image.hpp"
#include "loader/profile.hpp"
#include "sched/scheduler.hpp"

namespace gpushare::daemon {

struct Process;
struct RemoteSession;

// An image as one session has it open.
struct ImageUse {
  uint64_t number = 0;  // the process's
  Process* process = nullptr;
  RemoteSession* session = nullptr;    // null: the session has left
  std::shared_ptr<SharedImage> image;  // null: the file is being read
  std::shared_ptr<client::Board> board;
  uint64_t iteration_ns = 0;
  bool mapped = false;  // its process has the memory mapped, or is being sent it
  bool going = false;   // the process was asked to unmap it
  uint64_t going_since_ns = 0;
  bool overdue = false;  // the process was reported as overdue
  bool stuck = false;    // the process cannot be told to unmap: the image stays until the process is dead
};

class Images {
 public:
  // `wake` is called by other threads when step() has something to do.
  Images(std::string device, uint64_t limit_bytes, sched::Scheduler& scheduler, uint64_t& next_id,
         std::function<void()> wake);
  ~Images();
  Images(const Images&) = delete;
  Images& operator=(const Images&) = delete;

  // Answers later, also with errors, by ImageOpened.
  void open(Process& process, RemoteSession& session, const client::ImageOpen& message);
  // The process has unmapped the image, by itself or because the daemon asked.
  void close(Process& process, uint64_t number);
  void unmapped(Process& process, uint64_t number);
  void left(RemoteSession& session);
  void died(Process& process);
  // A disconnected process cannot be told to unmap: its mappings stay until it is dead.
  void disconnected(Process& process);

  uint64_t context_bytes() const { return context_.bytes(); }  // of this process, since the first image
  // As OwnContext::tick.
  bool tick(uint64_t now_ns, uint64_t* next_ns) { return context_.tick(device_, now_ns, next_ns); }
  bool in_use(const Process& process) const;  // it has images mapped
  // Processes that were asked `lease_ns` ago or longer to unmap an image; each image is reported once. *next_ns is
  // lowered to the time until the next look.
  std::vector<const Process*> overdue(uint64_t now_ns, uint64_t lease_ns, uint64_t* next_ns);

  // Sets the session aside until it has its images.
  void ask(RemoteSession& session);
  // The session's turn is over, or the session does not want one any more.
  void let_go(RemoteSession& session);
  // True if the session lacks images and so cannot have a turn yet.
  static bool lacks(const RemoteSession& session);

  // The scheduler's decisions.
  void fill(uint64_t cache);
  void drop(uint64_t cache);
  // Takes up what has been read and what has arrived, and gives sessions their images. *out_ready gets the sessions
  // that have theirs now. True if the scheduler may have decided something meanwhile.
  bool step(std::vector<RemoteSession*>* out_ready);
  bool link_measured() const { return link_measured_; }
  bool loading() const;  // true: call step() again soon, because a load that fails sends no notice
  std::vector<client::ImageStatus> status() const;

 private:
  struct Entry {
    std::shared_ptr<SharedImage> image;
    uint64_t first = 0, rest = 0;  // ids of the two caches; first is 0 without a prefix
    uint64_t user = 0;             // who may share it
    base::Status failure;          // why it could not be loaded; it is dropped once no session wants it
    uint64_t users = 0;            // sessions that want it
  };
  struct Read {
    uint64_t process = 0, number = 0;
    std::string path;
    base::Result<std::shared_ptr<const loader::Image>> image = base::Status();
  };
  void read_images();
  void take_read();
  bool take_loaded();  // true if a load has ended
  base::Result<OpenedDevice> wait_for_device();
  base::Status open_device();
  base::Status finish(ImageUse& use, const std::shared_ptr<const loader::Image>& image);
  base::Result<Entry*> entry_for(const std::shared_ptr<const loader::Image>& image, uint64_t user,
                                 uint64_t iteration_ns);
  Entry* entry_of(uint64_t cache);
  Entry* entry_of(const SharedImage& image);
  std::vector<loader::LayerCost> layer_costs(const loader::Image& image, uint64_t execution_ns) const;
  base::Status load(Entry& entry, uint64_t execution_ns);
  void fail(Entry& entry, const base::Status& why);
  static bool ask_to_unmap(ImageUse& use);  // false: its process does not read the socket
  // Gives back what may go and is not mapped any more.
  void give_back(Entry& entry);
  bool mapped(const SharedImage& image) const;
  bool there(const RemoteSession& session);
  bool want(RemoteSession& session);  // false: it wanted all of them already
  void unwant(RemoteSession& session);
  bool share(ImageUse& use);
  static void retry(RemoteSession& session);
  void answer(const ImageUse& use, const base::Status& status, std::span<const int> descriptors = {});
  void forget_unused();

  const std::string spec_;
  const uint64_t limit_bytes_;
  sched::Scheduler& scheduler_;
  uint64_t& next_id_;
  const std::function<void()> wake_;
  // Opened with the first image. A question about its context that hangs has it too.
  std::shared_ptr<device::Device> device_;
  // The reader's: the device is being opened. Null: it is open, or was not asked for.
  std::unique_ptr<base::Asked<OpenedDevice>> opening_;
  OwnContext context_;
  device::Stream link_stream_;
  loader::LinkCosts link_{0.010, 12e6, 0.020};  // assumed until a load has been measured
  bool link_measured_ = false;
  std::unique_ptr<loader::ChunkPool> pool_;
  std::unique_ptr<loader::ImageCache> cache_;
  std::list<Entry> entries_;
  std::list<std::unique_ptr<ImageUse>> uses_;
  std::deque<RemoteSession*> line_;  // sessions that are set aside

  base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::list<Read> to_read_ GPUSHARE_GUARDED_BY(mutex_);
  std::list<Read> read_ GPUSHARE_GUARDED_BY(mutex_);
  bool stop_ GPUSHARE_GUARDED_BY(mutex_) = false;
  std::thread reader_;  // started with the first image
};

}  // namespace gpushare::daemon
