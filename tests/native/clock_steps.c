/* clock_steps.c -- a clock_gettime for LD_PRELOAD whose clocks can be stepped: step_clock(id, nanoseconds). For
 * tests/test_identity.py; the kernel lets nobody step CLOCK_BOOTTIME, and CLOCK_REALTIME is the whole machine's. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CLOCKS = 16 };
static long long steps[CLOCKS];

void step_clock(int clock, long long nanoseconds)
{
    __atomic_add_fetch(&steps[clock], nanoseconds, __ATOMIC_SEQ_CST);
}

int clock_gettime(clockid_t clock, struct timespec *out)
{
    long status = syscall(SYS_clock_gettime, clock, out);

    if (status == 0 && clock >= 0 && clock < CLOCKS) {
        long long all = out->tv_sec * 1000000000ll + out->tv_nsec + __atomic_load_n(&steps[clock], __ATOMIC_SEQ_CST);
        out->tv_sec = (time_t)(all / 1000000000);
        out->tv_nsec = (long)(all % 1000000000);
    }
    return (int)status;
}
