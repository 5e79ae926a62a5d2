/* copy.c -- moving payload in and out of the pool, and the crash points of the tests. */
#include "coherence/coherence.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { STREAM_BYTES_MIN = 4096, AHEAD_BYTES = 2048 };

void kvp_fence_rmw(void);
void kvp_fence_rmw(void)
{
    static uint64_t dummy;

    __atomic_fetch_add(&dummy, 0, __ATOMIC_SEQ_CST);
}

#if defined(__x86_64__) && !defined(KVP_TSAN)
#define STREAMS 1
/* Non-temporal stores write whole lines without reading them first. The source is prefetched 2 KiB ahead:
 * it is an engine's buffer, as cold as the destination. `to` is 64-byte aligned, `bytes` a multiple of 64. */
static void stream_sse2(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += KVP_LINE) {
        _mm_prefetch((const char *)from + i + AHEAD_BYTES, _MM_HINT_T0);
        for (uint64_t j = i; j < i + KVP_LINE; j += 16)
            _mm_stream_si128((__m128i *)(to + j), _mm_loadu_si128((const __m128i *)(from + j)));
    }
}

__attribute__((target("avx512f"))) static void stream_avx512(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += KVP_LINE) {
        _mm_prefetch((const char *)from + i + AHEAD_BYTES, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512(from + i));
    }
}

static void stream(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    if (__builtin_cpu_supports("avx512f"))
        stream_avx512(to, from, bytes);
    else
        stream_sse2(to, from, bytes);
    /* Non-temporal stores are not ordered by a later store: without this fence a reader could see the
     * block's word LIVE before its last lines. */
    _mm_sfence();
}
#else
#define STREAMS 0
static void stream(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    memcpy(to, from, bytes);
}
#endif

/* The part of [to, to + bytes) that non-temporal stores write: *head bytes before it are stored plainly. */
static uint64_t streamed(const void *to, uint64_t bytes, uint64_t *head)
{
    *head = -(uintptr_t)to & (KVP_LINE - 1);
    if (bytes < STREAM_BYTES_MIN)
        return *head = 0;
    return (bytes - *head) & ~(uint64_t)(KVP_LINE - 1);
}

static void copy(uint8_t *to, const uint8_t *source, uint64_t bytes)
{
    uint64_t head, body = streamed(to, bytes, &head);

    if (body) {
        memcpy(to, source, head);
        stream(to + head, source + head, body);
        to += head + body, source += head + body, bytes -= head + body;
    }
    memcpy(to, source, bytes);
}

#if KVP_MODE == KVP_SIM
void kvp_copy_in(void *pool, const void *from, uint64_t bytes)
{
    kvp_sim_copy_in(pool, from, bytes);
}
#else
/* Non-temporal stores leave no line in a cache (one that was there is evicted first), and their fence is in stream():
 * only what plain stores wrote is written back. Those write-backs are ordered by the write fence that the caller needs
 * anyway before it stores a word that says the block is whole; none is needed here. */
void kvp_copy_in(void *pool, const void *from, uint64_t bytes)
{
    uint64_t head = 0, body = STREAMS ? streamed(pool, bytes, &head) : 0;
    uint8_t *to = pool;

    copy(to, from, bytes);
    if (body) {
        if (head)
            nc_write_back(to, head);
        to += head + body, bytes -= head + body;
    }
    if (bytes)
        nc_write_back(to, bytes);
}
#endif

void kvp_copy_out(void *to, const void *pool, uint64_t bytes)
{
    copy(to, pool, bytes);
}

#ifdef KVP_CRASH_POINTS
#include <signal.h>
#include <unistd.h>

static const char *armed_name = "-";
static uint64_t armed_nth, passed;
static void (*visitor)(const char *name);

void kvp_crash_arm(const char *name, uint64_t nth)
{
    armed_name = name, armed_nth = nth, passed = 0;
}

void kvp_crash_visit(void (*visit)(const char *name))
{
    visitor = visit;
}

uint64_t kvp_crash_passed(void)
{
    return __atomic_load_n(&passed, __ATOMIC_RELAXED);
}

/* The keeper passes points as well as the caller: the count is shared between them. */
void kvp_crash_point(const char *name)
{
    if (visitor)
        visitor(name);
    if (*armed_name && strcmp(armed_name, name) != 0)
        return;
    if (__atomic_add_fetch(&passed, 1, __ATOMIC_RELAXED) == armed_nth)
        kill(getpid(), SIGKILL);
}
#endif
