/* standins.h -- included before each file of the pool that is explored: private memory and the clock are the explorer's. */
#ifndef STANDINS_H
#define STANDINS_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* as some of those files do, before the headers here decide otherwise */
#endif
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

void *standin_calloc(size_t n, size_t bytes);
void *standin_realloc(void *old, size_t bytes);
int standin_sleep(const struct timespec *pause, struct timespec *left);
int standin_yield(void);
long standin_getrandom(void *p, size_t bytes);
int standin_clock_gettime(clockid_t clock, struct timespec *out);
long standin_futex(const void *word, int operation, uint32_t value, const struct timespec *pause);
/* Threads that sleep on a futex that has not changed since. */
int standins_asleep(void);

#define malloc(bytes) standin_calloc(1, bytes)
#define calloc(n, bytes) standin_calloc(n, bytes)
#define realloc(old, bytes) standin_realloc(old, bytes)
#define free(p) ((void)(p))
#define clock_gettime(clock, out) standin_clock_gettime(clock, out)
#define nanosleep(...) standin_sleep(__VA_ARGS__)
#define sched_yield() standin_yield()
#define getrandom(p, bytes, flags) standin_getrandom((p), (bytes))
#define syscall(number, word, operation, value, pause, ...) standin_futex((word), (operation), (uint32_t)(value), (pause))

/* Write-backs of noted lines are sites where they are asked for, not where coherence.h does them. */
#include "coherence/coherence.h"

static inline void standin_lines_end(struct kvp_lines *lines, struct ex_site *site)
{
    site->passes++;
    if (site->mutation)
        lines->line = NULL;
    kvp_lines_end(lines);
}
static inline void standin_lines_note(struct kvp_lines *lines, const void *p, struct ex_site *site)
{
    site->passes++;
    if (!site->mutation)
        kvp_lines_note(lines, p);
}
#define kvp_lines_end(lines) standin_lines_end((lines), EX_SITE(EX_LINES_END))
#define kvp_lines_note(lines, p) standin_lines_note((lines), (p), EX_SITE(EX_LINES_NOTE))

#endif
