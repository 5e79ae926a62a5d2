/* handle.h -- private to native/: the superblock, the directory's form, and what a handle holds. */
#ifndef KVP_HANDLE_H
#define KVP_HANDLE_H
#include "native/kvpool.h"

/* ---- superblock: the first page of an image ----------------------------------------------------------
 * Written once: magic first, checksum, and `version` last, with a fence before it. A reader that sees the
 * version sees all of it. Feature masks as in ext4: unknown bits in incompat forbid opening, in ro_compat
 * writing (there is no read-only handle yet, so it forbids too), in compat nothing.
 */
#define KVP_MAGIC 0x4c4f4f50564bu /* "KVPOOL" */

struct kvp_superblock {
    uint64_t magic;
    nc_u64 version;            /* KVP_FORMAT once the image is whole; 0 before */
    uint64_t fingerprint;      /* sizes of shared structs, byte order: see kvp_fingerprint */
    uint64_t compat, ro_compat, incompat;
    uint8_t uuid[16];
    uint64_t created_ns;       /* CLOCK_REALTIME */
    uint32_t policy;           /* index into the table of policies */
    uint32_t mode;             /* KVP_COHERENT, KVP_NONCOHERENT or KVP_SIM */
    struct kvp_layout layout;
    uint64_t checksum;         /* FNV-1a over everything above, version taken as KVP_FORMAT */
    /* what changes, on lines of its own */
    uint8_t pad0[1024 - 88 - sizeof(struct kvp_layout)];
    nc_u64 life;               /* incarnation << 1 | retired: compared on entry to every call */
    uint8_t pad1[56];
    nc_u64 qualified[KVP_QUALIFICATION_WORDS]; /* struct kvp_qualification, word by word; written by one host at a time */
    uint8_t pad2[4096 - 1024 - 64 - 8 * KVP_QUALIFICATION_WORDS - KVP_LINE];
    nc_u64 maker;              /* random: who makes a pool on this device, should several machines at once; kept when it is wiped */
    uint8_t pad3[56];
};
_Static_assert(offsetof(struct kvp_superblock, layout) == 80, "layout follows the identity");
_Static_assert(offsetof(struct kvp_superblock, life) == 1024, "mutable words on lines of their own");
_Static_assert(offsetof(struct kvp_superblock, qualified) % KVP_LINE == 0, "and so is the digest of the qualification");
_Static_assert(sizeof(struct kvp_qualification) == 8 * KVP_QUALIFICATION_WORDS, "the digest is on-media");
_Static_assert(sizeof(struct kvp_superblock) <= KVP_PAGE, "one page");

/* ---- directory ---------------------------------------------------------------------------------------
 * Homes of 16 entries, 256 bytes. A key stands in one of the two homes of its group (8 consecutive chain positions
 * share them, so a chain is found with few line loads); where both are full, in one of the homes that follow the
 * home of its own digest. `spilled` counts such keys per first group home, never too few: while it is 0 a search ends
 * after two homes. `depth` is how far any key has ever been put from the home of its digest: where it ends otherwise.
 * So deletion needs no tombstones.
 *
 * An entry is a hint: it counts only if its block's word is LIVE with the same generation and the block's
 * tag is the whole key. With many hosts each has its own directory, in its memory, and `known` stands for the word:
 * a lookup reads nothing of the pool, and pins and reads find out whether it was right. Blocks that other hosts have
 * published come in by their logs (replay.c); then several entries of one key may stand.
 */
struct kvp_entry {
    co_u64 tag;    /* high half of the key */
    co_u64 value;  /* 0, or state << 62 | reference */
};
enum { KVP_HOME_ENTRIES = 16, KVP_GROUP_HOMES = 2, KVP_DEPTH_MAX = 32 };
enum kvp_entry_state { KVP_ENTRY_EMPTY, KVP_ENTRY_PENDING, KVP_ENTRY_COMMITTED, KVP_ENTRY_ABORTED };
#define KVP_REF_MASK ((1ull << 62) - 1)

struct kvp_key {
    uint64_t low, high;
};

/* ---- policy: what a score is ---- */

struct kvp_policy {
    const char *name;
    int tail_first;                                       /* order of stamps within one call: last key oldest */
    uint64_t (*admit)(uint64_t stamp);                    /* score of a block published at `stamp` */
    uint64_t (*touch)(uint64_t score, uint64_t stamp);    /* score after a use; never smaller */
};
extern const struct kvp_policy kvp_policies[];
/* Index of a policy by name, or -1. */
int kvp_policy_find(const char *name);
uint32_t kvp_policy_count(void);

/* A private heap of eviction candidates of one class, smallest score first. Scores of blocks
 * that stay only grow, so an entry that turns out too old is put back with its present score: the order is exact for
 * what the heap has. (A block removed while pinned falls to 0; it is pushed again.) */
struct kvp_candidate {
    uint64_t score;
    uint32_t number;
};
struct kvp_heap {
    struct kvp_candidate *item;
    uint32_t count, capacity;
    uint32_t aside;            /* victims found pinned, kept at the far end of `item` until the search is over */
    uint32_t pops;             /* since it was built */
    uint64_t built;            /* clock when it was built */
};
/* Append `n` blocks in the order in which the policy gives them up; fewer if there are no more. */
uint32_t kvp_victims(kvp_pool *pool, uint32_t class, uint32_t *numbers, uint32_t n);
/* Note a publication of our own. */
void kvp_candidate_add(kvp_pool *pool, uint32_t class, uint32_t number);
/* Keep a victim that was pinned out of the search; put all of those back after it. */
void kvp_candidate_aside(kvp_pool *pool, uint32_t class, uint32_t number);
void kvp_candidates_back(kvp_pool *pool, uint32_t class);
/* Read the candidates afresh if others have published since: 1 if so. */
int kvp_candidates_renew(kvp_pool *pool, uint32_t class);
/* The clock values of one call on n keys: the order in which the policy sees them, also where the call works in
 * batches. A policy that is tail_first sees the last key as the oldest. */
struct kvp_order {
    uint64_t first;
    uint32_t n;
    uint32_t done;             /* keys of earlier batches */
};
/* Take n values; the first form holds the lock already. */
struct kvp_order kvp_order_new(kvp_pool *pool, uint32_t n);
struct kvp_order kvp_order_of_call(kvp_pool *pool, uint32_t n);
static inline uint64_t kvp_order_stamp(const kvp_pool *pool, const struct kvp_order *order, uint32_t i);
/* Give the next n references (0: none there) their new scores. Needs no lock. */
void kvp_touch_refs(kvp_pool *pool, const uint64_t *refs, uint32_t n, struct kvp_order *order);

/* ---- the handle ---- */

enum { KVP_USED = 48 };

struct kvp_pool {
    struct kvp_pool *next;     /* of the handles of this process */
    struct kvp_mapping mapping;
    struct kvp_mapping host_mapping; /* memory of this host; in mode coherent not mapped: it lies in the image */
    uint64_t used[KVP_USED];   /* foreign blocks that we have used since the last tick: a sample for their owners */
    uint32_t used_count;
    uint32_t host;             /* which host we are */
    struct kvp_superblock *super;
    struct kvp_arena arena;
    struct kvp_keeper keeper;
    struct kvp_entry *directory;
    co_u64 *spilled;           /* per home */
    uint64_t homes;
    const struct kvp_policy *policy;
    struct kvp_heap heap[KVP_CLASSES_MAX];
    uint64_t clock_seen;       /* the clock after our last use of it: others' publications show as a gap */
    uint32_t foreign;          /* classes, a bit each, in which others have published since the heap was built */
    uint32_t evictions;        /* since a segment was last tried to be taken from another class */
    uint64_t log_sequence;     /* of our last record */
    pthread_mutex_t lock;      /* private: arena, heaps, log */
    uint64_t maker;            /* what we have drawn to make it on a device */
    uint64_t life;             /* of the superblock, as opened */
    uint64_t forks;            /* kvp_fork_count at open */
    uint32_t holders;          /* the handle itself and each hold: the last one unmaps */
    uint32_t copies;           /* calls between reserve and publish, outside the lock */
    int joined;
    int seated;                /* under the lock: the slot is ours */
    int closed;
    int unqualified;           /* the caller takes a device that was not qualified */
    int borrows;               /* the mapping belongs to another handle: kvp_pool_share */
};

/* One more worker of this process on the mapping of `pool`, which must be freed after it. For the sanitizers: they
 * see no race between two mappings of the same memory. NOSLOT, NOSPACE, SYSTEM. */
int kvp_pool_share(kvp_pool *pool, kvp_pool **out);

static inline uint64_t kvp_order_stamp(const kvp_pool *pool, const struct kvp_order *order, uint32_t i)
{
    uint32_t at = order->done + i;
    return order->first + (pool->policy->tail_first ? order->n - 1 - at : at);
}

/* May this call go on? CLOSED, FORKED, REPLACED. */
int kvp_enter(kvp_pool *pool);
int kvp_enter_class(kvp_pool *pool, uint32_t class);
void kvp_lock(kvp_pool *pool);
int kvp_trylock(kvp_pool *pool); /* 1 if it is ours */
void kvp_unlock(kvp_pool *pool);
static inline void kvp_count(kvp_pool *pool, enum kvp_counter counter, uint64_t n)
{
    co_add(&pool->arena.slots[pool->arena.self].counter[counter], n);
}
/* The pool's life, as last refreshed. */
static inline uint64_t kvp_life(const kvp_pool *pool)
{
    return KVP_MANY_HOSTS ? co_load(&pool->arena.head->life) : nc_load(&pool->super->life);
}
/* A block that we have evicted or hold: its names go, and a record says which kind of end it was. Under the lock. */
void kvp_unlink_victim(kvp_pool *pool, uint32_t class, uint32_t number, enum kvp_event_kind kind);
/* One holder less. */
void kvp_pool_release(kvp_pool *pool);
/* kvp_directory_find; one key needs no search that hides the latency of many. */
uint32_t kvp_find_here(const kvp_pool *pool, uint32_t class, const void *keys, uint32_t n, int prefix, uint64_t *refs);
/* The same, counted; with many hosts a miss looks at their logs. */
int64_t kvp_find(kvp_pool *pool, uint32_t class, const void *keys, uint32_t n, int prefix, uint64_t *refs);
/* The rest of kvp_match, after a search here that has found so many of the first keys; kvp_learned from before it. */
int64_t kvp_match_found(kvp_pool *pool, uint32_t class, const void *keys, uint32_t n, uint64_t *refs, uint64_t learned,
                        uint32_t found);
/* Grows when this host has learned what others have published. */
static inline uint64_t kvp_learned(const kvp_pool *pool)
{
    return KVP_MANY_HOSTS ? co_load(&pool->arena.head->learned) : 0;
}
/* kvp_publish as a part of a call whose order is given. */
int64_t kvp_publish_ordered(kvp_pool *pool, uint32_t class, uint32_t *numbers, const void *keys, uint32_t n, uint64_t *refs,
                            struct kvp_order *order);
/* Append to our log; kinds as in struct kvp_event. Under the lock. */
void kvp_log_event(kvp_pool *pool, enum kvp_event_kind kind, uint64_t ref, const struct kvp_key *key);
/* Remove a block of ours from under its key: freed, or nameless until its last pin goes. Under the lock. 1 if it was there. */
int kvp_remove_ours(kvp_pool *pool, uint32_t class, uint64_t ref);
/* Refresh the words of foreign blocks: what is then read of them is not older than this call. */
void kvp_refresh_words(kvp_pool *pool);

/* Score of the youngest block in a segment; UINT64_MAX if a block in it is owned: then it cannot be drained. */
uint64_t kvp_newest_score(const kvp_pool *pool, uint32_t class, uint32_t segment);

/* ---- host.c: this host's part in the pool ---- */

/* Map the memory of our host, and start the host if nobody has: under an exclusive lock of the machine. */
int kvp_host_enter(kvp_pool *pool, const uint8_t uuid[16], const struct kvp_layout *layout);
/* After the worker has its slot. */
void kvp_host_joined(kvp_pool *pool);
/* Each tick: beat, watch, replay, take and give segments, tell owners of uses. */
void kvp_host_tick(kvp_pool *pool);
/* After a dead worker of this host was recovered: what it owed to the others. */
void kvp_host_recovered(kvp_pool *pool, uint32_t dead);
/* Before the worker gives its slot back: if it is the last, everything of this host is written back. */
void kvp_host_part(kvp_pool *pool);
/* Ask the other hosts for a segment: we had to refuse a reservation. */
void kvp_host_want(kvp_pool *pool, uint64_t segments);

/* ---- replay.c: the directory of this host follows the logs of the others ---- */

/* The turn to change what is known of other hosts' blocks, and to make segments ours: 1 if we have it. Another's turn is
 * awaited for so many rounds of the scheduler. */
int kvp_turn_take(kvp_pool *pool, int patience);
/* Wait longer for it: BUSY if nobody has ended it by then. Not while the lock is held, which its holder may want. */
int kvp_turn_await(kvp_pool *pool, int timeout_ms);
void kvp_turn_end(kvp_pool *pool);
/* Under the turn, without the lock: apply what the others have logged since the last time; scan if that is due. */
uint32_t kvp_follow_logs(kvp_pool *pool);
/* The same with a turn of its own. Another's is awaited, since it began before this call and may not see what this one must;
 * then 0. Takes the lock at times. */
uint32_t kvp_replay(kvp_pool *pool, int patience);
/* Of calls that answer a question; a turn takes microseconds, but a stopped worker's does not end. */
#define KVP_PATIENCE (KVP_MODE == KVP_EXPLORE ? 0 : 200)
/* Under the turn, without the lock, or when the host starts: compare what is known with all words and labels. */
void kvp_replica_scan(kvp_pool *pool);
/* This host has published a block (after it is LIVE), or ended a publication (before its names go). */
void kvp_know(kvp_pool *pool, uint64_t ref);
void kvp_unknow(kvp_pool *pool, uint64_t ref);
/* Is a publication of ours known to have ended? */
int kvp_is_unknown(kvp_pool *pool, uint64_t ref);
/* A reference that was found did not stand: forget it, unless its block is only held for a moment. */
void kvp_doubt(kvp_pool *pool, uint64_t ref);
/* Remove another host's block: nobody finds it here any more, and its owner is asked; again at each tick until it is gone.
 * Both under the lock. */
int kvp_ask_to_remove(kvp_pool *pool, uint64_t ref, const struct kvp_key *key);
void kvp_settle_asked(kvp_pool *pool);
/* Is a reference believed to be readable? No pool line is read where there are many hosts. */
static inline int kvp_ref_known(const struct kvp_arena *arena, uint64_t ref)
{
    uint32_t c = kvp_block_class((uint32_t)ref), number = kvp_block_number((uint32_t)ref);

    if (!KVP_MANY_HOSTS)
        return kvp_ref_live(arena, ref);
    return c < arena->layout.classes && number < arena->class[c].blocks &&
           co_load(&arena->class[c].known[number]) == kvp_word(ref >> 32, 0, KVP_LIVE);
}
/* Which words a directory entry is judged by. */
static inline uint64_t kvp_known_word(const struct kvp_arena *arena, uint32_t c, uint32_t number)
{
    if (KVP_MANY_HOSTS && !kvp_is_ours(arena, c, number))
        return co_load(&arena->class[c].known[number]);
    return nc_load(&arena->class[c].words[number]);
}

/* ---- directory functions ---- */

static inline struct kvp_key kvp_key_at(const void *keys, uint32_t i)
{
    struct kvp_key key;
    __builtin_memcpy(&key, (const uint8_t *)keys + 16 * (size_t)i, sizeof key);
    return key;
}
/* References of the n keys that stand, 0 else; stops at the first miss if `prefix`. Returns how many stand. */
uint32_t kvp_directory_find(const kvp_pool *pool, uint32_t class, const void *keys, uint32_t n, int prefix, uint64_t *refs);
/* Ask for the lines of a key's first home: a search will follow. */
void kvp_directory_ask(const kvp_pool *pool, const void *key);
/* A block of ours under this key that somebody holds for eviction at this moment; 0 if there is none. */
uint64_t kvp_directory_held(const kvp_pool *pool, uint32_t class, const struct kvp_key *key);
/* Name an owned block, tagged with its key, by that key: 1 entered, 0 an earlier one stands, -1 no room. */
int kvp_directory_insert(kvp_pool *pool, const struct kvp_key *key, uint64_t ref);
/* Name a block of another host, whatever else stands under the key: 1, or 0 if there is no room. */
int kvp_directory_enter(kvp_pool *pool, const struct kvp_key *key, uint64_t ref);
/* Does an entry name this publication? */
int kvp_directory_names(const kvp_pool *pool, const struct kvp_key *key, uint64_t ref);
/* Finish a removal that died half way: its names go. */
void kvp_directory_settle(kvp_pool *pool, uint32_t block);
/* Remove every entry that names this block under its tag, and the tag. The caller owns or holds the block. */
void kvp_directory_forget(kvp_pool *pool, uint32_t block);
void kvp_directory_check(kvp_pool *pool, struct kvp_check *check);

/* ---- superblock functions ---- */

uint64_t kvp_fingerprint(void);
const char *kvp_mode_name(uint32_t mode);
/* Write everything but the version. */
void kvp_superblock_write(struct kvp_superblock *super, const struct kvp_layout *layout, int policy, uint64_t incarnation);
/* Say that the image is whole. */
void kvp_superblock_seal(struct kvp_superblock *super);
/* Is this an image we can use? Each reason is its own status. */
int kvp_superblock_verify(const struct kvp_superblock *super, uint64_t mapped);
/* Copy it, with its life, as it is in memory now, and verify the copy: what is used of an image is used from there, since
 * in a hostile one it might change. Zeros if `mapped` is less than a page. */
int kvp_superblock_read(const struct kvp_superblock *super, uint64_t mapped, struct kvp_superblock *seen);

/* ---- devices: memory that was there before (device.c) ---- */

/* What a device holds that is not ours, as words that follow "holds"; NULL if nothing is known. */
const char *kvp_device_content(const uint8_t *base, uint64_t bytes);
/* Zeroes, written back. */
void kvp_wipe(nc_u64 *word, uint64_t bytes);
/* Every mark that says what a device holds, a pool's too. */
void kvp_device_wipe(uint8_t *base, uint64_t bytes);
/* Become the one that makes a pool here; and are we still? BUSY if another machine is. */
int kvp_device_elect(kvp_pool *pool);
int kvp_device_elected(kvp_pool *pool);
/* Mode coherent: refuse (HOST) a device that another machine's workers use, else note that it is ours. */
int kvp_device_demand_machine(kvp_pool *pool);

/* ---- qualify.c ---- */

/* May this mapping be used in this mode? UNQUALIFIED: a device, in mode noncoherent, that nobody has tested. */
int kvp_qualification_demand(const kvp_pool *pool);

#endif
