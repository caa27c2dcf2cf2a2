// SPDX-License-Identifier: Apache-2.0
#include "cluster/json.hpp"

#include <utility>

namespace gpushare::cluster {

Member::Member(const char* key, bool value) : key_(key), value_(value) {}
Member::Member(const char* key, double value) : key_(key), value_(value) {}
Member::Member(const char* key, int64_t value) : key_(key), value_(value) {}
Member::Member(const char* key, uint64_t value) : key_(key), value_(value) {}
Member::Member(const char* key, const char* value) : key_(key), value_(value) {}
Member::Member(const char* key, const std::string& value) : key_(key), value_(value) {}
Member::Member(const char* key, OrderedJson value) : key_(key), value_(std::move(value)) {}

OrderedJson object(std::initializer_list<Member> members) {
  OrderedJson out = OrderedJson::object();
  for (const Member& member : members) out[member.key_] = std::move(member.value_);
  return out;
}

}  // namespace gpushare::cluster
