/* standins.c -- what the explored part of the pool needs of the rest: mapping, host memory, keeper, payload copies. */
#include "standins.h"

#include <stdarg.h>
#include <string.h>

#include "native/handle.h"
#include "world.h"

/* ---- private memory, time, errors ---- */

void *standin_calloc(size_t n, size_t bytes)
{
    uint64_t *block = ex_allocate(n * bytes + 16);

    block[0] = n * bytes;
    return block + 2;
}

void *standin_realloc(void *old, size_t bytes)
{
    void *new = standin_calloc(1, bytes);
    uint64_t had = old ? ((uint64_t *)old)[-2] : 0;

    if (old)
        memcpy(new, old, had < bytes ? had : bytes);
    return new;
}

uint64_t world_time_ns;
int world_same_boot, world_other_machines;
void (*world_slept)(void);
static uint64_t slept_ns[EX_THREADS]; /* each thread's own: time passes for who waits */

int standin_clock_gettime(clockid_t clock, struct timespec *out)
{
    uint64_t now = world_time_ns + slept_ns[ex_me()];

    (void)clock;
    *out = (struct timespec){(time_t)(now / 1000000000u), (long)(now % 1000000000u)};
    return 0;
}

int standin_sleep(const struct timespec *pause, struct timespec *left)
{
    (void)left;
    slept_ns[ex_me()] += (uint64_t)pause->tv_sec * 1000000000u + (uint64_t)pause->tv_nsec;
    if (ex_is_running() && world_slept)
        world_slept();
    return 0;
}

/* Whoever yields looks again at words that matter: there others may come between anyway. */
int standin_yield(void)
{
    return 0;
}

int kvp_fail(int status, const char *format, ...)
{
    (void)format;
    return status;
}

const char *kvp_strerror(int status)
{
    (void)status;
    return "";
}

const char *kvp_error_detail(void)
{
    return "";
}

uint64_t kvp_fork_count(void)
{
    return 0;
}

/* A machine that comes in a run is, unless the scenario says otherwise, the one that was there before, reset. */
uint64_t kvp_boot_id(void)
{
    return ex_is_running() && !world_same_boot ? 2 + (uint64_t)ex_my_host() : 1;
}

uint64_t kvp_machine_id(void)
{
    return ex_is_running() && world_other_machines ? 3 + 2 * (uint64_t)ex_my_host() : 1;
}

/* ---- payload: one word a line stands for the line ---- */

void kvp_copy_in(void *pool, const void *from, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += KVP_LINE) {
        uint64_t word;
        memcpy(&word, (const uint8_t *)from + at, sizeof word);
        nc_store((nc_u64 *)(void *)((uint8_t *)pool + at), word);
    }
    nc_write_back(pool, bytes); /* as in coherence/copy.c */
}

void kvp_copy_out(void *to, const void *pool, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += KVP_LINE) {
        uint64_t word = nc_load((const nc_u64 *)(const void *)((const uint8_t *)pool + at));
        memcpy((uint8_t *)to + at, &word, sizeof word);
    }
}

/* ---- mapping ---- */

static uint8_t *device, *host_memory[EX_HOSTS];
static uint64_t device_bytes;
static uint8_t is_made[EX_HOSTS];

void standins_reset(void)
{
    device = NULL;
    memset(host_memory, 0, sizeof host_memory);
    memset(is_made, 0, sizeof is_made);
    memset(slept_ns, 0, sizeof slept_ns);
    ex_private(is_made, sizeof is_made);
    ex_private(slept_ns, sizeof slept_ns);
    world_time_ns = 1000000000u;
    world_same_boot = world_other_machines = 0;
    world_slept = NULL;
}

/* A run makes no regions: machines that join in one have their memory from the start. */
void standins_add_machine(int machine, uint64_t bytes)
{
    if (!host_memory[machine])
        host_memory[machine] = ex_region(bytes, EX_COHERENT, machine);
}

int kvp_mapping_create(const char *uri, uint64_t bytes, struct kvp_mapping *out)
{
    (void)uri;
    device = ex_region(bytes, EX_NONCOHERENT, 0);
    device_bytes = bytes;
    return kvp_mapping_open(uri, out);
}

int kvp_mapping_open(const char *uri, struct kvp_mapping *out)
{
    (void)uri;
    *out = (struct kvp_mapping){.base = device, .bytes = device_bytes, .page_bytes = KVP_PAGE, .fd = -1};
    return KVP_OK;
}

int kvp_mapping_populate(const struct kvp_mapping *mapping, uint64_t offset, uint64_t bytes, unsigned threads)
{
    (void)mapping, (void)offset, (void)bytes, (void)threads;
    return KVP_OK;
}

int kvp_mapping_commit(struct kvp_mapping *mapping)
{
    (void)mapping;
    return KVP_OK;
}

int kvp_mapping_attach(struct kvp_mapping *mapping, uint32_t host)
{
    (void)mapping, (void)host;
    return KVP_OK;
}

int kvp_mapping_collapse(const struct kvp_mapping *mapping)
{
    (void)mapping;
    return 0;
}

int kvp_mapping_unlink(const char *uri)
{
    (void)uri;
    return KVP_OK;
}

void kvp_mapping_close(struct kvp_mapping *mapping)
{
    (void)mapping;
}

/* In setup each host has its own machine; in a run a thread's machine is where it runs, whatever host it wants to be. */
static uint32_t machine_of(uint32_t host)
{
    return ex_is_running() ? (uint32_t)ex_my_host() : host;
}

int kvp_host_memory_open(const uint8_t uuid[16], uint32_t host, uint64_t bytes, struct kvp_mapping *out, int *fresh)
{
    uint32_t machine = machine_of(host);

    (void)uuid;
    standins_add_machine((int)machine, bytes);
    *fresh = !is_made[machine];
    is_made[machine] = 1;
    *out = (struct kvp_mapping){.base = host_memory[machine], .bytes = bytes, .page_bytes = KVP_PAGE, .fd = -1};
    return KVP_OK;
}

int kvp_host_memory_look(const uint8_t uuid[16], uint32_t host, uint64_t bytes, struct kvp_mapping *out)
{
    (void)uuid, (void)host, (void)bytes, (void)out;
    return KVP_E_NOTFOUND;
}

int kvp_sim_counts_read(const struct kvp_mapping *mapping, struct kvp_sim_counts *out)
{
    (void)mapping, (void)out;
    return KVP_E_INVALID;
}

int64_t kvp_sim_lose_host(const char *uri, uint32_t host)
{
    (void)uri, (void)host;
    return KVP_E_INVALID;
}

int kvp_qualification_demand(const kvp_pool *pool)
{
    (void)pool;
    return KVP_OK;
}

void kvp_host_memory_unlock(struct kvp_mapping *mapping)
{
    (void)mapping;
}

int kvp_host_memory_remove(const uint8_t uuid[16], uint32_t host)
{
    (void)uuid, (void)host; /* a new one under the same name: no scenario needs that */
    return KVP_E_NOTFOUND;
}

/* ---- keeper: a lock word says who is alive, the kernel marks it; there is no thread ---- */

enum { OWNER_DIED = 1 << 30 };

int kvp_keeper_start(struct kvp_keeper *keeper)
{
    for (uint32_t i = 0; i < keeper->workers; i++) {
        struct kvp_slot *slot = &keeper->slots[i];
        uint32_t none = 0;
        if (!co_cas32(&slot->lock, &none, i + 1))
            continue;
        co_store(&slot->incarnation, co_load(&slot->incarnation) + 1);
        keeper->self = i;
        return KVP_OK;
    }
    return KVP_E_NOSLOT;
}

void kvp_keeper_stop(struct kvp_keeper *keeper)
{
    (void)co_exchange32(&keeper->slots[keeper->self].lock, 0);
}

int kvp_worker_dead(const struct kvp_slot *slot)
{
    return (co_load32(&slot->lock) & OWNER_DIED) != 0;
}

int kvp_worker_gone(const struct kvp_slot *slot, int timeout_ms)
{
    (void)slot, (void)timeout_ms;
    return 1;
}

/* As the kernel does with the robust list: its own lock, and those that it had taken over. */
void standins_mark_dead(int thread, const struct kvp_keeper *keeper)
{
    for (uint32_t i = 0; i < keeper->workers; i++) {
        co_u32 *lock = &keeper->slots[i].lock;
        if (lock->co32 == keeper->self + 1)
            ex_poke(thread, lock, lock->co32 | OWNER_DIED, 4);
    }
}

/* What a keeper does when it is woken, as in coherence/keeper.c: take each dead worker's lock over, recover, give it back. */
int standins_look_around(struct kvp_keeper *keeper)
{
    int recovered = 0;

    for (uint32_t i = 0; i < keeper->workers; i++) {
        uint32_t seen = i == keeper->self ? 0 : co_load32(&keeper->slots[i].lock);
        if (!(seen & OWNER_DIED) || !co_cas32(&keeper->slots[i].lock, &seen, keeper->self + 1))
            continue;
        keeper->on_death(keeper->context, i);
        (void)co_exchange32(&keeper->slots[i].lock, 0);
        recovered++;
    }
    return recovered;
}
