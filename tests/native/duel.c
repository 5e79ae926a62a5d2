/* duel.c -- the one place where two fences decide: a pin and an eviction of the same block at the same moment.
 *
 *   duel [SECONDS]
 *
 * Two threads meet at a barrier in memory and then pin and evict one block, round after round. Both may not win.
 * Without the fence of kvp_pin both do, about twice in a million rounds of x86; that of the evictor shows on
 * weaker machines only, where a CAS is not a full fence.
 */
#define _GNU_SOURCE
#include "tests/native/common.h"

#include <pthread.h>
#include <sched.h>

struct duel {
    kvp_pool *pinner, *evictor;
    uint64_t ref, round, arrived, done; /* rounds begun, and how many of the two are at their place */
    int pinned;
    int stop;
};

static void await(uint64_t *word, uint64_t value)
{
    for (uint64_t spins = 1; __atomic_load_n(word, __ATOMIC_ACQUIRE) != value; spins++)
        if (spins % 4096 == 0)
            sched_yield();
}

/* Each side is late by a few cycles of its own, so that every overlap comes up; the evictor, who is the first to know that
 * both are there, by up to `most` more. */
static void idle(uint64_t *random, uint64_t most)
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    for (uint64_t i = (*random >> 32) % (256 + most); i; i--)
        __asm__ volatile("nop");
}

static void *pin_rounds(void *argument)
{
    struct duel *duel = argument;
    uint64_t random = 1;

    for (uint64_t round = 1;; round++) {
        await(&duel->round, round);
        if (duel->stop)
            return NULL;
        uint64_t ref = duel->ref;
        __atomic_add_fetch(&duel->arrived, 1, __ATOMIC_ACQ_REL);
        await(&duel->arrived, 2);
        idle(&random, 0);
        duel->pinned = kvp_pin(&duel->pinner->arena, &ref, 1) == 1;
        __atomic_store_n(&duel->done, 1, __ATOMIC_RELEASE);
        await(&duel->done, 0);
        if (duel->pinned)
            kvp_unpin(&duel->pinner->arena, &ref, 1);
        __atomic_store_n(&duel->done, 1, __ATOMIC_RELEASE);
    }
}

/* One round from the evictor's side: 1 if it took the block, 0 if it was pinned. */
static int fight(struct duel *duel, uint64_t *random)
{
    struct kvp_arena *arena = &duel->evictor->arena;
    uint32_t number = kvp_block_number((uint32_t)duel->ref);

    __atomic_store_n(&duel->arrived, 0, __ATOMIC_RELEASE);
    __atomic_add_fetch(&duel->round, 1, __ATOMIC_ACQ_REL);
    await(&duel->arrived, 1);
    __atomic_add_fetch(&duel->arrived, 1, __ATOMIC_ACQ_REL);
    idle(random, 1024);
    int taken = kvp_evict(arena, 0, &number, 1) == 1;
    await(&duel->done, 1);
    REQUIRE(!(taken && duel->pinned), "round %llu: pinned and evicted", (unsigned long long)duel->round);
    __atomic_store_n(&duel->done, 0, __ATOMIC_RELEASE);
    await(&duel->done, 1);
    duel->done = 0;
    if (taken) { /* alive again under a new reference */
        REQUIRE(kvp_future_ref(arena, 0, number, &duel->ref) == KVP_OK, "reference");
        struct kvp_lines lines = {NULL};
        REQUIRE(kvp_make_live(arena, 0, number, &lines) == KVP_OK, "live");
        kvp_lines_end(&lines);
    }
    return taken;
}

int main(int argc, char **argv)
{
    struct kvp_request request = {.blocks = 8, .workers = 2, .classes = 1, .stride = {KVP_LINE}};
    struct duel duel = {0};
    double end = seconds() + (argc > 1 ? strtod(argv[1], NULL) : 2);
    uint64_t random = 2, wins = 0;
    pthread_t thread;

    REQUIRE(kvp_pool_create("memfd:", &request, "lru", &duel.evictor) == KVP_OK, "create");
    REQUIRE(kvp_pool_share(duel.evictor, &duel.pinner) == KVP_OK, "share");
    REQUIRE(publish_one(duel.evictor, 0, 1, &duel.ref) == 1, "publish");
    kvp_lock(duel.pinner); /* the keepers' ticks stay out of arenas that are used without their locks */
    kvp_lock(duel.evictor);
    pthread_create(&thread, NULL, pin_rounds, &duel);
    /* On a busy machine the two seldom run at once, and the one that is awake wins: go on until it has been both. */
    while (seconds() < end || (seconds() < end + 60 && (wins == 0 || wins == duel.round)))
        wins += (uint64_t)fight(&duel, &random);
    printf("%llu rounds, %llu evicted\n", (unsigned long long)duel.round, (unsigned long long)wins);
    duel.stop = 1;
    __atomic_add_fetch(&duel.round, 1, __ATOMIC_ACQ_REL);
    pthread_join(thread, NULL);
    REQUIRE(wins > 0 && wins < duel.round - 1, "one side always won: %llu of %llu", (unsigned long long)wins, (unsigned long long)duel.round);
    kvp_unlock(duel.pinner);
    kvp_unlock(duel.evictor);
    kvp_pool_free(duel.pinner);
    kvp_pool_free(duel.evictor);
    return 0;
}
