/* directory.c -- from key to block: entries near each other for keys that follow each other.
 *
 * Two workers may enter the same key at once, in different entries. The rule that leaves exactly one: an entry is
 * PENDING when it appears; its writer then looks at all places of the key. Whoever finds a COMMITTED rival, or a
 * PENDING one at a lower address, withdraws; a PENDING rival at a higher address is aborted by CAS; then the own
 * entry is committed by CAS, which fails if somebody lower has aborted it. Nobody waits. Each writer's entry is
 * visible before it looks (full fence), so of two at least one sees the other.
 */
#include "native/homes.h"

uint64_t kvp_directory_held(const kvp_pool *pool, uint32_t c, const struct kvp_key *key)
{
    uint64_t homes = homes_of(pool, key);

    for (uint64_t i = 0; i < homes; i++) {
        const struct kvp_entry *entry = home(pool, key, i);
        for (int j = 0; j < KVP_HOME_ENTRIES; j++) {
            uint64_t ref = co_load(&entry[j].value) & KVP_REF_MASK;
            uint32_t number = kvp_block_number((uint32_t)ref);
            if (ref == 0 || co_load(&entry[j].tag) != key->high || kvp_block_class((uint32_t)ref) != c ||
                !block_exists(pool, ref) || !kvp_is_ours(&pool->arena, c, number))
                continue;
            uint64_t word = nc_load(&pool->arena.class[c].words[number]);
            if (kvp_word_state(word) == KVP_EVICTING && kvp_ref((uint32_t)ref, kvp_word_generation(word)) == ref &&
                tag_is(pool, (uint32_t)ref, key))
                return ref;
        }
    }
    return 0;
}

/* ---- entering ---- */

/* Does a rival entry name the same key in class c, by a block that is whole or being made so? By a worker that is known
 * dead too: until it is recovered one of its threads may still be about to publish. Each class is a key space of its
 * own. */
static int is_rival(const kvp_pool *pool, uint32_t c, uint64_t value, const struct kvp_key *key)
{
    uint64_t ref = value & KVP_REF_MASK;
    const struct kvp_arena *arena = &pool->arena;

    if (value == 0 || entry_state(value) == KVP_ENTRY_ABORTED || !block_exists(pool, ref) ||
        kvp_block_class((uint32_t)ref) != c || !tag_is(pool, (uint32_t)ref, key))
        return 0;
    uint64_t word = kvp_known_word(arena, c, kvp_block_number((uint32_t)ref));
    uint64_t generation = kvp_word_generation(word);
    if (kvp_word_state(word) == KVP_OWN && kvp_word_who(word) < arena->layout.workers)
        return kvp_ref((uint32_t)ref, kvp_next_generation(generation)) == ref;
    return (kvp_word_state(word) == KVP_LIVE || kvp_word_state(word) == KVP_EVICTING) &&
           kvp_ref((uint32_t)ref, generation) == ref;
}

/* Entries of a home that bear a tag, a bit each. Hardly any do, and a publisher looks through its homes twice. */
static inline uint32_t tagged_in(const struct kvp_entry *entry, uint64_t tag)
{
    uint32_t bits = 0;

#pragma GCC unroll 16
    for (int j = 0; j < KVP_HOME_ENTRIES; j++)
        if (__builtin_expect(co_load(&entry[j].tag) == tag, 0))
            bits |= 1u << j;
    return bits;
}

/* Against one entry that bears our tag: 0 if it wins. */
static int contend_with(kvp_pool *pool, uint32_t c, struct kvp_entry *entry, const struct kvp_entry *mine,
                        const struct kvp_key *key)
{
    uint64_t value = co_load(&entry->value);

    if (!is_rival(pool, c, value, key))
        return 1;
    if (entry_state(value) == KVP_ENTRY_COMMITTED || entry < mine)
        return 0;
    uint64_t aborted = (value & KVP_REF_MASK) | (uint64_t)KVP_ENTRY_ABORTED << 62;
    return co_cas(&entry->value, &value, aborted) || !is_rival(pool, c, value, key); /* it was committed in between */
}

/* One home's share of contend: 0 if a rival wins. */
static int contend_in(kvp_pool *pool, uint32_t c, struct kvp_entry *entry, const struct kvp_entry *mine, const struct kvp_key *key)
{
    for (uint32_t bits = tagged_in(entry, key->high); bits; bits &= bits - 1) {
        struct kvp_entry *other = entry + __builtin_ctz(bits);
        if (other != mine && !contend_with(pool, c, other, mine, key))
            return 0;
    }
    return 1;
}

/* After our entry is visible: 1 if it may be committed. */
static int contend(kvp_pool *pool, uint32_t c, const struct kvp_entry *mine, const struct kvp_key *key)
{
    uint64_t homes = homes_of(pool, key);

    for (uint64_t i = 0; i < homes; i++)
        if (!contend_in(pool, c, home(pool, key, i), mine, key))
            return 0;
    return 1;
}

static struct kvp_entry *empty_in(struct kvp_entry *entry, uint32_t from)
{
    for (uint32_t j = from; j < from + KVP_HOME_ENTRIES; j++)
        if (co_load(&entry[j % KVP_HOME_ENTRIES].value) == 0)
            return &entry[j % KVP_HOME_ENTRIES];
    return NULL;
}

static int used_in(const struct kvp_entry *entry)
{
    int used = 0;

    for (int j = 0; j < KVP_HOME_ENTRIES; j++)
        used += co_load_relaxed(&entry[j].value) != 0;
    return used;
}

/* The first free place for a key, in home *at; NULL if there is none. Of the two homes of its group that which has room for a
 * group more than the other: so groups stay whole, and hardly any key has to stand elsewhere. */
static struct kvp_entry *place(const kvp_pool *pool, const struct kvp_key *key, uint64_t *at)
{
    int used = used_in(home(pool, key, 0));
    uint64_t better = used >= GROUP && used_in(home(pool, key, 1)) / GROUP < used / GROUP;
    struct kvp_entry *empty = NULL;

    for (uint64_t i = 0; i < KVP_GROUP_HOMES + KVP_DEPTH_MAX && !empty; i++) {
        *at = i < KVP_GROUP_HOMES ? i ^ better : i;
        empty = empty_in(home(pool, key, *at), first_place(key, *at));
    }
    return empty;
}

static int stands_in(kvp_pool *pool, uint32_t c, struct kvp_entry *entry, const struct kvp_key *key)
{
    for (uint32_t bits = tagged_in(entry, key->high); bits; bits &= bits - 1) {
        uint64_t value = co_load(&entry[__builtin_ctz(bits)].value);
        if (entry_state(value) == KVP_ENTRY_COMMITTED && is_rival(pool, c, value, key))
            return 1;
    }
    return 0;
}

/* Does an earlier entry of this key stand? */
static int stands_somewhere(kvp_pool *pool, uint32_t c, const struct kvp_key *key)
{
    uint64_t homes = homes_of(pool, key);

    for (uint64_t i = 0; i < homes; i++)
        if (stands_in(pool, c, home(pool, key, i), key))
            return 1;
    return 0;
}

/* Is this home none of the two of the key's group? In a small directory the homes from the digest on meet those. */
static int is_far(const kvp_pool *pool, const struct kvp_key *key, uint64_t at)
{
    const struct kvp_entry *entry = home(pool, key, at);

    return at >= KVP_GROUP_HOMES && entry != home(pool, key, 0) && entry != home(pool, key, 1);
}

/* Before an entry appears beyond the homes of its group: searches must look there. A death after this leaves the
 * counter too high, which costs time and loses nothing. */
static void announce_spill(kvp_pool *pool, const struct kvp_key *key, uint64_t at)
{
    uint64_t depth = co_load(&pool->arena.head->depth), needed = at - KVP_GROUP_HOMES + 1;

    while (depth < needed && !co_cas(&pool->arena.head->depth, &depth, needed))
        ;
    co_add(&pool->spilled[first_home(pool, key)], 1);
    KVP_CRASH_POINT("insert.spilled");
}

static void unspill(kvp_pool *pool, const struct kvp_key *key, uint64_t at)
{
    if (is_far(pool, key, at))
        co_add(&pool->spilled[first_home(pool, key)], -(uint64_t)1);
}

/* Put a PENDING entry somewhere: NULL and *result if an earlier one stands (0) or there is no room (-1). */
static struct kvp_entry *claim_entry(kvp_pool *pool, const struct kvp_key *key, uint64_t pending, uint64_t *at, int *result)
{
    uint32_t c = kvp_block_class((uint32_t)pending);

    for (;;) {
        uint64_t empty = 0;
        *result = 0;
        if (stands_somewhere(pool, c, key))
            return NULL;
        *result = -1;
        struct kvp_entry *entry = place(pool, key, at);
        if (!entry)
            return NULL;
        if (is_far(pool, key, *at))
            announce_spill(pool, key, *at);
        if (co_cas(&entry->value, &empty, pending))
            return entry;
        unspill(pool, key, *at);
    }
}

int kvp_directory_insert(kvp_pool *pool, const struct kvp_key *key, uint64_t ref)
{
    uint64_t at, pending = ref | (uint64_t)KVP_ENTRY_PENDING << 62;
    int result;
    struct kvp_entry *mine = claim_entry(pool, key, pending, &at, &result);

    if (!mine)
        return result;
    KVP_CRASH_POINT("insert.claimed");
    co_store(&mine->tag, key->high);
    co_full_fence(); /* Dekker among writers of one key: visible before we look for rivals */
    int won = contend(pool, kvp_block_class((uint32_t)ref), mine, key);
    KVP_CRASH_POINT("insert.contended");
    uint64_t seen = pending;
    if (won && co_cas(&mine->value, &seen, ref | (uint64_t)KVP_ENTRY_COMMITTED << 62))
        return 1;
    co_store(&mine->value, 0);
    unspill(pool, key, at);
    return 0;
}

int kvp_directory_enter(kvp_pool *pool, const struct kvp_key *key, uint64_t ref)
{
    uint64_t at;

    for (struct kvp_entry *empty; (empty = place(pool, key, &at));) {
        uint64_t none = 0;
        if (is_far(pool, key, at))
            announce_spill(pool, key, at);
        if (co_cas(&empty->value, &none, ref | (uint64_t)KVP_ENTRY_PENDING << 62)) {
            co_store(&empty->tag, key->high);
            /* Killed before this: a PENDING entry under no key, until the block is forgotten. */
            co_store(&empty->value, ref | (uint64_t)KVP_ENTRY_COMMITTED << 62);
            return 1;
        }
        unspill(pool, key, at);
    }
    return 0;
}

static void forget_in(kvp_pool *pool, const struct kvp_key *key, uint64_t at, uint32_t block)
{
    struct kvp_entry *entry = home(pool, key, at);

    for (int j = 0; j < KVP_HOME_ENTRIES; j++) {
        /* Not by the entry's tag: a writer that died had perhaps not stored it yet. */
        uint64_t value = co_load(&entry[j].value);
        while (value != 0 && (uint32_t)value == block)
            if (co_cas(&entry[j].value, &value, 0)) {
                unspill(pool, key, at);
                break;
            }
    }
}

void kvp_directory_forget(kvp_pool *pool, uint32_t block)
{
    struct kvp_tag *tag = &pool->arena.class[kvp_block_class(block)].tags[kvp_block_number(block)];
    struct kvp_key key = {co_load(&tag->low), co_load(&tag->high)};

    if (key.low == 0 && key.high == 0)
        return;
    uint64_t homes = homes_of(pool, &key);
    for (uint64_t i = homes; i-- > 0;) /* the far ones first: unspill may hide them */
        forget_in(pool, &key, i, block);
    KVP_CRASH_POINT("forget.unlinked");
    /* Only now: a recovery of our recovery must still find the entries. */
    kvp_set_tag(&pool->arena, kvp_block_class(block), kvp_block_number(block), 0, 0);
}

int kvp_directory_names(const kvp_pool *pool, const struct kvp_key *key, uint64_t ref)
{
    uint64_t homes = homes_of(pool, key);

    for (uint64_t i = 0; i < homes; i++) {
        const struct kvp_entry *entry = home(pool, key, i);
        for (int j = 0; j < KVP_HOME_ENTRIES; j++)
            if ((co_load(&entry[j].value) & KVP_REF_MASK) == ref && co_load(&entry[j].tag) == key->high)
                return 1;
    }
    return 0;
}

void kvp_directory_settle(kvp_pool *pool, uint32_t block)
{
    struct kvp_class *class = &pool->arena.class[kvp_block_class(block)];
    struct kvp_tag *tag = &class->tags[kvp_block_number(block)];
    struct kvp_key key = {co_load(&tag->low), co_load(&tag->high)};
    uint64_t generation = kvp_word_generation(nc_load(&class->words[kvp_block_number(block)]));

    /* With many hosts a removal begins with what is known; else a scan that died was about to name it: the next one does. */
    if (KVP_MANY_HOSTS ? !kvp_is_unknown(pool, kvp_ref(block, generation))
                       : kvp_directory_names(pool, &key, kvp_ref(block, generation)))
        return;
    kvp_directory_forget(pool, block);
    kvp_set_tag(&pool->arena, kvp_block_class(block), kvp_block_number(block), 0, 0);
}

/* ---- checking ---- */

/* Is a LIVE block found under its tag? 1 yes or not LIVE, 0 no; *unlinked: it has no tag. */
static int is_findable(const kvp_pool *pool, uint32_t c, uint32_t number, int *unlinked)
{
    const struct kvp_class *class = &pool->arena.class[c];
    uint64_t word = nc_load(&class->words[number]);
    uint64_t ref = kvp_ref(kvp_block(c, number), kvp_word_generation(word));
    struct kvp_key key = {co_load(&class->tags[number].low), co_load(&class->tags[number].high)};

    if (!kvp_is_ours(&pool->arena, c, number))
        return *unlinked = 0, 1;
    *unlinked = kvp_word_state(word) == KVP_LIVE && key.low == 0 && key.high == 0;
    return kvp_word_state(word) != KVP_LIVE || *unlinked || kvp_directory_names(pool, &key, ref) ||
           !tag_is(pool, (uint32_t)ref, &key) || nc_load(&class->words[number]) != word;
}

static void check_block(const kvp_pool *pool, uint32_t c, uint32_t number, struct kvp_check *check)
{
    int unlinked, findable = is_findable(pool, c, number, &unlinked);

    for (int again = 0; !findable && kvp_check_patience(check, again); again++)
        findable = is_findable(pool, c, number, &unlinked);
    check->unlinked += (uint64_t)unlinked;
    if (!findable)
        kvp_check_fail(check, kvp_block(c, number), "class %u, block %u: readable, but no entry names it", c, number);
}

/* May an entry name this publication now? One load of the word, so that the answer is of one moment. */
static int may_be_named(const kvp_pool *pool, uint64_t ref, uint64_t word)
{
    const struct kvp_arena *arena = &pool->arena;
    enum kvp_state state = kvp_word_state(word);

    if (state == KVP_LIVE)
        return kvp_ref((uint32_t)ref, kvp_word_generation(word)) == ref;
    if (KVP_MANY_HOSTS && !kvp_is_ours(arena, kvp_block_class((uint32_t)ref), kvp_block_number((uint32_t)ref)))
        return kvp_ref((uint32_t)ref, kvp_word_generation(word)) == ref; /* ended: a hint that nobody believes any more */
    /* Not yet published, or evicted and not yet forgotten. */
    return (state == KVP_OWN || state == KVP_EVICTING) && kvp_word_who(word) < arena->layout.workers &&
           !kvp_worker_dead(&arena->slots[kvp_word_who(word)]);
}

/* NULL, or what is wrong with an entry. The value is read again last: an entry that is still there was there all the
 * time, and a worker takes its entries away before it lets a block go. */
static const char *entry_problem(const kvp_pool *pool, const struct kvp_entry *entry)
{
    uint64_t value = co_load(&entry->value), ref = value & KVP_REF_MASK;
    uint32_t c = kvp_block_class((uint32_t)ref);
    const char *problem = NULL;

    if (value == 0)
        return NULL;
    if (!block_exists(pool, ref))
        return "an entry names a block that does not exist";
    const struct kvp_tag *tag = &pool->arena.class[c].tags[kvp_block_number((uint32_t)ref)];
    struct kvp_key key = {co_load(&tag->low), co_load(&tag->high)};
    uint64_t word = kvp_known_word(&pool->arena, c, kvp_block_number((uint32_t)ref));
    if (!may_be_named(pool, ref, word) && entry_state(value) != KVP_ENTRY_ABORTED)
        problem = "an entry names a block that is not published";
    else if (kvp_word_state(word) == KVP_LIVE && entry_state(value) == KVP_ENTRY_COMMITTED && co_load(&entry->tag) != key.high)
        problem = "the entry of a block has another key";
    else if (!KVP_MANY_HOSTS && kvp_word_state(word) == KVP_LIVE && kvp_directory_look(pool, c, &key, 0) != ref)
        problem = "the key of a block finds another one";
    return co_load(&entry->value) == value ? problem : NULL;
}

static void check_entry(const kvp_pool *pool, const struct kvp_entry *entry, struct kvp_check *check)
{
    const char *problem = entry_problem(pool, entry);

    for (int again = 0; problem && kvp_check_patience(check, again); again++)
        problem = entry_problem(pool, entry);
    uint64_t value = co_load(&entry->value);
    uint32_t block = (uint32_t)value;
    check->entries += value != 0;
    if (problem)
        kvp_check_fail(check, block, "class %u, block %u: %s (%#llx)", kvp_block_class(block), kvp_block_number(block), problem,
                       (unsigned long long)value);
}

void kvp_directory_check(kvp_pool *pool, struct kvp_check *check)
{
    for (uint32_t c = 0; c < pool->arena.layout.classes; c++)
        for (uint32_t number = 0; number < pool->arena.class[c].blocks; number++)
            check_block(pool, c, number, check);
    for (uint64_t i = 0; i < pool->homes * KVP_HOME_ENTRIES; i++)
        check_entry(pool, &pool->directory[i], check);
}
