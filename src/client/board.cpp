// SPDX-License-Identifier: Apache-2.0
#include "client/board.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "client/protocol.hpp"

namespace gpushare::client {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr uint32_t kBoardMark = 0x47505342;

}  // namespace

base::Result<std::shared_ptr<Board>> Board::map(Descriptor file) {
  void* page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (page == MAP_FAILED) return system_error(GPUSHARE_HOST_OUT_OF_MEMORY, "mapping an image's board");
  return std::shared_ptr<Board>(new Board(std::move(file), static_cast<Page*>(page)));
}

base::Result<std::shared_ptr<Board>> Board::create() {
  GPUSHARE_ASSIGN_OR_RETURN(Descriptor file,
                            make_page_file("gpushare-board", "an image's board", kPageBytes));
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<Board> board, map(std::move(file)));
  board->page_->mark.store(kBoardMark, std::memory_order_release);
  return board;
}

base::Result<std::shared_ptr<Board>> Board::open(Descriptor file) {
  if (page_file_bytes(file.get()) != kPageBytes)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "what came is no board of a daemon");
  GPUSHARE_ASSIGN_OR_RETURN(std::shared_ptr<Board> board, map(std::move(file)));
  if (board->page_->mark.load(std::memory_order_acquire) != kBoardMark)
    return base::Status(GPUSHARE_MALFORMED_INPUT, "what came is no board of a daemon");
  return board;
}

Board::~Board() {
  munmap(page_, kPageBytes);
}

void Board::wake() const {
  // All sequentially consistent, as in sleep(): either this sees the sleeper, or the sleeper sees the new count.
  if (page_->sleepers.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&page_->arrived), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Board::reset(uint32_t arrived) {
  page_->failure.store(GPUSHARE_OK, std::memory_order_relaxed);
  page_->arrived.store(arrived, std::memory_order_release);
}

void Board::set_arrived(uint32_t arrived) {
  page_->arrived.store(arrived, std::memory_order_seq_cst);
  wake();
}

void Board::fail(const base::Status& status) {
  const std::string& text = status.message();
  const size_t length = std::min(text.size(), sizeof(page_->failure_text) - 1);
  std::memcpy(page_->failure_text, text.data(), length);
  page_->failure_text[length] = '\0';
  page_->failure.store(status.code(), std::memory_order_seq_cst);
  wake();
}

base::Status Board::failure() const {
  const int32_t code = page_->failure.load(std::memory_order_acquire);
  if (code == GPUSHARE_OK) return {};
  return reported(
      code, std::string(page_->failure_text, strnlen(page_->failure_text, sizeof(page_->failure_text))));
}

void Board::sleep(uint32_t seen, uint64_t at_most_ns) const {
  page_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  const timespec timeout{static_cast<time_t>(at_most_ns / 1'000'000'000),
                         static_cast<long>(at_most_ns % 1'000'000'000)};
  // Returns at once if the count has moved on meanwhile.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&page_->arrived), FUTEX_WAIT, seen, &timeout, nullptr, 0);
  page_->sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace gpushare::client
