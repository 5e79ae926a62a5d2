/* offers.c -- a segment is on offer when its taker is lost, or both are; the taker comes back while others act on that. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 4, TAKER_AGAIN = 3 }; /* the machine where it comes back */
#define SECOND 1000000000ull

static kvp_pool *giver, *taker, *other;

/* The last host offers its segment, empty, to host 1, which has not looked yet. */
static void make(uint32_t hosts)
{
    other = world_make(&(struct world_request){.blocks = 1, .hosts = hosts, .workers = 2});
    taker = world_join(1);
    giver = hosts > 2 ? world_join(2) : other;
    kvp_pool_follow(other);
    kvp_pool_follow(taker);
    kvp_pool_follow(giver);
    kvp_pool_give(giver, 1, 1);
    world_time_ns += 100 * SECOND;
}

static void lose(kvp_pool *pool, uint32_t host)
{
    ex_reset_host((int)host);
    while (kvp_pool_fence(pool, host, 1) == KVP_E_BUSY)
        ex_spin();
    world_merge(pool, host);
}

static void return_and_take(void *none)
{
    (void)none;
    kvp_pool *pool = world_come(1);
    world_merge(pool, 1);
    kvp_pool_follow(pool);
    world_merge(pool, 2);
    world_put(pool, 2, 1);
}

/* Each segment is one host's. */
static void check_owned(uint32_t segments)
{
    uint32_t here = kvp_owned(&other->arena), there = kvp_owned(&world_there(TAKER_AGAIN)->arena);

    EX_CHECK(here + there == segments, "of %u segments host 0 owns %u, and the host that came back %u", segments, here, there);
}

static void lose_both(void *pool)
{
    lose(pool, 1);
    lose(pool, 2);
    world_put(pool, 0, 1);
}

static void lose_both_check(void)
{
    check_owned(3);
}

static void lose_both_setup(void)
{
    make(3);
    world_spawn(other, lose_both, 0);
    world_spawn_machine(TAKER_AGAIN, return_and_take, EX_ON_CRASH);
    world_spawn_compare_there(TAKER_AGAIN, other, KEYS);
}
const struct ex_scenario scenario_offer_adopted = {.name = "offer-adopted", .what = "an offer of a lost host is adopted, and its taker comes back",
                                          .setup = lose_both_setup, .check = lose_both_check, .seconds = 60};

/* A worker of the adopter dies in the middle of it; another goes on. */
static void lose_taker(void *pool)
{
    lose(pool, 1);
    ex_ghost[0] = 1;
    ex_wake();
}

static void lose_giver(void *pool)
{
    while (!ex_ghost[0])
        ex_spin();
    lose(pool, 2);
}

static void go_on(void *pool)
{
    world_mend(pool);
    lose(pool, 2);
}

static void adopter_dies_setup(void)
{
    make(3);
    world_spawn(other, lose_taker, 0);
    world_spawn(world_join(0), lose_giver, EX_CRASHABLE);
    world_spawn_machine(TAKER_AGAIN, return_and_take, EX_ON_CRASH);
    world_spawn(other, go_on, EX_LAST);
    world_spawn_compare_there(TAKER_AGAIN, other, KEYS);
}
const struct ex_scenario scenario_offer_crash = {.name = "offer-crash", .what = "the same, and a worker dies as it adopts the offer",
                                        .setup = adopter_dies_setup, .check = lose_both_check, .died = world_died, .crashes = 1,
                                        .seconds = 60};

static void lose_and_revoke(void *pool)
{
    lose(pool, 1);
    kvp_pool_revoke(pool);
    world_merge(pool, 3);
    world_put(pool, 0, 1);
}

static void lose_taker_check(void)
{
    check_owned(2);
}

static void lose_taker_setup(void)
{
    make(2);
    world_spawn(other, lose_and_revoke, 0);
    world_spawn_machine(TAKER_AGAIN, return_and_take, EX_ON_CRASH);
    world_spawn_compare_there(TAKER_AGAIN, other, KEYS);
}
const struct ex_scenario scenario_offer_revoked = {.name = "offer-revoked", .what = "an offer is taken back, and its lost taker comes back",
                                          .setup = lose_taker_setup, .check = lose_taker_check, .seconds = 60};
