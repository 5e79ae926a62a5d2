/* segments.c -- moving whole segments between classes, as demand shifts. */
#include "allocator/allocator.h"

void kvp_segment_blocks(const struct kvp_arena *arena, uint32_t c, uint32_t segment, uint32_t *first, uint32_t *end)
{
    uint64_t stride = arena->class[c].stride, blocks = arena->class[c].blocks;
    uint64_t start = segment * arena->layout.segment_bytes, stop = start + arena->layout.segment_bytes;
    uint64_t last = (stop + stride - 1) / stride;

    if (KVP_MANY_HOSTS) /* a line of words is used as a whole or not at all */
        start = start / stride / 8 * 8 * stride, last = (last + 7) / 8 * 8;
    *first = (uint32_t)(start / stride < blocks ? start / stride : blocks);
    *end = (uint32_t)(last < blocks ? last : blocks);
}

int kvp_segments_held(const struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    uint32_t s, last;

    for (kvp_block_segments(arena, c, number, &s, &last); s <= last; s++) {
        uint64_t word = co_load(&arena->segments[s]);
        enum kvp_segment_state state = kvp_segment_state(word);
        if (kvp_segment_class(word) != c || (state != KVP_SEGMENT_HELD && state != KVP_SEGMENT_ADOPTING))
            return 0;
    }
    return 1;
}

/* ABSENT -> FREE for every block of the segment whose other segments are held too. */
static void open_blocks(struct kvp_arena *arena, uint32_t c, uint32_t segment)
{
    struct kvp_class *class = &arena->class[c];
    uint32_t number, end;

    for (kvp_segment_blocks(arena, c, segment, &number, &end); number < end; number++) {
        uint64_t word = nc_load(&class->words[number]);
        if (kvp_word_state(word) != KVP_ABSENT || !kvp_block_usable(arena, c, number))
            continue;
        if (!nc_cas(&class->words[number], &word, kvp_word(kvp_word_generation(word), 0, KVP_FREE)))
            continue;
        KVP_CRASH_POINT("segment.opened");
        kvp_set_hint(class, number);
    }
}

int kvp_segment_adopt(struct kvp_arena *arena, uint32_t c)
{
    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        uint64_t seen = co_load(&arena->segments[s]);
        /* ADOPTING counts as held in kvp_block_usable: of two workers that adopt neighbours at least one sees the
         * other's locked CAS, so the block on the border is opened. */
        if (kvp_segment_state(seen) != KVP_SEGMENT_FREE ||
            !co_cas(&arena->segments[s], &seen, kvp_segment_word(KVP_SEGMENT_ADOPTING, c, arena->self)))
            continue;
        KVP_CRASH_POINT("segment.adopting");
        open_blocks(arena, c, s);
        co_store(&arena->segments[s], kvp_segment_word(KVP_SEGMENT_HELD, c, 0));
        return 1;
    }
    return 0;
}

/* FREE or evictable -> ABSENT; 0 if the block is owned or pinned. */
static int close_block(struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    struct kvp_class *class = &arena->class[c];
    uint64_t word = nc_load(&class->words[number]);

    if (kvp_word_state(word) == KVP_LIVE) {
        uint32_t victim = number;
        if (kvp_evict(arena, c, &victim, 1) != 1)
            return 0;
        arena->drained(arena->context, kvp_block(c, number));
        word = nc_load(&class->words[number]);
        nc_store(&class->words[number], kvp_word(kvp_word_generation(word) + 1, 0, KVP_ABSENT));
        return 1;
    }
    if (kvp_word_state(word) == KVP_ABSENT && !kvp_is_ours(arena, c, number))
        return 1; /* its line lies in another host's segment, too: nobody opens it */
    /* A new generation, also of one that is ABSENT already: whoever saw it so while the segment was held, and is about to
     * open it, must not succeed now. */
    return (kvp_word_state(word) == KVP_FREE || kvp_word_state(word) == KVP_ABSENT) &&
           nc_cas(&class->words[number], &word, kvp_word(kvp_word_generation(word) + 1, 0, KVP_ABSENT));
}

int kvp_segment_drain(struct kvp_arena *arena, uint32_t c, uint32_t segment)
{
    uint64_t seen = kvp_segment_word(KVP_SEGMENT_HELD, c, 0);
    uint32_t first, end;
    int empty = 1;

    kvp_spill(arena);
    if (!co_cas(&arena->segments[segment], &seen, kvp_segment_word(KVP_SEGMENT_DRAINING, c, arena->self)))
        return 0;
    KVP_CRASH_POINT("segment.draining");
    kvp_segment_blocks(arena, c, segment, &first, &end);
    for (uint32_t number = first; number < end && empty; number++) {
        empty = close_block(arena, c, number);
        KVP_CRASH_POINT("segment.closed");
    }
    if (empty) {
        nc_write_back(&arena->class[c].words[first], (end - first) * 8ull);
        nc_write_fence(); /* ABSENT is in memory before a word of the next class is: of a host that is lost, memory says which
                           * class has the segment */
        co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_FREE, 0, 0));
        return 1;
    }
    co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_HELD, c, 0));
    /* Dekker with whoever gives back or adopts the neighbour: HELD is visible before we read the neighbour's word,
     * or both leave the block on the border closed. */
    co_full_fence();
    open_blocks(arena, c, segment);
    return 0;
}

/* What a dead worker left half done is finished (adopting) or undone (draining): both end in HELD. */
void kvp_recover_segments(struct kvp_arena *arena, uint32_t dead)
{
    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        uint64_t word = co_load(&arena->segments[s]);
        enum kvp_segment_state state = kvp_segment_state(word);
        uint32_t c = kvp_segment_class(word);
        if ((state != KVP_SEGMENT_ADOPTING && state != KVP_SEGMENT_DRAINING) || kvp_segment_who(word) != dead ||
            c >= arena->layout.classes)
            continue;
        co_cas(&arena->segments[s], &word, kvp_segment_word(KVP_SEGMENT_HELD, c, 0));
        open_blocks(arena, c, s);
    }
    for (uint32_t s = 0; s < arena->layout.segments && (arena->layout.classes > 1 || KVP_MANY_HOSTS); s++) {
        uint64_t word = co_load(&arena->segments[s]);
        if (kvp_segment_state(word) == KVP_SEGMENT_HELD && kvp_segment_class(word) < arena->layout.classes)
            open_blocks(arena, kvp_segment_class(word), s); /* died after HELD and before the last block opened */
    }
}
