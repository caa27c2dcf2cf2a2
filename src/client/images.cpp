// SPDX-License-Identifier: Apache-2.0
#include "client/images.hpp"

#include <cstring>
#include <filesystem>
#include <utility>

namespace gpushare::client {
namespace {

constexpr uint32_t kTableMark = 0x47505354;
constexpr uint64_t kMaxLayers =
    1'000'000;  // of a valid table: bounds the memory that a broken one can ask for

constexpr auto kLost = MessageType(0);  // no message's type

base::Status no_daemon() {
  return {
      GPUSHARE_UNAVAILABLE,
      "the daemon that shared the image has gone: release the image, and open it anew once a daemon serves"};
}

base::Status malformed(const char* what) {
  return {GPUSHARE_MALFORMED_INPUT, std::string("the table of layers ") + what};
}

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class T>
bool get(std::string_view& in, T* out) {
  if (in.size() < sizeof(T)) return false;
  std::memcpy(out, in.data(), sizeof(T));
  in.remove_prefix(sizeof(T));
  return true;
}

}  // namespace

base::Result<uint64_t> Images::open(std::weak_ptr<ImageUser> user, uint64_t session, const std::string& path,
                                    uint64_t iteration_ns) {
  auto message = make_message<MessageType::kImageOpen>();
  std::error_code error;
  const std::string absolute = std::filesystem::absolute(path, error).string();
  if (path.empty() || error || absolute.size() >= sizeof(message.path))
    return base::Status(GPUSHARE_INVALID_ARGUMENT,
                        base::format("the image's path has %zu bytes; allowed are 1 to %zu", absolute.size(),
                                     sizeof(message.path) - 1));
  put_text(message.path, absolute);
  message.session = session;
  message.iteration_ns = iteration_ns;
  base::MutexLock lock(mutex_);
  if (!socket_) return no_daemon();
  message.image = next_++;
  users_.emplace(message.image, std::move(user));
  const base::Status sent = send_message(socket_.get(), bytes_of(message));
  if (sent.ok()) return message.image;
  users_.erase(message.image);
  return sent;
}

void Images::send(MessageType type, uint64_t image) {
  // The result is ignored: a thread that waits for the daemon's answer finds out that the daemon does not read.
  if (socket_) (void)send_message(socket_.get(), bytes_of(make_session_message(type, 0, image)));
}

void Images::close(uint64_t image) {
  base::MutexLock lock(mutex_);
  if (users_.erase(image) > 0) send(MessageType::kImageClose, image);
}

void Images::connected(Descriptor socket) {
  base::MutexLock lock(mutex_);
  socket_ = std::move(socket);
}

void Images::lost(const base::Status& why) {
  base::MutexLock lock(mutex_);
  socket_ = {};
  for (const auto& [image, user] : users_) news_.push_back({kLost, image, 0, {}, {}, why});
}

bool Images::take(MessageType type, std::span<const std::byte> message,
                  std::vector<Descriptor>* descriptors) {
  News news{type, 0, 0, {}, {}, {}};
  if (type == MessageType::kImageOpened) {
    news.opened = fields_of<ImageOpened>(message);
    news.image = news.opened.image;
  } else if (type == MessageType::kImageHere || type == MessageType::kImageGone) {
    const auto about = fields_of<SessionMessage>(message);
    news.image = about.value;
    news.first_bytes = about.session;
  } else {
    return false;
  }
  news.descriptors = std::exchange(*descriptors, {});
  base::MutexLock lock(mutex_);
  news_.push_back(std::move(news));
  return true;
}

void Images::deliver() {
  for (;;) {
    News news;
    std::shared_ptr<ImageUser> user;
    {
      base::MutexLock lock(mutex_);
      if (news_.empty()) return;
      news = std::move(news_.front());
      news_.pop_front();
      if (const auto found = users_.find(news.image); found != users_.end()) user = found->second.lock();
    }
    bool unmapped = news.type == MessageType::kImageGone || user == nullptr;
    if (user != nullptr) {
      if (news.type == MessageType::kImageOpened)
        user->opened(news.opened, std::move(news.descriptors));
      else if (news.type == MessageType::kImageHere)
        unmapped = !user->here(news.first_bytes, std::move(news.descriptors));
      else if (news.type == MessageType::kImageGone)
        user->gone();
      else
        user->lost(news.why);
    }
    if (!unmapped || (news.type != MessageType::kImageGone && news.type != MessageType::kImageHere)) continue;
    base::MutexLock lock(mutex_);
    send(MessageType::kImageUnmapped, news.image);
  }
}

std::string encode_layers(std::span<const TableLayer> layers) {
  std::string out;
  put(out, kTableMark);
  put(out, static_cast<uint64_t>(layers.size()));
  for (const TableLayer& layer : layers) {
    put(out, layer.offset_bytes);
    put(out, layer.bytes);
    put(out, static_cast<uint32_t>(layer.name.size()));
    out += layer.name;
  }
  return out;
}

base::Result<std::vector<TableLayer>> parse_layers(std::string_view table, uint64_t image_bytes) {
  uint32_t mark = 0;
  uint64_t count = 0;
  if (!get(table, &mark) || !get(table, &count) || mark != kTableMark)
    return malformed("does not begin with its mark");
  if (count > kMaxLayers) return malformed("says that it has too many layers");
  std::vector<TableLayer> layers;
  for (uint64_t i = 0; i < count; ++i) {
    TableLayer layer;
    uint32_t length = 0;
    if (!get(table, &layer.offset_bytes) || !get(table, &layer.bytes) || !get(table, &length) ||
        length > table.size())
      return malformed("is cut");
    layer.name = table.substr(0, length);
    table.remove_prefix(length);
    if (layer.offset_bytes > image_bytes || layer.bytes > image_bytes - layer.offset_bytes)
      return malformed("has a layer outside the image");
    layers.push_back(std::move(layer));
  }
  if (!table.empty()) return malformed("has bytes behind its end");
  return layers;
}

}  // namespace gpushare::client
