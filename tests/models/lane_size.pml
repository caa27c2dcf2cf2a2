/* The size of a lane while it is fitted for an iteration that profiles (src/executor: LaneSet::fit, LaneSet::ensure_size, admit), on the
 * contiguous layout, where memory that was promised may lie in pieces. Sizes in MiB; a granule is 2. One thread searches the largest
 * size that can be had; another admits sessions whose need is not a whole granule. Shown: the search ends, whatever comes between its steps.
 *
 * With -DUNROUNDED the model is that of sizes noted as they were asked for, and halves taken in bytes: the search then has a cycle without progress.
 * SPDX-License-Identifier: Apache-2.0 */
#define GRANULE 2
#define WANTED 24 /* what the scheduler promises the lane */
#ifdef UNROUNDED
#define ROUNDED(bytes) (bytes)
#else
#define ROUNDED(bytes) (((bytes) + GRANULE - 1) / GRANULE * GRANULE)
#endif

byte size;      /* the range that memory has given, whole granules */
byte applied;   /* what the executor noted of it */
byte room;      /* the largest range to be had: others come and go */
bit size_mutex; /* LaneSlot::size_mutex */
bool searched;

#define LOCK(mutex) atomic { mutex == 0; mutex = 1 }
#define UNLOCK(mutex) mutex = 0

/* LaneImpl::set_size and what set_size of the executor notes. */
inline set_size(bytes, ok) {
  if
  :: (bytes + GRANULE - 1) / GRANULE * GRANULE <= room -> size = (bytes + GRANULE - 1) / GRANULE * GRANULE; applied = ROUNDED(bytes); ok = true
  :: else -> applied = size; ok = false
  fi
}

inline ensure_size(bytes, ok) {
  LOCK(size_mutex);
  if
  :: bytes <= applied -> ok = true
  :: else -> set_size(bytes, ok)
  fi;
  UNLOCK(size_mutex)
}

proctype search() {
  byte low, high, middle;
  bool ok;
  LOCK(size_mutex); /* apply_size: all of it at once, which need not be there */
  set_size(WANTED, ok);
  UNLOCK(size_mutex);
  if
  :: ok -> skip
  :: else ->
#ifdef UNROUNDED
     low = applied; high = WANTED;
     do
     :: high > low + GRANULE ->
        middle = low + (high - low) / 2 / GRANULE * GRANULE;
        ensure_size(middle, ok);
        if :: ok -> low = middle :: else -> high = middle fi
     :: else -> break
     od
#else
     low = applied / GRANULE; high = WANTED / GRANULE;
     do
     :: high > low + 1 ->
        middle = low + (high - low) / 2;
        ensure_size(middle * GRANULE, ok);
        if :: ok -> low = middle :: else -> high = middle fi
     :: else -> break
     od
#endif
  fi;
  searched = true
}

/* Sessions of any need that the promise covers are admitted, at any time. */
proctype admit() {
  byte needed, times;
  bool ok;
  do
  :: times < 2 ->
     times++;
     select(needed : 5 .. 13);
     ensure_size(ROUNDED(needed), ok)
  :: break
  od
}

init {
  byte granules;
  select(granules : 3 .. 11);
  room = granules * GRANULE;
  size = 6; applied = 6;
  atomic { run search(); run admit() }
}

ltl the_search_ends { <> searched }
