/* private.c -- what one simulated worker has for itself: put back before each run, as its stack is. */
#include "engine.h"

enum { HEAP_BYTES = 4 << 20, THREAD_HEAP_BYTES = 256 << 10, AREAS_MAX = 64 };

uint8_t ex_ghost[EX_GHOST_BYTES] __attribute__((aligned(64)));
static uint8_t ghost_kept[EX_GHOST_BYTES];
static uint8_t heap[HEAP_BYTES] __attribute__((aligned(64)));
static uint8_t thread_heap[EX_THREADS][THREAD_HEAP_BYTES] __attribute__((aligned(64)));
static uint64_t heap_used;
static struct area {
    uint8_t *at, *kept;
    uint64_t bytes;
} area[AREAS_MAX];
static int areas;

void ex_private(void *p, uint64_t bytes)
{
    if (areas == AREAS_MAX)
        ex_fail("more than %d private areas", AREAS_MAX);
    area[areas++] = (struct area){.at = p, .bytes = bytes};
}

/* In setup from one heap, in a run from the thread's own: addresses depend on nothing that others do. */
void *ex_allocate(uint64_t bytes)
{
    uint64_t rounded = (bytes + 15) & ~15ull, limit = HEAP_BYTES;
    uint64_t used = heap_used;
    uint8_t *from = heap;

    if (ex.phase == RUN) {
        used = ex.thread[ex.current].heap_used;
        from = thread_heap[ex.current];
        limit = THREAD_HEAP_BYTES;
    }
    if (used + rounded > limit)
        ex_fail("%llu private bytes do not fit", (unsigned long long)bytes);
    if (ex.phase == RUN)
        ex.thread[ex.current].heap_used += (uint32_t)rounded;
    else
        heap_used += rounded;
    return memset(from + used, 0, rounded);
}

void ex_private_keep(void)
{
    if (heap_used)
        ex_private(heap, heap_used);
    memcpy(ghost_kept, ex_ghost, sizeof ex_ghost);
    for (int i = 0; i < areas; i++) {
        area[i].kept = malloc(area[i].bytes);
        if (!area[i].kept)
            abort();
        memcpy(area[i].kept, area[i].at, area[i].bytes);
    }
}

void ex_private_restore(void)
{
    for (int i = 0; i < areas; i++)
        memcpy(area[i].at, area[i].kept, area[i].bytes);
    for (int i = 0; i < ex.threads; i++)
        ex.thread[i].heap_used = 0;
    memcpy(ex_ghost, ghost_kept, sizeof ex_ghost);
}

void ex_private_forget(void)
{
    for (int i = 0; i < areas; i++)
        free(area[i].kept);
    memset(ex_ghost, 0, sizeof ex_ghost);
    areas = 0;
    heap_used = 0;
}
