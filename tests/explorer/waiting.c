/* waiting.c -- a worker sleeps until another one publishes: nobody is left asleep beside what it waits for. */
#include "scenarios.h"
#include "standins.h"
#include "world.h"

enum { KEY = 3 };

static kvp_pool *maker, *sleeper;

static void make_one(void *pool)
{
    world_put(pool, KEY, 1);
}

static void make_two(void *pool)
{
    world_put(pool, KEY + 1, 1);
    world_put(pool, KEY, 1);
}

static void wait_for_one(void *argument)
{
    kvp_pool *pool = argument;
    struct kvp_key key = world_key(KEY);

    int64_t found = kvp_wait(pool, 0, &key, 1, 1);
    EX_CHECK(found == 0 || found == 1, "waiting for a key answers %lld", (long long)found);
}

/* Whoever went to sleep was woken, once the key was there. */
static void nobody_sleeps(void *pool)
{
    struct kvp_key key = world_key(KEY);
    uint64_t ref;

    IS(kvp_lookup(pool, 0, &key, 1, &ref), 1);
    IS(standins_asleep(), 0);
}

static void setup(void (*make)(void *pool))
{
    maker = world_make(&(struct world_request){.blocks = 4, .hosts = 1, .workers = 3});
    sleeper = world_join(0);
    world_spawn(maker, make, 0);
    world_spawn(sleeper, wait_for_one, 0);
}

static void wait_setup(void)
{
    setup(make_one);
    world_spawn(maker, nobody_sleeps, EX_LAST);
}
const struct ex_scenario scenario_wait = {.name = "wait", .what = "a worker waits for a key that another one publishes",
                                          .setup = wait_setup, .preemptions = 3, .events = 2};

static void wait_two_setup(void)
{
    setup(make_two);
    world_spawn(world_join(0), wait_for_one, 0);
    world_spawn(maker, nobody_sleeps, EX_LAST);
}
const struct ex_scenario scenario_wait_two = {.name = "wait-two", .what = "two workers wait for a key, another key comes before it",
                                              .setup = wait_two_setup, .preemptions = 2, .events = 2};

/* What another host publishes is heard of when the logs are read. */
static void follow_last(void *pool)
{
    kvp_pool_follow(pool);
    nobody_sleeps(pool);
}

static void wait_afar_setup(void)
{
    maker = world_make(&(struct world_request){.blocks = 4, .hosts = 2, .workers = 2});
    sleeper = world_join(1);
    kvp_pool *follower = world_join(1);
    world_spawn(maker, make_one, 0);
    world_spawn(sleeper, wait_for_one, 0);
    world_spawn(follower, world_follow, 0);
    world_spawn(follower, follow_last, EX_LAST);
}
const struct ex_scenario scenario_wait_afar = {.name = "wait-afar", .what = "a worker waits for a key of another host, whose logs a third one reads",
                                               .setup = wait_afar_setup, .preemptions = 2, .events = 2};
