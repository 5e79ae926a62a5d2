/* blocks.c -- the verbs on keys: match, touch, publish, remove. */
#include "native/homes.h"

#include <sched.h>
#include <string.h>
#include <time.h>

enum { BATCH = 64, HELD_YIELDS = KVP_MODE == KVP_EXPLORE ? 2 : 200, HELD_MS = KVP_MODE == KVP_EXPLORE ? 0 : 100 };

static void log_event_to(kvp_pool *pool, enum kvp_event_kind kind, uint64_t ref, const struct kvp_key *key,
                         struct kvp_lines *lines)
{
    uint64_t word[3] = {ref, key->low, key->high};

    kvp_log_append_to(kvp_ring(&pool->arena, pool->host, pool->arena.self), pool->arena.layout.log_records,
                      ++pool->log_sequence, kind, word, lines);
}

void kvp_log_event(kvp_pool *pool, enum kvp_event_kind kind, uint64_t ref, const struct kvp_key *key)
{
    struct kvp_lines lines = {NULL};

    log_event_to(pool, kind, ref, key, &lines);
    kvp_lines_end(&lines);
}

/* ---- finding ---- */

/* References that name nothing; mostly none or one, and then a call of memset costs more than the rest. */
static inline void clear_refs(uint64_t *refs, uint32_t n)
{
    if (n == 1)
        refs[0] = 0;
    else if (n)
        memset(refs, 0, n * sizeof *refs);
}

uint32_t kvp_find_here(const kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, int prefix, uint64_t *refs)
{
    if (n != 1)
        return kvp_directory_find(pool, c, keys, n, prefix, refs);
    struct kvp_key key = kvp_key_at(keys, 0);
    return (refs[0] = kvp_directory_look(pool, c, &key, 0)) != 0;
}

/* After a search here: a hit reads nothing of the pool, a miss looks whether others have published meanwhile. */
static uint32_t find_elsewhere(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, int prefix, uint64_t *refs,
                               uint64_t learned, uint32_t found)
{
    if (KVP_MANY_HOSTS && found < n) {
        kvp_replay(pool, KVP_PATIENCE);
        if (co_load(&pool->arena.head->learned) != learned) /* by us, or by another worker since we searched */
            found = kvp_find_here(pool, c, keys, n, prefix, refs);
    }
    kvp_count(pool, KVP_COUNT_LOOKUPS, n);
    kvp_count(pool, KVP_COUNT_HITS, found);
    return found;
}

int64_t kvp_find(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, int prefix, uint64_t *refs)
{
    uint64_t learned = kvp_learned(pool);

    return find_elsewhere(pool, c, keys, n, prefix, refs, learned, kvp_find_here(pool, c, keys, n, prefix, refs));
}

int64_t kvp_lookup(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, uint64_t *refs)
{
    int status = kvp_enter_class(pool, c);

    return status ? status : kvp_find(pool, c, keys, n, 0, refs);
}

static int64_t pin(kvp_pool *pool, uint64_t *refs, uint32_t n)
{
    kvp_lock(pool);
    int64_t pinned = pool->closed ? kvp_fail(KVP_E_CLOSED, "closed") : kvp_pin(&pool->arena, refs, n);
    uint32_t valid = pinned > 0 ? (uint32_t)pinned : 0;
    if (valid < n && (pinned >= 0 || pinned == KVP_E_STALE))
        kvp_doubt(pool, refs[valid]);
    clear_refs(refs + valid, n - valid);
    struct kvp_order order = kvp_order_new(pool, valid);
    kvp_touch_refs(pool, refs, valid, &order);
    kvp_count(pool, KVP_COUNT_PINNED, valid);
    kvp_unlock(pool);
    return pinned;
}

int64_t kvp_match_found(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, uint64_t *refs, uint64_t learned,
                        uint32_t found)
{
    found = find_elsewhere(pool, c, keys, n, 1, refs, learned, found);
    clear_refs(refs + found, n - found);
    int64_t pinned = found ? pin(pool, refs, found) : 0;
    return pinned == KVP_E_STALE ? 0 : pinned; /* evicted between the two: a miss */
}

int64_t kvp_match(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, uint64_t *refs)
{
    uint64_t learned = kvp_learned(pool);
    int status = kvp_enter_class(pool, c);

    if (status) {
        clear_refs(refs, n);
        return status;
    }
    return kvp_match_found(pool, c, keys, n, refs, learned, kvp_find_here(pool, c, keys, n, 1, refs));
}

int64_t kvp_touch(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n)
{
    uint64_t refs[BATCH];
    int64_t found = 0;
    int status = kvp_enter_class(pool, c);

    if (status)
        return status;
    struct kvp_order order = kvp_order_of_call(pool, n);
    for (uint32_t at = 0; at < n; at += BATCH) {
        uint32_t count = n - at < BATCH ? n - at : BATCH;
        found += kvp_directory_find(pool, c, (const uint8_t *)keys + 16 * (size_t)at, count, 0, refs);
        kvp_touch_refs(pool, refs, count, &order);
    }
    return found;
}

int64_t kvp_pin_refs(kvp_pool *pool, uint64_t *refs, uint32_t n)
{
    int status = kvp_enter(pool);

    if (status)
        clear_refs(refs, n);
    return status ? status : pin(pool, refs, n);
}

int kvp_unpin_refs(kvp_pool *pool, uint64_t *refs, uint32_t n)
{
    if (pool->forks != kvp_fork_count() || !pool->joined)
        return KVP_OK; /* what this worker pinned is gone with it, or is the parent's */
    kvp_lock(pool);
    if (!pool->closed)
        kvp_unpin(&pool->arena, refs, n);
    clear_refs(refs, n);
    kvp_unlock(pool);
    return KVP_OK;
}

/* ---- publishing ---- */

/* Tag and enter one block: its reference stays if it may become LIVE, and is 0 if it has gone back (if it is kept: is ours still,
 * and no longer pinned), because an earlier block stands under its key or because the directory has no room there. */
static int enter(kvp_pool *pool, uint32_t c, uint32_t number, const struct kvp_key *key, int is_kept, uint64_t *ref,
                 struct kvp_lines *lines)
{
    kvp_set_tag_to(&pool->arena, c, number, key->low, key->high, lines);
    KVP_CRASH_POINT("publish.tagged");
    int entered = kvp_directory_insert(pool, key, *ref);
    KVP_CRASH_POINT("publish.entered");
    if (entered == 1)
        return KVP_OK;
    kvp_count(pool, entered ? KVP_COUNT_UNINDEXED : KVP_COUNT_DUPLICATES, 1);
    kvp_set_tag(&pool->arena, c, number, 0, 0);
    if (is_kept)
        kvp_unpin(&pool->arena, ref, 1);
    *ref = 0;
    return is_kept ? KVP_OK : kvp_free_one(&pool->arena, c, number);
}

static int64_t publish(kvp_pool *pool, uint32_t c, const uint32_t *numbers, const void *keys, uint32_t n, int is_kept,
                       uint64_t *refs, const struct kvp_order *given)
{
    struct kvp_class *class = &pool->arena.class[c];
    struct kvp_lines lines = {NULL};
    int64_t published = 0;

    for (uint32_t i = 0; i < n; i++) {
        struct kvp_key key = kvp_key_at(keys, i);
        int status = enter(pool, c, numbers[i], &key, is_kept, &refs[i], &lines);
        if (status)
            return status;
    }
    kvp_lines_end(&lines);
    /* Payloads and labels are in memory before any word says LIVE: readers and adopters trust it. So are the slots of kept
     * blocks: an evictor that sees LIVE sees them. */
    nc_write_fence();
    struct kvp_order order = given ? *given : kvp_order_new(pool, n);
    for (uint32_t i = n; i-- > 0;) { /* the last first: who sees the first key sees all of them */
        if (!refs[i])
            continue;
        co_store_relaxed(&class->scores[numbers[i]], pool->policy->admit(kvp_order_stamp(pool, &order, i)));
        kvp_make_live(&pool->arena, c, numbers[i], &lines);
        published++;
    }
    kvp_lines_end(&lines);
    nc_write_fence(); /* LIVE is in memory before a record says so: a reader of the log may trust its generation */
    for (uint32_t i = n; i-- > 0;) { /* the last first again: another host that follows the log learns the first key last */
        if (!refs[i])
            continue;
        struct kvp_key key = kvp_key_at(keys, i);
        log_event_to(pool, KVP_EVENT_PUBLISHED, refs[i], &key, &lines);
        kvp_candidate_add(pool, c, numbers[i]);
    }
    kvp_lines_end(&lines);
    for (uint32_t i = n; i-- > 0;) /* after the records: what we die before we know is found, and told, by our recovery */
        if (refs[i])
            kvp_know(pool, refs[i]);
    kvp_gate_open(&pool->arena.head->gate);
    kvp_count(pool, KVP_COUNT_PUBLISHED, (uint64_t)published);
    return published;
}

/* All blocks are ours, each once, and every key is one: otherwise nothing happens. Then these are the references to be. */
static int check_publication(kvp_pool *pool, uint32_t c, const uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs)
{
    uint64_t *seen = pool->arena.class[c].victims;
    uint32_t checked = 0;
    int status = KVP_OK;

    for (; checked < n && status == KVP_OK; checked++) {
        struct kvp_key key = kvp_key_at(keys, checked);
        uint32_t number = numbers[checked];
        if ((status = kvp_future_ref(&pool->arena, c, number, &refs[checked])))
            break;
        if (key.low == 0 && key.high == 0)
            status = kvp_fail(KVP_E_INVALID, "key %u is all zeros: no key is", checked);
        else if (seen[number / 64] >> number % 64 & 1)
            status = kvp_fail(KVP_E_NOTOWNED, "block %u stands twice in one publication", number);
        seen[number / 64] |= 1ull << number % 64;
    }
    for (uint32_t i = 0; i < checked; i++)
        seen[numbers[i] / 64] &= ~(1ull << numbers[i] % 64);
    return status;
}

/* Pin, before they are LIVE, blocks that are all ours. */
static int pin_ahead(kvp_pool *pool, uint32_t n, const uint64_t *refs)
{
    int status = kvp_pin_ahead(&pool->arena, refs, n);

    if (status == KVP_OK)
        kvp_count(pool, KVP_COUNT_PINNED, n);
    return status;
}

/* The first lines that a publication writes: somebody may look at them all the time, and they would come one after another. */
static void ask(kvp_pool *pool, uint32_t c, const uint32_t *numbers, const void *keys, uint32_t n)
{
    if (n == 0 || numbers[0] >= pool->arena.class[c].blocks)
        return;
    kvp_directory_ask(pool, keys);
    kvp_prefetch_to_store(&pool->arena.class[c].words[numbers[0]]);
    kvp_prefetch_to_store(&pool->arena.class[c].tags[numbers[0]]);
    kvp_prefetch_to_store(&pool->arena.head->clock);
}

/* Without an order, in one of its own. */
static int64_t publish_ordered(kvp_pool *pool, uint32_t c, uint32_t *numbers, const void *keys, uint32_t n, int is_kept,
                               uint64_t *refs, struct kvp_order *order)
{
    int64_t result = kvp_enter_class(pool, c);

    if (result)
        return result;
    ask(pool, c, numbers, keys, n);
    kvp_lock(pool);
    if (pool->closed)
        result = kvp_fail(KVP_E_CLOSED, "closed");
    if (result == KVP_OK)
        result = check_publication(pool, c, numbers, keys, n, refs);
    if (result == KVP_OK && KVP_MANY_HOSTS)
        result = kvp_host_assure(&pool->arena.roster); /* who was declared lost while it slept changes nothing any more */
    if (result == KVP_OK && is_kept)
        result = pin_ahead(pool, n, refs);
    if (result == KVP_OK) {
        result = publish(pool, c, numbers, keys, n, is_kept, refs, order);
        for (uint32_t i = 0; i < n; i++)
            numbers[i] = is_kept && !refs[i] ? numbers[i] : KVP_NO_BLOCK;
    } else {
        clear_refs(refs, n);
    }
    if (order)
        order->done += n;
    kvp_unlock(pool);
    return result;
}

int64_t kvp_publish_ordered(kvp_pool *pool, uint32_t c, uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs,
                            struct kvp_order *order)
{
    return publish_ordered(pool, c, numbers, keys, n, 0, refs, order);
}

/* What was written through views is in our cache only; who copied in has written it back. */
static void write_back(kvp_pool *pool, uint32_t c, const uint32_t *numbers, uint32_t n)
{
    for (uint32_t i = 0; KVP_MANY_HOSTS && i < n && c < pool->arena.layout.classes; i++)
        if (numbers[i] < pool->arena.class[c].blocks)
            nc_write_back(kvp_block_data(&pool->arena, kvp_block(c, numbers[i])), pool->arena.class[c].stride);
}

int64_t kvp_publish(kvp_pool *pool, uint32_t c, uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs)
{
    write_back(pool, c, numbers, n);
    return publish_ordered(pool, c, numbers, keys, n, 0, refs, NULL);
}

int64_t kvp_publish_kept(kvp_pool *pool, uint32_t c, uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs)
{
    write_back(pool, c, numbers, n);
    return publish_ordered(pool, c, numbers, keys, n, 1, refs, NULL);
}

/* ---- removing ---- */

int kvp_remove_ours(kvp_pool *pool, uint32_t c, uint64_t ref)
{
    uint32_t number = kvp_block_number((uint32_t)ref);

    if (!kvp_lock_block(&pool->arena, ref))
        return 0; /* evicted since it was found, or by somebody now */
    kvp_unlink_victim(pool, c, number, KVP_EVENT_REMOVED);
    if (kvp_is_pinned(&pool->arena, c, number)) {
        co_store_relaxed(&pool->arena.class[c].scores[number], 0); /* among the first to go once it is not */
        kvp_unlock_block(&pool->arena, c, number);
        kvp_candidate_add(pool, c, number);
    } else {
        kvp_evict_take(&pool->arena, c, number);
        kvp_free_one(&pool->arena, c, number);
    }
    return 1;
}

/* Ours goes at once. Another host's loses its name here, and its owner is asked: it and the others follow at their next
 * look at our log. */
static int remove_one(kvp_pool *pool, uint32_t c, uint64_t ref, const struct kvp_key *key)
{
    if (kvp_is_ours(&pool->arena, c, kvp_block_number((uint32_t)ref)))
        return kvp_remove_ours(pool, c, ref);
    return kvp_ask_to_remove(pool, ref, key);
}

/* Remove every block of a key: hosts that published it at the same moment have one each. 1 removed, 0 not there. An evictor
 * holds a block for microseconds, and may then let it stand: that is waited for, but not for ever, since it may be stopped. */
static int remove_key(kvp_pool *pool, uint32_t c, const struct kvp_key *key)
{
    struct timespec pause = {0, 1000000};
    uint64_t ref;
    int removed = 0;

    for (int held = 0, gone = 0; gone <= (int)KVP_HOSTS_MAX;) {
        int one = 0;
        if (kvp_directory_find(pool, c, key, 1, 0, &ref)) {
            kvp_lock(pool);
            one = pool->closed ? 0 : remove_one(pool, c, ref, key);
            kvp_unlock(pool);
        }
        removed |= one, gone += one;
        if (one && pool->arena.layout.hosts == 1)
            break; /* there was one block of it */
        if (one)
            continue;
        if (!kvp_directory_held(pool, c, key))
            break;
        if (held++ == HELD_YIELDS + HELD_MS)
            return kvp_fail(KVP_E_BUSY, "a worker has stopped while it was evicting a block of the key: try again");
        if (held <= HELD_YIELDS)
            sched_yield();
        else
            nanosleep(&pause, NULL);
    }
    return removed;
}

int64_t kvp_remove(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n)
{
    int64_t removed = 0;
    int status = kvp_enter_class(pool, c), one = 0;

    if (status)
        return status;
    kvp_replay(pool, KVP_PATIENCE); /* what others have published until now goes as well */
    for (uint32_t i = 0; i < n; i++) {
        struct kvp_key key = kvp_key_at(keys, i);
        one = remove_key(pool, c, &key);
        removed += one > 0;
        status = one < 0 ? one : status;
    }
    kvp_count(pool, KVP_COUNT_REMOVED, (uint64_t)removed);
    return status ? status : removed;
}
