/* makers.c -- two machines make a pool on one device: at once, one later, one lost in the middle of it. */
#include "scenarios.h"
#include "world.h"

enum { RIVALS = 2, RESETTER = 2 };
enum place { AWAY, AT_IT, SETTLED };

/* What the threads tell each other, past the pool: the oracle's state. */
static struct ghost {
    kvp_pool *pool[RIVALS]; /* what each has made, or opened */
    uint8_t place[RIVALS], looks, made, beaten, created[RIVALS], elected;
} *const ghost = (struct ghost *)(void *)ex_ghost;

static void prepare(void)
{
    world_prepare(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 1}, 1);
    ex_allow_two_writers();
    ex_allow_dirty_invalidate();
    standins_kind = KVP_MAP_DAX;
}

static void make_against_rival(void *none)
{
    int me = ex_my_host();

    (void)none;
    ghost->place[me] = AT_IT;
    ghost->pool[me] = world_create();
    ghost->place[me] = SETTLED;
    ex_wake();
    ghost->created[me] = ghost->pool[me] != NULL;
    if (ghost->pool[me]) {
        ghost->made++;
        world_merge(ghost->pool[me], 1);
        world_put(ghost->pool[me], 0, 1);
    } else
        ghost->beaten++;
}

static void one_pool_check(void)
{
    EX_CHECK(ghost->made == 1 && ghost->beaten == 1, "of two machines that make a pool at once %u have made one", ghost->made);
}

/* The one that was made is whole, whatever the other has written before it gave up. */
static void use_and_check(void *none)
{
    kvp_pool *pool = ghost->pool[ex_my_host()];

    (void)none;
    if (!pool)
        return;
    EX_CHECK(world_use(pool, 0, 1) == 1, "a pool that was made against a rival has lost a key");
    world_check_here(pool);
}

static void two_makers(void (*second)(void *none))
{
    prepare();
    world_spawn_machine(0, make_against_rival, 0);
    world_spawn_machine(1, second, 0);
    for (int machine = 0; machine < RIVALS; machine++)
        world_spawn_machine(machine, use_and_check, EX_LAST);
}

/* ---- at once ---- */

/* Each waits until the other has looked and written, as the pause in the election is for. */
static void wait_for_rival(void)
{
    ghost->looks++;
    ex_wake();
    while (ghost->looks < RIVALS)
        ex_spin();
}

static void two_makers_setup(void)
{
    two_makers(make_against_rival);
    world_slept = wait_for_rival;
}
const struct ex_scenario scenario_two_makers = {.name = "two-makers", .what = "two machines make a pool on one device at once",
                                       .setup = two_makers_setup, .check = one_pool_check, .seconds = 20};

/* ---- one later than the other ---- */

/* The pause is longer than what a rival that is at it needs until it pauses as well, looks again who was last, or has ended. */
static void let_rival_settle(void)
{
    int me = ex_my_host(), rival = !me;

    ghost->place[me] = SETTLED;
    ex_wake();
    while (ghost->place[rival] == AT_IT && !(ex_died() >> 16 & 1u << rival))
        ex_spin();
    ghost->place[me] = AT_IT;
    ghost->elected |= (uint8_t)(1 << me);
    ex_wake();
}

/* It looks at the device while the first, whose pause has ended, formats it. */
static void make_late(void *none)
{
    while (!(ghost->elected & 1))
        ex_spin();
    make_against_rival(none);
}

static void late_maker_setup(void)
{
    two_makers(make_late);
    world_slept = let_rival_settle;
}
const struct ex_scenario scenario_late_maker = {.name = "late-maker", .what = "a machine makes a pool on a device while another one is at it",
                                       .setup = late_maker_setup, .check = one_pool_check, .seconds = 20};

/* ---- one is lost ---- */

static void reset_rival(void *none)
{
    (void)none;
    ex_reset_host(0);
    ex_wake();
}

/* Until there is a pool: its own, or the one that the lost machine had made to the end. */
static void make_or_open(void *none)
{
    int me = ex_my_host();

    make_against_rival(none);
    for (int mine = 1; !ghost->pool[me]; mine = !mine) {
        while (!(ex_died() >> 16 & 1))
            ex_spin();
        ghost->pool[me] = mine ? world_create() : world_open(1);
        ghost->created[me] = mine && ghost->pool[me];
        EX_CHECK(mine || ghost->pool[me], "after a machine was lost that made a pool, nobody can make or open one");
    }
    EX_CHECK(!(ghost->created[0] && ghost->created[me]), "a pool that was made is made anew over it");
    world_merge(ghost->pool[me], 2);
    if (!world_use(ghost->pool[me], 0, 1))
        EX_CHECK(world_put(ghost->pool[me], 0, 1) == 1, "a machine that has outlived its rival cannot publish");
}

static void maker_lost_setup(void)
{
    prepare();
    world_slept = let_rival_settle;
    world_spawn_machine(0, make_against_rival, 0);
    world_spawn_machine(1, make_or_open, 0);
    world_spawn_machine(RESETTER, reset_rival, 0);
    world_spawn_machine(1, use_and_check, EX_LAST);
}
const struct ex_scenario scenario_maker_lost = {.name = "maker-lost", .what = "of two machines that make a pool one is lost in the middle of it",
                                       .setup = maker_lost_setup, .seconds = 20};
