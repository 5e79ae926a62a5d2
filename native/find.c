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
static inline void ask(struct kvp_search *search, struct kvp_group *group)
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
static inline void open_group(const struct kvp_search *search, struct kvp_group *group)
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
static const struct kvp_entry *start_of(const struct kvp_group *group, uint64_t tag)
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
static void guess_each(const struct kvp_search *search, const struct kvp_group *group)
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
static inline int guess_row(const struct kvp_search *search, const struct kvp_group *group)
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
static inline void guess(const struct kvp_search *search, struct kvp_group *group)
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
static inline int holds(const struct kvp_search *search, uint64_t ref, const struct kvp_key *key)
{
    uint32_t number = (uint32_t)ref - search->block0;

    return number < search->class->blocks && kvp_word_shows(known_word(search->class, number), ref) &&
           co_load(&search->class->tags[number].low) == key->low && co_load(&search->class->tags[number].high) == key->high;
}

/* The same for a run of blocks, all at once. The words first: a tag counts if it is read after its word was LIVE. */
static inline int holds_run(const struct kvp_search *search, const struct kvp_group *group)
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
static inline uint32_t verify(const struct kvp_search *search, const struct kvp_group *group, int prefix)
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

static void ask_batch(struct kvp_search *search, struct kvp_batch *batch)
{
    for (batch->count = 0; batch->count < KVP_STAGE_GROUPS && search->asked < search->n; batch->count++)
        ask(search, &batch->group[batch->count]);
}

static void settle(struct kvp_search *search, const struct kvp_group *group)
{
    uint32_t there = verify(search, group, search->prefix);

    search->found += there;
    search->is_over = search->prefix && there < group->n;
}

/* The batch that comes to a stage at this turn. */
static inline struct kvp_batch *batch_of(struct kvp_search *search, uint32_t stage)
{
    return &search->batch[(search->turn - stage) % KVP_STAGES]; /* a power of two: turns may begin below 0 */
}

/* Each batch one stage further, and a new one at the first: 0 if there is none any more. The last two stages in turn: a group
 * whose blocks are scattered asks for more lines than a core waits for. */
static int advance(struct kvp_search *search)
{
    struct kvp_batch *asked = batch_of(search, 0), *opened = batch_of(search, 1);
    struct kvp_batch *guessed = batch_of(search, 2), *verified = batch_of(search, 3);

    search->turn++;
    ask_batch(search, asked);
    for (uint32_t i = 0; i < opened->count; i++)
        open_group(search, &opened->group[i]);
    for (uint32_t i = 0; i < KVP_STAGE_GROUPS; i++) {
        if (i < guessed->count)
            guess(search, &guessed->group[i]);
        if (i < verified->count && !search->is_over)
            settle(search, &verified->group[i]);
    }
    return !search->is_over && (asked->count || opened->count || guessed->count);
}

void kvp_search_begin(struct kvp_search *search, const kvp_pool *pool, uint32_t c, const void *keys, int prefix, uint64_t *refs)
{
    search->pool = pool, search->class = &pool->arena.class[c], search->keys = keys, search->refs = refs;
    search->c = c, search->block0 = kvp_block(c, 0), search->prefix = prefix;
    search->n = search->asked = search->found = search->turn = 0, search->is_over = 0;
    for (uint32_t i = 0; i < KVP_STAGES; i++)
        search->batch[i].count = 0;
}

void kvp_search_more(struct kvp_search *search, uint32_t n)
{
    search->n = n;
    while (!search->is_over && search->n - search->asked >= KVP_STAGE_GROUPS * GROUP)
        advance(search);
}

uint32_t kvp_search_end(struct kvp_search *search)
{
    while (!search->is_over && advance(search))
        ;
    return search->found;
}

uint32_t kvp_directory_find(const kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, int prefix, uint64_t *refs)
{
    struct kvp_search search;

    kvp_search_begin(&search, pool, c, keys, prefix, refs);
    search.n = n;
    return kvp_search_end(&search);
}
