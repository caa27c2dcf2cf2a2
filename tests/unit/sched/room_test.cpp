// Who is asked for missing bytes, in which order, and who is served first.
// SPDX-License-Identifier: Apache-2.0
#include "sched/room.hpp"

#include <vector>

#include "support/catch.hpp"

namespace {

using namespace gpushare::sched;  // NOLINT
using Givers = std::vector<Giver>;

constexpr auto kHigh = SessionClass::kGuaranteed, kLow = SessionClass::kOpportunistic;

// Whom `need` asks until somebody gives.
Givers asked(Need& need, Giver gives, bool of_others = true) {
  Givers out;
  const bool any = need.ask(of_others, [&](Giver giver) {
    out.push_back(giver);
    return giver == gives;
  });
  CHECK(any == (!out.empty() && out.back() == gives));
  return out;
}

TEST_CASE("what nobody uses is asked for before what can be had in parts, and that before whole sessions") {
  Need guaranteed(kHigh, false, false);
  CHECK(guaranteed.parts_are_next());
  CHECK(asked(guaranteed, Giver::kHost) == Givers{Giver::kSpare, Giver::kRanges, Giver::kBlocks,
                                                  Giver::kSessions, Giver::kBoundaries, Giver::kOwner});
  Need spills(kHigh, false, true);
  CHECK_FALSE(spills.parts_are_next());
  CHECK(asked(spills, Giver::kBlocks) == Givers{Giver::kSpare, Giver::kHost, Giver::kRanges, Giver::kBlocks});
  // Others may have taken what whole sessions gave.
  CHECK(asked(spills, Giver::kSessions) == Givers{Giver::kSessions});
  CHECK(asked(spills, Giver::kSessions) == Givers{Giver::kSessions});
  Need opportunistic(kLow, false, false);
  CHECK_FALSE(opportunistic.parts_are_next());
  CHECK(asked(opportunistic, Giver::kBlocks) == Givers{Giver::kSpare, Giver::kSessions, Giver::kOwner});
}

TEST_CASE("a commit asks ranges until they have given, and never the host or the program") {
  Need guaranteed(kHigh, true, true);
  CHECK(asked(guaranteed, Giver::kRanges) == Givers{Giver::kSpare, Giver::kRanges});
  CHECK(asked(guaranteed, Giver::kRanges) == Givers{Giver::kRanges});
  CHECK(asked(guaranteed, Giver::kOwner) ==
        Givers{Giver::kRanges, Giver::kBlocks, Giver::kSessions, Giver::kBoundaries});
  Need opportunistic(kLow, true, false);
  CHECK(opportunistic.parts_are_next());
  CHECK(asked(opportunistic, Giver::kOwner) == Givers{Giver::kSpare, Giver::kRanges, Giver::kSessions});
}

TEST_CASE("nobody else is asked where a limit of the session's own is met") {
  Need need(kHigh, false, true);
  CHECK(asked(need, Giver::kSpare, false) == Givers{Giver::kHost, Giver::kOwner});
  CHECK(asked(need, Giver::kRanges) == Givers{Giver::kSpare, Giver::kRanges});
}

TEST_CASE("the class counts, then the use of the bytes, then the place in line") {
  const InLine in_order[] = {
      {kHigh, Use::kAllocation, 7}, {kHigh, Use::kAllocation, 8}, {kHigh, Use::kCommit, 2},
      {kHigh, Use::kCommit, 3},     {kHigh, Use::kCommit},        {kHigh, Use::kCache, 1},
      {kHigh, Use::kReturn, 0},     {kLow, Use::kAllocation, 1},  {kLow, Use::kCommit, 0},
      {kLow, Use::kCommit},         {kLow, Use::kCache, 0},       {kLow, Use::kReturn}};
  for (size_t a = 0; a < std::size(in_order); ++a)
    for (size_t b = 0; b < std::size(in_order); ++b)
      CHECK(served_before(in_order[a], in_order[b]) == (a < b));
}

}  // namespace
