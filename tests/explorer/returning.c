/* returning.c -- a host that was declared lost is there again: while it is adopted, or afterwards. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 5 };

static struct ghost {
    kvp_pool *back;
    uint8_t owned[2];
} *const ghost = (struct ghost *)(void *)ex_ghost;

static kvp_pool *adopter, *lost;

/* Each host has a segment; host 1 has published in its own, and is silent. */
static void make(void)
{
    adopter = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 1});
    lost = world_join(1);
    world_put(lost, 0, 2);
    kvp_pool_follow(adopter);
    kvp_pool_follow(lost);
    world_time_ns += 100000000000ull;
}

static void adopt(void *pool)
{
    int64_t adopted = kvp_pool_fence(pool, 1, 1);

    EX_CHECK(adopted >= 0 || adopted == KVP_E_INVALID, "a silent host is fenced: %lld", (long long)adopted);
}

/* Its machine was reset and comes up at this very moment. */
static void come_back(void *none)
{
    (void)none;
    kvp_pool *pool = world_open(1);
    EX_CHECK(pool, "a host that was reset cannot come back");
    ghost->back = pool;
    world_merge(pool, 1);
    world_put(pool, 3, 1);
    world_merge(pool, 2);
    world_use(pool, 0, 2);
}

static void follow_back(void *none)
{
    (void)none;
    kvp_pool_follow(ghost->back);
    ghost->owned[1] = (uint8_t)kvp_owned(&ghost->back->arena);
    world_merge(ghost->back, UINT64_MAX);
}

static void follow(void *pool)
{
    kvp_pool_follow(pool);
    ghost->owned[0] = (uint8_t)kvp_owned(&adopter->arena);
}

static void remember(void *pool)
{
    world_remember(pool, KEYS);
}

static void compare_back(void *none)
{
    (void)none;
    world_compare(ghost->back, KEYS);
    world_check_here(ghost->back);
}

static void check(void)
{
    EX_CHECK(ghost->owned[0] + ghost->owned[1] == 2, "of 2 segments host 0 uses %d and host 1 %d", ghost->owned[0],
             ghost->owned[1]);
    world_check(adopter);
}

static void returning_setup(void)
{
    make();
    world_spawn(adopter, adopt, 0);
    world_spawn_machine(2, come_back, 0);
    for (int i = 0; i < 2; i++) {
        world_spawn(adopter, follow, EX_LAST);
        world_spawn_machine(2, follow_back, EX_LAST);
    }
    world_spawn(adopter, remember, EX_LAST);
    world_spawn_machine(2, compare_back, EX_LAST);
}
const struct ex_scenario scenario_returning = {.name = "return", .what = "a host comes back at the moment at which it is adopted",
                                               .setup = returning_setup, .check = check, .seconds = 30};

/* ---- it had not been reset, only cut off: its processes find out ---- */

static void adopt_all(void *pool)
{
    IS(kvp_pool_fence(pool, 1, 1), 1);
    IS(kvp_pool_fence(pool, 1, 1), 0);
}

static void find_out(void *pool)
{
    struct kvp_key key = world_key(0);
    uint64_t ref;
    uint32_t number;

    if (!ex_choose(2))
        world_tick(pool);
    IS(kvp_lookup(pool, 0, &key, 1, &ref), KVP_E_FENCED);
    world_tick(pool);
    IS(kvp_reserve(pool, 0, 1, &number), KVP_E_FENCED);
    IS(kvp_pool_leave(pool), KVP_OK);
    ghost->back = world_open(1);
    EX_CHECK(ghost->back, "a host that was cut off cannot begin anew");
    IS(world_use(ghost->back, 0, 2), 2);
    IS(kvp_reserve(ghost->back, 0, 1, &number), KVP_E_FULL);
}

static void give_one(void *pool)
{
    kvp_pool_follow(pool);
    IS(kvp_pool_give(pool, 1, 1), 1);
}

static void take_and_put(void *none)
{
    (void)none;
    kvp_pool_follow(ghost->back);
    IS(world_put(ghost->back, 3, 1), 1);
    ghost->owned[1] = (uint8_t)kvp_owned(&ghost->back->arena);
    world_merge(ghost->back, UINT64_MAX);
}

static void cut_off_setup(void)
{
    make();
    world_add_memory(1);
    world_spawn(adopter, adopt_all, 0);
    world_spawn(lost, find_out, EX_LAST);
    world_spawn(adopter, give_one, EX_LAST);
    world_spawn_machine(1, take_and_put, EX_LAST);
    world_spawn(adopter, follow, EX_LAST);
    world_spawn(adopter, remember, EX_LAST);
    world_spawn_machine(1, compare_back, EX_LAST);
}
const struct ex_scenario scenario_cut_off = {.name = "cut-off", .what = "a host that was adopted while it was cut off begins anew",
                                             .setup = cut_off_setup, .check = check, .seconds = 10};
