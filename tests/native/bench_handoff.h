/* bench_handoff.h -- how long a publication takes to whoever waits for it: rows of bench_core.c. */
#ifndef KVP_BENCH_HANDOFF_H
#define KVP_BENCH_HANDOFF_H
#include "bench_world.h"

/* ---- handoff ---- */

/* What the two processes share besides the pool: the line that goes to and fro in the bound. */
struct shared {
    co_u64 ball;
    uint8_t pad[KVP_LINE - sizeof(co_u64)];
    co_u64 ready;
};

struct player {
    kvp_pool *pool;
    struct shared *shared;
    uint32_t *numbers;
    uint32_t rounds;
    int side;              /* 0 serves, 1 answers */
};

static struct kvp_key round_key(uint32_t round, int side)
{
    uint64_t digest = (round * 2ull + (uint64_t)side + 1) * 0x9e3779b97f4a7c15u;

    return (struct kvp_key){digest >> 7, digest};
}

static void play_pool(struct player *player, uint32_t round, int side)
{
    struct kvp_key key = round_key(round, side);
    double until = now_ns() + WAIT_S * 1e9;
    uint64_t ref = 0;

    if (side == player->side) {
        must(kvp_publish(player->pool, 0, &player->numbers[round], &key, 1, &ref), "kvp_publish");
        return;
    }
    for (uint32_t i = 1; kvp_lookup(player->pool, 0, &key, 1, &ref) != 1; i++)
        if (i % 65536 == 0 && now_ns() > until)
            fail("the other process does not answer");
}

static void play_line(struct player *player, uint32_t round, int side)
{
    uint64_t turn = round * 2ull + (uint64_t)side + 1;
    double until = now_ns() + WAIT_S * 1e9;

    if (side == player->side) {
        co_store(&player->shared->ball, turn);
        return;
    }
    for (uint32_t i = 1; co_load(&player->shared->ball) < turn; i++)
        if (i % 65536 == 0 && now_ns() > until)
            fail("the other process does not answer");
}

typedef void (*play)(struct player *player, uint32_t round, int side);

static double time_round(struct player *player, uint32_t round, play play)
{
    double start = now_ns();

    play(player, round, 0);
    play(player, round, 1);
    return (now_ns() - start) / 2; /* one way */
}

static void play_rounds(struct player *player, double *pool, double *line)
{
    player->numbers = memory(player->rounds * sizeof *player->numbers);
    must(kvp_reserve(player->pool, 0, player->rounds, player->numbers), "kvp_reserve");
    __atomic_add_fetch(&player->shared->ready.co64, 1, __ATOMIC_ACQ_REL);
    while (co_load(&player->shared->ready) < 2)
        ;
    for (uint32_t round = 0; round < player->rounds; round++) {
        pool[round] = time_round(player, round, play_pool);
        line[round] = time_round(player, round, play_line);
    }
}

static void handoff_row(uint32_t rounds)
{
    static double pool[SAMPLES_MAX], line[SAMPLES_MAX];
    struct player player = {.pool = make_pool(4 * SAMPLES_MAX), .rounds = rounds < SAMPLES_MAX ? rounds : SAMPLES_MAX};

    player.shared = mmap(NULL, KVP_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (player.shared == MAP_FAILED)
        fail("no shared page");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        player.side = 1;
        must(kvp_pool_open(kvp_pool_uri(player.pool), 0, &player.pool), "kvp_pool_open");
        play_rounds(&player, pool, line);
        kvp_pool_free(player.pool);
        _exit(0);
    }
    if (child < 0)
        fail("cannot fork");
    play_rounds(&player, pool, line);
    waitpid(child, NULL, 0);
    row("handoff to a spinning process (C)", "ns", pool, player.rounds, median(line, player.rounds), 1);
    kvp_pool_free(player.pool);
}

/* ---- to a sleeper ---- */

/* What the two processes share; the waiter writes how long it took. */
struct bed {
    struct kvp_gate bare;  /* the bound: a word to sleep on, and nothing to find */
    co_u64 round;          /* grows when the waiter is ready for it */
    co_u64 rung_ns, woken_ns;
};

static uint64_t now_whole_ns(void)
{
    return (uint64_t)now_ns();
}

/* A round of the waiter: 0 by key, 1 bare. */
static void sleep_once(kvp_pool *pool, struct bed *bed, uint32_t round)
{
    struct kvp_key key = round_key(round / 2, 1);
    uint32_t turn = co_load32(&bed->bare.turn);

    co_store(&bed->round, round + 1ull);
    if (round % 2 == 0 && must(kvp_wait(pool, 0, &key, 1, WAIT_S * 1000), "kvp_wait") != 1)
        fail("nobody publishes");
    while (round % 2 && co_load32(&bed->bare.turn) == turn)
        kvp_gate_sleep(&bed->bare, turn, 1000000);
    co_store(&bed->woken_ns, now_whole_ns());
}

/* The same round of who wakes it, once it has had the time to fall asleep. */
static double wake_once(kvp_pool *pool, struct bed *bed, uint32_t round, uint32_t *number)
{
    struct timespec pause = {0, 500000};
    struct kvp_key key = round_key(round / 2, 1);
    uint64_t ref;

    while (co_load(&bed->round) != round + 1ull)
        nanosleep(&pause, NULL);
    nanosleep(&pause, NULL);
    co_store(&bed->woken_ns, 0);
    co_store(&bed->rung_ns, now_whole_ns());
    if (round % 2)
        kvp_gate_wake(&bed->bare);
    else
        must(kvp_publish(pool, 0, number, &key, 1, &ref), "kvp_publish");
    while (!co_load(&bed->woken_ns))
        ;
    return (double)(co_load(&bed->woken_ns) - co_load(&bed->rung_ns));
}

static void sleeper_row(uint32_t rounds)
{
    static double spent[2][SAMPLES_MAX];
    static uint32_t numbers[SAMPLES_MAX];
    kvp_pool *pool = make_pool(4 * SAMPLES_MAX);
    struct bed *bed = mmap(NULL, KVP_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (bed == MAP_FAILED)
        fail("no shared page");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        must(kvp_pool_open(kvp_pool_uri(pool), 0, &pool), "kvp_pool_open");
        for (uint32_t round = 0; round < 2 * rounds; round++)
            sleep_once(pool, bed, round);
        kvp_pool_free(pool);
        _exit(0);
    }
    must(kvp_reserve(pool, 0, rounds, numbers), "kvp_reserve");
    for (uint32_t round = 0; round < 2 * rounds; round++)
        spent[round % 2][round / 2] = wake_once(pool, bed, round, &numbers[round / 2]);
    waitpid(child, NULL, 0);
    row("handoff to a sleeping process (C)", "us", spent[0], rounds, median(spent[1], rounds), 1e3);
    kvp_pool_free(pool);
}

/* What a publisher pays for those who might sleep, when nobody does; beside the fence alone. */
static void nobody_row(uint32_t samples)
{
    static double spent[SAMPLES_MAX], fence[SAMPLES_MAX];
    static struct kvp_gate gate;

    for (uint32_t i = 0; i < samples; i++) {
        double start = now_ns();
        for (uint32_t k = 0; k < PAIRS; k++)
            kvp_gate_open(&gate);
        spent[i] = (now_ns() - start) / PAIRS;
        start = now_ns();
        for (uint32_t k = 0; k < PAIRS; k++)
            co_full_fence();
        fence[i] = (now_ns() - start) / PAIRS;
    }
    row("publication that nobody waits for, the look (C)", "ns", spent, samples, median(fence, samples), 1);
}

static void handoff_suite(uint32_t samples)
{
    nobody_row(samples);
    sleeper_row(samples * 2 < SAMPLES_MAX ? samples * 2 : SAMPLES_MAX);
    if (sysconf(_SC_NPROCESSORS_ONLN) > 1) /* on one, a spinning process only keeps the other from running */
        handoff_row(samples * TURN);
}

#endif
