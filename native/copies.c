/* copies.c -- payload by copy: out without a pin, in through reserved blocks. */
#include "native/handle.h"

#include <string.h>

enum { BATCH = 64 };

static int check_bytes(const kvp_pool *pool, uint32_t c, uint64_t bytes)
{
    if (bytes <= pool->arena.class[c].stride)
        return KVP_OK;
    return kvp_fail(KVP_E_INVALID, "%llu bytes do not fit a block of %llu bytes", (unsigned long long)bytes,
                    (unsigned long long)pool->arena.class[c].stride);
}

/* Copy, then look whether the word is still what it was: the evictor stores OWN before its first new byte, so
 * bytes read under an unchanged word are the right ones. */
static int read_one(kvp_pool *pool, uint64_t ref, void *to, uint64_t bytes)
{
    const uint8_t *from = kvp_block_data(&pool->arena, (uint32_t)ref);

    kvp_refresh_bytes(&pool->arena, ref, bytes);
    nc_read_fence(); /* no line is read before it is dropped */
    kvp_copy_out(to, from, bytes);
    kvp_refresh_word(&pool->arena, ref);
    nc_read_fence(); /* the copy's loads come before the word's, and that after it was dropped */
    if (kvp_ref_live(&pool->arena, ref))
        return 1;
    memset(to, 0, bytes); /* what was copied may be another tenant's */
    kvp_count(pool, KVP_COUNT_STALE, 1);
    kvp_doubt(pool, ref);
    return 0;
}

int64_t kvp_read(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, void *const *to, uint64_t bytes, uint8_t *got)
{
    uint64_t refs[BATCH];
    int64_t total = 0;
    int status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    struct kvp_order order = kvp_order_of_call(pool, n);
    for (uint32_t at = 0; at < n; at += BATCH) {
        uint32_t count = n - at < BATCH ? n - at : BATCH;
        kvp_find(pool, c, (const uint8_t *)keys + 16 * (size_t)at, count, 0, refs);
        for (uint32_t i = 0; i < count; i++) {
            got[at + i] = (uint8_t)(refs[i] && read_one(pool, refs[i], to[at + i], bytes));
            if (!got[at + i])
                refs[i] = 0;
            total += got[at + i];
        }
        kvp_touch_refs(pool, refs, count, &order);
    }
    kvp_count(pool, KVP_COUNT_BYTES_OUT, (uint64_t)total * bytes);
    return total;
}

int kvp_fill(kvp_pool *pool, uint32_t c, uint32_t number, const void *from, uint64_t bytes)
{
    uint64_t ref;
    int status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    __atomic_add_fetch(&pool->copies, 1, __ATOMIC_ACQ_REL);
    if (!(status = kvp_future_ref(&pool->arena, c, number, &ref)) && !(status = kvp_enter(pool))) {
        kvp_copy_in(kvp_block_data(&pool->arena, kvp_block(c, number)), from, bytes);
        kvp_count(pool, KVP_COUNT_BYTES_IN, bytes);
    }
    __atomic_sub_fetch(&pool->copies, 1, __ATOMIC_ACQ_REL);
    return status;
}

/* Store up to BATCH blocks; those whose key is present are skipped. */
static int64_t put_batch(kvp_pool *pool, uint32_t c, const uint8_t *keys, uint32_t n, const void *const *from, uint64_t bytes,
                         struct kvp_order *order)
{
    uint64_t refs[BATCH];
    uint32_t numbers[BATCH], which[BATCH], count = 0;
    uint8_t wanted[BATCH * KVP_KEY_BYTES];

    kvp_directory_find(pool, c, keys, n, 0, refs);
    for (uint32_t i = 0; i < n; i++)
        if (!refs[i]) {
            memcpy(wanted + 16 * (size_t)count, keys + 16 * (size_t)i, 16);
            which[count++] = i;
        }
    kvp_count(pool, KVP_COUNT_DUPLICATES, n - count);
    if (!count)
        return 0;
    int64_t status = kvp_reserve(pool, c, count, numbers);
    for (uint32_t i = 0; i < count && status == KVP_OK; i++)
        status = kvp_fill(pool, c, numbers[i], from[which[i]], bytes);
    if (status == KVP_OK)
        status = kvp_publish_ordered(pool, c, numbers, wanted, count, refs, order);
    if (status < 0)
        kvp_withdraw(pool, c, numbers, count); /* a zero key, or closed meanwhile: nothing stays reserved */
    return status;
}

int64_t kvp_put(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, const void *const *from, uint64_t bytes)
{
    int64_t stored = 0, status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    kvp_replay(pool, KVP_PATIENCE); /* what others have stored meanwhile is not stored again */
    struct kvp_order order = kvp_order_of_call(pool, n);
    for (uint32_t at = 0; at < n && status >= 0; at += BATCH) {
        uint32_t count = n - at < BATCH ? n - at : BATCH;
        status = put_batch(pool, c, (const uint8_t *)keys + 16 * (size_t)at, count, from + at, bytes, &order);
        stored += status > 0 ? status : 0;
    }
    return status < 0 && stored == 0 ? status : stored;
}
