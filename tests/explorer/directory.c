/* directory.c -- what one host publishes or removes, and when another one finds it. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 4 };

static kvp_pool *owner, *reader;

static void put_one(void *pool)
{
    world_put(pool, 0, 1);
}

static void put_two(void *pool)
{
    world_put(pool, 0, 2);
}

static void put_four(void *pool)
{
    world_put(pool, 0, 4);
}

static void use_one(void *pool)
{
    world_use(pool, 0, 1);
}

/* Of one publication a match shows all or nothing, also while it is under way. */
static void use_whole(void *pool)
{
    int there = world_use(pool, 0, 2);

    EX_CHECK(there != 1, "of a publication of two blocks a match shows the first alone");
}

static void check(void)
{
    world_check(owner);
    world_check(reader);
}

static void make(uint32_t workers)
{
    reader = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = workers});
    owner = world_join(1);
    kvp_pool_follow(reader); /* it knows that the other has started */
    kvp_pool_follow(owner);
}

static void finish(void)
{
    world_spawn_compare(owner, reader, KEYS);
}

static void publish_setup(void)
{
    make(1);
    world_spawn(owner, put_two, 0);
    world_spawn(reader, use_whole, 0);
    finish();
}
const struct ex_scenario scenario_publish = {.name = "publish", .what = "two keys published at once, looked for by another host",
                                    .setup = publish_setup, .check = check, .seconds = 10};

/* Two workers of the reading host follow at once, one of them dies. */
static void keeper(void *pool)
{
    world_recover(pool);
}

static void follow_crash_setup(void)
{
    make(2);
    kvp_pool *second = world_join(0);
    world_spawn(owner, put_one, 0);
    world_spawn(second, use_one, EX_CRASHABLE);
    world_spawn(reader, world_follow, 0);
    world_spawn(reader, keeper, EX_LAST);
    finish();
}
const struct ex_scenario scenario_follow_crash = {.name = "follow-crash", .what = "two workers follow a log, one dies doing it",
                                         .setup = follow_crash_setup, .check = check, .died = world_died, .crashes = 1,
                                         .seconds = 30};

/* The publisher dies at any step, and is recovered by another worker of its host. */
static void publish_crash_setup(void)
{
    make(2);
    kvp_pool *second = world_join(1);
    world_spawn(second, put_two, EX_CRASHABLE);
    world_spawn(owner, keeper, EX_ON_CRASH);
    world_spawn(reader, use_one, 0);
    finish();
}
const struct ex_scenario scenario_publish_crash = {.name = "publish-crash", .what = "a worker dies while it publishes",
                                          .setup = publish_crash_setup, .check = check, .died = world_died, .crashes = 1,
                                          .seconds = 30};

/* ---- a host that joins, one that was lapped ---- */

static void join(void *none)
{
    (void)none;
    world_come(1);
}

static void remember(void *pool)
{
    world_remember(pool, KEYS);
}

/* Whatever had been published by then, and what came after, is found by the host that has joined. */
static void compare_joined(void *none)
{
    (void)none;
    world_compare(world_there(1), KEYS);
}

static void check_owner(void)
{
    world_check(owner);
}

/* The owner has one block. */
static void join_setup(void)
{
    world_make(&(struct world_request){.blocks = 1, .hosts = 3, .workers = 1});
    owner = world_join(2);
    world_put(owner, 2, 1);
    world_spawn(owner, put_one, 0);
    world_spawn_machine(1, join, 0);
    world_spawn(owner, remember, EX_LAST);
    world_spawn_machine(1, compare_joined, EX_LAST);
}
const struct ex_scenario scenario_joining = {.name = "join", .what = "a host joins while another evicts and publishes",
                                    .setup = join_setup, .check = check_owner, .seconds = 60};

/* A worker more of a host that is known: its log is one that nobody has read before. */
static void join_and_put(void *none)
{
    (void)none;
    kvp_pool *pool = world_open(1);
    EX_CHECK(pool, "a worker cannot join");
    EX_CHECK(world_put(pool, 0, 1) == 1, "the owner has room");
}

static void look_twice(void *pool)
{
    world_use(pool, 0, 1);
    world_merge(pool, 1);
    world_use(pool, 0, 1);
}

static void must_find(void *pool)
{
    EX_CHECK(world_use(pool, 0, 1), "what a new worker has published is not found by a lookup after that");
}

static void join_worker_setup(void)
{
    make(2);
    world_spawn_machine(1, join_and_put, 0);
    world_spawn(reader, look_twice, 0);
    world_spawn(reader, must_find, EX_LAST);
}
const struct ex_scenario scenario_join_worker = {.name = "join-worker", .what = "a worker joins its host and publishes, another host looks",
                                        .setup = join_worker_setup, .check = check, .seconds = 60};

static void lapped_setup(void)
{
    make(1);
    for (uint32_t i = 0; i + 1 < owner->arena.layout.log_records; i++) /* room for one more record */
        kvp_log_event(owner, KVP_EVENT_USED, 0, &(struct kvp_key){0, 0});
    world_spawn(owner, put_two, 0);
    world_spawn(reader, world_follow, 0);
    finish();
}
const struct ex_scenario scenario_lapped = {.name = "lapped", .what = "a host that reads a log is lapped by two publications",
                                   .setup = lapped_setup, .check = check, .seconds = 60};

/* One look reads all that there is. */
static void follow_to_the_end(void *pool)
{
    kvp_pool_follow(pool);
    uint64_t at = co_load(&reader->arena.read[reader->arena.layout.workers]);
    EX_CHECK(at == 5, "of 5 records that a host has logged another one has read %llu", (unsigned long long)at);
}

/* The reader's cache holds all of the log as it was before. */
static void catch_up_setup(void)
{
    reader = world_make(&(struct world_request){.blocks = 4, .hosts = 2, .workers = 1});
    owner = world_join(1);
    kvp_pool_follow(reader);
    kvp_pool_follow(owner);
    ex_warm(0, kvp_ring(&reader->arena, 1, 0), 8 * sizeof(struct kvp_record));
    world_spawn(owner, put_four, 0);
    world_spawn(reader, follow_to_the_end, EX_LAST);
    finish();
}
const struct ex_scenario scenario_catch_up = {.name = "catch-up", .what = "a host follows a log that it has old copies of",
                                     .setup = catch_up_setup, .check = check, .seconds = 10};

/* ---- removal ---- */

static void remove_one(void *pool)
{
    struct kvp_key key = world_key(0);

    kvp_remove(pool, 0, &key, 1);
}

static void follow_twice(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    kvp_pool_follow(pool);
}

static void must_be_gone(void *pool)
{
    kvp_pool_follow(pool);
    EX_CHECK(!world_use(pool, 0, 1), "a key that was removed is found by host %u", ((const kvp_pool *)pool)->host);
}

static void remove_setup(void)
{
    make(2);
    world_put(owner, 0, 2);
    kvp_pool_follow(reader);
    world_spawn(reader, remove_one, 0);
    world_spawn(owner, world_follow, 0);
    world_spawn(world_join(0), use_one, 0);
    world_spawn(owner, must_be_gone, EX_LAST);
    world_spawn(reader, must_be_gone, EX_LAST);
    finish();
}
const struct ex_scenario scenario_removal = {.name = "remove", .what = "a host removes a key of another's, and a worker of it reads that",
                                    .setup = remove_setup, .check = check, .seconds = 60};

/* A removal of an old publication must not hit the next one under the same key. */
static void remove_and_put(void *pool)
{
    struct kvp_key key = world_key(0);

    kvp_remove(pool, 0, &key, 1);
    world_merge(pool, 1);
    world_put(pool, 0, 1);
    ex_ghost[0] = 1;
}

static void must_be_there(void *pool)
{
    kvp_pool_follow(pool);
    EX_CHECK(!ex_ghost[0] || ex_ghost[1] || world_use(pool, 0, 1), "a key that was published after a removal is not found");
}

static void remove_race_setup(void)
{
    make(1);
    world_put(owner, 0, 1);
    kvp_pool_follow(reader);
    world_spawn(owner, remove_and_put, 0);
    world_spawn(reader, follow_twice, 0);
    world_spawn(owner, must_be_there, EX_LAST);
    world_spawn(reader, must_be_there, EX_LAST);
    finish();
}
const struct ex_scenario scenario_remove_race = {.name = "remove-again", .what = "a key is removed and published again, another host follows",
                                        .setup = remove_race_setup, .check = check, .seconds = 60};

/* Bytes that a host has matched stay while it uses them, whatever the owner removes and publishes. */
static void remove_and_reuse(void *pool)
{
    struct kvp_key key = world_key(0);

    kvp_remove(pool, 0, &key, 1);
    world_merge(pool, 1);
    world_put(pool, 2, 1);
}

static void remove_reuse_setup(void)
{
    make(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(reader);
    world_spawn(owner, remove_and_reuse, 0);
    world_spawn(reader, use_one, 0);
    finish();
}
const struct ex_scenario scenario_remove_reuse = {.name = "remove-reuse", .what = "a key is removed and its block used anew while another host pins it",
                                         .setup = remove_reuse_setup, .check = check, .seconds = 10};

/* What is removed while somebody has it pinned loses its name only: nobody who comes later may learn it. */
static void come_late(void *none)
{
    (void)none;
    kvp_pool *pool = world_open(2);
    EX_CHECK(pool, "a host cannot join");
    EX_CHECK(!world_use(pool, 0, 1), "a host that joins finds a key that was removed");
}

static void pin_and_keep(void *pool)
{
    struct kvp_key key = world_key(0);
    uint64_t ref;

    kvp_match(pool, 0, &key, 1, &ref);
}

static void remove_pinned_setup(void)
{
    reader = world_make(&(struct world_request){.blocks = 2, .hosts = 3, .workers = 1});
    owner = world_join(1);
    world_put(owner, 0, 1);
    kvp_pool_follow(reader);
    world_spawn(owner, remove_one, 0);
    world_spawn(reader, pin_and_keep, 0);
    world_spawn_machine(2, come_late, EX_LAST);
}
const struct ex_scenario scenario_remove_pinned = {.name = "remove-pinned", .what = "a key is removed while another host has it pinned, a third joins",
                                          .setup = remove_pinned_setup, .check = check, .seconds = 10};
