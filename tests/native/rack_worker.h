/* rack_worker.h -- a worker process of the rack: verbs at random, each byte that it reads verified, and orders. */
#ifndef KVP_TEST_RACK_WORKER_H
#define KVP_TEST_RACK_WORKER_H
#include "tests/native/rack.h"

#include <signal.h>
#include <sys/prctl.h>

enum { HELD_MAX = 12, CHAIN_MAX = 4, TRIES = 2000, PAUSE_US = 2000 };

static kvp_pool *pool;
static struct seat *seat;
static uint32_t my_host;
static uint64_t chance;
static struct {
    uint64_t ref, id;
} held[HELD_MAX];
static uint32_t held_count;

static uint64_t draw(uint64_t n) { return draw_from(&chance, n); }
static uint64_t draw_id(void) { return draw(rack->is_roomy ? FEW_IDS : IDS); }
static void *block_bytes(uint32_t block) { return kvp_block_data(&pool->arena, block); }
/* The n-th key after one, of its class. */
static uint64_t next_id(uint64_t id, uint32_t n) { return (id + n * rack->classes) % IDS; }

static void visit(const char *name)
{
    if (strcmp(name, "evict.locked") == 0)
        shared_add(&rack->evictions, 1);
    for (int i = 0; i < NAMES; i++) {
        const char *seen = shared_load(&rack->names[i]);
        if (seen == name || (!seen && __atomic_compare_exchange_n(&rack->names[i], &seen, name, 0, __ATOMIC_ACQ_REL,
                                                                  __ATOMIC_ACQUIRE)))
            return;
    }
}

/* Half of the deaths come after any few points, half at one that was drawn by name: some are passed seldom. */
static void arm(void)
{
    const char *name = rack->names[draw(NAMES)];

    if (!rack->crash_odds || draw(rack->crash_odds))
        return;
    seat->armed++;
    if (name && draw(2))
        kvp_crash_arm(name, 1 + draw(3));
    else
        kvp_crash_arm("", 1 + draw(60));
}

/* ---- verbs ---- */

static void require_right(uint64_t ref, uint64_t id, const char *when)
{
    struct kvp_key key = key_of(id);
    const uint64_t *words = block_bytes((uint32_t)ref);

    for (uint64_t i = 0; i < stride_of(class_of(id)) / 8; i++)
        REQUIRE(words[i] == payload_word(&key, i), "key %llu, reference %#llx, word %llu is %#llx %s (word of the block %#llx)",
                (unsigned long long)id, (unsigned long long)ref, (unsigned long long)i, (unsigned long long)words[i], when,
                (unsigned long long)nc_load(&pool->arena.class[class_of(id)].words[kvp_block_number((uint32_t)ref)]));
    seat->verified++;
}

static void confirm(uint64_t id) { shared_store(&rack->must[id], rack->round); }

static void put(void)
{
    uint64_t id = draw_id();
    int64_t stored = put_one(pool, class_of(id), id);

    REQUIRE(stored >= 0 || stored == KVP_E_FULL, "put answers %lld", (long long)stored);
    if (stored == 1)
        confirm(id);
}

/* What was there before the right bytes must never be seen. */
static void fill_with_noise(uint32_t c, uint32_t number)
{
    memset(block_bytes(kvp_block(c, number)), (int)(0x80 | draw(128)), stride_of(c));
}

static void fill(void)
{
    uint32_t n = 1 + (uint32_t)draw(CHAIN_MAX), numbers[CHAIN_MAX];
    uint64_t id = draw_id(), refs[CHAIN_MAX];
    struct kvp_key keys[CHAIN_MAX];
    uint32_t c = class_of(id);
    int status = kvp_reserve(pool, c, n, numbers);

    REQUIRE(status == KVP_OK || status == KVP_E_FULL, "reserve answers %d", status);
    if (status)
        return;
    for (uint32_t i = 0; i < n; i++)
        fill_with_noise(c, numbers[i]);
    if (draw(6) == 0) {
        REQUIRE(kvp_withdraw(pool, c, numbers, n) == KVP_OK, "withdraw");
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = key_of(next_id(id, i));
        payload_write(block_bytes(kvp_block(c, numbers[i])), &keys[i], stride_of(c));
    }
    int64_t published = kvp_publish(pool, c, numbers, keys, n, refs);
    REQUIRE(published >= 0, "publish answers %lld", (long long)published);
    for (uint32_t i = 0; i < n; i++)
        if (refs[i])
            confirm(next_id(id, i));
}

static void match(void)
{
    uint32_t n = 1 + (uint32_t)draw(CHAIN_MAX);
    uint64_t id = draw_id(), refs[CHAIN_MAX];
    struct kvp_key keys[CHAIN_MAX];

    for (uint32_t i = 0; i < n; i++)
        keys[i] = key_of(next_id(id, i));
    int64_t matched = kvp_match(pool, class_of(id), keys, n, refs);
    REQUIRE(matched >= 0, "match answers %lld", (long long)matched);
    for (int look = 0; look < 2; look++) {
        for (uint32_t i = 0; i < matched; i++)
            require_right(refs[i], next_id(id, i), look ? "still under the pin" : "under a pin");
        if (matched && !look)
            usleep((useconds_t)draw(500));
    }
    for (uint32_t i = 0; i < matched; i++)
        if (held_count < HELD_MAX && draw(4) == 0) {
            held[held_count].ref = refs[i];
            held[held_count++].id = next_id(id, i);
            refs[i] = 0;
        }
    REQUIRE(kvp_unpin_refs(pool, refs, n) == KVP_OK, "unpin");
}

static void let_go(void)
{
    if (!held_count)
        return;
    uint32_t i = (uint32_t)draw(held_count);
    require_right(held[i].ref, held[i].id, "after a long pin");
    REQUIRE(kvp_unpin_refs(pool, &held[i].ref, 1) == KVP_OK, "unpin");
    held[i] = held[--held_count];
}

static void copy_out(void)
{
    uint8_t copies[CHAIN_MAX][STRIDE_MAX], got[CHAIN_MAX];
    struct kvp_key keys[CHAIN_MAX];
    void *to[CHAIN_MAX];
    uint64_t id = draw_id(), bytes = stride_of(class_of(id));

    for (uint32_t i = 0; i < CHAIN_MAX; i++)
        keys[i] = key_of(next_id(id, 3 * i)), to[i] = copies[i];
    int64_t n = kvp_read(pool, class_of(id), keys, CHAIN_MAX, to, bytes, got);
    REQUIRE(n >= 0, "read answers %lld", (long long)n);
    for (int i = 0; i < CHAIN_MAX; i++) {
        REQUIRE(!got[i] || payload_is(copies[i], &keys[i], bytes), "a copy has wrong bytes");
        seat->verified += got[i];
    }
}

static void shrink(void) { REQUIRE(kvp_shrink(pool, (uint32_t)draw(rack->classes), 1 + (uint32_t)draw(8)) >= 0, "shrink"); }

static void remove_some(void)
{
    uint64_t id = draw_id();
    struct kvp_key keys[2] = {key_of(id), key_of(next_id(id, 5))};

    REQUIRE(kvp_remove(pool, class_of(id), keys, 2) >= 0, "remove");
}

static void give(void)
{
    uint32_t to = (my_host + 1 + (uint32_t)draw(HOSTS - 1)) % HOSTS;

    if (kvp_owned(&pool->arena) * HOSTS > rack->segments / 4)
        REQUIRE(kvp_pool_give(pool, to, 1 + (uint32_t)draw(2)) >= 0, "give");
}

static void take_back(void) { REQUIRE(kvp_pool_revoke(pool) >= 0, "revoke"); }
static void follow(void) { REQUIRE(kvp_pool_follow(pool) >= 0, "follow"); }

static void look_up(void)
{
    struct kvp_key keys[16];
    uint64_t refs[16];

    uint32_t c = (uint32_t)draw(rack->classes);

    for (int i = 0; i < 16; i++)
        keys[i] = key_of(draw_id());
    REQUIRE(kvp_lookup(pool, c, keys, 16, refs) >= 0 && kvp_touch(pool, c, keys, 16) >= 0, "lookup");
}

/* On a pool in use: what live workers are in the middle of is no problem, and what the dead left may still be there. */
static void check(void)
{
    struct kvp_check found;

    REQUIRE(kvp_pool_check(pool, &found) == KVP_OK, "check");
}

static void (*const verbs[VERBS])(void) = {put, fill, match, let_go, copy_out, shrink, remove_some, give, take_back, follow,
                                           look_up, check};

static void do_verb(void)
{
    uint64_t left = draw(rack->weights);
    uint32_t verb = 0;

    while (left >= rack->weight[verb])
        left -= rack->weight[verb++];
    arm();
    shared_store(&seat->doing, verb);
    verbs[verb]();
    seat->count[verb]++;
}

/* ---- orders ---- */

static void be_quiet(void)
{
    kvp_crash_arm("", 0);
    while (held_count)
        let_go();
    kvp_lock(pool);
    kvp_spill(&pool->arena);
    kvp_unlock(pool);
}

static int64_t settle(void)
{
    struct standing *mine = &rack->standing[my_host];

    take_back();
    follow();
    mine->moving = mine->dead = 0;
    for (uint32_t s = 0; s < pool->arena.layout.segments; s++) {
        enum kvp_segment_state state = kvp_segment_state(co_load(&pool->arena.segments[s]));
        mine->is_ours[s] = state <= KVP_SEGMENT_DRAINING;
        mine->moving += state == KVP_SEGMENT_MOVING || state == KVP_SEGMENT_OFFERED || state == KVP_SEGMENT_ADOPTING ||
                        state == KVP_SEGMENT_DRAINING;
    }
    mine->moving += co_load(&pool->arena.head->asked) != 0; /* removals that other hosts still owe us */
    for (uint32_t w = 0; w < SLOTS; w++)
        mine->dead += (uint32_t)kvp_worker_dead(&pool->arena.slots[w]);
    return kvp_owned(&pool->arena);
}

static void note_block(uint32_t c, uint32_t number)
{
    const struct kvp_class *class = &pool->arena.class[c];
    uint64_t word = nc_load(&class->words[number]);
    struct noted *noted = &rack->noted[c][number];

    if (!kvp_is_ours(&pool->arena, c, number))
        return;
    shared_add(&noted->owners, 1ull << my_host);
    noted->key = (struct kvp_key){co_load(&class->tags[number].low), co_load(&class->tags[number].high)};
    noted->ref = kvp_word_state(word) == KVP_LIVE ? kvp_ref(kvp_block(c, number), kvp_word_generation(word)) : 0;
}

static int64_t look(void)
{
    struct standing *mine = &rack->standing[my_host];
    struct kvp_check found;

    /* What a keeper has removed for another host lies in its magazine for a tick. */
    for (int tries = 0; tries < TRIES; tries++) {
        REQUIRE(kvp_pool_check(pool, &found) == KVP_OK, "check refused");
        if (!(found.states[KVP_CACHED] + found.states[KVP_OWN] + found.states[KVP_EVICTING]))
            break;
        usleep(PAUSE_US);
    }
    REQUIRE(found.problems == 0, "host %u: %llu problems, first: %s", my_host, (unsigned long long)found.problems, found.first);
    REQUIRE(found.leaked == 0 && found.pins == 0, "host %u: %llu leaked, %llu pins", my_host, (unsigned long long)found.leaked,
            (unsigned long long)found.pins);
    memcpy(mine->states, found.states, sizeof mine->states);
    REQUIRE(!found.states[KVP_CACHED] && !found.states[KVP_OWN] && !found.states[KVP_EVICTING],
            "host %u: in a quiet pool %llu blocks are CACHED, %llu OWN, %llu EVICTING", my_host,
            (unsigned long long)found.states[KVP_CACHED], (unsigned long long)found.states[KVP_OWN],
            (unsigned long long)found.states[KVP_EVICTING]);
    for (uint32_t c = 0; c < rack->classes; c++)
        for (uint32_t number = 0; number < rack->blocks[c]; number++)
            note_block(c, number);
    REQUIRE(kvp_pool_line_counts(pool, &mine->lines) == (KVP_MODE == KVP_SIM ? KVP_OK : KVP_E_INVALID), "line counts");
    return (int64_t)found.states[KVP_LIVE];
}

/* Found, pinned and right. The first try may meet a copy that has gone: it is doubted, and the next one is found. */
static void find_one(uint32_t c, uint32_t number, uint64_t id)
{
    struct kvp_key key = rack->noted[c][number].key;
    uint64_t ref = 0;

    for (int tries = 0; tries < COPIES && kvp_match(pool, c, &key, 1, &ref) != 1; tries++)
        if (tries >= HOSTS)
            follow();
    REQUIRE(ref, "host %u: key %llu, published as block %u (%#llx), is not found: known %#llx, word %#llx", my_host,
            (unsigned long long)id, number, (unsigned long long)rack->noted[c][number].ref,
            (unsigned long long)co_load(&pool->arena.class[c].known[number]),
            (unsigned long long)nc_load(&pool->arena.class[c].words[number]));
    require_right(ref, id, "in a quiet pool");
    REQUIRE(kvp_unpin_refs(pool, &ref, 1) == KVP_OK, "unpin");
}

static uint64_t id_of(const struct kvp_key *key)
{
    for (uint64_t id = 0; id < IDS; id++) {
        struct kvp_key known = key_of(id);
        if (known.low == key->low && known.high == key->high)
            return id;
    }
    REQUIRE(0, "a block has a name that nobody has given: %#llx %#llx", (unsigned long long)key->low,
            (unsigned long long)key->high);
    return 0;
}

static int64_t find_all(void)
{
    int64_t found = 0;

    follow();
    for (uint32_t i = 0; i < rack->classes * BLOCKS_MAX; i++) {
        const struct noted *noted = &rack->noted[i / BLOCKS_MAX][i % BLOCKS_MAX];
        if (!noted->ref || (!noted->key.low && !noted->key.high))
            continue;
        find_one(i / BLOCKS_MAX, i % BLOCKS_MAX, id_of(&noted->key));
        found++;
    }
    return found;
}

static int64_t evict_all(void)
{
    int64_t evicted = 0;

    for (uint32_t c = 0; c < rack->classes; c++)
        evicted += kvp_shrink(pool, c, UINT32_MAX);
    return evicted;
}

/* Every block of a class that this host may use can be had, and each once. */
static uint32_t use_class(uint32_t c)
{
    static uint32_t numbers[BLOCKS_MAX];
    uint8_t seen[BLOCKS_MAX] = {0};
    uint32_t n = 0;
    int status = KVP_E_FULL;

    for (uint32_t number = 0; number < rack->blocks[c]; number++)
        n += (uint32_t)kvp_is_ours(&pool->arena, c, number);
    /* What a keeper has removed for another host lies in its magazine for a tick. */
    for (int tries = 0; tries < TRIES && (status = kvp_reserve(pool, c, n, numbers)) == KVP_E_FULL; tries++)
        usleep(PAUSE_US);
    REQUIRE(status == KVP_OK, "host %u cannot have its %u blocks of class %u: %d", my_host, n, c, status);
    for (uint32_t i = 0; i < n; i++)
        REQUIRE(numbers[i] < rack->blocks[c] && !seen[numbers[i]]++, "block %u was given twice", numbers[i]);
    REQUIRE(kvp_withdraw(pool, c, numbers, n) == KVP_OK, "withdraw");
    kvp_lock(pool);
    kvp_spill(&pool->arena);
    kvp_unlock(pool);
    return n;
}

static int64_t use_all(void)
{
    int64_t used = 0;

    evict_all();
    for (uint32_t c = 0; c < rack->classes; c++)
        used += use_class(c);
    return used;
}

static int64_t fence(uint32_t lost)
{
    struct kvp_host_info info;

    follow();
    REQUIRE(kvp_pool_host(pool, lost, &info) == KVP_OK, "host");
    int64_t adopted = kvp_pool_fence(pool, lost, info.incarnation);
    REQUIRE(adopted >= 0 || adopted == KVP_E_BUSY, "fence of host %u in incarnation %llu answers %lld", lost,
            (unsigned long long)info.incarnation, (long long)adopted);
    return adopted;
}

static int64_t obey(enum order order, uint32_t argument)
{
    switch (order) {
    case ORDER_QUIET: be_quiet(); return 0;
    case ORDER_EMPTY: return evict_all();
    case ORDER_GIVE: return kvp_pool_give(pool, argument & 255, argument >> 8);
    case ORDER_SETTLE: return settle();
    case ORDER_LOOK: return look();
    case ORDER_FIND: return find_all();
    case ORDER_USE: return use_all();
    case ORDER_FENCE: return fence(argument);
    case ORDER_LEAVE: kvp_pool_free(pool); return 0;
    default: return 0;
    }
}

/* 1 if there was an order. */
static int take_order(int *quiet)
{
    uint32_t serial = shared_load(&seat->serial), order = shared_load(&seat->order);

    if (serial == seat->done)
        return 0;
    shared_store(&seat->doing, VERBS + order);
    seat->answer = obey((enum order)order, seat->argument);
    if (order == ORDER_QUIET || order == ORDER_RUN)
        *quiet = order == ORDER_QUIET;
    shared_store(&seat->done, serial);
    shared_add(&seat->progress, 1);
    if (order == ORDER_LEAVE)
        _exit(0);
    return 1;
}

static void be_worker(uint32_t number, pid_t driver)
{
    int quiet = (int)rack->is_quiet;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != driver)
        _exit(1);
    seat = &rack->seats[number];
    my_host = number / WORKERS;
    chance = mix(rack->seed ^ mix(number + 1) ^ (uint64_t)seat->spawns << 32);
    kvp_crash_visit(visit);
    if (!quiet)
        arm();
    int status = kvp_pool_open(rack->uri, my_host, &pool);
    REQUIRE(status == KVP_OK, "host %u cannot open %s: %s", my_host, rack->uri, kvp_strerror(status));
    for (;;) {
        shared_add(&seat->progress, 1);
        if (take_order(&quiet))
            continue;
        if (quiet)
            usleep(PAUSE_US);
        else
            do_verb();
    }
}
#endif
