/* handoff.c -- segments move from host to host, empty; they are taken back; workers die while they move them. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 4 };

static kvp_pool *giver, *taker;

/* One segment of one block moves; the taker's own segment is full. */
static void make(uint32_t workers, uint32_t published)
{
    taker = world_make(&(struct world_request){.blocks = 1, .hosts = 2, .workers = workers + 1});
    giver = world_join(1);
    world_hoard(0);
    world_put(giver, 0, published);
    kvp_pool_follow(taker);
    kvp_pool_follow(giver);
}

static void give(void *pool)
{
    kvp_pool_give(pool, 0, 1);
}

static void give_and_revoke(void *pool)
{
    kvp_pool_give(pool, 0, 1);
    world_merge(pool, 1);
    ex_ghost[0] = 1;
    kvp_pool_revoke(pool);
    world_merge(pool, 2);
    world_put(pool, 2, 1);
}

static void take_and_put(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    world_put(pool, 1, 1);
}

static void put_again(void *pool)
{
    world_mend(pool);
    world_put(pool, 3, 1);
}

static void pin_and_take(void *pool)
{
    world_use(pool, 0, 1);
    world_merge(pool, 1);
    take_and_put(pool);
}

/* Afterwards, when every host has caught up, and asked again for what it wanted back, each segment is exactly one host's. */
static void count(void *pool)
{
    kvp_pool_follow(pool);
    if (ex_ghost[0])
        kvp_pool_revoke(pool);
    kvp_pool_follow(pool);
    ex_ghost[8 + ((const kvp_pool *)pool)->host] = (uint8_t)kvp_owned(&((const kvp_pool *)pool)->arena);
}

static void check(void)
{
    EX_CHECK(ex_ghost[8] + ex_ghost[9] == 2, "of 2 segments host 0 owns %d and host 1 %d", ex_ghost[8], ex_ghost[9]);
    world_check(giver);
    world_check(taker);
}

static void finish(void)
{
    world_spawn(giver, world_mend, EX_LAST);
    world_spawn(taker, world_mend, EX_LAST);
    world_spawn(giver, count, EX_LAST);
    world_spawn(taker, count, EX_LAST);
    world_spawn(giver, count, EX_LAST);
    world_spawn(taker, world_follow, EX_LAST);
    world_spawn_compare(taker, giver, KEYS);
}

static void give_setup(void)
{
    make(1, 0);
    world_spawn(giver, give, 0);
    world_spawn(taker, take_and_put, 0);
    finish();
}
const struct ex_scenario scenario_giving = {.name = "give", .what = "an empty segment moves to another host, which publishes in it",
                                   .setup = give_setup, .check = check, .seconds = 30};

static void give_pinned_setup(void)
{
    make(1, 1);
    world_spawn(giver, give, 0);
    world_spawn(taker, pin_and_take, 0);
    finish();
}
const struct ex_scenario scenario_giving_pinned = {.name = "give-pinned", .what = "the same with a block in it that the taker pins first",
                                          .setup = give_pinned_setup, .check = check, .seconds = 30};

static void revoke_setup(void)
{
    make(1, 0);
    world_spawn(giver, give_and_revoke, 0);
    world_spawn(taker, take_and_put, 0);
    finish();
}
const struct ex_scenario scenario_revoking = {.name = "revoke", .what = "an offer is taken back while it is taken",
                                     .setup = revoke_setup, .check = check, .seconds = 60};

static void giver_crash_setup(void)
{
    make(2, 0);
    world_spawn(world_join(1), give, EX_CRASHABLE);
    world_spawn(giver, world_mend, EX_ON_CRASH);
    world_spawn(taker, take_and_put, 0);
    finish();
}
const struct ex_scenario scenario_giver_crash = {.name = "give-crash", .what = "a worker dies while it gives a segment away",
                                        .setup = giver_crash_setup, .check = check, .died = world_died, .crashes = 1,
                                        .seconds = 60};

static void taker_crash_setup(void)
{
    make(2, 0);
    world_spawn(giver, give_and_revoke, 0);
    world_spawn(world_join(0), take_and_put, EX_CRASHABLE);
    world_spawn(taker, world_mend, EX_ON_CRASH);
    world_spawn(giver, world_mend, EX_LAST);
    world_spawn(taker, put_again, EX_LAST);
    finish();
}
const struct ex_scenario scenario_taker_crash = {.name = "take-crash", .what = "a worker dies while it takes a segment that is taken back",
                                        .setup = taker_crash_setup, .check = check, .died = world_died, .crashes = 1,
                                        .seconds = 60};

/* ---- what else goes on in the giver ---- */

static void remove_one(void *pool)
{
    struct kvp_key key = world_key(0);

    kvp_remove(pool, 0, &key, 1);
}

static void give_twice(void *pool)
{
    kvp_pool_give(pool, 0, 1);
    world_merge(pool, 1);
    kvp_pool_give(pool, 0, 1);
}

static void give_beside_setup(void)
{
    make(2, 1);
    world_spawn(giver, give_twice, 0);
    world_spawn(world_join(1), remove_one, 0);
    world_spawn(taker, take_and_put, 0);
    finish();
}
const struct ex_scenario scenario_giving_beside = {.name = "give-beside", .what = "a worker gives a segment away in which another removes a key",
                                          .setup = give_beside_setup, .check = check, .seconds = 60};

/* The other's words are written back as late as can be. */
static void give_late_setup(void)
{
    give_beside_setup();
    ex_hold(giver->arena.class[0].words, giver->arena.class[0].blocks * 8ull);
}
const struct ex_scenario scenario_giving_late = {.name = "give-late", .what = "the same, and words are written back late",
                                        .setup = give_late_setup, .check = check, .seconds = 60};

static void put_one(void *pool)
{
    world_put(pool, 2, 1);
}

static void give_busy_setup(void)
{
    make(2, 0);
    world_spawn(giver, give, 0);
    world_spawn(world_join(1), put_one, 0);
    world_spawn(taker, take_and_put, 0);
    finish();
}
const struct ex_scenario scenario_giving_busy = {.name = "give-busy", .what = "a worker gives a segment away in which another wants to publish",
                                        .setup = give_busy_setup, .check = check, .seconds = 60};

/* As a tick does: now others may have what this worker keeps for itself. */
static void spill(kvp_pool *pool)
{
    kvp_lock(pool);
    kvp_spill(&pool->arena);
    kvp_unlock(pool);
}

/* A block is filled through a view and not published; the segment is given away. */
static void fill_and_withdraw(void *pool)
{
    kvp_pool *mine = pool;
    uint32_t number;

    if (kvp_reserve(mine, 0, 1, &number) != KVP_OK)
        return;
    nc_store((nc_u64 *)(void *)kvp_block_data(&mine->arena, kvp_block(0, number)), 0xbad);
    kvp_withdraw(mine, 0, &number, 1);
    spill(mine);
}

static void give_withdrawn_setup(void)
{
    make(2, 0);
    world_spawn(giver, give_twice, 0);
    world_spawn(world_join(1), fill_and_withdraw, 0);
    world_spawn(taker, take_and_put, 0);
    finish();
}
const struct ex_scenario scenario_giving_withdrawn = {.name = "give-withdrawn", .what = "a segment moves in which a reservation was filled and withdrawn",
                                             .setup = give_withdrawn_setup, .check = check, .seconds = 30};

/* The same by a worker that dies with the reservation; another one gives the segment away. */
static void fill_and_die(void *pool)
{
    uint32_t number;

    if (kvp_reserve(pool, 0, 1, &number) == KVP_OK)
        nc_store((nc_u64 *)(void *)kvp_block_data(&giver->arena, kvp_block(0, number)), 0xbad);
    while (kvp_reserve(pool, 0, 1, &number) != KVP_OK)
        ex_spin(); /* until it dies */
}

static void recover_and_give(void *pool)
{
    world_mend(pool);
    world_merge(pool, 2);
    give(pool);
}

static void give_inherited_setup(void)
{
    make(2, 0);
    world_spawn(world_join(1), fill_and_die, EX_CRASHABLE);
    world_spawn(giver, recover_and_give, EX_ON_CRASH);
    world_spawn(taker, take_and_put, EX_ON_CRASH);
    finish();
}
const struct ex_scenario scenario_giving_inherited = {.name = "give-inherited", .what = "a worker dies with a filled reservation, its segment moves",
                                             .setup = give_inherited_setup, .check = check, .died = world_died, .crashes = 1,
                                             .seconds = 30};

/* The giver has pinned a block of its own, which only its own workers have seen; in the taker's hands nothing holds it. */
static void use_and_give(void *pool)
{
    world_use(pool, 0, 1);
    world_merge(pool, 1);
    give(pool);
}

static void must_evict(void *pool)
{
    EX_CHECK(world_put(pool, 2, 2) == 2, "a pin of the former owner holds a block");
}

/* Evicts a block of its own, and so reads the pins of all. */
static void evict_and_take(void *pool)
{
    world_put(pool, 5, 1);
    world_merge(pool, 2);
    take_and_put(pool);
}

static void give_used_setup(void)
{
    uint32_t number[7];

    taker = world_make(&(struct world_request){.blocks = 1, .hosts = 2, .workers = 1});
    kvp_reserve(taker, 0, 7, number); /* of 8 blocks */
    world_put(taker, 4, 1);
    giver = world_join(1);
    world_put(giver, 0, 1);
    kvp_pool_follow(taker);
    kvp_pool_follow(giver);
    world_spawn(giver, use_and_give, 0);
    world_spawn(taker, evict_and_take, 0);
    world_spawn(taker, take_and_put, EX_LAST);
    world_spawn(taker, must_evict, EX_LAST);
    finish();
}
const struct ex_scenario scenario_giving_used = {.name = "give-used", .what = "a segment moves whose owner has pinned and unpinned a block in it",
                                        .setup = give_used_setup, .check = check, .seconds = 30};

/* ---- who is full asks ---- */

static void put_too_much(void *pool)
{
    world_put(pool, 0, 1);
}

static void must_have_more(void *pool)
{
    kvp_pool_follow(pool);
    EX_CHECK(kvp_owned(&((kvp_pool *)pool)->arena) == 2, "a full host has asked, and one with room has not given");
}

/* Host 1 has the segments of hosts 2 and 3 too. */
static void want_setup(void)
{
    taker = world_make(&(struct world_request){.blocks = 1, .hosts = 4, .workers = 2});
    giver = world_join(1);
    for (uint32_t host = 2; host < 4; host++)
        kvp_pool_give(world_join(host), 1, 1);
    kvp_pool_follow(giver);
    world_hoard(0);
    world_spawn(taker, put_too_much, 0);
    world_spawn(giver, world_follow, 0);
    world_spawn(giver, world_follow, EX_LAST);
    world_spawn(taker, must_have_more, EX_LAST);
}
const struct ex_scenario scenario_wanting = {.name = "want", .what = "a host that is full asks, and gets a segment", .setup = want_setup,
                                    .seconds = 10};

/* ---- deaths that need more hands ---- */

static void take_only_crash_setup(void)
{
    make(2, 0);
    world_spawn(giver, give, 0);
    world_spawn(world_join(0), take_and_put, EX_CRASHABLE);
    world_spawn(taker, world_mend, EX_ON_CRASH);
    world_spawn(taker, put_again, EX_LAST);
    finish();
}
const struct ex_scenario scenario_take_only_crash = {.name = "take-only-crash", .what = "a worker dies while it takes a segment",
                                            .setup = take_only_crash_setup, .check = check, .died = world_died, .crashes = 1,
                                            .seconds = 30};

/* The segment is of no class. A worker dies as it makes it one's; another recovers it, a third gives the segment away. */
static void give_recovered_setup(void)
{
    make(3, 0);
    kvp_pool_give(giver, 0, 1);
    kvp_pool_revoke(giver);
    world_spawn(world_join(1), put_one, EX_CRASHABLE);
    world_spawn(world_join(1), world_mend, EX_ON_CRASH);
    world_spawn(giver, give_twice, EX_ON_CRASH);
    world_spawn(taker, take_and_put, EX_ON_CRASH);
    finish();
}
const struct ex_scenario scenario_giving_recovered = {.name = "give-recovered", .what = "a segment moves while a dead worker's work on it is undone",
                                             .setup = give_recovered_setup, .check = check, .died = world_died, .crashes = 1,
                                             .seconds = 30};

/* A publication finds its key taken: its block goes back, with a label that was for nothing. */
static void put_duplicate(void *pool)
{
    world_put(pool, 0, 1);
    spill(pool);
}

static void take_and_put_two(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    world_put(pool, 1, 2);
}

static void give_duplicate_setup(void)
{
    taker = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    giver = world_join(1);
    world_hoard(0);
    world_put(giver, 0, 1);
    kvp_pool_follow(taker);
    kvp_pool_follow(giver);
    world_spawn(giver, give_twice, 0);
    world_spawn(world_join(1), put_duplicate, 0);
    world_spawn(taker, take_and_put_two, 0);
    finish();
}
const struct ex_scenario scenario_giving_duplicate = {.name = "give-duplicate", .what = "a segment moves in which a publication was for nothing",
                                             .setup = give_duplicate_setup, .check = check, .seconds = 30};
