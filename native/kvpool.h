/* kvpool.h -- the pool as a C program sees it (and the Python bindings through cffi).
 *
 * Caveats, first.
 *  - A handle (kvp_pool) may be used by many threads of the process that opened it: calls that change the
 *    worker's private state take its lock for as long as they compute, never while they copy or wait.
 *  - After fork() the child's copy of a handle answers KVP_E_FORKED; open the pool again.
 *  - kvp_read and kvp_lookup protect nothing after they return. Only a pinned block (kvp_match, kvp_pin_refs)
 *    stays what it is. A reference may be kept for ever; using it later gives the same bytes or KVP_E_STALE.
 *  - Blocks are write-once: fill reserved blocks, publish them, never write them again.
 *  - kvp_pool_leave ends the worker; pointers into the mapping stay readable, unprotected, until
 *    kvp_pool_free.
 *  - A miss is always allowed. Wrong bytes never are.
 *
 * Units: bytes; a key is 16 bytes; block numbers count within their class. n is a number of keys or blocks.
 * Errors: every call may answer CLOSED, FORKED and REPLACED; what else it may answer stands with it.
 */
#ifndef KVPOOL_H
#define KVPOOL_H
#include "allocator/allocator.h"

/* cdef: begin */
enum kvp_format {
    KVP_FORMAT = 3,           /* of the image */
    KVP_KEY_BYTES = 16,
    KVP_SECRET_BYTES = 192,   /* of a namespace */
};

/* Statistics of a worker, in this order; they only grow, over all uses of a slot. */
enum kvp_counter {
    KVP_COUNT_LOOKUPS,        /* keys asked for */
    KVP_COUNT_HITS,           /* keys found */
    KVP_COUNT_PUBLISHED,      /* blocks made visible */
    KVP_COUNT_DUPLICATES,     /* blocks that lost to an earlier one of the same key */
    KVP_COUNT_EVICTED,        /* blocks taken by eviction */
    KVP_COUNT_REMOVED,        /* keys removed on request */
    KVP_COUNT_BYTES_IN,       /* payload copied into the pool */
    KVP_COUNT_BYTES_OUT,      /* payload copied out of the pool */
    KVP_COUNT_PINNED,         /* blocks pinned */
    KVP_COUNT_FULL,           /* reservations refused */
    KVP_COUNT_RECOVERIES,     /* dead workers recovered */
    KVP_COUNT_RECOVERED,      /* blocks freed by that */
    KVP_COUNT_UNINDEXED,      /* blocks not published because the directory had no room near their key */
    KVP_COUNT_STALE,          /* reads whose block was reused under them: reported as misses */
    KVP_COUNT_SPARED,         /* victims found pinned */
    KVP_COUNT_SEGMENTS,       /* segments moved to another class */
    KVP_COUNT_RECOVERY_NS,    /* time spent in recovery */
    KVP_COUNT_REPLAYED,       /* records of other hosts applied */
    KVP_COUNT_RESCANS,        /* times that a log had lapped us, and all words were scanned */
    KVP_COUNT_DOUBTED,        /* references that were found and did not stand */
    KVP_COUNT_MOVED,          /* segments taken from or given to other hosts, or adopted */
    KVP_COUNTS
};

typedef struct kvp_pool kvp_pool;

struct kvp_info {
    uint8_t uuid[16];
    uint64_t incarnation;      /* of the image on this memory */
    uint64_t bytes;            /* mapped */
    uint64_t metadata_bytes;   /* everything that is not payload */
    uint64_t payload_offset;
    uint64_t payload_bytes;
    uint64_t created_ns;       /* CLOCK_REALTIME */
    uint64_t stride[8];        /* bytes a block, per class */
    uint64_t blocks[8];        /* per class, were it to hold every segment */
    uint64_t held[8];          /* segments held, per class */
    uint64_t segments;
    uint64_t segment_bytes;
    uint64_t pin_slots;        /* per worker */
    uint64_t log_records;      /* per worker */
    uint64_t owned;            /* segments that this host owns */
    uint32_t classes;
    uint32_t workers;          /* slots of each host */
    uint32_t self;             /* slot of this handle */
    uint32_t hosts;
    uint32_t host;             /* which of them this is */
    uint32_t lease_ms;
    uint32_t quota;            /* segments a host, 0: no limit */
    int kind;                  /* of the mapping */
    char policy[16];
    char mode[16];             /* "coherent", "noncoherent" or "sim" */
};

/* A host, as this one sees it. */
struct kvp_host_info {
    uint64_t incarnation;      /* 0: never joined */
    uint64_t fenced;           /* highest incarnation that was adopted */
    uint64_t silent_ms;        /* since its beat was last seen to change, by our clock */
    uint64_t segments;         /* that it owns */
    uint64_t wanted;           /* segments that it asks for */
    int state;                 /* enum kvp_host_state */
};

struct kvp_worker_info {
    uint64_t pid;
    uint64_t incarnation;
    uint64_t joined_ns;        /* CLOCK_REALTIME */
    int state;                 /* 0 free, 1 alive, 2 dead and not yet recovered */
    uint64_t counter[32];      /* enum kvp_counter */
};

/* What happened to a key, from a worker's log. */
struct kvp_event {
    uint64_t sequence;         /* within the worker's log, from 1 */
    uint64_t ref;              /* the publication; of a recovery: the worker recovered */
    uint8_t key[16];           /* zeros for a recovery */
    uint32_t worker;           /* host * workers a host + slot */
    int kind;                  /* enum kvp_event_kind */
};
enum kvp_event_kind {
    KVP_EVENT_PUBLISHED,
    KVP_EVENT_EVICTED,
    KVP_EVENT_REMOVED,
    KVP_EVENT_RECOVERED,       /* a dead worker */
    KVP_EVENT_ASKED,           /* another host asks the owner to remove it */
    KVP_EVENT_STARTED,         /* a host: records of its former life may have been lost */
    KVP_EVENT_USED,            /* ref and both halves of the key are up to three blocks that another host has used */
};

/* ---- life of a pool ---- */

/* Make a pool in three steps, so that the caller can show progress and be interrupted: map unnamed memory; back it,
 * part by part, each with threads; format it, name it and join as a worker. kvp_pool_free undoes an unfinished one
 * and nothing is left. Policies: lru, fifo, lfu, leaf (lru that evicts the tail of a chain first).
 * INVALID, EXISTS, NOSPACE, PERMISSION, NOSLOT, SYSTEM. */
int kvp_pool_prepare(const char *uri, const struct kvp_request *request, const char *policy, kvp_pool **out);
int kvp_pool_populate(kvp_pool *pool, uint64_t offset, uint64_t bytes, unsigned threads);
int kvp_pool_commit(kvp_pool *pool);
/* The three in one. */
int kvp_pool_create(const char *uri, const struct kvp_request *request, const char *policy, kvp_pool **out);
/* Map a pool that exists, recover what dead workers left if all slots are theirs, join.
 * `host` is 0 in mode coherent; else which of the pool's hosts this machine is: its first process starts the host, and
 * may wait for one lease to learn whether the identity is free. NOTFOUND, PERMISSION, TRUNCATED, NOTREADY, FOREIGN, OLDER,
 * NEWER, LAYOUT, MODE, CORRUPT, REPLACED, NOSLOT, HOST. */
int kvp_pool_open(const char *uri, uint32_t host, kvp_pool **out);
/* As kvp_pool_open; flags of enum kvp_open_flag. In mode noncoherent a device (dax:, file:) that nobody has qualified is
 * UNQUALIFIED, unless the caller takes it as it is or the environment says KVPOOL_UNQUALIFIED=1. The other kinds are
 * memory of one machine, which its caches keep coherent: they need no qualification. Nor does the maker's own handle. */
enum kvp_open_flag { KVP_OPEN_UNQUALIFIED = 1 };
int kvp_pool_open_with(const char *uri, uint32_t host, uint32_t flags, kvp_pool **out);
/* Which host to be in order to look at a pool from here: the first that has a live worker on this machine, else the first
 * whose memory is here, else 0. So that looking neither wakes a lost host nor claims another machine's number. As
 * kvp_pool_mode. */
int kvp_pool_here(const char *uri);
/* The mode that a pool was made for: 0 coherent, 1 noncoherent, 2 sim; any build reads it. As kvp_pool_open. */
int kvp_pool_mode(const char *uri);
/* Give back all that this worker holds and leave; idempotent. The mapping stays readable. */
int kvp_pool_leave(kvp_pool *pool);
/* Leave every pool that this process has open: for the end of a program, when other threads may still be reading. */
void kvp_leave_all(void);
/* Leave; unmap and free with the last hold. No pointer into the mapping may be used afterwards. NULL is allowed. */
void kvp_pool_free(kvp_pool *pool);
/* Retire a pool and remove its name. BUSY while workers live, unless forced: they then answer REPLACED. */
int kvp_pool_remove(const char *uri, int force);

int kvp_pool_info(kvp_pool *pool, struct kvp_info *out);
/* Blocks per class and enum kvp_state: states[class * 8 + state]. A walk over the words. */
int kvp_pool_states(kvp_pool *pool, uint64_t states[64]);
int kvp_pool_worker(kvp_pool *pool, uint32_t worker, struct kvp_worker_info *out);
const char *kvp_pool_uri(const kvp_pool *pool);
/* Bytes mapped: what kvp_pool_populate is to cover. */
uint64_t kvp_pool_mapped(const kvp_pool *pool);
/* The mapping: payload block k of class c lies at base + payload_offset + k * stride[c]. */
void *kvp_pool_base(const kvp_pool *pool);
int kvp_pool_fd(const kvp_pool *pool);
/* Walk every structure. Also on a pool in use: what live workers are in the middle of is not reported. */
int kvp_pool_check(kvp_pool *pool, struct kvp_check *out);

/* ---- hosts ---- */

/* What this host knows of a host. RANGE. */
int kvp_pool_host(kvp_pool *pool, uint32_t host, struct kvp_host_info *out);
/* The site's power or fabric control has confirmed that this incarnation of a host was reset, and that nothing it wrote
 * reaches the pool any more; and it names us as the one that adopts. Its blocks become ours, its pins end. Never call it
 * on a guess: a host that is alive would go on writing. A host that never joined (incarnation 0) is fenced by the promise
 * that it will not. Idempotent. Returns how many segments were adopted. RANGE, BUSY (its beat changes), INVALID (another
 * incarnation). */
int64_t kvp_pool_fence(kvp_pool *pool, uint32_t host, uint64_t incarnation);
/* Give a host up to n segments: free ones, else those that have been idle longest, emptied. Returns how many were offered;
 * the taker takes them at its next tick. RANGE. */
int64_t kvp_pool_give(kvp_pool *pool, uint32_t host, uint32_t n);
/* Take back offers that nobody has taken. Returns how many segments are ours again. */
int64_t kvp_pool_revoke(kvp_pool *pool);
/* Follow the other hosts now instead of at the next tick: logs, beats, segments offered to us. Returns how many records
 * were applied. */
int64_t kvp_pool_follow(kvp_pool *pool);

/* What the simulated cache of our host has done for this process so far. INVALID in another mode than sim. */
int kvp_pool_line_counts(kvp_pool *pool, struct kvp_sim_counts *out);
/* Mode sim: a host is reset. All its processes are dead; of what its cache holds dirty, each line reaches the device or is
 * lost, as the seed has it; its memory is gone. Returns how many lines were lost. INVALID, NOTFOUND, BUSY (a process of it
 * lives). */
int64_t kvp_pool_lose_host(const char *uri, uint32_t host);

/* ---- qualification: does the device keep what the protocols rest on? ----
 * Two hosts run litmus tests on the pool's own memory. Each side reserves two blocks of at least 4 KiB, is told the numbers
 * of the other's two (by whatever way), and calls the same functions in the same order with the same numbers. Each writes
 * its own blocks and reads the other's: the rule of one writer host per line holds, and the pool may be in use. */
enum kvp_litmus {
    KVP_LITMUS_STORE,          /* a message: payload by ordinary stores and write-backs, fence, flag */
    KVP_LITMUS_STREAM,         /* the same by non-temporal stores */
    KVP_LITMUS_PIN,            /* store buffering as pin and evict need it: both announce, then look; never may both miss */
    KVP_LITMUS_COPY,           /* payload after flag: a copy under a word that has not changed, while it is overwritten */
    KVP_LITMUS_RECORD,         /* records of a log are whole, while they are overwritten */
    KVP_LITMUS_STALE,          /* a line that is cached is current once it is invalidated; and before that? */
    KVP_LITMUSES
};
/* For tests of the tests: leave out these instructions where they matter. What follows must be noticed. */
enum kvp_defect { KVP_DEFECT_WRITE_BACK = 1, KVP_DEFECT_INVALIDATE = 2 };

struct kvp_litmus_side {
    uint32_t side;             /* 0 or 1 */
    uint32_t class_;
    uint32_t mine[2];          /* block numbers; ours are reserved by this worker */
    uint32_t theirs[2];
    uint32_t defects;          /* of enum kvp_defect */
    uint32_t patience_ms;      /* how long to wait for the other side */
    uint64_t nonce, their_nonce; /* not 0; new for each meeting */
    uint64_t step, sequence, random; /* private; 0 at first */
};

/* Of both sides together. */
struct kvp_litmus_counts {
    uint64_t rounds;
    uint64_t failures;
    uint64_t noted;            /* PIN: rounds in which one side missed the other; COPY, RECORD: what was read whole;
                                * STALE: reads before the invalidate that showed the old value (on coherent memory 0) */
    int is_silent;             /* 1: the other side did not answer in time; the test counts as failed */
};

/* Zero our area. The other side learns the numbers of our blocks only afterwards. RANGE, NOTOWNED, INVALID. */
int kvp_litmus_begin(kvp_pool *pool, struct kvp_litmus_side *side);
/* Wait for the other side: 1 if it is there and means us, 0 if not within wait_ms. */
int kvp_litmus_meet(kvp_pool *pool, struct kvp_litmus_side *side, uint32_t wait_ms);
/* So many rounds of one test, once both have met. INVALID. */
int kvp_litmus_run(kvp_pool *pool, struct kvp_litmus_side *side, enum kvp_litmus test, uint32_t rounds,
                   struct kvp_litmus_counts *out);

/* The digest of a qualification that every test has passed; in the superblock, on lines of its own. */
struct kvp_qualification {
    uint64_t version;          /* 1; 0: none */
    uint64_t when_ns;          /* CLOCK_REALTIME */
    uint64_t hosts;            /* that took part, a bit each */
    uint64_t rounds;           /* of each test and pair of hosts */
    uint64_t tests;            /* of enum kvp_litmus, a bit each */
    uint64_t stale;            /* stale reads seen in KVP_LITMUS_STALE */
    uint32_t mode, kind;       /* of the pool; filled in */
    uint32_t line_bytes;       /* filled in */
    uint32_t reserved;         /* zero */
    char cpu[64];              /* of the host that wrote it: vendor, model */
    char instructions[32];     /* kvp_line_instructions(); filled in */
    char device[32];           /* filled in: the URI, cut off */
    char features[56];         /* of the CPU */
    uint64_t checksum;         /* filled in */
};
enum kvp_qualification_limit { KVP_QUALIFICATION = 1, KVP_QUALIFICATION_WORDS = 32 };

/* Record a qualification, or with NULL withdraw it. One host at a time. INVALID (no host, no test). */
int kvp_pool_qualify(kvp_pool *pool, const struct kvp_qualification *digest);
/* What is recorded: 1, or 0 if nothing that is whole. */
int kvp_pool_qualification(kvp_pool *pool, struct kvp_qualification *out);

/* ---- keys ---- */

/* A 128-bit hash of a buffer with a secret: the type of libxxhash's XXH3_128bits_withSecret, which is what the
 * bindings pass in. */
struct kvp_digest { uint64_t low, high; };
typedef struct kvp_digest (*kvp_hash)(const void *data, size_t bytes, const void *secret, size_t secret_bytes);

/* Where a chain of blocks stands: start from zeros, pass on to go on. */
struct kvp_chain {
    uint64_t low, high;        /* digest of all so far */
    uint64_t head;             /* digest of the first block of the present group of 8 */
    uint64_t blocks;           /* hashed so far */
};

/* One 16-byte key per block of `block_tokens` tokens, each covering all before it. The low 4 bytes name the
 * group of 8 chain positions (they choose the home in the directory), the rest is the block's own digest. */
int kvp_keys(kvp_hash hash, const void *secret, const uint32_t *tokens, uint64_t blocks, uint32_t block_tokens,
             struct kvp_chain *chain, void *keys);

/* ---- blocks by key ---- */

/* Longest prefix of keys that is present, pinned: refs[i] for i below the return value, 0 from there on: the array
 * always says what is pinned, also to a caller that is interrupted before it sees the count. RANGE, PINS. */
int64_t kvp_match(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n, uint64_t *refs);
/* Which keys are present now: refs[i], or 0. Returns how many. Pins nothing. RANGE. */
int64_t kvp_lookup(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n, uint64_t *refs);
/* Sleep until all of these keys are present, at most so long; a signal ends it early. Woken by publications on this host
 * within microseconds; what other hosts publish is looked for each millisecond. Returns how many of the first keys are
 * present. Pins nothing. RANGE. */
int64_t kvp_wait(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n, uint32_t timeout_ms);
/* Tell the policy that these keys were used, in this order. */
int64_t kvp_touch(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n);
/* Pin by reference: the longest valid prefix; the references from there on become 0. RANGE, STALE, PINS. */
int64_t kvp_pin_refs(kvp_pool *pool, uint64_t *refs, uint32_t n);
/* Undo one pin of each reference that is not 0, and make it 0: doing it again does nothing. */
int kvp_unpin_refs(kvp_pool *pool, uint64_t *refs, uint32_t n);

/* Take n blocks to fill, evicting if need be: all, or none; then every number is KVP_NO_BLOCK and nothing
 * of this class was evicted. FULL, RANGE. */
int kvp_reserve(kvp_pool *pool, uint32_t class_, uint32_t n, uint32_t *numbers);
/* Give reserved blocks back unpublished; their numbers become KVP_NO_BLOCK, which is skipped. RANGE, NOTOWNED. */
int kvp_withdraw(kvp_pool *pool, uint32_t class_, uint32_t *numbers, uint32_t n);
/* Make reserved, filled blocks findable under their keys, the last one first: a match sees all or none.
 * refs[i] is the publication, or 0 where an earlier block of that key stands (or the directory had no room):
 * then block i is free again. The numbers become KVP_NO_BLOCK. Returns how many were published. INVALID (zero key),
 * RANGE, NOTOWNED: then nothing has happened. */
int64_t kvp_publish(kvp_pool *pool, uint32_t class_, uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs);
/* As kvp_publish, for a maker that goes on reading its blocks: what is published is pinned before anybody can evict it, and a
 * block that is not (refs[i] is 0) stays reserved, its number as it was. PINS: then nothing has happened. */
int64_t kvp_publish_kept(kvp_pool *pool, uint32_t class_, uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs);
/* Remove keys: nobody finds them any more. Their blocks are freed at once, or evicted among the first once their last
 * pin has gone. Returns how many were present. BUSY: a worker that is stopped holds one of the blocks for eviction, and may
 * yet let it stand; the others are removed. */
int64_t kvp_remove(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n);
/* Evict up to n blocks in policy order and free them. Returns how many. */
int64_t kvp_shrink(kvp_pool *pool, uint32_t class_, uint32_t n);

/* ---- copies ---- */

/* Copy blocks out without pinning: to[i] receives `bytes` of the block of keys[i]; got[i] is 1 if those bytes
 * are the right ones. On 0 the buffer is unchanged, or zeroed where the block was reused under the copy.
 * Returns how many were got. INVALID (bytes larger than a block), RANGE. */
int64_t kvp_read(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n, void *const *to, uint64_t bytes, uint8_t *got);
/* Reserve, copy in (non-temporal), publish: keys that are present are skipped. Works in batches of 64 keys, each of which
 * is stored whole or not at all. Returns how many were stored, FULL if not even one batch could be. */
int64_t kvp_put(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n, const void *const *from, uint64_t bytes);
/* The same of one block. */
int64_t kvp_read_one(kvp_pool *pool, uint32_t class_, const void *key, void *to, uint64_t bytes);
int64_t kvp_put_one(kvp_pool *pool, uint32_t class_, const void *key, const void *from, uint64_t bytes);
/* The block of an engine, which seldom lies in one piece (one per layer, say): piece by piece, each a row of a table.
 * Row r of a part is at base + r * stride and goes to, or comes from, byte `at` of the pool's block. */
struct kvp_part {
    void *base;
    uint64_t stride;
    uint64_t bytes;            /* of a row */
    uint64_t at;
};
/* As kvp_read and kvp_put, but block i is made of row rows[i] of each of the parts. The caller vouches for the addresses. On
 * got[i] = 0 the rows are unchanged, or zeroed. INVALID (a part that reaches beyond the block; no part). */
int64_t kvp_read_parts(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n, const struct kvp_part *parts,
                       uint32_t part_count, const uint64_t *rows, uint8_t *got);
int64_t kvp_put_parts(kvp_pool *pool, uint32_t class_, const void *keys, uint32_t n, const struct kvp_part *parts,
                      uint32_t part_count, const uint64_t *rows);
/* Copy into a reserved block. INVALID, RANGE, NOTOWNED. */
int kvp_fill(kvp_pool *pool, uint32_t class_, uint32_t number, const void *from, uint64_t bytes);

/* ---- holds: pins and reservations as one object with one destructor ----
 * For languages with finalizers: whatever moment an interrupt or an exception chooses, the destructor knows what is
 * still held. A hold keeps the pool mapped. */
struct kvp_hold {
    kvp_pool *pool;
    uint64_t *refs;            /* pinned; 0 where nothing is */
    uint32_t *numbers;         /* reserved; KVP_NO_BLOCK where nothing is */
    int64_t *blocks;           /* numbers of what the last kvp_hold_match or kvp_hold_pin has pinned */
    uint32_t class_;
    uint32_t n;
};
/* An empty hold for n blocks; NULL without memory. */
struct kvp_hold *kvp_hold_new(kvp_pool *pool, uint32_t class_, uint32_t n);
/* As kvp_match, into an empty hold for n keys or more. */
int64_t kvp_hold_match(struct kvp_hold *hold, const void *keys, uint32_t n);
/* The same of one key: the reference of its block, or 0. */
int64_t kvp_hold_get(struct kvp_hold *hold, const void *key);
/* As kvp_reserve, as many blocks as an empty hold was made for: the number of the first. */
int64_t kvp_hold_reserve(struct kvp_hold *hold);
/* kvp_keys and kvp_hold_match in one: a request's tokens to its pinned prefix. The hash hides the latency of the directory. */
int64_t kvp_hold_match_tokens(struct kvp_hold *hold, kvp_hash hash, const void *secret, const uint32_t *tokens,
                              uint32_t blocks, uint32_t block_tokens, struct kvp_chain *chain, void *keys);
/* As kvp_pin_refs, of a copy of refs, into an empty hold for n or more: all n or none. */
int64_t kvp_hold_pin(struct kvp_hold *hold, const uint64_t *refs, uint32_t n);
/* Unpin and withdraw what is left; the hold stays. */
void kvp_hold_clear(struct kvp_hold *hold);
/* Clear and free. NULL is allowed. */
void kvp_hold_end(struct kvp_hold *hold);

/* ---- observation ---- */

/* Events of one worker's log after *position (0: from the oldest that is kept), in order. Returns how many;
 * *lost grows by those overwritten before they were read. */
int64_t kvp_events(kvp_pool *pool, uint32_t worker, uint64_t *position, struct kvp_event *out, uint32_t n, uint64_t *lost);
/* cdef: end */

#endif
