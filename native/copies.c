/* copies.c -- payload by copy: out without a pin, in through reserved blocks. */
#include "native/handle.h"

#include <string.h>

enum { BATCH = 64 };

/* The caller's side of a copy: block i is the buffer at flat[i], or row rows[i] of each part. */
struct side {
    void *const *flat;
    const struct kvp_part *parts;
    const uint64_t *rows;
    uint32_t part_count;
    uint64_t bytes;            /* of a block that are copied */
    uint64_t reach;            /* of a block that are touched: from its first byte */
};

static uint8_t *row_of(const struct kvp_part *part, uint64_t row)
{
    return (uint8_t *)part->base + row * part->stride;
}

static int check_bytes(const kvp_pool *pool, uint32_t c, uint64_t bytes)
{
    if (bytes <= pool->arena.class[c].stride)
        return KVP_OK;
    return kvp_fail(KVP_E_INVALID, "%llu bytes do not fit a block of %llu bytes", (unsigned long long)bytes,
                    (unsigned long long)pool->arena.class[c].stride);
}

static struct side flat_side(void *const *flat, uint64_t bytes)
{
    return (struct side){.flat = flat, .bytes = bytes, .reach = bytes};
}

static int parts_side(const kvp_pool *pool, uint32_t c, const struct kvp_part *parts, uint32_t count, const uint64_t *rows,
                      struct side *side)
{
    *side = (struct side){.parts = parts, .rows = rows, .part_count = count};
    for (uint32_t i = 0; i < count; i++) {
        uint64_t end = parts[i].at + parts[i].bytes;
        if (end < parts[i].at)
            return kvp_fail(KVP_E_INVALID, "part %u ends beyond any block", i);
        side->bytes += parts[i].bytes;
        side->reach = end > side->reach ? end : side->reach;
    }
    return count ? check_bytes(pool, c, side->reach) : kvp_fail(KVP_E_INVALID, "a block has at least one part");
}

/* ---- out ---- */

static void copy_out(const struct side *side, uint32_t i, const uint8_t *from)
{
    if (side->flat)
        kvp_copy_out(side->flat[i], from, side->bytes);
    for (uint32_t p = 0; p < side->part_count; p++)
        kvp_copy_out(row_of(&side->parts[p], side->rows[i]), from + side->parts[p].at, side->parts[p].bytes);
}

static void wipe(const struct side *side, uint32_t i)
{
    if (side->flat)
        memset(side->flat[i], 0, side->bytes);
    for (uint32_t p = 0; p < side->part_count; p++)
        memset(row_of(&side->parts[p], side->rows[i]), 0, side->parts[p].bytes);
}

/* Copy, then look whether the word is still what it was: the evictor stores OWN before its first new byte, so
 * bytes read under an unchanged word are the right ones. */
static int read_one(kvp_pool *pool, uint64_t ref, const struct side *side, uint32_t i)
{
    const uint8_t *from = kvp_block_data(&pool->arena, (uint32_t)ref);

    kvp_refresh_bytes(&pool->arena, ref, side->reach);
    nc_read_fence(); /* no line is read before it is dropped */
    copy_out(side, i, from);
    kvp_refresh_word(&pool->arena, ref);
    nc_read_fence(); /* the copy's loads come before the word's, and that after it was dropped */
    if (kvp_ref_live(&pool->arena, ref))
        return 1;
    wipe(side, i); /* what was copied may be another tenant's */
    kvp_count(pool, KVP_COUNT_STALE, 1);
    kvp_doubt(pool, ref);
    return 0;
}

static int64_t read_all(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, const struct side *side, uint8_t *got)
{
    uint64_t refs[BATCH];
    int64_t total = 0;
    struct kvp_order order = kvp_order_of_call(pool, n);

    for (uint32_t at = 0; at < n; at += BATCH) {
        uint32_t count = n - at < BATCH ? n - at : BATCH;
        int64_t found = kvp_find(pool, c, (const uint8_t *)keys + 16 * (size_t)at, count, 0, refs);
        /* Not after the copies: a locked operation waits until their last line is in memory, and the caller need not. */
        kvp_count(pool, KVP_COUNT_BYTES_OUT, (uint64_t)found * side->bytes);
        for (uint32_t i = 0; i < count; i++) {
            got[at + i] = (uint8_t)(refs[i] && read_one(pool, refs[i], side, at + i));
            if (!got[at + i])
                refs[i] = 0;
            total += got[at + i];
        }
        kvp_touch_refs(pool, refs, count, &order);
    }
    return total;
}

int64_t kvp_read(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, void *const *to, uint64_t bytes, uint8_t *got)
{
    struct side side = flat_side(to, bytes);
    int status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    return read_all(pool, c, keys, n, &side, got);
}

int64_t kvp_read_one(kvp_pool *pool, uint32_t c, const void *key, void *to, uint64_t bytes)
{
    uint8_t got;

    return kvp_read(pool, c, key, 1, &to, bytes, &got);
}

int64_t kvp_read_parts(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, const struct kvp_part *parts,
                       uint32_t part_count, const uint64_t *rows, uint8_t *got)
{
    struct side side;
    int status = kvp_enter_class(pool, c);

    if (status || (status = parts_side(pool, c, parts, part_count, rows, &side)))
        return status;
    return read_all(pool, c, keys, n, &side, got);
}

/* ---- in ---- */

static void copy_in(const struct side *side, uint32_t i, uint8_t *to)
{
    if (side->flat)
        kvp_copy_in(to, side->flat[i], side->bytes);
    for (uint32_t p = 0; p < side->part_count; p++)
        kvp_copy_in(to + side->parts[p].at, row_of(&side->parts[p], side->rows[i]), side->parts[p].bytes);
}

/* What the parts leave out is not left as another tenant had it: nobody who reads the whole block may see that. */
static void blank(uint8_t *to, const struct side *side, uint64_t stride)
{
    static const uint8_t zeros[4096];

    for (uint64_t at = side->bytes < side->reach ? 0 : side->reach, n; at < stride; at += n) {
        n = stride - at < sizeof zeros ? stride - at : sizeof zeros;
        kvp_copy_in(to + at, zeros, n);
    }
}

static int fill(kvp_pool *pool, uint32_t c, uint32_t number, const struct side *side, uint32_t i, int is_whole)
{
    uint64_t ref;
    int status;

    __atomic_add_fetch(&pool->copies, 1, __ATOMIC_ACQ_REL);
    if (!(status = kvp_enter(pool)) && !(status = kvp_future_ref(&pool->arena, c, number, &ref))) { /* closed, then ours */
        uint8_t *to = kvp_block_data(&pool->arena, kvp_block(c, number));
        if (is_whole)
            blank(to, side, pool->arena.class[c].stride);
        copy_in(side, i, to);
        kvp_count(pool, KVP_COUNT_BYTES_IN, side->bytes);
    }
    __atomic_sub_fetch(&pool->copies, 1, __ATOMIC_ACQ_REL);
    return status;
}

int kvp_fill(kvp_pool *pool, uint32_t c, uint32_t number, const void *from, uint64_t bytes)
{
    void *source = (void *)(uintptr_t)from;
    struct side side = flat_side(&source, bytes);
    int status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    return fill(pool, c, number, &side, 0, 0);
}

/* Store up to BATCH blocks, from the one at `at` on; those whose key is present are skipped. */
static int64_t put_batch(kvp_pool *pool, uint32_t c, const uint8_t *keys, uint32_t at, uint32_t n, const struct side *side,
                         struct kvp_order *order)
{
    uint64_t refs[BATCH];
    uint32_t numbers[BATCH], which[BATCH], count = 0;
    uint8_t wanted[BATCH * KVP_KEY_BYTES];

    kvp_find_here(pool, c, keys, n, 0, refs);
    for (uint32_t i = 0; i < n; i++)
        if (!refs[i]) {
            memcpy(wanted + 16 * (size_t)count, keys + 16 * (size_t)i, 16);
            which[count++] = at + i;
        }
    kvp_count(pool, KVP_COUNT_DUPLICATES, n - count);
    if (!count)
        return 0;
    int64_t status = kvp_reserve(pool, c, count, numbers);
    for (uint32_t i = 0; i < count && status == KVP_OK; i++)
        status = fill(pool, c, numbers[i], side, which[i], 1);
    if (status == KVP_OK)
        status = kvp_publish_ordered(pool, c, numbers, wanted, count, refs, order);
    if (status < 0)
        kvp_withdraw(pool, c, numbers, count); /* a zero key, or closed meanwhile: nothing stays reserved */
    return status;
}

static int64_t put_all(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, const struct side *side)
{
    int64_t stored = 0, status = KVP_OK;

    kvp_replay(pool, KVP_PATIENCE); /* what others have stored meanwhile is not stored again */
    struct kvp_order order = kvp_order_of_call(pool, n);
    for (uint32_t at = 0; at < n && status >= 0; at += BATCH) {
        uint32_t count = n - at < BATCH ? n - at : BATCH;
        status = put_batch(pool, c, (const uint8_t *)keys + 16 * (size_t)at, at, count, side, &order);
        stored += status > 0 ? status : 0;
    }
    return status < 0 && stored == 0 ? status : stored;
}

int64_t kvp_put(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, const void *const *from, uint64_t bytes)
{
    struct side side = flat_side((void *const *)(uintptr_t)from, bytes);
    int status = kvp_enter_class(pool, c);

    if (status || (status = check_bytes(pool, c, bytes)))
        return status;
    return put_all(pool, c, keys, n, &side);
}

int64_t kvp_put_one(kvp_pool *pool, uint32_t c, const void *key, const void *from, uint64_t bytes)
{
    return kvp_put(pool, c, key, 1, &from, bytes);
}

int64_t kvp_put_parts(kvp_pool *pool, uint32_t c, const void *keys, uint32_t n, const struct kvp_part *parts,
                      uint32_t part_count, const uint64_t *rows)
{
    struct side side;
    int status = kvp_enter_class(pool, c);

    if (status || (status = parts_side(pool, c, parts, part_count, rows, &side)))
        return status;
    return put_all(pool, c, keys, n, &side);
}
