/* standins.c -- what the explored part of the pool needs of the rest: mapping, host memory, keeper, payload copies. */
#include "standins.h"

#include <errno.h>
#include <linux/futex.h>
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
void (*standins_yielding)(void), (*standins_unlinking)(void);
uint64_t standins_forks;
int standins_kind;
static uint8_t drawn; /* identities of pools */

int standin_clock_gettime(clockid_t clock, struct timespec *out)
{
    uint64_t now = world_time_ns + slept_ns[ex_me()];

    (void)clock;
    *out = (struct timespec){(time_t)(now / 1000000000u), (long)(now % 1000000000u)};
    return 0;
}

void standins_pass(uint64_t ns)
{
    if (ex_is_running())
        slept_ns[ex_me()] += ns;
    else
        world_time_ns += ns;
}

int standin_sleep(const struct timespec *pause, struct timespec *left)
{
    (void)left;
    standins_pass((uint64_t)pause->tv_sec * 1000000000u + (uint64_t)pause->tv_nsec);
    if (ex_is_running() && world_slept)
        world_slept();
    return 0;
}

/* Whoever yields looks again at words that matter: there others may come between anyway. */
int standin_yield(void)
{
    if (standins_yielding)
        standins_yielding();
    return 0;
}

/* Who sleeps does nothing until the time is over, and so has no need of being woken; but it is remembered on what. */
static struct sleep {
    const co_u32 *on;
    uint32_t value;
} sleep_of[EX_THREADS];

long standin_futex(const void *word, int operation, uint32_t value, const struct timespec *pause)
{
    struct sleep *own = &sleep_of[ex_me()];

    if (operation == FUTEX_WAKE)
        return 0;
    *own = (struct sleep){co_load32((const co_u32 *)word) == value ? word : NULL, value};
    errno = own->on ? ETIMEDOUT : EAGAIN;
    if (own->on)
        standins_pass((uint64_t)pause->tv_sec * 1000000000u + (uint64_t)pause->tv_nsec);
    return -1;
}

int standins_asleep(void)
{
    int asleep = 0;

    for (int t = 0; t < EX_THREADS; t++)
        asleep += sleep_of[t].on && co_load32(sleep_of[t].on) == sleep_of[t].value;
    return asleep;
}

/* A pool's identity is another one each time that this machine makes one. */
long standin_getrandom(void *p, size_t bytes)
{
    memset(p, 0x5a + ex_me(), bytes);
    if (bytes == sizeof(uint8_t[16]))
        *(uint8_t *)p = ++drawn;
    return (long)bytes;
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
    return standins_forks;
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

/* A machine has the memory of one host at a time; a second region is for a host that begins anew. */
static struct machine {
    uint8_t *memory[2];
    uint8_t host, uuid, at; /* host + 1; which region */
} machine[EX_HOSTS];
static uint8_t *device;
static uint64_t device_bytes;

void standins_reset(void)
{
    device = NULL;
    memset(machine, 0, sizeof machine);
    memset(slept_ns, 0, sizeof slept_ns);
    memset(sleep_of, 0, sizeof sleep_of);
    drawn = 0;
    ex_private(machine, sizeof machine);
    ex_private(slept_ns, sizeof slept_ns);
    ex_private(sleep_of, sizeof sleep_of);
    ex_private(&drawn, sizeof drawn);
    ex_private(&standins_forks, sizeof standins_forks);
    world_time_ns = 1000000000u;
    standins_yielding = standins_unlinking = NULL;
    standins_forks = 0;
    standins_kind = KVP_MAP_SHM;
    world_same_boot = world_other_machines = 0;
    world_slept = NULL;
}

/* A run makes no regions: machines that join in one, and pools that are made in one, have their memory from the start. */
void standins_add_machine(int number, int regions, uint64_t bytes)
{
    for (int i = 0; i < regions; i++)
        if (!machine[number].memory[i])
            machine[number].memory[i] = ex_region(bytes, EX_COHERENT, number);
}

uint8_t *standins_add_device(uint64_t bytes)
{
    device = ex_region(bytes, EX_NONCOHERENT, 0);
    device_bytes = bytes;
    return device;
}

int kvp_mapping_create(const char *uri, uint64_t bytes, struct kvp_mapping *out)
{
    if (!device)
        standins_add_device(bytes);
    return bytes > device_bytes ? KVP_E_NOSPACE : kvp_mapping_open(uri, out);
}

/* explore: is the device, explore:short its first 64 bytes, explore:none is not there. */
int kvp_mapping_open(const char *uri, struct kvp_mapping *out)
{
    *out = (struct kvp_mapping){.base = device, .bytes = device_bytes, .page_bytes = KVP_PAGE, .fd = -1, .kind = standins_kind};
    if (!strcmp(uri, "explore:short"))
        out->bytes = KVP_LINE;
    return strcmp(uri, "explore:none") ? KVP_OK : KVP_E_NOTFOUND;
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

void *kvp_table_new(uint64_t bytes)
{
    return calloc(bytes ? bytes : 1, 1);
}

void kvp_table_free(void *table, uint64_t bytes)
{
    (void)bytes;
    free(table);
}

int kvp_mapping_unlink(const char *uri)
{
    (void)uri;
    if (standins_unlinking)
        standins_unlinking();
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
    struct machine *here = &machine[machine_of(host)];

    if (!here->memory[0])
        standins_add_machine((int)machine_of(host), 1, bytes);
    if (here->host && here->uuid != uuid[0] && here->memory[1])
        here->host = 0, here->at = 1;
    *fresh = !here->host;
    here->host = (uint8_t)(host + 1);
    here->uuid = uuid[0];
    *out = (struct kvp_mapping){.base = here->memory[here->at], .bytes = bytes, .page_bytes = KVP_PAGE, .fd = -1};
    return KVP_OK;
}

int kvp_host_memory_look(const uint8_t uuid[16], uint32_t host, uint64_t bytes, struct kvp_mapping *out)
{
    const struct machine *here = &machine[machine_of(host)];

    if (here->host != host + 1 || here->uuid != uuid[0])
        return KVP_E_NOTFOUND;
    *out = (struct kvp_mapping){.base = here->memory[here->at], .bytes = bytes, .page_bytes = KVP_PAGE, .fd = -1};
    return KVP_OK;
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
    struct machine *here = &machine[machine_of(host)];

    if (here->host != host + 1 || here->uuid != uuid[0] || here->at || !here->memory[1])
        return KVP_E_NOTFOUND;
    here->host = 0, here->at = 1;
    return KVP_OK;
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
