/* example.c -- the pool from plain C: two workers, one block, no copy.
 *
 *   cc -std=c11 -I<root> -pthread example.c coherence/(*).c allocator/(*).c native/(*).c
 */
#include "native/kvpool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_BYTES = 64 * 1024 };

static void must(int64_t status, const char *what)
{
    if (status >= 0)
        return;
    fprintf(stderr, "%s: %s (%s)\n", what, kvp_strerror((int)status), kvp_error_detail());
    exit(1);
}

/* Block k of class 0 lies at a fixed place in the mapping of every worker. */
static char *payload(kvp_pool *pool, uint32_t number)
{
    struct kvp_info info;

    must(kvp_pool_info(pool, &info), "info");
    return (char *)kvp_pool_base(pool) + info.payload_offset + number * info.stride[0];
}

/* Prefill: take a block, fill it where it lies, make it findable. */
static void produce(kvp_pool *pool, const uint8_t *key, const char *text)
{
    uint32_t number;
    uint64_t ref;

    must(kvp_reserve(pool, 0, 1, &number), "reserve");
    memcpy(payload(pool, number), text, strlen(text) + 1);
    must(kvp_publish(pool, 0, &number, key, 1, &ref), "publish");
}

/* Decode: find it by its key and read it in place. While it is pinned nobody reuses it. */
static void consume(kvp_pool *pool, const uint8_t *key)
{
    uint64_t ref;

    if (kvp_match(pool, 0, key, 1, &ref) != 1) {
        printf("a miss\n"); /* always allowed: compute it again */
        return;
    }
    printf("found: %s\n", payload(pool, (uint32_t)ref & KVP_BLOCKS_MAX));
    must(kvp_unpin_refs(pool, &ref, 1), "unpin");
}

int main(void)
{
    struct kvp_request request = {.blocks = 100, .classes = 1, .stride = {BLOCK_BYTES}};
    const uint8_t key[KVP_KEY_BYTES] = "of the prefix:)", other[KVP_KEY_BYTES] = "of another one";
    kvp_pool *prefill, *decode;

    must(kvp_pool_create("memfd:", &request, "lru", &prefill), "create");
    must(kvp_pool_open(kvp_pool_uri(prefill), 0, &decode), "open"); /* usually in another process */

    produce(prefill, key, "keys and values of sixteen tokens");
    consume(decode, key);
    consume(decode, other);

    kvp_pool_free(decode);
    kvp_pool_free(prefill); /* the memory goes with its last user */
    return 0;
}
