/* gate.c -- processes of one host sleep until something is published; who publishes wakes them. */
#define _GNU_SOURCE
#include "coherence/coherence.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SECOND = 1000000000 };

uint32_t kvp_gate_enter(struct kvp_gate *gate)
{
    uint32_t turn = co_load32(&gate->turn); /* first: who takes the announcement away changes the turn afterwards */

    co_store32(&gate->sleepers, 1);
    co_full_fence(); /* Dekker with kvp_gate_open: who publishes sees the announcement, or we see the publication */
    return turn;
}

int kvp_gate_sleep(struct kvp_gate *gate, uint32_t turn, uint64_t ns)
{
    struct timespec pause = {(time_t)(ns / SECOND), (long)(ns % SECOND)};

    return syscall(SYS_futex, &gate->turn, FUTEX_WAIT, turn, &pause, NULL, 0) == 0 || errno != EINTR;
}

void kvp_gate_wake(struct kvp_gate *gate)
{
    uint32_t turn = co_load32(&gate->turn);

    co_store32(&gate->sleepers, 0); /* also of one that was killed in its sleep */
    while (!co_cas32(&gate->turn, &turn, turn + 1)) /* one change of another does not do: who has just come may have seen it */
        ;
    syscall(SYS_futex, &gate->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
