// The order that names tell, on the names of well-known models, as writers of safetensors files sort them.
// SPDX-License-Identifier: Apache-2.0
#include "loader/order.hpp"

#include <algorithm>
#include <string>

#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare;

namespace {

using Names = std::vector<std::string>;

Names ordered(const Names& names) {
  const std::vector<std::string_view> views(names.begin(), names.end());
  Names out;
  for (const size_t i : loader::order_by_name(views)) out.push_back(names[i]);
  return out;
}

// `wanted` comes out of any shuffle of itself.
void check(const Names& wanted) {
  test::Random random(test::seed());
  for (int round = 0; round < 20; ++round) {
    Names shuffled = wanted;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    CHECK(ordered(shuffled) == wanted);
  }
}

}  // namespace

TEST_CASE("blocks go by their numbers, inputs before them, outputs behind") {
  Names gpt = {"transformer.wpe.weight", "transformer.wte.weight"};
  for (int i = 0; i < 12; ++i)
    for (const char* part : {"attn.c_attn.weight", "ln_1.weight", "mlp.c_fc.weight"})
      gpt.push_back("transformer.h." + std::to_string(i) + "." + part);
  gpt.insert(gpt.end(), {"transformer.ln_f.bias", "transformer.ln_f.weight", "lm_head.weight"});
  check(gpt);
  Names llama = {"model.embed_tokens.weight"};
  for (int i = 0; i < 32; ++i)
    for (const char* part : {"input_layernorm.weight", "self_attn.q_proj.weight", "mlp.down_proj.weight"})
      llama.push_back("model.layers." + std::to_string(i) + "." + part);
  llama.insert(llama.end(), {"model.norm.weight", "lm_head.weight"});
  check(llama);
  check({"bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0.attention.self.query.weight",
         "bert.encoder.layer.0.intermediate.dense.weight", "bert.encoder.layer.0.output.dense.weight",
         "bert.encoder.layer.10.attention.self.query.weight", "bert.pooler.dense.weight",
         "classifier.weight"});
  check({"conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer1.0.bn1.weight",
         "layer1.1.conv1.weight", "layer2.0.conv1.weight", "layer10.0.conv1.weight", "fc.bias", "fc.weight"});
  check({"shared.weight", "encoder.block.0.layer.0.k", "encoder.block.11.layer.0.k",
         "encoder.final_layer_norm.weight", "decoder.embed_tokens.weight", "decoder.block.2.layer.0.k",
         "lm_head.weight"});
}

TEST_CASE("names that tell nothing, or are odd, keep their place and break nothing") {
  CHECK(ordered({}).empty());
  CHECK(ordered({"", "", "."}) == Names{"", "", "."});
  CHECK(ordered({"x.1", "x/1", "x.01"}) == Names{"x.1", "x/1", "x.01"});
  const std::string digits(400, '9');
  CHECK(ordered({digits, "a", "9"}).size() == 3);
  check({"t0", "t1", "t2", "t9", "t10", "t11", "t100"});
}
