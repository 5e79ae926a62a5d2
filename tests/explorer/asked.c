/* asked.c -- a removal of another host's block that the owner does not read of: it is asked again, until the block has gone. */
#include "scenarios.h"
#include "world.h"

static kvp_pool *owner, *reader;

static struct ghost {
    uint8_t removed, published;
} *const ghost = (struct ghost *)(void *)ex_ghost;

static void put(void *pool)
{
    IS(world_put(pool, 0, 1), 1);
    world_merge(pool, 1);
    kvp_pool_follow(pool); /* with a fence: the record is there for all */
    ghost->published = 1;
    ex_wake();
}

/* Whoever reads our log next finds only what is at its end. */
static void lap(kvp_pool *pool)
{
    kvp_lock(pool);
    for (uint32_t i = 0; i < pool->arena.layout.log_records; i++)
        kvp_log_event(pool, KVP_EVENT_USED, 0, &(struct kvp_key){0, 0});
    kvp_unlock(pool);
}

static void remove_lapped(void *argument)
{
    kvp_pool *pool = argument;
    struct kvp_key key = world_key(0);

    while (!ghost->published)
        ex_spin();
    int64_t removed = kvp_remove(pool, 0, &key, 1);
    EX_CHECK(removed == 1, "a published key is not found, and not removed: %lld", (long long)removed);
    ghost->removed = 1;
    lap(pool);
    world_merge(pool, 1);
    world_sleep_ms(1000);
    kvp_pool_follow(pool);
}

static void settle(void *argument)
{
    kvp_pool *pool = argument;

    world_sleep_ms(2000); /* a clock of its own */
    kvp_pool_follow(pool);
}

/* Who was lapped reads on at the next tick. */
static void must_be_gone(void *pool)
{
    kvp_pool_follow(pool);
    kvp_pool_follow(pool);
    IS(world_use(pool, 0, 1), 0);
}

static void owner_is_rid_of_it(void *argument)
{
    kvp_pool *pool = argument;
    uint32_t number[2];

    must_be_gone(pool);
    IS(kvp_reserve(pool, 0, 2, number), KVP_OK);
    IS(pool->arena.slots[pool->arena.self].counter[KVP_COUNT_EVICTED].co64, 0);
    IS(kvp_withdraw(pool, 0, number, 2), KVP_OK);
}

/* In the end nobody is asked any more. */
static void must_be_settled(void *argument)
{
    kvp_pool *pool = argument;

    world_sleep_ms(4000);
    must_be_gone(pool);
    IS(co_load(&pool->arena.head->asked), 0);
}

static void check(void)
{
    world_check(owner);
    world_check(reader);
}

static void setup(void)
{
    reader = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 1});
    owner = world_join(1);
    kvp_pool_follow(reader);
    kvp_pool_follow(owner);
    ex_warm(0, reader->arena.class[0].words, 16 * 8);
    ex_warm(0, reader->arena.class[0].labels, 16 * sizeof(struct kvp_label));
    world_spawn(owner, put, 0);
    world_spawn(reader, remove_lapped, 0);
    world_spawn(reader, settle, EX_LAST);
    world_spawn(owner, owner_is_rid_of_it, EX_LAST);
    world_spawn(reader, must_be_settled, EX_LAST);
}
const struct ex_scenario scenario_asked = {.name = "ask-again", .what = "a removal is asked for of an owner that is lapped, and again",
                                           .setup = setup, .check = check, .seconds = 30};
