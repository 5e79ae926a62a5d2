/* recover.c -- what a death leaves, put back. A scan of all words: nothing else says what the dead held. */
#include "allocator/allocator.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

/* Blocks of one hint word whose hints are missing, or not to be found by the summary. */
static uint64_t hints_missing(const struct kvp_class *class, uint32_t at, uint64_t bits)
{
    return co_load(&class->summary[at / 64]) >> at % 64 & 1 ? bits & ~co_load(&class->hints[at]) : bits;
}

/* Free one block of the dead, or undo its eviction. CAS from the seen value: a recovery that was interrupted
 * and is done again, or two that overlap, change nothing twice. */
static int put_back(struct kvp_arena *arena, uint32_t c, uint32_t number, uint64_t word)
{
    struct kvp_class *class = &arena->class[c];

    if (kvp_word_state(word) == KVP_EVICTING) { /* the payload is untouched: OWN is stored before the first new byte */
        arena->settle(arena->context, kvp_block(c, number));
        return nc_cas(&class->words[number], &word, kvp_word(kvp_word_generation(word), 0, KVP_LIVE)), 0;
    }
    arena->forget(arena->context, kvp_block(c, number));
    if (KVP_MANY_HOSTS && kvp_word_state(word) == KVP_OWN)
        kvp_block_end(arena, c, number);
    KVP_CRASH_POINT("recover.forgotten");
    /* A new generation: the dead may have shown a reference to the publication that it did not finish. */
    if (!nc_cas(&class->words[number], &word, kvp_word(kvp_word_generation(word) + 1, 0, KVP_FREE)))
        return 0;
    KVP_CRASH_POINT("recover.freed");
    return 1;
}

static inline int is_held(uint64_t word, uint32_t dead)
{
    const uint32_t states = 1u << KVP_CACHED | 1u << KVP_OWN | 1u << KVP_EVICTING;

    return kvp_word_who(word) == dead && (states >> kvp_word_state(word) & 1);
}

/* Do the 8 words of a line say the same as the first, but for their generations? Nearly all lines do: LIVE, or FREE. */
static inline int is_line_even(const nc_u64 *line, uint64_t first)
{
    uint64_t others = 0;

#pragma GCC unroll 8
    for (int i = 1; i < 8; i++)
        others |= nc_load(&line[i]) ^ first;
    return (uint16_t)others == 0;
}

/* Which of the words from `first` to `end`, 64 at most, are FREE, and which does the dead hold? Of words of other hosts none:
 * who stands in those is a worker of theirs. */
static void survey(const struct kvp_arena *arena, uint32_t c, uint32_t first, uint32_t end, uint32_t dead, uint64_t *free,
                   uint64_t *held)
{
    const nc_u64 *words = arena->class[c].words;

    *free = *held = 0;
    for (uint32_t line = first, next; line < end; line = next) {
        next = end - line < 8 ? end : line + 8;
        if (!kvp_is_ours(arena, c, line)) /* a line has one host */
            continue;
        uint64_t word = nc_load(&words[line]);
        /* What the first word said goes for all, or each is asked. */
        uint32_t step = next - line == 8 && is_line_even(&words[line], word) ? 8 : 1;
        uint64_t bits = ((1ull << step) - 1) << line % 64;
        for (uint32_t number = line; number < next; number += step, bits <<= step) {
            if (number > line)
                word = nc_load(&words[number]);
            *free |= kvp_word_state(word) == KVP_FREE ? bits : 0;
            *held |= is_held(word, dead) ? bits : 0;
        }
    }
}

/* The blocks of one hint word: the dead's are put back, and FREE ones have their hints, which the dead may have taken. */
static uint64_t recover_words(struct kvp_arena *arena, uint32_t c, uint32_t first, uint32_t dead)
{
    struct kvp_class *class = &arena->class[c];
    uint32_t end = class->blocks - first < 64 ? class->blocks : first + 64;
    uint64_t free, held, freed = 0;

    survey(arena, c, first, end, dead, &free, &held);
    for (; held; held &= held - 1) {
        uint32_t number = first + (uint32_t)__builtin_ctzll(held);
        uint64_t word = nc_load(&class->words[number]);
        if (is_held(word, dead) && put_back(arena, c, number, word)) /* still: of a dead that called exec a thread may run */
            freed |= held & -held;
    }
    /* A look first: recovery passes all free blocks, and others use these lines. */
    if (hints_missing(class, first / 64, free | freed))
        kvp_set_hints(class, first / 64, free | freed);
    return (uint64_t)__builtin_popcountll(freed);
}

static uint64_t recover_class(struct kvp_arena *arena, uint32_t c, uint32_t dead)
{
    uint64_t freed = 0;

    for (uint32_t first = 0; first < arena->class[c].blocks; first += 64)
        freed += recover_words(arena, c, first, dead);
    return freed;
}

/* Lines that the dead left right but not written back are written back too. So are all when a worker leaves, perhaps the last. */
static void write_words_back(struct kvp_arena *arena)
{
    for (uint32_t c = 0; c < arena->layout.classes; c++)
        for (uint32_t number = 0; number < arena->class[c].blocks; number += 8)
            if (kvp_is_ours(arena, c, number))
                nc_write_back(&arena->class[c].words[number], 8);
}

static void recover_pins(struct kvp_arena *arena, uint32_t dead)
{
    nc_u64 *pins = kvp_pins(arena, arena->host, dead);

    for (uint32_t i = 0; i < arena->layout.pin_slots; i++) {
        uint64_t seen = nc_load(&pins[i]);
        if (seen)
            nc_cas(&pins[i], &seen, 0);
        KVP_CRASH_POINT("recover.unpinned");
    }
    nc_write_back(pins, (uint64_t)arena->layout.pin_slots * 8);
}

uint64_t kvp_recover(struct kvp_arena *arena, uint32_t dead)
{
    uint64_t freed = 0;

    for (uint32_t c = 0; c < arena->layout.classes; c++)
        freed += recover_class(arena, c, dead);
    if (KVP_MANY_HOSTS)
        kvp_recover_owners(arena, dead);
    kvp_recover_segments(arena, dead);
    if (KVP_MANY_HOSTS)
        write_words_back(arena);
    recover_pins(arena, dead);
    /* Records that the dead had not written back: who reads this log would wait for the last one for ever. */
    nc_write_back(kvp_ring(arena, arena->host, dead), arena->layout.log_records * sizeof(struct kvp_record));
    return freed;
}

/* ---- check ---- */

void kvp_check_fail(struct kvp_check *check, uint32_t block, const char *format, ...)
{
    va_list arguments;

    if (check->problems++)
        return;
    check->block = block;
    va_start(arguments, format);
    vsnprintf(check->first, sizeof check->first, format, arguments);
    va_end(arguments);
}

#ifdef KVP_FUZZ
enum { PATIENCE = 3 }; /* nobody else is there, and most images are broken */
#else
enum { PATIENCE = 300 };
#endif

int kvp_check_patience(const struct kvp_check *check, int again)
{
    struct timespec pause = {0, 1000000};

    if (check->problems || again >= PATIENCE)
        return 0;
    if (again < 100)
        sched_yield();
    else
        nanosleep(&pause, NULL);
    return 1;
}

static int owner_lives(const struct kvp_arena *arena, uint32_t who)
{
    return who < arena->layout.workers && co_load32(&arena->slots[who].lock) != 0 &&
           !kvp_worker_dead(&arena->slots[who]);
}

static int should_be_absent(const struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    uint32_t s, last;
    int absent = 0;

    for (kvp_block_segments(arena, c, number, &s, &last); s <= last; s++) {
        uint64_t word = co_load(&arena->segments[s]);
        enum kvp_segment_state state = kvp_segment_state(word);
        if (state == KVP_SEGMENT_ADOPTING || state == KVP_SEGMENT_DRAINING)
            return -1; /* on its way: either is right */
        if (state != KVP_SEGMENT_HELD || kvp_segment_class(word) != c)
            absent = 1;
    }
    return absent;
}

/* NULL, or which invariant the word breaks. */
static const char *word_problem(const struct kvp_arena *arena, uint32_t c, uint32_t number, uint64_t word)
{
    enum kvp_state state = kvp_word_state(word);
    int absent = should_be_absent(arena, c, number);

    if (state >= KVP_STATES)
        return "the state is none of the six";
    if ((state == KVP_ABSENT || state == KVP_FREE || state == KVP_LIVE) && kvp_word_who(word) != 0)
        return "a block that nobody owns names an owner";
    if (state >= KVP_CACHED && state != KVP_LIVE && kvp_word_who(word) >= arena->layout.workers)
        return "the owner is no slot of this pool";
    if (absent == 1 && state != KVP_ABSENT)
        return "a block lies in a segment that its class does not hold";
    if (absent == 0 && state == KVP_ABSENT)
        return "a block of a held segment is absent";
    if (state == KVP_FREE && hints_missing(&arena->class[c], number / 64, 1ull << number % 64))
        return "a free block has no hint";
    return NULL;
}

static void check_word(const struct kvp_arena *arena, uint32_t c, uint32_t number, struct kvp_check *check)
{
    if (!kvp_is_ours(arena, c, number))
        return; /* its owner's workers check it */
    uint64_t word = nc_load(&arena->class[c].words[number]);
    const char *problem = word_problem(arena, c, number, word);

    for (int again = 0; problem && kvp_check_patience(check, again); again++) {
        word = nc_load(&arena->class[c].words[number]);
        problem = word_problem(arena, c, number, word);
    }
    enum kvp_state state = kvp_word_state(word);
    if (problem)
        kvp_check_fail(check, kvp_block(c, number), "class %u, block %u: %s (word %#llx)", c, number, problem,
                       (unsigned long long)word);
    if (state >= KVP_STATES)
        return;
    check->states[state]++;
    if ((state == KVP_CACHED || state == KVP_OWN || state == KVP_EVICTING) && !owner_lives(arena, kvp_word_who(word)) &&
        nc_load(&arena->class[c].words[number]) == word) {
        check->leaked++;
        kvp_check_fail(check, kvp_block(c, number), "class %u, block %u: owned by worker %u, which is gone", c, number,
                       kvp_word_who(word));
    }
}

static void check_pin(const struct kvp_arena *arena, uint32_t worker, const nc_u64 *pin, struct kvp_check *check)
{
    uint64_t seen = nc_load(pin);
    uint32_t c = kvp_block_class((uint32_t)seen), number = kvp_block_number((uint32_t)seen);

    if (seen == 0)
        return;
    check->pins++;
    if (c >= arena->layout.classes || number >= arena->class[c].blocks)
        kvp_check_fail(check, (uint32_t)seen, "worker %u pins block %#x, which does not exist", worker, (uint32_t)seen);
    else if (!owner_lives(arena, worker) && nc_load(pin) == seen)
        kvp_check_fail(check, (uint32_t)seen, "worker %u is gone and still pins block %#x", worker, (uint32_t)seen);
}

static void check_segments(const struct kvp_arena *arena, struct kvp_check *check)
{
    if (KVP_MANY_HOSTS)
        kvp_owners_refresh(arena);
    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        uint64_t word = co_load(&arena->segments[s]);
        if (kvp_segment_state(word) > KVP_SEGMENT_OFFERED || kvp_segment_class(word) >= arena->layout.classes)
            kvp_check_fail(check, 0, "segment %u: word %#llx is no state and class", s, (unsigned long long)word);
        uint32_t owner = kvp_owner(arena, s);
        for (int again = 0; kvp_segment_ours(word) && owner != arena->host && kvp_check_patience(check, again); again++) {
            word = co_load(&arena->segments[s]);
            owner = kvp_owner(arena, s);
        }
        if (owner >= arena->layout.hosts)
            kvp_check_fail(check, 0, "segment %u: no host owns it", s);
        else if (kvp_segment_ours(word) && owner != arena->host)
            kvp_check_fail(check, 0, "segment %u: we use it, and host %u owns it", s, owner);
    }
}

void kvp_arena_check(const struct kvp_arena *arena, struct kvp_check *check)
{
    check_segments(arena, check);
    for (uint32_t c = 0; c < arena->layout.classes; c++)
        for (uint32_t number = 0; number < arena->class[c].blocks; number++)
            check_word(arena, c, number, check);
    for (uint32_t w = 0; w < arena->layout.workers; w++)
        for (uint32_t i = 0; i < arena->layout.pin_slots; i++)
            check_pin(arena, w, &kvp_pins(arena, arena->host, w)[i], check);
}
