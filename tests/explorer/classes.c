/* classes.c -- two block sizes: segments move between classes, while others use them, and hosts are lost afterwards.
 *
 * A segment has 64 KiB: 24 blocks and a bit of class 0, 48 and a bit of class 1. So a block lies on each border, and with it its
 * line of 8 words belongs to two segments. */
#include "scenarios.h"
#include "world.h"

enum { KEYS = 6, LARGE = 42 * EX_LINE, SMALL = 21 * EX_LINE };

static kvp_pool *first, *second, *other;

static struct ghost {
    uint8_t published, another;
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
    int found = world_use_in(pool, 1, 4, 1);
    EX_CHECK(found || !ghost->published, "a block that was published before the host was lost is not found");
    EX_CHECK(held_by(pool, 0) + held_by(pool, 1) <= 2, "segments are held twice");
    EX_CHECK(world_put_in(pool, 0, 2, 2) == 2, "no room for class 0");
    EX_CHECK(world_put_in(pool, 1, 5, 1) == 1, "no room for class 1");
    world_check_here(pool);
}

static void check_other(void)
{
    world_check(other);
}

/* One block in each segment; that of the second is the last of its line of words, and older. */
static void publish_in_both(kvp_pool *pool)
{
    uint32_t number[48], old = 39, young = 7;
    struct kvp_key key[2] = {world_key(0), world_key(1)};
    uint64_t bytes[2] = {world_content(0, 0), world_content(1, 0)}, ref;

    IS(kvp_reserve(pool, 0, 48, number), KVP_OK);
    IS(kvp_fill(pool, 0, old, &bytes[1], 8), KVP_OK);
    IS(kvp_fill(pool, 0, young, &bytes[0], 8), KVP_OK);
    for (uint32_t i = 0; i < 48; i++)
        if (number[i] == old || number[i] == young)
            number[i] = KVP_NO_BLOCK;
    IS(kvp_publish(pool, 0, &old, &key[1], 1, &ref), 1);
    IS(kvp_publish(pool, 0, &young, &key[0], 1, &ref), 1);
    IS(kvp_withdraw(pool, 0, number, 48), KVP_OK);
    kvp_spill(&pool->arena);
}

static void lost_setup(void)
{
    make(1, 3);
    publish_in_both(first);
    kvp_pool_follow(other);
    world_spawn(first, take_segment, 0);
    world_spawn(other, reset_first, 0);
    world_spawn_machine(2, start_anew, EX_LAST);
}
const struct ex_scenario scenario_class_lost = {.name = "class-lost", .what = "a class takes a segment of another; the host is lost at any step",
                                                .setup = lost_setup, .check = check_other, .seconds = 60};

/* The same, and another worker publishes in what the first has only drained. */
static void reserve_small(void *pool)
{
    uint32_t number;

    kvp_reserve(pool, 1, 1, &number);
    ghost->published = 1;
    ex_wake();
}

static void publish_small(void *pool)
{
    while (!ghost->published)
        ex_spin();
    ghost->another = (uint8_t)world_put_in(pool, 1, 5, 1);
    ex_wake();
}

static void reset_in_the_end(void *pool)
{
    while (!ghost->another)
        ex_spin();
    reset_first(pool);
}

static void start_with_both(void *none)
{
    (void)none;
    kvp_pool *pool = world_open(0);
    EX_CHECK(pool, "a host that was reset cannot come back");
    EX_CHECK(!ghost->another || world_use_in(pool, 1, 5, 1), "a block that another worker published is not found");
    world_check_here(pool);
}

static void lost_by_two_setup(void)
{
    make(2, 3);
    publish_in_both(first);
    kvp_pool_follow(other);
    world_spawn(first, reserve_small, 0);
    world_spawn(second, publish_small, 0);
    world_spawn(other, reset_in_the_end, 0);
    world_spawn_machine(2, start_with_both, EX_LAST);
}
const struct ex_scenario scenario_class_lost_two = {.name = "class-lost-two", .what = "a worker publishes in a segment that another has drained; the host is lost",
                                                    .setup = lost_by_two_setup, .check = check_other, .seconds = 60};

/* The same without a loss; another worker of the host, and another host, use what is drained. */
static void use_large(void *pool)
{
    world_use(pool, 0, 2);
    world_merge(pool, 1);
    world_put(pool, 2, 1);
    world_merge(pool, 2);
    world_use(pool, 0, 3);
}

static void use_both(void *pool)
{
    world_use(pool, 1, 1);
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
    publish_in_both(first);
    kvp_pool_follow(other);
    world_spawn(first, take_segment, 0);
    world_spawn(second, use_large, 0);
    world_spawn(other, use_both, 0);
    world_spawn(first, remember, EX_LAST);
    world_spawn(other, compare, EX_LAST);
}
const struct ex_scenario scenario_class_moved = {.name = "class-moved", .what = "a class takes a segment of another while others use it",
                                                 .setup = moved_setup, .check = check, .preemptions = 2, .events = 1};

/* Two workers want a segment for class 1 at once. */
static void take_another(void *pool)
{
    ghost->another = (uint8_t)world_put_in(pool, 1, 5, 1);
}

/* Each finds idle what the other one is about to take, so one of them may be refused, or evict what the other has published. */
static void what_was_put_is_there(void *pool)
{
    EX_CHECK(ghost->published || ghost->another, "two segments were idle, and two workers got no block");
    EX_CHECK(world_use_in(pool, 1, 4, 1) + world_use_in(pool, 1, 5, 1) > 0, "nothing of what was published is there");
    EX_CHECK(world_put_in(pool, 0, 2, 1) + world_put_in(pool, 1, 3, 1) == 2, "now that nobody else is there, no room is left");
}

static void race_setup(void)
{
    make(2, 3);
    world_spawn(first, take_segment, 0);
    world_spawn(second, take_another, 0);
    world_spawn(first, what_was_put_is_there, EX_LAST);
}
const struct ex_scenario scenario_class_race = {.name = "class-race", .what = "two workers take segments of another class",
                                                .setup = race_setup, .check = check, .preemptions = 3, .events = 1};

/* ---- neighbours ---- */

static kvp_pool *pinner;
static uint64_t pinned;

static void drain(void *pool, uint32_t segment)
{
    kvp_lock(pool);
    kvp_segment_drain(&((kvp_pool *)pool)->arena, 0, segment);
    kvp_unlock(pool);
}

static void drain_first(void *pool)
{
    drain(pool, 0);
}

static void drain_second(void *pool)
{
    drain(pool, 1);
}

static void unpin(void *pool)
{
    uint64_t ref = pinned;

    world_look(pool, ref, 0);
    kvp_unpin_refs(pool, &ref, 1);
}

/* Both give up, if the last block on the border is pinned: whoever is last opens the others again. */
static void border_setup(void)
{
    uint32_t number[32], border = 31;
    struct kvp_key key = world_key(0);
    uint64_t bytes = world_content(0, 0);

    make(3, 3);
    pinner = world_join(0);
    IS(kvp_reserve(pinner, 0, 32, number), KVP_OK);
    for (uint32_t i = 0; i < 32; i++)
        if (number[i] == border)
            number[i] = KVP_NO_BLOCK;
    IS(kvp_fill(pinner, 0, border, &bytes, 8), KVP_OK);
    IS(kvp_publish(pinner, 0, &border, &key, 1, &pinned), 1);
    IS(kvp_withdraw(pinner, 0, number, 32), KVP_OK);
    IS(kvp_pin_refs(pinner, &pinned, 1), 1);
    kvp_spill(&pinner->arena);
    world_spawn(first, drain_first, 0);
    world_spawn(second, drain_second, 0);
}
const struct ex_scenario scenario_class_border = {.name = "class-border", .what = "two workers try to drain neighbouring segments, and cannot",
                                                  .setup = border_setup, .check = check, .seconds = 30};

static void unpinned_setup(void)
{
    border_setup();
    world_spawn(pinner, unpin, 0);
}
const struct ex_scenario scenario_class_unpinned = {.name = "class-unpinned", .what = "the same, and what was in the way is unpinned meanwhile",
                                                    .setup = unpinned_setup, .check = check, .preemptions = 3, .events = 1};

/* What one worker has reserved is its own until it is published, also while another drains the segment. */
static void reserve_and_publish(void *argument)
{
    kvp_pool *pool = argument;
    uint64_t bytes = world_content(2, 0), ref;
    struct kvp_key key = world_key(2);
    uint32_t number;

    if (kvp_reserve(pool, 0, 1, &number) != KVP_OK)
        return;
    IS(kvp_fill(pool, 0, number, &bytes, 8), KVP_OK);
    IS(kvp_publish(pool, 0, &number, &key, 1, &ref), 1);
    world_use(pool, 2, 1);
}

static void reserved_setup(void)
{
    uint32_t number[48];

    make(3, 3);
    pinner = world_join(0); /* it has all blocks that are not in the segment */
    IS(kvp_reserve(pinner, 0, 48, number), KVP_OK);
    for (uint32_t i = 0; i < 48; i++)
        if (number[i] < 24)
            number[i] = KVP_NO_BLOCK;
    IS(kvp_withdraw(pinner, 0, number, 48), KVP_OK);
    kvp_spill(&pinner->arena);
    world_spawn(second, reserve_and_publish, 0);
    world_spawn(first, drain_second, 0);
}
const struct ex_scenario scenario_class_reserved = {.name = "class-reserved", .what = "a worker reserves in a segment that another drains",
                                                    .setup = reserved_setup, .check = check, .seconds = 30};

/* Two workers adopt the two free segments of a host, for one class or for two. */
static void adopt_large(void *pool)
{
    kvp_lock(pool);
    kvp_segment_adopt(&((kvp_pool *)pool)->arena, 0);
    kvp_unlock(pool);
}

static void adopt_some(void *pool)
{
    uint32_t c = ex_choose(2);

    kvp_lock(pool);
    kvp_segment_adopt(&((kvp_pool *)pool)->arena, c);
    kvp_unlock(pool);
}

static void all_are_held(void *pool)
{
    IS(held_by(pool, 0) + held_by(pool, 1), 2);
}

static void free_setup(void)
{
    first = world_make(&(struct world_request){.hosts = 2, .workers = 2, .stride = {LARGE, SMALL}, .segments = 3});
    second = world_join(0);
    other = world_join(1);
    world_spawn(first, adopt_large, 0);
    world_spawn(second, adopt_some, 0);
    world_spawn(first, all_are_held, EX_LAST);
}
const struct ex_scenario scenario_class_free = {.name = "class-free", .what = "two workers adopt neighbouring segments",
                                                .setup = free_setup, .check = check, .seconds = 30};
