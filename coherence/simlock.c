/* simlock.c -- mode sim: locks whose holder may be killed at any instruction, and the table of what is mapped where. */
#define _GNU_SOURCE
#include "coherence/sim.h"

#if KVP_MODE == KVP_SIM

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Polite spins before the first yield, and yields between two looks at whether the holder lives. */
enum { SPINS = 64, YIELDS = 128, TABLE = 512 };

/* ---- identity of a thread ---- */

/* State and start time (fields 3 and 22) of a thread: 1 if it runs or may run, 0 if it is gone or will never run again,
 * -1 if nobody can tell. The number in /proc names threads as well as processes. */
static int look(uint32_t thread, uint32_t *start)
{
    char path[40], text[1024], state;
    unsigned long long ticks;

    snprintf(path, sizeof path, "/proc/%u/stat", thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT || errno == ESRCH ? 0 : -1;
    ssize_t length = read(fd, text, sizeof text - 1);
    int error = errno;
    close(fd);
    if (length < 0)
        return error == ESRCH ? 0 : -1;
    text[length] = '\0';
    char *end = strrchr(text, ')');
    if (!end || sscanf(end + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                       &state, &ticks) != 2)
        return -1;
    *start = (uint32_t)ticks;
    return state != 'Z' && state != 'X';
}

static uint64_t myself(void)
{
    static __thread uint64_t identity, forks;
    uint64_t now = kvp_fork_count() + 1;

    if (forks != now) {
        uint32_t thread = (uint32_t)gettid(), start = 0;
        look(thread, &start);
        identity = (uint64_t)thread << 32 | start, forks = now;
    }
    return identity;
}

static int is_dead(uint64_t holder)
{
    uint32_t start = 0;
    int alive = look((uint32_t)(holder >> 32), &start);

    return alive == 0 || (alive == 1 && start != (uint32_t)holder);
}

int kvp_sim_lock(struct sim_lock *lock)
{
    uint64_t self = myself();

    for (unsigned tries = 0;; tries++) {
        uint64_t seen = 0;
        if (co_cas(&lock->holder, &seen, self))
            return 0;
        if (tries < SPINS) {
            kvp_prefetch(lock);
            continue;
        }
        sched_yield();
        /* By CAS from the dead holder: of several that find it dead, one goes on. */
        if (tries % YIELDS == 0 && is_dead(seen) && co_cas(&lock->holder, &seen, self))
            return 1;
    }
}

/* ---- what is mapped where ---- */

/* An entry counts while its end is not 0. Entries change under the mutex, and each change counts, so that what a thread
 * remembers is dropped in time. */
static struct {
    co_u64 base, end, sim;
} table[TABLE];
static co_u64 changes, top; /* entries from top on were never used */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread struct {
    uint64_t base, bytes, changes;
    struct kvp_sim *sim;
} last;

static void lock_table(void)
{
    pthread_mutex_lock(&table_lock);
}

static void unlock_table(void)
{
    pthread_mutex_unlock(&table_lock);
}

/* A child finds the table whole, whichever thread forked. */
__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(lock_table, unlock_table, unlock_table);
}

int kvp_sim_enlist(struct kvp_sim *sim)
{
    int found = -1;

    lock_table();
    for (int i = 0; i < TABLE && found < 0; i++)
        if (!co_load(&table[i].end))
            found = i;
    if (found >= 0) {
        if ((uint64_t)found >= co_load(&top))
            co_store(&top, (uint64_t)found + 1);
        co_store(&table[found].base, sim->base);
        co_store(&table[found].sim, (uint64_t)(uintptr_t)sim);
        co_store(&table[found].end, sim->base + sim->bytes);
        co_add(&changes, 1);
    }
    unlock_table();
    return found >= 0 ? KVP_OK : kvp_fail(KVP_E_NOSPACE, "this process has %d simulated mappings: close some", TABLE);
}

void kvp_sim_strike(struct kvp_sim *sim)
{
    lock_table();
    for (int i = 0; i < TABLE; i++)
        if (co_load(&table[i].end) && co_load(&table[i].sim) == (uint64_t)(uintptr_t)sim)
            co_store(&table[i].end, 0);
    co_add(&changes, 1);
    unlock_table();
}

static struct kvp_sim *search(uint64_t at)
{
    uint64_t seen = co_load(&changes), used = co_load(&top);

    for (uint64_t i = 0; i < used; i++) {
        uint64_t end = co_load(&table[i].end), base = co_load(&table[i].base);
        if (at < end && at >= base) {
            last.base = base, last.bytes = end - base, last.changes = seen;
            return last.sim = (struct kvp_sim *)(uintptr_t)co_load(&table[i].sim);
        }
    }
    return NULL;
}

struct kvp_sim *kvp_sim_find(const void *p)
{
    uint64_t at = (uint64_t)(uintptr_t)p;

    if (at - last.base < last.bytes && last.changes == co_load(&changes))
        return last.sim;
    return search(at);
}

struct kvp_sim *kvp_sim_last(void)
{
    return last.bytes && last.changes == co_load(&changes) ? last.sim : NULL;
}

#else
typedef int kvp_no_simlock; /* a translation unit is never empty */
#endif
