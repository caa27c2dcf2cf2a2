// Loading and switching through the C++ API.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstring>
#include <gpushare/gpushare.hpp>
#include <vector>

#include "check.hpp"

namespace gs = gpushare;

int main() {
  gs::RuntimeOptions options;
  options.device = "host";
  options.capacity_bytes = 32 << 20;
  gs::Runtime runtime = gs::Runtime::open(options);
  gs::Loader loader(runtime);
  loader.calibrate();
  check(loader.link().known == 1, "the link is known");
  const std::vector<float> weights(1000, 2.0F), bias(10, 1.0F);
  const gs::Image image =
      loader.create_image("m", {{"weights", weights.data(), weights.size() * sizeof(float)},
                                {"bias", bias.data(), bias.size() * sizeof(float)}});
  check(image.info().layers == 2 && image.find_layer("bias") == 1u && !image.find_layer("none"), "layers");
  image.report_execution(0, 2, std::chrono::milliseconds(1));
  check(image.layer(0).execution_ns > 0, "a reported time");
  check(status_of([&] { (void)loader.open_image("/nowhere.safetensors"); }) == GPUSHARE_IO_ERROR, "no file");
  {
    gs::SessionOptions need;
    need.persistent_bytes = need.ephemeral_bytes = 1 << 20;
    gs::Session session = runtime.open_session(need);
    gs::Model model = loader.load(session, image);
    gs::Iteration iteration = session.begin_iteration();
    const gs::Stream stream = iteration.stream();
    std::vector<float> back(10);
    model.make_usable(0, 2, stream);
    stream.copy_to_host(back.data(), model.layer(1).address, 40);
    model.mark_end(stream);
    stream.synchronize();
    check(back == bias && model.data<float>(1) != nullptr, "the bytes arrive");
    iteration.end();
    check(model.wait(1) && model.info().layers_arrived == 2, "all arrive");
    model.unload();
    check(!model, "unloaded");
  }
  gs::Switcher switcher(loader);
  gs::SessionOptions need;
  need.ephemeral_bytes = 1 << 20;
  const uint64_t a = switcher.add(image, need), b = switcher.add(image, need);
  for (const uint64_t member : {a, b, a}) {
    gs::Switcher::Turn turn = switcher.begin(member);
    turn.model.make_usable(0, 2, turn.iteration.stream());
    check(turn.iteration.alloc<float>(100) != nullptr, "an ephemeral block");
    check(status_of([&] { (void)switcher.begin(a, std::chrono::seconds(1)); }) == GPUSHARE_INVALID_STATE,
          "twice");
  }
  check(switcher.info().switches == 3 && switcher.member(b).state == GPUSHARE_MEMBER_KEPT, "switched");
  switcher.remove(b);
  check(status_of([&] { switcher.remove(b); }) == GPUSHARE_NOT_FOUND, "removed");
  switcher.close();
  check(runtime.info().promised_bytes == 0, "nothing is left");
  runtime.close();
  return failures == 0 ? 0 : 1;
}
