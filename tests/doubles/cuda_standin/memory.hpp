// memory.hpp: what blocks (memory.cpp) and virtual memory (virtual_memory.cpp) share: addresses, and who had them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "world.hpp"

namespace standin {

std::string hex(uint64_t value);

// Address space with `protection`, a guard page behind it; 0 if the system has none.
uint64_t place(uint64_t bytes, uint64_t alignment, int protection);
void unplace(uint64_t address, uint64_t bytes);
// The same for addresses of the device: their storage, which has the protection, is elsewhere if the host may not touch them.
uint64_t place_on_device(uint64_t bytes, uint64_t alignment, int protection);
void unplace_on_device(uint64_t address, uint64_t bytes);

// What is in new memory: of a file from `offset` on, or at an address.
void fill_new(int file, uint64_t offset, uint64_t bytes);
void fill_new(uint64_t address, uint64_t bytes);
// Takes or gives back memory of a device, as the driver counts it. False: there is not so much.
bool take_memory(int device, uint64_t bytes);
void give_memory(int device, uint64_t bytes);

// Remembers how a range went, for the message when it is used again; until the system hands its addresses out again.
void bury(uint64_t address, uint64_t bytes, const std::string& how);
void unbury(uint64_t address, uint64_t bytes);

// The block or mapping that `address` lies in; null if none.
Block* block_at(uint64_t address);
// The bytes of the device that this process has, its contexts' too.
uint64_t used_here(int device);
// The bytes of the device that nobody has.
uint64_t free_on(int device);
// Whether `clock` knows that `access` has finished.
bool covered(const Clock& clock, const Access& access);

}  // namespace standin
