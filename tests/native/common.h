/* common.h -- what the native tests share: keys and payloads that follow from a number, and a loud REQUIRE. */
#ifndef KVP_TEST_COMMON_H
#define KVP_TEST_COMMON_H
#include "native/handle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Where a failure happened, for its replay: each test keeps it up to date. */
static char replay[256] = "";

#define REQUIRE(condition, ...)                                                                        \
    do {                                                                                               \
        if (!(condition)) {                                                                            \
            fprintf(stderr, "%s:%d: FAILED: %s: ", __FILE__, __LINE__, #condition);                    \
            fprintf(stderr, __VA_ARGS__);                                                              \
            fprintf(stderr, "\n  kvpool says: %s\n  replay: %s\n", kvp_error_detail(), replay);        \
            _exit(1);                                                                                  \
        }                                                                                              \
    } while (0)

static inline uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

/* Numbers that follow each other share a group, as siblings in a prefix tree do. So many that in the small pools of these tests
 * some have to stand beyond the homes of their group. */
enum { SIBLINGS = 32 };

static inline struct kvp_key key_of(uint64_t id)
{
    return (struct kvp_key){(mix(id / SIBLINGS + 1) & UINT32_MAX) | mix(id + 77) << 32, mix(id + 1000003)};
}

static inline uint64_t payload_word(const struct kvp_key *key, uint64_t i)
{
    return key->high + i * 0x9e3779b97f4a7c15u;
}

/* Plain stores and loads on purpose: what orders them is the library's business, and TSan watches it. */
static inline void payload_write(void *to, const struct kvp_key *key, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes / 8; i++)
        ((uint64_t *)to)[i] = payload_word(key, i);
}

static inline int payload_is(const void *from, const struct kvp_key *key, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes / 8; i++)
        if (((const uint64_t *)from)[i] != payload_word(key, i))
            return 0;
    return 1;
}

static inline double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* One block through the two-phase door: 1 published, 0 refused, or a status. */
static inline int64_t publish_one(kvp_pool *pool, uint32_t class, uint64_t id, uint64_t *ref)
{
    struct kvp_key key = key_of(id);
    uint32_t number;
    int status = kvp_reserve(pool, class, 1, &number);

    if (status)
        return status;
    payload_write(kvp_block_data(&pool->arena, kvp_block(class, number)), &key, pool->arena.class[class].stride);
    return kvp_publish(pool, class, &number, &key, 1, ref);
}

static inline int64_t put_one(kvp_pool *pool, uint32_t class, uint64_t id)
{
    struct kvp_key key = key_of(id);
    uint64_t bytes = pool->arena.class[class].stride;
    void *payload = malloc(bytes);
    const void *from[1] = {payload};

    payload_write(payload, &key, bytes);
    int64_t stored = kvp_put(pool, class, &key, 1, from, bytes);
    free(payload);
    return stored;
}

/* 1: found with the right bytes, 0: a miss, -1: found with wrong bytes. */
static inline int probe(kvp_pool *pool, uint32_t class, uint64_t id)
{
    struct kvp_key key = key_of(id);
    uint64_t ref;

    if (kvp_match(pool, class, &key, 1, &ref) != 1)
        return 0;
    const void *data = kvp_block_data(&pool->arena, (uint32_t)ref);
    int right = payload_is(data, &key, pool->arena.class[class].stride);
    kvp_unpin_refs(pool, &ref, 1);
    return right ? 1 : -1;
}

/* The structure is whole and nobody but live workers' magazines holds anything. */
static inline void require_clean(kvp_pool *pool)
{
    struct kvp_check check;

    kvp_lock(pool);
    kvp_spill(&pool->arena);
    kvp_unlock(pool);
    REQUIRE(kvp_pool_check(pool, &check) == KVP_OK, "check refused");
    REQUIRE(check.problems == 0, "%llu problems, first: %s", (unsigned long long)check.problems, check.first);
    REQUIRE(check.leaked == 0 && check.pins == 0, "%llu leaked, %llu pins", (unsigned long long)check.leaked,
            (unsigned long long)check.pins);
    uint64_t held = check.states[KVP_CACHED] + check.states[KVP_OWN] + check.states[KVP_EVICTING], all = held;
    all += check.states[KVP_ABSENT] + check.states[KVP_FREE] + check.states[KVP_LIVE];
    REQUIRE(held == 0, "%llu blocks still owned", (unsigned long long)held);
    uint64_t capacity = 0;
    for (uint32_t c = 0; c < pool->arena.layout.classes; c++)
        capacity += pool->arena.class[c].blocks;
    REQUIRE(all == capacity, "%llu blocks of %llu", (unsigned long long)all, (unsigned long long)capacity);
}

/* Evict everything; then one worker can have every block of every class in turn, each once. */
static inline void require_usable(kvp_pool *pool)
{
    for (uint32_t c = 0; c < pool->arena.layout.classes; c++)
        kvp_shrink(pool, c, UINT32_MAX);
    for (uint32_t c = 0; c < pool->arena.layout.classes; c++) {
        uint32_t n = pool->arena.class[c].blocks;
        uint32_t *numbers = calloc(n, sizeof *numbers);
        uint8_t *seen = calloc(n, 1);
        REQUIRE(kvp_reserve(pool, c, n, numbers) == KVP_OK, "class %u: %u blocks cannot be had", c, n);
        for (uint32_t i = 0; i < n; i++)
            REQUIRE(numbers[i] < n && !seen[numbers[i]]++, "block %u was given twice", numbers[i]);
        REQUIRE(kvp_withdraw(pool, c, numbers, n) == KVP_OK, "withdraw");
        free(numbers);
        free(seen);
    }
}
#endif
