/* room.c -- blocks to fill: free ones, segments of other classes, evicted ones; all that are wanted or none. */
#include "native/handle.h"

#include <string.h>

enum { BATCH = 64 };

/* The block is OWN(self) or EVICTING(self): nobody else changes its names. */
void kvp_unlink_victim(kvp_pool *pool, uint32_t c, uint32_t number, enum kvp_event_kind kind)
{
    struct kvp_class *class = &pool->arena.class[c];
    struct kvp_key key = {co_load(&class->tags[number].low), co_load(&class->tags[number].high)};
    uint64_t generation = kvp_word_generation(nc_load_relaxed(&class->words[number]));

    kvp_unknow(pool, kvp_ref(kvp_block(c, number), generation)); /* before the names go: lookups believe it */
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
            kvp_unlink_victim(pool, c, numbers[i], KVP_EVENT_EVICTED);
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

uint64_t kvp_newest_score(const kvp_pool *pool, uint32_t c, uint32_t segment)
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
        uint64_t newest = kvp_newest_score(pool, holder, s);
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

    if ((pool->arena.layout.classes == 1 && !KVP_MANY_HOSTS) || n == 0)
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
    kvp_host_want(pool, 1);
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
    for (uint32_t i = 0; KVP_MODE == KVP_SIM && i < n && status == KVP_OK; i++) /* through views, perhaps: no store of it is seen */
        nc_will_store(kvp_block_data(&pool->arena, kvp_block(c, numbers[i])), pool->arena.class[c].stride);
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
        if (KVP_MANY_HOSTS && numbers[i] < pool->arena.class[c].blocks)
            kvp_block_end(&pool->arena, c, numbers[i]);
        status = kvp_free_one(&pool->arena, c, numbers[i]);
        if (status == KVP_OK)
            numbers[i] = KVP_NO_BLOCK;
    }
    kvp_unlock(pool);
    return status;
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
