/* adopt.c -- what a host finds in segments that it owns when it starts, or that become its own by adoption: published
 * blocks, and things that somebody who is gone was in the middle of. Memory is all there is to go by: what a lost
 * cache held is lost. */
#include "allocator/allocator.h"

/* Further than any publication that did not reach memory may have gone, so that no generation comes twice. */
enum { GENERATION_STEP = 4096 };

static uint64_t later_generation(uint64_t generation)
{
    return (generation | (GENERATION_STEP - 1)) + 1;
}

/* EVICTING: the payload is untouched, OWN is in memory before the first new byte. CACHED, OWN: nobody else has seen it. */
static void undo(struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    struct kvp_class *class = &arena->class[c];
    uint64_t word = nc_load(&class->words[number]), generation = kvp_word_generation(word);
    enum kvp_state state = kvp_word_state(word);

    if (state == KVP_LIVE)
        return;
    if (state == KVP_EVICTING)
        nc_store(&class->words[number], kvp_word(generation, 0, KVP_LIVE));
    else
        nc_store(&class->words[number],
                 kvp_word(later_generation(generation), 0, state == KVP_ABSENT ? KVP_ABSENT : KVP_FREE));
}

/* The class whose blocks the segment has: the one with a word that is not ABSENT. KVP_CLASSES_MAX: none. */
static uint32_t class_of(struct kvp_arena *arena, uint32_t segment)
{
    uint32_t number, end;

    for (uint32_t c = 0; c < arena->layout.classes; c++)
        for (kvp_segment_blocks(arena, c, segment, &number, &end); number < end; number++)
            if (kvp_word_state(nc_load(&arena->class[c].words[number])) != KVP_ABSENT)
                return c;
    return KVP_CLASSES_MAX;
}

/* Is the word's line all in segments that are ours or become so now? */
static int is_becoming_ours(const struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    uint32_t s, last;

    for (kvp_block_segments(arena, c, number, &s, &last); s <= last; s++) {
        uint64_t word = co_load(&arena->segments[s]);
        if (!kvp_segment_ours(word) && (kvp_segment_state(word) != KVP_SEGMENT_MOVING || kvp_segment_who(word) != arena->self))
            return 0;
    }
    return 1;
}

/* Is what we know of the block what is published there? */
static int is_known(const struct kvp_class *class, uint32_t c, uint32_t number)
{
    uint64_t word = nc_load(&class->words[number]), ref = kvp_ref(kvp_block(c, number), kvp_word_generation(word));

    /* An eviction that was under way is undone: the block is published yet. */
    return (kvp_word_state(word) == KVP_LIVE || kvp_word_state(word) == KVP_EVICTING) &&
           co_load(&class->known[number]) == kvp_word(ref >> 32, 0, KVP_LIVE);
}

/* From here on the word of a block says who changes its names: those that we know from logs would be nobody's. */
void kvp_forget_former(struct kvp_arena *arena, uint32_t segment)
{
    uint32_t number, end;

    for (uint32_t c = 0; c < arena->layout.classes; c++)
        for (kvp_segment_blocks(arena, c, segment, &number, &end); number < end; number++)
            if (is_becoming_ours(arena, c, number) && !is_known(&arena->class[c], c, number))
                arena->forget(arena->context, kvp_block(c, number));
}

/* Undo what was half done in a segment, and hold it for the class that it has. */
void kvp_segment_settle(struct kvp_arena *arena, uint32_t segment)
{
    uint32_t held = class_of(arena, segment), number, end;

    kvp_forget_former(arena, segment);
    for (uint32_t c = 0; c < arena->layout.classes; c++) {
        kvp_segment_blocks(arena, c, segment, &number, &end);
        uint32_t first = number;
        for (; number < end; number++)
            if (is_becoming_ours(arena, c, number))
                undo(arena, c, number);
        nc_write_back(&arena->class[c].words[first], (end - first) * 8ull);
    }
    co_store(&arena->segments[segment], held == KVP_CLASSES_MAX ? kvp_segment_word(KVP_SEGMENT_FREE, 0, 0)
                                                                : kvp_segment_word(KVP_SEGMENT_HELD, held, 0));
    /* Only now: who finds the hint of a block that is not ours drops it. */
    for (uint32_t c = 0; c < arena->layout.classes; c++)
        for (kvp_segment_blocks(arena, c, segment, &number, &end); number < end; number++)
            if (kvp_is_ours(arena, c, number) && kvp_word_state(nc_load(&arena->class[c].words[number])) == KVP_FREE)
                kvp_set_hint(&arena->class[c], number);
}

/* Pins of our former life go, whatever our cache may hold of them; its logs go on from where memory says: they are read
 * when a worker joins, long after the fence of kvp_refresh_words. */
static void take_tables(struct kvp_arena *arena)
{
    nc_u64 *high = kvp_pin_high(arena, arena->host);

    for (uint32_t w = 0; w < arena->layout.workers; w++) {
        nc_u64 *pins = kvp_pins(arena, arena->host, w);
        for (uint32_t i = 0; i < arena->layout.pin_slots; i++)
            nc_store_relaxed(&pins[i], 0);
        nc_write_back(pins, arena->layout.pin_slots * 8ull);
        nc_store(&high[w], 0);
        nc_invalidate(kvp_ring(arena, arena->host, w), arena->layout.log_records * sizeof(struct kvp_record));
    }
    nc_write_back(high, arena->layout.workers * 8ull);
}

/* One host, and nothing was here before. */
static void start_alone(struct kvp_arena *arena)
{
    const struct kvp_class *class = &arena->class[0];

    if (arena->layout.classes > 1)
        return;
    for (uint32_t s = 0; s < arena->layout.segments; s++)
        co_store_relaxed(&arena->segments[s], kvp_segment_word(KVP_SEGMENT_HELD, 0, 0));
    for (uint32_t i = 0; i < (class->blocks + 63) / 64; i++) {
        uint32_t left = class->blocks - i * 64;
        co_store_relaxed(&class->hints[i], left >= 64 ? UINT64_MAX : (1ull << left) - 1);
        co_or(&class->summary[i / 64], 1ull << i % 64);
    }
}

void kvp_arena_start(struct kvp_arena *arena)
{
    if (!KVP_MANY_HOSTS) {
        start_alone(arena);
        return;
    }
    arena->self = 0;
    nc_invalidate(kvp_owners(arena, arena->host), arena->layout.segments * 8ull);
    kvp_owners_refresh(arena); /* with its fence also for our own row */
    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        uint64_t own = nc_load(&kvp_owners(arena, arena->host)[s]);
        enum kvp_segment_state state = KVP_SEGMENT_FOREIGN;
        if (kvp_owner(arena, s) == arena->host && !arena->roster.yields)
            state = kvp_owner_state(own) == KVP_OWNER_TAKEN ? KVP_SEGMENT_MOVING : KVP_SEGMENT_OFFERED;
        else if (kvp_owner_state(own) == KVP_OWNER_TAKING) { /* the giver takes it back */
            kvp_owner_write(arena, s, kvp_owner_epoch(own), kvp_owner_peer(own), KVP_OWNER_ABORTED);
        }
        co_store(&arena->segments[s], kvp_segment_word(state, 0, 0));
        if (state == KVP_SEGMENT_MOVING)
            kvp_segment_refresh(arena, s);
    }
    for (uint32_t s = 0; s < arena->layout.segments; s++)
        if (kvp_segment_state(co_load(&arena->segments[s])) == KVP_SEGMENT_MOVING)
            kvp_segment_settle(arena, s);
    kvp_recover_segments(arena, KVP_NO_WORKER); /* opens what is still closed in segments that are held */
    take_tables(arena);
}

/* What the lost host had on offer may be taken at this moment. Who adopts it stands in for the giver, by its own row: 1 if we
 * may have it; 0: it is the taker's, or being taken, and we look again later. */
static int contest(struct kvp_arena *arena, uint32_t segment, uint32_t lost)
{
    uint64_t word = nc_load(&kvp_owners(arena, lost)[segment]), epoch = kvp_owner_epoch(word);
    uint32_t to = kvp_owner_peer(word);

    if (kvp_owner_state(word) == KVP_OWNER_TAKEN || to >= arena->layout.hosts || to == arena->host)
        return 1;
    kvp_owner_write(arena, segment, epoch + 1, lost, KVP_OWNER_TAKING);
    nc_write_fence(); /* ours is in memory before the taker's row is dropped: Dekker with take() */
    kvp_owners_refresh(arena); /* and that is read after it */
    int fate = kvp_offer_fate(arena, segment, to, epoch);
    if (fate == 0 || (fate < 0 && kvp_taker_is_gone(arena, to)))
        return 1;
    kvp_owner_write(arena, segment, epoch, lost, KVP_OWNER_ABORTED);
    return 0;
}

static int adopt(struct kvp_arena *arena, uint32_t segment, uint32_t lost)
{
    uint64_t seen = kvp_segment_word(KVP_SEGMENT_FOREIGN, 0, 0);

    if (kvp_owner(arena, segment) != lost ||
        !co_cas(&arena->segments[segment], &seen, kvp_segment_word(KVP_SEGMENT_MOVING, 0, arena->self)))
        return 0;
    KVP_CRASH_POINT("adopt.moving");
    if (!contest(arena, segment, lost)) {
        co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_FOREIGN, 0, 0));
        return 0;
    }
    kvp_segment_refresh(arena, segment);
    /* A higher epoch: whatever the lost host's row says, ours counts. */
    uint64_t epoch = kvp_owner_epoch(nc_load(&kvp_owners(arena, lost)[segment])) + 1;
    kvp_owner_write(arena, segment, epoch, arena->host, KVP_OWNER_TAKEN);
    nc_write_fence(); /* ours is in memory before the adoption is said to be complete: a host that is back reads the rows then */
    KVP_CRASH_POINT("adopt.owned");
    kvp_segment_settle(arena, segment);
    return 1;
}

uint32_t kvp_owners_adopt(struct kvp_arena *arena, uint32_t lost)
{
    uint32_t adopted = 0;

    kvp_owners_refresh(arena);
    for (uint32_t s = 0; s < arena->layout.segments; s++)
        adopted += (uint32_t)adopt(arena, s, lost);
    kvp_recover_segments(arena, KVP_NO_WORKER);
    return adopted;
}

uint32_t kvp_owners_reclaim(struct kvp_arena *arena)
{
    uint32_t back = 0;

    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        uint64_t seen = kvp_segment_word(KVP_SEGMENT_FOREIGN, 0, 0), own = nc_load(&kvp_owners(arena, arena->host)[s]);
        int taken = kvp_owner_state(own) == KVP_OWNER_TAKEN;
        if (kvp_owner(arena, s) != arena->host ||
            !co_cas(&arena->segments[s], &seen,
                    kvp_segment_word(taken ? KVP_SEGMENT_MOVING : KVP_SEGMENT_OFFERED, 0, taken ? arena->self : 0)) ||
            !taken)
            continue;
        kvp_segment_refresh(arena, s);
        kvp_segment_settle(arena, s);
        back++;
    }
    kvp_recover_segments(arena, KVP_NO_WORKER);
    return back;
}
