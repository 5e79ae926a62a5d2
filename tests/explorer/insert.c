/* insert.c -- two workers of a host publish under one key: at most one entry stands, and one does. */
#include "scenarios.h"
#include "world.h"

static kvp_pool *checker;

static void publish(void *pool)
{
    world_put(pool, 0, 1);
}

static void find(void *pool)
{
    world_use(pool, 0, 1);
}

static void insert_check(void)
{
    struct kvp_key key = world_key(0);
    const struct kvp_class *class = &checker->arena.class[0];
    uint32_t live = 0;
    uint64_t ref;

    world_check(checker);
    for (uint32_t number = 0; number < class->blocks; number++)
        live += kvp_word_state(nc_load(&class->words[number])) == KVP_LIVE;
    EX_CHECK(live <= 1, "%u blocks are published under one key", live);
    EX_CHECK(live || ex_died(), "nobody won");
    EX_CHECK(kvp_directory_find(checker, 0, &key, 1, 0, &ref) == live, "a block is published and not found");
}

static void insert_setup(void)
{
    checker = world_make(&(struct world_request){.blocks = 2, .hosts = 1, .workers = 4});
    world_spawn(world_join(0), publish, 0);
    world_spawn(world_join(0), publish, 0);
}
const struct ex_scenario scenario_insert = {.name = "insert", .what = "two workers publish under one key", .setup = insert_setup,
                                   .check = insert_check, .seconds = 10};

static void insert_crash_setup(void)
{
    checker = world_make(&(struct world_request){.blocks = 2, .hosts = 1, .workers = 4});
    world_spawn(world_join(0), publish, EX_CRASHABLE);
    world_spawn(world_join(0), publish, 0);
    world_spawn(world_join(0), find, 0);
    world_spawn(checker, world_mend, EX_LAST);
}
const struct ex_scenario scenario_insert_crash = {.name = "insert-crash", .what = "the same, one killed at any step, and a reader",
                                         .setup = insert_crash_setup, .check = insert_check, .died = world_died, .crashes = 1,
                                         .seconds = 60};
