/* lost.c -- a host is lost: it is reset, one survivor is named and adopts what it had; or it starts anew. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 4 };
#define SECOND 1000000000ull

static kvp_pool *owner, *adopter, *reader;

/* Host 2 has two blocks, full; host 0 is to adopt them, host 1 reads them. Their leases have lapsed for all observers. */
static void make(uint32_t hosts)
{
    adopter = world_make(&(struct world_request){.blocks = 2, .hosts = hosts, .workers = 3});
    world_hoard(0);
    owner = world_join(hosts - 1);
    reader = hosts > 2 ? world_join(1) : adopter;
    world_put(owner, 0, 2);
    kvp_pool_follow(adopter);
    kvp_pool_follow(reader);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
}

static void put_one(void *pool)
{
    world_put(pool, 2, 1);
}

static void use_old(void *pool)
{
    world_use(pool, 0, 1);
}

static void use_both(void *pool)
{
    world_use(pool, 0, 1);
    world_merge(pool, 1);
    kvp_pool_follow(pool);
    world_merge(pool, 2);
    world_use(pool, 2, 1);
}

/* What the site's control does when it has been told of a silent host: reset it, then name the adopter. */
static void reset_and_adopt(void *argument)
{
    kvp_pool *pool = argument;
    int64_t adopted;

    ex_reset_host((int)owner->host);
    while ((adopted = kvp_pool_fence(pool, owner->host, owner->arena.roster.incarnation)) == KVP_E_BUSY)
        ex_spin(); /* another worker has the turn */
    EX_CHECK(adopted >= 0, "a reset host cannot be adopted: %lld", (long long)adopted);
}

static void reset_adopt_and_evict(void *pool)
{
    reset_and_adopt(pool);
    world_merge(pool, 1);
    world_put(pool, 3, 1);
}

static void remember(void *pool)
{
    kvp_pool_follow(pool);
    world_remember(pool, KEYS);
}

/* All that the lost host had is usable again. */
static void fill_all(void *pool)
{
    uint32_t segments = kvp_owned(&((kvp_pool *)pool)->arena);

    EX_CHECK(segments == 2, "of the 2 segments of both hosts the adopter owns %u", segments);
    EX_CHECK(world_put(pool, 8, 2) == 2, "blocks of the lost host cannot be evicted");
}

static void check(void)
{
    world_check(adopter);
}

static void adopt_setup(void)
{
    make(2);
    world_spawn(owner, put_one, 0);
    world_spawn(adopter, reset_and_adopt, 0);
    world_spawn(adopter, remember, EX_LAST);
    world_spawn(adopter, fill_all, EX_LAST);
}
const struct ex_scenario scenario_adopt = {.name = "adopt", .what = "a host is reset while it evicts and publishes, and adopted",
                                           .setup = adopt_setup, .check = check, .seconds = 30};

static void adopt_read_setup(void)
{
    make(3);
    world_spawn(owner, put_one, 0);
    world_spawn(adopter, reset_adopt_and_evict, 0);
    world_spawn(reader, use_both, 0);
    world_spawn(adopter, world_follow, EX_LAST);
    world_spawn_compare(adopter, reader, KEYS);
}
const struct ex_scenario scenario_adopt_read = {.name = "adopt-read", .what = "the same, and a third host reads all the time",
                                                .setup = adopt_read_setup, .check = check, .preemptions = 2, .events = 2};

/* ---- the adopter's worker dies ---- */

static void adopt_crash_setup(void)
{
    make(2);
    kvp_pool *second = world_join(0);
    kvp_pool_follow(second);
    world_spawn(owner, put_one, 0);
    world_spawn(second, reset_and_adopt, EX_CRASHABLE);
    world_spawn(adopter, world_mend, EX_ON_CRASH);
    world_spawn(adopter, world_mend, EX_LAST);
    world_spawn(adopter, remember, EX_LAST);
}
const struct ex_scenario scenario_adopt_crash = {.name = "adopt-crash", .what = "the worker that adopts dies, another goes on",
                                                 .setup = adopt_crash_setup, .check = check, .died = world_died, .crashes = 1,
                                                 .seconds = 60};

/* ---- a reader is lost ---- */

static void fence_reader(void *pool)
{
    ex_reset_host((int)reader->host);
    kvp_pool_fence(pool, reader->host, reader->arena.roster.incarnation);
}

static void put_two(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    world_put(pool, 2, 2);
}

static void must_evict(void *pool)
{
    kvp_pool_follow(pool);
    EX_CHECK(world_put(pool, 8, 2) == 2, "the pins of a lost host hold blocks for ever");
}

static void check_owner(void)
{
    world_check(owner);
}

static void lost_reader_setup(void)
{
    make(3);
    world_spawn(owner, put_two, 0);
    world_spawn(reader, use_old, 0);
    world_spawn(adopter, fence_reader, 0);
    world_spawn(owner, must_evict, EX_LAST);
}
const struct ex_scenario scenario_lost_reader = {.name = "lost-reader", .what = "a host is lost while it pins, the owner evicts",
                                                 .setup = lost_reader_setup, .check = check_owner, .seconds = 60};

/* ---- a host ends, or is reset, and is there again ---- */

/* The machine is reset at any step; its cache is lost; it comes up and opens the pool again. */
static void come_back(void *none)
{
    (void)none;
    kvp_pool *pool = world_open(1);
    EX_CHECK(pool, "a host that was reset cannot come back");
    world_merge(pool, 1);
    int found = world_use(pool, 0, 1) + world_use(pool, 1, 1) + world_use(pool, 2, 1);
    EX_CHECK(found <= 2, "two blocks hold %d keys", found);
    EX_CHECK(world_put(pool, 3, 2) == 2, "blocks are lost");
}

static void must_find_both(void *pool)
{
    kvp_pool_follow(pool);
    EX_CHECK(world_use(pool, 3, 2) == 2, "what a host has published since it came back is not found");
}

static void reset_owner(void *pool)
{
    (void)pool;
    ex_reset_host((int)owner->host);
}

static void reborn_setup(void)
{
    make(2);
    world_spawn(owner, put_one, 0);
    world_spawn(adopter, reset_owner, 0);
    world_spawn_machine(2, come_back, EX_LAST);
    world_spawn(adopter, must_find_both, EX_LAST);
}
const struct ex_scenario scenario_reborn = {.name = "reborn", .what = "a host is reset at any step and starts again, another follows",
                                            .setup = reborn_setup, .seconds = 60};
