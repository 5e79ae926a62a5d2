/* ownership.c -- blocks inside one host: taken, given back, published, evicted; a worker dies at any step. */
#include "scenarios.h"
#include "world.h"

#include <string.h>

/* Who has which block, by what the workers believe. */
struct ghost {
    uint8_t owner[16]; /* thread + 1 */
};
#define GHOST ((struct ghost *)(void *)ex_ghost)

static kvp_pool *first;

static void take(uint32_t number)
{
    int owner = GHOST->owner[number];

    EX_CHECK(!owner || (ex_died() >> (owner - 1) & 1), "block %u belongs to threads %d and %d", number, owner - 1, ex_me());
    GHOST->owner[number] = (uint8_t)(ex_me() + 1);
}

static void let_go(uint32_t number)
{
    EX_CHECK(GHOST->owner[number] == ex_me() + 1, "block %u was taken from its living owner", number);
    GHOST->owner[number] = 0;
}

static void own_and_free(kvp_pool *pool)
{
    uint32_t number;

    if (kvp_alloc(&pool->arena, 0, &number, 1) != 1)
        return;
    take(number);
    ex_step();
    let_go(number);
    EX_CHECK(kvp_free(&pool->arena, 0, &number, 1) == KVP_OK, "an owned block cannot be freed");
}

static void publish(kvp_pool *pool)
{
    struct kvp_lines lines = {NULL};
    uint32_t number;

    if (kvp_alloc(&pool->arena, 0, &number, 1) != 1)
        return;
    take(number);
    let_go(number);
    EX_CHECK(kvp_make_live(&pool->arena, 0, number, &lines) == KVP_OK, "an owned block cannot be published");
    kvp_lines_end(&lines);
}

static void evict(kvp_pool *pool)
{
    for (uint32_t k = 0; k < pool->arena.class[0].blocks; k++) {
        uint32_t number = k;
        if (kvp_evict(&pool->arena, 0, &number, 1) != 1)
            continue;
        take(number);
        let_go(number);
        kvp_free(&pool->arena, 0, &number, 1);
    }
}

static void victim(void *pool)
{
    publish(pool);
    world_merge(pool, 1);
    evict(pool);
}

static void other(void *pool)
{
    own_and_free(pool);
    world_merge(pool, 1);
    kvp_spill(&((kvp_pool *)pool)->arena);
}

static void recoverer(void *pool)
{
    world_recover(pool);
    world_merge(pool, 1);
    own_and_free(pool);
}

/* Keepers look around for ever: once more when the others have ended. */
static void keeper(void *pool)
{
    world_recover(pool);
}

/* A worker that has ended without leaving keeps what it has; nobody else may have anything. */
static void ownership_check(void)
{
    world_check(first);
    for (uint32_t number = 0; number < first->arena.class[0].blocks; number++) {
        uint64_t word = nc_load(&first->arena.class[0].words[number]);
        int owner = GHOST->owner[number], dead = owner && (ex_died() >> (owner - 1) & 1);
        EX_CHECK(kvp_word_state(word) != KVP_OWN || (owner && !dead), "block %u is owned and nobody knows it", number);
    }
}

static void setup(uint32_t blocks)
{
    first = world_make(&(struct world_request){.blocks = blocks, .hosts = 1, .workers = 4});
    world_spawn(world_join(0), keeper, EX_LAST);
}

static void ownership_setup(void)
{
    setup(2);
    world_spawn(first, victim, EX_CRASHABLE);
    world_spawn(world_join(0), other, 0);
    world_spawn(world_join(0), recoverer, EX_ON_CRASH);
}

static void recoverers_setup(void)
{
    setup(1);
    world_spawn(first, victim, EX_CRASHABLE);
    world_spawn(world_join(0), recoverer, EX_ON_CRASH | EX_CRASHABLE);
    world_spawn(world_join(0), recoverer, EX_ON_CRASH);
}

const struct ex_scenario scenario_ownership = {
    .name = "ownership", .what = "a worker that publishes and evicts, killed at any step, beside one that reserves; recovery",
    .setup = ownership_setup, .check = ownership_check, .died = world_died, .crashes = 1, .seconds = 60};
const struct ex_scenario scenario_recoverers = {
    .name = "recoverers", .what = "two workers recover a third, one of them killed too",
    .setup = recoverers_setup, .check = ownership_check, .died = world_died, .crashes = 2, .seconds = 60};
