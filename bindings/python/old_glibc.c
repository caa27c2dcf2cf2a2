/* old_glibc.c: lets a library or program that is built here run with glibc 2.28 (x86-64, aarch64).
 *
 * glibc gave new versions to functions that are old, when it moved them into libc.so.6 (2.33, 2.34) or changed how they report errors
 * (2.29, 2.35). A linker takes the newest version, which an older glibc has not. This file is linked into what a wheel carries
 * (CMakeLists.txt). It defines those functions, hidden: all objects and archives of the library get them, and they go on to the versions
 * that glibc 2.28 has. scripts/check-shim names functions that are missing here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>

/* For each processor: FIRST is the version that glibc's functions had when glibc came to it. JUMP goes on to a function of another library and
 * changes no argument. STAT_VERSION is the number of struct stat's layout. */
#if defined(__x86_64__)
#define FIRST "2.2.5"
#define SINCE(version) version /* of a function that came later */
#define JUMP(name) "jmp *" #name "@GOTPCREL(%rip)"
#define STAT_VERSION 1
#elif defined(__aarch64__)
#define FIRST "2.17"
#define SINCE(version) FIRST /* functions that came to x86-64 later were there when aarch64 came */
#define JUMP(name) "adrp x16, :got:" #name "\n  ldr x16, [x16, :got_lo12:" #name "]\n  br x16"
#define STAT_VERSION 0
#else
#error "old_glibc.c knows x86-64 and aarch64"
#endif

/* The reference `old_NAME` to a function of the C library, by its first version, or by another name and version. */
#define OLD_OF(name, old, version) __asm__(".symver old_" #name ", " #old "@GLIBC_" version)
#define OLD(name) OLD_OF(name, name, FIRST)
/* A function that goes on to its old version with all arguments as they are. */
#define GOES_ON(name) GOES_ON_TO(name, name, FIRST)
#define GOES_ON_TO(name, old, version)                                                                  \
  OLD_OF(name, old, version);                                                                           \
  __asm__(".pushsection .text\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n" #name \
          ":\n  " JUMP(old_##name) "\n.size " #name ", . - " #name "\n.popsection")

/* libdl's until 2.34 */
GOES_ON(dladdr);
GOES_ON(dlclose);
GOES_ON(dlerror);
GOES_ON_TO(dlinfo, dlinfo, SINCE("2.3.3"));
GOES_ON(dlopen);
GOES_ON(dlsym);
/* libpthread's until 2.34, or 2.32 */
GOES_ON(pthread_create);
GOES_ON(pthread_detach);
GOES_ON(pthread_getspecific);
GOES_ON(pthread_join);
GOES_ON(pthread_key_create);
GOES_ON(pthread_key_delete);
GOES_ON(pthread_mutex_trylock);
GOES_ON(pthread_once);
GOES_ON(pthread_rwlock_rdlock);
GOES_ON(pthread_rwlock_unlock);
GOES_ON(pthread_rwlock_wrlock);
GOES_ON(pthread_setspecific);
GOES_ON(pthread_sigmask);
/* libm's, which reported errors in another way until 2.29, or 2.35 */
GOES_ON(exp);
GOES_ON(exp2);
GOES_ON(hypot);
GOES_ON(log);
GOES_ON(log2);
GOES_ON(pow);
/* Headers since 2.38 say these for the functions without the prefix. The new ones know binary numbers too. */
GOES_ON_TO(__isoc23_sscanf, __isoc99_sscanf, SINCE("2.7"));
GOES_ON_TO(__isoc23_strtol, strtol, FIRST);
GOES_ON_TO(__isoc23_strtoll, strtoll, FIRST);
GOES_ON_TO(__isoc23_strtoul, strtoul, FIRST);
GOES_ON_TO(__isoc23_strtoull, strtoull, FIRST);

/* These were inline functions until 2.33. The first argument is the version of struct stat. */
OLD(__fxstat);
OLD(__lxstat);
OLD(__xstat);
int old___fxstat(int version, int file, struct stat* out);
int old___lxstat(int version, const char* path, struct stat* out);
int old___xstat(int version, const char* path, struct stat* out);
int fstat(int file, struct stat* out) {
  return old___fxstat(STAT_VERSION, file, out);
}
int fstat64(int file, struct stat64* out) { /* the same structure */
  return old___fxstat(STAT_VERSION, file, (struct stat*)out);
}
int lstat(const char* path, struct stat* out) {
  return old___lxstat(STAT_VERSION, path, out);
}
int stat(const char* path, struct stat* out) {
  return old___xstat(STAT_VERSION, path, out);
}

/* Since 2.32. The C++ library saves atomic operations by it while a process has one thread. */
char __libc_single_threaded;

/* Since 2.36. */
uint32_t arc4random(void) {
  uint32_t number;
  if (getrandom(&number, sizeof number, 0) != sizeof number) abort();
  return number;
}

/* Since 2.30. Without it a wait until a time of the steady clock is one until that time of the system's clock, as with a C++ library of that age:
 * callers look at the steady clock again, and a clock that is set back makes them wait for longer. */
typedef int clockwait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
static int by_system_clock(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  enum { kSecond = 1000000000 };
  struct timespec now, system;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &system);
  int64_t nanoseconds = (int64_t)until->tv_nsec - now.tv_nsec + system.tv_nsec; /* above -1 s, below 2 s */
  system.tv_sec += until->tv_sec - now.tv_sec + (nanoseconds + kSecond) / kSecond - 1;
  system.tv_nsec = (nanoseconds + kSecond) % kSecond;
  return pthread_cond_timedwait(condition, mutex, &system);
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  static clockwait* found;
  clockwait* wait = __atomic_load_n(&found, __ATOMIC_RELAXED);
  if (wait == NULL) {
    *(void**)&wait = dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
    if (wait == NULL) wait = by_system_clock;
    __atomic_store_n(&found, wait, __ATOMIC_RELAXED);
  }
  return wait(condition, mutex, clock, until);
}

#ifdef GPUSHARE_PROGRAM
/* Since 2.34 __libc_start_main runs a program's constructors itself; the old version runs the function that it is given. */
typedef void constructor(int, char**, char**);
extern __attribute__((visibility("hidden"))) constructor *__init_array_start[], *__init_array_end[];
__attribute__((visibility("hidden"))) void _init(void);
static void construct(int count, char** arguments, char** environment) {
  _init();
  for (constructor** each = __init_array_start; each < __init_array_end; ++each)
    (*each)(count, arguments, environment);
}
OLD(__libc_start_main);
int old___libc_start_main(int (*program)(int, char**, char**), int count, char** arguments, constructor* init,
                          void (*fini)(void), void (*loader_fini)(void), void* stack_end);
int __libc_start_main(int (*program)(int, char**, char**), int count, char** arguments, constructor* init,
                      void (*fini)(void), void (*loader_fini)(void), void* stack_end) {
  return old___libc_start_main(program, count, arguments, init == NULL ? construct : init, fini, loader_fini,
                               stack_end);
}
#endif
