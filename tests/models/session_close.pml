/* Closing a session beside the worker that runs its iterations and a thread that cancels it (src/executor/session.cpp: close;
 * iteration.cpp: run_worker; section.cpp: Outbox::flush, destroy; failure.cpp: end_session). Two works were submitted: one runs, one is
 * queued. Shown: close returns, and by then both works are destroyed, though threads destroy them without the lock, at any time after they
 * let it go. Waiting gives the lock back and is ended by a later notification alone, as with a condition variable that never wakes without
 * reason: a wake-up that is missed is a deadlock here.
 *
 * With -DNOT_COUNTED close waits for memory alone, as it did before works were counted: it returns too early then. With -DNOT_TOLD the thread that destroys
 * the last work does not notify: close then waits for ever.
 * SPDX-License-Identifier: Apache-2.0 */
bit mutex;                       /* RuntimeImpl::mutex_ */
bool ended, open = true;         /* the session; an iteration of it */
bool torn_down;
byte queued = 1;                 /* pushes_ */
byte works = 2;                  /* works_ */
byte destroyed;
byte waiting, woken;             /* state_changed_ */
bool returned;

#define LOCK atomic { mutex == 0; mutex = 1 }
#define UNLOCK mutex = 0
#define NOTIFY_ALL d_step { woken = woken + waiting; waiting = 0 }

inline end_session() {  /* with the lock; what it drops is `mine` */
  if
  :: !ended -> ended = true; mine = mine + queued; queued = 0; NOTIFY_ALL
  :: else
  fi
}

inline tear_down() {  /* with the lock: the action, by the thread that carries it out */
  if
  :: ended && !open && !torn_down -> torn_down = true; NOTIFY_ALL
  :: else
  fi
}

inline destroy() {
  destroyed++;
  LOCK;
  works--;
#ifndef NOT_TOLD
  if :: works == 0 -> NOTIFY_ALL :: else fi;
#endif
  UNLOCK
}

inline flush() {
  do
  :: mine > 0 -> mine--; destroy()
  :: else -> break
  od
}

#ifdef NOT_COUNTED
#define WORKS_LEFT false
#else
#define WORKS_LEFT (works > 0)
#endif

proctype worker() {
  byte mine;
  LOCK; open = false; tear_down(); UNLOCK;  /* finish_iteration */
  destroy();
  LOCK;
  if :: queued > 0 -> queued--; open = true; UNLOCK;  /* its next iteration is granted */
        LOCK; open = false; tear_down(); UNLOCK;
        destroy()
  :: else -> UNLOCK
  fi
}

proctype canceller() {
  byte mine;
  LOCK; end_session(); tear_down(); UNLOCK;
  flush()
}

proctype closer() {
  byte mine;
  LOCK; end_session(); tear_down();
  do
  :: !torn_down || WORKS_LEFT ->
     if
     :: mine > 0 -> UNLOCK; flush(); LOCK          /* RuntimeImpl::wait: the outbox first */
     :: else ->
        atomic { waiting++; mutex = 0 }
        atomic { woken > 0 && mutex == 0; woken--; mutex = 1 }
     fi
  :: else -> break
  od;
  UNLOCK;
  assert(destroyed == 2);
  returned = true
}

init { atomic { run worker(); run canceller(); run closer() } }

ltl close_returns { <> returned }
