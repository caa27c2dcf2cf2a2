// arrays.cpp: arrays count by their shape and format.
// SPDX-License-Identifier: Apache-2.0
#include "shim/charged.hpp"

namespace gpushare::shim {
namespace {

// Bits of an element, all channels; formats above 0x20 name their channels themselves.
uint64_t element_bits(uint32_t format, uint32_t channels) {
  switch (format) {
    case 0x01:
    case 0x08:
      return 8 * channels;  // 8-bit integers
    case 0x02:
    case 0x09:
    case 0x10:
      return 16 * channels;  // 16-bit integers, half
    case 0x03:
    case 0x0a:
    case 0x20:
      return 32 * channels;  // 32-bit integers, float
    case 0xc0:
    case 0xc6:
      return 8;  // normalised 8-bit, 1 channel
    case 0xc1:
    case 0xc7:
    case 0xc3:
    case 0xc9:
      return 16;  // 8-bit 2, 16-bit 1
    case 0xc2:
    case 0xc8:
    case 0xc4:
    case 0xca:
      return 32;  // 8-bit 4, 16-bit 2
    case 0xc5:
    case 0xcb:
      return 64;  // 16-bit 4
    case 0x91:
    case 0x92:
    case 0x97:
    case 0x98:
      return 4;  // BC1, BC4: 8 bytes for 16 texels
    case 0x93:
    case 0x94:
    case 0x95:
    case 0x96:
    case 0x99:
    case 0x9a:  // BC2, BC3, BC5 to BC7: 16 bytes
    case 0x9b:
    case 0x9c:
    case 0x9d:
    case 0x9e:
      return 8;
    case 0xb0:
    case 0xb2:
      return 24;  // planar 8-bit video
    default:
      return 32 * (channels == 0 ? 1 : channels);
  }
}

template <class Word>
struct ArrayShape {
  Word width, height;
  uint32_t format, channels;
};
template <class Word>
struct ArrayShape3 {
  Word width, height, depth;
  uint32_t format, channels, flags;
};
constexpr uint32_t kSparse = 0x40, kDeferredMapping = 0x80;

uint64_t array_bytes(uint64_t width, uint64_t height, uint64_t depth, uint64_t bits) {
  const uint64_t texels = product(product(width, height == 0 ? 1 : height), depth == 0 ? 1 : depth);
  const uint64_t all = product(texels, bits);
  return all == UINT64_MAX ? all : (all + 7) / 8;
}
template <class Word>
uint64_t array_bytes(const ArrayShape<Word>* shape) {
  return array_bytes(shape->width, shape->height, 1, element_bits(shape->format, shape->channels));
}
// Memory of sparse arrays and those mapped later is mapped by other calls, and counted there.
template <class Word>
uint64_t array_bytes(const ArrayShape3<Word>* shape) {
  if ((shape->flags & (kSparse | kDeferredMapping)) != 0) return 0;
  return array_bytes(shape->width, shape->height, shape->depth, element_bits(shape->format, shape->channels));
}
template <class Shape>
Result array(int entry, P out_array, P shape) {
  const auto call = [&] { return real(entry, out_array, shape); };
  if (shape == nullptr) return call();
  return charged<uint64_t>(Kind::array, current(), array_bytes(static_cast<const Shape*>(shape)), out_array,
                           call);
}

}  // namespace
}  // namespace gpushare::shim

using namespace gpushare::shim;  // NOLINT(google-build-using-namespace): the functions below have C linkage

#define HOOK(name) Result gpushare_hook_##name
extern "C" {

HOOK(cuArrayCreate)(P a, P b) {
  return array<ArrayShape<uint32_t>>(kEntry_cuArrayCreate, a, b);
}
HOOK(cuArrayCreate_v2)(P a, P b) {
  return array<ArrayShape<uint64_t>>(kEntry_cuArrayCreate_v2, a, b);
}
HOOK(cuArray3DCreate)(P a, P b) {
  return array<ArrayShape3<uint32_t>>(kEntry_cuArray3DCreate, a, b);
}
HOOK(cuArray3DCreate_v2)(P a, P b) {
  return array<ArrayShape3<uint64_t>>(kEntry_cuArray3DCreate_v2, a, b);
}
HOOK(cuArrayDestroy)(P a) {
  return freed(Kind::array, reinterpret_cast<uint64_t>(a), [&] { return real(kEntry_cuArrayDestroy, a); });
}
HOOK(cuMipmappedArrayCreate)(P a, P b, I c) {
  const auto call = [&] { return real(kEntry_cuMipmappedArrayCreate, a, b, c); };
  if (b == nullptr) return call();
  ArrayShape3<uint64_t> shape = *static_cast<const ArrayShape3<uint64_t>*>(b);
  uint64_t bytes = 0;
  for (uint32_t level = 0; level < c && level < 64; ++level) {
    const uint64_t more = array_bytes(&shape);
    bytes = more > UINT64_MAX - bytes ? UINT64_MAX : bytes + more;
    if (shape.width > 1) shape.width /= 2;
    if (shape.height > 1) shape.height /= 2;
    if (shape.depth > 1 && (shape.flags & 1U) == 0) shape.depth /= 2;  // layers (flag 1) do not shrink
  }
  return charged<uint64_t>(Kind::array, current(), bytes, a, call);
}
HOOK(cuMipmappedArrayDestroy)(P a) {
  return freed(Kind::array, reinterpret_cast<uint64_t>(a),
               [&] { return real(kEntry_cuMipmappedArrayDestroy, a); });
}
}
