/* damage.c -- one worker by itself: what the checker and the opener find in an image that is damaged. */
#include "scenarios.h"
#include "world.h"

#include <string.h>

static kvp_pool *first;

/* ---- the checker ---- */

static void expect(kvp_pool *pool, const char *words)
{
    struct kvp_check check;

    IS(kvp_pool_check(pool, &check), KVP_OK);
    EX_CHECK(check.problems && strstr(check.first, words), "the checker should find '%s' and says '%s'", words, check.first);
}

static void expect_clean(kvp_pool *pool)
{
    struct kvp_check check;

    IS(kvp_pool_check(pool, &check), KVP_OK);
    EX_CHECK(!check.problems, "after the repair: %s", check.first);
}

static void bad_pool_word(kvp_pool *pool, nc_u64 *at, uint64_t value, const char *words)
{
    uint64_t right = nc_load(at);

    nc_store(at, value);
    expect(pool, words);
    nc_store(at, right);
    expect_clean(pool);
}

static void bad_host_word(kvp_pool *pool, co_u64 *at, uint64_t value, const char *words)
{
    uint64_t right = co_load(at);

    co_store(at, value);
    expect(pool, words);
    co_store(at, right);
    expect_clean(pool);
}

static void words(kvp_pool *pool, uint32_t live, uint32_t free_one)
{
    struct kvp_class *class = &pool->arena.class[0];
    nc_u64 *word = &class->words[free_one];

    bad_pool_word(pool, word, kvp_word(1, 0, 7), "none of the six");
    bad_pool_word(pool, word, kvp_word(1, 1, KVP_FREE), "names an owner");
    bad_pool_word(pool, word, kvp_word(1, 900, KVP_OWN), "no slot of this pool");
    bad_pool_word(pool, word, kvp_word(1, 1, KVP_OWN), "which is gone");
    bad_pool_word(pool, word, kvp_word(1, 0, KVP_ABSENT), "is absent");
    bad_pool_word(pool, &class->words[live], kvp_word(77, 0, KVP_LIVE), "no entry names it");
    bad_host_word(pool, &class->hints[0], 0, "has no hint");
    bad_host_word(pool, &class->summary[0], 0, "has no hint");
    uint64_t right = nc_load(word);
    struct kvp_check check;
    nc_store(word, kvp_word(1, 0, KVP_LIVE)); /* no damage: a block that was removed while it was pinned has no name */
    IS(kvp_pool_check(pool, &check), KVP_OK);
    IS(check.problems, 0);
    IS(check.unlinked, 1);
    nc_store(word, right);
}

static void pins_and_segments(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;
    uint64_t beyond = 1ull << 32 | 999, there = 1ull << 32 | 1;

    bad_pool_word(pool, &kvp_pins(arena, 0, 0)[3], beyond, "does not exist");
    bad_pool_word(pool, &kvp_pins(arena, 0, 1)[3], there, "still pins");
    bad_host_word(pool, &arena->segments[0], 99, "no state and class");
    bad_host_word(pool, &arena->segments[0], kvp_segment_word(KVP_SEGMENT_FREE, 0, 0), "its class does not hold");
    bad_host_word(pool, &arena->segments[1], kvp_segment_word(KVP_SEGMENT_HELD, 0, 0), "we use it");
    bad_pool_word(pool, &kvp_owners(arena, 0)[0], 0, "no host owns it");
    uint64_t free_segment = co_load(&arena->segments[0]); /* what a worker moves at this moment may be either way */
    struct kvp_check check;
    co_store(&arena->segments[0], kvp_segment_word(KVP_SEGMENT_DRAINING, 0, 0));
    IS(kvp_pool_check(pool, &check), KVP_OK);
    IS(check.problems, 0);
    co_store(&arena->segments[0], free_segment);
}

static void entries(kvp_pool *pool, uint32_t live)
{
    struct kvp_class *class = &pool->arena.class[0];
    struct kvp_key key = world_key(0);
    struct kvp_entry *entry = pool->directory;
    uint64_t ref;

    IS(kvp_lookup(pool, 0, &key, 1, &ref), 1);
    IS(kvp_block_number((uint32_t)ref), live);
    while ((co_load(&entry->value) & KVP_REF_MASK) != ref)
        entry++;
    bad_host_word(pool, &entry->value, 0, "no entry names it");
    bad_host_word(pool, &entry->tag, 99, "no entry names it");
    bad_host_word(pool, &class->tags[live].high, 99, "no entry names it");
    struct kvp_entry *empty = pool->directory;
    while (co_load(&empty->value))
        empty++;
    bad_host_word(pool, &empty->value, 1ull << 63 | 999, "does not exist");
    bad_host_word(pool, &empty->value, 1ull << 63 | 5ull << 32 | 7, "not published");
    bad_host_word(pool, &empty->value, 1ull << 63 | ref, "has another key");
    IS(kvp_lookup(pool, 0, &key, 1, &ref), 1);
}

static void damage(void *argument)
{
    kvp_pool *pool = argument;
    struct kvp_key key = world_key(0);
    uint64_t ref;

    IS(kvp_lookup(pool, 0, &key, 1, &ref), 1);
    uint32_t live = kvp_block_number((uint32_t)ref);
    expect_clean(pool);
    words(pool, live, 7);
    pins_and_segments(pool);
    entries(pool, live);
    bad_pool_word(pool, (nc_u64 *)(void *)&pool->super->created_ns, 99, "superblock");
}

static void check(void)
{
    world_check(first);
}

static void damage_setup(void)
{
    first = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    world_join(1);
    world_put(first, 0, 1);
    world_spawn(first, damage, 0);
}
const struct ex_scenario scenario_damage = {.name = "damage", .what = "one worker: the checker finds what is damaged",
                                            .setup = damage_setup, .check = check, .seconds = 1};

/* ---- the opener ---- */

static uint64_t fnv(uint64_t hash, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    return hash;
}

static void store_super(kvp_pool *pool, const struct kvp_superblock *super)
{
    for (size_t i = 0; i <= offsetof(struct kvp_superblock, life) / 8; i++) {
        uint64_t word;
        memcpy(&word, (const uint8_t *)super + i * 8, sizeof word);
        nc_store((nc_u64 *)(void *)pool->super + i, word);
    }
}

/* Open an image whose superblock is this one, with a checksum that fits unless it is to be wrong. */
static void opens(kvp_pool *pool, struct kvp_superblock super, int fits, int status)
{
    uint64_t version = KVP_FORMAT;
    kvp_pool *opened = NULL;

    if (fits) {
        super.checksum = fnv(fnv(0xcbf29ce484222325u, &super.magic, 8), &version, 8);
        super.checksum = fnv(super.checksum, &super.fingerprint,
                             offsetof(struct kvp_superblock, checksum) - offsetof(struct kvp_superblock, fingerprint));
    }
    store_super(pool, &super);
    IS(kvp_pool_open("explore:", 0, &opened), status);
    EX_CHECK(!opened, "a pool that cannot be opened gives a handle");
}

#define WITH(field, value, fits, status) \
    do { \
        struct kvp_superblock changed = right; \
        changed.field = (value); \
        opens(pool, changed, (fits), (status)); \
    } while (0)

static void open_damaged(void *argument)
{
    kvp_pool *pool = argument;
    struct kvp_superblock right;

    IS(kvp_superblock_read(pool->super, pool->mapping.bytes, &right), KVP_OK);
    WITH(magic, 99, 0, KVP_E_FOREIGN);
    WITH(version.nc64, 0, 0, KVP_E_NOTREADY);
    WITH(version.nc64, KVP_FORMAT - 1, 0, KVP_E_OLDER);
    WITH(version.nc64, KVP_FORMAT + 1, 0, KVP_E_NEWER);
    WITH(created_ns, 99, 0, KVP_E_CORRUPT);
    WITH(incompat, 1, 1, KVP_E_NEWER);
    WITH(ro_compat, 1, 1, KVP_E_NEWER);
    WITH(fingerprint, 99, 1, KVP_E_LAYOUT);
    WITH(mode, KVP_COHERENT, 1, KVP_E_MODE);
    WITH(mode, 99, 1, KVP_E_MODE);
    IS(kvp_pool_mode("explore:"), KVP_MODE); /* whoever opens it says what it is */
    IS(kvp_pool_remove("explore:", 1), KVP_E_MODE);
    WITH(policy, 99, 1, KVP_E_CORRUPT);
    WITH(life.nc64, 3, 1, KVP_E_REPLACED);
    WITH(layout.bytes, 1ull << 40, 1, KVP_E_TRUNCATED);
    WITH(layout.classes, 0, 1, KVP_E_CORRUPT);
    WITH(layout.hosts, 0, 1, KVP_E_CORRUPT);
    WITH(layout.class[0].stride, 99, 1, KVP_E_CORRUPT);
    WITH(layout.payload_bytes, 1ull << 50, 1, KVP_E_CORRUPT);
    WITH(layout.payload_bytes, right.layout.bytes + KVP_PAGE, 1, KVP_E_CORRUPT);
    WITH(layout.pin_slots, 99, 1, KVP_E_CORRUPT);
    WITH(magic, 99, 0, KVP_E_FOREIGN);
    IS(kvp_pool_mode("explore:"), KVP_MODE);
    IS(kvp_pool_here("explore:"), KVP_E_FOREIGN);
    IS(kvp_pool_remove("explore:", 0), KVP_E_FOREIGN); /* perhaps somebody's own: it is left alone */
    IS(kvp_pool_remove("explore:", 1), KVP_OK);
    IS(kvp_pool_remove("explore:none", 1), KVP_E_NOTFOUND);
    store_super(pool, &right);
    IS(kvp_pool_open("explore:", 0, &pool), KVP_OK);
    kvp_pool_free(pool);
}

static void open_damaged_setup(void)
{
    first = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    world_spawn(first, open_damaged, 0);
}
const struct ex_scenario scenario_open_damaged = {.name = "open-damaged", .what = "one worker: each reason not to open an image",
                                                  .setup = open_damaged_setup, .check = check, .seconds = 1};

/* ---- pools that cannot be made ---- */

static const struct kvp_request fine = {.blocks = 16, .classes = 1, .stride = {KVP_LINE, KVP_LINE}, .hosts = 2};

#define PLAN(status, ...) \
    do { \
        struct kvp_request request = fine; \
        struct kvp_layout layout; \
        __VA_ARGS__; \
        int planned = kvp_layout_plan(&request, &layout); \
        EX_CHECK(planned == (status), "a pool with " #__VA_ARGS__ " is planned: %d", planned); \
        uint64_t metadata[2]; \
        IS(kvp_layout_metadata(&request, metadata), planned); \
    } while (0)

static void plan_wrongly(void *none)
{
    kvp_pool *pool;

    (void)none;
    PLAN(KVP_OK, (void)0);
    PLAN(KVP_E_INVALID, request.classes = 9);
    PLAN(KVP_E_INVALID, request.workers = 99);
    PLAN(KVP_E_INVALID, request.stride[0] = 99);
    PLAN(KVP_E_INVALID, request.hosts = 99);
    PLAN(KVP_E_INVALID, request.host = 2);
    PLAN(KVP_E_INVALID, request.lease_ms = 1);
    PLAN(KVP_E_INVALID, request.bytes = 1ull << 51);
    PLAN(KVP_E_INVALID, request.bytes = 1 << 20);
    PLAN(KVP_E_INVALID, request.blocks = 1ull << 30);
    PLAN(KVP_E_INVALID, request.blocks = 0; request.bytes = KVP_PAGE);
    PLAN(KVP_E_INVALID, request.blocks = 8);
    PLAN(KVP_OK, request.blocks = 0; request.bytes = 1 << 20; request.classes = 2; request.stride[1] = 4 * KVP_LINE; request.workers = 1);
    PLAN(KVP_OK, request.lease_ms = 500; request.workers = 3);
    IS(kvp_pool_create("explore:", &fine, "best", &pool), KVP_E_INVALID);
    struct kvp_request large = fine;
    large.blocks = 1 << 16;
    IS(kvp_pool_create("explore:", &large, "lru", &pool), KVP_E_NOSPACE);
}

static void plan_setup(void)
{
    first = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    world_join(1);
    world_spawn(first, plan_wrongly, 0);
    kvp_leave_all();
    kvp_leave_all();
}
const struct ex_scenario scenario_plan = {.name = "plan", .what = "one worker: pools that cannot be made; everybody leaves",
                                          .setup = plan_setup, .seconds = 1};
