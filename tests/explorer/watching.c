/* watching.c -- who looks at a pool while it is used sees what can be: events whole, blocks counted once, nothing broken. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 4, EVENTS = 12 };

static kvp_pool *owner, *local, *remote;

static struct ghost {
    struct {
        uint64_t sequence, ref;
        uint8_t kind, k;
    } event[EVENTS];
    uint8_t events;
} *const ghost = (struct ghost *)(void *)ex_ghost;

/* The owner has two blocks, full, and a log with room for `room` more records before the first are overwritten. */
static void make(uint32_t room)
{
    remote = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    owner = world_join(1);
    local = world_join(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(remote);
    kvp_pool_follow(owner);
    while (owner->log_sequence + room < owner->arena.layout.log_records)
        kvp_log_event(owner, KVP_EVENT_USED, 0, &(struct kvp_key){0, 0});
}

static void put_two(void *pool)
{
    world_put(pool, 2, 1);
    world_merge(pool, 1);
    world_put(pool, 3, 1);
}

/* ---- events ---- */

static void note_event(const struct kvp_event *event, uint64_t after)
{
    const struct kvp_key *key = (const struct kvp_key *)(const void *)event->key;
    uint32_t k = (uint32_t)(key->high - 0x1000);

    EX_CHECK(event->sequence > after, "event %llu after %llu", (unsigned long long)event->sequence, (unsigned long long)after);
    IS(event->worker, 2);
    if (event->kind == KVP_EVENT_USED || event->kind == KVP_EVENT_STARTED)
        return;
    EX_CHECK(event->kind == KVP_EVENT_PUBLISHED || event->kind == KVP_EVENT_EVICTED, "an event of kind %d", event->kind);
    EX_CHECK(k < KEYS && key->low == world_key(k).low, "an event of the key %#llx %#llx", (unsigned long long)key->low,
             (unsigned long long)key->high);
    if (ghost->events < EVENTS) {
        ghost->event[ghost->events].sequence = event->sequence;
        ghost->event[ghost->events].ref = event->ref;
        ghost->event[ghost->events].kind = (uint8_t)event->kind;
        ghost->event[ghost->events++].k = (uint8_t)k;
    }
}

static void read_events(kvp_pool *pool, uint64_t *position)
{
    struct kvp_event event[8];
    uint64_t before = *position, lost = 0;
    int64_t n = kvp_events(pool, 2, position, event, 8, &lost);

    EX_CHECK(n >= 0 && before + (uint64_t)n + lost == *position, "from event %llu on %lld are read, %llu lost, and the next is %llu",
             (unsigned long long)before, (long long)n, (unsigned long long)lost, (unsigned long long)*position);
    for (int64_t i = 0; i < n; i++)
        note_event(&event[i], i ? event[i - 1].sequence : before);
}

/* Two that follow: one from the start, the other from near the end. */
static void watch_events(void *pool)
{
    uint64_t position = 0, later = ((kvp_pool *)pool)->arena.layout.log_records - 2;

    read_events(pool, &position);
    read_events(pool, &later);
    read_events(pool, &later);
}

/* One look shows all that had been written when it began. */
static void read_last(void *pool)
{
    uint64_t position = owner->log_sequence - 2;

    read_events(pool, &position);
    IS(position, owner->log_sequence);
}

/* In the end all of it has been said, in order. */
static void read_to_end(void *pool)
{
    uint64_t position = 0, before;

    do {
        before = position;
        read_events(pool, &position);
    } while (position != before);
    IS(position, owner->log_sequence);
}

/* What was seen of an event that is still there is what stands there. */
static void check_events(void)
{
    const struct kvp_record *ring = kvp_ring(&owner->arena, 1, 0);

    ex_view(1);
    for (uint32_t i = 0; i < ghost->events; i++) {
        uint64_t word[3], newest;
        unsigned kind;
        if (kvp_log_read(ring, owner->arena.layout.log_records, ghost->event[i].sequence, &kind, word, &newest) != 1)
            continue;
        EX_CHECK(kind == ghost->event[i].kind && word[0] == ghost->event[i].ref && word[2] == 0x1000 + (uint64_t)ghost->event[i].k,
                 "event %llu was seen as of kind %d of key %d", (unsigned long long)ghost->event[i].sequence, ghost->event[i].kind,
                 ghost->event[i].k);
    }
    world_check(owner);
    world_check(remote);
}

static void events_setup(void)
{
    make(1);
    world_spawn(owner, put_two, 0);
    world_spawn(remote, watch_events, 0);
    world_spawn(remote, read_last, EX_LAST);
    world_spawn(remote, read_to_end, EX_LAST);
}
const struct ex_scenario scenario_watch_events = {.name = "watch-events", .what = "events are read while they are overwritten, from another host",
                                                  .setup = events_setup, .check = check_events, .seconds = 30};

/* ---- everything else ---- */

static uint64_t sum(const uint64_t states[64])
{
    uint64_t total = 0;

    for (int i = 0; i < 64; i++)
        total += states[i];
    return total;
}

/* All states are those of blocks that are there; of two blocks no more than two are published. */
static void look_around(void *argument)
{
    kvp_pool *pool = argument;
    struct kvp_info info;
    struct kvp_worker_info worker;
    struct kvp_host_info host;
    uint64_t states[64];

    IS(kvp_pool_states(pool, states), KVP_OK);
    IS(sum(states), 10);
    EX_CHECK(states[KVP_LIVE] + states[KVP_EVICTING] + states[KVP_OWN] + states[KVP_CACHED] <= 2 && !states[6] && !states[7],
             "states %llu %llu %llu", (unsigned long long)states[KVP_LIVE], (unsigned long long)states[KVP_EVICTING],
             (unsigned long long)states[KVP_OWN]);
    IS(kvp_pool_info(pool, &info), KVP_OK);
    IS(info.owned, 1);
    IS(kvp_pool_worker(pool, 0, &worker), KVP_OK);
    IS(worker.state, 1);
    EX_CHECK(worker.counter[KVP_COUNT_PUBLISHED] <= 4, "%llu published", (unsigned long long)worker.counter[KVP_COUNT_PUBLISHED]);
    IS(kvp_pool_host(pool, 1 - pool->host, &host), KVP_OK);
    IS(host.segments, 1);
    IS(host.state, KVP_HOST_PRESENT);
}

static void look_and_check(void *pool)
{
    struct kvp_check check;

    look_around(pool);
    world_merge(pool, 1);
    IS(kvp_pool_check(pool, &check), KVP_OK);
    EX_CHECK(!check.problems, "a pool in use: %s", check.first);
}

/* Who looks after it has ended sees how it has ended. */
static void count_live(void *pool)
{
    uint64_t states[64];

    IS(kvp_pool_states(pool, states), KVP_OK);
    IS(states[KVP_LIVE], 2);
}

static void check(void)
{
    world_check(owner);
    world_check(remote);
}

static void let_others_go_on(void)
{
    ex_spin();
}

static void watch(int from_afar)
{
    make(8);
    ex_warm(0, owner->arena.class[0].words, 16 * 8);
    world_spawn(owner, put_two, 0);
    world_spawn(from_afar ? remote : local, look_and_check, 0);
    world_spawn(remote, count_live, EX_LAST);
    standins_yielding = let_others_go_on;
}

static void watch_local_setup(void)
{
    watch(0);
}
const struct ex_scenario scenario_watch_local = {.name = "watch-local", .what = "a worker looks at the pool and checks it while another uses it",
                                                 .setup = watch_local_setup, .check = check, .seconds = 30};

static void watch_remote_setup(void)
{
    watch(1);
}
const struct ex_scenario scenario_watch_remote = {.name = "watch-remote", .what = "the same from another host",
                                                  .setup = watch_remote_setup, .check = check, .seconds = 30};
