// board.hpp: one page that the server and one worker share, so that waiting for a layer is a look at a counter,
// and at worst a sleep on it, without a message. The server writes; the worker reads, and counts its sleepers. Nothing
// that a worker writes here is trusted: it can only deceive itself.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.hpp"
#include "base/status.hpp"
#include "daemon/channel.hpp"

namespace gpushare::daemon {

class Board {
 public:
  // The server's: makes the page. The worker's: maps what came over the socket, MALFORMED_INPUT if it is no board.
  static base::Result<std::shared_ptr<Board>> create();
  static base::Result<std::shared_ptr<Board>> open(Descriptor file);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  int file() const { return file_.get(); }

  // ---- the server
  // A new turn: `arrived` layers are there, nothing has failed.
  void reset(uint32_t arrived);
  // Layers [0, arrived) are there. Wakes whoever sleeps.
  void set_arrived(uint32_t arrived);
  // The turn's load failed, or the worker was cut off: waits return `status` from now on.
  void fail(const base::Status& status);
  void set_wanted(bool wanted) { page_->wanted.store(wanted ? 1 : 0, std::memory_order_relaxed); }

  // ---- the worker
  uint32_t arrived() const { return page_->arrived.load(std::memory_order_acquire); }
  bool wanted() const { return page_->wanted.load(std::memory_order_relaxed) != 0; }
  base::Status failure() const;
  // Sleeps until more than `seen` layers are there, at most `at_most_ns`; may wake early.
  void sleep(uint32_t seen, uint64_t at_most_ns) const;

 private:
  struct Page {
    std::atomic<uint32_t> mark;
    std::atomic<uint32_t> arrived;
    std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> wanted;
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

}  // namespace gpushare::daemon
