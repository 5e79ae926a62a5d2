/* verbs.c -- all that a program asks of a pool, by one host while another one publishes, evicts and removes. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 5 };

static kvp_pool *owner, *reader;
static struct kvp_key key[KEYS];
static uint64_t content[KEYS][EX_LINE / 8];
static const void *from[KEYS];

/* The owner has two blocks, full; the reader's host has eight, empty. */
static void make(uint32_t workers)
{
    reader = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = workers});
    owner = world_join(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(reader);
    kvp_pool_follow(owner);
    for (uint32_t k = 0; k < KEYS; k++) {
        key[k] = world_key(k);
        content[k][0] = world_content(k, 0);
        from[k] = content[k];
    }
}

static void put_and_remove(void *pool)
{
    world_put(pool, 2, 1);
    world_merge(pool, 1);
    kvp_remove(pool, 0, &key[1], 1);
}

static void check(void)
{
    world_check(owner);
    world_check(reader);
}

static void finish(void)
{
    world_spawn(owner, world_follow, EX_LAST);
    world_spawn_compare(owner, reader, KEYS);
}

/* ---- references that are kept ---- */

/* A reference gives what it was made for, or it is stale: one by one, and as a hold of all or none. */
static void pin_by_reference(void *argument)
{
    kvp_pool *pool = argument;
    uint64_t ref[2], one[1];

    if (kvp_lookup(pool, 0, key, 2, ref) < 2)
        return;
    ex_step();
    struct kvp_hold *hold = kvp_hold_new(pool, 0, 2);
    int64_t pinned = kvp_hold_pin(hold, ref, 2);
    EX_CHECK(pinned == 2 || pinned == KVP_E_STALE || pinned == KVP_E_PINS, "a hold of two answers %lld", (long long)pinned);
    for (uint32_t k = 0; k < 2; k++) {
        EX_CHECK((hold->refs[k] != 0) == (pinned == 2), "a hold has one of two");
        if (pinned == 2)
            world_look(pool, ref[k], k);
    }
    kvp_hold_end(hold);
    one[0] = ref[1];
    pinned = kvp_pin_refs(pool, one, 1);
    EX_CHECK(pinned == 1 || (pinned == KVP_E_STALE && one[0] == 0), "a reference answers %lld", (long long)pinned);
    if (pinned == 1)
        world_look(pool, ref[1], 1);
    kvp_unpin_refs(pool, one, 1);
}

static void by_reference_setup(void)
{
    make(1);
    world_spawn(owner, put_and_remove, 0);
    world_spawn(reader, pin_by_reference, 0);
    finish();
}
const struct ex_scenario scenario_by_reference = {.name = "by-reference", .what = "references to blocks of another host, which ends them",
                                                  .setup = by_reference_setup, .check = check, .seconds = 30};

/* ---- in and out by copy ---- */

/* What is present is not stored again, and not counted as stored; what is read is right. */
static void put_and_read(void *argument)
{
    kvp_pool *pool = argument;
    uint64_t out[KEYS][EX_LINE / 8];
    void *to[KEYS];
    uint8_t got[KEYS];

    int64_t stored = kvp_put(pool, 0, key + 1, 3, from + 1, EX_LINE);
    EX_CHECK(stored >= 1 && stored <= 3, "of 3 keys, of which others have some, %lld are stored", (long long)stored);
    world_merge(pool, 1);
    for (uint32_t k = 0; k < KEYS; k++)
        to[k] = out[k];
    int64_t read = kvp_read(pool, 0, key, KEYS, to, EX_LINE, got);
    EX_CHECK(got[3] && !got[4] && read >= 1, "of the keys that were stored %lld are read", (long long)read);
    for (uint32_t k = 0; k < KEYS; k++)
        EX_CHECK(!got[k] || out[k][0] == content[k][0], "key %u is read as %#llx", k, (unsigned long long)out[k][0]);
    world_merge(pool, 2);
    kvp_touch(pool, 0, key, KEYS);
    kvp_remove(pool, 0, key + 3, 1);
    world_merge(pool, 3);
    world_tick(pool);
}

static void by_copy_setup(void)
{
    make(1);
    world_spawn(owner, put_and_remove, 0);
    world_spawn(reader, put_and_read, 0);
    finish();
}
const struct ex_scenario scenario_by_copy = {.name = "by-copy", .what = "batches with duplicates are put and read while another host evicts",
                                             .setup = by_copy_setup, .check = check, .preemptions = 3, .events = 3};

/* Two workers put the same keys at once: each key is stored once. */
static void put_same(void *pool)
{
    int64_t stored = kvp_put(pool, 0, key + 2, 2, from + 2, EX_LINE);

    EX_CHECK(stored >= 0, "a batch answers %lld", (long long)stored);
    ex_ghost[0] = (uint8_t)(ex_ghost[0] + stored);
}

static void stored_once(void *pool)
{
    (void)pool;
    IS(ex_ghost[0], 2);
    IS(world_use(pool, 2, 2), 2);
}

static void put_same_setup(void)
{
    make(2);
    world_spawn(reader, put_same, 0);
    world_spawn(world_join(0), put_same, 0);
    world_spawn(reader, stored_once, EX_LAST);
    finish();
}
const struct ex_scenario scenario_put_same = {.name = "put-same", .what = "two workers put the same batch of keys", .setup = put_same_setup,
                                              .check = check, .preemptions = 3, .events = 2};

/* ---- a maker that goes on reading ---- */

/* What is published is ours until we let it go, however much the other evicts; what lost to the other's is ours to fill. */
static void keep_and_look(void *argument)
{
    kvp_pool *pool = argument;
    uint32_t number;
    uint64_t ref = 0;

    int kept = world_keep(pool, 2, &number, &ref);
    EX_CHECK(kept >= -1, "keeping answers %d", kept);
    if (kept < 0)
        return;
    EX_CHECK((kept == 1) == (ref != 0) && (kept == 1) == (number == KVP_NO_BLOCK), "kept %d, block %u", kept, number);
    for (int i = 0; kept && i < 2; i++) {
        ex_step();
        world_look(pool, ref, 2);
    }
    kvp_unpin_refs(pool, &ref, (uint32_t)kept);
    if (!kept)
        EX_CHECK(kvp_withdraw(pool, 0, &number, 1) == KVP_OK, "a block that lost is not ours");
}

static void put_others(void *pool)
{
    world_put(pool, 2, 1);
    world_put(pool, 3, 2);
}

static void kept_setup(void)
{
    reader = world_make(&(struct world_request){.blocks = 2, .hosts = 1, .workers = 2});
    owner = world_join(0);
    world_put(owner, 0, 2);
    world_spawn(reader, keep_and_look, 0);
    world_spawn(owner, put_others, 0);
}
const struct ex_scenario scenario_kept = {.name = "kept", .what = "a block that its maker goes on reading, while another worker evicts",
                                          .setup = kept_setup, .check = check, .preemptions = 2};

/* ---- keys that do not fit the homes of their group ---- */

enum { GROUP = 32 }; /* keys that fill both homes */

static struct kvp_key crowded(uint32_t k)
{
    return (struct kvp_key){0x100000001ull, 0x1000 + k};
}

static int put_crowded(kvp_pool *pool, uint32_t k)
{
    struct kvp_key one = crowded(k);
    const void *bytes = content[0];

    return (int)kvp_put(pool, 0, &one, 1, &bytes, EX_LINE);
}

static int find_crowded(kvp_pool *pool, uint32_t k)
{
    struct kvp_key one = crowded(k);
    uint64_t ref;

    return (int)kvp_lookup(pool, 0, &one, 1, &ref);
}

static void put_one_more(void *pool)
{
    int stored = put_crowded(pool, GROUP);

    ex_ghost[0] = (uint8_t)(ex_ghost[0] + stored);
}

static void find_all(void *pool)
{
    IS(find_crowded(pool, 0), 1);
    kvp_pool_follow(pool);
    IS(find_crowded(pool, GROUP - 1), 1);
}

static void one_stands(void *pool)
{
    struct kvp_key one = crowded(GROUP);

    kvp_pool_follow(pool);
    IS(ex_ghost[0], 1);
    IS(find_crowded(pool, GROUP), 1);
    for (uint32_t k = 0; k < GROUP; k++)
        IS(find_crowded(pool, k), 1);
    if (pool == reader)
        return;
    IS(co_load(&((kvp_pool *)pool)->spilled[0]), 1);
    IS(kvp_remove(pool, 0, &one, 1), 1);
    IS(co_load(&((kvp_pool *)pool)->spilled[0]), 0);
}

static void is_forgotten(void *pool)
{
    kvp_pool_follow(pool);
    IS(find_crowded(pool, GROUP), 0);
    IS(co_load(&reader->spilled[0]), 0);
}

static void crowded_setup(void)
{
    reader = world_make(&(struct world_request){.blocks = 72, .hosts = 2, .workers = 2});
    owner = world_join(1);
    for (uint32_t k = 0; k < GROUP; k++)
        IS(put_crowded(owner, k), 1);
    kvp_pool_follow(reader);
    kvp_pool_follow(reader);
    world_spawn(owner, put_one_more, 0);
    world_spawn(world_join(1), put_one_more, 0);
    world_spawn(reader, find_all, 0);
    world_spawn(reader, one_stands, EX_LAST);
    world_spawn(owner, one_stands, EX_LAST);
    world_spawn(reader, is_forgotten, EX_LAST);
}
const struct ex_scenario scenario_crowded = {.name = "crowded", .what = "two workers publish a key whose homes are full, a third one looks",
                                             .setup = crowded_setup, .check = check, .preemptions = 3, .events = 2};
