/* bench_recovery.h -- how long the blocks of a killed worker are gone: rows of bench_core.c.
 *
 * The victim is this program started again: it maps all of the pool and has little else that the kernel must take apart. What
 * an interpreter adds to that, before the kernel says that the process has ended, is a row of Python's.
 */
#ifndef KVP_BENCH_RECOVERY_H
#define KVP_BENCH_RECOVERY_H
#include "bench_world.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { KILL_BLOCKS = 1000000, KILL_STRIDE = 1024, KILL_HELD = 4096, KILLS_MAX = 64, SETTLE_NS = 150000000 };

/* The child: "victim URI" maps each page and holds blocks; "victim" alone does nothing. It says when it is ready. */
static int victim(const char *uri)
{
    static uint32_t numbers[KILL_HELD];
    uint32_t slot = 0;

    if (uri) {
        kvp_pool *pool;
        must(kvp_pool_open(uri, 0, &pool), "kvp_pool_open");
        for (uint64_t at = 0; at < pool->mapping.bytes; at += KVP_PAGE)
            sink += pool->mapping.base[at];
        must(kvp_reserve(pool, 0, KILL_HELD, numbers), "kvp_reserve");
        slot = pool->arena.self;
    }
    if (write(STDOUT_FILENO, &slot, sizeof slot) == sizeof slot)
        pause();
    return 1;
}

/* Its process, a descriptor that says when it has ended, and its slot. */
struct target {
    pid_t pid;
    int ended;
    uint32_t slot;
};

static struct target start_victim(const char *uri)
{
    char *const arguments[] = {"bench_core", "victim", (char *)(uintptr_t)uri, NULL};
    struct timespec settle = {0, SETTLE_NS};
    struct target target;
    int ready[2];

    if (pipe(ready))
        fail("no pipe");
    fflush(stdout);
    target.pid = fork();
    if (target.pid == 0) {
        dup2(ready[1], STDOUT_FILENO);
        close(ready[0]);
        execv("/proc/self/exe", arguments);
        _exit(1);
    }
    close(ready[1]);
    target.ended = (int)syscall(SYS_pidfd_open, target.pid, 0);
    if (target.ended < 0 || read(ready[0], &target.slot, sizeof target.slot) != sizeof target.slot)
        fail("no worker to kill");
    close(ready[0]);
    nanosleep(&settle, NULL); /* the keepers of the others watch it from their next look on */
    return target;
}

/* Kill, and sleep until the process has ended: whoever recovers it may need this processor. */
static double kill_victim(const struct target *target)
{
    struct pollfd wait = {.fd = target->ended, .events = POLLIN};
    double start = now_ns();

    kill(target->pid, SIGKILL);
    poll(&wait, 1, WAIT_S * 1000);
    return start;
}

static void bury(const struct target *target)
{
    waitpid(target->pid, NULL, 0);
    close(target->ended);
}

static double time_end(void)
{
    struct target target = start_victim(NULL);
    double start = kill_victim(&target), spent = now_ns() - start;

    bury(&target);
    return spent;
}

static double time_read(const kvp_pool *pool)
{
    const nc_u64 *words = pool->arena.class[0].words;
    uint64_t sum = 0;
    double start = now_ns();

    for (uint32_t i = 0; i < KILL_BLOCKS; i++)
        sum += nc_load_relaxed(&words[i]);
    sink += sum;
    return now_ns() - start;
}

/* From the kill until a keeper knows of it, and until the slot is free again, and with it all that the dead had. A keeper
 * takes the lock as soon as it knows, and counts how long it has been at it. */
static void time_kill(kvp_pool *pool, double *detected, double *reusable)
{
    struct target target = start_victim(kvp_pool_uri(pool));
    const struct kvp_slot *slots = pool->arena.slots;
    const co_u64 *count = &slots[pool->arena.self].counter[KVP_COUNT_RECOVERY_NS];
    uint64_t before = co_load(count);
    double start = kill_victim(&target);

    while (co_load32(&slots[target.slot].lock))
        if (now_ns() - start > WAIT_S * 1e9)
            fail("nobody recovers the killed worker");
    *reusable = now_ns() - start;
    *detected = *reusable - (double)(co_load(count) - before);
    bury(&target);
}

static void recovery_suite(uint32_t samples)
{
    static double detected[KILLS_MAX], reusable[KILLS_MAX], end[KILLS_MAX], whole[KILLS_MAX];
    kvp_pool *pool = make_pool_of(KILL_BLOCKS, KILL_STRIDE);

    memset(pool->arena.class[0].data, 1, (uint64_t)KILL_BLOCKS * KILL_STRIDE);
    samples = samples < KILLS_MAX ? samples : KILLS_MAX;
    for (uint32_t i = 0; i < samples; i++) {
        end[i] = time_end();
        whole[i] = end[i] + time_read(pool);
        time_kill(pool, &detected[i], &reusable[i]);
    }
    row("recovery, SIGKILL to detected, 1e6 blocks, 1 GiB (C)", "us", detected, samples, median(end, samples), 1e3);
    row("recovery, SIGKILL to reusable, 1e6 blocks, 1 GiB (C)", "us", reusable, samples, median(whole, samples), 1e3);
    kvp_pool_free(pool);
}

#endif
