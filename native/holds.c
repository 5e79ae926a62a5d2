/* holds.c -- pins and reservations that end with an object. */
#include "native/handle.h"

#include <stdlib.h>
#include <string.h>

struct kvp_hold *kvp_hold_new(kvp_pool *pool, uint32_t c, uint32_t n)
{
    struct kvp_hold *hold = malloc(sizeof *hold + (size_t)n * (sizeof *hold->refs + sizeof *hold->numbers));

    if (!hold)
        return NULL;
    *hold = (struct kvp_hold){.pool = pool, .class_ = c, .n = n};
    hold->refs = (uint64_t *)(void *)(hold + 1);
    hold->numbers = (uint32_t *)(void *)(hold->refs + n);
    memset(hold->refs, 0, n * sizeof *hold->refs);
    memset(hold->numbers, 0xff, n * sizeof *hold->numbers); /* KVP_NO_BLOCK */
    __atomic_add_fetch(&pool->holders, 1, __ATOMIC_RELAXED);
    return hold;
}

int64_t kvp_hold_pin(struct kvp_hold *hold, const uint64_t *refs)
{
    memcpy(hold->refs, refs, hold->n * sizeof *refs);
    int64_t pinned = kvp_pin_refs(hold->pool, hold->refs, hold->n);
    if (pinned < 0 || pinned == hold->n)
        return pinned;
    kvp_unpin_refs(hold->pool, hold->refs, hold->n);
    uint64_t wrong = refs[pinned]; /* again, alone, for its own error */
    int64_t status = kvp_pin_refs(hold->pool, &wrong, 1);
    kvp_unpin_refs(hold->pool, &wrong, 1);
    return status < 0 ? status : kvp_fail(KVP_E_PINS, "%u blocks do not fit the pin slots left: release hits", hold->n);
}

void kvp_hold_clear(struct kvp_hold *hold)
{
    kvp_unpin_refs(hold->pool, hold->refs, hold->n);
    kvp_withdraw(hold->pool, hold->class_, hold->numbers, hold->n);
}

void kvp_hold_end(struct kvp_hold *hold)
{
    if (!hold)
        return;
    kvp_hold_clear(hold);
    kvp_pool_release(hold->pool);
    free(hold);
}
