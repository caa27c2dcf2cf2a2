// SPDX-License-Identifier: Apache-2.0
#include "job.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "cuda_math.hpp"
#include "host_math.hpp"

namespace training {
namespace {

gpushare::Address address_of(const void* pointer) {
  return static_cast<gpushare::Address>(reinterpret_cast<uintptr_t>(pointer));
}

gpushare::SessionOptions with_persistent(gpushare::SessionOptions options, size_t bytes) {
  options.persistent_bytes = std::max<uint64_t>(options.persistent_bytes, bytes + (1 << 20));
  return options;
}

}  // namespace

Scratch scratch_of(gpushare::Iteration& iteration) {
  return [&iteration](size_t bytes) { return static_cast<void*>(iteration.alloc<char>(bytes)); };
}

Job::Job(gpushare::Runtime& runtime, JobOptions options, std::unique_ptr<Math<float>> math)
    : trainer_(options.trainer, std::move(math)) {
  session_ = runtime.open_session(with_persistent(options.session, trainer_.persistent_bytes()));
  gpushare::Iteration iteration = session_.begin_iteration();
  const gpushare::Stream stream = iteration.stream();
  trainer_.prepare(
      [this](gpushare::Kind kind, size_t bytes) {
        return gpushare::detail::pointer<void>(session_.alloc_bytes(kind, bytes));
      },
      [&stream](void* to, const void* from, size_t bytes) {
        stream.copy_to_device(address_of(to), from, bytes);
        stream.synchronize();
      });
  iteration.end();
}

void Job::train() {
  gpushare::Iteration iteration = session_.begin_iteration();
  const StreamQueue queue(iteration.stream());
  trainer_.train(queue, scratch_of(iteration));
  iteration.end();
}

double Job::accuracy(int number) {
  const auto batch = static_cast<size_t>(trainer_.options().batch);
  const auto classes = static_cast<size_t>(trainer_.classes());
  std::vector<float> logits(batch * classes);
  gpushare::Iteration iteration = session_.begin_iteration();
  const StreamQueue queue(iteration.stream());
  const float* on_device = trainer_.infer(queue, scratch_of(iteration), number);
  iteration.stream().copy_to_host(logits.data(), address_of(on_device), logits.size() * sizeof(float));
  iteration.stream().synchronize();
  iteration.end();
  size_t right = 0;
  for (size_t i = 0; i < batch; ++i) {
    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i * classes);
    const auto best = std::max_element(row, row + static_cast<std::ptrdiff_t>(classes)) - row;
    if (best == trainer_.labels(number)[i]) ++right;
  }
  return static_cast<double>(right) / static_cast<double>(batch);
}

void Job::serve(int number) {
  gpushare::Iteration iteration = session_.begin_iteration();
  const StreamQueue queue(iteration.stream());
  (void)trainer_.infer(queue, scratch_of(iteration), number);
  iteration.stream().synchronize();
  iteration.end();
}

std::vector<float> Job::losses() {
  const int kept = std::min(trainer_.steps(), trainer_.options().kept_losses);
  std::vector<float> losses(static_cast<size_t>(kept));
  gpushare::Iteration iteration = session_.begin_iteration();
  if (kept > 0)
    iteration.stream().copy_to_host(losses.data(), address_of(trainer_.losses()),
                                    losses.size() * sizeof(float));
  iteration.stream().synchronize();
  iteration.end();
  return losses;
}

double tolerance(const std::string& network) {
  return network == "resnet" ? 0.05 : 0.01;
}

double distance(const std::vector<float>& losses, const std::vector<double>& reference) {
  if (losses.size() != reference.size()) return INFINITY;
  double most = 0;
  for (size_t i = 0; i < losses.size(); ++i) {
    // A loss near 0 is compared with 0.01.
    const double away = std::abs(losses[i] - reference[i]) / std::max(std::abs(reference[i]), 0.01);
    if (!(away <= most)) most = std::isnan(away) ? INFINITY : away;
  }
  return most;
}

std::unique_ptr<Math<float>> make_math(const std::string& device, const std::string& kind, bool allow_tf32) {
  const bool gpu = device.rfind("cuda", 0) == 0;
  if (kind == "host" || (kind == "auto" && !gpu)) return std::make_unique<HostMath<float>>();
  if (kind != "auto" && kind != "cuda")
    throw std::runtime_error("no operations '" + kind + "': auto, host or cuda");
  if (!gpu) throw std::runtime_error("operations on cuda need a cuda device; this is " + device);
  const char* named = std::getenv("GPUSHARE_TRAINING_CUDA");
  const char* path = named != nullptr && *named != '\0' ? named : "libtraining_cuda.so";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error(std::string("cannot open ") + path + ": " + dlerror() +
                             "; it is built where nvcc, cuBLAS and cuDNN are installed");
  const auto make = reinterpret_cast<MakeCudaMath>(dlsym(library, kMakeCudaMathName));
  if (make == nullptr) throw std::runtime_error(std::string(path) + " is not this example's library");
  const size_t colon = device.find(':');
  const int index = colon == std::string::npos ? 0 : std::atoi(device.c_str() + colon + 1);
  return std::unique_ptr<Math<float>>(make(index, allow_tf32));
}

}  // namespace training
