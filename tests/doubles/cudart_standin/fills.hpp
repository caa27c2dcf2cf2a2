// The kernel with which PyTorch fills contiguous memory with one value, as torch.zeros and torch.full do. PyTorch 2.11
// launches it for zeros too; later versions call cudaMemsetAsync there. Its name alone tells its effect, so the
// stand-in can do it. Every other kernel is refused.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstring>
#include <regex>
#include <string>

namespace cudart_standin {

// Bytes of an element if `name` is that of
//   vectorized_elementwise_kernel<N, FillFunctor<T>, std::array<char*, 1>[, bool]>(int count, FillFunctor<T>,
//   std::array<char*, 1>)
// in namespace at::native, mangled; 0 for any other kernel, and for types that are not known here.
inline size_t filled_element_bytes(const std::string& name) {
  static const auto* const pattern = new std::regex(
      "_ZN2at6native29vectorized_elementwise_kernelILi[0-9]+ENS0_11FillFunctorI"
      "(?:([abh]|N3c10[0-9]+Float8_\\w+?E)|([st]|N3c104HalfE|N3c108BFloat16E)|([ijf])|([lmd]))"
      "EESt5arrayIPcLm1EE(?:Lb[01]E)?EEviT0_T1_");
  std::smatch found;
  if (!std::regex_match(name, found, *pattern)) return 0;
  for (const size_t power : {0u, 1u, 2u, 3u})
    if (found[power + 1].matched) return size_t{1} << power;
  return 0;
}

struct Fill {
  void* to;
  size_t bytes;
  std::string value;  // one element
  bool one_byte() const { return value.find_first_not_of(value[0]) == std::string::npos; }
};

// The fill of a launch with these arguments: a count, the value, and the one address.
inline Fill fill_of(void** arguments, size_t element_bytes) {
  int count = 0;
  Fill fill{nullptr, 0, std::string(element_bytes, '\0')};
  std::memcpy(&count, arguments[0], sizeof(count));
  std::memcpy(fill.value.data(), arguments[1], element_bytes);
  std::memcpy(&fill.to, arguments[2], sizeof(fill.to));
  fill.bytes = static_cast<size_t>(count) * element_bytes;
  return fill;
}

}  // namespace cudart_standin
