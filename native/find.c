/* find.c -- many keys at once, as fast as the memory gives their lines. */
#include "native/homes.h"

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
 * verification. A batch of groups passes a stage, then the batch behind it: asking in bursts keeps more lines under way than
 * group by group. A chain is entered in order, so that a group's entries mostly are neighbours, and then its keys are compared
 * without a branch; what differs is searched key by key. */
struct group {
    const struct kvp_entry *home[KVP_GROUP_HOMES];
    uint32_t place[KVP_GROUP_HOMES]; /* where in them it would begin first */
    const struct kvp_entry *start; /* where its first key is; NULL: not in its homes */
    uint32_t first, n;             /* keys of this call */
    enum { APART, ROW, RUN } form; /* its entries do not stand in order; they do; and they name neighbouring blocks of one age */
};

enum { STAGES = 4, BATCH = 3 }; /* groups: with more, the lines asked for at once are more than a core waits for */

struct batch {
    uint32_t count;
    struct group group[BATCH];
};

struct search {
    const kvp_pool *pool;
    const struct kvp_class *class;
    const void *keys;
    uint64_t *refs;
    uint32_t c, n, block0;             /* the class; how many keys; block 0 of the class */
    uint32_t asked;                    /* keys that belong to a group */
    struct batch batch[STAGES];        /* one at each stage */
};

/* Ask for half a home: a group's entries. */
static inline void prefetch_group(const struct kvp_entry *entry)
{
    for (int j = 0; j < GROUP; j += KVP_LINE / sizeof *entry)
        kvp_prefetch(entry + j);
}

void kvp_directory_ask(const kvp_pool *pool, const void *key)
{
    struct kvp_key first = kvp_key_at(key, 0);

    prefetch_group(home(pool, &first, 0) + first_place(&first, 0));
}

/* First stage: find where the next group ends, and ask for its home. */
static inline void ask(struct search *search, struct group *group)
{
    struct kvp_key key = kvp_key_at(search->keys, search->asked);
    uint32_t end = search->asked + 1, most = search->n - search->asked < GROUP ? search->n : search->asked + GROUP;

    while (end < most && (uint32_t)kvp_key_at(search->keys, end).low == (uint32_t)key.low)
        end++;
    group->first = search->asked;
    group->n = end - search->asked;
    for (int i = 0; i < KVP_GROUP_HOMES; i++) {
        group->home[i] = home(search->pool, &key, i);
        group->place[i] = first_place(&key, i);
    }
    prefetch_group(group->home[0] + group->place[0]);
    search->asked = end;
}

/* Second stage: a group that does not begin where it would first is in the other half of that home, or in the second. */
static inline void open_group(const struct search *search, struct group *group)
{
    const struct kvp_entry *first = group->home[0] + group->place[0];

    group->start = co_load_relaxed(&first->tag) == kvp_key_at(search->keys, group->first).high ? first : NULL;
    if (group->start)
        return;
    prefetch_group(group->home[0] + (group->place[0] ^ GROUP));
    prefetch_group(group->home[1] + group->place[1]);
}

static inline const void *known_of(const struct kvp_class *class, uint32_t number)
{
    return KVP_MANY_HOSTS ? (const void *)&class->known[number] : (const void *)&class->words[number];
}

static inline void prefetch_block(const struct kvp_class *class, uint64_t ref)
{
    uint32_t number = kvp_block_number((uint32_t)ref); /* of any reference: a prefetch does not fault */

    kvp_prefetch(known_of(class, number));
    kvp_prefetch(&class->tags[number]);
}

/* What an entry offers; one that was withdrawn keeps its tag, and the right one may stand behind it. */
static inline uint64_t offered(const struct kvp_entry *entry)
{
    uint64_t ref = co_load_relaxed(&entry->value) & KVP_REF_MASK;

    return ref ? ref : KVP_REF_MASK;
}

static inline const struct kvp_entry *tag_in(const struct kvp_entry *entry, uint64_t tag)
{
    for (int j = 0; j < KVP_HOME_ENTRIES; j++)
        if (co_load_relaxed(&entry[j].tag) == tag)
            return &entry[j];
    return NULL;
}

/* Where a group begins that does not begin where it would first: likely places before all. */
static const struct kvp_entry *start_of(const struct group *group, uint64_t tag)
{
    const struct kvp_entry *other = group->home[0] + (group->place[0] ^ GROUP), *second = group->home[1] + group->place[1];

    if (co_load_relaxed(&other->tag) == tag)
        return other;
    if (co_load_relaxed(&second->tag) == tag)
        return second;
    const struct kvp_entry *entry = tag_in(group->home[0], tag);
    return entry ? entry : tag_in(group->home[1], tag);
}

/* Third stage for a group that does not stand as it was entered: key by key; 0 if the homes offer nothing. */
static void guess_each(const struct search *search, const struct group *group)
{
    for (uint32_t i = group->first; i < group->first + group->n; i++) {
        struct kvp_key key = kvp_key_at(search->keys, i);
        const struct kvp_entry *entry = tag_in(group->home[0], key.high);
        if (!entry)
            entry = tag_in(group->home[1], key.high);
        search->refs[i] = entry ? offered(entry) : 0;
        if (entry)
            prefetch_block(search->class, search->refs[i]);
        else
            prefetch_group(home(search->pool, &key, KVP_GROUP_HOMES));
    }
}

/* If the entries from the start on, around the end of their home, have the tags of the group's keys, their references are the
 * guess. */
static inline int guess_row(const struct search *search, const struct group *group)
{
    uint64_t *refs = search->refs + group->first, differ = 0, run = 0;
    uint64_t at = (uint64_t)(group->start - search->pool->directory);

    for (uint32_t j = 0; j < group->n; j++, at = (at & ~(KVP_HOME_ENTRIES - 1ull)) | ((at + 1) % KVP_HOME_ENTRIES)) {
        const struct kvp_entry *entry = search->pool->directory + at;
        differ |= co_load_relaxed(&entry->tag) ^ kvp_key_at(search->keys, group->first + j).high;
        refs[j] = offered(entry);
        run |= refs[j] ^ (refs[0] + j);
    }
    return differ ? APART : run ? ROW : RUN;
}

/* Third stage. */
static inline void guess(const struct search *search, struct group *group)
{
    uint64_t *refs = search->refs + group->first;

    if (!group->start)
        group->start = start_of(group, kvp_key_at(search->keys, group->first).high);
    group->form = group->start ? guess_row(search, group) : APART;
    if (group->form == APART) {
        guess_each(search, group);
        return;
    }
    uint32_t step = group->form == RUN ? KVP_LINE / (uint32_t)sizeof *search->class->tags : 1;
    for (uint32_t j = 0; j < group->n; j += step)
        prefetch_block(search->class, refs[j]);
    prefetch_block(search->class, refs[group->n - 1]);
}

static inline uint64_t known_word(const struct kvp_class *class, uint32_t number)
{
    return KVP_MANY_HOSTS ? co_load(&class->known[number]) : nc_load(&class->words[number]);
}

/* Is the guess right? As `stands`. */
static inline int holds(const struct search *search, uint64_t ref, const struct kvp_key *key)
{
    uint32_t number = (uint32_t)ref - search->block0;

    return number < search->class->blocks && kvp_word_shows(known_word(search->class, number), ref) &&
           co_load(&search->class->tags[number].low) == key->low && co_load(&search->class->tags[number].high) == key->high;
}

/* The same for a run of blocks, all at once. The words first: a tag counts if it is read after its word was LIVE. */
static inline int holds_run(const struct search *search, const struct group *group)
{
    uint64_t ref = search->refs[group->first], differ = 0;
    uint32_t number = (uint32_t)ref - search->block0;
    const struct kvp_tag *tag = search->class->tags + number;

    if (number >= search->class->blocks || search->class->blocks - number < group->n)
        return 0;
    for (uint32_t j = 0; j < group->n; j++)
        differ |= !kvp_word_shows(known_word(search->class, number + j), ref);
    for (uint32_t j = 0; j < group->n; j++) {
        struct kvp_key key = kvp_key_at(search->keys, group->first + j);
        differ |= (co_load(&tag[j].low) ^ key.low) | (co_load(&tag[j].high) ^ key.high);
    }
    return differ == 0;
}

/* Last stage: the guesses, or what a thorough search finds; 0 if a key is not there. How many are, up to the first that is
 * not if `prefix`. */
static inline uint32_t verify(const struct search *search, const struct group *group, int prefix)
{
    uint32_t found = 0;

    if (group->form == RUN && holds_run(search, group))
        return group->n;
    for (uint32_t i = group->first; i < group->first + group->n; i++) {
        struct kvp_key key = kvp_key_at(search->keys, i);
        uint64_t *ref = &search->refs[i];
        if (!*ref || !holds(search, *ref, &key))
            *ref = kvp_directory_look(search->pool, search->c, &key, *ref ? 0 : KVP_GROUP_HOMES);
        if (*ref)
            found++;
        else if (prefix)
            break;
    }
    return found;
}

static void ask_batch(struct search *search, struct batch *batch)
{
    for (batch->count = 0; batch->count < BATCH && search->asked < search->n; batch->count++)
        ask(search, &batch->group[batch->count]);
}

static uint32_t verify_batch(const struct search *search, const struct batch *batch, int prefix, int *is_over)
{
    uint32_t found = 0;

    for (uint32_t i = 0; i < batch->count && !*is_over; i++) {
        uint32_t there = verify(search, &batch->group[i], prefix);
        *is_over = prefix && there < batch->group[i].n;
        found += there;
    }
    return found;
}

uint32_t kvp_directory_find(const kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, int prefix, uint64_t *refs)
{
    struct search search;
    uint32_t found = 0;

    search.pool = pool, search.class = &pool->arena.class[c], search.keys = keys, search.refs = refs;
    search.c = c, search.n = n, search.block0 = kvp_block(c, 0), search.asked = 0;
    for (uint32_t i = 0; i < STAGES; i++)
        search.batch[i].count = 0;
    for (int is_over = 0, turn = 0; !is_over; turn++) {
        struct batch *asked = &search.batch[turn % STAGES], *opened = &search.batch[(turn + 3) % STAGES];
        struct batch *guessed = &search.batch[(turn + 2) % STAGES], *verified = &search.batch[(turn + 1) % STAGES];
        ask_batch(&search, asked);
        for (uint32_t i = 0; i < opened->count; i++)
            open_group(&search, &opened->group[i]);
        for (uint32_t i = 0; i < guessed->count; i++)
            guess(&search, &guessed->group[i]);
        found += verify_batch(&search, verified, prefix, &is_over);
        if (!asked->count && !opened->count && !guessed->count)
            break;
    }
    return found;
}
