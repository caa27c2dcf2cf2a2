// json.hpp: JSON objects as src/cluster, src/sim and the tool write them.
//
//   rows.push_back(object({{"name", job.name}, {"state", name_of(job.state)}, {"times", object({{"start_s", 0.5}})}}));
//
// nlohmann's own initialiser lists read the same, but compile code anew for each type and each length of text among the
// values: most of the time that the tool took to compile.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>

#include "cluster/fields.hpp"

namespace gpushare::cluster {

class Member {
 public:
  Member(const char* key, bool value);
  Member(const char* key, double value);
  Member(const char* key, int64_t value);
  Member(const char* key, uint64_t value);
  Member(const char* key, const char* value);
  Member(const char* key, const std::string& value);
  Member(const char* key, OrderedJson value);
  template <std::signed_integral T>
  Member(const char* key, T value) : Member(key, static_cast<int64_t>(value)) {}
  template <std::unsigned_integral T>
  Member(const char* key, T value) : Member(key, static_cast<uint64_t>(value)) {}

 private:
  friend OrderedJson object(std::initializer_list<Member> members);
  const char* key_;
  mutable OrderedJson value_;  // an initializer_list's elements are const, and values are moved out
};

// An object of the members, in that order.
OrderedJson object(std::initializer_list<Member> members);

}  // namespace gpushare::cluster
