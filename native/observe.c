/* observe.c -- what can be seen of a pool: its shape, its workers, its events, its health; and the keys. */
#include "native/homes.h"

#include <string.h>

int kvp_pool_info(kvp_pool *pool, struct kvp_info *out)
{
    const struct kvp_layout *layout = &pool->arena.layout;

    memset(out, 0, sizeof *out);
    memcpy(out->uuid, pool->super->uuid, sizeof out->uuid);
    out->incarnation = pool->life >> 1;
    out->bytes = layout->bytes;
    out->metadata_bytes = layout->bytes - layout->payload_bytes;
    out->payload_offset = layout->payload_offset;
    out->payload_bytes = layout->payload_bytes;
    out->created_ns = pool->super->created_ns;
    out->segments = layout->segments;
    out->segment_bytes = layout->segment_bytes;
    out->pin_slots = layout->pin_slots;
    out->log_records = layout->log_records;
    out->classes = layout->classes;
    out->workers = layout->workers;
    out->self = pool->arena.self;
    out->hosts = layout->hosts;
    out->host = pool->host;
    out->lease_ms = layout->lease_ms;
    out->quota = layout->quota;
    out->kind = pool->mapping.kind;
    for (uint32_t c = 0; c < layout->classes; c++) {
        out->stride[c] = layout->class[c].stride;
        out->blocks[c] = layout->class[c].blocks;
    }
    for (uint32_t s = 0; s < layout->segments; s++) {
        uint64_t word = co_load(&pool->arena.segments[s]);
        out->owned += (uint64_t)kvp_segment_ours(word);
        if (kvp_segment_ours(word) && kvp_segment_state(word) != KVP_SEGMENT_FREE && kvp_segment_class(word) < layout->classes)
            out->held[kvp_segment_class(word)]++;
    }
    strncpy(out->policy, pool->policy->name, sizeof out->policy - 1);
    strncpy(out->mode, kvp_mode_name(KVP_MODE), sizeof out->mode - 1);
    return KVP_OK;
}

int kvp_pool_states(kvp_pool *pool, uint64_t states[64])
{
    int status = kvp_enter(pool);

    memset(states, 0, 64 * sizeof *states);
    if (status == KVP_OK)
        kvp_refresh_words(pool);
    for (uint32_t c = 0; c < pool->arena.layout.classes && status == KVP_OK; c++)
        for (uint32_t number = 0; number < pool->arena.class[c].blocks; number++)
            states[c * 8 + (kvp_word_state(nc_load_relaxed(&pool->arena.class[c].words[number])) & 7)]++;
    return status;
}

int kvp_pool_worker(kvp_pool *pool, uint32_t worker, struct kvp_worker_info *out)
{
    memset(out, 0, sizeof *out);
    if (worker >= pool->arena.layout.workers)
        return kvp_fail(KVP_E_RANGE, "worker %u does not exist: the pool has %u slots", worker,
                        pool->arena.layout.workers);
    const struct kvp_slot *slot = &pool->arena.slots[worker];
    out->pid = co_load(&slot->pid);
    out->incarnation = co_load(&slot->incarnation);
    out->joined_ns = co_load(&slot->joined);
    out->state = co_load32(&slot->lock) == 0 ? 0 : kvp_worker_dead(slot) ? 2 : 1;
    for (int i = 0; i < KVP_COUNTS; i++)
        out->counter[i] = co_load_relaxed(&slot->counter[i]);
    return KVP_OK;
}

int kvp_pool_line_counts(kvp_pool *pool, struct kvp_sim_counts *out)
{
    return kvp_sim_counts_read(&pool->mapping, out);
}

const char *kvp_pool_uri(const kvp_pool *pool)
{
    return pool->mapping.uri;
}

uint64_t kvp_pool_mapped(const kvp_pool *pool)
{
    return pool->mapping.bytes;
}

void *kvp_pool_base(const kvp_pool *pool)
{
    return pool->mapping.base;
}

int kvp_pool_fd(const kvp_pool *pool)
{
    return pool->mapping.fd;
}

int kvp_pool_check(kvp_pool *pool, struct kvp_check *out)
{
    int status = kvp_enter(pool);

    memset(out, 0, sizeof *out);
    if (status)
        return status;
    if ((status = kvp_superblock_verify(pool->super, pool->mapping.bytes)))
        kvp_check_fail(out, 0, "superblock: %s: %.100s", kvp_strerror(status), kvp_error_detail());
    kvp_arena_check(&pool->arena, out);
    kvp_directory_check(pool, out);
    return KVP_OK;
}

int64_t kvp_events(kvp_pool *pool, uint32_t worker, uint64_t *position, struct kvp_event *out, uint32_t n, uint64_t *lost)
{
    const struct kvp_layout *layout = &pool->arena.layout;
    uint64_t word[3], newest = 0;
    uint32_t count = 0;
    int status = kvp_enter(pool);

    if (status)
        return status;
    if (worker >= layout->workers * layout->hosts)
        return kvp_fail(KVP_E_RANGE, "worker %u does not exist: the pool has %u slots", worker,
                        layout->workers * layout->hosts);
    const struct kvp_record *ring = kvp_ring(&pool->arena, worker / layout->workers, worker % layout->workers);
    if (worker / layout->workers != pool->host) {
        kvp_log_refresh(ring, layout->log_records, *position + 1, layout->log_records);
        nc_read_fence(); /* the records of another host are read after they were dropped */
    }
    while (count < n) {
        unsigned kind = 0;
        int read = kvp_log_read(ring, layout->log_records, *position + 1, &kind, word, &newest);
        if (read == 0)
            break;
        if (read < 0) { /* lapped: go on with the oldest that is surely whole */
            uint64_t next = newest >= layout->log_records ? newest - layout->log_records + 1 : 0;
            if (next <= *position)
                next = *position + 1; /* a damaged header: this record alone is lost */
            *lost += next - *position;
            *position = next;
            continue;
        }
        ++*position;
        out[count] = (struct kvp_event){.sequence = *position, .ref = word[0], .worker = worker, .kind = (int)kind};
        memcpy(out[count++].key, &word[1], KVP_KEY_BYTES);
    }
    return count;
}

/* ---- keys ---- */

int kvp_keys(kvp_hash hash, const void *secret, const uint32_t *tokens, uint64_t blocks, uint32_t block_tokens,
             struct kvp_chain *chain, void *keys)
{
    uint8_t input[16 + 4 * 1024];
    uint8_t *out = keys;
    size_t bytes = 4 * (size_t)block_tokens;

    if (block_tokens == 0 || block_tokens > 1024)
        return kvp_fail(KVP_E_INVALID, "a block has 1 to 1024 tokens, not %u", block_tokens);
    for (uint64_t i = 0; i < blocks; i++) {
        memcpy(input, &chain->low, 8);
        memcpy(input + 8, &chain->high, 8);
        memcpy(input + 16, tokens + i * block_tokens, bytes);
        struct kvp_digest digest = hash(input, 16 + bytes, secret, KVP_SECRET_BYTES);
        if (chain->blocks++ % GROUP == 0)
            chain->head = digest.low;
        chain->low = digest.low;
        chain->high = digest.high;
        struct kvp_key key = {(chain->head & UINT32_MAX) | (digest.low & ~(uint64_t)UINT32_MAX), digest.high};
        memcpy(out + i * KVP_KEY_BYTES, &key, sizeof key);
    }
    return KVP_OK;
}
