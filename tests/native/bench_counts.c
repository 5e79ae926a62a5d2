/* bench_counts.c -- the hot paths once each, for a counter of instructions: tests/instructions.py runs it under callgrind.
 *
 * Each path is a function named count_*; what two runs of different lengths differ by is a pass without first touches.
 */
#define _GNU_SOURCE
#include "bench_world.h"

#define COUNTED __attribute__((noinline, noclone)) static void

enum { BATCH = 64 };

static struct world *world;
static uint32_t numbers[BURST];
static uint8_t keys[CHAIN * KVP_KEY_BYTES];
static uint64_t refs[CHAIN];

COUNTED count_alloc_free(void)
{
    for (uint32_t i = 0; i < BATCH; i++)
        kvp_free_one(&world->pool->arena, 0, kvp_alloc_one(&world->pool->arena, 0));
}

COUNTED count_burst(void)
{
    for (uint32_t i = 0; i < BURST; i++)
        numbers[i] = kvp_alloc_one(&world->pool->arena, 0);
    for (uint32_t i = 0; i < BURST; i++)
        kvp_free_one(&world->pool->arena, 0, numbers[i]);
}

COUNTED count_reserve(void)
{
    kvp_reserve(world->pool, 0, 1, numbers);
    kvp_withdraw(world->pool, 0, numbers, 1);
}

COUNTED count_reserve_batch(void)
{
    kvp_reserve(world->pool, 0, BATCH, numbers);
    kvp_withdraw(world->pool, 0, numbers, BATCH);
}

COUNTED count_lookup(void)
{
    kvp_lookup(world->pool, 0, keys, CHAIN, refs);
}

COUNTED count_match(void)
{
    kvp_match(world->pool, 0, keys, CHAIN, refs);
}

COUNTED count_unpin(void)
{
    kvp_unpin_refs(world->pool, refs, CHAIN);
}

COUNTED count_match_one(void)
{
    kvp_match(world->pool, 0, keys, 1, refs);
    kvp_unpin_refs(world->pool, refs, 1);
}

static uint8_t fresh[CHAIN * KVP_KEY_BYTES];

COUNTED count_publish(void)
{
    kvp_publish(world->pool, 0, numbers, fresh, BATCH, refs);
}

COUNTED count_publish_one(void)
{
    kvp_publish(world->pool, 0, numbers, fresh, 1, refs);
}

COUNTED count_evict(void)
{
    kvp_shrink(world->pool, 0, BATCH);
}

COUNTED count_recover(void)
{
    kvp_recover(&world->pool->arena, WORKERS - 1);
}

static void publications(void)
{
    make_chain(fresh);
    must(kvp_reserve(world->pool, 0, BATCH, numbers), "kvp_reserve");
    count_publish();
    must(kvp_remove(world->pool, 0, fresh, BATCH), "kvp_remove");
    must(kvp_reserve(world->pool, 0, 1, numbers), "kvp_reserve");
    count_publish_one();
    must(kvp_remove(world->pool, 0, fresh, 1), "kvp_remove");
}

/* Blocks that the next pass may evict. */
static void refill_world(void)
{
    make_chain(fresh);
    must(kvp_reserve(world->pool, 0, BATCH, numbers), "kvp_reserve");
    must(kvp_publish(world->pool, 0, numbers, fresh, BATCH, refs), "kvp_publish");
}

static void pass(void)
{
    count_alloc_free();
    count_burst();
    count_reserve();
    count_reserve_batch();
    count_lookup();
    count_match();
    count_unpin();
    count_match_one();
    publications();
    refill_world();
    count_evict();
    count_recover();
}

int main(int argc, char **argv)
{
    int passes = argc > 1 ? atoi(argv[1]) : 1;


    world = make_world(1 << 15);
    fill(world, 0);
    must(kvp_shrink(world->pool, 0, 2 * BURST), "kvp_shrink"); /* room for a burst */
    memcpy(keys, chain_keys(world, world->whole[world->whole_count - 1]), sizeof keys);
    for (int i = 0; i < passes; i++)
        pass();
    free_world(world);
    return 0;
}
