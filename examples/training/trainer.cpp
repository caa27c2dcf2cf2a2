// SPDX-License-Identifier: Apache-2.0
#include "trainer.hpp"

#include <stdexcept>

#include "host_math.hpp"

namespace training {
namespace {

template <class T>
std::vector<T> converted(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

}  // namespace

template <class T>
Trainer<T>::Trainer(const TrainerOptions& options, std::unique_ptr<Math<T>> math)
    : options_(options), math_(std::move(math)), network_(make_network<T>(options.network)) {
  if (options.batch < 1 || options.batches < 1 || options.kept_losses < 1)
    throw std::invalid_argument("batch, batches and kept_losses are at least 1");
  data_ = make_data(options.network, options.batch * options.batches, options.seed);
  std::vector<double> values, state;
  network_.initialise(options.seed, &values, &state);
  first_values_ = converted<T>(values);
  first_state_ = converted<T>(state);
  inputs_host_ = converted<T>(data_.inputs);
}

template <class T>
std::vector<typename Trainer<T>::Block> Trainer<T>::blocks() {
  const size_t values = first_values_.size() * sizeof(T);
  std::vector<Block> all = {
      {gpushare::Kind::model, values, first_values_.data(), &values_},
      {gpushare::Kind::model, values, nullptr, &momentum_},
      {gpushare::Kind::framework, values, nullptr, &gradients_},
      {gpushare::Kind::framework, inputs_host_.size() * sizeof(T), inputs_host_.data(), &inputs_},
      {gpushare::Kind::framework, data_.labels.size() * sizeof(int32_t), data_.labels.data(), &labels_},
      {gpushare::Kind::framework, static_cast<size_t>(options_.kept_losses) * sizeof(T), nullptr,
       reinterpret_cast<void**>(&losses_)},
  };
  if (!first_state_.empty())
    all.push_back({gpushare::Kind::model, first_state_.size() * sizeof(T), first_state_.data(), &state_});
  if (math_->workspace_bytes() > 0)
    all.push_back({gpushare::Kind::framework, math_->workspace_bytes(), nullptr, &workspace_});
  return all;
}

template <class T>
size_t Trainer<T>::persistent_bytes() {
  size_t bytes = 0;
  for (const Block& block : blocks()) bytes += (block.bytes + 255) / 256 * 256;
  return bytes;
}

template <class T>
void Trainer<T>::prepare(const Allocate& allocate, const Upload& upload) {
  for (const Block& block : blocks()) {
    *block.address = allocate(block.kind, block.bytes);
    if (block.address == &workspace_) continue;  // nobody reads it before the library has written it
    const std::vector<char> zeros(block.first == nullptr ? block.bytes : 0);
    upload(*block.address, block.first == nullptr ? zeros.data() : block.first, block.bytes);
  }
  math_->set_workspace(workspace_);
}

template <class T>
void Trainer<T>::train(const Queue& queue, const Scratch& scratch) {
  const int number = steps_ % options_.batches;
  const size_t samples = static_cast<size_t>(options_.batch) * static_cast<size_t>(number);
  math_->use(queue);
  const Pass<T> pass{
      *math_,         scratch, static_cast<T*>(values_), static_cast<T*>(gradients_), static_cast<T*>(state_),
      options_.batch, true};
  const T* logits =
      network_.forward(pass, static_cast<const T*>(inputs_) + samples * static_cast<size_t>(network_.inputs));
  T* dlogits = pass.make(static_cast<size_t>(options_.batch) * static_cast<size_t>(network_.classes));
  math_->cross_entropy(logits, static_cast<const int32_t*>(labels_) + samples,
                       losses_ + steps_ % options_.kept_losses, dlogits, options_.batch, network_.classes);
  network_.backward(pass, dlogits);
  math_->descend(static_cast<T*>(values_), static_cast<T*>(momentum_), static_cast<T*>(gradients_),
                 first_values_.size(), static_cast<T>(options_.rate), static_cast<T>(options_.momentum));
  ++steps_;
}

template <class T>
const T* Trainer<T>::infer(const Queue& queue, const Scratch& scratch, int number) {
  math_->use(queue);
  const Pass<T> pass{*math_,         scratch, static_cast<T*>(values_), nullptr, static_cast<T*>(state_),
                     options_.batch, false};
  return network_.forward(pass, static_cast<const T*>(inputs_) + static_cast<size_t>(options_.batch) *
                                                                     static_cast<size_t>(number) *
                                                                     static_cast<size_t>(network_.inputs));
}

template <class T>
const int32_t* Trainer<T>::labels(int number) const {
  return data_.labels.data() + static_cast<size_t>(options_.batch) * static_cast<size_t>(number);
}

template class Trainer<float>;
template class Trainer<double>;

std::vector<double> reference_losses(const TrainerOptions& options, int steps) {
  TrainerOptions kept = options;
  kept.kept_losses = steps;
  Trainer<double> trainer(kept, std::make_unique<HostMath<double>>());
  std::vector<std::unique_ptr<char[]>> blocks;
  const auto allocate = [&blocks](size_t bytes) {
    blocks.push_back(std::make_unique<char[]>(bytes));
    return static_cast<void*>(blocks.back().get());
  };
  trainer.prepare([&](gpushare::Kind, size_t bytes) { return allocate(bytes); },
                  [](void* to, const void* from, size_t bytes) {
                    std::copy_n(static_cast<const char*>(from), bytes, static_cast<char*>(to));
                  });
  const size_t persistent = blocks.size();
  const ImmediateQueue queue;
  for (int i = 0; i < steps; ++i) {
    trainer.train(queue, allocate);
    blocks.resize(persistent);
  }
  return {trainer.losses(), trainer.losses() + steps};
}

}  // namespace training
