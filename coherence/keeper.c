/* keeper.c -- who is alive: robust futex words, pidfd, and the thread that watches. */
#define _GNU_SOURCE
#include "coherence/coherence.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
enum { STARTING, RUNNING, FAILED, LEAVING };
enum { WAIT_U32 = 2, WAIT_PRIVATE = 128, GRACE_MS = 1000, SOON_MS = 20 };

/* What futex_waitv(2) takes; older kernel headers lack it. */
struct futex_wait {
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};

static uint64_t fork_count;

static void count_fork(void)
{
    __atomic_fetch_add(&fork_count, 1, __ATOMIC_RELAXED);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

uint64_t kvp_fork_count(void)
{
    return __atomic_load_n(&fork_count, __ATOMIC_RELAXED);
}

/* Hash of a file that holds an identity, never 0. */
static uint64_t read_id(const char *path)
{
    char id[64];
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a: an identity, not a checksum */
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, id, sizeof id);

    if (fd >= 0)
        close(fd);
    for (ssize_t i = 0; i < length; i++)
        hash = (hash ^ (uint8_t)id[i]) * 0x100000001b3u;
    return hash | 1;
}

uint64_t kvp_machine_id(void)
{
    char name[64] = {0};
    uint64_t id = read_id("/etc/machine-id");

    if (id != read_id("")) /* there is such a file */
        return id;
    gethostname(name, sizeof name - 1);
    for (const char *c = name; *c; c++)
        id = (id ^ (uint8_t)*c) * 0x100000001b3u;
    return id | 1;
}

uint64_t kvp_boot_id(void)
{
    static uint64_t cached;
    uint64_t id = __atomic_load_n(&cached, __ATOMIC_RELAXED);

    if (!id) {
        id = read_id("/proc/sys/kernel/random/boot_id");
        __atomic_store_n(&cached, id, __ATOMIC_RELAXED);
    }
    return id;
}

static uint64_t pid_space(void)
{
    struct stat info;

    return stat("/proc/self/ns/pid", &info) ? 0 : (uint64_t)info.st_ino;
}

/* Field 22 of /proc/PID/stat, counted after the ')' that ends the command name; 0 if there is no process. */
static uint64_t start_time(uint64_t pid)
{
    char path[64], text[1024];
    unsigned long long start = 0;

    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = '\0';
    char *end = strrchr(text, ')');
    if (!end || sscanf(end + 1, " %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                       &start) != 1)
        return 0;
    return start;
}

static uint64_t realtime_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int kvp_worker_dead(const struct kvp_slot *slot)
{
    uint32_t lock = co_load32(&slot->lock);

    if (lock & FUTEX_OWNER_DIED)
        return 1;
    /* After a reboot no kernel marked the lock. A slot that is being claimed has boot 0 until it is described. */
    uint64_t boot = co_load(&slot->boot);
    return lock != 0 && boot != 0 && boot != kvp_boot_id();
}

static void sleep_ms(int ms)
{
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000L};

    nanosleep(&pause, NULL);
}

int kvp_worker_gone(const struct kvp_slot *slot, int timeout_ms)
{
    uint64_t pid = co_load(&slot->pid), start = co_load(&slot->start_time);

    if (co_load(&slot->boot) != kvp_boot_id())
        return 1;
    int is_here = co_load(&slot->pid_space) == pid_space(), fd = is_here ? (int)syscall(SYS_pidfd_open, (pid_t)pid, 0) : -1;
    if (fd < 0 && is_here && (errno == ESRCH || errno == EINVAL))
        return 1;
    if (fd < 0) { /* another PID namespace, or no pidfd to be had: its threads get a grace period */
        sleep_ms(timeout_ms < GRACE_MS ? timeout_ms : GRACE_MS);
        return timeout_ms >= GRACE_MS;
    }
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    /* Another process may have the number by now: then ours has ended, and so it has if that one ends. Most end soon, and are
     * not asked. */
    int soon = timeout_ms < SOON_MS ? timeout_ms : SOON_MS;
    int gone = poll(&wait, 1, soon) == 1 || start_time(pid) != start || poll(&wait, 1, timeout_ms - soon) == 1;
    close(fd);
    return gone;
}

/* ---- the keeper thread ---- */

/* Private twin of a slot: the kernel finds the lock at a constant distance from the list node, so the nodes
 * stand at the stride of the slots. */
struct robust_node {
    struct robust_list list;
    char pad[sizeof(struct kvp_slot) - sizeof(struct robust_list)];
};

struct robust {
    struct robust_list_head head; /* replaces the C library's: the keeper holds no other robust lock */
    struct robust_node node[KVP_WORKERS_MAX];
};

static struct robust *make_robust(const struct kvp_keeper *keeper)
{
    struct robust *robust = calloc(1, sizeof *robust);

    if (!robust)
        return NULL;
    robust->head.list.next = &robust->head.list;
    robust->head.futex_offset = (long)((char *)&keeper->slots[0].lock - (char *)&robust->node[0].list);
    return robust;
}

/* The kernel reads list and pending word of a thread that was killed between any two instructions: what the compiler
 * emits must keep the order of the text. */
#define in_this_order() __atomic_signal_fence(__ATOMIC_SEQ_CST)

/* Take a lock that is free or whose holder is dead. */
static int take(struct kvp_keeper *keeper, uint32_t number, uint32_t seen)
{
    struct robust *robust = keeper->robust;
    struct robust_list *node = &robust->node[number].list;
    uint32_t thread = (uint32_t)syscall(SYS_gettid);

    robust->head.list_op_pending = node; /* a death between the CAS and the listing is reported all the same */
    int taken = co_cas32(&keeper->slots[number].lock, &seen, thread | (seen & FUTEX_WAITERS));
    KVP_CRASH_POINT("join.taken");
    if (taken) {
        node->next = robust->head.list.next;
        in_this_order();
        robust->head.list.next = node;
        in_this_order();
    }
    robust->head.list_op_pending = NULL;
    return taken;
}

/* The lock of a dead worker as `take` needs it, 0 if it cannot be had. After a reboot no kernel has marked it: we do,
 * and then take the old boot id away, before anybody takes the lock. So who sees an old boot id has seen the lock of
 * the old life, and its CAS fails once somebody has a new one. */
static uint32_t lock_of_dead(struct kvp_slot *slot)
{
    uint32_t seen = co_load32(&slot->lock);
    uint64_t boot = co_load(&slot->boot);

    if (seen == 0 || boot == 0 || boot == kvp_boot_id())
        return seen & FUTEX_OWNER_DIED ? seen : 0;
    if (!(seen & FUTEX_OWNER_DIED)) {
        if (!co_cas32(&slot->lock, &seen, seen | FUTEX_OWNER_DIED))
            return 0;
        seen |= FUTEX_OWNER_DIED;
    }
    return co_cas(&slot->boot, &boot, 0), seen;
}

static void futex_wake(co_u32 *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

static void give(struct kvp_keeper *keeper, uint32_t number)
{
    struct robust *robust = keeper->robust;
    struct robust_list *node = &robust->node[number].list, **link = &robust->head.list.next;
    struct kvp_slot *slot = &keeper->slots[number];

    co_store(&slot->boot, 0);
    robust->head.list_op_pending = node;
    in_this_order();
    while (*link != node)
        link = &(*link)->next;
    *link = node->next;
    /* Releases all of a recovery, or of a life, to the CAS of the next holder. */
    if (co_exchange32(&slot->lock, 0) & FUTEX_WAITERS)
        futex_wake(&slot->lock);
    robust->head.list_op_pending = NULL;
}

static void introduce(struct kvp_keeper *keeper, uint32_t number)
{
    struct kvp_slot *slot = &keeper->slots[number];

    co_store(&slot->boot, 0);
    co_store(&slot->pid, (uint64_t)getpid());
    co_store(&slot->start_time, start_time((uint64_t)getpid()));
    co_store(&slot->pid_space, pid_space());
    co_store(&slot->joined, realtime_ns());
    co_store(&slot->boot, kvp_boot_id());
    KVP_CRASH_POINT("join.described");
    co_store(&slot->incarnation, co_load(&slot->incarnation) + 1);
    keeper->self = number;
    futex_wake(&slot->lock); /* the peers watch us from now on, not from their next tick */
}

/* A free slot, or else that of a dead worker, recovered first. */
static int join(struct kvp_keeper *keeper)
{
    for (uint32_t i = 0; i < keeper->workers; i++)
        if (co_load32(&keeper->slots[i].lock) == 0 && take(keeper, i, 0)) {
            introduce(keeper, i);
            return KVP_OK;
        }
    for (uint32_t i = 0; i < keeper->workers; i++) {
        uint32_t seen = lock_of_dead(&keeper->slots[i]);
        if (!seen || !take(keeper, i, seen))
            continue;
        keeper->on_death(keeper->context, i);
        introduce(keeper, i);
        return KVP_OK;
    }
    return KVP_E_NOSLOT;
}

/* Sleep until a peer dies, leaves, the handle wakes us, or a tick has passed. The waiters bit asks the kernel
 * to wake us when it marks the lock. */
static void wait_for_news(struct kvp_keeper *keeper)
{
    struct futex_wait wait[KVP_WORKERS_MAX + 1];
    struct timespec until;
    unsigned count = 1;

    wait[0] = (struct futex_wait){RUNNING, (uintptr_t)&keeper->state, WAIT_U32 | WAIT_PRIVATE, 0};
    for (uint32_t i = 0; i < keeper->workers; i++) {
        co_u32 *lock = &keeper->slots[i].lock;
        uint32_t seen = co_load32(lock);
        if (i == keeper->self || (seen & FUTEX_OWNER_DIED))
            continue;
        uint32_t marked = seen ? seen | FUTEX_WAITERS : 0; /* a free slot: who joins there wakes us */
        if (seen != marked && !co_cas32(lock, &seen, marked))
            continue;
        wait[count++] = (struct futex_wait){marked, (uintptr_t)lock, WAIT_U32, 0};
    }
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += KVP_TICK_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    if (syscall(SYS_futex_waitv, wait, count, 0, &until, CLOCK_MONOTONIC) < 0 && errno != EAGAIN && errno != ETIMEDOUT &&
        errno != EINTR)
        sleep_ms(2); /* Linux before 5.16, or a sandbox that forbids the call: poll */
}

static void look_around(struct kvp_keeper *keeper)
{
    for (uint32_t i = 0; i < keeper->workers; i++) {
        uint32_t seen = i == keeper->self ? 0 : lock_of_dead(&keeper->slots[i]);
        if (!seen || !take(keeper, i, seen))
            continue;
        keeper->on_death(keeper->context, i);
        give(keeper, i);
    }
}

static void *keep(void *argument)
{
    struct kvp_keeper *keeper = argument;
    struct robust *robust = keeper->robust;
    struct timespec last = {0, 0}, now;

    pthread_setname_np(pthread_self(), "kvpool-keeper");
    int unwatched = syscall(SYS_set_robust_list, &robust->head, sizeof robust->head) != 0;
    keeper->status = unwatched ? KVP_E_SYSTEM : join(keeper); /* a death that nobody hears of must not be possible */
    co_store32(&keeper->state, keeper->status ? FAILED : RUNNING);
    futex_wake(&keeper->state);
    while (co_load32(&keeper->state) == RUNNING) {
        if (keeper->is_current(keeper->context))
            look_around(keeper);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - last.tv_sec) * 1000 + (now.tv_nsec - last.tv_nsec) / 1000000 >= KVP_TICK_MS) {
            keeper->on_tick(keeper->context);
            last = now;
        }
        wait_for_news(keeper);
    }
    if (keeper->status == KVP_OK && keeper->is_current(keeper->context))
        give(keeper, keeper->self);
    return NULL;
}

int kvp_keeper_start(struct kvp_keeper *keeper)
{
    sigset_t all, before;

    keeper->self = KVP_NO_WORKER;
    keeper->robust = make_robust(keeper);
    if (!keeper->robust)
        return kvp_fail(KVP_E_NOSPACE, "no memory for the keeper");
    co_store32(&keeper->state, STARTING);
    sigfillset(&all); /* signals are the application's: its handlers must not run on this thread */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&keeper->thread, NULL, keep, keeper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(keeper->robust);
        return kvp_fail(KVP_E_SYSTEM, "cannot start the keeper thread: %s", strerror(error));
    }
    while (co_load32(&keeper->state) == STARTING)
        syscall(SYS_futex, &keeper->state, FUTEX_WAIT, STARTING, NULL, NULL, 0);
    if (keeper->status == KVP_OK)
        return KVP_OK;
    pthread_join(keeper->thread, NULL);
    free(keeper->robust);
    if (keeper->status == KVP_E_SYSTEM)
        return kvp_fail(KVP_E_SYSTEM, "the kernel refuses set_robust_list: a worker's death could not be seen");
    return kvp_fail(keeper->status, "all %u worker slots are taken: close a worker, or create the pool with more",
                    keeper->workers);
}

void kvp_keeper_stop(struct kvp_keeper *keeper)
{
    co_store32(&keeper->state, LEAVING);
    /* The keeper waits on this word with a private futex. */
    syscall(SYS_futex, &keeper->state, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1 << 30, NULL, NULL, 0);
    pthread_join(keeper->thread, NULL);
    free(keeper->robust);
    keeper->robust = NULL;
}
