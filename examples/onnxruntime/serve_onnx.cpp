// A small ONNX model answers requests with deadlines on the host device, beside a job that takes what is left. The model's weights and temporary
// tensors are memory of its session, with a limit that holds. docs/frameworks.md says how it is built.
//
//   example_serve_onnx MODEL.onnx      one input of numbers, one output; the first dimension of both is the batch
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdio>
#include <gpushare/allocator.hpp>
#include <gpushare/gpushare.hpp>
#include <gpushare/serving.hpp>
#include <memory>
#include <vector>

#include "../../bindings/onnxruntime/allocator.hpp"

namespace gs = gpushare;

namespace {

const OrtApi* const api = OrtGetApiBase()->GetApi(ORT_API_VERSION);

void check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw std::runtime_error(message);
}

// A model of ONNX Runtime whose memory is that of a gpushare session.
class Model {
 public:
  Model(OrtEnv* env, const char* path, gs::Allocator& allocator, const gs::Session& session) {
    check(api->CreateSessionOptions(&options_));
    check(api->AddSessionConfigEntry(options_, "session.use_env_allocators", "1"));
    check(api->SetIntraOpNumThreads(options_, 1));  // the batch's own thread computes
    allocator.bind_thread(&session);                // whose the weights are
    OrtStatus* const status = api->CreateSession(env, path, options_, &model_);
    allocator.bind_thread(nullptr);
    check(status);
    check(api->GetAllocatorWithDefaultOptions(&names_));
    check(api->SessionGetInputName(model_, 0, names_, &input_));
    check(api->SessionGetOutputName(model_, 0, names_, &output_));
    check(api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory_));
  }
  ~Model() {
    names_->Free(names_, input_);
    names_->Free(names_, output_);
    api->ReleaseMemoryInfo(memory_);
    api->ReleaseSession(model_);
    api->ReleaseSessionOptions(options_);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Rows of two numbers in, one truth value for each out.
  void run(std::vector<float>& points, std::vector<bool>& answers) {
    const int64_t shape[] = {static_cast<int64_t>(points.size() / 2), 2};
    OrtValue *in = nullptr, *out = nullptr;
    check(api->CreateTensorWithDataAsOrtValue(memory_, points.data(), points.size() * sizeof(float), shape, 2,
                                              ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &in));
    OrtStatus* const status =
        api->Run(model_, nullptr, &input_, const_cast<const OrtValue* const*>(&in), 1, &output_, 1, &out);
    api->ReleaseValue(in);
    check(status);
    void* data = nullptr;
    OrtStatus* const read = api->GetTensorMutableData(out, &data);
    if (read == nullptr)
      for (size_t i = 0; i < points.size() / 2; ++i) answers.push_back(static_cast<const bool*>(data)[i]);
    api->ReleaseValue(out);  // it is memory of the iteration
    check(read);
  }

 private:
  OrtSessionOptions* options_ = nullptr;
  OrtSession* model_ = nullptr;
  OrtAllocator* names_ = nullptr;
  OrtMemoryInfo* memory_ = nullptr;
  char *input_ = nullptr, *output_ = nullptr;
};

constexpr uint64_t kRequests = 200;

float coordinate(uint64_t i) {
  return static_cast<float>(i * 37 % 101) / 42.0F - 1.2F;
}

bool in_the_ring(uint64_t id) {
  const float x = coordinate(2 * id), y = coordinate(2 * id + 1), radius = x * x + y * y;
  return radius > 0.25F && radius < 1.0F;
}

}  // namespace

int main(int count, char** arguments) try {
  if (count != 2) return std::puts("usage: example_serve_onnx MODEL.onnx"), 2;
  gs::RuntimeOptions device;
  device.device = "host";
  device.capacity_bytes = 256 << 20;
  gs::Runtime runtime = gs::Runtime::open(device);
  gs::SessionOptions limits;
  limits.name = "model";
  limits.quota_bytes = 16 << 20;  // weights and temporary tensors together
  limits.weight = 4;
  gs::Session session = runtime.open_session(limits);
  gs::Session other = runtime.open_session({"training"});
  gs::Allocator allocator(runtime);
  gs::OrtSessionAllocator memory(api, allocator.get());

  OrtEnv* env = nullptr;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "example", &env));
  const std::unique_ptr<OrtEnv, void (*)(OrtEnv*)> kept(env, api->ReleaseEnv);
  check(api->RegisterAllocator(env, &memory));
  Model model(env, arguments[1], allocator, session);
  std::printf("the model's weights are %llu bytes of its session\n",
              static_cast<unsigned long long>(session.info().persistent_bytes));

  std::vector<bool> right(kRequests);
  uint64_t in_time = 0;
  {
    gs::RequestQueue queue(runtime);
    const uint32_t number = queue.add_model(
        session,
        [&](gs::Iteration& iteration, const gs::RequestQueue::Batch& batch) {
          iteration.stream().synchronize();  // ONNX Runtime computes at once, not in stream order
          std::vector<float> points;
          std::vector<bool> answers;
          for (uint64_t i = 0; i < batch.count; ++i)
            for (uint64_t axis = 0; axis < 2; ++axis) points.push_back(coordinate(2 * batch.ids[i] + axis));
          model.run(points, answers);
          for (uint64_t i = 0; i < batch.count; ++i)
            right[batch.ids[i]] = answers[i] == in_the_ring(batch.ids[i]);
        },
        0, 1.0, {1, 4, 16});
    std::vector<gs::Ticket> training;
    for (int i = 0; i < 20; ++i)
      training.push_back(other.run([](gs::Iteration& step) { (void)step.alloc<float>(1 << 18); }));
    std::vector<std::future<gs::RequestQueue::Outcome>> answers;
    for (uint64_t id = 0; id < kRequests; ++id) {
      gpushare_request request = GPUSHARE_REQUEST_INIT;
      request.model = number;
      request.id = id;
      request.deadline_ns = gs::now_ns() + uint64_t{10'000'000'000};
      answers.push_back(queue.submit(request));
    }
    for (auto& answer : answers) {
      const gs::RequestQueue::Outcome outcome = answer.get();
      in_time += outcome.status == GPUSHARE_OK && outcome.finished_ns <= outcome.deadline_ns ? 1 : 0;
    }
    for (const gs::Ticket& ticket : training) ticket.get();
  }
  uint64_t correct = 0;
  for (const bool each : right) correct += each ? 1 : 0;
  std::printf("%llu of %llu answers in time, %llu right\n", static_cast<unsigned long long>(in_time),
              static_cast<unsigned long long>(kRequests), static_cast<unsigned long long>(correct));

  // A batch beyond the session's limit fails alone, with the reason.
  {
    std::vector<float> points(8 << 20);
    std::vector<bool> answers;
    gs::Iteration iteration = session.begin_iteration();
    try {
      model.run(points, answers);
      std::puts("the limit did not hold");
      return 1;
    } catch (const std::runtime_error& error) {
      std::printf("a batch of 4 million points: %s\n", error.what());
    }
  }
  return correct == kRequests ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
