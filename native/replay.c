/* replay.c -- the directory of this host follows the logs of the others.
 *
 * What is known of a block is one word, {generation of a reference, state}. The generation grows with each publication
 * of the block, so it is the stamp: a record counts only if it is newer than what is known, and records of several logs
 * may come in any order, twice or never.
 *
 *   LIVE    readable, as far as we have heard; lookups believe it
 *   FREE    that publication has ended, or was found not to stand
 *   CACHED  another host's, and we have asked it to remove it: nobody finds it here any more (settle_asked)
 *
 * The names of another host's block, its tag and its entries, change under the *turn* only, which one worker of the host
 * has at a time: nothing else keeps two workers from naming one block at once. Who finds outside the turn that a block is
 * gone changes the known word alone; the names that are left are hints that nobody believes, and go when the block is next
 * learned or unlearned. Under the turn segments become ours, too: from then on it is the word of a block that says who
 * changes its names. A turn whose holder dies is over when the holder has been recovered; its successor finds half-written
 * names under the tag.
 */
#include "native/handle.h"

#include <sched.h>
#include <time.h>

enum { GROUP = 8, AHEAD_MIN = 16, AHEAD_MAX = KVP_MODE == KVP_EXPLORE ? 16 : 256, PEEK = 2, ASK_AGAIN_NS = 3 * KVP_TICK_MS * 1000000 };

/* ---- the turn ---- */

int kvp_turn_take(kvp_pool *pool, int patience)
{
    for (uint32_t nobody = 0; !co_cas32(&pool->arena.head->replayer, &nobody, pool->arena.self + 1); nobody = 0) {
        if (patience-- <= 0)
            return 0;
        sched_yield();
    }
    return 1;
}

int kvp_turn_await(kvp_pool *pool, int timeout_ms)
{
    for (int ms = 0; !kvp_turn_take(pool, 0); ms++) {
        if (ms == timeout_ms)
            return kvp_fail(KVP_E_BUSY, "worker %u of this host has followed the logs for %d ms: is it stopped? Try again",
                            co_load32(&pool->arena.head->replayer) - 1, timeout_ms);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return KVP_OK;
}

void kvp_turn_end(kvp_pool *pool)
{
    co_store32(&pool->arena.head->replayer, 0);
}

/* ---- what is known ---- */

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

/* Is a publication later than all that is known of its block? */
static int is_news(uint64_t known, uint64_t ref)
{
    return kvp_word_state(known) == KVP_ABSENT || is_newer(ref >> 32, kvp_word_generation(known));
}

void kvp_know(kvp_pool *pool, uint64_t ref)
{
    co_u64 *known = KVP_MANY_HOSTS ? known_of(pool, ref) : NULL;
    uint64_t seen = known ? co_load(known) : 0;

    /* Not by a store: since it became LIVE the block may have been evicted, and published again. */
    while (known && is_news(seen, ref) && !co_cas(known, &seen, kvp_word(ref >> 32, 0, KVP_LIVE)))
        ;
}

/* Also of a publication that nobody has made known yet. */
void kvp_unknow(kvp_pool *pool, uint64_t ref)
{
    co_u64 *known = KVP_MANY_HOSTS ? known_of(pool, ref) : NULL;
    uint64_t seen = known ? co_load(known) : 0;

    while (known && (is_news(seen, ref) || kvp_word_generation(seen) == ref >> 32) &&
           !co_cas(known, &seen, kvp_word(ref >> 32, 0, KVP_FREE)))
        ;
}

int kvp_is_unknown(kvp_pool *pool, uint64_t ref)
{
    co_u64 *known = KVP_MANY_HOSTS ? known_of(pool, ref) : NULL;

    return !known || co_load(known) == kvp_word(ref >> 32, 0, KVP_FREE);
}

/* Published, and perhaps held by an evictor who finds it pinned and lets it stand. */
static int is_standing(uint64_t word)
{
    return kvp_word_state(word) == KVP_LIVE || kvp_word_state(word) == KVP_EVICTING;
}

static int is_held(kvp_pool *pool, uint64_t ref)
{
    uint64_t word = nc_load(&pool->arena.class[kvp_block_class((uint32_t)ref)].words[kvp_block_number((uint32_t)ref)]);

    return is_standing(word) && kvp_ref((uint32_t)ref, kvp_word_generation(word)) == ref;
}

void kvp_doubt(kvp_pool *pool, uint64_t ref)
{
    co_u64 *known = KVP_MANY_HOSTS ? known_of(pool, ref) : NULL;
    uint64_t seen = kvp_word(ref >> 32, 0, KVP_LIVE);

    if (known && !is_held(pool, ref) && co_cas(known, &seen, kvp_word(ref >> 32, 0, KVP_FREE)))
        kvp_count(pool, KVP_COUNT_DOUBTED, 1);
}

/* Another host has published a block. Under the turn. */
static void learn(kvp_pool *pool, uint64_t ref, const struct kvp_key *key)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);
    co_u64 *known = known_of(pool, ref);

    if (!known || (key->low == 0 && key->high == 0) || !is_news(co_load(known), ref))
        return;
    kvp_directory_forget(pool, (uint32_t)ref); /* what an earlier publication, or a learner that died, has left */
    co_store(&pool->arena.class[c].tags[number].low, key->low);
    co_store(&pool->arena.class[c].tags[number].high, key->high);
    if (!kvp_directory_enter(pool, key, ref))
        kvp_count(pool, KVP_COUNT_UNINDEXED, 1);
    KVP_CRASH_POINT("replay.entered");
    co_store(known, kvp_word(ref >> 32, 0, KVP_LIVE)); /* last: a lookup that sees this sees the tag */
}

/* A publication of another host has ended. What is known may be older than its beginning, if that record is still to
 * come. Under the turn. */
static void unlearn(kvp_pool *pool, uint64_t ref)
{
    co_u64 *known = known_of(pool, ref);

    if (!known || (kvp_word_state(co_load(known)) != KVP_ABSENT && is_newer(kvp_word_generation(co_load(known)), ref >> 32)))
        return;
    kvp_unknow(pool, ref); /* before the names go: lookups believe it */
    kvp_directory_forget(pool, (uint32_t)ref);
}

/* ---- removals that others are asked for ---- */

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Somebody has asked a block's owner to remove it: nobody finds it here from now on, and we see to it that it goes. 0 if
 * we know that it has gone. */
static int note_asked(kvp_pool *pool, uint64_t ref)
{
    co_u64 *known = known_of(pool, ref);
    uint64_t seen = known ? co_load(known) : 0, live = kvp_word(ref >> 32, 0, KVP_LIVE), none = 0;

    while (known && (seen == live || is_news(seen, ref)))
        if (co_cas(known, &seen, kvp_word(ref >> 32, 0, KVP_CACHED))) {
            co_cas(&pool->arena.head->asked, &none, now_ns() + ASK_AGAIN_NS);
            return 1;
        }
    return 0;
}

int kvp_ask_to_remove(kvp_pool *pool, uint64_t ref, const struct kvp_key *key)
{
    if (!note_asked(pool, ref))
        return 0;
    kvp_log_event(pool, KVP_EVENT_ASKED, ref, key);
    return 1;
}

/* The owner may have been lapped, or lost, and never have read that it was asked: 1 if it is asked again. */
static int settle_one(kvp_pool *pool, uint32_t c, uint32_t number, uint64_t ref)
{
    struct kvp_class *class = &pool->arena.class[c];

    if (kvp_is_ours(&pool->arena, c, number)) {
        kvp_remove_ours(pool, c, ref);
        kvp_unknow(pool, ref);
        return 0;
    }
    nc_invalidate(&class->words[number], 8);
    nc_invalidate(&class->labels[number], sizeof class->labels[number]);
    nc_read_fence(); /* the word and the label are read after they were dropped */
    struct kvp_key key = {nc_load(&class->labels[number].low), nc_load(&class->labels[number].high)};
    if (!is_held(pool, ref) || (!key.low && !key.high)) { /* it has ended, or has no name any more */
        kvp_unknow(pool, ref);
        return 0;
    }
    kvp_log_event(pool, KVP_EVENT_ASKED, ref, &key);
    return 1;
}

void kvp_settle_asked(kvp_pool *pool)
{
    uint64_t due = co_load(&pool->arena.head->asked), none = 0;
    int again = 0;

    if (!due || now_ns() < due || !co_cas(&pool->arena.head->asked, &due, 0))
        return;
    for (uint32_t c = 0; c < pool->arena.layout.classes; c++)
        for (uint32_t number = 0; number < pool->arena.class[c].blocks; number++) {
            uint64_t known = co_load(&pool->arena.class[c].known[number]);
            if (kvp_word_state(known) == KVP_CACHED)
                again |= settle_one(pool, c, number, kvp_ref(kvp_block(c, number), kvp_word_generation(known)));
        }
    if (again)
        co_cas(&pool->arena.head->asked, &none, now_ns() + ASK_AGAIN_NS);
}

static int exists(const kvp_pool *pool, uint64_t ref)
{
    uint32_t c = kvp_block_class((uint32_t)ref);

    return ref && c < pool->arena.layout.classes && kvp_block_number((uint32_t)ref) < pool->arena.class[c].blocks;
}

static int is_ours(const kvp_pool *pool, uint64_t ref)
{
    return exists(pool, ref) && kvp_is_ours(&pool->arena, kvp_block_class((uint32_t)ref), kvp_block_number((uint32_t)ref));
}

/* A segment may have come to us since a record was written: then the words say more than the record. */
static int is_foreign(const kvp_pool *pool, uint64_t ref)
{
    return exists(pool, ref) && kvp_is_foreign(&pool->arena, kvp_block_class((uint32_t)ref), kvp_block_number((uint32_t)ref));
}

static void remove_asked(kvp_pool *pool, uint64_t ref)
{
    if (is_foreign(pool, ref) && note_asked(pool, ref))
        kvp_directory_forget(pool, (uint32_t)ref);
    if (!is_ours(pool, ref))
        return;
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
    int foreign = kind == KVP_EVENT_PUBLISHED && is_foreign(pool, word[0]);

    switch (kind) {
    case KVP_EVENT_PUBLISHED:
        if (!foreign && exists(pool, word[0]) && !is_ours(pool, word[0])) {
            kvp_owners_see_offers(&pool->arena); /* who publishes there has perhaps taken what we have offered */
            foreign = is_foreign(pool, word[0]);
        }
        if (foreign)
            learn(pool, word[0], &key);
        break;
    case KVP_EVENT_EVICTED:
    case KVP_EVENT_REMOVED:
        if (is_foreign(pool, word[0]))
            unlearn(pool, word[0]);
        break;
    case KVP_EVENT_ASKED:
        remove_asked(pool, word[0]);
        break;
    case KVP_EVENT_USED:
        touch_used(pool, word);
        break;
    case KVP_EVENT_STARTED:
        co_store32(&pool->arena.head->stale, 1); /* published, and its record lost with the host's cache: the words say so */
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

/* Ask for what a later record will touch. A guess: it may not be written yet. The explorer has no caches of this kind. */
static void ask_ahead(const kvp_pool *pool, const struct kvp_record *ring, uint64_t sequence, int is_fresh)
{
    const struct kvp_record *record = &ring[sequence & (pool->arena.layout.log_records - 1)];

    if (KVP_MODE == KVP_EXPLORE || KVP_MODE == KVP_SIM || !is_fresh)
        return;
    uint64_t key[2] = {nc_load_relaxed(&record->word[1]), 0};
    kvp_directory_ask(pool, key);
}

/* Read a ring to its end. *lapped: records were overwritten before we came. Returns how many were applied. */
static uint32_t replay_ring(kvp_pool *pool, uint32_t h, uint32_t w, int *lapped)
{
    const struct kvp_record *ring = kvp_ring(&pool->arena, h, w);
    uint64_t records = pool->arena.layout.log_records, word[3], newest = 0;
    co_u64 *position = position_of(pool, h, w);
    uint32_t applied = 0, refreshed = 0, ahead = AHEAD_MIN;
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
        ask_ahead(pool, ring, at + 1 + GROUP, applied + GROUP < refreshed);
        apply(pool, kind, word);
        KVP_CRASH_POINT("replay.applied");
        co_store(position, at + 1);
        if (applied++ == refreshed) { /* the more there was, the more may follow: a fence costs as much as two records */
            kvp_log_refresh(ring, records, at + 2, ahead);
            nc_read_fence(); /* the next records are read after they were dropped */
            refreshed += ahead;
            ahead = ahead < AHEAD_MAX ? 2 * ahead : ahead;
        }
    }
}

/* Drop the next records of those logs of every host that it had when we last looked, or of those that it has got since. */
static uint32_t drop_heads(kvp_pool *pool, int is_new, uint32_t *looked_at)
{
    const struct kvp_layout *layout = &pool->arena.layout;
    uint32_t dropped = 0;

    for (uint32_t h = 0; h < layout->hosts; h++) {
        uint32_t first = is_new ? looked_at[h] : 0;
        looked_at[h] = tables_of(pool, h);
        for (uint32_t w = first; w < looked_at[h]; w++, dropped++)
            kvp_log_refresh(kvp_ring(&pool->arena, h, w), layout->log_records, co_load(position_of(pool, h, w)) + 1, PEEK);
    }
    return dropped;
}

/* Drop the next records of every log, so that one fence serves all. */
static void refresh_heads(kvp_pool *pool)
{
    const struct kvp_layout *layout = &pool->arena.layout;
    uint32_t looked_at[KVP_HOSTS_MAX];

    drop_heads(pool, 0, looked_at);
    for (uint32_t h = 0; h < layout->hosts; h++)
        if (h != pool->host)
            nc_invalidate(&pool->arena.roster.hosts[h], KVP_LINE);
    nc_read_fence(); /* what was dropped is read afresh: "nothing new" is of now, and so is how many logs each host has */
    if (drop_heads(pool, 1, looked_at))
        nc_read_fence(); /* as above, of the logs of workers that have joined; a record read late is read at the next poll */
}

uint32_t kvp_follow_logs(kvp_pool *pool)
{
    uint32_t applied = 0, seen = 1;
    int lapped = 0;

    kvp_owners_see_offers(&pool->arena);
    refresh_heads(pool);
    for (uint32_t h = 0; h < pool->arena.layout.hosts; h++)
        for (uint32_t w = 0; w < tables_of(pool, h); w++)
            applied += replay_ring(pool, h, w, &lapped);
    if (lapped)
        kvp_count(pool, KVP_COUNT_RESCANS, 1);
    /* A death between the two is made good by its recovery, which asks for a scan. */
    if (co_cas32(&pool->arena.head->stale, &seen, 0) || lapped) {
        kvp_replica_scan(pool);
        applied++;
    }
    if (applied) {
        co_add(&pool->arena.head->learned, 1);
        kvp_gate_open(&pool->arena.head->gate);
        kvp_count(pool, KVP_COUNT_REPLAYED, applied);
    }
    return applied;
}

uint32_t kvp_replay(kvp_pool *pool, int patience)
{
    if (!KVP_MANY_HOSTS)
        return 0;
    /* A host alone has nobody to follow, only what its own dead left unsaid. */
    int nothing = pool->arena.layout.hosts == 1 && !co_load32(&pool->arena.head->stale);
    if (nothing || !kvp_turn_take(pool, patience))
        return 0;
    uint32_t applied = kvp_follow_logs(pool);
    kvp_turn_end(pool);
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
            if (!kvp_is_foreign(arena, c, number))
                continue;
            nc_invalidate(&arena->class[c].words[number], n * 8ull);
        }
    nc_read_fence(); /* the words are read after they were dropped */
}

/* A block of ours that is LIVE and not known: its publisher died before it said so, or was another host that is lost.
 * Held by its word meanwhile, so that nobody changes its names; a death leaves it to be learned again (settle). */
static void learn_ours(kvp_pool *pool, uint32_t c, uint32_t number, uint64_t ref)
{
    struct kvp_class *class = &pool->arena.class[c];
    int alone = !pool->joined; /* the host is starting: the others are told to compare the words */

    if (!alone)
        kvp_lock(pool);
    if (!alone && (pool->closed || !kvp_lock_block(&pool->arena, ref))) {
        co_store32(&pool->arena.head->stale, 1); /* somebody holds it at this moment, and may let it stand */
    } else {
        struct kvp_key key = {nc_load(&class->labels[number].low), nc_load(&class->labels[number].high)};
        co_store(&class->tags[number].low, key.low);
        co_store(&class->tags[number].high, key.high);
        if ((key.low || key.high) && !kvp_directory_names(pool, &key, ref) && !kvp_directory_enter(pool, &key, ref))
            kvp_count(pool, KVP_COUNT_UNINDEXED, 1);
        KVP_CRASH_POINT("scan.entered");
        kvp_know(pool, ref);
        if (!alone) {
            kvp_unlock_block(&pool->arena, c, number);
            kvp_log_event(pool, KVP_EVENT_PUBLISHED, ref, &key); /* the others have not heard of it either */
        }
    }
    if (!alone)
        kvp_unlock(pool);
}

/* The label of a word that was read before. It may be that of a later publication: then the word has changed in memory, and
 * who pins or reads the reference that we had finds that. */
static struct kvp_key read_label(const struct kvp_class *class, uint32_t number)
{
    nc_invalidate(&class->labels[number], sizeof class->labels[number]);
    nc_read_fence(); /* the label is not older than the word: it was written before that said LIVE */
    return (struct kvp_key){nc_load(&class->labels[number].low), nc_load(&class->labels[number].high)};
}

static void scan_foreign(kvp_pool *pool, uint32_t c, uint32_t number, uint64_t word)
{
    struct kvp_class *class = &pool->arena.class[c];
    uint64_t ref = kvp_ref(kvp_block(c, number), kvp_word_generation(word)), seen = co_load(&class->known[number]);

    if (is_standing(word)) {
        if (!is_news(seen, ref))
            return;
        struct kvp_key key = read_label(class, number);
        learn(pool, ref, &key);
    } else {
        if (kvp_word_state(seen) != KVP_ABSENT)
            kvp_unknow(pool, kvp_ref(kvp_block(c, number), kvp_word_generation(seen)));
        kvp_directory_forget(pool, kvp_block(c, number));
    }
}

static void scan_block(kvp_pool *pool, uint32_t c, uint32_t number)
{
    uint64_t word = nc_load(&pool->arena.class[c].words[number]);
    uint64_t ref = kvp_ref(kvp_block(c, number), kvp_word_generation(word));

    if (kvp_is_foreign(&pool->arena, c, number))
        scan_foreign(pool, c, number, word);
    else if (kvp_is_ours(&pool->arena, c, number) && is_standing(word) && is_news(co_load(&pool->arena.class[c].known[number]), ref))
        learn_ours(pool, c, number, ref);
}

void kvp_replica_scan(kvp_pool *pool)
{
    kvp_refresh_words(pool);
    for (uint32_t c = 0; c < pool->arena.layout.classes; c++)
        for (uint32_t number = 0; number < pool->arena.class[c].blocks; number++)
            scan_block(pool, c, number);
}
