// order.hpp: the order in which tensors are used, from their names. Writers of safetensors files sort tensors by type and
// name, so "h.10" comes before "h.2" and an output's norm before the word embeddings; sent in that order, the
// first layer to execute arrives late.
//
// Names are taken apart at dots and slashes and compared part by part, under one another as in a tree of modules:
// names of inputs (embeddings, a stem, the first convolution) come first; blocks by their numbers, as numbers; names of outputs
// (a head, a classifier, the last norm) come last; an encoder before its decoder; attention before the layers that follow it; the
// rest by name. This is a rule of thumb: a wrong guess costs waiting, never a wrong byte. Give an order to be sure.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace gpushare::loader {

// The indices of `names` in that order; names that do not differ in these parts stay as they were.
std::vector<size_t> order_by_name(std::span<const std::string_view> names);

}  // namespace gpushare::loader
