/* returns.c -- identities: hosts that come back while others act on their absence, that move, beat, or only seem silent. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 6 };
#define SECOND 1000000000ull
#define GHOST ((uint64_t *)(void *)ex_ghost)

static kvp_pool *owner, *other;

/* Host 1 has two blocks, full, and host 0 knows them. */
static void make(uint32_t workers)
{
    other = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = workers});
    world_hoard(0);
    owner = world_join(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(other);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
}

static void put_one(void *pool)
{
    world_put(pool, 2, 1);
}

static void use_one(void *pool)
{
    world_use(pool, 0, 1);
}

static void reset_owner(void *pool)
{
    (void)pool;
    ex_reset_host((int)owner->host);
}

static kvp_pool *returned(void)
{
    return (kvp_pool *)(uintptr_t)GHOST[0];
}

/* The machine, or another one, opens the pool as host 1. */
static kvp_pool *come_back(void)
{
    kvp_pool *pool = world_open(1);

    EX_CHECK(pool, "a host that was reset cannot come back");
    GHOST[0] = (uint64_t)(uintptr_t)pool;
    return pool;
}

static void compare(void *pool)
{
    world_compare(pool, KEYS);
}

static void remember_returned(void *none)
{
    (void)none;
    kvp_pool_follow(returned());
    world_remember(returned(), KEYS);
}

/* ---- a reader that was lost comes back, and pins ---- */

static void return_and_use(void *none)
{
    (void)none;
    world_use(come_back(), 0, 1);
}

static void put_two(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    world_put(pool, 2, 2);
}

static void must_evict(void *pool)
{
    kvp_pool_follow(pool);
    EX_CHECK(world_put(pool, 4, 2) == 2, "pins of an earlier life of a host hold blocks");
}

static void reset_and_fence(void *pool)
{
    ex_reset_host(1);
    kvp_pool_fence(pool, 1, 1);
}

static void high_check(void)
{
    for (uint32_t w = 0; w < other->arena.layout.workers; w++) {
        uint64_t high = ex_memory_word(kvp_pin_high(&other->arena, 1) + w);
        EX_CHECK(!high, "of a host that has come back evictors read %llu slots of worker %u, and it pins nothing",
                 (unsigned long long)high, w);
    }
}

/* Host 0 owns and fences, host 1 reads. */
static void reader_reborn(void (*lose)(void *pool))
{
    uint32_t number[6];

    owner = world_make(&(struct world_request){.blocks = 1, .hosts = 2, .workers = 2});
    kvp_reserve(owner, 0, 6, number); /* of 8 blocks */
    other = world_join(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(other);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
    world_spawn(other, use_one, 0);
    world_spawn(world_join(0), lose, 0);
    world_spawn(owner, put_two, 0);
}

static void reset_reader(void *pool)
{
    (void)pool;
    ex_reset_host(1);
}

static void tick_returned(void *none)
{
    (void)none;
    returned()->keeper.on_tick(returned());
}

static void reader_reborn_setup(void)
{
    reader_reborn(reset_reader);
    world_spawn_machine(2, return_and_use, EX_ON_CRASH);
    world_spawn(owner, must_evict, EX_LAST);
    world_spawn_machine(2, tick_returned, EX_LAST);
}
const struct ex_scenario scenario_reader_reborn = {.name = "reader-reborn", .what = "a host is reset while it pins, and comes back",
                                          .setup = reader_reborn_setup, .check = high_check, .seconds = 60};

static void reader_fenced_setup(void)
{
    reader_reborn(reset_and_fence);
    world_spawn_machine(2, return_and_use, EX_ON_CRASH);
    world_spawn(owner, must_evict, EX_LAST);
}
const struct ex_scenario scenario_reader_fenced = {.name = "reader-fenced", .what = "the same, and it is fenced while it comes back",
                                          .setup = reader_fenced_setup, .seconds = 60};

/* The owner knows the first life, and that it is over, when the second one begins to pin. */
static void fence_and_wait(void *pool)
{
    reset_and_fence(pool);
    kvp_pool_follow(pool);
    GHOST[1] = 1;
    ex_wake();
    while (!GHOST[0])
        ex_spin();
    world_merge(pool, 1);
    world_put(pool, 2, 2);
}

static void return_when_known(void *none)
{
    (void)none;
    while (!GHOST[1])
        ex_spin();
    kvp_pool *pool = come_back();
    ex_wake();
    world_merge(pool, 1);
    world_use(pool, 0, 1);
}

static void reader_back_setup(void)
{
    uint32_t number[6];

    owner = world_make(&(struct world_request){.blocks = 1, .hosts = 2, .workers = 1});
    kvp_reserve(owner, 0, 6, number); /* of 8 blocks */
    other = world_join(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(other);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
    world_spawn(owner, fence_and_wait, 0);
    world_spawn_machine(2, return_when_known, EX_ON_CRASH);
    world_spawn(owner, must_evict, EX_LAST);
}
const struct ex_scenario scenario_reader_back = {.name = "reader-back", .what = "a host that was fenced comes back and pins what the owner evicts",
                                        .setup = reader_back_setup, .seconds = 60};

/* It had pinned eight blocks of its own before, so that its pin of host 0's block lies in another line than the first one of
 * its next life. */
static void busy_reborn_setup(void)
{
    uint32_t number[6];
    uint64_t ref;

    owner = world_make(&(struct world_request){.blocks = 1, .hosts = 3, .workers = 2});
    kvp_reserve(owner, 0, 6, number); /* of 8 blocks */
    other = world_join(1);
    world_put(owner, 0, 2);
    for (uint32_t k = 16; k < 24; k++) {
        struct kvp_key key = world_key(k);
        EX_CHECK(world_put(other, k, 1) == 1 && kvp_match(other, 0, &key, 1, &ref) == 1, "host 1 has 8 blocks");
    }
    kvp_pool_follow(other);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
    world_spawn(other, use_one, 0);
    world_spawn(world_join(0), reset_reader, 0);
    world_spawn_machine(3, return_and_use, EX_ON_CRASH);
    world_spawn(owner, must_evict, EX_LAST);
}
const struct ex_scenario scenario_busy_reborn = {.name = "busy-reborn", .what = "a host is reset that has pinned much, and comes back",
                                        .setup = busy_reborn_setup, .seconds = 60};

/* ---- an owner comes back while others read it ---- */

static void return_only(void *none)
{
    (void)none;
    come_back();
}

static void follow_twice(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    kvp_pool_follow(pool);
}

static void reborn_read_setup(void)
{
    make(3);
    kvp_pool *second = world_join(0);
    world_spawn(owner, put_one, 0);
    world_spawn(second, reset_owner, 0);
    world_spawn(other, follow_twice, 0);
    world_spawn_machine(2, return_only, EX_ON_CRASH);
    world_spawn_machine(2, remember_returned, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}
const struct ex_scenario scenario_reborn_read = {.name = "reborn-read", .what = "an owner is reset and comes back while another host follows",
                                        .setup = reborn_read_setup, .seconds = 60};

/* ---- an owner comes back while it is adopted ---- */

static void adopt(void *pool)
{
    int64_t adopted;

    ex_reset_host(1);
    GHOST[1] = 1;
    while ((adopted = kvp_pool_fence(pool, 1, 1)) == KVP_E_BUSY)
        ex_spin();
}

static void return_and_put(void *none)
{
    (void)none;
    kvp_pool *pool = come_back();
    world_merge(pool, 1);
    world_put(pool, 2, 1);
    world_merge(pool, 2);
    kvp_pool_follow(pool);
    world_merge(pool, 3);
    world_put(pool, 3, 1);
}

static void follow_returned(void *none)
{
    (void)none;
    kvp_pool_follow(returned());
}

static void follow(void *pool)
{
    kvp_pool_follow(pool);
}

static void adopt_return_check(void)
{
    uint32_t mine = kvp_owned(&other->arena), its = kvp_owned(&returned()->arena);

    EX_CHECK(mine + its == 2, "of 2 segments the adopter owns %u, and the host that came back %u", mine, its);
}

static void adopt_return_setup(void)
{
    make(2);
    world_spawn(owner, put_one, 0);
    world_spawn(other, adopt, 0);
    world_spawn_machine(2, return_and_put, EX_ON_CRASH);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(2, follow_returned, EX_LAST);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(2, remember_returned, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}
const struct ex_scenario scenario_adopt_return = {.name = "adopt-return", .what = "a host is adopted and comes back at the same time",
                                         .setup = adopt_return_setup, .check = adopt_return_check, .seconds = 60};

/* The host is reset once more while it yields: its third life must yield as well. */
static void reset_again(void *pool)
{
    (void)pool;
    while (!GHOST[0])
        ex_spin();
    ex_reset_host(2);
    GHOST[1] = 2;
    ex_wake();
}

static void return_first(void *none)
{
    (void)none;
    come_back();
    ex_wake();
}

static void return_again(void *none)
{
    while (GHOST[1] != 2)
        ex_spin();
    return_and_put(none);
}

static void twice_reborn_setup(void)
{
    make(3);
    world_spawn(owner, put_one, 0);
    world_spawn(other, adopt, 0);
    world_spawn(world_join(0), reset_again, 0);
    world_spawn_machine(2, return_first, EX_ON_CRASH);
    world_spawn_machine(3, return_again, EX_ON_CRASH);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(3, follow_returned, EX_LAST);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(3, remember_returned, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}
const struct ex_scenario scenario_twice_reborn = {.name = "twice-reborn", .what = "a host is adopted, comes back, is reset and comes back again",
                                         .setup = twice_reborn_setup, .check = adopt_return_check, .seconds = 60};

/* ---- the adopter is lost, too ---- */

static kvp_pool *adopter;

static void adopt_owner(void *pool)
{
    int64_t adopted;

    ex_reset_host(2);
    while ((adopted = kvp_pool_fence(pool, 2, 1)) == KVP_E_BUSY)
        ex_spin();
}

/* Host 1 is reset while it adopts host 2, and host 0 adopts it; host 2 comes back on another machine. */
static void adopt_adopter(void *pool)
{
    int64_t adopted;

    ex_reset_host(1);
    while ((adopted = kvp_pool_fence(pool, 1, 1)) == KVP_E_BUSY)
        ex_spin();
    EX_CHECK(adopted >= 0, "an adopter that was reset cannot be adopted: %lld", (long long)adopted);
}

static void return_third(void *none)
{
    kvp_pool *pool = world_open(2);

    (void)none;
    EX_CHECK(pool, "a host that was reset cannot come back");
    GHOST[0] = (uint64_t)(uintptr_t)pool;
}

static void adopter_lost_check(void)
{
    uint32_t here = kvp_owned(&other->arena), there = kvp_owned(&returned()->arena);

    EX_CHECK(here + there == 3, "of 3 segments the last survivor owns %u, and the host that came back %u", here, there);
}

/* It is not adopted but comes back itself, and goes on with its adoption only where nobody has relied on its being lost. */
static void reset_adopter(void *pool)
{
    (void)pool;
    ex_reset_host(1);
    GHOST[1] = 1;
    ex_wake();
}

static void reset_and_declare(void *pool)
{
    adopt_adopter(pool);
    GHOST[1] = 1;
    ex_wake();
}

static void return_adopter(void *none)
{
    (void)none;
    while (!GHOST[1])
        ex_spin();
    kvp_pool *pool = world_open(1);
    EX_CHECK(pool, "an adopter that was reset cannot come back");
    GHOST[2] = (uint64_t)(uintptr_t)pool;
    world_merge(pool, 1);
    kvp_pool_follow(pool);
}

static void follow_adopter(void *none)
{
    (void)none;
    kvp_pool_follow((kvp_pool *)(uintptr_t)GHOST[2]);
}

static void adopter_reborn_check(void)
{
    const kvp_pool *middle = (const kvp_pool *)(uintptr_t)GHOST[2];
    uint32_t here = kvp_owned(&other->arena), there = kvp_owned(&returned()->arena), its = kvp_owned(&middle->arena);

    EX_CHECK(here + there + its == 3, "of 3 segments the hosts own %u, %u and %u", here, its, there);
}

static void adopter_lost_make(void)
{
    other = world_make(&(struct world_request){.blocks = 2, .hosts = 3, .workers = 2});
    adopter = world_join(1);
    owner = world_join(2);
    world_put(owner, 0, 2);
    kvp_pool_follow(other);
    kvp_pool_follow(adopter);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
    world_spawn(adopter, adopt_owner, 0);
}

static void adopter_reborn(void (*lose)(void *pool))
{
    adopter_lost_make();
    world_spawn(other, lose, 0);
    world_spawn_machine(3, return_third, EX_ON_CRASH);
    world_spawn_machine(4, return_adopter, EX_ON_CRASH);
    world_spawn_machine(4, follow_adopter, EX_LAST);
    world_spawn_machine(3, follow_returned, EX_LAST);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(4, follow_adopter, EX_LAST);
    world_spawn_machine(3, remember_returned, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}

static void adopter_reborn_setup(void)
{
    adopter_reborn(reset_adopter);
}
const struct ex_scenario scenario_adopter_reborn = {.name = "adopter-reborn", .what = "a host is reset while it adopts another, and both come back",
                                           .setup = adopter_reborn_setup, .check = adopter_reborn_check, .seconds = 60};

static void adopter_fenced_setup(void)
{
    adopter_reborn(reset_and_declare);
}
const struct ex_scenario scenario_adopter_fenced = {.name = "adopter-fenced", .what = "the same, and a third adopts the adopter",
                                           .setup = adopter_fenced_setup, .check = adopter_reborn_check, .seconds = 60};

static void adopter_lost_setup(void)
{
    adopter_lost_make();
    world_spawn(other, adopt_adopter, 0);
    world_spawn_machine(3, return_third, EX_ON_CRASH);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(3, remember_returned, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}
const struct ex_scenario scenario_adopter_lost = {.name = "adopter-lost", .what = "a host is reset while it adopts another, which comes back",
                                         .setup = adopter_lost_setup, .check = adopter_lost_check, .seconds = 60};

/* ---- a giver, or a taker, comes back ---- */

static void give(void *pool)
{
    kvp_pool_give(pool, 0, 1);
}

static void give_back(void *pool)
{
    kvp_pool_give(pool, 1, 1);
}

static void take_and_put(void *pool)
{
    kvp_pool_follow(pool);
    world_merge(pool, 1);
    world_put(pool, 2, 1);
}

static void giver_reborn_setup(void)
{
    make(3);
    kvp_pool *second = world_join(0);
    world_spawn(owner, give, 0);
    world_spawn(second, reset_owner, 0);
    world_spawn(other, take_and_put, 0);
    world_spawn_machine(2, return_and_put, EX_ON_CRASH);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(2, follow_returned, EX_LAST);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(2, remember_returned, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}
const struct ex_scenario scenario_giver_reborn = {.name = "giver-reborn", .what = "a host is reset while it gives a segment, and comes back",
                                         .setup = giver_reborn_setup, .check = adopt_return_check, .seconds = 60};

static void taker_reborn_setup(void)
{
    other = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    owner = world_join(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(other);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
    kvp_pool *second = world_join(0);
    world_spawn(owner, take_and_put, 0);
    world_spawn(second, reset_owner, 0);
    world_spawn(other, give_back, 0);
    world_spawn_machine(2, return_and_put, EX_ON_CRASH);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(2, follow_returned, EX_LAST);
    world_spawn(other, follow, EX_LAST);
    world_spawn_machine(2, remember_returned, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}
const struct ex_scenario scenario_taker_reborn = {.name = "taker-reborn", .what = "a host is reset while it takes a segment, and comes back",
                                         .setup = taker_reborn_setup, .check = adopt_return_check, .seconds = 60};

/* ---- who was declared lost and lives ---- */

static void declare_lost(void *pool)
{
    kvp_pool_fence(pool, 1, 1);
    GHOST[1] = 1;
}

static void try_to_publish(void *pool)
{
    uint32_t number;
    struct kvp_key key = world_key(5);
    uint64_t ref;

    if (kvp_reserve(pool, 0, 1, &number) != KVP_OK)
        return;
    int was_lost = (int)GHOST[1];
    int64_t published = kvp_publish(pool, 0, &number, &key, 1, &ref);
    EX_CHECK(!was_lost || published == KVP_E_FENCED, "a host that was declared lost publishes: %lld", (long long)published);
}

static void zombie_setup(void)
{
    make(2);
    ex_allow_two_writers(); /* it was not reset: what it writes before it knows is its site's fault */
    ex_allow_dirty_invalidate();
    world_spawn(owner, try_to_publish, 0);
    world_spawn(other, declare_lost, 0);
    world_spawn(owner, try_to_publish, EX_LAST);
}
const struct ex_scenario scenario_zombie = {.name = "zombie", .what = "a host is declared lost, is not reset, and goes on",
                                   .setup = zombie_setup, .seconds = 10};

/* ---- signs of life ---- */

static void tick(void *pool)
{
    kvp_pool *mine = pool;

    mine->keeper.on_tick(mine->keeper.context);
}

static void must_see_life(void *pool)
{
    struct kvp_host_info info;

    tick(pool);
    kvp_pool_host(pool, 1, &info);
    EX_CHECK(info.state == KVP_HOST_PRESENT, "a host that beats seems to be silent");
}

static void beat_setup(void)
{
    make(2);
    world_spawn(owner, tick, 0);
    world_spawn(other, tick, 0);
    world_spawn(other, must_see_life, EX_LAST);
}
const struct ex_scenario scenario_beat = {.name = "beat", .what = "a host beats, another one watches", .setup = beat_setup, .seconds = 10};

/* Processes of the same machine under a new host memory, while the old ones beat at each of their sleeps. */
static void beat_while_it_waits(void)
{
    GHOST[2]++;
    ex_wake();
    while (GHOST[3] < GHOST[2])
        ex_spin();
}

static void beat_on_demand(void *pool)
{
    for (uint64_t n = 1; n <= 2; n++) {
        while (GHOST[2] < n)
            ex_spin();
        world_time_ns += SECOND / 10;
        tick(pool);
        GHOST[3] = n < 2 ? n : UINT64_MAX;
        ex_wake();
    }
}

static void claim_again(void *none)
{
    (void)none;
    EX_CHECK(!world_open(1), "two host memories of one machine have one identity");
    GHOST[2] = UINT64_MAX;
    ex_wake();
}

static void second_claim_setup(void)
{
    make(2);
    ex_private(&world_time_ns, sizeof world_time_ns);
    world_same_boot = 1;
    world_slept = beat_while_it_waits;
    world_spawn(owner, beat_on_demand, 0);
    world_spawn_machine(2, claim_again, 0);
}
const struct ex_scenario scenario_second_claim = {.name = "second-claim", .what = "an identity is claimed whose host is there",
                                         .setup = second_claim_setup, .seconds = 10};

/* Two machines claim a free number at once: each waits until the other's claim is written. */
static void wait_for_both(void)
{
    GHOST[2]++;
    ex_wake();
    while (GHOST[2] < 2)
        ex_spin();
}

static void claim_free(void *none)
{
    (void)none;
    if (world_open(1))
        GHOST[3]++;
}

static void one_claim_check(void)
{
    EX_CHECK(GHOST[3] <= 1, "two machines are host 1");
}

static void two_claims_setup(void)
{
    other = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 1});
    ex_allow_two_writers();
    ex_allow_dirty_invalidate();
    world_slept = wait_for_both;
    world_spawn_machine(2, claim_free, 0);
    world_spawn_machine(3, claim_free, 0);
}
const struct ex_scenario scenario_two_claims = {.name = "two-claims", .what = "two machines claim one free number at once",
                                       .setup = two_claims_setup, .check = one_claim_check, .seconds = 10};

/* ---- a number moves from machine to machine ---- */

static void leave(void *pool)
{
    uint32_t number;

    world_put(pool, 2, 1);
    world_merge(pool, 1);
    if (kvp_reserve(pool, 0, 1, &number) == KVP_OK)
        kvp_withdraw(pool, 0, &number, 1); /* what it leaves is not as it was when a word was last published */
    world_merge(pool, 2);
    kvp_pool_leave(pool);
    GHOST[1] = 1;
    ex_wake();
}

/* Another machine takes the number as soon as it may; before that it is refused. */
static void come_instead(void *none)
{
    (void)none;
    kvp_pool *pool;

    while (!(pool = world_open(1)))
        ex_spin();
    EX_CHECK(pool->arena.roster.incarnation == 2 + GHOST[4], "incarnation %llu is not new",
             (unsigned long long)pool->arena.roster.incarnation);
    world_merge(pool, 1);
    int found = world_use(pool, 0, 1) + world_use(pool, 1, 1) + world_use(pool, 2, 1) + world_use(pool, 3, 1);
    EX_CHECK(found == 1 + (int)GHOST[4], "%d published blocks are found after the host was moved", found);
    world_put(pool, 3, 1);
    kvp_pool_leave(pool);
    GHOST[4]++;
}

static void come_third(void *none)
{
    GHOST[2] = 0;
    come_instead(none);
}

static void must_find(void *pool)
{
    kvp_pool_follow(pool);
    EX_CHECK(world_use(pool, 3, 1), "what the new machine published is not found");
}

static void moving_setup(void)
{
    make(2);
    world_other_machines = 1;
    world_spawn(owner, leave, 0);
    world_spawn_machine(2, come_instead, 0);
    world_spawn_machine(3, come_third, EX_LAST);
    world_spawn(other, must_find, EX_LAST);
}
const struct ex_scenario scenario_moving = {.name = "moving", .what = "a host leaves; two other machines go on under its number in turn",
                                   .setup = moving_setup, .seconds = 60};
