/* find.c -- many keys at once, as fast as the memory gives their lines. */
#include "native/homes.h"

enum { AHEAD = 16 };

uint64_t kvp_directory_look(const kvp_pool *pool, uint32_t c, const struct kvp_key *key, uint64_t from)
{
    uint64_t homes = homes_of(pool, key);

    for (uint64_t i = from; i < homes; i++) {
        const struct kvp_entry *entry = home(pool, key, i);
        for (int j = 0; j < KVP_HOME_ENTRIES; j++) {
            if (co_load(&entry[j].tag) != key->high)
                continue;
            uint64_t ref = co_load(&entry[j].value) & KVP_REF_MASK;
            if (kvp_block_class((uint32_t)ref) == c && stands(pool, ref, key))
                return ref;
        }
    }
    return 0;
}

/* A search for many keys goes by groups, whose keys share two homes, and in four stages, so that no load waits for the one
 * before it: the first home's lines, the second's, guesses in them and the lines of the blocks' words and tags, and the
 * verification. Each stage is AHEAD keys before the next. */
struct group {
    const struct kvp_entry *home[KVP_GROUP_HOMES];
    const struct kvp_entry *start; /* where its first key is in the first home; NULL: not there */
    uint32_t first;            /* key of this call */
};

struct search {
    const kvp_pool *pool;
    const struct kvp_class *class;
    const void *keys;
    uint64_t *refs;
    uint32_t n, block0;        /* how many keys; block 0 of the class */
    uint32_t asked, opened, guessed; /* keys that have passed a stage; of groups: ring positions */
    uint32_t asked_group, opened_group, guessed_group;
    const struct kvp_entry *last; /* of the last guess */
    struct group ring[4 * AHEAD];
};

static inline struct group *group_at(struct search *search, uint32_t i)
{
    return &search->ring[i % (4 * AHEAD)];
}

static inline void prefetch_entries(const struct kvp_entry *entry)
{
    for (int j = 0; j < KVP_HOME_ENTRIES; j += KVP_LINE / sizeof *entry)
        kvp_prefetch(entry + j);
}

void kvp_directory_ask(const kvp_pool *pool, const void *key)
{
    struct kvp_key first = kvp_key_at(key, 0);

    prefetch_entries(home(pool, &first, 0));
}

/* First stage: find where the next group ends, and ask for its home. */
static inline void ask_group(struct search *search)
{
    struct group *group = group_at(search, search->asked_group++);
    struct kvp_key key = kvp_key_at(search->keys, search->asked);

    group->first = search->asked;
    group->home[0] = home(search->pool, &key, 0);
    group->home[1] = home(search->pool, &key, 1);
    prefetch_entries(group->home[0]);
    do
        search->asked++;
    while (search->asked < search->n && (uint32_t)kvp_key_at(search->keys, search->asked).low == (uint32_t)key.low);
}

static inline const struct kvp_entry *tag_in(const struct kvp_entry *entry, uint64_t tag)
{
    for (int j = 0; j < KVP_HOME_ENTRIES; j++)
        if (co_load_relaxed(&entry[j].tag) == tag)
            return &entry[j];
    return NULL;
}

/* Second stage: where a group is not in its first home, it mostly is in the second. */
static inline void open_group(struct search *search)
{
    struct group *group = group_at(search, search->opened_group++);

    group->start = tag_in(group->home[0], kvp_key_at(search->keys, group->first).high);
    if (!group->start)
        prefetch_entries(group->home[1]);
    search->opened = search->opened_group == search->asked_group ? search->asked : group_at(search, search->opened_group)->first;
}

/* The entry that a group's homes offer, unverified; NULL if they have none. */
static const struct kvp_entry *guess(const struct group *group, uint64_t tag)
{
    const struct kvp_entry *first = tag_in(group->home[!group->start], tag); /* where the group's first key is */

    return first ? first : tag_in(group->home[group->start != NULL], tag);
}

static inline const void *known_of(const struct kvp_class *class, uint32_t number)
{
    return KVP_MANY_HOSTS ? (const void *)&class->known[number] : (const void *)&class->words[number];
}

static inline void guess_key(struct search *search, const struct group *group, uint32_t i)
{
    struct kvp_key key = kvp_key_at(search->keys, i);
    const struct kvp_entry *entry = i == group->first ? group->start : search->last;

    /* Most likely it stands after the one before: a chain is entered in order. */
    if (!entry || co_load_relaxed(&entry->tag) != key.high)
        entry = guess(group, key.high);
    search->refs[i] = entry ? co_load_relaxed(&entry->value) & KVP_REF_MASK : 0;
    if (entry && !search->refs[i])
        search->refs[i] = KVP_REF_MASK; /* an entry that was withdrawn keeps its tag: the right one may stand behind it */
    if (!entry)
        prefetch_entries(home(search->pool, &key, KVP_GROUP_HOMES));
    search->last = entry && (entry + 1 - search->pool->directory) % KVP_HOME_ENTRIES ? entry + 1 : NULL;
    uint32_t number = kvp_block_number((uint32_t)search->refs[i]);
    kvp_prefetch(known_of(search->class, number)); /* of any number: a prefetch does not fault */
    kvp_prefetch(&search->class->tags[number]);
}

/* Third stage. */
static inline void guess_group(struct search *search)
{
    const struct group *group = group_at(search, search->guessed_group++);
    uint32_t end = search->guessed_group == search->asked_group ? search->asked : group_at(search, search->guessed_group)->first;

    for (; search->guessed < end; search->guessed++)
        guess_key(search, group, search->guessed);
}

/* Is the guess right? As `stands`. */
static inline int holds(const struct search *search, uint64_t ref, const struct kvp_key *key)
{
    uint32_t number = (uint32_t)ref - search->block0;

    if (number >= search->class->blocks)
        return 0;
    uint64_t word = KVP_MANY_HOSTS ? co_load(&search->class->known[number]) : nc_load(&search->class->words[number]);
    return kvp_word_shows(word, ref) && co_load(&search->class->tags[number].low) == key->low &&
           co_load(&search->class->tags[number].high) == key->high;
}

/* Last stage: the guess, or what a thorough search finds; 0 if the key is not there. */
static inline uint64_t verify_key(const struct search *search, uint32_t c, uint32_t i)
{
    struct kvp_key key = kvp_key_at(search->keys, i);
    uint64_t ref = search->refs[i];

    if (ref && holds(search, ref, &key))
        return ref;
    return search->refs[i] = kvp_directory_look(search->pool, c, &key, ref ? 0 : KVP_GROUP_HOMES);
}

uint32_t kvp_directory_find(const kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, int prefix, uint64_t *refs)
{
    struct search search;
    uint32_t found = 0;

    search.pool = pool, search.class = &pool->arena.class[c], search.keys = keys, search.refs = refs;
    search.n = n, search.block0 = kvp_block(c, 0), search.last = NULL;
    search.asked = search.opened = search.guessed = search.asked_group = search.opened_group = search.guessed_group = 0;
    for (uint32_t done = 0; done < n;) {
        while (search.asked < n && search.asked < done + 3 * AHEAD)
            ask_group(&search);
        while (search.opened < search.asked && search.opened < done + 2 * AHEAD)
            open_group(&search);
        while (search.guessed < search.opened && search.guessed < done + AHEAD)
            guess_group(&search);
        for (uint32_t end = done + GROUP < search.guessed ? done + GROUP : search.guessed; done < end; done++)
            if (verify_key(&search, c, done))
                found++;
            else if (prefix)
                return found;
    }
    return found;
}
