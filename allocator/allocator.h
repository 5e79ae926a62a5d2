/* allocator.h -- blocks of shared memory: who owns which, who reads which, and what a death leaves.
 *
 * Caveats, first.
 *  - An arena (struct kvp_arena) is one worker's private view. One thread at a time may use it; the layer
 *    above holds a lock. What other workers do at the same moment is always safe.
 *  - Everything read from shared memory is input: numbers are range-checked before use.
 *  - Free lists, hint bits and magazines are hints. The word of a block is the only truth about it.
 *
 * Glossary.
 *  host       coherence.h; a pool has 1 to 64, each owns segments and has its own workers
 *  ours       of a segment or block: this host owns it, and so its workers may write its words and bytes
 *  class      the blocks of one size. Block k of a class lies at payload + k * stride: one strided array.
 *  segment    a fixed part of the payload. Each is owned by one host and held by at most one class; a block can be
 *             used only by the owner, and only while every segment that it touches is held by its class. Where there are
 *             many hosts that goes for its line of 8 words as a whole: a line has one writer host.
 *  word       8 bytes per block: {generation:48 | who:12 | state:4}; descriptor, owner and eviction lock in one
 *  reference  8 bytes: {0:2 | generation:30 | class:3 | number:29}; names one publication of one block
 *  tag        16 bytes per block, opaque here: what the layer above calls the block
 *  label      the copy of a tag in the pool, for hosts that join (many hosts only)
 *  known      a word that a host remembers of a block, in its own memory, so that lookups read no pool (many hosts only)
 *  pool memory, host memory   what all hosts map, and what only the processes of one host do. In mode `coherent` both
 *             lie in the image
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
    KVP_SEGMENTS_MAX = 256,
    KVP_MAGAZINE = 64,
    KVP_STRIDE_MIN = 64,              /* the public API asks for 4 KiB at least */
    KVP_BLOCKS_MAX = (1 << 29) - 1,   /* per class */
    KVP_LEASE_MS = 3000,
    KVP_LEASE_MS_MIN = 300,
};

/* What a pool is to be like. Zeros mean: choose. */
struct kvp_request {
    uint64_t bytes;      /* of the whole mapping; or 0 and blocks is given */
    uint64_t blocks;     /* of class 0, exactly; only with one class */
    uint32_t workers;    /* slots of each host; 1 to 64; 0: 64 */
    uint32_t classes;    /* 1 to KVP_CLASSES_MAX */
    uint64_t stride[8];  /* bytes a block of each class; multiples of 64 */
    uint32_t hosts;      /* 1 to 64; 0: 1. More than 1 only in a build of a mode with many hosts */
    uint32_t host;       /* which of them creates the pool */
    uint32_t lease_ms;   /* after which a silent host's lease has lapsed; 0: 3000 */
    uint32_t quota;      /* segments that a host may own at most, beyond its share at create; 0: no limit */
};

/* What a pool would need besides payload: out[0] bytes of the image, out[1] of each host's own memory. INVALID as at create. */
int kvp_layout_metadata(const struct kvp_request *request, uint64_t *out);

#define KVP_NO_BLOCK 0xffffffff /* in a list of numbers: nothing here */

enum kvp_state { KVP_ABSENT, KVP_FREE, KVP_CACHED, KVP_OWN, KVP_LIVE, KVP_EVICTING, KVP_STATES };
/* cdef: end */

/* ---- layout: on-media, immutable after create ---------------------------------------------------------
 *
 * pool memory:
 *   0        superblock (native/)           one page
 *   hosts    hosts x struct kvp_host
 *   owners   hosts x segments x 8           a row a host, written by it alone, rounded up to lines (as is each below)
 *   high     hosts x workers x 8            how many pin slots may be in use
 *   pins     hosts x workers x pin_slots x 8
 *   logs     hosts x workers x log_records x 32
 *   per class: words 8; with many hosts labels 16 a block
 *   host memory, in mode `coherent`
 *   payload                                 page-aligned
 *
 * host memory, from host_offset, or from the start of the host's own mapping:
 *   head     struct kvp_head
 *   sights   hosts x struct kvp_sight
 *   slots    workers x struct kvp_slot
 *   read     hosts x workers x 8            with many hosts: how far each log has been replayed
 *   segments segments x 8
 *   per class: scores 8, tags 16, with many hosts known 8 a block; hints 1 bit, summary 1 bit per 64 hints
 *   directory (native/)                     homes x (256 + 8)
 */
struct kvp_class_layout {
    uint64_t stride;           /* bytes, a multiple of 64 */
    uint64_t blocks;           /* payload_bytes / stride */
    uint64_t words_offset;     /* of pool memory; each offset a multiple of 64 */
    uint64_t labels_offset;    /* with many hosts */
    uint64_t scores_offset;    /* of host memory, like all that follow */
    uint64_t tags_offset;
    uint64_t known_offset;     /* with many hosts */
    uint64_t hints_offset;     /* (blocks + 63) / 64 words, then their summary */
};
_Static_assert(sizeof(struct kvp_class_layout) == 64, "class layout is on-media");

struct kvp_layout {
    uint64_t bytes;            /* length of the image */
    uint32_t hosts;            /* 1..64 */
    uint32_t workers;          /* slots a host, 1..64 */
    uint32_t classes;          /* 1..8 */
    uint32_t pin_slots;        /* per worker, a multiple of 8 */
    uint32_t log_records;      /* per worker, a power of two */
    uint32_t segments;         /* 1..256 */
    uint32_t segments_per_host; /* segment s belongs to host min(s / this, hosts - 1) at create */
    uint32_t lease_ms;
    uint32_t quota;            /* segments a host, 0: no limit */
    uint32_t reserved0;        /* zero */
    uint64_t segment_bytes;    /* the last segment may be shorter */
    uint64_t hosts_offset;
    uint64_t owners_offset;
    uint64_t high_offset;
    uint64_t pins_offset;
    uint64_t logs_offset;
    uint64_t host_offset;      /* of host memory in the image; 0 where each host has its own */
    uint64_t host_bytes;       /* of one host's memory */
    uint64_t sights_offset;    /* of host memory, like the next four */
    uint64_t slots_offset;
    uint64_t read_offset;
    uint64_t segments_offset;
    uint64_t directory_offset;
    uint64_t directory_homes;  /* of 16 entries */
    uint64_t payload_offset;
    uint64_t payload_bytes;
    struct kvp_class_layout class[KVP_CLASSES_MAX];
};
_Static_assert(sizeof(struct kvp_layout) == 176 + 64 * KVP_CLASSES_MAX, "layout is on-media");

/* Words in 64-byte rows: how many from one row to the next. */
static inline uint64_t kvp_row(uint64_t words) { return (words + 7) & ~7ull; }

/* The head of host memory. */
struct kvp_head {
    co_u64 ready;              /* KVP_HEAD_READY once the host has started; 0 before */
    co_u64 incarnation;        /* of the host */
    co_u64 life;               /* of the pool, as last refreshed */
    co_u64 beaten;             /* CLOCK_BOOTTIME of the last beat */
    co_u32 fenced;             /* 1: this host was declared lost */
    co_u32 yields;             /* 1: it is back, and its former life is being adopted: it owns nothing until that is over */
    co_u32 replayer;           /* worker + 1 that has the turn to replay logs and to make segments ours, or 0 */
    co_u32 stale;              /* 1: what is known is to be compared with all words */
    co_u64 asked;              /* other hosts have been asked to remove blocks: CLOCK_MONOTONIC of the next look; or 0 */
    co_u64 learned;            /* grows when records of other hosts have been applied */
    co_u64 clock;              /* logical time of accesses and publications, for the policies */
    co_u64 unannounced;        /* 1: the other hosts have not been told of this start */
    co_u64 reserved2[6];       /* zero */
    co_u64 depth;              /* of the directory, 0 to KVP_DEPTH_MAX; only grows */
    struct kvp_gate gate;      /* of workers that wait for a publication; seldom written, unless one does */
    co_u64 reserved3[6];       /* zero */
};
_Static_assert(offsetof(struct kvp_head, clock) == 64, "the clock is contended");
_Static_assert(sizeof(struct kvp_head) == 192, "host memory is shared by builds");
#define KVP_HEAD_READY 0x5944414552u

/* Compute a layout. INVALID says which size is wrong and what would do. */
int kvp_layout_plan(const struct kvp_request *request, struct kvp_layout *out);
/* Is this layout, read from an image of `mapped` bytes, one that kvp_layout_plan makes? CORRUPT, TRUNCATED. */
int kvp_layout_check(const struct kvp_layout *layout, uint64_t mapped);

/* ---- words and references ---- */

struct kvp_tag {
    co_u64 low, high;
};
struct kvp_label {
    nc_u64 low, high;
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

/* Is the word LIVE in the generation that the reference names? */
static inline int kvp_word_shows(uint64_t word, uint64_t ref)
{
    return ((word & (KVP_GENERATION_MASK << 16 | 15)) ^ (uint64_t)KVP_LIVE) == ref >> 32 << 16;
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
    struct kvp_label *labels;
    co_u64 *scores;
    struct kvp_tag *tags;
    co_u64 *known;
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
    nc_u64 *owners;            /* of all hosts, as the next three */
    nc_u64 *pin_high;
    nc_u64 *pins;
    struct kvp_record *logs;
    struct kvp_head *head;
    struct kvp_slot *slots;    /* of this host */
    co_u64 *read;
    co_u64 *segments;
    struct kvp_roster roster;
    struct kvp_class class[KVP_CLASSES_MAX];
    uint32_t host;             /* ours */
    uint32_t self;             /* slot of this worker */
    uint32_t incarnation;      /* low 32 bits of the slot's */
    uint32_t *pin_count;       /* private, per pin slot: holders inside this process */
    uint32_t *pin_free;        /* private stack of unused pin slots below pin_top */
    uint32_t pin_free_count;
    uint32_t pin_top;          /* pin slots ever used since the last time none was */
    uint32_t pin_high_seen;    /* what our pin_high says: at least pin_top */
    uint32_t pins_held;        /* pin slots in use */
    /* Called before a dead worker's block is freed: remove what names it. */
    void (*forget)(void *context, uint32_t block);
    /* Called for a block that was evicted because its segment is drained: remove what names it, and say so. */
    void (*drained)(void *context, uint32_t block);
    /* Called before a dead worker's eviction is undone: if its names are half removed, remove them. */
    void (*settle)(void *context, uint32_t block);
    void *context;
};

/* Write the initial words of pool memory, and the owners, into zeroed memory. */
void kvp_arena_format(uint8_t *base, const struct kvp_layout *layout);
/* Set the pointers of a view over pool memory `base` and host memory `host_base`. NOSPACE when private memory cannot be
 * had. */
int kvp_arena_init(struct kvp_arena *arena, uint8_t *base, uint8_t *host_base, const struct kvp_layout *layout, uint32_t host);
/* Fill zeroed host memory: which segments are ours and for which class, which blocks are free. What an earlier start
 * of this host left half done is undone. Nobody else uses the host memory yet. */
void kvp_arena_start(struct kvp_arena *arena);
void kvp_arena_free(struct kvp_arena *arena);

/* ---- whose ---- */

enum kvp_segment_state {
    KVP_SEGMENT_FREE,      /* ours, of no class */
    KVP_SEGMENT_HELD,      /* ours, of a class */
    KVP_SEGMENT_ADOPTING,  /* on its way to HELD */
    KVP_SEGMENT_DRAINING,  /* on its way to FREE */
    KVP_SEGMENT_FOREIGN,   /* another host's */
    KVP_SEGMENT_MOVING,    /* a worker of ours gives or takes it; nothing in it may be used */
    KVP_SEGMENT_OFFERED,   /* given, and not yet seen taken */
};
static inline enum kvp_segment_state kvp_segment_state(uint64_t word) { return (enum kvp_segment_state)(word & 255); }
static inline uint32_t kvp_segment_class(uint64_t word) { return (uint32_t)(word >> 8) & 255; }
static inline uint32_t kvp_segment_who(uint64_t word) { return (uint32_t)(word >> 16) & 0xffff; }
static inline uint64_t kvp_segment_word(enum kvp_segment_state state, uint32_t class, uint32_t who)
{
    return (uint64_t)state | (uint64_t)class << 8 | (uint64_t)who << 16;
}
static inline int kvp_segment_ours(uint64_t word) { return kvp_segment_state(word) <= KVP_SEGMENT_DRAINING; }

/* Segments that must be ours and of the class before a block may be used: those under it, or with many hosts those
 * under its line of 8 words. */
static inline void kvp_block_segments(const struct kvp_arena *arena, uint32_t class, uint32_t number, uint32_t *first,
                                      uint32_t *last)
{
    uint64_t stride = arena->class[class].stride, from = number, to = number;

    if (KVP_MANY_HOSTS) {
        from &= ~7ull, to |= 7;
        if (to >= arena->class[class].blocks)
            to = arena->class[class].blocks - 1;
    }
    *first = (uint32_t)(from * stride / arena->layout.segment_bytes);
    *last = (uint32_t)(((to + 1) * stride - 1) / arena->layout.segment_bytes);
}

/* May this host write the block's word and bytes? */
static inline int kvp_is_ours(const struct kvp_arena *arena, uint32_t class, uint32_t number)
{
    uint32_t s, last;

    if (!KVP_MANY_HOSTS)
        return 1;
    for (kvp_block_segments(arena, class, number, &s, &last); s <= last; s++)
        if (!kvp_segment_ours(co_load(&arena->segments[s])))
            return 0;
    return 1;
}

/* Is it surely another host's? What is given, taken or adopted at this moment is neither. From here to ours it goes only under
 * the turn of native/replay.c. */
static inline int kvp_is_foreign(const struct kvp_arena *arena, uint32_t class, uint32_t number)
{
    uint32_t s, last;

    if (!KVP_MANY_HOSTS)
        return 0;
    for (kvp_block_segments(arena, class, number, &s, &last); s <= last; s++)
        if (kvp_segment_state(co_load(&arena->segments[s])) == KVP_SEGMENT_FOREIGN)
            return 1;
    return 0;
}

/* Rows and tables of one host or worker. */
static inline nc_u64 *kvp_owners(const struct kvp_arena *arena, uint32_t host)
{
    return arena->owners + host * kvp_row(arena->layout.segments);
}
static inline nc_u64 *kvp_pin_high(const struct kvp_arena *arena, uint32_t host)
{
    return arena->pin_high + host * kvp_row(arena->layout.workers);
}
static inline nc_u64 *kvp_pins(const struct kvp_arena *arena, uint32_t host, uint32_t worker)
{
    return arena->pins + ((uint64_t)host * arena->layout.workers + worker) * arena->layout.pin_slots;
}
static inline struct kvp_record *kvp_ring(const struct kvp_arena *arena, uint32_t host, uint32_t worker)
{
    return arena->logs + ((uint64_t)host * arena->layout.workers + worker) * arena->layout.log_records;
}

/* Name a block of ours, for this host and for those that join later; zeros: it has no name. Written back, not fenced. */
void kvp_set_tag(struct kvp_arena *arena, uint32_t class, uint32_t number, uint64_t low, uint64_t high);
/* The same of many blocks: the caller ends `lines` before a word says LIVE. */
void kvp_set_tag_to(struct kvp_arena *arena, uint32_t class, uint32_t number, uint64_t low, uint64_t high,
                    struct kvp_lines *lines);

/* ---- blocks ---- */

/* Take up to n free blocks of a class; returns how many. Never evicts, never waits. They are OWN(self). */
uint32_t kvp_alloc(struct kvp_arena *arena, uint32_t class, uint32_t *numbers, uint32_t n);
/* Give back blocks that are OWN(self). RANGE, NOTOWNED (double free included): then none is freed. */
int kvp_free(struct kvp_arena *arena, uint32_t class, const uint32_t *numbers, uint32_t n);

/* From CACHED(self) to OWN(self): by addition, since each waits for the store of the one before, and a pair is nothing else. */
enum { KVP_CACHED_TO_OWN = KVP_OWN - KVP_CACHED };
/* The next block of a magazine, which has one. */
static inline uint32_t kvp_magazine_take(struct kvp_class *class)
{
    uint32_t number = class->magazine.block[--class->magazine.count];

    /* A store, not a CAS: CACHED(self) is ours alone. Killed before it: recovery finds CACHED(dead). */
    nc_store(&class->words[number], nc_load_relaxed(&class->words[number]) + KVP_CACHED_TO_OWN);
    KVP_CRASH_POINT("alloc.owned");
    return number;
}
/* OWN(self) -> CACHED(self). The generation grows: a reference to the publication that did not happen never fits again. */
static inline void kvp_magazine_keep(struct kvp_class *class, uint32_t number, uint64_t word)
{
    nc_store(&class->words[number], word - KVP_CACHED_TO_OWN + kvp_word(1, 0, KVP_ABSENT));
    KVP_CRASH_POINT("free.cached");
    class->magazine.block[class->magazine.count++] = number;
}
/* Is a word OWN(self)? */
static inline int kvp_is_own(const struct kvp_arena *arena, uint64_t word)
{
    return (uint16_t)word == (uint16_t)kvp_word(0, arena->self, KVP_OWN);
}
/* One block, by value: in line, a hit is less than a call. KVP_NO_BLOCK: none is free. */
static inline uint32_t kvp_alloc_one(struct kvp_arena *arena, uint32_t class)
{
    uint32_t number;

    arena->class[class].magazine.used = 1;
    if (arena->class[class].magazine.count)
        return kvp_magazine_take(&arena->class[class]);
    return kvp_alloc(arena, class, &number, 1) ? number : KVP_NO_BLOCK;
}

static inline int kvp_free_one(struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    struct kvp_class *class = &arena->class[c];
    uint32_t again = number; /* a copy: what has an address stays in memory */

    if (c >= arena->layout.classes || number >= class->blocks)
        return kvp_free(arena, c, &again, 1);
    uint64_t word = nc_load(&class->words[number]);
    if (!kvp_is_own(arena, word) || class->magazine.count == class->magazine.capacity)
        return kvp_free(arena, c, &again, 1);
    kvp_magazine_keep(class, number, word);
    return KVP_OK;
}

/* A reservation ends without a publication: what was written through views leaves our cache, and is fenced. */
void kvp_block_end(struct kvp_arena *arena, uint32_t class, uint32_t number);
/* Note that a block, or those of one hint word that `bits` names, are probably FREE. */
void kvp_set_hint(struct kvp_class *class, uint32_t number);
void kvp_set_hints(struct kvp_class *class, uint32_t at, uint64_t bits);
/* Each worker looks for blocks in a part of its own first: two in one place write each other's lines, slower than one alone. */
void kvp_magazines_spread(struct kvp_arena *arena);
/* Return every magazine to the common stock. */
void kvp_spill(struct kvp_arena *arena);
/* The reference that a block will have once published. RANGE, NOTOWNED. */
int kvp_future_ref(const struct kvp_arena *arena, uint32_t class, uint32_t number, uint64_t *ref);
/* OWN(self) -> LIVE. The payload, the tag and the score are written before; the caller ends `lines` before it says so to
 * other hosts. NOTOWNED. */
int kvp_make_live(struct kvp_arena *arena, uint32_t class, uint32_t number, struct kvp_lines *lines);
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
/* Is this reference's publication readable now? By the word as it stands in our cache: that of a foreign block is
 * refreshed first by whoever asks. */
static inline int kvp_ref_live(const struct kvp_arena *arena, uint64_t ref)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);

    return c < arena->layout.classes && number < arena->class[c].blocks &&
           kvp_word_shows(nc_load(&arena->class[c].words[number]), ref);
}
/* Drop our cached copy of a foreign block's word, or bytes; a fence of the caller's follows. Nothing for a block of ours. */
void kvp_refresh_word(const struct kvp_arena *arena, uint64_t ref);
void kvp_refresh_bytes(const struct kvp_arena *arena, uint64_t ref, uint64_t bytes);
/* Address of a block's payload; NULL if there is no such block. */
uint8_t *kvp_block_data(const struct kvp_arena *arena, uint32_t block);

/* ---- pins ---- */

/* Pin the longest valid prefix of refs: a pinned block is neither reused nor moved until the last pin goes or
 * this process is known dead. Returns how many are pinned, or RANGE / STALE / PINS if that is none. */
int64_t kvp_pin(struct kvp_arena *arena, const uint64_t *refs, uint32_t n);
/* Undo one pin of each block. Zeros, and blocks that this worker has not pinned, are left alone. */
void kvp_unpin(struct kvp_arena *arena, const uint64_t *refs, uint32_t n);
/* Announce pins of blocks that are ours and about to be LIVE: all or none. The caller has a write fence between this and the
 * words. PINS, RANGE. */
int kvp_pin_ahead(struct kvp_arena *arena, const uint64_t *refs, uint32_t n);

/* At each tick: what evictors read of our pins shrinks once none is held. */
void kvp_pins_tick(struct kvp_arena *arena);

/* Walk all pins of all workers once, for kvp_was_pinned: a hint that saves trying to evict those. */
void kvp_note_pins(struct kvp_arena *arena);
static inline int kvp_was_pinned(const struct kvp_arena *arena, uint32_t class, uint32_t number)
{
    return arena->class[class].pinned[number / 64] >> number % 64 & 1;
}

/* ---- segments ---- */

/* First block, and the one after the last, whose use depends on a segment. */
void kvp_segment_blocks(const struct kvp_arena *arena, uint32_t class, uint32_t segment, uint32_t *first, uint32_t *end);
/* Take a free segment for a class: 1 if one was taken. */
int kvp_segment_adopt(struct kvp_arena *arena, uint32_t class);
/* Empty a segment that `class` holds and free it: 1 if that worked, 0 if a block in it is owned or pinned
 * (then everything is as before, less what was evicted on the way). */
int kvp_segment_drain(struct kvp_arena *arena, uint32_t class, uint32_t segment);
/* May block k of this class be handed out: are its segments held, and not being drained? */
int kvp_segments_held(const struct kvp_arena *arena, uint32_t class, uint32_t number);
static inline int kvp_block_usable(const struct kvp_arena *arena, uint32_t class, uint32_t number)
{
    return (arena->layout.classes == 1 && !KVP_MANY_HOSTS) || kvp_segments_held(arena, class, number);
}

/* ---- hand-off between hosts: allocator/owners.c ----
 * A segment moves empty: every word in it is ABSENT. Its owner is the host whose row has the highest epoch in a state that
 * holds; each row is written by its own host. A word of a row is {epoch:32 | peer:16 | state:16}.
 *
 *    giver                                   taker
 *    words ABSENT and written back; fence
 *    OFFER(e, taker) ----------------------> TAKING(e); fence; is the offer still there?
 *    REVOKING(e); fence; look at the taker     yes: refresh all of it; TAKEN(e), and free for use
 *      TAKING: look again later                no:  ABORTED(e)
 *      TAKEN(e): gone
 *      else: ours again, TAKEN(e + 1)
 *
 * If the giver is lost, who adopts it does the left side from OFFER on, in a row of its own: TAKING(e + 1) instead of
 * REVOKING(e), and ABORTED(e) while the taker has it. So a taker looks at all rows.
 */
enum kvp_owner_state { KVP_OWNER_NONE, KVP_OWNER_TAKEN, KVP_OWNER_OFFER, KVP_OWNER_REVOKING, KVP_OWNER_TAKING,
                       KVP_OWNER_ABORTED };
static inline uint64_t kvp_owner_word(uint64_t epoch, uint32_t peer, enum kvp_owner_state state)
{
    return epoch << 32 | (uint64_t)peer << 16 | (uint64_t)state;
}
static inline uint64_t kvp_owner_epoch(uint64_t word) { return word >> 32; }
static inline uint32_t kvp_owner_peer(uint64_t word) { return (uint32_t)(word >> 16) & 0xffff; }
static inline enum kvp_owner_state kvp_owner_state(uint64_t word) { return (enum kvp_owner_state)(word & 0xffff); }

/* The host that owns a segment, by the rows as they stand in our cache; KVP_HOSTS_MAX if a damaged image names none. */
uint32_t kvp_owner(const struct kvp_arena *arena, uint32_t segment);
/* Drop our cached copies of the other hosts' rows, and fence. */
void kvp_owners_refresh(const struct kvp_arena *arena);
/* Write our row's word of a segment, and start writing it back. */
void kvp_owner_write(struct kvp_arena *arena, uint32_t segment, uint64_t epoch, uint32_t peer, enum kvp_owner_state state);
/* Offer a segment of ours that is FREE to another host: 1 if it is offered. */
int kvp_owner_offer(struct kvp_arena *arena, uint32_t segment, uint32_t to);
/* Take what is offered to us, up to our quota, and see what became of our own offers: those that are refused, or that we
 * had begun to take back, are ours again. The rows have been refreshed. Returns how many segments were taken. */
uint32_t kvp_owners_tick(struct kvp_arena *arena);
/* See which of our offers were taken: before the takers' records are read, which name blocks that are theirs by now. */
void kvp_owners_see_offers(struct kvp_arena *arena);
/* Take an offer back that nobody has taken: 1 ours again, 0 it is gone or being taken: ask again later. */
int kvp_owner_revoke(struct kvp_arena *arena, uint32_t segment);
/* Take the segments of a lost host: it was reset, and the site has named us (kvp_host_adopt comes first). Its published
 * blocks stay; what it was in the middle of is undone. Returns how many segments. */
uint32_t kvp_owners_adopt(struct kvp_arena *arena, uint32_t lost);
/* Finish or undo what dead workers of ours were moving (kvp_recover_owners has put it down to a live one): this may make
 * segments ours, and so needs the turn of native/replay.c as taking and adopting do. */
void kvp_finish_moving(struct kvp_arena *arena);
/* What has become of an offer of `epoch` to a host, by its row as it stands in our cache: 1 taken, 0 not, -1 being taken. */
int kvp_offer_fate(const struct kvp_arena *arena, uint32_t segment, uint32_t to, uint64_t epoch);
/* Is the life of the taker over that wrote what we have just read in its row? Its next life aborts what that had begun. */
int kvp_taker_is_gone(const struct kvp_arena *arena, uint32_t to);
/* Undo what a former owner, or a worker that died while it moved the segment, left half done in it; then it is HELD by
 * the class whose blocks it has, or FREE. The caller has it in MOVING. */
void kvp_segment_settle(struct kvp_arena *arena, uint32_t segment);
/* Names that we knew of blocks in a segment that becomes ours go, except those of what is published there. */
void kvp_forget_former(struct kvp_arena *arena, uint32_t segment);
/* Drop our cached copies of all that a segment holds, and fence. */
void kvp_segment_refresh(struct kvp_arena *arena, uint32_t segment);
/* Take back what the rows say is ours and we had to yield: the adopter has withdrawn. Returns how many segments. */
uint32_t kvp_owners_reclaim(struct kvp_arena *arena);
/* Segments that are ours. */
uint32_t kvp_owned(const struct kvp_arena *arena);

/* ---- recovery ---- */

/* Put back all that a dead worker held: blocks, evictions, segments, pins, hints. The caller has claimed the
 * recovery and the worker is gone. Idempotent; others go on. Returns the number of blocks freed. */
uint64_t kvp_recover(struct kvp_arena *arena, uint32_t dead);
/* What a dead worker left half done of segments, or of moving them, is finished or undone. Parts of kvp_recover. */
void kvp_recover_owners(struct kvp_arena *arena, uint32_t dead);
void kvp_recover_segments(struct kvp_arena *arena, uint32_t dead);

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
