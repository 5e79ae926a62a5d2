/* pins.c -- a host reads blocks of another, in place or by copy, while the owner evicts them and fills them anew. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 4 };

static kvp_pool *owner, *reader;

/* Two blocks, full: whoever wants room evicts. The reader's host knows them. */
static void make(uint32_t workers, uint32_t lines)
{
    reader = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = workers, .lines = lines});
    owner = world_join(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(reader);
    kvp_pool_follow(owner);
}

static void put_one(void *pool)
{
    world_put(pool, 2, 1);
}

static void put_two(void *pool)
{
    world_put(pool, 2, 2);
}

static void use_one(void *pool)
{
    world_use(pool, 0, 1);
}

static void use_two(void *pool)
{
    world_use(pool, 0, 2);
}

static void use_twice(void *pool)
{
    world_use(pool, 0, 1);
    world_merge(pool, 1);
    world_use(pool, 2, 1);
}

static void copy_twice(void *pool)
{
    world_read(pool, 0);
    world_merge(pool, 1);
    world_read(pool, 2);
}

/* Nothing is pinned any more, so both blocks can be evicted. */
static void fill_again(void *pool)
{
    int published = world_put(pool, 8, 2);

    EX_CHECK(published == 2, "all pins are taken back, and %d of 2 blocks can be evicted", published);
}

static void finish(void)
{
    world_spawn_compare(owner, reader, KEYS);
    world_spawn(owner, fill_again, EX_LAST);
}

static void pin_check(void)
{
    world_check(owner);
}

static void pin_setup(void)
{
    make(1, 1);
    world_spawn(owner, put_one, 0);
    world_spawn(reader, use_twice, 0);
}
const struct ex_scenario scenario_pin = {.name = "pin", .what = "a host pins a block of another, which evicts it, and then the new one",
                                .setup = pin_setup, .check = pin_check, .seconds = 10};

static void pin_after_setup(void)
{
    make(1, 1);
    world_spawn(owner, put_one, 0);
    world_spawn(reader, use_one, 0);
    finish();
}
const struct ex_scenario scenario_pin_after = {.name = "pin-after", .what = "the same, and what everybody sees afterwards",
                                      .setup = pin_after_setup, .check = pin_check, .seconds = 10};

static void pin_batch_setup(void)
{
    make(1, 1);
    world_spawn(owner, put_two, 0);
    world_spawn(reader, use_two, 0);
}
const struct ex_scenario scenario_pin_batch = {.name = "pin-batch", .what = "a host pins two blocks of another at once, which evicts both",
                                      .setup = pin_batch_setup, .check = pin_check, .seconds = 10};

static void pin_own_setup(void)
{
    make(2, 1);
    world_spawn(owner, put_one, 0);
    world_spawn(world_join(1), use_one, 0);
    world_spawn(reader, use_one, 0);
}
const struct ex_scenario scenario_pin_own = {.name = "pin-own", .what = "a worker of the owner and one of another host pin a block",
                                    .setup = pin_own_setup, .check = pin_check, .seconds = 10};

static void copy_setup(void)
{
    make(1, 2);
    world_spawn(owner, put_one, 0);
    world_spawn(reader, copy_twice, 0);
}
const struct ex_scenario scenario_copy = {.name = "copy", .what = "a host copies a block of another out, which evicts it",
                                 .setup = copy_setup, .check = pin_check, .seconds = 10};

static void copy_after_setup(void)
{
    make(1, 2);
    world_spawn(owner, put_one, 0);
    world_spawn(reader, copy_twice, 0);
    finish();
}
const struct ex_scenario scenario_copy_after = {.name = "copy-after", .what = "the same, and what everybody sees afterwards",
                                       .setup = copy_after_setup, .check = pin_check, .seconds = 10};

/* The owner takes the block before the pin stands: the slot is empty again, for all to see, without another pin after it. */
static void pin_refused_setup(void)
{
    make(1, 1);
    world_spawn(owner, put_one, 0);
    world_spawn(reader, use_one, 0);
    world_spawn(owner, fill_again, EX_LAST);
}
const struct ex_scenario scenario_pin_refused = {.name = "pin-refused", .what = "a host pins a block that goes, and pins no more",
                                        .setup = pin_refused_setup, .check = pin_check, .seconds = 10};

/* A worker that holds no pin costs evictors nothing after its next tick. */
static void pin_idle_check(void)
{
    uint64_t high = ex_memory_word(kvp_pin_high(&reader->arena, reader->host) + reader->arena.self);

    EX_CHECK(high == 0, "nothing is pinned, and evictors read %llu slots of an idle worker", (unsigned long long)high);
    world_check(owner);
}

static void pin_idle_setup(void)
{
    make(1, 1);
    world_spawn(owner, put_one, 0);
    world_spawn(reader, use_one, 0);
    world_spawn(reader, world_tick, EX_LAST);
}
const struct ex_scenario scenario_pin_idle = {.name = "pin-idle", .what = "a host has pinned, and pins nothing any more",
                                     .setup = pin_idle_setup, .check = pin_idle_check, .seconds = 10};

/* ---- deaths ---- */

static void pin_crash_setup(void)
{
    make(2, 1);
    world_spawn(owner, put_one, 0);
    world_spawn(world_join(0), use_one, EX_CRASHABLE);
    world_spawn(reader, world_mend, EX_ON_CRASH);
    world_spawn(owner, fill_again, EX_LAST);
}
const struct ex_scenario scenario_pin_crash = {.name = "pin-crash", .what = "a worker dies while it pins a block of another host",
                                      .setup = pin_crash_setup, .check = pin_check, .died = world_died, .crashes = 1,
                                      .seconds = 10};

static void evict_crash_setup(void)
{
    make(2, 1);
    world_spawn(world_join(1), put_one, EX_CRASHABLE);
    world_spawn(owner, world_mend, EX_ON_CRASH);
    world_spawn(reader, use_one, 0);
    finish();
}
const struct ex_scenario scenario_evict_crash = {.name = "evict-crash", .what = "a worker dies while it evicts what another host pins",
                                        .setup = evict_crash_setup, .check = pin_check, .died = world_died, .crashes = 1,
                                        .seconds = 10};

/* ---- a block that was filled through a view ---- */

static void put_view(void *pool)
{
    kvp_pool *mine = pool;
    struct kvp_key key = world_key(2);
    uint32_t number;
    uint64_t ref;

    if (kvp_reserve(mine, 0, 1, &number) != KVP_OK)
        return;
    nc_store((nc_u64 *)(void *)kvp_block_data(&mine->arena, kvp_block(0, number)), world_content(2, 0));
    EX_CHECK(kvp_publish(mine, 0, &number, &key, 1, &ref) == 1, "a reserved block cannot be published");
}

static void view_setup(void)
{
    make(1, 1);
    world_spawn(owner, put_view, 0);
    world_spawn(reader, use_twice, 0);
    finish();
}
const struct ex_scenario scenario_view = {.name = "view", .what = "a host publishes what it has filled through a view, another one reads",
                                 .setup = view_setup, .check = pin_check, .seconds = 10};
