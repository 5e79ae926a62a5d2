/* wait.c -- waiting for keys that others are about to publish. */
#include "native/handle.h"

#include <time.h>

enum { BATCH = 64, LOOKS = KVP_MODE == KVP_EXPLORE ? 1 : 256, SLICE_NS = KVP_TICK_MS * 1000000, AFAR_NS = 1000000 };

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* How many of the first keys are there; `from` of them have been. */
static uint32_t look(const kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, uint32_t from)
{
    uint64_t refs[BATCH];

    while (from < n) {
        uint32_t count = n - from < BATCH ? n - from : BATCH;
        uint32_t found = kvp_directory_find(pool, c, (const uint8_t *)keys + 16 * (size_t)from, count, 1, refs);
        from += found;
        if (found < count)
            break;
    }
    return from;
}

/* Look for some microseconds, and then once more, announced: *turn is what to sleep on. */
static uint32_t look_hard(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, uint32_t from, uint32_t *turn)
{
    for (int i = 0; i < LOOKS && from < n; i++) /* waking a sleeper takes tens of microseconds */
        from = look(pool, c, keys, n, from);
    if (from == n)
        return n;
    *turn = kvp_gate_enter(&pool->arena.head->gate);
    kvp_replay(pool, KVP_PATIENCE);
    return look(pool, c, keys, n, from);
}

int64_t kvp_wait(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, uint32_t timeout_ms)
{
    uint64_t end = now_ns() + timeout_ms * 1000000ull;
    uint64_t slice = pool->arena.layout.hosts > 1 ? AFAR_NS : SLICE_NS; /* other hosts wake nobody: their logs are looked at */
    int status = kvp_enter_class(pool, c);
    uint32_t found = 0, turn;

    for (; status == KVP_OK; status = kvp_enter(pool)) {
        found = look_hard(pool, c, keys, n, found, &turn);
        uint64_t now = now_ns();
        if (found == n || now >= end)
            break;
        if (!kvp_gate_sleep(&pool->arena.head->gate, turn, end - now < slice ? end - now : slice))
            break;
    }
    if (status)
        return status;
    kvp_count(pool, KVP_COUNT_LOOKUPS, n);
    kvp_count(pool, KVP_COUNT_HITS, found);
    return found;
}
