/* holds.c -- pins and reservations that end with an object. */
#include "native/homes.h"

#include <stdlib.h>
#include <string.h>

struct kvp_hold *kvp_hold_new(kvp_pool *pool, uint32_t c, uint32_t n)
{
    struct kvp_hold *hold = malloc(sizeof *hold + (size_t)n * (sizeof *hold->refs + sizeof *hold->numbers + sizeof *hold->blocks));

    if (!hold)
        return NULL;
    *hold = (struct kvp_hold){.pool = pool, .class_ = c, .n = n};
    hold->refs = (uint64_t *)(void *)(hold + 1);
    hold->blocks = (int64_t *)(void *)(hold->refs + n);
    hold->numbers = (uint32_t *)(void *)(hold->blocks + n);
    memset(hold->refs, 0, n * sizeof *hold->refs);
    memset(hold->numbers, 0xff, n * sizeof *hold->numbers); /* KVP_NO_BLOCK */
    __atomic_add_fetch(&pool->holders, 1, __ATOMIC_RELAXED);
    return hold;
}

static void number_blocks(struct kvp_hold *hold, int64_t pinned)
{
    for (int64_t i = 0; i < pinned; i++)
        hold->blocks[i] = kvp_block_number((uint32_t)hold->refs[i]);
}

int64_t kvp_hold_match(struct kvp_hold *hold, const void *keys, uint32_t n)
{
    if (n > hold->n)
        return kvp_fail(KVP_E_INVALID, "%u keys do not fit a hold of %u", n, hold->n);
    int64_t pinned = kvp_match(hold->pool, hold->class_, keys, n, hold->refs);
    number_blocks(hold, pinned);
    return pinned;
}

int64_t kvp_hold_get(struct kvp_hold *hold, const void *key)
{
    int64_t pinned = kvp_hold_match(hold, key, 1);

    return pinned > 0 ? (int64_t)hold->refs[0] : pinned;
}

int64_t kvp_hold_reserve(struct kvp_hold *hold)
{
    int64_t status = kvp_reserve(hold->pool, hold->class_, hold->n, hold->numbers);

    return status < 0 || !hold->n ? status : hold->numbers[0];
}

int64_t kvp_hold_match_tokens(struct kvp_hold *hold, kvp_hash hash, const void *secret, const uint32_t *tokens,
                              uint32_t blocks, uint32_t block_tokens, struct kvp_chain *chain, void *keys)
{
    uint64_t learned = kvp_learned(hold->pool);
    struct kvp_search search;
    int status = kvp_enter_class(hold->pool, hold->class_);

    if (status == KVP_OK && blocks > hold->n)
        status = kvp_fail(KVP_E_INVALID, "%u keys do not fit a hold of %u", blocks, hold->n);
    if (status)
        return status;
    kvp_search_begin(&search, hold->pool, hold->class_, keys, 1, hold->refs);
    for (uint32_t at = 0, n; at < blocks; at += n) {
        n = GROUP - (uint32_t)chain->blocks % GROUP; /* to the end of a group */
        n = blocks - at < n ? blocks - at : n;
        status = kvp_keys(hash, secret, tokens + (size_t)at * block_tokens, n, block_tokens, chain,
                          (uint8_t *)keys + (size_t)at * KVP_KEY_BYTES);
        if (status) {
            memset(hold->refs, 0, at * sizeof *hold->refs); /* guesses: nothing is pinned */
            return status;
        }
        kvp_search_more(&search, at + n);
    }
    int64_t pinned = kvp_match_found(hold->pool, hold->class_, keys, blocks, hold->refs, learned, kvp_search_end(&search));
    number_blocks(hold, pinned);
    return pinned;
}

int64_t kvp_hold_pin(struct kvp_hold *hold, const uint64_t *refs, uint32_t n)
{
    if (n > hold->n)
        return kvp_fail(KVP_E_INVALID, "%u references do not fit a hold of %u", n, hold->n);
    memcpy(hold->refs, refs, n * sizeof *refs);
    int64_t pinned = kvp_pin_refs(hold->pool, hold->refs, n);
    if (pinned < 0 || pinned == n) {
        number_blocks(hold, pinned);
        return pinned;
    }
    kvp_unpin_refs(hold->pool, hold->refs, n);
    uint64_t wrong = refs[pinned]; /* again, alone, for its own error */
    int64_t status = kvp_pin_refs(hold->pool, &wrong, 1);
    kvp_unpin_refs(hold->pool, &wrong, 1);
    return status < 0 ? status : kvp_fail(KVP_E_PINS, "%u blocks do not fit the pin slots left: release hits", n);
}

void kvp_hold_clear(struct kvp_hold *hold)
{
    uint64_t pinned = 0;
    uint32_t free = KVP_NO_BLOCK; /* all ones */

    for (uint32_t i = 0; i < hold->n; i++)
        pinned |= hold->refs[i], free &= hold->numbers[i];
    if (pinned)
        kvp_unpin_refs(hold->pool, hold->refs, hold->n);
    if (free != KVP_NO_BLOCK)
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
