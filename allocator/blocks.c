/* blocks.c -- taking, giving back, publishing and evicting blocks: all by their words. */
#include "allocator/allocator.h"

#include <string.h>

/* Set with OR, never added: a bit that is already set would carry into its neighbour. The summary follows the hints, so that
 * who sees the summary bit finds them. */
void kvp_set_hints(struct kvp_class *class, uint32_t at, uint64_t bits)
{
    co_or(&class->hints[at], bits);
    co_or(&class->summary[at / 64], 1ull << at % 64);
}

void kvp_set_hint(struct kvp_class *class, uint32_t number)
{
    kvp_set_hints(class, number / 64, 1ull << number % 64);
}

void kvp_set_tag_to(struct kvp_arena *arena, uint32_t c, uint32_t number, uint64_t low, uint64_t high,
                    struct kvp_lines *lines)
{
    struct kvp_class *class = &arena->class[c];

    co_store(&class->tags[number].low, low);
    co_store(&class->tags[number].high, high);
    if (!KVP_MANY_HOSTS || !kvp_is_ours(arena, c, number))
        return;
    nc_store(&class->labels[number].low, low);
    nc_store(&class->labels[number].high, high);
    kvp_lines_note(lines, &class->labels[number]);
}

void kvp_set_tag(struct kvp_arena *arena, uint32_t c, uint32_t number, uint64_t low, uint64_t high)
{
    struct kvp_lines lines = {NULL};

    kvp_set_tag_to(arena, c, number, low, high, &lines);
    kvp_lines_end(&lines);
}

/* Blocks of one hint word are FREE, then their hints are set at once: a locked operation costs as much as all the rest. */
static uint32_t release_run(struct kvp_class *class, const uint32_t *numbers, uint32_t n)
{
    uint32_t at = numbers[0] / 64, done = 0;
    uint64_t bits = 0;

    for (; done < n && numbers[done] / 64 == at; done++) {
        nc_u64 *word = &class->words[numbers[done]];
        nc_store(word, kvp_word(kvp_word_generation(nc_load_relaxed(word)), 0, KVP_FREE));
        KVP_CRASH_POINT("free.before_hint");
        bits |= 1ull << numbers[done] % 64;
    }
    kvp_set_hints(class, at, bits);
    return done;
}

/* Claim a block whose hint we have taken: 1 if it is ours. */
static inline int claim(struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    struct kvp_class *class = &arena->class[c];

    if (number >= class->blocks || !kvp_is_ours(arena, c, number))
        return 0; /* once it becomes ours it gets a hint */
    uint64_t word = nc_load(&class->words[number]);
    KVP_CRASH_POINT("alloc.hint_taken");
    if (kvp_word_state(word) != KVP_FREE)
        return 0; /* whoever frees it sets the bit again */
    if (kvp_block_usable(arena, c, number))
        return nc_cas(&class->words[number], &word, kvp_word(kvp_word_generation(word), arena->self, KVP_CACHED));
    kvp_set_hint(class, number); /* its segment is being drained, which may yet be undone */
    return 0;
}

/* Claim those blocks of one hint word that `mask` names. The bits are taken first, so that two workers rarely try
 * the same block; the CAS on the word decides. A death in between loses hints only: recovery sets them again. */
static void claim_bits(struct kvp_arena *arena, uint32_t c, uint32_t at, uint64_t mask)
{
    struct kvp_magazine *magazine = &arena->class[c].magazine;
    uint32_t count = magazine->count, number;

    /* From the top, so that the magazine, a stack, gives neighbours out in ascending order. */
    for (uint64_t bits = co_and(&arena->class[c].hints[at], ~mask) & mask; bits; bits ^= 1ull << number % 64) {
        number = at * 64 + 63 - (uint32_t)__builtin_clzll(bits);
        if (claim(arena, c, number))
            magazine->block[count++] = number;
    }
    magazine->count = count;
}

/* The lowest n of the bits. */
static uint64_t lowest(uint64_t bits, uint32_t n)
{
    uint64_t left = bits;

    if (n >= 64)
        return bits;
    for (; left && n; n--)
        left &= left - 1;
    return bits ^ left;
}

/* Claim FREE blocks among the bits of one hint word, until there is enough: a bit that stands for nothing must not hide
 * those above it. */
static void claim_hinted(struct kvp_arena *arena, uint32_t c, uint32_t at)
{
    struct kvp_class *class = &arena->class[c];
    struct kvp_magazine *magazine = &class->magazine;
    uint64_t untried = co_load(&class->hints[at]);

    while (untried && magazine->count < magazine->capacity) {
        uint64_t mask = lowest(untried, magazine->capacity - magazine->count);
        untried ^= mask;
        claim_bits(arena, c, at, mask);
    }
    if (co_load(&class->hints[at]) == 0) {
        co_and(&class->summary[at / 64], ~(1ull << at % 64));
        if (co_load(&class->hints[at]) != 0) /* freed between the two: do not lose it */
            co_or(&class->summary[at / 64], 1ull << at % 64);
    }
}

static uint32_t summary_words_of(const struct kvp_class *class)
{
    return (class->blocks + 64 * 64 - 1) / (64 * 64);
}

void kvp_magazines_spread(struct kvp_arena *arena)
{
    uint64_t workers = (uint64_t)arena->layout.hosts * arena->layout.workers;
    uint64_t self = (uint64_t)arena->host * arena->layout.workers + arena->self;

    for (uint32_t c = 0; c < arena->layout.classes; c++) /* a host's workers in the part that it owns at first */
        arena->class[c].magazine.cursor = (uint32_t)(self * summary_words_of(&arena->class[c]) / workers);
}

__attribute__((noinline)) static int refill(struct kvp_arena *arena, uint32_t c)
{
    struct kvp_class *class = &arena->class[c];
    struct kvp_magazine *magazine = &class->magazine;
    uint32_t hint_words = (class->blocks + 63) / 64, summary_words = summary_words_of(class);

    for (uint32_t step = 0; step <= summary_words; step++) {
        uint32_t s = (magazine->cursor + step) % summary_words;
        for (uint64_t bits = co_load(&class->summary[s]); bits; bits &= bits - 1) {
            uint32_t at = s * 64 + (uint32_t)__builtin_ctzll(bits);
            if (at < hint_words)
                claim_hinted(arena, c, at);
            if (magazine->count == magazine->capacity)
                break;
        }
        if (magazine->count) {
            magazine->cursor = s;
            return 1;
        }
    }
    return 0;
}

__attribute__((noinline)) static uint32_t alloc_many(struct kvp_arena *arena, uint32_t c, uint32_t *numbers, uint32_t n)
{
    struct kvp_class *class = &arena->class[c];
    uint32_t got = 0;

    while (got < n && (class->magazine.count || refill(arena, c)))
        for (uint32_t end = n - got < class->magazine.count ? n : got + class->magazine.count; got < end; got++)
            numbers[got] = kvp_magazine_take(class);
    return got;
}

uint32_t kvp_alloc(struct kvp_arena *arena, uint32_t c, uint32_t *numbers, uint32_t n)
{
    struct kvp_class *class = &arena->class[c];

    class->magazine.used = 1;
    if (n != 1 || !class->magazine.count)
        return alloc_many(arena, c, numbers, n);
    numbers[0] = kvp_magazine_take(class); /* by far the most frequent: no loop, no frame */
    return 1;
}

__attribute__((cold, noinline)) static int fail_owned(const struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    if (c >= arena->layout.classes || number >= arena->class[c].blocks)
        return kvp_fail(KVP_E_RANGE, "class %u, block %u does not exist", c, number);
    return kvp_fail(KVP_E_NOTOWNED, "class %u, block %u is not reserved by this worker: already freed or published, or "
                    "another's", c, number);
}

static inline int is_owned(const struct kvp_arena *arena, uint32_t c, uint32_t number, uint64_t *word)
{
    *word = 0;
    if (c < arena->layout.classes && number < arena->class[c].blocks &&
        kvp_is_own(arena, *word = nc_load(&arena->class[c].words[number])))
        return KVP_OK;
    return fail_owned(arena, c, number);
}

__attribute__((noinline)) static void spill_magazine(struct kvp_class *class, uint32_t keep)
{
    struct kvp_magazine *magazine = &class->magazine;
    uint32_t left = magazine->count - keep;

    magazine->count = keep;
    for (const uint32_t *next = magazine->block + keep; left;) {
        uint32_t done = release_run(class, next, left);
        next += done, left -= done;
    }
}

void kvp_spill(struct kvp_arena *arena)
{
    for (uint32_t c = 0; c < arena->layout.classes; c++)
        spill_magazine(&arena->class[c], 0);
}

static inline void keep(struct kvp_class *class, uint32_t number, uint64_t word)
{
    if (class->magazine.count == class->magazine.capacity)
        spill_magazine(class, class->magazine.capacity / 2);
    kvp_magazine_keep(class, number, word);
}

int kvp_free(struct kvp_arena *arena, uint32_t c, const uint32_t *numbers, uint32_t n)
{
    uint64_t word;
    int status = KVP_OK;

    for (uint32_t i = 0; i < n && status == KVP_OK; i++)
        status = is_owned(arena, c, numbers[i], &word);
    for (uint32_t i = 0; i < n && status == KVP_OK; i++)
        if ((status = is_owned(arena, c, numbers[i], &word)) == KVP_OK) /* else the same number twice in one call */
            keep(&arena->class[c], numbers[i], word);
    return status;
}

void kvp_block_end(struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    nc_write_back(arena->class[c].data + number * arena->class[c].stride, arena->class[c].stride);
    nc_write_fence(); /* in memory before the block is FREE, as is its label: once it is, it may become another host's, and
                       * what our cache still held would fall on what that host writes there */
}

int kvp_future_ref(const struct kvp_arena *arena, uint32_t c, uint32_t number, uint64_t *ref)
{
    uint64_t word = 0;
    int status = is_owned(arena, c, number, &word);

    if (status == KVP_OK)
        *ref = kvp_ref(kvp_block(c, number), kvp_next_generation(kvp_word_generation(word)));
    return status;
}

int kvp_make_live(struct kvp_arena *arena, uint32_t c, uint32_t number, struct kvp_lines *lines)
{
    uint64_t word;
    int status = is_owned(arena, c, number, &word);

    if (status)
        return status;
    /* Release: payload, tag and score are visible to whoever sees LIVE. */
    nc_store(&arena->class[c].words[number], kvp_word(kvp_next_generation(kvp_word_generation(word)), 0, KVP_LIVE));
    kvp_lines_note(lines, &arena->class[c].words[number]);
    KVP_CRASH_POINT("publish.live");
    return KVP_OK;
}

void kvp_refresh_word(const struct kvp_arena *arena, uint64_t ref)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);

    if (!kvp_is_ours(arena, c, number))
        nc_invalidate(&arena->class[c].words[number], 8);
}

void kvp_refresh_bytes(const struct kvp_arena *arena, uint64_t ref, uint64_t bytes)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);

    if (!kvp_is_ours(arena, c, number))
        nc_invalidate(arena->class[c].data + number * arena->class[c].stride, bytes);
}

/* ---- eviction ---- */

static void strike(struct kvp_class *class, uint32_t number)
{
    class->victims[number / 64] &= ~(1ull << number % 64);
}

static void note(struct kvp_class *class, uint32_t number)
{
    class->pinned[number / 64] |= 1ull << number % 64;
}

/* Is this host one whose pins are to be read? A fenced one's count no more, unless it is back under a new incarnation;
 * that is in memory before its first pin. */
static int pins_count(const struct kvp_arena *arena, uint32_t h)
{
    return h == arena->host || !kvp_host_fenced(&arena->roster, h, nc_load(&arena->roster.hosts[h].incarnation));
}

/* Before the pins of other hosts are read: how many slots may be in use, then those. */
static void refresh_pins(const struct kvp_arena *arena)
{
    const struct kvp_layout *layout = &arena->layout;
    int dropped = 0;

    for (uint32_t h = 0; h < layout->hosts; h++)
        if (h != arena->host) {
            nc_invalidate(&arena->roster.hosts[h], KVP_LINE);
            nc_invalidate(kvp_pin_high(arena, h), layout->workers * 8);
        }
    nc_full_fence(); /* how far the pins go is read after it was dropped; a pinner raises that before it pins */
    for (uint32_t h = 0; h < layout->hosts; h++)
        for (uint32_t w = 0; h != arena->host && w < layout->workers; w++) {
            uint64_t high = nc_load(kvp_pin_high(arena, h) + w);
            if (high)
                nc_invalidate(kvp_pins(arena, h, w), (high < layout->pin_slots ? high : layout->pin_slots) * 8), dropped = 1;
        }
    if (dropped)
        nc_full_fence(); /* the pins are read after they were dropped */
}

static void walk_table(struct kvp_arena *arena, uint32_t h, uint32_t w, void (*visit)(struct kvp_class *class, uint32_t number))
{
    const nc_u64 *pins = kvp_pins(arena, h, w);
    uint64_t high = nc_load(kvp_pin_high(arena, h) + w);

    if (high > arena->layout.pin_slots)
        high = arena->layout.pin_slots;
    for (uint64_t i = 0; i < high; i++) {
        uint64_t pin = nc_load(&pins[i]);
        uint32_t c = kvp_block_class((uint32_t)pin), number = kvp_block_number((uint32_t)pin);
        if (pin && c < arena->layout.classes && number < arena->class[c].blocks)
            visit(&arena->class[c], number);
    }
}

/* Visit the block of every pin of every worker of every host. */
static void walk_pins(struct kvp_arena *arena, void (*visit)(struct kvp_class *class, uint32_t number))
{
    /* Dekker with kvp_pin: EVICTING is visible before the pins are read, or dropped to be read; the pinner's slot is
     * visible before it reads the word. One of the two sees the other. */
    nc_full_fence();
    if (KVP_MANY_HOSTS)
        refresh_pins(arena);
    for (uint32_t h = 0; h < arena->layout.hosts; h++)
        for (uint32_t w = 0; w < arena->layout.workers && pins_count(arena, h); w++)
            walk_table(arena, h, w, visit);
}

void kvp_note_pins(struct kvp_arena *arena)
{
    for (uint32_t c = 0; c < arena->layout.classes; c++)
        memset(arena->class[c].pinned, 0, (arena->class[c].blocks / 64 + 1) * sizeof(uint64_t));
    walk_pins(arena, note);
}

static uint32_t lock_victims(struct kvp_arena *arena, uint32_t c, uint32_t *numbers, uint32_t n)
{
    struct kvp_class *class = &arena->class[c];
    uint32_t locked = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t number = numbers[i];
        if (number >= class->blocks || !kvp_is_ours(arena, c, number))
            continue;
        uint64_t word = nc_load(&class->words[number]);
        if (kvp_word_state(word) != KVP_LIVE)
            continue;
        if (!nc_cas(&class->words[number], &word, kvp_word(kvp_word_generation(word), arena->self, KVP_EVICTING)))
            continue;
        KVP_CRASH_POINT("evict.locked");
        nc_write_back(&class->words[number], 8);
        class->victims[number / 64] |= 1ull << number % 64;
        numbers[locked++] = number;
    }
    return locked;
}

int kvp_lock_block(struct kvp_arena *arena, uint64_t ref)
{
    uint32_t block = (uint32_t)ref, c = kvp_block_class(block), number = kvp_block_number(block);
    uint64_t word = nc_load(&arena->class[c].words[number]);

    if (!kvp_is_ours(arena, c, number) || kvp_word_state(word) != KVP_LIVE || kvp_ref(block, kvp_word_generation(word)) != ref ||
        !nc_cas(&arena->class[c].words[number], &word, kvp_word(kvp_word_generation(word), arena->self, KVP_EVICTING)))
        return 0;
    nc_write_back(&arena->class[c].words[number], 8);
    return 1;
}

void kvp_unlock_block(struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    uint64_t word = nc_load_relaxed(&arena->class[c].words[number]);

    nc_store(&arena->class[c].words[number], kvp_word(kvp_word_generation(word), 0, KVP_LIVE));
    nc_write_back(&arena->class[c].words[number], 8);
}

/* Of the locked victims those that nobody has pinned, to the front; the others are LIVE again. */
static uint32_t keep_unpinned(struct kvp_arena *arena, uint32_t c, uint32_t *numbers, uint32_t locked)
{
    struct kvp_class *class = &arena->class[c];
    uint32_t kept = 0;

    for (uint32_t i = 0; i < locked; i++) {
        uint32_t number = numbers[i];
        uint64_t bit = 1ull << number % 64;
        if (class->victims[number / 64] & bit)
            numbers[kept++] = number;
        else
            kvp_unlock_block(arena, c, number);
        class->victims[number / 64] &= ~bit;
        KVP_CRASH_POINT("evict.decided");
    }
    return kept;
}

uint32_t kvp_evict_begin(struct kvp_arena *arena, uint32_t c, uint32_t *numbers, uint32_t n)
{
    uint32_t locked = lock_victims(arena, c, numbers, n);

    if (!locked)
        return 0;
    walk_pins(arena, strike);
    return keep_unpinned(arena, c, numbers, locked);
}

int kvp_is_pinned(struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    uint64_t bit = 1ull << number % 64, *victims = &arena->class[c].victims[number / 64];

    *victims |= bit;
    walk_pins(arena, strike);
    int pinned = !(*victims & bit);
    *victims &= ~bit;
    return pinned;
}

void kvp_evict_take(struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    uint64_t word = nc_load_relaxed(&arena->class[c].words[number]);

    /* OWN before the first new byte: restoring LIVE is right only while the payload is untouched. */
    nc_store(&arena->class[c].words[number], kvp_word(kvp_word_generation(word), arena->self, KVP_OWN));
    nc_write_back(&arena->class[c].words[number], 8);
    /* A release store orders what comes before it, not after: without this fence a weakly ordered machine could show
     * the next tenant's first bytes under the old LIVE, and a read by copy would take them for right. */
    nc_write_fence();
    KVP_CRASH_POINT("evict.taken");
}

uint32_t kvp_evict(struct kvp_arena *arena, uint32_t c, uint32_t *numbers, uint32_t n)
{
    uint32_t taken = kvp_evict_begin(arena, c, numbers, n);

    for (uint32_t i = 0; i < taken; i++)
        kvp_evict_take(arena, c, numbers[i]);
    return taken;
}
