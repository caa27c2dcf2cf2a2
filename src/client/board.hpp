// board.hpp: one page that the daemon and one process share for an image. A process waits for a layer by a look at the
// page's counter, and at worst by a sleep on it, without a message. The daemon writes the page. The process reads it,
// and counts its sleeping threads there. The daemon trusts nothing that the process writes: the process can only
// deceive itself.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/status.hpp"
#include "client/channel.hpp"

namespace gpushare::client {

class Board {
 public:
  // create() is the daemon's and makes the page. map() is the process's and maps the page that came over the socket.
  // Errors of map(): MALFORMED_INPUT (not a board).
  static base::Result<std::shared_ptr<Board>> create();
  static base::Result<std::shared_ptr<Board>> open(Descriptor file);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  int file() const { return file_.get(); }

  // ---- the daemon
  // Says that `arrived` layers are there, and that nothing has failed.
  void reset(uint32_t arrived);
  // Says that layers [0, arrived) are there. Wakes sleeping threads.
  void set_arrived(uint32_t arrived);
  // Says that the load failed: waits return `status` from now on.
  void fail(const base::Status& status);

  // ---- the process
  uint32_t arrived() const { return page_->arrived.load(std::memory_order_acquire); }
  base::Status failure() const;
  // Sleeps until more than `seen` layers are there, at most `at_most_ns`; may wake early.
  void sleep(uint32_t seen, uint64_t at_most_ns) const;

 private:
  struct Page {
    std::atomic<uint32_t> mark;
    std::atomic<uint32_t> arrived;
    std::atomic<uint32_t> sleepers;
    std::atomic<int32_t> failure;
    char failure_text[512];
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Page) <= 4096);
  Board(Descriptor file, Page* page) : file_(std::move(file)), page_(page) {}
  static base::Result<std::shared_ptr<Board>> map(Descriptor file);
  void wake() const;

  Descriptor file_;
  Page* page_;
};

}  // namespace gpushare::client
