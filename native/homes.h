/* homes.h -- where a key may stand, when an entry counts, and how many keys are searched for at once: private to native/. */
#ifndef KVP_HOMES_H
#define KVP_HOMES_H
#include "native/handle.h"

enum { GROUP = 8 }; /* keys in a row that share their homes */

static inline uint64_t scale(uint32_t hash, uint64_t homes)
{
    return (uint64_t)hash * homes >> 32;
}

static inline uint64_t first_home(const kvp_pool *pool, const struct kvp_key *key)
{
    return scale((uint32_t)key->low, pool->homes);
}

/* The i-th home of a key: two of its group, then those from its own digest on. */
static inline struct kvp_entry *home(const kvp_pool *pool, const struct kvp_key *key, uint64_t i)
{
    uint64_t index;

    if (i == 0)
        index = first_home(pool, key);
    else if (i == 1)
        index = scale((uint32_t)key->low * 0x9e3779b1u, pool->homes);
    else
        index = (scale((uint32_t)(key->high * 0x9e3779b97f4a7c15u >> 32), pool->homes) + i - KVP_GROUP_HOMES) % pool->homes;
    return pool->directory + index * KVP_HOME_ENTRIES;
}

/* Where in its i-th home a key's group begins, if it finds that half free: a search asks for that half's lines first. */
static inline uint32_t first_place(const struct kvp_key *key, uint64_t i)
{
    return (uint32_t)key->low >> i & 1 ? GROUP : 0; /* of the i-th home the low bits choose nothing else */
}

/* How many homes a search for this key looks at. */
static inline uint64_t homes_of(const kvp_pool *pool, const struct kvp_key *key)
{
    if (co_load(&pool->spilled[first_home(pool, key)]) == 0)
        return KVP_GROUP_HOMES;
    uint64_t depth = co_load(&pool->arena.head->depth);
    return KVP_GROUP_HOMES + (depth < KVP_DEPTH_MAX ? depth : KVP_DEPTH_MAX);
}

static inline enum kvp_entry_state entry_state(uint64_t value)
{
    return (enum kvp_entry_state)(value >> 62);
}

static inline int tag_is(const kvp_pool *pool, uint32_t block, const struct kvp_key *key)
{
    const struct kvp_class *class = &pool->arena.class[kvp_block_class(block)];
    const struct kvp_tag *tag = &class->tags[kvp_block_number(block)];

    return co_load(&tag->low) == key->low && co_load(&tag->high) == key->high;
}

static inline int block_exists(const kvp_pool *pool, uint64_t ref)
{
    uint32_t c = kvp_block_class((uint32_t)ref);

    return c < pool->arena.layout.classes && kvp_block_number((uint32_t)ref) < pool->arena.class[c].blocks;
}

/* Is this reference a readable publication of the whole key? The word is LIVE with the generation before the tag
 * is read; if the block is reused after that, the generation no longer fits when it is pinned or read. */
static inline int stands(const kvp_pool *pool, uint64_t ref, const struct kvp_key *key)
{
    return block_exists(pool, ref) && kvp_ref_known(&pool->arena, ref) && tag_is(pool, (uint32_t)ref, key);
}

/* A search for many keys goes by groups, whose keys share two homes, and in four stages, so that no load waits for the one
 * before it: the first home's lines, the second's, guesses in them and the lines of the blocks' words and tags, and the
 * verification. A batch of groups passes a stage, then the batch behind it: asking in bursts keeps more lines under way than
 * group by group. A chain is entered in order, so that a group's entries mostly are neighbours, and then its keys are compared
 * without a branch; what differs is searched key by key. */
struct kvp_group {
    const struct kvp_entry *home[KVP_GROUP_HOMES];
    uint32_t place[KVP_GROUP_HOMES]; /* where in them it would begin first */
    const struct kvp_entry *start; /* where its first key is; NULL: not in its homes */
    uint32_t first, n;             /* keys of this call */
    enum { APART, ROW, RUN } form; /* its entries do not stand in order; they do; and they name neighbouring blocks of one age */
};

enum { KVP_STAGES = 4, KVP_STAGE_GROUPS = 3 }; /* groups: with more, the lines asked for at once are more than a core waits for */
_Static_assert((KVP_STAGES & (KVP_STAGES - 1)) == 0, "a turn is a position in a ring");

struct kvp_batch {
    uint32_t count;
    struct kvp_group group[KVP_STAGE_GROUPS];
};

struct kvp_search {
    const kvp_pool *pool;
    const struct kvp_class *class;
    const void *keys;
    uint64_t *refs;
    uint32_t c, n, block0;             /* the class; how many keys are there by now; block 0 of the class */
    uint32_t asked;                    /* keys that belong to a group */
    uint32_t found, turn;
    int prefix, is_over;               /* stop at the first key that is not there; it is known which that is */
    struct kvp_batch batch[KVP_STAGES]; /* one at each stage */
};

/* A search whose keys come one after the other, as they are hashed: while that computes, the lines that others wait for arrive.
 * Groups come whole. `refs` are as after kvp_directory_find, which is all in one. */
void kvp_search_begin(struct kvp_search *search, const kvp_pool *pool, uint32_t class, const void *keys, int prefix,
                      uint64_t *refs);
void kvp_search_more(struct kvp_search *search, uint32_t n);
uint32_t kvp_search_end(struct kvp_search *search);

/* The reference under a key, found without haste in the homes from the `from`-th on; 0 if there is none. */
uint64_t kvp_directory_look(const kvp_pool *pool, uint32_t class, const struct kvp_key *key, uint64_t from);

#endif
