/* fuzz_keys.c -- keys are 16 bytes of anything: hashing in pieces equals hashing at once, and no key, however it
 * clusters, makes the directory lose a block, answer for another one or break an invariant. */
#include "tests/native/common.h"

enum { CAPACITY = 32, TOKENS_MAX = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static struct kvp_digest weak_hash(const void *data, size_t bytes, const void *secret, size_t secret_bytes)
{
    uint64_t sum = secret_bytes;

    (void)secret;
    for (size_t i = 0; i < bytes; i++)
        sum = sum * 31 + ((const uint8_t *)data)[i];
    return (struct kvp_digest){mix(sum), mix(sum + 1)};
}

static void hash_in_pieces(const uint8_t *data, size_t bytes)
{
    uint32_t tokens[TOKENS_MAX] = {0};
    uint8_t secret[KVP_SECRET_BYTES] = {0}, whole[TOKENS_MAX * 16], parts[TOKENS_MAX * 16];
    struct kvp_chain one = {0}, two = {0};
    uint32_t width = 1 + data[0] % 16;
    uint64_t blocks = TOKENS_MAX / width, cut = data[1] % (blocks + 1);

    memcpy(tokens, data, bytes < sizeof tokens ? bytes : sizeof tokens);
    kvp_keys(weak_hash, secret, tokens, blocks, width, &one, whole);
    kvp_keys(weak_hash, secret, tokens, cut, width, &two, parts);
    kvp_keys(weak_hash, secret, tokens + cut * width, blocks - cut, width, &two, parts + cut * 16);
    if (memcmp(whole, parts, blocks * 16) != 0 || memcmp(&one, &two, sizeof one) != 0)
        abort();
}

/* Three bytes of input make a key of few different halves: groups collide, heads are hot, digests are shared. */
static struct kvp_key clustered(const uint8_t *data)
{
    return (struct kvp_key){data[0] & 7 ? data[0] & 15 : (uint64_t)data[0] << 24 | 1,
                            data[1] & 3 ? data[1] & 31 : (uint64_t)data[2] << 40};
}

static void one_verb(kvp_pool *pool, int verb, const struct kvp_key *key)
{
    uint8_t copy[KVP_LINE], got = 0;
    void *to[1] = {copy};
    const void *from[1] = {copy};
    uint64_t ref;

    memset(copy, 0, sizeof copy);
    memcpy(copy, key, sizeof *key);
    if (verb < 4) {
        int64_t stored = kvp_put(pool, 0, key, 1, from, sizeof copy);
        if (stored < 0 && !(stored == KVP_E_INVALID && key->low == 0 && key->high == 0))
            abort();
    } else if (verb < 6) {
        kvp_read(pool, 0, key, 1, to, sizeof copy, &got);
        if (got && memcmp(copy, key, sizeof *key) != 0)
            abort();
    } else if (verb == 6) {
        kvp_remove(pool, 0, key, 1);
        if (kvp_lookup(pool, 0, key, 1, &ref) != 0)
            abort();
    } else if (kvp_match(pool, 0, key, 1, &ref) == 1) {
        kvp_unpin_refs(pool, &ref, 1);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static kvp_pool *pool;
    struct kvp_request request = {.blocks = CAPACITY, .workers = 1, .classes = 1, .stride = {KVP_LINE}};
    struct kvp_check check;

    if (bytes < 4)
        return 0;
    if (!pool && kvp_pool_create("memfd:", &request, "lfu", &pool))
        abort();
    hash_in_pieces(data, bytes);
    kvp_shrink(pool, 0, UINT32_MAX); /* each input starts from an empty pool, so that it can be run again alone */
    for (; bytes >= 4; data += 4, bytes -= 4) {
        struct kvp_key key = clustered(data);
        one_verb(pool, data[3] & 7, &key);
    }
    if (kvp_pool_check(pool, &check) || check.problems) {
        fprintf(stderr, "check: %s\n", check.first);
        abort();
    }
    return 0;
}
