/* allocator.h -- blocks of shared memory: who owns which, who reads which, and what a death leaves.
 *
 * Caveats, first.
 *  - An arena (struct kvp_arena) is one worker's private view. One thread at a time may use it; the layer
 *    above holds a lock. What other workers do at the same moment is always safe.
 *  - Everything read from shared memory is input: numbers are range-checked before use.
 *  - Free lists, hint bits and magazines are hints. The word of a block is the only truth about it.
 *
 * Glossary.
 *  class      the blocks of one size. Block k of a class lies at payload + k * stride: one strided array.
 *  segment    a fixed part of the payload. Each is held by at most one class; a block can be used only while
 *             every segment that it touches is held by its class.
 *  word       8 bytes per block: {generation:48 | who:12 | state:4}; descriptor, owner and eviction lock in one
 *  reference  8 bytes: {0:2 | generation:30 | class:3 | number:29}; names one publication of one block
 *  tag        16 bytes per block, opaque here: what the layer above calls the block
 *  score      8 bytes per block, opaque here: what the layer above orders evictions by
 *  magazine   blocks that a worker has claimed in advance, listed in private memory
 *
 * Life of a word (owner's workers only; CAS unless marked):
 *
 *    ABSENT <-> FREE -> CACHED(w) -store-> OWN(w) -store-> LIVE -> EVICTING(w) -store-> OWN(w)
 *                ^          |  ^              |              ^__________|  (pinned: restored)
 *                |__store___|  |____store_____|
 *
 * Invariants (kvp_arena_check walks them):
 *    a word's state is one of the six, and who names a slot of the pool
 *    who != 0 only in CACHED, OWN and EVICTING, and that worker is alive or awaits recovery
 *    ABSENT  <=>  some segment under the block is not held by the class
 *    generation never decreases; it grows with each publication and with each free
 *    a pinned block is LIVE or EVICTING; a pin names a class and a number that exist
 *    FREE  =>  its hint bit is set or a worker that is alive has just taken it
 */
#ifndef KVP_ALLOCATOR_H
#define KVP_ALLOCATOR_H
#include "coherence/coherence.h"

/* cdef: begin */
enum kvp_limit {
    KVP_CLASSES_MAX = 8,
    KVP_SEGMENTS_MAX = 64,
    KVP_MAGAZINE = 64,
    KVP_STRIDE_MIN = 64,              /* the public API asks for 4 KiB at least */
    KVP_BLOCKS_MAX = (1 << 29) - 1,   /* per class */
};

/* What a pool is to be like. Zeros mean: choose. */
struct kvp_request {
    uint64_t bytes;      /* of the whole mapping; or 0 and blocks is given */
    uint64_t blocks;     /* of class 0, exactly; only with one class */
    uint32_t workers;    /* slots; 1 to 64; 0: 64 */
    uint32_t classes;    /* 1 to KVP_CLASSES_MAX */
    uint64_t stride[8];  /* bytes a block of each class; multiples of 64 */
};

#define KVP_NO_BLOCK 0xffffffff /* in a list of numbers: nothing here */

enum kvp_state { KVP_ABSENT, KVP_FREE, KVP_CACHED, KVP_OWN, KVP_LIVE, KVP_EVICTING, KVP_STATES };
/* cdef: end */

/* ---- layout: on-media, immutable after create ---------------------------------------------------------
 *
 *   0        superblock (native/)           one page
 *   slots    workers x struct kvp_slot
 *   pins     workers x pin_slots x 8
 *   logs     workers x log_records x 32
 *   segments segments x 8
 *   per class: words 8, scores 8, tags 16 a block; hints 1 bit, summary 1 bit per 64 hints
 *   directory (native/)                     homes x (256 + 8)
 *   payload                                 page-aligned
 */
struct kvp_class_layout {
    uint64_t stride;           /* bytes, a multiple of 64 */
    uint64_t blocks;           /* payload_bytes / stride */
    uint64_t words_offset;     /* each offset from the start of the mapping, a multiple of 64 */
    uint64_t scores_offset;
    uint64_t tags_offset;
    uint64_t hints_offset;     /* (blocks + 63) / 64 words, then their summary */
    uint64_t reserved[2];      /* zero */
};
_Static_assert(sizeof(struct kvp_class_layout) == 64, "class layout is on-media");

struct kvp_layout {
    uint64_t bytes;            /* length of the image */
    uint32_t workers;          /* slots, 1..64 */
    uint32_t classes;          /* 1..8 */
    uint32_t pin_slots;        /* per worker, a multiple of 8 */
    uint32_t log_records;      /* per worker, a power of two */
    uint32_t segments;         /* 1..64 */
    uint32_t reserved0;        /* zero */
    uint64_t segment_bytes;    /* the last segment may be shorter */
    uint64_t slots_offset;
    uint64_t pins_offset;
    uint64_t logs_offset;
    uint64_t segments_offset;
    uint64_t directory_offset;
    uint64_t directory_homes;  /* of 16 entries */
    uint64_t payload_offset;
    uint64_t payload_bytes;
    uint64_t reserved1[3];     /* zero */
    struct kvp_class_layout class[KVP_CLASSES_MAX];
};
_Static_assert(sizeof(struct kvp_layout) == 128 + 64 * KVP_CLASSES_MAX, "layout is on-media");

/* Compute a layout. INVALID says which size is wrong and what would do. */
int kvp_layout_plan(const struct kvp_request *request, struct kvp_layout *out);
/* Is this layout, read from an image of `mapped` bytes, one that kvp_layout_plan makes? CORRUPT, TRUNCATED. */
int kvp_layout_check(const struct kvp_layout *layout, uint64_t mapped);

/* ---- words and references ---- */

struct kvp_tag {
    co_u64 low, high;
};

static inline uint64_t kvp_word(uint64_t generation, uint32_t who, enum kvp_state state)
{
    return generation << 16 | (uint64_t)who << 4 | (uint64_t)state;
}
static inline enum kvp_state kvp_word_state(uint64_t word) { return (enum kvp_state)(word & 15); }
static inline uint32_t kvp_word_who(uint64_t word) { return (uint32_t)(word >> 4) & 0xfff; }
static inline uint64_t kvp_word_generation(uint64_t word) { return word >> 16; }

#define KVP_GENERATION_MASK ((1ull << 30) - 1)
static inline uint32_t kvp_block(uint32_t class, uint32_t number) { return class << 29 | number; }
static inline uint32_t kvp_block_class(uint32_t block) { return block >> 29; }
static inline uint32_t kvp_block_number(uint32_t block) { return block & (uint32_t)KVP_BLOCKS_MAX; }
static inline uint64_t kvp_ref(uint32_t block, uint64_t generation)
{
    return (generation & KVP_GENERATION_MASK) << 32 | block;
}

/* The generation of a block's next publication. Never 0 in the 30 bits of a reference: reference 0 is none. */
static inline uint64_t kvp_next_generation(uint64_t generation)
{
    generation++;
    return generation & KVP_GENERATION_MASK ? generation : generation + 1;
}

/* ---- the arena: one worker's private view ---- */

struct kvp_magazine {
    uint32_t count;
    uint32_t capacity;      /* small in a small pool: a magazine must not starve the others */
    uint32_t cursor;        /* where to look for hints next */
    uint32_t used;          /* touched since the last tick */
    uint32_t block[KVP_MAGAZINE];
};

struct kvp_class {
    nc_u64 *words;
    co_u64 *scores;
    struct kvp_tag *tags;
    co_u64 *hints;          /* bit k % 64 of word k / 64: block k is probably FREE */
    co_u64 *summary;        /* bit i % 64 of word i / 64: hints[i] is probably not 0 */
    uint8_t *data;
    uint64_t stride;
    uint32_t blocks;
    struct kvp_magazine magazine;
    uint32_t *pin_slot;     /* private: slot + 1 that pins block k for this worker, or 0 */
    uint64_t *victims;      /* private bitmap: blocks of the eviction in progress */
    uint64_t *pinned;       /* private bitmap: blocks that were pinned at the last kvp_note_pins */
};

struct kvp_arena {
    struct kvp_layout layout;  /* private copy of a checked layout */
    struct kvp_slot *slots;
    nc_u64 *pins;
    struct kvp_record *logs;
    co_u64 *segments;
    struct kvp_class class[KVP_CLASSES_MAX];
    uint32_t self;             /* slot of this worker */
    uint32_t incarnation;      /* low 32 bits of the slot's */
    uint32_t *pin_count;       /* private, per pin slot: holders inside this process */
    uint32_t *pin_free;        /* private stack of unused pin slots below pin_top */
    uint32_t pin_free_count;
    uint32_t pin_top;          /* pin slots ever used since the last time none was */
    uint32_t pins_held;        /* pin slots in use */
    /* Called before a dead worker's block is freed: remove what names it. */
    void (*forget)(void *context, uint32_t block);
    /* Called for a block that was evicted because its segment is drained: remove what names it, and say so. */
    void (*drained)(void *context, uint32_t block);
    /* Called before a dead worker's eviction is undone: if its names are half removed, remove them. */
    void (*settle)(void *context, uint32_t block);
    void *context;
};

/* Write the initial words into zeroed memory: one class holds every segment; several hold none yet. */
void kvp_arena_format(uint8_t *base, const struct kvp_layout *layout);
/* Set the pointers of a view over `base`. NOSPACE when private memory cannot be had. */
int kvp_arena_init(struct kvp_arena *arena, uint8_t *base, const struct kvp_layout *layout);
void kvp_arena_free(struct kvp_arena *arena);

/* ---- blocks ---- */

/* Take up to n free blocks of a class; returns how many. Never evicts, never waits. They are OWN(self). */
uint32_t kvp_alloc(struct kvp_arena *arena, uint32_t class, uint32_t *numbers, uint32_t n);
/* Give back blocks that are OWN(self). RANGE, NOTOWNED (double free included): then none is freed. */
int kvp_free(struct kvp_arena *arena, uint32_t class, const uint32_t *numbers, uint32_t n);
/* Return every magazine to the common stock. */
void kvp_spill(struct kvp_arena *arena);
/* The reference that a block will have once published. RANGE, NOTOWNED. */
int kvp_future_ref(const struct kvp_arena *arena, uint32_t class, uint32_t number, uint64_t *ref);
/* OWN(self) -> LIVE. The payload, the tag and the score are written before. NOTOWNED. */
int kvp_make_live(struct kvp_arena *arena, uint32_t class, uint32_t number);
/* LIVE -> EVICTING(self) for those of the n blocks that nobody has pinned; compacts them to the front and returns
 * how many. One pass over the pin slots for the whole batch; never waits. Each is then taken, or given back. */
uint32_t kvp_evict_begin(struct kvp_arena *arena, uint32_t class, uint32_t *numbers, uint32_t n);
/* EVICTING(self) -> OWN(self): the block may be overwritten. */
void kvp_evict_take(struct kvp_arena *arena, uint32_t class, uint32_t number);
/* Both in one, for all that are not pinned. */
uint32_t kvp_evict(struct kvp_arena *arena, uint32_t class, uint32_t *numbers, uint32_t n);
/* LIVE -> EVICTING(self), whatever the pins: holds a block still while its names change. 1 if held. And back. */
int kvp_lock_block(struct kvp_arena *arena, uint64_t ref);
void kvp_unlock_block(struct kvp_arena *arena, uint32_t class, uint32_t number);
/* Is a block that we have locked pinned by anybody? */
int kvp_is_pinned(struct kvp_arena *arena, uint32_t class, uint32_t number);
/* Is this reference's publication readable now? */
int kvp_ref_live(const struct kvp_arena *arena, uint64_t ref);
/* Address of a block's payload; NULL if there is no such block. */
uint8_t *kvp_block_data(const struct kvp_arena *arena, uint32_t block);

/* ---- pins ---- */

/* Pin the longest valid prefix of refs: a pinned block is neither reused nor moved until the last pin goes or
 * this process is known dead. Returns how many are pinned, or RANGE / STALE / PINS if that is none. */
int64_t kvp_pin(struct kvp_arena *arena, const uint64_t *refs, uint32_t n);
/* Undo one pin of each block. Zeros, and blocks that this worker has not pinned, are left alone. */
void kvp_unpin(struct kvp_arena *arena, const uint64_t *refs, uint32_t n);

/* Walk all pins of all workers once, for kvp_was_pinned: a hint that saves trying to evict those. */
void kvp_note_pins(struct kvp_arena *arena);
static inline int kvp_was_pinned(const struct kvp_arena *arena, uint32_t class, uint32_t number)
{
    return arena->class[class].pinned[number / 64] >> number % 64 & 1;
}

/* ---- segments ---- */

enum kvp_segment_state { KVP_SEGMENT_FREE, KVP_SEGMENT_HELD, KVP_SEGMENT_ADOPTING, KVP_SEGMENT_DRAINING };
static inline enum kvp_segment_state kvp_segment_state(uint64_t word) { return (enum kvp_segment_state)(word & 255); }
static inline uint32_t kvp_segment_class(uint64_t word) { return (uint32_t)(word >> 8) & 255; }
static inline uint32_t kvp_segment_who(uint64_t word) { return (uint32_t)(word >> 16) & 0xffff; }

/* First block, and the one after the last, that touch a segment. */
void kvp_segment_blocks(const struct kvp_arena *arena, uint32_t class, uint32_t segment, uint32_t *first, uint32_t *end);
/* Take a free segment for a class: 1 if one was taken. */
int kvp_segment_adopt(struct kvp_arena *arena, uint32_t class);
/* Empty a segment that `class` holds and free it: 1 if that worked, 0 if a block in it is owned or pinned
 * (then everything is as before, less what was evicted on the way). */
int kvp_segment_drain(struct kvp_arena *arena, uint32_t class, uint32_t segment);
/* May block k of this class be handed out: are its segments held, and not being drained? */
int kvp_block_usable(const struct kvp_arena *arena, uint32_t class, uint32_t number);

/* ---- recovery ---- */

/* Put back all that a dead worker held: blocks, evictions, segments, pins, hints. The caller has claimed the
 * recovery and the worker is gone. Idempotent; others go on. Returns the number of blocks freed. */
uint64_t kvp_recover(struct kvp_arena *arena, uint32_t dead);

/* ---- check ---- */

/* cdef: begin */
/* Totals over all classes, and the first broken invariant. */
struct kvp_check {
    uint64_t states[8];     /* blocks per enum kvp_state */
    uint64_t pins;          /* pin slots in use */
    uint64_t leaked;        /* blocks owned by no live worker */
    uint64_t unlinked;      /* LIVE blocks that no key names any more: freed next */
    uint64_t entries;       /* directory entries */
    uint64_t problems;      /* broken invariants found */
    uint32_t block;         /* where the first is */
    char first[160];        /* which it is; "" when clean */
};
/* cdef: end */

/* Record a broken invariant. */
void kvp_check_fail(struct kvp_check *check, uint32_t block, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Look again at what seems broken? A live worker may be between two steps, and preempted there: give it time. Only
 * for the first problem, so that a badly damaged image does not take for ever. 1 after a pause, 0 to report it. */
int kvp_check_patience(const struct kvp_check *check, int again);
/* Walk words, segments, pins and hints. Transient states of live workers are looked at twice. */
void kvp_arena_check(const struct kvp_arena *arena, struct kvp_check *check);

#endif
