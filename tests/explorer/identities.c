/* identities.c -- who a host is: declared lost and alive, cut off, beating, claimed twice, moving from machine to machine. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 5 };
#define SECOND 1000000000ull
#define GHOST ((uint64_t *)(void *)ex_ghost)

static kvp_pool *owner, *other;

/* Host 1 has two blocks, full; host 0 knows them, and has a block free if it is to. Their leases have lapsed. */
static void make(int hoards)
{
    other = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    if (hoards)
        world_hoard(0);
    owner = world_join(1);
    world_put(owner, 0, 2);
    kvp_pool_follow(other);
    kvp_pool_follow(owner);
    world_time_ns += 100 * SECOND;
}

/* ---- who was declared lost and lives ---- */

static void declare_lost(void *pool)
{
    kvp_pool_fence(pool, 1, 1);
    GHOST[1] = 1;
}

static void try_to_publish(void *pool)
{
    uint32_t number;
    struct kvp_key key = world_key(4);
    uint64_t ref;

    if (kvp_reserve(pool, 0, 1, &number) != KVP_OK)
        return;
    int was_lost = (int)GHOST[1];
    int64_t published = kvp_publish(pool, 0, &number, &key, 1, &ref);
    EX_CHECK(!was_lost || published == KVP_E_FENCED, "a host that was declared lost publishes: %lld", (long long)published);
}

static void zombie_setup(void)
{
    make(1);
    ex_allow_two_writers(); /* it was not reset: what it writes before it knows is its site's fault */
    ex_allow_dirty_invalidate();
    world_spawn(owner, try_to_publish, 0);
    world_spawn(other, declare_lost, 0);
    world_spawn(owner, try_to_publish, EX_LAST);
}
const struct ex_scenario scenario_zombie = {.name = "zombie", .what = "a host is declared lost, is not reset, and goes on",
                                   .setup = zombie_setup, .seconds = 10};

/* ---- who was cut off finds out ---- */

static void adopt_all(void *pool)
{
    IS(kvp_pool_fence(pool, 1, 1), 1);
    IS(kvp_pool_fence(pool, 1, 1), 0);
}

static void find_out(void *argument)
{
    kvp_pool *pool = argument;
    struct kvp_key key = world_key(0);
    uint64_t ref;
    uint32_t number;

    if (!ex_choose(2))
        world_tick(pool);
    IS(kvp_lookup(pool, 0, &key, 1, &ref), KVP_E_FENCED);
    world_tick(pool);
    IS(kvp_reserve(pool, 0, 1, &number), KVP_E_FENCED);
    IS(kvp_pool_leave(pool), KVP_OK);
    pool = world_come(1);
    IS(world_use(pool, 0, 2), 2);
    IS(kvp_reserve(pool, 0, 1, &number), KVP_E_FULL);
}

static void give_one(void *pool)
{
    kvp_pool_follow(pool);
    IS(kvp_pool_give(pool, 1, 1), 1);
}

static void take_and_put(void *none)
{
    world_follow_there(none);
    IS(world_put(world_there(1), 3, 1), 1);
    world_check_here(world_there(1));
}

static void cut_off_check(void)
{
    uint32_t here = kvp_owned(&other->arena), there = kvp_owned(&world_there(1)->arena);

    EX_CHECK(here + there == 2, "of 2 segments host 0 uses %u and host 1 %u", here, there);
    world_check(other);
}

static void cut_off_setup(void)
{
    make(0);
    world_add_memory(1);
    world_spawn(other, adopt_all, 0);
    world_spawn(owner, find_out, EX_LAST);
    world_spawn(other, give_one, EX_LAST);
    world_spawn_machine(1, take_and_put, EX_LAST);
    world_spawn_compare_there(1, other, KEYS);
}
const struct ex_scenario scenario_cut_off = {.name = "cut-off", .what = "a host that was adopted while it was cut off begins anew",
                                             .setup = cut_off_setup, .check = cut_off_check, .seconds = 10};

/* ---- signs of life ---- */

static void must_see_life(void *pool)
{
    struct kvp_host_info info;

    world_tick(pool);
    kvp_pool_host(pool, 1, &info);
    EX_CHECK(info.state == KVP_HOST_PRESENT, "a host that beats seems to be silent");
}

static void beat_setup(void)
{
    make(1);
    world_spawn(owner, world_tick, 0);
    world_spawn(other, world_tick, 0);
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
        world_tick(pool);
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
    make(1);
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
}

/* Another machine takes the number as soon as it may; before that it is refused. */
static void come_instead(void *none)
{
    (void)none;
    kvp_pool *pool;

    while (!(pool = world_open(1)))
        ex_spin();
    EX_CHECK(pool->arena.roster.incarnation == 2 + GHOST[0], "incarnation %llu is not new",
             (unsigned long long)pool->arena.roster.incarnation);
    world_merge(pool, 1);
    int found = world_use(pool, 0, 1) + world_use(pool, 1, 1) + world_use(pool, 2, 1) + world_use(pool, 3, 1);
    EX_CHECK(found == 1 + (int)GHOST[0], "%d published blocks are found after the host was moved", found);
    world_put(pool, 3, 1);
    kvp_pool_leave(pool);
    GHOST[0]++;
}

static void must_find(void *pool)
{
    kvp_pool_follow(pool);
    EX_CHECK(world_use(pool, 3, 1), "what the new machine published is not found");
}

static void moving_setup(void)
{
    make(1);
    world_other_machines = 1;
    world_spawn(owner, leave, 0);
    world_spawn_machine(2, come_instead, 0);
    world_spawn_machine(3, come_instead, EX_LAST);
    world_spawn(other, must_find, EX_LAST);
}
const struct ex_scenario scenario_moving = {.name = "moving", .what = "a host leaves; two other machines go on under its number in turn",
                                   .setup = moving_setup, .seconds = 60};
