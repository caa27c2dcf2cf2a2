/* The bytes of two sessions on a device that has room for one (src/sched/session_states.hpp). scripts/check-models puts the table of that header in
 * front: CHANGE(s, event) takes its row, and what it does not list is an error here. Each session has two iterations, and then ends or
 * stays with nothing to run. The scheduler decides after events alone; the driver carries its actions out, fails twice at most, and may be too late to turn
 * a page-in back. Session 0 goes first: 1 makes room for it at its boundary, and 0 for 1 only while it has nothing to run.
 * Shown: nothing is asked for that the table does not list; the two never hold the promise at once; each session has its iterations.
 *
 * With -DNOT_TOLD a page-out that failed is not answered. With -DNOT_STARTED the scheduler does not look again after an iteration.
 * SPDX-License-Identifier: Apache-2.0 */
mtype bytes[2] = kWaiting;
bit wants[2], busy[2], done[2];
bit order[2];  /* the driver has an action for the session */
bit told;      /* of an event */
byte failures;
#define FAILURES 2
#define PROMISE(s) (bytes[s] != kWaiting && bytes[s] != kOut && bytes[s] != kGone)
#define QUEUED(s) (wants[s] && !PROMISE(s))
#define FREE_PLACE(s) (QUEUED(s) && !PROMISE(1 - s))
#define MAKES_ROOM(s) (QUEUED(1 - s) && !order[s] && bytes[s] == kResident && (s == 1 || !wants[s]))
#define TURNS_BACK(s) (QUEUED(1 - s) && s == 1 && bytes[s] == kComing)

proctype scheduler() {
  bit s;
end_waits:
  do
  :: atomic { told -> told = 0;
     do
     :: FREE_PLACE(0) || FREE_PLACE(1) -> s = !FREE_PLACE(0); CHANGE(s, kPlaced); order[s] = 1
     :: MAKES_ROOM(0) || MAKES_ROOM(1) -> s = !MAKES_ROOM(0); CHANGE(s, kChosen)
     :: TURNS_BACK(1) -> CHANGE(1, kChosen)
     :: bytes[0] == kLeaving && !busy[0] && QUEUED(1) -> CHANGE(0, kStarted); order[0] = 1
     :: bytes[1] == kLeaving && !busy[1] && QUEUED(0) -> CHANGE(1, kStarted); order[1] = 1
     :: bytes[0] == kLeaving && !QUEUED(1) -> CHANGE(0, kSpared)
     :: bytes[1] == kLeaving && !QUEUED(0) -> CHANGE(1, kSpared)
     :: else -> break
     od;
     assert(!PROMISE(0) || !PROMISE(1)) }
  od
}

proctype session(bit s) {
  byte runs;
  do
  :: runs == 2 -> break
  :: else ->
     atomic { wants[s] = 1; told = 1 };
     atomic { bytes[s] == kResident && !order[s] -> busy[s] = 1; wants[s] = 0; told = 1 };
     atomic { busy[s] = 0; runs++;
#ifndef NOT_STARTED
       told = 1
#endif
     }
  od;
  if
  :: atomic { true -> CHANGE(s, kLeft); order[s] = 0; told = 1 }
  :: true  /* it stays, with nothing to run */
  fi;
  done[s] = 1
}

proctype driver() {
  bit s;
end_waits:
  do
  :: atomic { order[0] || order[1];
     if :: order[0] -> s = 0 :: order[1] -> s = 1 fi;
     order[s] = 0;
     if
     :: bytes[s] == kResident  /* it is admitted */
     :: bytes[s] == kResident && failures < FAILURES -> failures++; CHANGE(s, kUnplaced)
     :: bytes[s] == kComing -> CHANGE(s, kDone)
     :: bytes[s] == kComing && failures < FAILURES -> failures++; CHANGE(s, kUnplaced)
     :: bytes[s] == kTurningBack -> CHANGE(s, kUnplaced)
     :: bytes[s] == kTurningBack -> CHANGE(s, kDone)
     :: bytes[s] == kGoing -> CHANGE(s, kDone)
     :: bytes[s] == kGoing && failures < FAILURES -> failures++;
#ifndef NOT_TOLD
        CHANGE(s, kFailed)
#endif
     fi;
     told = 1 }
  od
}

init { atomic { run scheduler(); run session(0); run session(1); run driver() } }

ltl all_run { <> (done[0] && done[1]) }
