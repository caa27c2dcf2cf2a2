// Images that the daemon shares: loads, waits for layers, who gives way, what a process may do with what it gets, a device
// that fails, and the ends of either side. unit_images_cuda is the same over the cuda backend, on the stand-in for its driver.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <thread>

#include "client/images.hpp"
#include "device/registry.hpp"
#include "executor/shared_image.hpp"
#include "support/bytes.hpp"
#include "support/model_folder.hpp"
#include "support/shared_service.hpp"
#include "unit/daemon/raw_connection.hpp"
#ifdef GPUSHARE_CUDA_STANDIN
#include "unit/device/cuda/standin_support.hpp"
#endif

using namespace gpushare;
using namespace gpushare::test;

namespace {

constexpr uint64_t kGranule = 64 << 10;  // of the device
constexpr uint64_t kOwn =
    2 * kMiB;  // that a Reader has without more: E in the granules of a session's memory
constexpr uint64_t kLong = 60'000'000'000;
#ifdef GPUSHARE_CUDA_STANDIN
const char kBackend[] = "cuda", kFailing[] = "failing_cuda";
const char kDeviceOptions[] = "?driver=" GPUSHARE_CUDA_STANDIN "&total_bytes=268435456";
#else
const char kBackend[] = "host", kFailing[] = "failing_host";
const char kDeviceOptions[] = "?total_bytes=268435456&granularity=65536";
#endif

// The service on the device of this program.
struct Shared : SharedService {
  explicit Shared(const std::function<void(daemon::ServiceOptions&)>& change = {})
      : SharedService([&](daemon::ServiceOptions& service_options) {
#ifdef GPUSHARE_CUDA_STANDIN
          static const bool configured = standin_configure("granularity_bytes", kGranule) == 0;
          REQUIRE(configured);
#endif
          service_options.devices = {std::string(kBackend) + kDeviceOptions};
          if (change) change(service_options);
        }) {
  }
#ifdef GPUSHARE_CUDA_STANDIN
  ~Shared() {  // readers are closed
    service.reset();
    standin_test::check_clean();
  }
#endif
};

struct Models {
  std::string make(const std::string& name, const std::vector<size_t>& sizes,
                   std::vector<std::string>* out_contents = nullptr) {
    return folder.make(name, sizes, random, out_contents);
  }
  ModelFolder folder;
  Random random{seed()};
};

// A runtime of its own, as a process has, with one session and images.
struct Reader {
  explicit Reader(const std::string& name, uint64_t p = 0, executor::SessionOptions options = {}) {
    runtime = SharedService::open();
    options.name = name;
    options.persistent_bytes = p;
    options.ephemeral_bytes = kOwn;
    session = open_session(*runtime, options);
  }
  ~Reader() {
    images.clear();
    session.reset();
    (void)runtime->close();
  }
  base::Status open(const std::string& path) {
    executor::SharedImageOptions options;
    options.path = path;
    options.timeout_ns = kLong;
    auto image = session->open_image(options);
    if (image.ok()) images.push_back(*image);
    return image.status();
  }
  std::shared_ptr<executor::Iteration> begin() {
    auto iteration = session->begin(kLong);
    INFO(iteration.status().to_string());
    REQUIRE(iteration.ok());
    return *iteration;
  }
  // One iteration that copies all layers of the image. For any thread: Catch2 asserts on one at a time.
  base::Result<std::vector<std::string>> read(size_t image = 0) {
    GPUSHARE_ASSIGN_OR_RETURN(const auto iteration, session->begin(kLong));
    GPUSHARE_ASSIGN_OR_RETURN(const auto stream, iteration->stream());
    std::vector<std::string> out;
    const auto layers = images[image]->layers();
    for (uint32_t i = 0; i < layers.size(); ++i) {
      GPUSHARE_RETURN_IF_ERROR(images[image]->wait(i, i + 1, kLong));
      std::string& layer = out.emplace_back(layers[i].bytes, '\0');
      GPUSHARE_RETURN_IF_ERROR(stream->copy(reinterpret_cast<uintptr_t>(layer.data()),
                                            images[image]->address() + layers[i].offset_bytes, layer.size(),
                                            GPUSHARE_COPY_DEVICE_TO_HOST));
    }
    GPUSHARE_RETURN_IF_ERROR(stream->synchronize());
    GPUSHARE_RETURN_IF_ERROR(iteration->end());
    return out;
  }
  std::vector<std::string> contents(size_t image = 0) {
    auto out = read(image);
    INFO(out.status().to_string());
    REQUIRE(out.ok());
    return std::move(*out);
  }
  std::shared_ptr<executor::Runtime> runtime;
  std::shared_ptr<executor::Session> session;
  std::vector<std::shared_ptr<executor::SharedImage>> images;
};

void small(daemon::ServiceOptions& options) {
  options.capacity_bytes = 12 * kMiB;
}

const std::vector<size_t> kFiveMiB = {1'600'000, 16'000, 1'600'000, 1'920'000};

}  // namespace

TEST_CASE("sessions of several processes read one copy of an image") {
  Shared shared;
  Models models;
  std::vector<std::string> contents;
  const std::string path = models.make("m.safetensors", kFiveMiB, &contents);
  Reader a("a"), b("b");
  REQUIRE_OK(a.open(path));
  REQUIRE_OK(b.open(path));
  CHECK(a.images[0]->wait(0, 1, 0).code() == GPUSHARE_INVALID_STATE);  // outside an iteration
  CHECK(a.images[0]->wait(3, 5, 0).code() == GPUSHARE_INVALID_ARGUMENT);
  for (int i = 0; i < 5; ++i) {
    CHECK(a.contents() == contents);
    CHECK(b.contents() == contents);
  }
  const auto now = shared.status();
  REQUIRE(now.images.size() == 1);
  CHECK(now.images[0].path == path);
  CHECK(now.images[0].device == shared.options.devices.front());
  CHECK(now.images[0].state == "resident");
  CHECK(now.images[0].kept_bytes == 0);
  CHECK(now.images[0].layers == kFiveMiB.size());
  CHECK(now.images[0].arrived == kFiveMiB.size());
  CHECK(now.images[0].loads == 1);
  CHECK(now.images[0].sessions == 2);
  CHECK(now.devices[0].images_bytes == now.images[0].bytes);
  CHECK(now.devices[0].promised_bytes == now.images[0].bytes + 2 * kOwn);
  a.images.clear();
  CHECK(b.contents() == contents);
  b.images.clear();
  eventually([&] { return shared.status().devices[0].images_bytes == 0; });
  CHECK(shared.status().images.empty());
}

TEST_CASE("a session alone keeps its turn with its image, without messages") {
  Shared shared;
  Models models;
  Reader a("a");
  REQUIRE_OK(a.open(models.make("m.safetensors", {1000, 2000})));
  (void)a.contents();
  const uint64_t turns = shared.status().devices[0].turns;
  for (int i = 0; i < 50; ++i) (void)a.contents();
  CHECK(shared.status().devices[0].turns == turns);
}

TEST_CASE("images that do not fit together take turns on the device") {
  // Room for one and a half.
  Shared shared(small);
  Models models;
  std::vector<std::string> contents[2];
  const std::string paths[] = {models.make("a.safetensors", kFiveMiB, &contents[0]),
                               models.make("b.safetensors", kFiveMiB, &contents[1])};
  Reader readers[] = {Reader("a"), Reader("b")};
  for (int i = 0; i < 2; ++i) REQUIRE_OK(readers[i].open(paths[i]));
  for (int turn = 0; turn < 10; ++turn) CHECK(readers[turn % 2].contents() == contents[turn % 2]);
  const auto now = shared.status();
  REQUIRE(now.images.size() == 2);
  CHECK(now.images[0].loads + now.images[1].loads == 10);
  CHECK(now.devices[0].promised_bytes <= 12 * kMiB);
  // Both at once: nobody starves, and every byte is right.
  std::atomic<int> wrong{0};
  std::thread other([&] {
    for (int i = 0; i < 20; ++i)
      if (const auto got = readers[1].read(); !got.ok() || *got != contents[1]) ++wrong;
  });
  for (int i = 0; i < 20; ++i)
    if (const auto got = readers[0].read(); !got.ok() || *got != contents[0]) ++wrong;
  other.join();
  CHECK(wrong == 0);
}

TEST_CASE("first layers stay where the rest has to go") {
  // 2 + 4.6 MiB each, of which the first layer is worth keeping; room for 10 of 13.2.
  Shared shared([](auto& options) { options.capacity_bytes = 10 * kMiB + 2 * kOwn; });
  Models models;
  std::vector<size_t> sizes = {2 * kMiB};
  for (int i = 0; i < 20; ++i) sizes.push_back(240'000);
  std::vector<std::string> contents[2];
  const std::string paths[] = {models.make("a.safetensors", sizes, &contents[0]),
                               models.make("b.safetensors", sizes, &contents[1])};
  Reader readers[] = {Reader("a"), Reader("b")};
  for (int i = 0; i < 2; ++i) REQUIRE_OK(readers[i].open(paths[i]));
  for (int turn = 0; turn < 6; ++turn) {
    CHECK(readers[turn % 2].contents() == contents[turn % 2]);
    const auto now = shared.status();
    if (turn > 0) CHECK(now.images[(turn + 1) % 2].kept_bytes >= 2 * kMiB);
    CHECK(now.devices[0].promised_bytes <= 10 * kMiB + 2 * kOwn);
  }
}

TEST_CASE("images give way to a session under every policy, and wait while a session has the room") {
  const std::string policy = GENERATE("fifo", "fair", "pack", "srtf", "priority");
  INFO(policy);
  if (policy == "fifo") return;  // one session at a time
  Shared shared([&](auto& options) {
    small(options);
    options.policy = policy;
  });
  Models models;
  std::vector<std::string> contents;
  const std::string path = models.make("m.safetensors", kFiveMiB, &contents);
  Reader a("a");
  REQUIRE_OK(a.open(path));
  CHECK(a.contents() == contents);
  {
    Reader large("large", 4 * kMiB);
    REQUIRE_OK(large.begin()->end());  // the image has gone for it
    CHECK(shared.status().images[0].state == "off");
    CHECK(shared.status().images[0].loads == 1);
  }
  CHECK(a.contents() == contents);
  CHECK(shared.status().images[0].loads == 2);
}

TEST_CASE("images give way to a growing session, and to a lower capacity") {
  Shared shared(small);
  Models models;
  std::vector<std::string> contents;
  Reader a("a"), b("b");
  REQUIRE_OK(a.open(models.make("m.safetensors", kFiveMiB, &contents)));
  CHECK(a.contents() == contents);
  REQUIRE_OK(b.session->alloc(memory::Kind::kModel, 5 * kMiB, 0).status());
  CHECK(shared.status().images[0].state == "off");
  REQUIRE_OK(b.session->close());
  CHECK(a.contents() == contents);
  REQUIRE_OK(client::set_service_capacity(shared.options.socket, "", 4 * kMiB));
  eventually([&] { return shared.status().devices[0].effective_capacity_bytes == 4 * kMiB; });
  CHECK(a.runtime->info()->capacity_bytes == 4 * kMiB);
  CHECK(a.session->begin(1'000'000).status().code() == GPUSHARE_TIMED_OUT);
  CHECK(client::set_service_capacity(shared.options.socket, "", 13 * kMiB).code() ==
        GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(client::set_service_capacity(shared.options.socket, "no", 0).code() == GPUSHARE_NOT_FOUND);
  REQUIRE_OK(client::set_service_capacity(shared.options.socket, "", 0));
  CHECK(a.contents() == contents);
}

TEST_CASE("images that cannot be are refused by name") {
  Shared shared(small);
  Models models;
  Reader a("a", 8 * kMiB);
  CHECK(a.open(models.folder.file("none")).code() == GPUSHARE_IO_ERROR);
  CHECK(a.open(models.folder.write("x.safetensors", "not a model")).code() == GPUSHARE_MALFORMED_INPUT);
  CHECK(a.open("").code() == GPUSHARE_INVALID_ARGUMENT);
  CHECK(a.open(models.make("m.safetensors", kFiveMiB)).code() == GPUSHARE_EXCEEDS_CAPACITY);
  CHECK(a.open(models.make("empty.safetensors", {0})).code() == GPUSHARE_INVALID_ARGUMENT);
  REQUIRE_OK(a.begin()->end());
  executor::RuntimeOptions own;
  own.device = "host?total_bytes=16777216";
  const auto runtime = executor::Runtime::open(std::move(own));
  REQUIRE(runtime.ok());
  const auto session = (*runtime)->open_session({});
  REQUIRE(session.ok());
  CHECK((*session)->open_image({}).status().code() == GPUSHARE_UNSUPPORTED);
  REQUIRE_OK((*runtime)->close());
}

TEST_CASE("without the daemon the image says so, and a new one shares it anew") {
  Shared shared;
  Models models;
  std::vector<std::string> contents;
  const std::string path = models.make("m.safetensors", {1000, 70'000}, &contents);
  Reader a("a");
  REQUIRE_OK(a.open(path));
  CHECK(a.contents() == contents);
  shared.service.reset();
  CHECK(a.open(path).code() == GPUSHARE_UNAVAILABLE);
  shared.start();
  eventually([&] {
    const auto begun = a.session->begin(0);
    if (begun.ok()) (void)(*begun)->end();
    return begun.status().code() != GPUSHARE_UNAVAILABLE;
  });
  a.images.clear();
  eventually([&] { return a.open(path).ok(); });
  CHECK(a.contents() == contents);
}

TEST_CASE("a session that leaves, or a runtime that closes, gives its images back") {
  Shared shared(small);
  Models models;
  std::vector<std::string> contents;
  const std::string path = models.make("m.safetensors", kFiveMiB, &contents);
  Reader a("a"), b("b");
  REQUIRE_OK(a.open(path));
  REQUIRE_OK(b.open(path));
  CHECK(a.contents() == contents);
  REQUIRE_OK(a.session->close());
  CHECK(b.contents() == contents);
  REQUIRE_OK(b.runtime->close());
  eventually([&] { return shared.status().images.empty(); });
  CHECK(a.images[0]->wait(0, 1, 0).code() == GPUSHARE_INVALID_STATE);
  // Not to 0: a runtime that closes has been seen to measure 1.06 MiB as its context's, with no session and no image left. Daemon
  // and processes are one process here; which memory that was is not known.
  eventually([&] {
    const auto device = shared.status().devices[0];
    return device.promised_bytes == device.context_bytes;
  });
}

// ---- a process that is not ours ----------------------------------------------------------------------------------

namespace {

// Has a session, number 1.
struct Raw : RawConnection {
  explicit Raw(const SharedService& shared) : RawConnection(shared) {
    REQUIRE(say(client::make_message<client::MessageType::kHello>()));
    (void)wait_for(client::MessageType::kWelcome);
    auto arrive = client::make_message<client::MessageType::kArrive>(1);
    arrive.session = 1;
    arrive.persistent_bytes = kGranule;
    arrive.flags = client::kMayQueue | client::kMayPage;
    REQUIRE(say(arrive));
    (void)wait_for(client::MessageType::kReply);
    descriptors.clear();  // the page of leases
  }
  void tell(client::MessageType type, uint64_t value = 0, uint64_t session = 1) const {
    RawConnection::tell(type, session, value);
  }
  void open(uint64_t image, const std::string& path) const {
    auto message = client::make_message<client::MessageType::kImageOpen>();
    message.session = 1;
    message.image = image;
    client::put_text(message.path, path);
    REQUIRE(say(message));
  }
  std::vector<std::byte> wait_for(client::MessageType type) {
    auto message = next({type}, &descriptors);
    REQUIRE(!message.empty());
    return message;
  }
  std::vector<client::Descriptor> descriptors;  // of all messages so far
};

}  // namespace

#ifndef GPUSHARE_CUDA_STANDIN  // descriptors of the driver are what the driver makes of them
TEST_CASE("what a process gets can be read and nothing else, by any user") {
  Shared shared(small);
  Models models;
  std::vector<std::string> contents;
  const std::string path = models.make("m.safetensors", {1000, 70'000}, &contents);
  Raw raw(shared);
  raw.open(7, path);
  const auto opened = client::fields_of<client::ImageOpened>(raw.wait_for(client::MessageType::kImageOpened));
  REQUIRE(opened.code == GPUSHARE_OK);
  CHECK(opened.image == 7);
  REQUIRE(raw.descriptors.size() == 2);
  const std::vector<client::Descriptor> about = std::exchange(raw.descriptors, {});
  raw.tell(client::MessageType::kReady);
  (void)raw.wait_for(client::MessageType::kImageHere);
  const std::vector<client::Descriptor> parts = std::exchange(raw.descriptors, {});
  REQUIRE_FALSE(parts.empty());
  (void)raw.wait_for(client::MessageType::kGranted);  // never before the image
  // No file may shrink or grow; the table and the image may not be written.
  for (const auto* files : {&about, &parts})
    for (const client::Descriptor& file : *files) {
      CHECK(ftruncate(file.get(), 0) != 0);
      CHECK(ftruncate(file.get(), 1 << 30) != 0);
    }
  CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, about[1].get(), 0) == MAP_FAILED);
  // A reader may be of the daemon's own user, or of another one that was handed the descriptor.
  const auto tries = [&]() -> int {
    const std::string again = "/proc/self/fd/" + std::to_string(parts[0].get());
    int failed = 0;
    for (const int number :
         {parts[0].get(), ::open(again.c_str(), O_RDWR), ::open(again.c_str(), O_RDONLY)}) {
      if (number < 0) continue;
      failed += mmap(nullptr, kGranule, PROT_READ | PROT_WRITE, MAP_SHARED, number, 0) != MAP_FAILED;
      failed += write(number, "x", 1) >= 0;
      failed += fallocate(number, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0;
      void* read = mmap(nullptr, kGranule, PROT_READ, MAP_SHARED, number, 0);
      if (read == MAP_FAILED) continue;
      failed += mprotect(read, kGranule, PROT_READ | PROT_WRITE) == 0;
    }
    return failed;
  };
  CHECK(tries() == 0);
  if (geteuid() == 0) {
    const pid_t child = fork();
    if (child == 0) {
      if (setgid(65534) != 0 || setuid(65534) != 0) _exit(100);
      _exit(tries());
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WEXITSTATUS(status) == 0);
  }
  // The board is its own: whatever it writes there, the daemon goes on.
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, about[0].get(), 0);
  REQUIRE(page != MAP_FAILED);
  std::memset(page, 0xff, 4096);
  munmap(page, 4096);
  // An old mapping shows this image and zeros, also when others have had the device meanwhile.
  eventually([&] { return shared.status().images[0].state == "resident"; });
  const auto* region =
      static_cast<const char*>(mmap(nullptr, kGranule, PROT_READ, MAP_SHARED, parts[0].get(), 0));
  REQUIRE(region != MAP_FAILED);
  const std::string first(region, contents[0].size());
  CHECK(first == contents[0]);
  raw.tell(client::MessageType::kImageClose, 7);
  raw.tell(client::MessageType::kLeave);
  std::vector<std::string> others;
  Reader b("b");
  REQUIRE_OK(b.open(models.make("b.safetensors", kFiveMiB, &others)));
  CHECK(b.contents() == others);
  CHECK(std::memcmp(region, contents[0].data(), contents[0].size()) == 0);
  munmap(const_cast<char*>(region), kGranule);
}
#endif

TEST_CASE("messages about images in any order harm nobody") {
  Shared shared(small);
  Models models;
  std::vector<std::string> contents;
  const std::string path = models.make("m.safetensors", {1000, 2000}, &contents);
  Reader b("b");
  REQUIRE_OK(b.open(path));
  {
    Raw raw(shared);
    raw.tell(client::MessageType::kImageUnmapped, 5);
    raw.tell(client::MessageType::kImageClose, 5);
    raw.open(0, path);
    CHECK(client::fields_of<client::ImageOpened>(raw.wait_for(client::MessageType::kImageOpened)).code ==
          GPUSHARE_INVALID_ARGUMENT);
    raw.open(1, "relative");
    CHECK(client::fields_of<client::ImageOpened>(raw.wait_for(client::MessageType::kImageOpened)).code ==
          GPUSHARE_INVALID_ARGUMENT);
    raw.open(1, path);
    CHECK(client::fields_of<client::ImageOpened>(raw.wait_for(client::MessageType::kImageOpened)).code ==
          GPUSHARE_OK);
    raw.open(1, path);
    CHECK(client::fields_of<client::ImageOpened>(raw.wait_for(client::MessageType::kImageOpened)).code ==
          GPUSHARE_INVALID_ARGUMENT);
    raw.open(2, path);
    raw.tell(client::MessageType::kImageClose, 2);  // while it is being read
    raw.tell(client::MessageType::kImageUnmapped, 1);
    raw.tell(client::MessageType::kReady);
    raw.tell(client::MessageType::kNotReady);
    raw.tell(client::MessageType::kReady);
    (void)raw.wait_for(client::MessageType::kImageHere);
    (void)raw.wait_for(client::MessageType::kGranted);
    raw.tell(client::MessageType::kImageClose, 1);  // inside its turn
    raw.tell(client::MessageType::kLeave);
  }
  CHECK(b.contents() == contents);
  // The daemon's side of a process that sends an operator's message, and of one that sends the daemon's.
  Raw raw(shared);
  raw.tell(client::MessageType::kImageGone, 1);
  CHECK(client::fields_of<client::Reply>(raw.wait_for(client::MessageType::kReply)).code ==
        GPUSHARE_MALFORMED_INPUT);
  CHECK(b.contents() == contents);
}

namespace {

// A process of its own that opens the image, gets the turn and does not let go of it: by raw system calls, since no thread of
// the parent is there. Returns once it has said `last`, or closed its connection.
struct Holder {
  Holder(const SharedService& shared, const std::string& path, std::optional<client::MessageType> last) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    child = fork();
    if (child == 0) run(shared, path, last, ends[1]);
    char byte = 0;
    REQUIRE(read(ends[0], &byte, 1) == 1);
    close(ends[0]);
    close(ends[1]);
  }
  [[noreturn]] static void run(const SharedService& shared, const std::string& path,
                               std::optional<client::MessageType> last, int out) {
    auto connected = client::connect_to(shared.options.socket);
    if (!connected.ok()) _exit(1);
    client::Descriptor socket = std::move(*connected);
    const auto say = [&](const auto& message) {
      (void)client::send_message(socket.get(), client::bytes_of(message));
    };
    say(client::make_message<client::MessageType::kHello>());
    auto arrive = client::make_message<client::MessageType::kArrive>(1);
    arrive.session = 1;
    say(arrive);
    auto open = client::make_message<client::MessageType::kImageOpen>();
    open.session = open.image = 1;
    client::put_text(open.path, path);
    say(open);
    std::vector<std::byte> buffer(client::kMaxMessageBytes + 64);
    for (;;) {
      std::vector<client::Descriptor> descriptors;
      (void)client::wait_readable(socket.get(), base::Deadline::after(kLong));
      const auto message = client::receive_message(socket.get(), buffer, &descriptors);
      if (!message.ok()) continue;
      const auto type = client::check_message(*message, client::Side::kDaemon);
      if (type.ok() && *type == client::MessageType::kImageOpened)
        say(client::make_session_message(client::MessageType::kReady, 1));
      if (type.ok() && *type == client::MessageType::kGranted) break;
    }
    if (last)
      say(client::make_session_message(*last, 1));
    else
      socket = {};
    (void)!write(out, "x", 1);
    for (;;) pause();
  }
  // The signal that ended it.
  int wait() const {
    int status = 0;
    waitpid(child, &status, 0);
    return WTERMSIG(status);
  }
  pid_t child = 0;
};

}  // namespace

TEST_CASE("a process that has gone with an image mapped owes it until it is dead") {
  Shared shared(small);
  Models models;
  const Holder holder(shared, models.make("m.safetensors", kFiveMiB), std::nullopt);
  eventually([&] {
    const auto now = shared.status();
    return now.processes.size() == 1 && now.processes[0].state == "owing";
  });
  Reader large("large", 6 * kMiB);
  CHECK(large.session->begin(20'000'000).status().code() == GPUSHARE_TIMED_OUT);
  kill(holder.child, SIGKILL);
  (void)holder.wait();
  REQUIRE_OK(large.begin()->end());
}

TEST_CASE("first layers that a dead process had mapped do not go without the rest") {
  // An image of 2 + 4.6 MiB, of which the first layer is worth keeping.
  Shared shared(small);
  Models models;
  std::vector<size_t> sizes = {2 * kMiB};
  for (int i = 0; i < 20; ++i) sizes.push_back(240'000);
  std::vector<std::string> contents;
  const std::string path = models.make("m.safetensors", sizes, &contents);
  const Holder holder(shared, path, std::nullopt);
  eventually([&] {
    const auto now = shared.status();
    return now.processes.size() == 1 && now.processes[0].state == "owing";
  });
  Reader b("b");
  REQUIRE_OK(b.open(path));
  {
    Reader large("large", 4 * kMiB);  // the bytes of the first layer would do
    CHECK(large.session->begin(20'000'000).status().code() == GPUSHARE_TIMED_OUT);
    kill(holder.child, SIGKILL);
    (void)holder.wait();
    REQUIRE_OK(large.begin()->end());
  }
  CHECK(b.contents() == contents);
}

TEST_CASE("a process that never lets go of an image is killed where the operator allows that") {
  Shared shared([](auto& options) {
    small(options);
    options.lease_ns = 20'000'000;
    options.kill_overdue = true;
  });
  Models models;
  // Its session leaves, so that nothing else is overdue.
  const Holder holder(shared, models.make("m.safetensors", kFiveMiB), client::MessageType::kLeave);
  CHECK(holder.wait() == SIGKILL);
  Reader large("large", 6 * kMiB);
  REQUIRE_OK(large.begin()->end());
  CHECK(shared.status().devices[0].cut_off == 0);
}

// ---- a device that fails: the backend's ops with some of them failing on demand -----------------------------------

namespace {

std::atomic<int> g_create_fails{0}, g_map_fails{0}, g_export_fails{0}, g_import_fails{0}, g_copy_fails{0};
bool takes(std::atomic<int>& count) {
  return count.load() > 0 && count.fetch_sub(1) == 1;  // the count-th call fails
}

void register_failing() {
  static const bool done = [] {
    static const gpushare_backend_ops* real = device::find_backend(kBackend);
    static gpushare_backend_ops ops = *real;
    ops.name = kFailing;
    ops.phys_create_shared = [](gpushare_backend_device* device, uint64_t bytes,
                                gpushare_backend_memory** out) {
      return takes(g_create_fails) ? GPUSHARE_DEVICE_OUT_OF_MEMORY
                                   : real->phys_create_shared(device, bytes, out);
    };
    ops.va_map = [](gpushare_backend_device* device, gpushare_device_address address, uint64_t bytes,
                    gpushare_backend_memory* memory, uint64_t offset) {
      return takes(g_map_fails) ? GPUSHARE_DEVICE_OUT_OF_MEMORY
                                : real->va_map(device, address, bytes, memory, offset);
    };
    ops.phys_export = [](gpushare_backend_device* device, gpushare_backend_memory* memory, uint32_t access,
                         int32_t* out) {
      return takes(g_export_fails) ? GPUSHARE_IO_ERROR : real->phys_export(device, memory, access, out);
    };
    ops.phys_import = [](gpushare_backend_device* device, int32_t descriptor, uint64_t bytes, uint32_t access,
                         gpushare_backend_memory** out) {
      return takes(g_import_fails) ? GPUSHARE_IO_ERROR
                                   : real->phys_import(device, descriptor, bytes, access, out);
    };
    ops.copy_async = [](gpushare_backend_stream* stream, uint64_t to, uint64_t from, uint64_t bytes,
                        uint32_t kind) {
      return takes(g_copy_fails) ? GPUSHARE_UNKNOWN : real->copy_async(stream, to, from, bytes, kind);
    };
    return device::register_backend(&ops).ok();
  }();
  REQUIRE(done);
}

}  // namespace

TEST_CASE("a failing device fails the waits of that turn, and the next turn tries again") {
  register_failing();
  Shared shared([](auto& options) {
    options.devices = {std::string(kFailing) + kDeviceOptions};
    options.capacity_bytes = 16 * kMiB;
  });
  Models models;
  std::vector<std::string> contents;
  const std::string path = models.make("m.safetensors", {1000, 2000, 3000, 100'000}, &contents);
  const auto fails = [&](std::atomic<int>& fault, int32_t code) {
    Reader reader("reader");
    const auto iteration = reader.begin();
    fault = 1;
    REQUIRE_OK(reader.open(path));  // loaded at once, for the iteration that is open
    const base::Status waited = reader.images[0]->wait(0, 4, kLong);
    INFO(waited.to_string());
    CHECK(waited.code() == code);
    CHECK(fault == 0);
    REQUIRE_OK(iteration->end());
    eventually([&] {  // though nobody else wants the turn, it goes back and comes again
      const auto again = reader.begin();
      const bool there = reader.images[0]->wait(0, 4, kLong).ok();
      REQUIRE_OK(again->end());
      return there;
    });
    CHECK(reader.contents() == contents);
  };
  fails(g_create_fails, GPUSHARE_DEVICE_OUT_OF_MEMORY);
  fails(g_export_fails, GPUSHARE_IO_ERROR);
  fails(g_import_fails, GPUSHARE_IO_ERROR);
  fails(g_copy_fails, GPUSHARE_UNKNOWN);
}

TEST_CASE("a first layer that stayed is there still when the load of the rest cannot start") {
  register_failing();
  // Room for the first layer of a beside b, and not for both images.
  Shared shared([](auto& options) {
    options.devices = {std::string(kFailing) + kDeviceOptions};
    options.capacity_bytes = 10 * kMiB + 2 * kOwn;
  });
  Models models;
  const size_t first_bytes = 104 * kGranule;
  std::vector<std::string> contents;
  Reader a("a"), b("b");
  REQUIRE_OK(a.open(models.make("a.safetensors", {first_bytes, kGranule + 1}, &contents)));
  REQUIRE_OK(b.open(models.make("b.safetensors", {55 * kGranule})));
  CHECK(a.contents() == contents);
  (void)b.contents();
  REQUIRE(shared.status().images[0].kept_bytes == first_bytes);
  g_copy_fails = 1;
  {
    const auto iteration = a.begin();
    CHECK(a.images[0]->wait(0, 2, kLong).code() == GPUSHARE_UNKNOWN);
    CHECK(g_copy_fails == 0);
    CHECK(shared.status().images[0].kept_bytes == first_bytes);
    REQUIRE_OK(iteration->end());
  }
  CHECK(a.contents() == contents);
}

TEST_CASE("a session that is asked for its turn because its image failed is cut off only if another waits") {
  register_failing();
  Shared shared([](auto& options) {
    options.devices = {std::string(kFailing) + kDeviceOptions};
    options.capacity_bytes = 16 * kMiB;
    options.lease_ns = 50'000'000;
  });
  Models models;
  Reader a("a"), b("b");
  const auto iteration = a.begin();
  g_create_fails = 1;
  REQUIRE_OK(a.open(models.make("m.safetensors", {1000, 2000})));
  REQUIRE_FALSE(a.images[0]->wait(0, 2, kLong).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(150));  // longer than the lease
  CHECK(shared.status().devices[0].cut_off == 0);
  REQUIRE_OK(b.begin()->end());
  CHECK(shared.status().devices[0].cut_off == 1);
  (void)iteration->end();
}
