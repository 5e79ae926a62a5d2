/* classes.c -- two block sizes: segments move between classes, while others use them, and hosts are lost afterwards.
 *
 * A segment has 64 KiB: 24 blocks and a bit of class 0, 48 and a bit of class 1. So a block lies on each border, and with it its
 * line of 8 words belongs to two segments. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 6, LARGE = 42 * EX_LINE, SMALL = 21 * EX_LINE };

static kvp_pool *first, *second, *other;

static struct ghost {
    kvp_pool *back;
    uint8_t published;
} *const ghost = (struct ghost *)(void *)ex_ghost;

/* Host 0 has the first segments, all but the last, and all of them are held by class 0. */
static void make(uint32_t workers, uint32_t segments)
{
    first = world_make(&(struct world_request){.hosts = 2, .workers = workers, .stride = {LARGE, SMALL}, .segments = segments});
    second = workers > 1 ? world_join(0) : NULL;
    other = world_join(1);
    while (kvp_segment_adopt(&first->arena, 0))
        ;
}

static uint32_t held_by(const kvp_pool *pool, uint32_t c)
{
    uint32_t held = 0;

    for (uint32_t s = 0; s < pool->arena.layout.segments; s++) {
        uint64_t word = co_load(&pool->arena.segments[s]);
        held += kvp_segment_state(word) == KVP_SEGMENT_HELD && kvp_segment_class(word) == c;
    }
    return held;
}

/* ---- a class takes another's segment; the host is lost; it starts anew ---- */

static void take_segment(void *pool)
{
    ghost->published = (uint8_t)world_put_in(pool, 1, 4, 1);
}

static void reset_first(void *pool)
{
    (void)pool;
    ex_reset_host(0);
}

/* What the class had published before it was lost is there, and no block of the former class stands in the way. */
static void start_anew(void *none)
{
    (void)none;
    kvp_pool *pool = world_open(0);
    EX_CHECK(pool, "a host that was reset cannot come back");
    ghost->back = pool;
    int found = world_use_in(pool, 1, 4, 1);
    EX_CHECK(found || !ghost->published, "a block that was published before the host was lost is not found");
    EX_CHECK(held_by(pool, 0) + held_by(pool, 1) <= 2, "segments are held twice");
    EX_CHECK(world_put_in(pool, 0, 2, 2) == 2, "no room for class 0");
    EX_CHECK(world_put_in(pool, 1, 5, 1) == 1, "no room for class 1");
}

static void check_back(void)
{
    world_check(ghost->back);
    world_check(other);
}

static void lost_setup(void)
{
    make(1, 3);
    world_put(first, 0, 1);
    kvp_pool_follow(other);
    world_spawn(first, take_segment, 0);
    world_spawn(other, reset_first, 0);
    world_spawn_machine(2, start_anew, EX_LAST);
}
const struct ex_scenario scenario_class_lost = {.name = "class-lost", .what = "a class takes a segment of another; the host is lost at any step",
                                                .setup = lost_setup, .check = check_back, .seconds = 60};

/* The same without a loss; another worker of the host, and another host, use what is drained. */
static void use_large(void *pool)
{
    world_use(pool, 0, 1);
    world_merge(pool, 1);
    world_put(pool, 1, 1);
    world_merge(pool, 2);
    world_use(pool, 0, 2);
}

static void use_both(void *pool)
{
    world_use(pool, 0, 1);
    world_merge(pool, 1);
    world_use_in(pool, 1, 4, 1);
    world_merge(pool, 2);
    world_use(pool, 0, 1);
}

static void remember(void *pool)
{
    world_remember(pool, KEYS);
}

static void compare(void *pool)
{
    world_compare(pool, KEYS);
    EX_CHECK(!ghost->published || world_use_in(pool, 1, 4, 1), "another host does not find what class 1 has published");
}

static void check(void)
{
    world_check(first);
    world_check(other);
}

static void moved_setup(void)
{
    make(2, 3);
    world_put(first, 0, 1);
    kvp_pool_follow(other);
    world_spawn(first, take_segment, 0);
    world_spawn(second, use_large, 0);
    world_spawn(other, use_both, 0);
    world_spawn(first, remember, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}
const struct ex_scenario scenario_class_moved = {.name = "class-moved", .what = "a class takes a segment of another while others use it",
                                                 .setup = moved_setup, .check = check, .preemptions = 2, .events = 1};

/* ---- neighbours ---- */

static uint64_t pinned;

static void drain_first(void *pool)
{
    kvp_lock(pool);
    int drained = kvp_segment_drain(&((kvp_pool *)pool)->arena, 0, 0);
    kvp_unlock(pool);
    IS(drained, 0);
}

static void drain_second(void *pool)
{
    kvp_lock(pool);
    int drained = kvp_segment_drain(&((kvp_pool *)pool)->arena, 0, 1);
    kvp_unlock(pool);
    IS(drained, 0);
}

/* Both give up, since the last block on the border is pinned: whoever is last opens the others again. */
static void border_setup(void)
{
    uint32_t number[32], border = 31;

    make(3, 3);
    kvp_pool *pinner = world_join(0);
    IS(kvp_reserve(pinner, 0, 32, number), KVP_OK);
    struct kvp_key key = world_key(0);
    for (uint32_t i = 0; i < 32; i++)
        if (number[i] == border)
            number[i] = number[0];
    IS(kvp_publish(pinner, 0, &border, &key, 1, &pinned), 1);
    IS(kvp_withdraw(pinner, 0, number + 1, 31), KVP_OK);
    IS(kvp_pin_refs(pinner, &pinned, 1), 1);
    kvp_spill(&pinner->arena);
    world_spawn(first, drain_first, 0);
    world_spawn(second, drain_second, 0);
}
const struct ex_scenario scenario_class_border = {.name = "class-border", .what = "two workers try to drain neighbouring segments, and cannot",
                                                  .setup = border_setup, .check = check, .seconds = 30};

/* Two classes adopt the two halves of a free payload at once, or one class both: blocks on the border are opened by one of them. */
static void adopt_large(void *pool)
{
    kvp_lock(pool);
    kvp_segment_adopt(&((kvp_pool *)pool)->arena, 0);
    kvp_unlock(pool);
}

static void free_setup(void)
{
    first = world_make(&(struct world_request){.hosts = 2, .workers = 2, .stride = {LARGE, SMALL}, .segments = 3});
    second = world_join(0);
    other = world_join(1);
    world_spawn(first, adopt_large, 0);
    world_spawn(second, adopt_large, 0);
}
const struct ex_scenario scenario_class_free = {.name = "class-free", .what = "two workers adopt neighbouring segments",
                                                .setup = free_setup, .check = check, .seconds = 30};
