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

static void pin_and_take(void *pool)
{
    world_use(pool, 0, 1);
    world_merge(pool, 1);
    take_and_put(pool);
}

static void keeper(void *pool)
{
    world_recover(pool);
    world_merge(pool, 1);
    kvp_pool_follow(pool);
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

static void remember(void *pool)
{
    kvp_pool_follow(pool);
    world_remember(pool, KEYS);
}

static void compare(void *pool)
{
    world_compare(pool, KEYS);
}

static void check(void)
{
    EX_CHECK(ex_ghost[8] + ex_ghost[9] == 2, "of 2 segments host 0 owns %d and host 1 %d", ex_ghost[8], ex_ghost[9]);
    world_check(giver);
    world_check(taker);
}

static void finish(void)
{
    world_spawn(giver, keeper, EX_LAST);
    world_spawn(taker, keeper, EX_LAST);
    world_spawn(giver, count, EX_LAST);
    world_spawn(taker, count, EX_LAST);
    world_spawn(giver, count, EX_LAST);
    world_spawn(taker, remember, EX_LAST);
    world_spawn(giver, compare, EX_LAST);
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
    world_spawn(giver, keeper, EX_ON_CRASH);
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
    world_spawn(taker, keeper, EX_ON_CRASH);
    finish();
}
const struct ex_scenario scenario_taker_crash = {.name = "take-crash", .what = "a worker dies while it takes a segment that is taken back",
                                        .setup = taker_crash_setup, .check = check, .died = world_died, .crashes = 1,
                                        .seconds = 60};
