/* worker.c -- a worker process driven by lines on standard input, for tests/test_machine.py. Built with crash points,
 * so that `arm N` makes its N-th step from there a SIGKILL. Each command answers with one line. Keys are numbers:
 * key_of(chain * 64 + position). */
#include "common.h"

#include <signal.h>

enum { CHAIN = 64, MOST = 64 };

static pthread_t commanded;
static uint64_t steps_left;
static struct kvp_hold *pinned, *reserved;
static uint64_t pinned_first, reserved_first;

/* Only the thread that obeys counts: when the keeper passes a point depends on the clock. */
static void step(const char *name)
{
    (void)name;
    if (pthread_equal(pthread_self(), commanded) && steps_left && --steps_left == 0)
        kill(getpid(), SIGKILL);
}

static void keys_from(uint64_t first, uint32_t n, struct kvp_key *keys)
{
    for (uint32_t i = 0; i < n; i++)
        keys[i] = key_of(first + i);
}

static void write_payload(kvp_pool *pool, uint32_t number, uint64_t id)
{
    struct kvp_key key = key_of(id);
    payload_write(kvp_block_data(&pool->arena, number), &key, pool->arena.class[0].stride);
}

static int held_right(kvp_pool *pool)
{
    for (uint32_t i = 0; pinned && i < pinned->n; i++) {
        struct kvp_key key = key_of(pinned_first + i);
        if (pinned->refs[i] &&
            !payload_is(kvp_block_data(&pool->arena, (uint32_t)pinned->refs[i]), &key, pool->arena.class[0].stride))
            return 0;
    }
    return 1;
}

static int64_t match(kvp_pool *pool, uint64_t first, uint32_t n)
{
    struct kvp_key keys[MOST];

    keys_from(first, n, keys);
    kvp_hold_end(pinned);
    pinned = kvp_hold_new(pool, 0, n);
    pinned_first = first;
    return kvp_match(pool, 0, keys, n, pinned->refs);
}

static int64_t reserve(kvp_pool *pool, uint64_t first, uint32_t n)
{
    kvp_hold_end(reserved);
    reserved = kvp_hold_new(pool, 0, n);
    reserved_first = first;
    int status = kvp_reserve(pool, 0, n, reserved->numbers);
    for (uint32_t i = 0; i < n && status == KVP_OK; i++)
        write_payload(pool, reserved->numbers[i], first + i);
    return status;
}

static int64_t publish(kvp_pool *pool)
{
    struct kvp_key keys[MOST];
    uint64_t refs[MOST];

    if (!reserved)
        return 0;
    keys_from(reserved_first, reserved->n, keys);
    return kvp_publish(pool, 0, reserved->numbers, keys, reserved->n, refs);
}

/* Which of n keys are present, as bits; -1 if one has wrong bytes. */
static int64_t present(kvp_pool *pool, uint64_t first, uint32_t n)
{
    int64_t bits = 0;

    for (uint32_t i = 0; i < n; i++) {
        int found = probe(pool, 0, first + i);
        if (found < 0)
            return -1;
        bits |= (int64_t)found << i;
    }
    return bits;
}

static int64_t obey(kvp_pool *pool, const char *verb, uint64_t first, uint32_t n)
{
    struct kvp_key keys[MOST];

    keys_from(first, n, keys);
    if (strcmp(verb, "match") == 0)
        return match(pool, first, n);
    if (strcmp(verb, "release") == 0)
        return pinned ? kvp_hold_clear(pinned), 0 : 0;
    if (strcmp(verb, "right") == 0)
        return held_right(pool);
    if (strcmp(verb, "reserve") == 0)
        return reserve(pool, first, n);
    if (strcmp(verb, "publish") == 0)
        return publish(pool);
    if (strcmp(verb, "withdraw") == 0)
        return reserved ? kvp_hold_clear(reserved), 0 : 0;
    if (strcmp(verb, "remove") == 0)
        return kvp_remove(pool, 0, keys, n);
    if (strcmp(verb, "present") == 0)
        return present(pool, first, n);
    if (strcmp(verb, "evict") == 0)
        return kvp_shrink(pool, 0, n);
    REQUIRE(strcmp(verb, "arm") == 0, "no verb '%s'", verb);
    return steps_left = n, 0;
}

int main(int argc, char **argv)
{
    char verb[16];
    unsigned long long chain;
    unsigned n;
    kvp_pool *pool;

    REQUIRE(argc == 3 && kvp_pool_open(argv[1], (uint32_t)atoi(argv[2]), &pool) == KVP_OK, "cannot open: %s",
            kvp_error_detail());
    commanded = pthread_self();
    kvp_crash_visit(step);
    printf("ready %u\n", pool->arena.self);
    fflush(stdout);
    while (scanf("%15s %llu %u", verb, &chain, &n) == 3) {
        printf("%lld\n", (long long)obey(pool, verb, chain * CHAIN, n));
        fflush(stdout);
    }
    kvp_hold_end(pinned);
    kvp_hold_end(reserved);
    kvp_pool_free(pool);
    return 0;
}
