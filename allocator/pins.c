/* pins.c -- reading in place: a pin is one word {incarnation, block} in a slot of the worker's own. A counter
 * could not be undone after a kill (who held it?); a slot says so by where it is. Inside the process a private
 * count lets many readers share one slot. */
#include "allocator/allocator.h"

enum { AHEAD = 16, HIGH_STEP = 64 };

static nc_u64 *own_slots(const struct kvp_arena *arena)
{
    return kvp_pins(arena, arena->host, arena->self);
}

static inline int find(const struct kvp_arena *arena, uint64_t ref, uint32_t *c, uint32_t *number)
{
    *c = kvp_block_class((uint32_t)ref);
    *number = kvp_block_number((uint32_t)ref);
    return *c < arena->layout.classes && *number < arena->class[*c].blocks;
}

/* Evictors read slots below pin_high: it is raised before the slot is written, both before our fence. In steps, so that
 * a batch of pins seldom writes its line. */
static void raise_high(struct kvp_arena *arena)
{
    nc_u64 *high = kvp_pin_high(arena, arena->host) + arena->self;
    uint32_t next = arena->pin_high_seen + HIGH_STEP, all = arena->layout.pin_slots;

    arena->pin_high_seen = next < all ? next : all;
    nc_store(high, arena->pin_high_seen);
    nc_write_back(high, 8);
}

void kvp_pins_tick(struct kvp_arena *arena)
{
    nc_u64 *high = kvp_pin_high(arena, arena->host) + arena->self;

    if (arena->pins_held || !arena->pin_high_seen)
        return;
    arena->pin_high_seen = 0;
    nc_store(high, 0);
    nc_write_back(high, 8);
}

/* An unused slot, or the capacity if there is none. */
static kvp_inline uint32_t take_slot(struct kvp_arena *arena)
{
    if (arena->pin_free_count)
        return arena->pin_free[--arena->pin_free_count];
    if (arena->pin_top == arena->layout.pin_slots)
        return arena->layout.pin_slots;
    if (arena->pin_top == arena->pin_high_seen)
        raise_high(arena);
    return arena->pin_top++;
}

/* Ask for what a later reference's pin will look at; of neighbours, once. */
static inline void prefetch_slot(const struct kvp_arena *arena, uint64_t ref, uint64_t before)
{
    uint32_t c, number;

    if ((uint32_t)(ref ^ before) / (KVP_LINE / sizeof *arena->class->pin_slot) && find(arena, ref, &c, &number))
        kvp_prefetch(&arena->class[c].pin_slot[number]);
}

__attribute__((cold, noinline)) static int fail_announce(const struct kvp_arena *arena, uint64_t ref)
{
    uint32_t c, number;

    if (!find(arena, ref, &c, &number))
        return kvp_fail(KVP_E_RANGE, "reference %#llx names no block of this pool", (unsigned long long)ref);
    return kvp_fail(KVP_E_PINS, "all %u pin slots of this worker are in use: release hits", arena->layout.pin_slots);
}

static kvp_inline int announce(struct kvp_arena *arena, nc_u64 *slots, uint64_t ref, struct kvp_lines *lines)
{
    uint32_t c, number, slot;

    if (!find(arena, ref, &c, &number))
        return fail_announce(arena, ref);
    uint32_t *mine = &arena->class[c].pin_slot[number];
    if (*mine) {
        arena->pin_count[*mine - 1]++;
        return KVP_OK;
    }
    if ((slot = take_slot(arena)) == arena->layout.pin_slots)
        return fail_announce(arena, ref);
    nc_u64 *pin = &slots[slot];
    nc_store(pin, (uint64_t)arena->incarnation << 32 | (uint32_t)ref);
    KVP_CRASH_POINT("pin.announced");
    if (!kvp_is_ours(arena, c, number)) /* the owner's own workers see it in the cache that we share */
        kvp_lines_note(lines, pin);
    *mine = slot + 1;
    arena->pin_count[slot] = 1;
    arena->pins_held++;
    return KVP_OK;
}

static inline void withdraw(struct kvp_arena *arena, nc_u64 *slots, uint64_t ref, struct kvp_lines *lines)
{
    uint32_t c, number;

    if (!find(arena, ref, &c, &number) || arena->class[c].pin_slot[number] == 0)
        return;
    uint32_t *mine = &arena->class[c].pin_slot[number], slot = *mine - 1;
    if (--arena->pin_count[slot])
        return;
    *mine = 0;
    /* Release: our reads of the payload are done before an evictor sees the slot empty. No fence after it: a
     * pin that is seen too long only delays an eviction. */
    nc_store(&slots[slot], 0);
    KVP_CRASH_POINT("unpin.cleared");
    if (!kvp_is_ours(arena, c, number))
        kvp_lines_note(lines, &slots[slot]);
    arena->pin_free[arena->pin_free_count++] = slot;
    if (--arena->pins_held == 0)
        arena->pin_top = arena->pin_free_count = 0;
}

int64_t kvp_pin(struct kvp_arena *arena, const uint64_t *refs, uint32_t n)
{
    uint32_t announced = 0, valid = 0;
    struct kvp_lines lines = {NULL};
    nc_u64 *slots = own_slots(arena);
    int status = KVP_OK;

    for (; announced < n; announced++) {
        if (announced + AHEAD < n)
            prefetch_slot(arena, refs[announced + AHEAD], refs[announced + AHEAD - 1]);
        if ((status = announce(arena, slots, refs[announced], &lines)) != KVP_OK)
            break;
    }
    kvp_lines_end(&lines);
    nc_write_fence(); /* our slots are in memory before a word is dropped, or an old one might be fetched before them */
    for (uint32_t i = 0; KVP_MANY_HOSTS && i < announced; i++) {
        if (i == 0 || ((uint32_t)refs[i] ^ (uint32_t)refs[i - 1]) / 8) /* neighbours share a line of words */
            kvp_refresh_word(arena, refs[i]);
        /* The bytes too, under one fence: a reference comes from a log or a publication that has ended, so they were in
         * memory before this call began. */
        kvp_refresh_bytes(arena, refs[i], arena->class[kvp_block_class((uint32_t)refs[i])].stride);
    }
    /* Dekker with kvp_evict: our slots are visible before we read the words. */
    nc_full_fence();
    for (; valid < announced; valid++) {
        if (!kvp_ref_live(arena, refs[valid])) {
            status = kvp_fail(KVP_E_STALE, "reference %#llx: the block was freed or reused since",
                              (unsigned long long)refs[valid]);
            break;
        }
    }
    for (uint32_t i = valid; i < announced; i++)
        withdraw(arena, slots, refs[i], &lines);
    kvp_lines_end(&lines);
    return valid ? (int64_t)valid : status;
}

int kvp_pin_ahead(struct kvp_arena *arena, const uint64_t *refs, uint32_t n)
{
    struct kvp_lines lines = {NULL};
    int status = KVP_OK;

    for (uint32_t i = 0; i < n && status == KVP_OK; i++)
        if ((status = announce(arena, own_slots(arena), refs[i], &lines)) != KVP_OK)
            kvp_unpin(arena, refs, i);
    return status; /* the blocks are ours: no line was noted */
}

void kvp_unpin(struct kvp_arena *arena, const uint64_t *refs, uint32_t n)
{
    struct kvp_lines lines = {NULL};
    nc_u64 *slots = own_slots(arena);

    for (uint32_t i = 0; i < n; i++)
        if (refs[i]) /* 0 is no reference, though its bits would name block 0 */
            withdraw(arena, slots, refs[i], &lines);
    kvp_lines_end(&lines);
}
