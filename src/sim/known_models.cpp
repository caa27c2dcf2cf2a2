// The sources of the figures.
//
// Parameters of Salus's models: the papers and the reference implementations that they name (VGG: Simonyan
// and Zisserman, table 2, 133/138/144 M; AlexNet 61 M; GoogLeNet 7 M; Inception v3 23.8 M, v4 42.7 M;
// OverFeat fast 146 M; ResNet-50/101/152 25.6/44.5/60.2 M, torchvision's counts). vae, superres, speech and
// seq2seq are small: the floor of persistent memory rules them.
//
// Gavel's configurations: steps per second alone on a P100 are the "null" entries of its published table
// (repository stanford-futuredata/gavel, commit c4fa400). Parameters: ResNets as above; Transformer 65 M
// (Vaswani et al., base model); LM 14 M (PyTorch word_language_model, 2 x 200 LSTM on wikitext-2's 33,278
// words, untied); Recommendation 8.04 M (autoencoder 20,108
// - 200 - 20,108 on ML-20M); A3C 0.6 M; CycleGAN 28.3 M (two generators of 11.4 M, two discriminators of 2.8
// M). Ephemeral memory is not published: 300 MB of workspace plus activations per sample, estimated from the
// layers' shapes: ResNet-18 on CIFAR-10 6.5 MB, ResNet-50 76 MB (the slope of Salus's measured peaks between
// batch 50 and 75), Transformer 18 MB a sentence, LM 14 MB (35 tokens of softmax over the vocabulary),
// Recommendation 0.32 MB; A3C 200 MB and CycleGAN 4,000 MB in all.
// SPDX-License-Identifier: Apache-2.0
#include "sim/known_models.hpp"

#include <algorithm>
#include <array>

namespace gpushare::sim {
namespace {

constexpr std::array kSalus = {
    SalusModel{"alexnet", 61.1},    SalusModel{"googlenet", 7.0},  SalusModel{"inception3", 23.8},
    SalusModel{"inception4", 42.7}, SalusModel{"overfeat", 145.7}, SalusModel{"resnet50", 25.6},
    SalusModel{"resnet101", 44.5},  SalusModel{"resnet152", 60.2}, SalusModel{"vgg11", 132.9},
    SalusModel{"vgg16", 138.4},     SalusModel{"vgg19", 143.7},    SalusModel{"vae", 0.7},
    SalusModel{"superres", 0.1},    SalusModel{"speech", 26.0},    SalusModel{"seq2seq", 20.0},
};

constexpr std::array kGavel = {
    GavelConfig{"ResNet-18 (batch size 16)", 35.8692, 11.69, 404},
    GavelConfig{"ResNet-18 (batch size 32)", 35.8254, 11.69, 508},
    GavelConfig{"ResNet-18 (batch size 64)", 22.3049, 11.69, 716},
    GavelConfig{"ResNet-18 (batch size 128)", 11.6755, 11.69, 1132},
    GavelConfig{"ResNet-18 (batch size 256)", 7.72278, 11.69, 1964},
    GavelConfig{"ResNet-50 (batch size 16)", 9.05299, 25.56, 1516},
    GavelConfig{"ResNet-50 (batch size 32)", 4.88832, 25.56, 2732},
    GavelConfig{"ResNet-50 (batch size 64)", 2.61947, 25.56, 5164},
    GavelConfig{"ResNet-50 (batch size 128)", 1.58435, 25.56, 10028},
    GavelConfig{"Transformer (batch size 16)", 9.53725, 65, 588},
    GavelConfig{"Transformer (batch size 32)", 7.86922, 65, 876},
    GavelConfig{"Transformer (batch size 64)", 5.09183, 65, 1452},
    GavelConfig{"Transformer (batch size 128)", 3.07354, 65, 2604},
    GavelConfig{"Transformer (batch size 256)", 1.6777, 65, 4908},
    GavelConfig{"A3C", 5.68135, 0.6, 200},
    GavelConfig{"LM (batch size 5)", 90.7759, 14, 370},
    GavelConfig{"LM (batch size 10)", 77.0847, 14, 440},
    GavelConfig{"LM (batch size 20)", 58.1727, 14, 580},
    GavelConfig{"LM (batch size 40)", 35.7664, 14, 860},
    GavelConfig{"LM (batch size 80)", 21.1575, 14, 1420},
    GavelConfig{"Recommendation (batch size 512)", 48.8824, 8.04, 463.84},
    GavelConfig{"Recommendation (batch size 1024)", 30.7444, 8.04, 627.68},
    GavelConfig{"Recommendation (batch size 2048)", 16.5966, 8.04, 955.36},
    GavelConfig{"Recommendation (batch size 4096)", 8.89666, 8.04, 1610.72},
    GavelConfig{"Recommendation (batch size 8192)", 5.54844, 8.04, 2921.44},
    GavelConfig{"CycleGAN", 2.40267, 28.29, 4000},
};

template <class Table>
auto find_in(const Table& table, std::string_view name) -> decltype(table.data()) {
  const auto found =
      std::find_if(table.begin(), table.end(), [name](const auto& entry) { return entry.name == name; });
  return found == table.end() ? nullptr : &*found;
}

}  // namespace

const SalusModel* find_salus_model(std::string_view name) {
  return find_in(kSalus, name);
}
const GavelConfig* find_gavel_config(std::string_view name) {
  return find_in(kGavel, name);
}

}  // namespace gpushare::sim
