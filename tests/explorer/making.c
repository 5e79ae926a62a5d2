/* making.c -- pools are made, removed, and made anew on the same memory, while other hosts look for them or use them. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 8, POLLS = 4 };

/* What the threads tell each other, past the pool: the oracle's state. */
static struct ghost {
    kvp_pool *pool[2]; /* by host */
    uint8_t made, left, looks, beaten, removed;
} *const ghost = (struct ghost *)(void *)ex_ghost;

/* ---- made ---- */

static void make_and_put(void *none)
{
    (void)none;
    kvp_pool *pool = world_create();
    EX_CHECK(pool, "the pool cannot be made");
    ghost->pool[0] = pool;
    ghost->made = 1;
    world_merge(pool, 1);
    world_put(pool, 0, 1);
}

/* Open until it works: before the pool is made it is none yet, or not ready; afterwards it opens at once. */
static void open_and_put(void *none)
{
    kvp_pool *pool;
    int status;

    (void)none;
    for (int polls = 0;; polls++) {
        int made = ghost->made;
        status = kvp_pool_open("explore:", 1, &pool);
        if (status == KVP_OK)
            break;
        EX_CHECK(!made, "the pool is made, and to another host it is %d", status);
        EX_CHECK(status == KVP_E_NOTREADY || status == KVP_E_FOREIGN || (ghost->left && status == KVP_E_REPLACED),
                 "to another host a pool that is being made is %d", status);
        do
            ex_spin();
        while (polls > POLLS && !ghost->made);
        ex_merge((uint64_t)polls);
    }
    EX_CHECK(!ghost->left || ghost->removed, "a pool that was not yet removed is opened by a host that has left");
    ghost->pool[1] = pool;
    world_merge(pool, UINT64_MAX - 1);
    world_use(pool, 0, 1);
    EX_CHECK(world_put(pool, 2, 1) == 1, "a host that has joined a new pool cannot publish");
}

static void remember(void *none)
{
    (void)none;
    kvp_pool_follow(ghost->pool[0]);
    world_remember(ghost->pool[0], KEYS);
}

static void compare(void *none)
{
    (void)none;
    EX_CHECK(world_use(ghost->pool[1], 2, 1), "a host does not find what it has published itself");
    world_compare(ghost->pool[1], KEYS);
}

static void check_both(void)
{
    world_check(ghost->pool[0]);
    world_check(ghost->pool[1]);
}

static void making_setup(void)
{
    world_prepare(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 1}, 1);
    world_spawn_machine(0, make_and_put, 0);
    world_spawn_machine(1, open_and_put, 0);
    world_spawn_machine(0, remember, EX_LAST);
    world_spawn_machine(1, compare, EX_LAST);
}
const struct ex_scenario scenario_making = {.name = "make", .what = "a pool is made while another host tries to open it",
                                            .setup = making_setup, .check = check_both, .seconds = 60};

/* ---- removed ---- */

static kvp_pool *maker, *user;

static void make(void)
{
    maker = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 1});
    user = world_join(1);
    world_put(maker, 0, 1);
    world_put(user, 1, 1);
    kvp_pool_follow(maker);
    kvp_pool_follow(user);
}

static nc_u64 *name; /* as if it stood in memory: 1 when it is gone */

static void drop_name(void)
{
    nc_store(name, 1);
    nc_write_back(name, 8);
}

static int has_no_name(void)
{
    nc_invalidate(name, 8);
    nc_read_fence();
    return nc_load(name) == 1;
}

static void remove_pool(void *none)
{
    (void)none;
    IS(kvp_pool_remove("explore:", 1), KVP_OK);
}

/* Once it is removed, a host knows it after its next tick. */
static void use_until_removed(void *argument)
{
    kvp_pool *pool = argument;
    struct kvp_key key = world_key(0);
    uint64_t ref;

    for (uint64_t i = 0; i < 2; i++) {
        int removed = has_no_name();
        world_tick(pool);
        int64_t found = kvp_lookup(pool, 0, &key, 1, &ref);
        EX_CHECK(!removed || found == KVP_E_REPLACED, "a pool was removed, and after a tick of another host a lookup answers %lld",
                 (long long)found);
        EX_CHECK(found == 1 || found == KVP_E_REPLACED, "a lookup answers %lld", (long long)found);
        world_use(pool, 0, 1);
        world_merge(pool, i);
    }
}

static void must_be_replaced(void *pool)
{
    struct kvp_key key = world_key(0);
    uint64_t ref[1];
    uint32_t number;
    kvp_pool *opened;

    world_tick(pool);
    IS(kvp_match(pool, 0, &key, 1, ref), KVP_E_REPLACED);
    IS(kvp_reserve(pool, 0, 1, &number), KVP_E_REPLACED);
    IS(kvp_pool_give(pool, 0, 1), KVP_E_REPLACED);
    IS(kvp_pool_open("explore:", 1, &opened), KVP_E_REPLACED);
    IS(kvp_pool_leave(pool), KVP_OK);
}

static void removing_setup(void)
{
    make();
    name = ex_region(EX_LINE, EX_NONCOHERENT, 0);
    ex_label(name, 8, 8, "name");
    world_spawn_machine(2, remove_pool, 0);
    world_spawn(user, use_until_removed, 0);
    world_spawn(user, must_be_replaced, EX_LAST);
    standins_unlinking = drop_name;
}
const struct ex_scenario scenario_removing = {.name = "remove-pool", .what = "a pool is removed from another machine while a host uses it",
                                              .setup = removing_setup, .seconds = 30};

/* A host that beats between the remover's two looks keeps the pool; one that beat before them does not. */
static void sleep_in_remove(void)
{
    ghost->looks = 1;
    while (!ghost->beaten)
        ex_spin();
}

static void beat(void *pool)
{
    while (!ghost->looks)
        ex_spin();
    world_sleep_ms(KVP_TICK_MS);
    world_tick(pool);
    ghost->beaten = 1;
}

static void remove_used(void *none)
{
    (void)none;
    IS(kvp_pool_remove("explore:", 0), KVP_E_BUSY);
}

static void remove_silent(void *none)
{
    (void)none;
    ghost->looks = 1;
    while (!ghost->beaten)
        ex_spin();
    IS(kvp_pool_remove("explore:", 0), KVP_OK);
}

static void remove_setup(void (*remover)(void *), void (*asleep)(void))
{
    make();
    ex_warm(2, maker->arena.roster.hosts, maker->arena.layout.hosts * sizeof(struct kvp_host));
    world_spawn_machine(2, remover, 0);
    world_spawn(user, beat, 0);
    world_slept = asleep;
}
static void remove_used_setup(void) { remove_setup(remove_used, sleep_in_remove); }
static void remove_silent_setup(void) { remove_setup(remove_silent, NULL); }
const struct ex_scenario scenario_remove_used = {.name = "remove-used", .what = "a pool whose host beats is not removed",
                                                 .setup = remove_used_setup, .seconds = 10};
const struct ex_scenario scenario_remove_silent = {.name = "remove-silent", .what = "a pool whose hosts have beaten before is removed",
                                                   .setup = remove_silent_setup, .seconds = 10};

/* ---- made anew ---- */

/* On a device a new pool lies where the old one did; caches still hold lines of that. */
static void remove_and_make(void *none)
{
    (void)none;
    while (!ghost->left)
        ex_spin();
    IS(kvp_pool_leave(maker), KVP_OK);
    kvp_pool *pool = NULL;
    EX_CHECK(!world_create(), "a pool was made over one that lives");
    IS(kvp_pool_remove("explore:", 0), KVP_OK);
    nc_full_fence(); /* as whoever says so by whatever way: until then others may open the old pool, and find it replaced */
    ghost->removed = 1;
    pool = world_create();
    EX_CHECK(pool, "the pool cannot be made anew");
    ghost->pool[0] = pool;
    ghost->made = 1;
    world_put(pool, 4, 1);
}

static void leave_and_open(void *pool)
{
    world_use(pool, 0, 2);
    world_merge(pool, 1);
    IS(kvp_pool_leave(pool), KVP_OK);
    ghost->left = 1;
    while (!ghost->removed)
        ex_spin();
    open_and_put(NULL);
    EX_CHECK(world_use(ghost->pool[1], 0, 2) == 0, "a key of the old pool is found in the new one");
}

static void remaking_setup(void)
{
    make();
    world_add_memory(0);
    world_add_memory(1);
    for (int i = 0; i < 8; i++) { /* the old logs go further than the new ones ever will */
        kvp_log_event(maker, KVP_EVENT_USED, 0, &(struct kvp_key){0, 0});
        kvp_log_event(user, KVP_EVENT_USED, 0, &(struct kvp_key){0, 0});
    }
    standins_kind = KVP_MAP_DAX;
    for (int host = 0; host < 2; host++) /* all of the old pool but its payload */
        ex_warm(host, maker->arena.roster.hosts, maker->arena.layout.payload_offset - maker->arena.layout.hosts_offset);
    ex_hold(maker->super, EX_LINE); /* so that its order shows: the rest of a superblock is many lines */
    world_spawn(maker, remove_and_make, 0);
    world_spawn(user, leave_and_open, 0);
    world_spawn_machine(0, remember, EX_LAST);
    world_spawn_machine(1, compare, EX_LAST);
}
const struct ex_scenario scenario_remaking = {.name = "remake", .what = "a pool is removed and made anew on a device",
                                              .setup = remaking_setup, .check = check_both, .seconds = 60};
