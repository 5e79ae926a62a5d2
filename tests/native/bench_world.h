/* bench_world.h -- what the benches share: time, medians, rows, and a pool full of chains. */
#ifndef KVP_BENCH_WORLD_H
#define KVP_BENCH_WORLD_H
#include "native/handle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    CHAIN = 1024,         /* keys of one match: 16,384 tokens */
    TOKENS = 16,          /* a block */
    PAIRS = 1000,         /* alloc+free pairs a sample */
    BURST = 2048,
    AHEAD = 32,           /* lines prefetched ahead in the bound of a match */
    TURN = 16,            /* samples of one kind before the next kind has its turn */
    COLD_BYTES = 96 << 20,
    SAMPLES_MAX = 2048,
    WORKERS = 4,
    WAIT_S = 5,
};

static volatile uint64_t sink;

/* ---- small things ---- */

static void fail(const char *what)
{
    fprintf(stderr, "bench_core: %s: %s\n", what, kvp_error_detail());
    exit(1);
}

static inline int64_t must(int64_t result, const char *what)
{
    if (result < 0)
        fail(what);
    return result;
}

static inline void *memory(size_t bytes)
{
    void *made = malloc(bytes);

    if (!made)
        fail("no memory");
    memset(made, 1, bytes);
    return made;
}

static inline double now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static uint64_t random_next(void)
{
    static uint64_t state = 1;
    uint64_t z = state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static inline double median(double *samples, uint32_t n)
{
    qsort(samples, n, sizeof *samples, ascending);
    return samples[n / 2];
}

/* The samples, which are sorted then, in units of `per` nanoseconds, beside the bound in nanoseconds. */
static inline void row(const char *name, const char *unit, double *samples, uint32_t n, double bound, double per)
{
    double middle = median(samples, n);

    printf("%s\t%s\t%.4f\t%.4f\t%.4f\t%.4f\n", name, unit, middle / per, bound / per, samples[n / 10] / per,
           samples[n - 1 - n / 100] / per);
}

/* ---- a pool full of chains ---- */

struct world {
    kvp_pool *pool;
    uint8_t *keys;
    uint32_t chains;
    uint32_t *whole;       /* chains without a hole: the directory may have had no room for a key */
    uint32_t whole_count;
    uint64_t refs[CHAIN];
};

/* Not a good hash, but a spread: the driver links no other library. */
static struct kvp_digest spread(const void *data, size_t bytes, const void *secret, size_t secret_bytes)
{
    struct kvp_digest digest = {secret_bytes, *(const uint8_t *)secret};

    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word;
        memcpy(&word, (const uint8_t *)data + i, 8);
        digest.low = (digest.low ^ word) * 0x9e3779b97f4a7c15u;
        digest.low ^= digest.low >> 32;
        digest.high = (digest.high + digest.low) * 0xbf58476d1ce4e5b9u;
        digest.high ^= digest.high >> 29;
    }
    return digest;
}

static void make_chain(uint8_t *keys)
{
    static uint32_t tokens[CHAIN * TOKENS];
    static const uint8_t secret[KVP_SECRET_BYTES] = {1};
    struct kvp_chain chain = {0, 0, 0, 0};

    for (uint32_t i = 0; i < CHAIN * TOKENS; i++)
        tokens[i] = (uint32_t)random_next();
    must(kvp_keys(spread, secret, tokens, CHAIN, TOKENS, &chain, keys), "kvp_keys");
}

static kvp_pool *make_pool_of(uint64_t blocks, uint64_t stride)
{
    struct kvp_request request = {.blocks = blocks, .workers = WORKERS, .classes = 1, .stride = {stride}};
    kvp_pool *pool;

    must(kvp_pool_create("memfd:", &request, "leaf", &pool), "kvp_pool_create");
    return pool;
}

static inline kvp_pool *make_pool(uint64_t blocks)
{
    return make_pool_of(blocks, KVP_STRIDE_MIN);
}

/* Some blocks stay free, so that reserving evicts nothing. */
static struct world *make_world(uint64_t blocks)
{
    struct world *world = memory(sizeof *world);

    world->pool = make_pool(blocks);
    world->chains = (uint32_t)((blocks - blocks / 64) / CHAIN);
    world->whole = memory(world->chains * sizeof *world->whole);
    world->keys = memory((size_t)world->chains * CHAIN * KVP_KEY_BYTES);
    for (uint32_t i = 0; i < world->chains; i++)
        make_chain(world->keys + (size_t)i * CHAIN * KVP_KEY_BYTES);
    return world;
}

static void free_world(struct world *world)
{
    kvp_pool_free(world->pool);
    free(world->keys);
    free(world->whole);
    free(world);
}

static const uint8_t *chain_keys(const struct world *world, uint32_t chain)
{
    return world->keys + (size_t)chain * CHAIN * KVP_KEY_BYTES;
}

/* Reorder `n` items of `size` numbers each. */
static void shuffle(uint32_t *numbers, uint32_t n, uint32_t size)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t *a = numbers + (size_t)(i - 1) * size, *b = numbers + random_next() % i * size;
        for (uint32_t k = 0; k < size; k++) {
            uint32_t other = a[k];
            a[k] = b[k];
            b[k] = other;
        }
    }
}

/* Publish all chains: each in a run of neighbouring blocks, as one reservation gets them from an empty pool; or
 * scattered, as in a pool where every block was evicted on its own. */
static void fill(struct world *world, int is_scattered)
{
    uint32_t blocks = world->chains * CHAIN;
    uint32_t *numbers = memory(blocks * sizeof *numbers);

    must(kvp_reserve(world->pool, 0, blocks, numbers), "kvp_reserve");
    shuffle(numbers, is_scattered ? blocks : world->chains, is_scattered ? 1 : CHAIN);
    world->whole_count = 0;
    for (uint32_t i = 0; i < world->chains; i++)
        if (must(kvp_publish(world->pool, 0, numbers + (size_t)i * CHAIN, chain_keys(world, i), CHAIN, world->refs),
                 "kvp_publish") == CHAIN)
            world->whole[world->whole_count++] = i;
    if (!world->whole_count)
        fail("no chain is whole");
    free(numbers);
}

static inline void empty(struct world *world)
{
    for (uint32_t i = 0; i < world->chains; i++)
        must(kvp_remove(world->pool, 0, chain_keys(world, i), CHAIN), "kvp_remove");
}
#endif
