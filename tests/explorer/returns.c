/* returns.c -- hosts that are there again: readers, owners, givers and takers, while others act on their absence. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 6, MACHINE = 2 }; /* where a host comes back */
#define SECOND 1000000000ull
#define GHOST ((uint64_t *)(void *)ex_ghost)

static kvp_pool *owner, *other;

static void meet(void)
{
    kvp_pool_follow(other);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
}

/* Host 1 has two blocks, full, and host 0 knows them. */
static void make(uint32_t workers)
{
    other = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = workers});
    world_hoard(0);
    owner = world_join(1);
    world_put(owner, 0, 2);
    meet();
}

static void put_one(void *pool)
{
    world_put(pool, 2, 1);
}

static void use_one(void *pool)
{
    world_use(pool, 0, 1);
}

static void reset_owner(void *pool)
{
    (void)pool;
    ex_reset_host((int)owner->host);
}

/* ---- a reader that was lost comes back, and pins ---- */

static void return_and_use(void *none)
{
    (void)none;
    world_use(world_come(1), 0, 1);
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
    EX_CHECK(world_put(pool, 4, 2) == 2, "pins of an earlier life of a host hold blocks");
}

static void reset_and_fence(void *pool)
{
    ex_reset_host(1);
    kvp_pool_fence(pool, 1, 1);
}

static void high_check(void)
{
    for (uint32_t w = 0; w < other->arena.layout.workers; w++) {
        uint64_t high = ex_memory_word(kvp_pin_high(&other->arena, 1) + w);
        EX_CHECK(!high, "of a host that has come back evictors read %llu slots of worker %u, and it pins nothing",
                 (unsigned long long)high, w);
    }
}

/* Host 0 owns and fences, host 1 reads. */
static void reader_reborn(void (*lose)(void *pool))
{
    uint32_t number[6];

    owner = world_make(&(struct world_request){.blocks = 1, .hosts = 2, .workers = 2});
    kvp_reserve(owner, 0, 6, number); /* of 8 blocks */
    other = world_join(1);
    world_put(owner, 0, 2);
    meet();
    world_spawn(other, use_one, 0);
    world_spawn(world_join(0), lose, 0);
    world_spawn(owner, put_two, 0);
}

static void reset_reader(void *pool)
{
    (void)pool;
    ex_reset_host(1);
}

static void tick_there(void *none)
{
    (void)none;
    world_tick(world_there(MACHINE));
}

static void reader_reborn_setup(void)
{
    reader_reborn(reset_reader);
    world_spawn_machine(MACHINE, return_and_use, EX_ON_CRASH);
    world_spawn(owner, must_evict, EX_LAST);
    world_spawn_machine(MACHINE, tick_there, EX_LAST);
}
const struct ex_scenario scenario_reader_reborn = {.name = "reader-reborn", .what = "a host is reset while it pins, and comes back",
                                          .setup = reader_reborn_setup, .check = high_check, .seconds = 60};

static void reader_fenced_setup(void)
{
    reader_reborn(reset_and_fence);
    world_spawn_machine(MACHINE, return_and_use, EX_ON_CRASH);
    world_spawn(owner, must_evict, EX_LAST);
}
const struct ex_scenario scenario_reader_fenced = {.name = "reader-fenced", .what = "the same, and it is fenced while it comes back",
                                          .setup = reader_fenced_setup, .seconds = 60};

/* The owner knows the first life, and that it is over, when the second one begins to pin. */
static void fence_and_wait(void *pool)
{
    reset_and_fence(pool);
    kvp_pool_follow(pool);
    GHOST[1] = 1;
    ex_wake();
    while (!world_there(MACHINE))
        ex_spin();
    world_merge(pool, 1);
    world_put(pool, 2, 2);
}

static void return_when_known(void *none)
{
    (void)none;
    while (!GHOST[1])
        ex_spin();
    kvp_pool *pool = world_come(1);
    world_merge(pool, 1);
    world_use(pool, 0, 1);
}

static void reader_back_setup(void)
{
    uint32_t number[6];

    owner = world_make(&(struct world_request){.blocks = 1, .hosts = 2, .workers = 1});
    kvp_reserve(owner, 0, 6, number); /* of 8 blocks */
    other = world_join(1);
    world_put(owner, 0, 2);
    meet();
    world_spawn(owner, fence_and_wait, 0);
    world_spawn_machine(MACHINE, return_when_known, EX_ON_CRASH);
    world_spawn(owner, must_evict, EX_LAST);
}
const struct ex_scenario scenario_reader_back = {.name = "reader-back", .what = "a host that was fenced comes back and pins what the owner evicts",
                                        .setup = reader_back_setup, .seconds = 60};

/* It had pinned eight blocks of its own before, so that its pin of host 0's block lies in another line than the first one of
 * its next life. */
static void busy_reborn_setup(void)
{
    uint32_t number[6];
    uint64_t ref;

    owner = world_make(&(struct world_request){.blocks = 1, .hosts = 3, .workers = 2});
    kvp_reserve(owner, 0, 6, number); /* of 8 blocks */
    other = world_join(1);
    world_put(owner, 0, 2);
    for (uint32_t k = 16; k < 24; k++) {
        struct kvp_key key = world_key(k);
        EX_CHECK(world_put(other, k, 1) == 1 && kvp_match(other, 0, &key, 1, &ref) == 1, "host 1 has 8 blocks");
    }
    meet();
    world_spawn(other, use_one, 0);
    world_spawn(world_join(0), reset_reader, 0);
    world_spawn_machine(3, return_and_use, EX_ON_CRASH);
    world_spawn(owner, must_evict, EX_LAST);
}
const struct ex_scenario scenario_busy_reborn = {.name = "busy-reborn", .what = "a host is reset that has pinned much, and comes back",
                                        .setup = busy_reborn_setup, .seconds = 60};

/* ---- an owner comes back while others read it ---- */

static void return_only(void *none)
{
    (void)none;
    world_come(1);
}

static void follow_twice(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    kvp_pool_follow(pool);
}

static void reborn_read_setup(void)
{
    make(3);
    kvp_pool *second = world_join(0);
    world_spawn(owner, put_one, 0);
    world_spawn(second, reset_owner, 0);
    world_spawn(other, follow_twice, 0);
    world_spawn_machine(MACHINE, return_only, EX_ON_CRASH);
    world_spawn_compare_there(MACHINE, other, KEYS);
}
const struct ex_scenario scenario_reborn_read = {.name = "reborn-read", .what = "an owner is reset and comes back while another host follows",
                                        .setup = reborn_read_setup, .seconds = 60};

/* ---- an owner comes back while it is adopted ---- */

static void fence(void *pool)
{
    int64_t adopted = kvp_pool_fence(pool, 1, 1);

    EX_CHECK(adopted >= 0 || adopted == KVP_E_INVALID, "a silent host is fenced: %lld", (long long)adopted);
}

static void adopt(void *pool)
{
    ex_reset_host(1);
    while (kvp_pool_fence(pool, 1, 1) == KVP_E_BUSY)
        ex_spin();
}

static void return_and_put(void *none)
{
    (void)none;
    kvp_pool *pool = world_come(1);
    world_merge(pool, 1);
    world_put(pool, 2, 1);
    world_merge(pool, 2);
    kvp_pool_follow(pool);
    world_merge(pool, 3);
    world_put(pool, 3, 1);
}

static void check_segments(int machine)
{
    uint32_t mine = kvp_owned(&other->arena), its = kvp_owned(&world_there(machine)->arena);

    EX_CHECK(mine + its == 2, "of 2 segments host 0 owns %u, and the host that came back %u", mine, its);
}

static void check(void)
{
    check_segments(MACHINE);
}

static void adopt_return_setup(void)
{
    make(2);
    world_spawn(owner, put_one, 0);
    world_spawn(other, adopt, 0);
    world_spawn_machine(MACHINE, return_and_put, EX_ON_CRASH);
    world_spawn_compare_there(MACHINE, other, KEYS);
}
const struct ex_scenario scenario_adopt_return = {.name = "adopt-return", .what = "a host is adopted and comes back at the same time",
                                         .setup = adopt_return_setup, .check = check, .seconds = 60};

/* It was idle, so there is nothing but the two acts of adopting and returning. */
static void return_setup(void)
{
    make(2);
    world_spawn(other, fence, 0);
    world_spawn_machine(MACHINE, return_and_put, 0);
    world_spawn_compare_there(MACHINE, other, KEYS);
}
const struct ex_scenario scenario_returning = {.name = "return", .what = "a host comes back at the moment at which it is adopted",
                                      .setup = return_setup, .check = check, .seconds = 30};

/* The host is reset once more while it yields: its third life must yield as well. */
static void reset_again(void *pool)
{
    (void)pool;
    while (!world_there(MACHINE))
        ex_spin();
    ex_reset_host(MACHINE);
    GHOST[1] = 2;
    ex_wake();
}

static void return_first(void *none)
{
    (void)none;
    world_come(1);
}

static void return_again(void *none)
{
    while (GHOST[1] != 2)
        ex_spin();
    return_and_put(none);
}

static void twice_reborn_check(void)
{
    check_segments(3);
}

static void twice_reborn_setup(void)
{
    make(3);
    world_spawn(owner, put_one, 0);
    world_spawn(other, adopt, 0);
    world_spawn(world_join(0), reset_again, 0);
    world_spawn_machine(MACHINE, return_first, EX_ON_CRASH);
    world_spawn_machine(3, return_again, EX_ON_CRASH);
    world_spawn_compare_there(3, other, KEYS);
}
const struct ex_scenario scenario_twice_reborn = {.name = "twice-reborn", .what = "a host is adopted, comes back, is reset and comes back again",
                                         .setup = twice_reborn_setup, .check = twice_reborn_check, .seconds = 60};

/* ---- a giver, or a taker, comes back ---- */

static void give(void *pool)
{
    kvp_pool_give(pool, 0, 1);
}

static void give_back(void *pool)
{
    kvp_pool_give(pool, 1, 1);
}

static void take_and_put(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    world_put(pool, 2, 1);
}

static void giver_reborn_setup(void)
{
    make(3);
    kvp_pool *second = world_join(0);
    world_spawn(owner, give, 0);
    world_spawn(second, reset_owner, 0);
    world_spawn(other, take_and_put, 0);
    world_spawn_machine(MACHINE, return_and_put, EX_ON_CRASH);
    world_spawn_compare_there(MACHINE, other, KEYS);
}
const struct ex_scenario scenario_giver_reborn = {.name = "giver-reborn", .what = "a host is reset while it gives a segment, and comes back",
                                         .setup = giver_reborn_setup, .check = check, .seconds = 60};

static void taker_reborn_setup(void)
{
    other = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    owner = world_join(1);
    world_put(owner, 0, 2);
    meet();
    kvp_pool *second = world_join(0);
    world_spawn(owner, take_and_put, 0);
    world_spawn(second, reset_owner, 0);
    world_spawn(other, give_back, 0);
    world_spawn_machine(MACHINE, return_and_put, EX_ON_CRASH);
    world_spawn_compare_there(MACHINE, other, KEYS);
}
const struct ex_scenario scenario_taker_reborn = {.name = "taker-reborn", .what = "a host is reset while it takes a segment, and comes back",
                                         .setup = taker_reborn_setup, .check = check, .seconds = 60};
