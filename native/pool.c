/* pool.c -- the life of a handle: create, open, leave; what keeps it honest meanwhile. */
#define _GNU_SOURCE
#include "native/handle.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POPULATE_STEP = 64 << 20, WIPE_STEP = 4 << 20, GONE_TIMEOUT_MS = 2000, LEAVE_PAUSE_NS = 100000 };

int kvp_enter(kvp_pool *pool)
{
    if (pool->forks != kvp_fork_count())
        return kvp_fail(KVP_E_FORKED, "this handle was opened before a fork: open the pool again in the child");
    if (__atomic_load_n(&pool->closed, __ATOMIC_ACQUIRE) || !pool->joined)
        return kvp_fail(KVP_E_CLOSED, "the pool was closed in this process: open it again");
    if (KVP_MODE == KVP_SIM)
        kvp_sim_events(&pool->mapping);
    /* Not only before it publishes: what a lost host pins nobody spares, and what it evicts is another's. */
    if (KVP_MANY_HOSTS && (co_load32(&pool->arena.head->fenced) || kvp_host_assure(&pool->arena.roster) != KVP_OK)) {
        co_store32(&pool->arena.head->fenced, 1);
        return kvp_fail(KVP_E_FENCED, "host %u was declared lost and what it owned is another's: close the pool and open it "
                        "again", pool->host);
    }
    if (kvp_life(pool) != pool->life)
        return kvp_fail(KVP_E_REPLACED, "%s was removed or made anew: close this handle and open the pool again",
                        pool->mapping.uri);
    return KVP_OK;
}

int kvp_enter_class(kvp_pool *pool, uint32_t class)
{
    if (class >= pool->arena.layout.classes)
        return kvp_fail(KVP_E_RANGE, "class %u does not exist: the pool has %u", class, pool->arena.layout.classes);
    return kvp_enter(pool);
}

static co_u64 *busy_of(kvp_pool *pool)
{
    return &pool->arena.slots[pool->arena.self].busy;
}

/* Every change of a block's word lies in here, or in a recovery. */
static void begin(kvp_pool *pool)
{
    if (!KVP_MANY_HOSTS || !pool->seated)
        return;
    co_or(busy_of(pool), 1); /* locked: Dekker with kvp_owner_offer, busy is visible before we look at a word, or whose it is */
}

void kvp_lock(kvp_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    begin(pool);
}

int kvp_trylock(kvp_pool *pool)
{
    if (pthread_mutex_trylock(&pool->lock))
        return 0;
    begin(pool);
    return 1;
}

static void end(kvp_pool *pool)
{
    if (KVP_MANY_HOSTS && pool->seated && co_load(busy_of(pool)) & 1)
        co_store(busy_of(pool), co_load(busy_of(pool)) + 1);
}

void kvp_unlock(kvp_pool *pool)
{
    end(pool);
    pthread_mutex_unlock(&pool->lock);
}

/* ---- the keeper's callbacks ---- */

static void forget(void *context, uint32_t block)
{
    kvp_directory_forget(context, block);
}

static void drained(void *context, uint32_t block)
{
    kvp_unlink_victim(context, kvp_block_class(block), kvp_block_number(block), KVP_EVENT_EVICTED);
    kvp_count(context, KVP_COUNT_EVICTED, 1);
}

static void settle(void *context, uint32_t block)
{
    kvp_directory_settle(context, block);
}

static uint64_t monotonic_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void on_death(void *context, uint32_t dead)
{
    kvp_pool *pool = context;
    uint64_t start = monotonic_ns();

    /* Its other threads may run for microseconds yet: only memory of a process that has ended is reused. One that
     * is still there after the time-out has called exec(), which took its mappings away, or hangs in the kernel,
     * from where a killed thread does not come back. */
    kvp_worker_gone(&pool->arena.slots[dead], GONE_TIMEOUT_MS);
    co_u64 *busy = &pool->arena.slots[dead].busy;
    co_or(busy, 1); /* as in begin() */
    uint64_t freed = kvp_recover(&pool->arena, dead);
    co_store(busy, co_load(busy) + 1);
    kvp_host_recovered(pool, dead);
    if (pool->keeper.self == KVP_NO_WORKER)
        return; /* we are joining: the slot is to be ours */
    uint64_t end = monotonic_ns();
    kvp_lock(pool); /* join() holds it until we know which slot, and which log, is ours */
    kvp_count(pool, KVP_COUNT_RECOVERIES, 1);
    kvp_count(pool, KVP_COUNT_RECOVERED, freed);
    kvp_count(pool, KVP_COUNT_RECOVERY_NS, end - start);
    kvp_log_event(pool, KVP_EVENT_RECOVERED, dead, &(struct kvp_key){0, 0});
    kvp_unlock(pool);
    kvp_replay(pool, KVP_PATIENCE); /* with the scan that the dead made due */
}

/* Has the image stayed what it was when we opened it? On a device another pool may have taken its place. */
static int is_current(void *context)
{
    const kvp_pool *pool = context;

    return kvp_life(pool) == pool->life && !(KVP_MANY_HOSTS && co_load32(&pool->arena.head->fenced));
}

/* Magazines that were not used for a tick go back, so that an idle worker starves nobody. */
static void on_tick(void *context)
{
    kvp_pool *pool = context;
    int idle = 1;

    if (KVP_MANY_HOSTS && __atomic_load_n(&pool->joined, __ATOMIC_ACQUIRE))
        kvp_host_tick(pool);
    if (!is_current(pool) || !kvp_trylock(pool))
        return;
    for (uint32_t c = 0; c < pool->arena.layout.classes; c++) {
        idle &= !pool->arena.class[c].magazine.used;
        pool->arena.class[c].magazine.used = 0;
    }
    if (idle && pool->joined && !pool->closed)
        kvp_spill(&pool->arena);
    if (pool->joined && !pool->closed)
        kvp_pins_tick(&pool->arena);
    kvp_unlock(pool);
}

/* ---- create and open ---- */

static int attach(kvp_pool *pool, const uint8_t uuid[16], const struct kvp_layout *layout)
{
    pool->arena.forget = forget;
    pool->arena.drained = drained;
    pool->arena.settle = settle;
    pool->arena.context = pool;
    return kvp_host_enter(pool, uuid, layout);
}

static int join(kvp_pool *pool)
{
    pool->keeper = (struct kvp_keeper){.slots = pool->arena.slots, .workers = pool->arena.layout.workers,
                                       .context = pool, .on_death = on_death, .on_tick = on_tick,
                                       .is_current = is_current};
    kvp_lock(pool);
    int status = kvp_keeper_start(&pool->keeper);
    if (status) {
        kvp_unlock(pool);
        return status;
    }
    pool->arena.self = pool->keeper.self;
    kvp_magazines_spread(&pool->arena);
    pool->arena.incarnation = (uint32_t)co_load(&pool->arena.slots[pool->arena.self].incarnation);
    pool->log_sequence = kvp_log_newest(kvp_ring(&pool->arena, pool->host, pool->arena.self), pool->arena.layout.log_records);
    kvp_host_joined(pool);
    pool->seated = 1;
    __atomic_store_n(&pool->joined, 1, __ATOMIC_RELEASE); /* the keeper may tick */
    kvp_unlock(pool);
    return KVP_OK;
}

/* Every handle of this process, for kvp_leave_all. */
static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static kvp_pool *handles;

/* The lock may have been held, by a thread that the child does not have, at the moment of the fork. */
static void renew_lock(void)
{
    pthread_mutex_init(&handles_lock, NULL);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, renew_lock);
}

static void enlist(kvp_pool *pool)
{
    pthread_mutex_lock(&handles_lock);
    pool->next = handles;
    handles = pool;
    pthread_mutex_unlock(&handles_lock);
}

static void strike_off(kvp_pool *pool)
{
    pthread_mutex_lock(&handles_lock);
    for (kvp_pool **link = &handles; *link; link = &(*link)->next)
        if (*link == pool) {
            *link = pool->next;
            break;
        }
    pthread_mutex_unlock(&handles_lock);
}

static kvp_pool *new_pool(void)
{
    kvp_pool *pool = calloc(1, sizeof *pool);

    if (!pool) {
        kvp_fail(KVP_E_NOSPACE, "no memory for a pool handle");
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pool->mapping.fd = pool->host_mapping.fd = -1;
    pool->forks = kvp_fork_count();
    pool->holders = 1;
    enlist(pool);
    return pool;
}

int kvp_pool_prepare(const char *uri, const struct kvp_request *request, const char *policy, kvp_pool **out)
{
    struct kvp_layout layout;
    int status = kvp_layout_plan(request, &layout), number = kvp_policy_find(policy);
    kvp_pool *pool = NULL;

    *out = NULL;
    if (status == KVP_OK && number < 0)
        status = kvp_fail(KVP_E_INVALID, "no policy '%.40s': leaf, lru, fifo and lfu exist", policy);
    if (status == KVP_OK && !(pool = new_pool()))
        status = KVP_E_NOSPACE;
    if (status)
        return status;
    if ((status = kvp_mapping_create(uri, layout.bytes, &pool->mapping))) {
        kvp_pool_free(pool);
        return status;
    }
    pool->super = (struct kvp_superblock *)(void *)pool->mapping.base;
    pool->arena.layout = layout;
    pool->policy = &kvp_policies[number];
    pool->host = request->host;
    *out = pool;
    return KVP_OK;
}

int kvp_pool_populate(kvp_pool *pool, uint64_t offset, uint64_t bytes, unsigned threads)
{
    return kvp_mapping_populate(&pool->mapping, offset, bytes, threads);
}

/* A device keeps what was on it, and what lives there is not overwritten. Sets the incarnation that follows an old pool's. */
static int look_at_device(kvp_pool *pool, uint64_t *incarnation)
{
    struct kvp_superblock seen;
    int status = kvp_superblock_read(pool->super, pool->mapping.bytes, &seen);
    const char *other = kvp_device_content(pool->mapping.base, pool->mapping.bytes);

    *incarnation = 0;
    if (other) /* also where its maker has left the mark of an old pool */
        return kvp_fail(KVP_E_FOREIGN, "%s holds %s: take another device, or clear it (kvpool rm --force)",
                        pool->mapping.uri, other);
    if (seen.magic != KVP_MAGIC)
        return KVP_OK;
    if (status == KVP_E_OLDER || status == KVP_E_NEWER || status == KVP_E_LAYOUT)
        return kvp_fail(KVP_E_EXISTS, "%s holds a pool of another version of kvpool: remove it with that, or clear the device "
                        "(kvpool rm --force)", pool->mapping.uri);
    *incarnation = nc_load(&seen.life) >> 1;
    /* A pool of another mode, or one that is larger than the one to be made, lives as well. */
    if (!(nc_load(&seen.life) & 1) && status != KVP_E_NOTREADY && status != KVP_E_CORRUPT)
        return kvp_fail(KVP_E_EXISTS, "%s holds a pool: remove it first (kvpool rm)", pool->mapping.uri);
    return KVP_OK;
}

/* In steps that take less than the pause of an election: a later maker finds nobody who writes any more when its own ends. */
static int wipe_tables(kvp_pool *pool)
{
    uint64_t end = pool->arena.layout.payload_offset;
    int status = KVP_OK;

    for (uint64_t at = KVP_PAGE; at < end && status == KVP_OK; at += WIPE_STEP) {
        kvp_wipe((nc_u64 *)(void *)(pool->mapping.base + at), end - at < WIPE_STEP ? end - at : WIPE_STEP);
        status = kvp_device_elected(pool);
    }
    return status;
}

/* Take a device that holds nothing alive, whoever else may want it, and wipe it: an old pool, or bytes of anything. */
static int take_device(kvp_pool *pool, uint64_t *incarnation)
{
    int status = look_at_device(pool, incarnation); /* nothing is written to it before */

    if (status || (status = kvp_device_elect(pool)) || (status = look_at_device(pool, incarnation)))
        return status;
    (*incarnation)++;
    kvp_wipe((nc_u64 *)(void *)pool->super, KVP_LINE);
    nc_write_fence(); /* no version in memory before the life goes: else one that was removed would look like a living one */
    kvp_wipe((nc_u64 *)(void *)pool->mapping.base, offsetof(struct kvp_superblock, maker));
    return wipe_tables(pool);
}

/* See the pool as our host does: in mode sim, through its cache. */
static int see_as_host(kvp_pool *pool)
{
    int status = kvp_mapping_attach(&pool->mapping, pool->host);

    pool->super = (struct kvp_superblock *)(void *)pool->mapping.base;
    return status;
}

static int format(kvp_pool *pool, const struct kvp_layout *layout, uint64_t incarnation)
{
    struct kvp_arena host_part;

    kvp_superblock_write(pool->super, layout, (int)(pool->policy - kvp_policies), incarnation);
    KVP_CRASH_POINT("create.written");
    kvp_arena_format(pool->mapping.base, layout);
    if (!KVP_MANY_HOSTS) { /* host memory lies in the image, and is a part of what the version promises */
        memset(&host_part, 0, sizeof host_part);
        int status = kvp_arena_init(&host_part, pool->mapping.base, pool->mapping.base + layout->host_offset, layout, 0);
        if (status)
            return status;
        co_store(&host_part.head->clock, 1);
        kvp_arena_start(&host_part);
        co_store(&host_part.head->ready, KVP_HEAD_READY);
        kvp_arena_free(&host_part);
    }
    if (pool->mapping.kind == KVP_MAP_DAX) {
        int status = kvp_device_elected(pool);
        if (status)
            return status;
    }
    kvp_superblock_seal(pool->super);
    KVP_CRASH_POINT("create.sealed");
    return KVP_OK;
}

int kvp_pool_commit(kvp_pool *pool)
{
    struct kvp_layout layout = pool->arena.layout;
    uint64_t incarnation = 1;
    int status = KVP_OK;

    for (uint64_t at = 0; at < layout.bytes && status == KVP_OK; at += POPULATE_STEP)
        status = kvp_pool_populate(pool, at, POPULATE_STEP, 1);
    if (status || (status = kvp_mapping_collapse(&pool->mapping)))
        return status;
    if (pool->mapping.kind == KVP_MAP_DAX && (status = take_device(pool, &incarnation)))
        return status;
    if ((status = see_as_host(pool)) || (status = format(pool, &layout, incarnation)))
        return status;
    pool->life = nc_load(&pool->super->life);
    if ((status = attach(pool, pool->super->uuid, &layout)) == KVP_OK &&
        (status = kvp_device_demand_machine(pool)) == KVP_OK && (status = join(pool)) == KVP_OK)
        status = kvp_mapping_commit(&pool->mapping);
    if (status && KVP_MANY_HOSTS)
        kvp_host_memory_remove(pool->super->uuid, pool->host); /* of a pool that nobody will ever find */
    return status;
}

int kvp_pool_create(const char *uri, const struct kvp_request *request, const char *policy, kvp_pool **out)
{
    int status = kvp_pool_prepare(uri, request, policy, out);

    if (status == KVP_OK && (status = kvp_pool_commit(*out))) {
        kvp_pool_free(*out);
        *out = NULL;
    }
    return status;
}

static int open_mapped(kvp_pool *pool)
{
    struct kvp_superblock seen;
    int status = kvp_superblock_read(pool->super, pool->mapping.bytes, &seen);

    if (status)
        return status;
    if (nc_load(&seen.life) & 1)
        return kvp_fail(KVP_E_REPLACED, "%s was removed", pool->mapping.uri);
    if (seen.policy >= kvp_policy_count())
        return kvp_fail(KVP_E_CORRUPT, "policy %u does not exist", seen.policy);
    if (pool->host >= seen.layout.hosts)
        return kvp_fail(KVP_E_HOST, "host %u: the pool was made for %u, numbered from 0", pool->host, seen.layout.hosts);
    pool->policy = &kvp_policies[seen.policy];
    pool->life = nc_load(&seen.life);
    if ((status = see_as_host(pool)) == KVP_OK && (status = kvp_qualification_demand(pool)) == KVP_OK &&
        (status = attach(pool, seen.uuid, &seen.layout)) == KVP_OK && (status = kvp_device_demand_machine(pool)) == KVP_OK)
        status = join(pool);
    if (status == KVP_OK)
        pool->foreign = UINT32_MAX;
    return status;
}

int kvp_pool_open(const char *uri, uint32_t host, kvp_pool **out)
{
    return kvp_pool_open_with(uri, host, 0, out);
}

int kvp_pool_open_with(const char *uri, uint32_t host, uint32_t flags, kvp_pool **out)
{
    kvp_pool *pool = new_pool();

    *out = NULL;
    if (!pool)
        return KVP_E_NOSPACE;
    pool->host = host;
    pool->unqualified = flags & KVP_OPEN_UNQUALIFIED;
    int status = kvp_mapping_open(uri, &pool->mapping);
    if (status == KVP_OK) {
        pool->super = (struct kvp_superblock *)(void *)pool->mapping.base;
        status = open_mapped(pool);
    }
    if (status)
        kvp_pool_free(pool);
    else
        *out = pool;
    return status;
}

int kvp_pool_share(kvp_pool *from, kvp_pool **out)
{
    kvp_pool *pool = new_pool();

    *out = NULL;
    if (!pool)
        return KVP_E_NOSPACE;
    pool->mapping = from->mapping;
    pool->super = from->super;
    pool->host = from->host;
    pool->unqualified = 1; /* whoever has the other handle was asked */
    pool->borrows = 1;
    int status = open_mapped(pool);
    if (status)
        kvp_pool_free(pool);
    else
        *out = pool;
    return status;
}

/* ---- leave ---- */

int kvp_pool_leave(kvp_pool *pool)
{
    struct timespec pause = {0, LEAVE_PAUSE_NS};

    if (!pool->joined || pool->forks != kvp_fork_count())
        return KVP_OK;
    kvp_lock(pool);
    int was_closed = pool->closed;
    __atomic_store_n(&pool->closed, 1, __ATOMIC_RELEASE);
    kvp_unlock(pool);
    if (was_closed)
        return KVP_OK;
    while (__atomic_load_n(&pool->copies, __ATOMIC_ACQUIRE)) /* copies into reserved blocks end first */
        nanosleep(&pause, NULL);
    kvp_lock(pool);
    if (is_current(pool)) { /* else the memory may be another pool's by now */
        kvp_spill(&pool->arena);
        kvp_recover(&pool->arena, pool->arena.self); /* what is still reserved or pinned, as if we had died */
        kvp_host_part(pool);
    }
    end(pool);
    pool->seated = 0; /* the slot is another's soon */
    kvp_unlock(pool);
    kvp_keeper_stop(&pool->keeper);
    return KVP_OK;
}

void kvp_leave_all(void)
{
    pthread_mutex_lock(&handles_lock);
    for (kvp_pool *pool = handles; pool; pool = pool->next)
        kvp_pool_leave(pool);
    pthread_mutex_unlock(&handles_lock);
}

void kvp_pool_release(kvp_pool *pool)
{
    if (__atomic_sub_fetch(&pool->holders, 1, __ATOMIC_ACQ_REL))
        return;
    strike_off(pool);
    kvp_arena_free(&pool->arena);
    for (uint32_t c = 0; c < KVP_CLASSES_MAX; c++)
        kvp_table_free(pool->heap[c].item, pool->heap[c].capacity * sizeof *pool->heap[c].item);
    if (!pool->borrows)
        kvp_mapping_close(&pool->mapping);
    kvp_mapping_close(&pool->host_mapping);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void kvp_pool_free(kvp_pool *pool)
{
    if (!pool)
        return;
    kvp_pool_leave(pool);
    kvp_pool_release(pool);
}

