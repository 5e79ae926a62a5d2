/* policy.c -- which block goes next. A policy turns uses into scores; the smallest score goes first. */
#include "native/handle.h"

#include <stdlib.h>
#include <string.h>

static uint64_t score_now(uint64_t stamp)
{
    return stamp;
}

static uint64_t touch_now(uint64_t score, uint64_t stamp)
{
    return stamp > score ? stamp : score;
}

static uint64_t touch_never(uint64_t score, uint64_t stamp)
{
    (void)stamp;
    return score;
}

/* lfu: {count:20 | stamp of the last use:44}: fewest uses first, ties by least recent use. */
enum { STAMP_BITS = 44 };
#define STAMP_MASK ((1ull << STAMP_BITS) - 1)

static uint64_t score_once(uint64_t stamp)
{
    return 1ull << STAMP_BITS | (stamp & STAMP_MASK);
}

static uint64_t touch_more(uint64_t score, uint64_t stamp)
{
    uint64_t count = score >> STAMP_BITS;

    return (count + (count < UINT64_MAX >> STAMP_BITS)) << STAMP_BITS | (stamp & STAMP_MASK);
}

const struct kvp_policy kvp_policies[] = {
    {"leaf", 1, score_now, touch_now}, /* lru, but of one chain the tail is the oldest */
    {"lru", 0, score_now, touch_now},
    {"fifo", 0, score_now, touch_never},
    {"lfu", 0, score_once, touch_more},
    {NULL, 0, NULL, NULL},
};

uint32_t kvp_policy_count(void)
{
    return sizeof kvp_policies / sizeof *kvp_policies - 1;
}

int kvp_policy_find(const char *name)
{
    for (int i = 0; kvp_policies[i].name; i++)
        if (strcmp(kvp_policies[i].name, name) == 0)
            return i;
    return -1;
}

struct kvp_order kvp_order_new(kvp_pool *pool, uint32_t n)
{
    uint64_t first = co_add(&pool->arena.head->clock, n);

    if (first != pool->clock_seen)
        pool->foreign = UINT32_MAX;
    pool->clock_seen = first + n;
    return (struct kvp_order){first, n, 0};
}

struct kvp_order kvp_order_of_call(kvp_pool *pool, uint32_t n)
{
    kvp_lock(pool);
    struct kvp_order order = kvp_order_new(pool, n);
    kvp_unlock(pool);
    return order;
}

enum { AHEAD = 16 };

static co_u64 *score_of(const kvp_pool *pool, uint64_t ref)
{
    return &pool->arena.class[kvp_block_class((uint32_t)ref)].scores[kvp_block_number((uint32_t)ref)];
}

/* Uses of other hosts' blocks are told to their owners at the next tick: the first ones since the last. */
static void note_use(kvp_pool *pool, uint64_t ref)
{
    uint32_t at = __atomic_fetch_add(&pool->used_count, 1, __ATOMIC_RELAXED);

    if (at < KVP_USED)
        pool->used[at] = ref;
}

/* A plain store: two workers that touch at once lose one use, never a block. */
static kvp_inline void touch_all(kvp_pool *pool, const uint64_t *refs, uint32_t n, const struct kvp_order *order,
                                 uint64_t (*touch)(uint64_t score, uint64_t stamp))
{
    for (uint32_t i = 0; i < n; i++) {
        /* Blocks of one call need not be neighbours: no score waits for the one before. */
        if (i + AHEAD < n && (uint32_t)(refs[i + AHEAD] ^ refs[i + AHEAD - 1]) / (KVP_LINE / sizeof(co_u64)))
            kvp_prefetch(score_of(pool, refs[i + AHEAD]));
        if (!refs[i])
            continue;
        co_u64 *score = score_of(pool, refs[i]);
        if (!kvp_is_ours(&pool->arena, kvp_block_class((uint32_t)refs[i]), kvp_block_number((uint32_t)refs[i])))
            note_use(pool, refs[i]);
        else
            co_store_relaxed(score, touch(co_load_relaxed(score), kvp_order_stamp(pool, order, i)));
    }
}

void kvp_touch_refs(kvp_pool *pool, const uint64_t *refs, uint32_t n, struct kvp_order *order)
{
    if (pool->policy->touch == touch_now) /* compiled in: a call through a pointer costs more than the rest */
        touch_all(pool, refs, n, order, touch_now);
    else
        touch_all(pool, refs, n, order, pool->policy->touch);
    order->done += n;
}

/* ---- the heap of candidates ---- */

static void sift_down(struct kvp_heap *heap, uint32_t at)
{
    struct kvp_candidate item = heap->item[at];

    for (uint32_t child; (child = 2 * at + 1) < heap->count; at = child) {
        if (child + 1 < heap->count && heap->item[child + 1].score < heap->item[child].score)
            child++;
        if (heap->item[child].score >= item.score)
            break;
        heap->item[at] = heap->item[child];
    }
    heap->item[at] = item;
}

static void push(struct kvp_heap *heap, struct kvp_candidate item)
{
    uint32_t at = heap->count++;

    for (; at && heap->item[(at - 1) / 2].score > item.score; at = (at - 1) / 2)
        heap->item[at] = heap->item[(at - 1) / 2];
    heap->item[at] = item;
}

static void drop_top(struct kvp_heap *heap)
{
    heap->item[0] = heap->item[--heap->count];
    if (heap->count)
        sift_down(heap, 0);
}

/* Note in every class that others have published. */
static void look_at_clock(kvp_pool *pool)
{
    uint64_t clock = co_load(&pool->arena.head->clock);

    if (clock != pool->clock_seen)
        pool->foreign = UINT32_MAX;
    pool->clock_seen = clock;
}

static int is_others(const kvp_pool *pool, uint64_t word)
{
    enum kvp_state state = kvp_word_state(word);

    return (state == KVP_OWN || state == KVP_EVICTING) && kvp_word_who(word) != pool->arena.self;
}

static int build(kvp_pool *pool, uint32_t c)
{
    struct kvp_class *class = &pool->arena.class[c];
    struct kvp_heap *heap = &pool->heap[c];

    if (!heap->item) {
        heap->capacity = class->blocks * 2;
        heap->item = kvp_table_new(heap->capacity * sizeof *heap->item);
        if (!heap->item)
            return 0;
    }
    look_at_clock(pool);
    pool->foreign &= ~(1u << c);
    heap->built = pool->clock_seen;
    heap->count = heap->pops = heap->aside = 0;
    for (uint32_t number = 0; number < class->blocks; number++) {
        if (!kvp_is_ours(&pool->arena, c, number))
            continue;
        uint64_t word = nc_load(&class->words[number]);
        if (kvp_word_state(word) == KVP_LIVE)
            heap->item[heap->count++] = (struct kvp_candidate){co_load_relaxed(&class->scores[number]), number};
        else if (is_others(pool, word))
            pool->foreign |= 1u << c; /* its clock may be behind us already, and it will be LIVE: look again */
    }
    for (uint32_t at = heap->count / 2; at-- > 0;)
        sift_down(heap, at);
    return 1;
}

void kvp_candidate_add(kvp_pool *pool, uint32_t c, uint32_t number)
{
    struct kvp_heap *heap = &pool->heap[c];

    if (!heap->item)
        return;
    if (heap->count == heap->capacity)
        build(pool, c); /* stale entries have piled up: others evicted and reused our blocks */
    else
        push(heap, (struct kvp_candidate){co_load_relaxed(&pool->arena.class[c].scores[number]), number});
}

void kvp_candidate_aside(kvp_pool *pool, uint32_t c, uint32_t number)
{
    struct kvp_heap *heap = &pool->heap[c];

    if (heap->count + heap->aside < heap->capacity)
        heap->item[heap->capacity - ++heap->aside].number = number;
}

void kvp_candidates_back(kvp_pool *pool, uint32_t c)
{
    struct kvp_heap *heap = &pool->heap[c];

    while (heap->aside) {
        uint32_t number = heap->item[heap->capacity - heap->aside--].number;
        uint64_t score = co_load_relaxed(&pool->arena.class[c].scores[number]), now = pool->policy->admit(pool->clock_seen);
        /* A pin is a use. Back at its old place it would be tried again, in vain, by each call. */
        push(heap, (struct kvp_candidate){score && now > score ? now : score, number});
    }
}

static int others_published(kvp_pool *pool, uint32_t c)
{
    look_at_clock(pool);
    return pool->foreign >> c & 1;
}

int kvp_candidates_renew(kvp_pool *pool, uint32_t c)
{
    return others_published(pool, c) && build(pool, c);
}

/* Blocks that others published are not in our heap. Their scores are at least that of a block published when it
 * was built: below that the heap is exact, above it is built again, but not for every few victims. */
static int is_outdated(kvp_pool *pool, uint32_t c)
{
    const struct kvp_heap *heap = &pool->heap[c];
    uint32_t blocks = pool->arena.class[c].blocks;

    if (heap->aside || !others_published(pool, c))
        return 0;
    return heap->count == 0 || (heap->item[0].score > pool->policy->admit(heap->built) && heap->pops > blocks / 16);
}

uint32_t kvp_victims(kvp_pool *pool, uint32_t c, uint32_t *numbers, uint32_t n)
{
    struct kvp_class *class = &pool->arena.class[c];
    struct kvp_heap *heap = &pool->heap[c];
    uint32_t found = 0;

    if (!heap->item && !build(pool, c))
        return 0;
    if (is_outdated(pool, c))
        kvp_candidates_renew(pool, c);
    while (found < n && heap->count) {
        struct kvp_candidate *top = &heap->item[0];
        uint64_t score = co_load_relaxed(&class->scores[top->number]);
        if (kvp_word_state(nc_load(&class->words[top->number])) != KVP_LIVE) {
            drop_top(heap);
        } else if (score > top->score) { /* used since: back to its present place */
            top->score = score;
            sift_down(heap, 0);
        } else {
            numbers[found++] = top->number;
            drop_top(heap);
        }
        heap->pops++;
    }
    return found;
}
