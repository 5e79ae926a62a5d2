/* world.c -- pools for the scenarios. */
#include "world.h"

#include <string.h>

enum { BATCH = 4 };

enum { SEGMENT_BYTES = 64 << 10 };

static struct kvp_request wanted;
static struct kvp_layout layout;
static const char *policy;
static uint32_t lines;
static struct part {
    kvp_pool *pool;
    void (*run)(void *pool);
} part[EX_THREADS]; /* by number of the thread */
static int parts;

static void label(const kvp_pool *pool)
{
    static const char *const word[] = {"word", "word of class 1"}, *const name[] = {"label", "label of class 1"};
    const struct kvp_arena *arena = &pool->arena;

    ex_label(pool->super, sizeof *pool->super, 8, "super");
    ex_label(arena->roster.hosts, layout.hosts * sizeof(struct kvp_host), sizeof(struct kvp_host), "host");
    ex_label(arena->owners, layout.hosts * kvp_row(layout.segments) * 8, 8, "owner");
    ex_label(arena->pin_high, layout.hosts * kvp_row(layout.workers) * 8, 8, "pin_high");
    ex_label(arena->pins, (uint64_t)layout.hosts * layout.workers * layout.pin_slots * 8, 8, "pin");
    ex_label(arena->logs, (uint64_t)layout.hosts * layout.workers * layout.log_records * 32, 32, "record");
    ex_label(arena->class[0].data, layout.payload_bytes, KVP_LINE, "payload");
    for (uint32_t c = 0; c < layout.classes; c++) {
        ex_label(arena->class[c].words, arena->class[c].blocks * 8ull, 8, word[c]);
        ex_label(arena->class[c].labels, arena->class[c].blocks * 16ull, 16, name[c]);
    }
}

static void label_host(const kvp_pool *pool)
{
    const struct kvp_arena *arena = &pool->arena;
    const struct kvp_class *class = &arena->class[0];

    ex_label(arena->head, sizeof *arena->head, 8, "head");
    ex_label(arena->roster.sights, arena->layout.hosts * sizeof(struct kvp_sight), sizeof(struct kvp_sight), "sight");
    ex_label(arena->slots, arena->layout.workers * sizeof(struct kvp_slot), sizeof(struct kvp_slot), "slot");
    ex_label(arena->read, (uint64_t)arena->layout.hosts * arena->layout.workers * 8, 8, "read");
    ex_label(arena->segments, arena->layout.segments * 8ull, 8, "segment");
    ex_label(class->scores, class->blocks * 8ull, 8, "score");
    ex_label(class->tags, class->blocks * 16ull, 16, "tag");
    ex_label(class->known, class->blocks * 8ull, 8, "known");
    ex_label(class->hints, 8, 8, "hints");
    ex_label(class->summary, 8, 8, "summary");
    ex_label(pool->directory, pool->homes * KVP_HOME_ENTRIES * 16, 16, "entry");
    ex_label(pool->spilled, pool->homes * 8, 8, "spilled");
}

/* What the pool is to be like, and how it will lie. Several classes are asked for by bytes, metadata included. */
static void plan(const struct world_request *request)
{
    wanted = (struct kvp_request){.workers = request->workers, .classes = request->segments ? 2 : 1, .hosts = request->hosts};
    policy = request->policy ? request->policy : "lru";
    lines = request->lines ? request->lines : 1;
    wanted.stride[0] = request->segments ? request->stride[0] : lines * KVP_LINE;
    wanted.stride[1] = request->stride[1];
    if (request->segments)
        wanted.bytes = (uint64_t)request->segments * SEGMENT_BYTES;
    else
        wanted.blocks = 8 * (request->hosts - 1) + request->blocks;
    int status;
    do
        wanted.bytes += request->segments ? KVP_PAGE : 0;
    while ((status = kvp_layout_plan(&wanted, &layout)) == KVP_OK && request->segments &&
           layout.payload_bytes < (uint64_t)request->segments * SEGMENT_BYTES);
    EX_CHECK(status == KVP_OK, "the pool cannot be planned: %d", status);
    standins_reset();
    parts = 0;
}

kvp_pool *world_make(const struct world_request *request)
{
    plan(request);
    kvp_pool *pool = world_create();
    EX_CHECK(pool, "the pool cannot be made");
    label(pool);
    label_host(pool);
    return pool;
}

void world_prepare(const struct world_request *request, int regions)
{
    plan(request);
    const uint8_t *base = standins_add_device(layout.bytes);
    for (uint32_t h = 0; h < layout.hosts; h++)
        standins_add_machine((int)h, regions, layout.host_bytes);
    ex_label(base, KVP_PAGE, 8, "super");
    ex_label(base + layout.hosts_offset, layout.hosts * sizeof(struct kvp_host), sizeof(struct kvp_host), "host");
    ex_label(base + layout.owners_offset, layout.hosts * kvp_row(layout.segments) * 8, 8, "owner");
    ex_label(base + layout.class[0].words_offset, layout.class[0].blocks * 8, 8, "word");
}

kvp_pool *world_create(void)
{
    kvp_pool *pool = NULL;

    return kvp_pool_create("explore:", &wanted, policy, &pool) == KVP_OK ? pool : NULL;
}

void world_add_memory(int machine)
{
    standins_add_machine(machine, 2, layout.host_bytes);
}

void world_sleep_ms(uint64_t ms)
{
    standins_pass(ms * 1000000);
}

void world_hoard(uint32_t host)
{
    uint32_t number[8], n = 8;

    for (kvp_pool *pool = world_join(host); n && kvp_reserve(pool, 0, n, number) != KVP_OK;)
        n--;
}

kvp_pool *world_join(uint32_t host)
{
    kvp_pool *pool;
    int status = kvp_pool_open("explore:", host, &pool);

    EX_CHECK(status == KVP_OK, "a worker of host %u cannot join: %d", host, status);
    label_host(pool);
    return pool;
}

/* When a thread has ended only what its handle holds is left of it. */
static void play(void *argument)
{
    const struct part *mine = argument;

    mine->run(mine->pool);
    world_merge(mine->pool, UINT64_MAX);
}

kvp_pool *world_open(uint32_t host)
{
    kvp_pool *pool = NULL;

    return kvp_pool_open("explore:", host, &pool) == KVP_OK ? pool : NULL;
}

static void play_alone(void *argument)
{
    ((const struct part *)argument)->run(NULL);
    ex_merge(UINT64_MAX);
}

int world_spawn_machine(int machine, void (*run)(void *), unsigned flags)
{
    struct part *mine = &part[parts++];

    *mine = (struct part){NULL, run};
    standins_add_machine(machine, 1, layout.host_bytes);
    return ex_spawn(machine, play_alone, mine, flags);
}

int world_spawn(kvp_pool *pool, void (*run)(void *), unsigned flags)
{
    struct part *mine = &part[parts++];

    *mine = (struct part){pool, run};
    return ex_spawn((int)pool->host, play, mine, flags);
}

void world_died(int thread)
{
    standins_mark_dead(thread, &part[thread].pool->keeper);
}

static uint64_t hash_bytes(uint64_t hash, const void *p, uint64_t bytes)
{
    for (uint64_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t part;
        memcpy(&part, (const uint8_t *)p + i, sizeof part);
        hash = (hash ^ part) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    }
    return hash;
}

static uint64_t hash_class(uint64_t hash, const struct kvp_class *class, const struct kvp_heap *heap)
{
    const struct kvp_magazine *magazine = &class->magazine;
    const uint64_t plain[] = {heap->count, heap->aside, heap->pops, heap->built};

    hash = hash_bytes(hash, magazine, offsetof(struct kvp_magazine, block) + magazine->count * sizeof(uint32_t));
    hash = hash_bytes(hash, plain, sizeof plain);
    hash = hash_bytes(hash, class->pin_slot, class->blocks * sizeof *class->pin_slot);
    hash = hash_bytes(hash, class->pinned, (class->blocks / 64 + 1) * sizeof *class->pinned);
    for (uint32_t i = 0; i < heap->count; i++)
        hash = hash_bytes(hash, &heap->item[i], sizeof(uint64_t) + sizeof(uint32_t));
    return hash;
}

void world_merge(const kvp_pool *pool, uint64_t place)
{
    const struct kvp_arena *arena = &pool->arena;
    const uint64_t plain[] = {pool->clock_seen, pool->foreign, pool->evictions, pool->log_sequence, pool->used_count,
                              arena->pin_free_count, arena->pin_top, arena->pin_high_seen, arena->pins_held,
                              (uint64_t)pool->closed};
    uint64_t hash = hash_bytes(place, plain, sizeof plain);

    hash = hash_bytes(hash, pool->used, pool->used_count * sizeof *pool->used);
    hash = hash_bytes(hash, arena->pin_count, arena->pin_top * sizeof *arena->pin_count);
    hash = hash_bytes(hash, arena->pin_free, arena->pin_free_count * sizeof *arena->pin_free);
    for (uint32_t c = 0; c < arena->layout.classes; c++)
        hash = hash_class(hash, &arena->class[c], &pool->heap[c]);
    ex_merge(hash);
}

/* ---- keys ---- */

struct kvp_key world_key(uint32_t k)
{
    return (struct kvp_key){0x100000000ull | (k / 8 + 1), 0x1000 + k};
}

uint64_t world_content(uint32_t k, uint32_t line)
{
    return 0xc0de0000ull + k * 256 + line;
}

static void fill(kvp_pool *pool, uint32_t c, uint32_t number, uint32_t k)
{
    uint64_t bytes[64] = {0};

    for (uint32_t line = 0; line < lines; line++)
        bytes[line * 8] = world_content(k, line);
    kvp_fill(pool, c, number, bytes, (uint64_t)lines * KVP_LINE);
}

int world_put_in(kvp_pool *pool, uint32_t c, uint32_t k, uint32_t n)
{
    struct kvp_key key[BATCH];
    uint32_t number[BATCH];
    uint64_t ref[BATCH];

    if (kvp_reserve(pool, c, n, number) != KVP_OK)
        return 0;
    for (uint32_t i = 0; i < n; i++) {
        key[i] = world_key(k + i);
        fill(pool, c, number[i], k + i);
    }
    int64_t published = kvp_publish(pool, c, number, key, n, ref);
    return published < 0 ? 0 : (int)published;
}

int world_put(kvp_pool *pool, uint32_t k, uint32_t n)
{
    return world_put_in(pool, 0, k, n);
}

int world_keep(kvp_pool *pool, uint32_t k, uint32_t *number, uint64_t *ref)
{
    struct kvp_key key = world_key(k);

    if (kvp_reserve(pool, 0, 1, number) != KVP_OK)
        return -1;
    fill(pool, 0, *number, k);
    return (int)kvp_publish_kept(pool, 0, number, &key, 1, ref);
}

void world_look(const kvp_pool *pool, uint64_t ref, uint32_t k)
{
    const nc_u64 *data = (const nc_u64 *)(const void *)kvp_block_data(&pool->arena, (uint32_t)ref);

    for (uint32_t line = 0; line < lines; line++) {
        uint64_t seen = nc_load(&data[line * 8]);
        EX_CHECK(seen == world_content(k, line), "block %u under key %u: line %u holds %#llx, not %#llx", (uint32_t)ref, k, line,
                 (unsigned long long)seen, (unsigned long long)world_content(k, line));
    }
}

int world_use_in(kvp_pool *pool, uint32_t c, uint32_t k, uint32_t n)
{
    struct kvp_key key[BATCH];
    uint64_t ref[BATCH] = {0};

    for (uint32_t i = 0; i < n; i++)
        key[i] = world_key(k + i);
    int64_t pinned = kvp_match(pool, c, key, n, ref);
    for (int64_t i = 0; i < pinned; i++)
        world_look(pool, ref[i], k + (uint32_t)i);
    if (pinned > 0)
        kvp_unpin_refs(pool, ref, (uint32_t)pinned);
    return pinned < 0 ? 0 : (int)pinned;
}

int world_use(kvp_pool *pool, uint32_t k, uint32_t n)
{
    return world_use_in(pool, 0, k, n);
}

int world_read(kvp_pool *pool, uint32_t k)
{
    struct kvp_key key = world_key(k);
    uint64_t bytes[64];
    void *to = bytes;
    uint8_t got = 0;

    if (kvp_read(pool, 0, &key, 1, &to, (uint64_t)lines * KVP_LINE, &got) != 1)
        return 0;
    for (uint32_t line = 0; line < lines; line++)
        EX_CHECK(bytes[line * 8] == world_content(k, line), "a copy of key %u: line %u holds %#llx, not %#llx", k, line,
                 (unsigned long long)bytes[line * 8], (unsigned long long)world_content(k, line));
    return 1;
}

/* ---- afterwards ---- */

int world_recover(kvp_pool *pool)
{
    return standins_look_around(&pool->keeper);
}

/* The end of the oracles' memory: a bit for each key that is there. */
#define THERE (((uint64_t *)(void *)ex_ghost)[EX_GHOST_BYTES / 8 - 1])

void world_remember(kvp_pool *pool, uint32_t keys)
{
    for (uint32_t k = 0; k < keys; k++)
        if (world_use(pool, k, 1))
            THERE |= 1ull << k;
}

void world_compare(kvp_pool *pool, uint32_t keys)
{
    kvp_pool_follow(pool);
    for (uint32_t k = 0; k < keys; k++) {
        int there = (int)(THERE >> k & 1), found = world_use(pool, k, 1);
        EX_CHECK(there == found, "key %u: its host has it: %d, host %u finds it: %d", k, there, pool->host, found);
    }
}

void world_check_here(kvp_pool *pool)
{
    struct kvp_check check;

    IS(kvp_pool_check(pool, &check), KVP_OK);
    EX_CHECK(!check.problems, "check: %s", check.first);
}

/* ---- threads ---- */

void world_tick(void *argument)
{
    kvp_pool *pool = argument;

    pool->keeper.on_tick(pool->keeper.context);
}

void world_follow(void *pool)
{
    kvp_pool_follow(pool);
}

void world_mend(void *pool)
{
    world_recover(pool);
    world_merge(pool, 1);
    kvp_pool_follow(pool);
}

static uint32_t compared; /* keys */

static void remember(void *pool)
{
    world_remember(pool, compared);
}

static void compare(void *pool)
{
    world_compare(pool, compared);
}

void world_spawn_compare(kvp_pool *has, kvp_pool *finds, uint32_t keys)
{
    compared = keys;
    world_spawn(has, remember, EX_LAST);
    world_spawn(finds, compare, EX_LAST);
}

/* Beside the bits of keys: a handle for each machine. */
static kvp_pool **there(int machine)
{
    return (kvp_pool **)(void *)ex_ghost + EX_GHOST_BYTES / sizeof(kvp_pool *) - 2 - machine;
}

kvp_pool *world_come(uint32_t host)
{
    kvp_pool *pool = world_open(host);

    EX_CHECK(pool, "a process cannot open the pool as host %u", host);
    *there(ex_my_host()) = pool;
    ex_wake();
    return pool;
}

kvp_pool *world_there(int machine)
{
    return *there(machine);
}

void world_follow_there(void *none)
{
    (void)none;
    kvp_pool_follow(world_there(ex_my_host()));
}

static void remember_there(void *none)
{
    world_follow_there(none);
    world_remember(world_there(ex_my_host()), compared);
}

void world_spawn_compare_there(int machine, kvp_pool *finds, uint32_t keys)
{
    compared = keys;
    world_spawn(finds, world_follow, EX_LAST);
    world_spawn_machine(machine, world_follow_there, EX_LAST);
    world_spawn(finds, world_follow, EX_LAST);
    world_spawn_machine(machine, remember_there, EX_LAST);
    world_spawn(finds, compare, EX_LAST);
}

/* ---- checks ---- */

void world_check(kvp_pool *pool)
{
    struct kvp_check check = {0};

    ex_view((int)pool->host);
    kvp_arena_check(&pool->arena, &check);
    kvp_directory_check(pool, &check);
    EX_CHECK(!check.problems, "check: %s", check.first);
}
