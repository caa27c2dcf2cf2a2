// images.hpp: the images of models that the daemon shares with this process: the messages about them, and the objects
// (users) that are told of them. A process reads an image; it maps the memory when ImageHere comes and unmaps it when
// ImageGone does. The daemon sends ImageGone only while the image's session has no turn.
//
// Threads: open() and close() from any; the rest from the thread that listens to the daemon. A user is called by that thread,
// with no lock held.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.hpp"
#include "base/status.hpp"
#include "client/channel.hpp"
#include "client/protocol.hpp"

namespace gpushare::client {

// One image that is open.
class ImageUser {
 public:
  virtual ~ImageUser() = default;
  virtual void opened(const ImageOpened& message, std::vector<Descriptor> descriptors) = 0;
  // The image's memory has come; `first_bytes` of it are in the first descriptor. False: the memory could not be
  // mapped.
  virtual bool here(uint64_t first_bytes, std::vector<Descriptor> descriptors) = 0;
  virtual void gone() = 0;  // the user must have unmapped the memory when this returns
  // The daemon has gone, so no more news comes.
  virtual void lost(const base::Status& why) = 0;
};

class Images {
 public:
  // Errors: UNAVAILABLE (the daemon has gone), INVALID_ARGUMENT (path).
  base::Result<uint64_t> open(std::weak_ptr<ImageUser> user, uint64_t session, const std::string& path,
                              uint64_t iteration_ns);
  // The user has unmapped the image.
  void close(uint64_t image);

  // ---- the connection. `socket`: a copy of its own
  void connected(Descriptor socket);
  void lost(const base::Status& why);
  // Queues a message; true if it is about images.
  bool take(MessageType type, std::span<const std::byte> message, std::vector<Descriptor>* descriptors);
  // Calls users with the queued news.
  void deliver();

 private:
  struct News {
    MessageType type;
    uint64_t image = 0;
    uint64_t first_bytes = 0;
    ImageOpened opened;
    std::vector<Descriptor> descriptors;
    base::Status why;
  };
  void send(MessageType type, uint64_t image) GPUSHARE_REQUIRES(mutex_);

  base::Mutex mutex_;
  Descriptor socket_ GPUSHARE_GUARDED_BY(mutex_);  // empty: the daemon has gone
  std::map<uint64_t, std::weak_ptr<ImageUser>> users_ GPUSHARE_GUARDED_BY(mutex_);
  std::deque<News> news_ GPUSHARE_GUARDED_BY(mutex_);
  uint64_t next_ GPUSHARE_GUARDED_BY(mutex_) = 1;
};

// ---- the table of layers, sent as a sealed file -----------------------------------------------------------

struct TableLayer {
  std::string name;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
};
std::string encode_layers(std::span<const TableLayer> layers);
// Errors: MALFORMED_INPUT, also for a layer outside `image_bytes`.
base::Result<std::vector<TableLayer>> parse_layers(std::string_view table, uint64_t image_bytes);

}  // namespace gpushare::client
