/* gpushare status codes: what every call of gpushare.h and every backend op returns.
 *
 * A status is an int32_t. Zero is success. The codes are append-only and never renumbered; they are
 * grouped by what the caller should do, and the group is the hundreds digit:
 *
 *   1xx  try again later: nothing is wrong, the answer is not there yet
 *   2xx  free something (or ask for less), then try again
 *   3xx  fix the call: the same call will fail again
 *   4xx  give up on this object: it cannot serve any further call of this kind
 *
 * The codes are enumerators of an anonymous enum, so that no enum type is ever passed by value.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSHARE_STATUS_H_
#define GPUSHARE_STATUS_H_

enum {
  GPUSHARE_OK = 0,

  /* 1xx: try again later */
  GPUSHARE_NOT_READY = 100,  /* a query's work has not finished; a try-call would have blocked */
  GPUSHARE_TIMED_OUT = 101,  /* the timeout passed first; the object is unchanged */
  GPUSHARE_QUEUE_FULL = 102, /* back-pressure: a bounded queue is full */

  /* 2xx: free something, or ask for less */
  GPUSHARE_HOST_OUT_OF_MEMORY = 200,   /* the process could not get host memory */
  GPUSHARE_DEVICE_OUT_OF_MEMORY = 201, /* the device's memory is taken; the message says by whom */
  GPUSHARE_QUOTA_EXCEEDED = 202, /* the session has reached its own limit, although the device has room */

  /* 3xx: fix the call */
  GPUSHARE_INVALID_ARGUMENT = 300, /* an argument is not allowed; the message names it */
  GPUSHARE_INVALID_STATE = 301,    /* the call is right, the moment is wrong (closed session, iteration
                                      already ended) */
  GPUSHARE_INVALID_HANDLE = 302,   /* the handle is null, was released, or never was a handle of this type */
  GPUSHARE_NOT_FOUND = 303,        /* no such name, device, policy, block */
  GPUSHARE_ALREADY_EXISTS = 304,   /* the name is taken */
  GPUSHARE_UNSUPPORTED = 305,      /* the backend, layout or build lacks this; see its capabilities */
  GPUSHARE_EXCEEDS_CAPACITY = 306, /* would not fit an empty device: waiting cannot help */
  GPUSHARE_MALFORMED_INPUT = 307,  /* a file or buffer breaks its format; the message names the place */

  /* 4xx: give up on this object */
  GPUSHARE_UNAVAILABLE = 400,     /* no such device or driver on this machine */
  GPUSHARE_CANCELLED = 401,       /* the session was cancelled or closed while the call waited */
  GPUSHARE_DEVICE_LOST = 402,     /* the device context is poisoned; every session of the runtime ends */
  GPUSHARE_CALLBACK_FAILED = 403, /* the caller's function failed or threw; no other session is touched */
  GPUSHARE_IO_ERROR = 404,        /* the operating system refused a read or write; native_code is errno */
  GPUSHARE_INTERNAL = 405,        /* a broken invariant of gpushare itself: please report it */
  GPUSHARE_UNKNOWN = 406          /* a native error without a mapping; native_code and its name are kept */
};

#endif /* GPUSHARE_STATUS_H_ */
