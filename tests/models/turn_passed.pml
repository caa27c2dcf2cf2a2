/* A turn that passes between two processes without the daemon between them (src/client/lease.hpp, src/daemon/turns.cpp:
 * take_back_offers, offer). The first session has two turns; the second has one, or gives up while it waits; the daemon is woken by messages alone.
 * Shown: the two never have the turn at once, and each that waits gets it. A waiting thread is woken by a ring of its bell after it looked, or
 * by the listening thread; a wake-up that is missed is a deadlock here.
 *
 * With -DBLIND the daemon withdraws an offer without seeing whether it was passed. With -DLATE a thread looks at its bell only after it has
 * looked for its turn.
 * SPDX-License-Identifier: Apache-2.0 */
#define NONE 2
mtype = { FREE, IDLE, BUSY, WANTED, READY, NOT_READY, RETURNED };
byte epoch[2];          /* Lease::word_ */
mtype state[2] = FREE;
byte next[2];           /* Lease::next_: the epoch that the other is offered; 0: nobody */
byte rings[2];
bit expected[2];
bit granted[2];         /* a Granted message is on its way */
byte inside, done;
chan inbox[2] = [4] of { mtype };

#define CHANGE(who, e0, s0, e1, s1) \
  atomic { if :: epoch[who] == e0 && state[who] == s0 -> epoch[who] = e1; state[who] = s1; ok = true :: else -> ok = false fi }

/* RemoteAuthority::give_back */
inline give_back() {
  do
  :: d_step { e = epoch[me]; s = state[me] };
     if
     :: e != taken || s == FREE || s == IDLE -> break
     :: e == taken && s == BUSY -> CHANGE(me, e, BUSY, e, IDLE)
     :: e == taken && s == WANTED ->
        CHANGE(me, e, WANTED, e, FREE);
        if
        :: ok ->
           e = next[me];
           if :: e != 0 -> CHANGE(1 - me, e, FREE, e + 1, BUSY) :: else -> ok = false fi;
           if :: ok -> rings[1 - me]++ :: else fi;
           taken = 0;
           inbox[me]!RETURNED;
           break
        :: else
        fi
     fi
  od
}

proctype session(byte me) {
  byte turns, taken, seen, e;
  mtype s;
  bool ok, gives_up;
  do
  :: turns == 1 + (me == 0) || gives_up -> break
  :: else ->
     ok = false;
     if :: taken != 0 -> CHANGE(me, taken, IDLE, taken, BUSY) :: else fi;  /* it still has the turn */
     if
     :: ok
     :: else ->
        inbox[me]!READY;
        expected[me] = 1;
again:  skip;
#ifdef LATE
        d_step { e = epoch[me]; s = state[me] };
        seen = rings[me];
#else
        seen = rings[me];
        d_step { e = epoch[me]; s = state[me] };
#endif
        if
        :: e != taken && (s == BUSY || s == WANTED) -> taken = e
        :: else ->
           if
           :: atomic { granted[me] -> granted[me] = 0 }; goto again
           :: rings[me] != seen -> goto again
           :: me == 1 -> gives_up = true;  /* a begin that timed out: RuntimeImpl::withdraw */
              expected[me] = 0;
              inbox[me]!NOT_READY;
              d_step { e = epoch[me]; s = state[me] };
              if :: e != taken && (s == BUSY || s == WANTED) -> taken = e; give_back() :: else fi
           fi
        fi;
        expected[me] = 0
     fi;
     if
     :: !gives_up -> inside++; assert(inside == 1); inside--; turns++; give_back()
     :: else
     fi
  od;
  done++;
  /* The listening thread gives a turn back that comes now: accept_unwanted. */
end_listens:
  do
  :: atomic { granted[me] -> granted[me] = 0 };
     d_step { e = epoch[me]; s = state[me] };
     if :: e != taken && (s == BUSY || s == WANTED) -> taken = e :: else fi;
     give_back()
  od
}

byte holder = NONE, held, offered = NONE, offer, i;  /* of the daemon */
byte last[2];
bit ready[2];
bool ok_d, wanted;

#define CHANGE_D(who, e0, s0, e1, s1) \
  atomic { if :: epoch[who] == e0 && state[who] == s0 -> epoch[who] = e1; state[who] = s1; ok_d = true :: else -> ok_d = false fi }

inline take_back_offers() {
  if
  :: offered != NONE ->
#ifdef BLIND
     atomic { epoch[offered] = offer + 2; state[offered] = FREE }; ok_d = true;
#else
     CHANGE_D(offered, offer, FREE, offer + 2, FREE);
#endif
     if
     :: !ok_d -> holder = offered; held = offer + 1; ready[offered] = 0; wanted = false
     :: else
     fi;
     offered = NONE
  :: else
  fi
}

inline pump() {
  do
  :: holder != NONE && !wanted && ready[1 - holder] ->  /* want_back */
     if
     :: epoch[holder] != held || state[holder] == FREE -> holder = NONE
     :: else ->
        CHANGE_D(holder, held, IDLE, held, FREE);
        if
        :: ok_d -> holder = NONE
        :: else -> CHANGE_D(holder, held, BUSY, held, WANTED); if :: ok_d -> wanted = true :: else fi
        fi
     fi
  :: holder == NONE && (ready[0] || ready[1]) ->  /* grant */
     if :: ready[0] -> holder = 0 :: ready[1] -> holder = 1 fi;
     ready[holder] = 0;
     wanted = false;
     last[holder]++;
     held = last[holder];
     atomic { epoch[holder] = held; state[holder] = BUSY };
     if :: expected[holder] -> rings[holder]++ :: else -> granted[holder] = 1 fi
  :: else -> break
  od;
  if
  :: holder != NONE && wanted && ready[1 - holder] && expected[1 - holder] ->
     offered = 1 - holder;
     offer = last[offered] + 1;
     last[offered] = last[offered] + 2;
     atomic { epoch[offered] = offer; state[offered] = FREE };
     next[holder] = offer
  :: else
  fi
}

inline handle(who) {
  take_back_offers();
  if
  :: m == READY -> if :: holder == who -> granted[who] = 1 :: else -> ready[who] = 1 fi
  :: m == NOT_READY -> ready[who] = 0; if :: holder == who -> granted[who] = 1 :: else fi
  :: m == RETURNED ->
     if :: holder == who && (epoch[who] != held || state[who] == FREE) -> holder = NONE; wanted = false :: else fi
  fi;
  pump()
}

proctype daemon() {
  mtype m;
end_waits:
  do
  :: inbox[0]?m -> handle(0)
  :: inbox[1]?m -> handle(1)
  od
}

init { atomic { run daemon(); run session(0); run session(1) } }

ltl all_have_turns { <> (done == 2) }
