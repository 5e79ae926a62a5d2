/* adopters.c -- three hosts: one adopts another and is lost itself in the middle of it; the others, and they, go on. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 6, OWNER_AGAIN = 3, ADOPTER_AGAIN = 4 }; /* machines where they come back */
#define SECOND 1000000000ull

static kvp_pool *owner, *adopter, *other;

static void set_lost(void)
{
    ex_ghost[0] = 1;
    ex_wake();
}

static void adopt_owner(void *pool)
{
    ex_reset_host(2);
    while (kvp_pool_fence(pool, 2, 1) == KVP_E_BUSY)
        ex_spin();
}

/* Host 1 is reset while it adopts host 2, and host 0 adopts it; host 2 comes back on another machine. */
static void adopt_adopter(void *pool)
{
    int64_t adopted;

    ex_reset_host(1);
    while ((adopted = kvp_pool_fence(pool, 1, 1)) == KVP_E_BUSY)
        ex_spin();
    EX_CHECK(adopted >= 0, "an adopter that was reset cannot be adopted: %lld", (long long)adopted);
}

static void return_owner(void *none)
{
    (void)none;
    world_come(2);
}

static void adopter_lost_check(void)
{
    uint32_t here = kvp_owned(&other->arena), there = kvp_owned(&world_there(OWNER_AGAIN)->arena);

    EX_CHECK(here + there == 3, "of 3 segments the last survivor owns %u, and the host that came back %u", here, there);
}

/* It is not adopted but comes back itself, and goes on with its adoption only where nobody has relied on its being lost. */
static void reset_adopter(void *pool)
{
    (void)pool;
    ex_reset_host(1);
    set_lost();
}

static void reset_and_declare(void *pool)
{
    adopt_adopter(pool);
    set_lost();
}

static void return_adopter(void *none)
{
    (void)none;
    while (!ex_ghost[0])
        ex_spin();
    kvp_pool *pool = world_come(1);
    world_merge(pool, 1);
    kvp_pool_follow(pool);
}

static void adopter_reborn_check(void)
{
    uint32_t here = kvp_owned(&other->arena), there = kvp_owned(&world_there(OWNER_AGAIN)->arena);
    uint32_t its = kvp_owned(&world_there(ADOPTER_AGAIN)->arena);

    EX_CHECK(here + there + its == 3, "of 3 segments the hosts own %u, %u and %u", here, its, there);
}

/* Of three hosts the last is adopted by the second. */
static void make(void)
{
    other = world_make(&(struct world_request){.blocks = 2, .hosts = 3, .workers = 2});
    adopter = world_join(1);
    owner = world_join(2);
    world_put(owner, 0, 2);
    kvp_pool_follow(other);
    kvp_pool_follow(adopter);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
    world_spawn(adopter, adopt_owner, 0);
}

static void adopter_reborn(void (*lose)(void *pool))
{
    make();
    world_spawn(other, lose, 0);
    world_spawn_machine(OWNER_AGAIN, return_owner, EX_ON_CRASH);
    world_spawn_machine(ADOPTER_AGAIN, return_adopter, EX_ON_CRASH);
    world_spawn_machine(ADOPTER_AGAIN, world_follow_there, EX_LAST);
    world_spawn_compare_there(OWNER_AGAIN, other, KEYS);
}

static void adopter_reborn_setup(void)
{
    adopter_reborn(reset_adopter);
}
const struct ex_scenario scenario_adopter_reborn = {.name = "adopter-reborn", .what = "a host is reset while it adopts another, and both come back",
                                           .setup = adopter_reborn_setup, .check = adopter_reborn_check, .seconds = 60};

static void adopter_fenced_setup(void)
{
    adopter_reborn(reset_and_declare);
}
const struct ex_scenario scenario_adopter_fenced = {.name = "adopter-fenced", .what = "the same, and a third adopts the adopter",
                                           .setup = adopter_fenced_setup, .check = adopter_reborn_check, .seconds = 60};

static void adopter_lost_setup(void)
{
    make();
    world_spawn(other, adopt_adopter, 0);
    world_spawn_machine(OWNER_AGAIN, return_owner, EX_ON_CRASH);
    world_spawn_compare_there(OWNER_AGAIN, other, KEYS);
}
const struct ex_scenario scenario_adopter_lost = {.name = "adopter-lost", .what = "a host is reset while it adopts another, which comes back",
                                         .setup = adopter_lost_setup, .check = adopter_lost_check, .seconds = 60};
