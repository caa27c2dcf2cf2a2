// flat_hash.hpp: the hash tables of the project: open addressing, no node per element; references are
// invalidated by growth. Boost's and not Abseil's: these are headers only, while the archives of Abseil that
// distributions ship are not position-independent where hash tables are concerned and cannot be linked into a
// shared library.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/unordered/unordered_flat_map.hpp>
#include <boost/unordered/unordered_flat_set.hpp>

namespace gpushare::base {

template <class Key, class Value>
using FlatHashMap = boost::unordered_flat_map<Key, Value>;

template <class Key>
using FlatHashSet = boost::unordered_flat_set<Key>;

}  // namespace gpushare::base
