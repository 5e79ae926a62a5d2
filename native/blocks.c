/* blocks.c -- the verbs on keys and blocks: match, reserve, publish, remove, read, put. */
#include "native/handle.h"

#include <stdlib.h>
#include <string.h>

enum { BATCH = 64 };

void kvp_log_event(kvp_pool *pool, int kind, uint64_t ref, const struct kvp_key *key)
{
    const struct kvp_layout *layout = &pool->arena.layout;
    uint64_t word[3] = {ref | (uint64_t)kind << 62, key->low, key->high};

    kvp_log_append(pool->arena.logs + (uint64_t)pool->arena.self * layout->log_records, layout->log_records,
                   ++pool->log_sequence, word);
}

/* ---- finding ---- */

static int64_t find(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, int prefix, uint64_t *refs)
{
    uint32_t found = kvp_directory_find(pool, c, keys, n, prefix, refs);

    kvp_count(pool, KVP_COUNT_LOOKUPS, n);
    kvp_count(pool, KVP_COUNT_HITS, found);
    return found;
}

int64_t kvp_lookup(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, uint64_t *refs)
{
    int status = kvp_enter_class(pool, c);

    return status ? status : find(pool, c, keys, n, 0, refs);
}

static int64_t pin(kvp_pool *pool, uint64_t *refs, uint32_t n)
{
    kvp_lock(pool);
    int64_t pinned = pool->closed ? kvp_fail(KVP_E_CLOSED, "closed") : kvp_pin(&pool->arena, refs, n);
    uint32_t valid = pinned > 0 ? (uint32_t)pinned : 0;
    memset(refs + valid, 0, (n - valid) * sizeof *refs);
    kvp_touch_refs(pool, refs, valid);
    kvp_count(pool, KVP_COUNT_PINNED, valid);
    kvp_unlock(pool);
    return pinned;
}

int64_t kvp_match(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, uint64_t *refs)
{
    int status = kvp_enter_class(pool, c);

    if (status) {
        memset(refs, 0, n * sizeof *refs);
        return status;
    }
    int64_t found = find(pool, c, keys, n, 1, refs);
    memset(refs + found, 0, (n - (size_t)found) * sizeof *refs);
    int64_t pinned = found ? pin(pool, refs, (uint32_t)found) : 0;
    return pinned == KVP_E_STALE ? 0 : pinned; /* evicted between the two: a miss */
}

int64_t kvp_touch(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n)
{
    uint64_t refs[BATCH];
    int64_t found = 0;
    int status = kvp_enter_class(pool, c);

    if (status)
        return status;
    for (uint32_t at = 0; at < n; at += BATCH) {
        uint32_t count = n - at < BATCH ? n - at : BATCH;
        found += kvp_directory_find(pool, c, (const uint8_t *)keys + 16 * (size_t)at, count, 0, refs);
        kvp_lock(pool);
        kvp_touch_refs(pool, refs, count);
        kvp_unlock(pool);
    }
    return found;
}

int64_t kvp_pin_refs(kvp_pool *pool, uint64_t *refs, uint32_t n)
{
    int status = kvp_enter(pool);

    if (status)
        memset(refs, 0, n * sizeof *refs);
    return status ? status : pin(pool, refs, n);
}

int kvp_unpin_refs(kvp_pool *pool, uint64_t *refs, uint32_t n)
{
    if (pool->forks != kvp_fork_count() || !pool->joined)
        return KVP_OK; /* what this worker pinned is gone with it, or is the parent's */
    kvp_lock(pool);
    if (!pool->closed)
        kvp_unpin(&pool->arena, refs, n);
    memset(refs, 0, n * sizeof *refs);
    kvp_unlock(pool);
    return KVP_OK;
}

/* ---- room ---- */

/* The block is OWN(self): its names go, then it is an ordinary reserved block. */
void kvp_unlink_victim(kvp_pool *pool, uint32_t c, uint32_t number, int kind)
{
    struct kvp_class *class = &pool->arena.class[c];
    struct kvp_key key = {co_load(&class->tags[number].low), co_load(&class->tags[number].high)};
    uint64_t generation = kvp_word_generation(nc_load_relaxed(&class->words[number]));

    kvp_directory_forget(pool, kvp_block(c, number));
    kvp_log_event(pool, kind, kvp_ref(kvp_block(c, number), generation), &key);
}

/* Candidates in policy order, without those that were pinned when the pins were last noted. */
static uint32_t unpinned_victims(kvp_pool *pool, uint32_t c, uint32_t *victims, uint32_t n, int noted)
{
    for (;;) {
        uint32_t count = kvp_victims(pool, c, victims, n), kept = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (noted && kvp_was_pinned(&pool->arena, c, victims[i]))
                kvp_candidate_aside(pool, c, victims[i]);
            else
                victims[kept++] = victims[i];
        }
        if (kept || !count)
            return kept;
    }
}

/* Lock up to n victims in policy order; those that are pinned are set aside, and then all pins are noted: finding out
 * one by one costs a walk over them each. KVP_NO_WORKER: there are no more. */
static uint32_t lock_some(kvp_pool *pool, uint32_t c, uint32_t *numbers, uint32_t n, int *noted)
{
    uint32_t victims[BATCH], locked_at = 0;
    uint32_t count = unpinned_victims(pool, c, victims, n < BATCH ? n : BATCH, *noted);

    memcpy(numbers, victims, count * sizeof *victims);
    uint32_t locked = kvp_evict_begin(&pool->arena, c, numbers, count);
    for (uint32_t i = 0; i < count; i++) { /* both lists are in the same order */
        if (locked_at < locked && numbers[locked_at] == victims[i])
            locked_at++;
        else
            kvp_candidate_aside(pool, c, victims[i]);
    }
    if (locked < count && !*noted) {
        kvp_note_pins(&pool->arena);
        *noted = 1;
    }
    kvp_count(pool, KVP_COUNT_SPARED, count - locked);
    return count ? locked : KVP_NO_WORKER;
}

/* Lock n victims in policy order, or as many as may be evicted. */
static uint32_t lock_victims(kvp_pool *pool, uint32_t c, uint32_t *numbers, uint32_t n)
{
    uint32_t got = 0;
    int noted = 0;

    for (int round = 0; got < n && round < 2; round++) {
        if (round && !kvp_candidates_renew(pool, c))
            break;
        for (uint32_t locked; got < n && (locked = lock_some(pool, c, numbers + got, n - got, &noted)) != KVP_NO_WORKER;)
            got += locked;
        kvp_candidates_back(pool, c);
    }
    return got;
}

/* Evict n blocks of the class in policy order; if not all can be had, all or none as `all` says. */
static uint32_t make_room(kvp_pool *pool, uint32_t c, uint32_t *numbers, uint32_t n, int all)
{
    uint32_t got = lock_victims(pool, c, numbers, n);
    int take = got == n || !all;

    for (uint32_t i = 0; i < got; i++) {
        if (take) {
            kvp_evict_take(&pool->arena, c, numbers[i]);
            kvp_unlink_victim(pool, c, numbers[i], 1);
        } else { /* the reservation fails: what is cached stays cached */
            kvp_unlock_block(&pool->arena, c, numbers[i]);
            kvp_candidate_add(pool, c, numbers[i]);
        }
    }
    if (!take)
        return 0;
    kvp_count(pool, KVP_COUNT_EVICTED, got);
    pool->evictions += got;
    return got;
}

/* Score of the youngest block in a segment; UINT64_MAX if a block in it is owned: then it cannot be drained. */
static uint64_t newest_score(const kvp_pool *pool, uint32_t c, uint32_t segment)
{
    const struct kvp_class *class = &pool->arena.class[c];
    uint64_t newest = 0;
    uint32_t number, end;

    for (kvp_segment_blocks(&pool->arena, c, segment, &number, &end); number < end; number++) {
        enum kvp_state state = kvp_word_state(nc_load(&class->words[number]));
        uint64_t score = co_load_relaxed(&class->scores[number]);
        if (state == KVP_OWN || state == KVP_EVICTING)
            return UINT64_MAX;
        if (state == KVP_LIVE && score > newest)
            newest = score;
    }
    return newest;
}

/* Take the segment of another class whose blocks have been idle longest: only if they are all older than `oldest`. */
static int take_segment(kvp_pool *pool, uint32_t c, uint64_t oldest)
{
    uint64_t best = oldest;
    uint32_t from = KVP_CLASSES_MAX, segment = 0;

    for (uint32_t s = 0; s < pool->arena.layout.segments; s++) {
        uint64_t word = co_load(&pool->arena.segments[s]);
        uint32_t holder = kvp_segment_class(word);
        if (kvp_segment_state(word) != KVP_SEGMENT_HELD || holder == c || holder >= pool->arena.layout.classes)
            continue;
        uint64_t newest = newest_score(pool, holder, s);
        if (newest < best)
            best = newest, from = holder, segment = s;
    }
    if (from == KVP_CLASSES_MAX || !kvp_segment_drain(&pool->arena, from, segment))
        return 0;
    kvp_count(pool, KVP_COUNT_SEGMENTS, 1);
    return kvp_segment_adopt(&pool->arena, c);
}

static uint64_t oldest_score(kvp_pool *pool, uint32_t c)
{
    uint32_t victim;

    if (kvp_victims(pool, c, &victim, 1) == 0)
        return UINT64_MAX; /* nothing of our own to give: anything else is older */
    kvp_candidate_add(pool, c, victim);
    return co_load_relaxed(&pool->arena.class[c].scores[victim]);
}

/* Blocks from a segment that is free, or idler than what the class would evict itself; `forced`: or any that can be
 * emptied. Looking costs a walk over the scores, so unforced it is done once per segment's worth of evictions. */
static uint32_t grow(kvp_pool *pool, uint32_t c, uint32_t *numbers, uint32_t n, int forced)
{
    uint64_t oldest = UINT64_MAX;

    if (pool->arena.layout.classes == 1 || n == 0)
        return 0;
    if (kvp_segment_adopt(&pool->arena, c))
        return kvp_alloc(&pool->arena, c, numbers, n);
    if (!forced) {
        oldest = oldest_score(pool, c);
        if (oldest != UINT64_MAX && pool->evictions < pool->arena.layout.segment_bytes / pool->arena.class[c].stride)
            return 0;
        pool->evictions = 0;
    }
    return take_segment(pool, c, oldest) ? kvp_alloc(&pool->arena, c, numbers, n) : 0;
}

/* Free blocks first, then free or idle segments, then eviction, then other classes' segments. All n or none. */
static int reserve(kvp_pool *pool, uint32_t c, uint32_t n, uint32_t *numbers)
{
    uint32_t got = kvp_alloc(&pool->arena, c, numbers, n);

    for (uint32_t before = n; got < n && got != before;) {
        before = got;
        got += grow(pool, c, numbers + got, n - got, 0);
        got += make_room(pool, c, numbers + got, n - got, 1);
        got += kvp_alloc(&pool->arena, c, numbers + got, n - got); /* what others freed meanwhile */
        if (got == before)
            got += grow(pool, c, numbers + got, n - got, 1);
    }
    if (got == n)
        return KVP_OK;
    kvp_free(&pool->arena, c, numbers, got);
    memset(numbers, 0xff, n * sizeof *numbers); /* KVP_NO_BLOCK */
    kvp_count(pool, KVP_COUNT_FULL, 1);
    return kvp_fail(KVP_E_FULL, "%u blocks of class %u wanted, %u are free and too few others may be evicted: they are pinned "
                    "or reserved; release hits, or make a larger pool", n, c, got);
}

int kvp_reserve(kvp_pool *pool, uint32_t c, uint32_t n, uint32_t *numbers)
{
    int status = kvp_enter_class(pool, c);

    memset(numbers, 0xff, n * sizeof *numbers); /* KVP_NO_BLOCK */
    if (status)
        return status;
    if (n > pool->arena.class[c].blocks)
        return kvp_fail(KVP_E_FULL, "%u blocks wanted, class %u has %u", n, c, pool->arena.class[c].blocks);
    kvp_lock(pool);
    status = pool->closed ? kvp_fail(KVP_E_CLOSED, "closed") : reserve(pool, c, n, numbers);
    kvp_unlock(pool);
    return status;
}

int kvp_withdraw(kvp_pool *pool, uint32_t c, uint32_t *numbers, uint32_t n)
{
    int status = kvp_enter_class(pool, c);

    if (status)
        return status;
    kvp_lock(pool);
    if (pool->closed)
        status = kvp_fail(KVP_E_CLOSED, "closed");
    for (uint32_t i = 0; i < n && status == KVP_OK; i++) {
        if (numbers[i] == KVP_NO_BLOCK)
            continue;
        status = kvp_free(&pool->arena, c, &numbers[i], 1);
        if (status == KVP_OK)
            numbers[i] = KVP_NO_BLOCK;
    }
    kvp_unlock(pool);
    return status;
}

/* ---- publishing ---- */

/* Tag and enter one block: its reference if it may become LIVE; 0 if it has gone back, because an earlier block
 * stands under its key or because the directory has no room there. */
static int enter(kvp_pool *pool, uint32_t c, uint32_t number, const struct kvp_key *key, uint64_t *ref)
{
    struct kvp_tag *tag = &pool->arena.class[c].tags[number];
    int status = kvp_future_ref(&pool->arena, c, number, ref);

    if (status)
        return status;
    co_store(&tag->low, key->low);
    co_store(&tag->high, key->high);
    KVP_CRASH_POINT("publish.tagged");
    int entered = kvp_directory_insert(pool, key, *ref);
    KVP_CRASH_POINT("publish.entered");
    if (entered == 1)
        return KVP_OK;
    kvp_count(pool, entered ? KVP_COUNT_UNINDEXED : KVP_COUNT_DUPLICATES, 1);
    co_store(&tag->low, 0);
    co_store(&tag->high, 0);
    *ref = 0;
    return kvp_free(&pool->arena, c, &number, 1);
}

static int64_t publish(kvp_pool *pool, uint32_t c, const uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs)
{
    struct kvp_class *class = &pool->arena.class[c];
    uint64_t stamp = kvp_stamps(pool, n);
    int64_t published = 0;

    nc_write_fence(); /* the payloads are written back before any word says LIVE */
    for (uint32_t i = 0; i < n; i++) {
        struct kvp_key key = kvp_key_at(keys, i);
        int status = enter(pool, c, numbers[i], &key, &refs[i]);
        if (status)
            return status;
    }
    for (uint32_t i = n; i-- > 0;) { /* the last first: who sees the first key sees all of them */
        if (!refs[i])
            continue;
        uint64_t order = pool->policy->tail_first ? n - 1 - i : i;
        co_store_relaxed(&class->scores[numbers[i]], pool->policy->admit(stamp + order));
        kvp_make_live(&pool->arena, c, numbers[i]);
        published++;
    }
    nc_write_fence(); /* LIVE is in memory before a record says so: a reader of the log may trust its generation */
    for (uint32_t i = 0; i < n; i++) {
        if (!refs[i])
            continue;
        struct kvp_key key = kvp_key_at(keys, i);
        kvp_log_event(pool, 0, refs[i], &key);
        kvp_candidate_add(pool, c, numbers[i]);
    }
    kvp_count(pool, KVP_COUNT_PUBLISHED, (uint64_t)published);
    return published;
}

/* All blocks are ours, each once, and every key is one: otherwise nothing happens. */
static int check_publication(kvp_pool *pool, uint32_t c, const uint32_t *numbers, const void *keys, uint32_t n)
{
    uint64_t *seen = pool->arena.class[c].victims, ref;
    uint32_t checked = 0;
    int status = KVP_OK;

    for (; checked < n && status == KVP_OK; checked++) {
        struct kvp_key key = kvp_key_at(keys, checked);
        uint32_t number = numbers[checked];
        if ((status = kvp_future_ref(&pool->arena, c, number, &ref)))
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

int64_t kvp_publish(kvp_pool *pool, uint32_t c, uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs)
{
    int64_t result = kvp_enter_class(pool, c);

    if (result)
        return result;
    kvp_lock(pool);
    if (pool->closed)
        result = kvp_fail(KVP_E_CLOSED, "closed");
    if (result == KVP_OK)
        result = check_publication(pool, c, numbers, keys, n);
    if (result == KVP_OK) {
        result = publish(pool, c, numbers, keys, n, refs);
        memset(numbers, 0xff, n * sizeof *numbers); /* KVP_NO_BLOCK */
    }
    kvp_unlock(pool);
    return result;
}

/* ---- removing ---- */

static int remove_one(kvp_pool *pool, uint32_t c, uint64_t ref)
{
    uint32_t number = kvp_block_number((uint32_t)ref);

    if (!kvp_lock_block(&pool->arena, ref))
        return 0; /* evicted since it was found, or by somebody now */
    kvp_unlink_victim(pool, c, number, 2);
    if (kvp_is_pinned(&pool->arena, c, number)) {
        co_store_relaxed(&pool->arena.class[c].scores[number], 0); /* among the first to go once it is not */
        kvp_unlock_block(&pool->arena, c, number);
        kvp_candidate_add(pool, c, number);
    } else {
        kvp_evict_take(&pool->arena, c, number);
        kvp_free(&pool->arena, c, &number, 1);
    }
    return 1;
}

int64_t kvp_remove(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n)
{
    int64_t removed = 0;
    int status = kvp_enter_class(pool, c);

    if (status)
        return status;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t ref;
        if (!kvp_directory_find(pool, c, (const uint8_t *)keys + 16 * (size_t)i, 1, 0, &ref))
            continue;
        kvp_lock(pool);
        removed += pool->closed ? 0 : remove_one(pool, c, ref);
        kvp_unlock(pool);
    }
    kvp_count(pool, KVP_COUNT_REMOVED, (uint64_t)removed);
    return removed;
}

int64_t kvp_shrink(kvp_pool *pool, uint32_t c, uint32_t n)
{
    uint32_t numbers[BATCH];
    int64_t freed = 0;
    int status = kvp_enter_class(pool, c);

    if (status)
        return status;
    while (freed < n) {
        kvp_lock(pool);
        uint32_t left = (uint32_t)(n - freed);
        uint32_t got = pool->closed ? 0 : make_room(pool, c, numbers, left < BATCH ? left : BATCH, 0);
        kvp_free(&pool->arena, c, numbers, got);
        kvp_unlock(pool);
        freed += got;
        if (!got)
            break;
    }
    return freed;
}

/* ---- copies ---- */

static int check_bytes(const kvp_pool *pool, uint32_t c, uint64_t bytes)
{
    if (bytes <= pool->arena.class[c].stride)
        return KVP_OK;
    return kvp_fail(KVP_E_INVALID, "%llu bytes do not fit a block of %llu bytes", (unsigned long long)bytes,
                    (unsigned long long)pool->arena.class[c].stride);
}

/* Copy, then look whether the word is still what it was: the evictor stores OWN before its first new byte, so
 * bytes read under an unchanged word are the right ones. */
static int read_one(kvp_pool *pool, uint64_t ref, void *to, uint64_t bytes)
{
    const uint8_t *from = kvp_block_data(&pool->arena, (uint32_t)ref);

    nc_invalidate(from, bytes);
    nc_read_fence(); /* no line is read before it is dropped */
    kvp_copy_out(to, from, bytes);
    nc_read_fence(); /* the copy's loads come before the word's */
    if (kvp_ref_live(&pool->arena, ref))
        return 1;
    memset(to, 0, bytes); /* what was copied may be another tenant's */
    kvp_count(pool, KVP_COUNT_STALE, 1);
    return 0;
}

int64_t kvp_read(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, void *const *to, uint64_t bytes, uint8_t *got)
{
    uint64_t refs[BATCH];
    int64_t total = 0;
    int status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    for (uint32_t at = 0; at < n; at += BATCH) {
        uint32_t count = n - at < BATCH ? n - at : BATCH;
        find(pool, c, (const uint8_t *)keys + 16 * (size_t)at, count, 0, refs);
        for (uint32_t i = 0; i < count; i++) {
            got[at + i] = (uint8_t)(refs[i] && read_one(pool, refs[i], to[at + i], bytes));
            if (!got[at + i])
                refs[i] = 0;
            total += got[at + i];
        }
        kvp_lock(pool);
        kvp_touch_refs(pool, refs, count);
        kvp_unlock(pool);
    }
    kvp_count(pool, KVP_COUNT_BYTES_OUT, (uint64_t)total * bytes);
    return total;
}

int kvp_fill(kvp_pool *pool, uint32_t c, uint32_t number, const void *from, uint64_t bytes)
{
    uint64_t ref;
    int status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    __atomic_add_fetch(&pool->copies, 1, __ATOMIC_ACQ_REL);
    if (!(status = kvp_future_ref(&pool->arena, c, number, &ref)) && !(status = kvp_enter(pool))) {
        kvp_copy_in(kvp_block_data(&pool->arena, kvp_block(c, number)), from, bytes);
        kvp_count(pool, KVP_COUNT_BYTES_IN, bytes);
    }
    __atomic_sub_fetch(&pool->copies, 1, __ATOMIC_ACQ_REL);
    return status;
}

/* Store up to BATCH blocks; those whose key is present are skipped. */
static int64_t put_batch(kvp_pool *pool, uint32_t c, const uint8_t *keys, uint32_t n, const void *const *from, uint64_t bytes)
{
    uint64_t refs[BATCH];
    uint32_t numbers[BATCH], which[BATCH], count = 0;
    uint8_t wanted[BATCH * KVP_KEY_BYTES];

    kvp_directory_find(pool, c, keys, n, 0, refs);
    for (uint32_t i = 0; i < n; i++)
        if (!refs[i]) {
            memcpy(wanted + 16 * (size_t)count, keys + 16 * (size_t)i, 16);
            which[count++] = i;
        }
    kvp_count(pool, KVP_COUNT_DUPLICATES, n - count);
    if (!count)
        return 0;
    int64_t status = kvp_reserve(pool, c, count, numbers);
    for (uint32_t i = 0; i < count && status == KVP_OK; i++)
        status = kvp_fill(pool, c, numbers[i], from[which[i]], bytes);
    if (status == KVP_OK)
        status = kvp_publish(pool, c, numbers, wanted, count, refs);
    if (status < 0)
        kvp_withdraw(pool, c, numbers, count); /* a zero key, or closed meanwhile: nothing stays reserved */
    return status;
}

int64_t kvp_put(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, const void *const *from, uint64_t bytes)
{
    int64_t stored = 0, status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    for (uint32_t at = 0; at < n && status >= 0; at += BATCH) {
        status = put_batch(pool, c, (const uint8_t *)keys + 16 * (size_t)at, n - at < BATCH ? n - at : BATCH, from + at, bytes);
        stored += status > 0 ? status : 0;
    }
    return status < 0 && stored == 0 ? status : stored;
}
