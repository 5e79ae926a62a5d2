/* replay.c -- the directory of this host follows the logs of the others.
 *
 * What is known of a block is one word, {generation of a reference, LIVE or FREE}. The generation grows with each
 * publication of the block, so it is the stamp: a record counts only if it is newer than what is known, and records of
 * several logs may come in any order, twice or never. Each block that is known LIVE has an entry under its key, whatever
 * other blocks stand there: entries are hints, and the word of the block decides when it is pinned or read.
 */
#include "native/handle.h"

#include <sched.h>

enum { AHEAD = 16, PEEK = 2 };

/* Generations of references wrap at 2^30; what is compared is never half of that apart. */
static int is_newer(uint64_t generation, uint64_t than)
{
    return (int32_t)((uint32_t)(generation - than) << 2) > 0;
}

static co_u64 *known_of(kvp_pool *pool, uint64_t ref)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);

    if (c >= pool->arena.layout.classes || number >= pool->arena.class[c].blocks)
        return NULL;
    return &pool->arena.class[c].known[number];
}

void kvp_know(kvp_pool *pool, uint64_t ref)
{
    if (KVP_MANY_HOSTS)
        co_store(known_of(pool, ref), kvp_word(ref >> 32, 0, KVP_LIVE));
}

/* The names of a block of another host go; those of our own are taken by whoever evicts it. */
void kvp_unknow(kvp_pool *pool, uint64_t ref)
{
    co_u64 *known = KVP_MANY_HOSTS ? known_of(pool, ref) : NULL;
    uint64_t seen = kvp_word(ref >> 32, 0, KVP_LIVE);

    if (!known || !co_cas(known, &seen, kvp_word(ref >> 32, 0, KVP_FREE)))
        return;
    if (!kvp_is_ours(&pool->arena, kvp_block_class((uint32_t)ref), kvp_block_number((uint32_t)ref)))
        kvp_directory_forget(pool, (uint32_t)ref);
}

void kvp_doubt(kvp_pool *pool, uint64_t ref)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);

    if (!KVP_MANY_HOSTS || !known_of(pool, ref))
        return;
    uint64_t word = nc_load(&pool->arena.class[c].words[number]);
    int is_held = (kvp_word_state(word) == KVP_EVICTING || kvp_word_state(word) == KVP_LIVE) &&
                  kvp_ref((uint32_t)ref, kvp_word_generation(word)) == ref;
    if (is_held)
        return; /* its owner decides about it at this moment, and may let it stand */
    kvp_unknow(pool, ref);
    kvp_count(pool, KVP_COUNT_DOUBTED, 1);
}

/* Another host has published a block. */
static void learn(kvp_pool *pool, uint64_t ref, const struct kvp_key *key)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);
    co_u64 *known = known_of(pool, ref);
    uint64_t seen = known ? co_load(known) : 0;

    if (!known || (key->low == 0 && key->high == 0) ||
        (kvp_word_state(seen) != KVP_ABSENT && !is_newer(ref >> 32, kvp_word_generation(seen))))
        return;
    if (kvp_word_state(seen) == KVP_LIVE)
        kvp_unknow(pool, kvp_ref((uint32_t)ref, kvp_word_generation(seen)));
    co_store(&pool->arena.class[c].tags[number].low, key->low);
    co_store(&pool->arena.class[c].tags[number].high, key->high);
    if (!kvp_directory_enter(pool, key, ref))
        kvp_count(pool, KVP_COUNT_UNINDEXED, 1);
    KVP_CRASH_POINT("replay.entered");
    co_store(known, kvp_word(ref >> 32, 0, KVP_LIVE)); /* last: a lookup that sees this sees the tag */
}

/* A publication has ended. What is known may be older than its beginning, if that record is still to come. */
static void unlearn(kvp_pool *pool, uint64_t ref)
{
    co_u64 *known = known_of(pool, ref);
    uint64_t seen = known ? co_load(known) : 0;

    if (!known || is_newer(kvp_word_generation(seen), ref >> 32))
        return;
    if (kvp_word_state(seen) == KVP_LIVE)
        kvp_unknow(pool, kvp_ref((uint32_t)ref, kvp_word_generation(seen)));
    co_store(known, kvp_word(ref >> 32, 0, KVP_FREE));
}

static int is_ours(const kvp_pool *pool, uint64_t ref)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);

    return ref && c < pool->arena.layout.classes && number < pool->arena.class[c].blocks && kvp_is_ours(&pool->arena, c, number);
}

static void remove_asked(kvp_pool *pool, uint64_t ref)
{
    if (!is_ours(pool, ref)) {
        unlearn(pool, ref);
        return;
    }
    kvp_lock(pool);
    if (!pool->closed && pool->joined)
        kvp_count(pool, KVP_COUNT_REMOVED, (uint64_t)kvp_remove_ours(pool, kvp_block_class((uint32_t)ref), ref));
    kvp_unlock(pool);
}

static void touch_used(kvp_pool *pool, const uint64_t *refs)
{
    struct kvp_order order = kvp_order_of_call(pool, 3);
    uint64_t ours[3];

    for (int i = 0; i < 3; i++)
        ours[i] = is_ours(pool, refs[i]) && kvp_ref_live(&pool->arena, refs[i]) ? refs[i] : 0;
    kvp_touch_refs(pool, ours, 3, &order);
}

static void apply(kvp_pool *pool, unsigned kind, const uint64_t word[3])
{
    const struct kvp_key key = {word[1], word[2]};

    switch (kind) {
    case KVP_EVENT_PUBLISHED:
        if (!is_ours(pool, word[0])) /* a segment may have come to us since; then the words say more than the record */
            learn(pool, word[0], &key);
        break;
    case KVP_EVENT_EVICTED:
    case KVP_EVENT_REMOVED:
        if (!is_ours(pool, word[0]))
            unlearn(pool, word[0]);
        break;
    case KVP_EVENT_ASKED:
        remove_asked(pool, word[0]);
        break;
    case KVP_EVENT_USED:
        touch_used(pool, word);
        break;
    default:
        break;
    }
}

/* ---- following the logs ---- */

static co_u64 *position_of(kvp_pool *pool, uint32_t h, uint32_t w)
{
    return &pool->arena.read[(uint64_t)h * pool->arena.layout.workers + w];
}

static uint32_t tables_of(const kvp_pool *pool, uint32_t h)
{
    uint64_t tables = h == pool->host ? 0 : nc_load(&pool->arena.roster.hosts[h].tables);

    return (uint32_t)(tables < pool->arena.layout.workers ? tables : pool->arena.layout.workers);
}

/* Read a ring to its end. *lapped: records were overwritten before we came. Returns how many were applied. */
static uint32_t replay_ring(kvp_pool *pool, uint32_t h, uint32_t w, int *lapped)
{
    const struct kvp_record *ring = kvp_ring(&pool->arena, h, w);
    uint64_t records = pool->arena.layout.log_records, word[3], newest = 0;
    co_u64 *position = position_of(pool, h, w);
    uint32_t applied = 0;
    unsigned kind = 0;

    for (;;) {
        uint64_t at = co_load(position);
        int read = kvp_log_read(ring, records, at + 1, &kind, word, &newest);
        if (read == 0)
            return applied;
        if (read < 0) {
            /* Fixed before the scan that follows, and the newest one is read again: what is published from here on is
             * in the log, what was before is in the words. */
            co_store(position, newest > at + 1 ? newest - 1 : at + 1);
            *lapped = 1;
            return applied;
        }
        apply(pool, kind, word);
        KVP_CRASH_POINT("replay.applied");
        co_store(position, at + 1);
        if (++applied % AHEAD == 1) {
            kvp_log_refresh(ring, records, at + 2, AHEAD);
            nc_read_fence(); /* the next records are read after they were dropped */
        }
    }
}

/* Drop the next records of every log, so that one fence serves all. */
static void refresh_heads(kvp_pool *pool)
{
    const struct kvp_layout *layout = &pool->arena.layout;

    for (uint32_t h = 0; h < layout->hosts; h++)
        if (h != pool->host)
            nc_invalidate(&pool->arena.roster.hosts[h], KVP_LINE);
    nc_read_fence(); /* how many logs each host has is read after it was dropped */
    for (uint32_t h = 0; h < layout->hosts; h++)
        for (uint32_t w = 0; w < tables_of(pool, h); w++)
            kvp_log_refresh(kvp_ring(&pool->arena, h, w), layout->log_records, co_load(position_of(pool, h, w)) + 1, PEEK);
    nc_read_fence(); /* so that "nothing new" is of now; a record read late would be read at the next poll */
}

/* One worker of a host replays at a time; one that died doing it is followed, since applying twice changes nothing. */
static int take_turn(kvp_pool *pool)
{
    co_u32 *replayer = &pool->arena.head->replayer;
    uint32_t seen = co_load32(replayer);

    if (seen && (seen > pool->arena.layout.workers || !kvp_worker_dead(&pool->arena.slots[seen - 1])))
        return 0;
    return co_cas32(replayer, &seen, pool->arena.self + 1);
}

uint32_t kvp_replay(kvp_pool *pool, int patience)
{
    uint32_t applied = 0;
    int lapped = 0;

    if (!KVP_MANY_HOSTS || pool->arena.layout.hosts == 1)
        return 0;
    for (; !take_turn(pool); patience--) {
        if (patience <= 0)
            return 0;
        sched_yield();
    }
    refresh_heads(pool);
    for (uint32_t h = 0; h < pool->arena.layout.hosts; h++)
        for (uint32_t w = 0; w < tables_of(pool, h); w++)
            applied += replay_ring(pool, h, w, &lapped);
    if (lapped) {
        kvp_replica_scan(pool);
        kvp_count(pool, KVP_COUNT_RESCANS, 1);
        applied++;
    }
    if (applied)
        co_add(&pool->arena.head->learned, 1);
    co_store32(&pool->arena.head->replayer, 0);
    if (applied)
        kvp_count(pool, KVP_COUNT_REPLAYED, applied);
    return applied;
}

/* ---- from the words ---- */

void kvp_refresh_words(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;

    if (!KVP_MANY_HOSTS)
        return;
    for (uint32_t c = 0; c < arena->layout.classes; c++)
        for (uint32_t number = 0; number < arena->class[c].blocks; number += 8) {
            uint32_t n = arena->class[c].blocks - number < 8 ? arena->class[c].blocks - number : 8;
            if (kvp_is_ours(arena, c, number))
                continue;
            nc_invalidate(&arena->class[c].words[number], n * 8ull);
            nc_invalidate(&arena->class[c].labels[number], n * sizeof(struct kvp_label));
        }
    nc_read_fence(); /* words and labels are read after they were dropped */
}

static void scan_block(kvp_pool *pool, uint32_t c, uint32_t number)
{
    struct kvp_class *class = &pool->arena.class[c];
    uint64_t word = nc_load(&class->words[number]), seen = co_load(&class->known[number]);
    uint64_t ref = kvp_ref(kvp_block(c, number), kvp_word_generation(word));
    struct kvp_key key = {nc_load(&class->labels[number].low), nc_load(&class->labels[number].high)};

    /* The label is written before the word is LIVE; one that was read is of this word if the word has not changed. */
    if (kvp_word_state(word) == KVP_LIVE) {
        if (nc_load(&class->words[number]) == word)
            learn(pool, ref, &key);
    } else if (kvp_word_state(word) != KVP_EVICTING && kvp_word_state(seen) == KVP_LIVE) {
        kvp_doubt(pool, kvp_ref(kvp_block(c, number), kvp_word_generation(seen)));
    }
}

void kvp_replica_scan(kvp_pool *pool)
{
    if (!KVP_MANY_HOSTS)
        return;
    kvp_refresh_words(pool);
    for (uint32_t c = 0; c < pool->arena.layout.classes; c++)
        for (uint32_t number = 0; number < pool->arena.class[c].blocks; number++)
            scan_block(pool, c, number);
}
