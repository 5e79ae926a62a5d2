/* remove.c -- the end of a pool, and what can be learned of one without joining it. */
#include "native/handle.h"

#include <stdlib.h>
#include <time.h>

enum { LOOK_NS = KVP_TICK_MS * 3000000 };

static int count_alive(const struct kvp_slot *slots, uint32_t workers)
{
    int alive = 0;

    for (uint32_t w = 0; w < workers; w++)
        alive += co_load32(&slots[w].lock) != 0 && !kvp_worker_dead(&slots[w]);
    return alive;
}

/* Hosts whose beat changes while we look. */
static int hosts_alive(const struct kvp_host *hosts, uint32_t count)
{
    struct timespec pause = {0, LOOK_NS};
    uint64_t before[KVP_HOSTS_MAX];
    int alive = 0;

    nc_invalidate(hosts, count * sizeof *hosts);
    nc_read_fence(); /* the beats are read after they were dropped */
    for (uint32_t h = 0; h < count; h++)
        before[h] = nc_load(&hosts[h].beat);
    nanosleep(&pause, NULL);
    nc_invalidate(hosts, count * sizeof *hosts);
    nc_read_fence(); /* and again */
    for (uint32_t h = 0; h < count; h++)
        alive += nc_load(&hosts[h].beat) != before[h];
    return alive;
}

static int in_use(const struct kvp_mapping *mapping, const struct kvp_layout *layout)
{
    if (KVP_MANY_HOSTS)
        return hosts_alive((const struct kvp_host *)(void *)(mapping->base + layout->hosts_offset), layout->hosts);
    return count_alive((const struct kvp_slot *)(void *)(mapping->base + layout->host_offset + layout->slots_offset),
                       layout->workers);
}

/* Of a whole image: retired, so that handles which are still open answer REPLACED. */
static int retire(const struct kvp_mapping *mapping, const struct kvp_superblock *seen, const char *uri, int force)
{
    struct kvp_superblock *super = (struct kvp_superblock *)(void *)mapping->base;
    int users = force ? 0 : in_use(mapping, &seen->layout);

    if (users)
        return kvp_fail(KVP_E_BUSY, "%d %s use %s: close them, or force", users, KVP_MANY_HOSTS ? "hosts" : "workers", uri);
    if (mapping->kind != KVP_MAP_MEMFD && mapping->kind != KVP_MAP_HUGETLB) {
        nc_store(&super->life, nc_load(&seen->life) | 1);
        nc_write_back(&super->life, 8);
        nc_write_fence(); /* retired before the name goes */
    }
    for (uint32_t h = 0; KVP_MANY_HOSTS && h < seen->layout.hosts; h++)
        kvp_host_memory_remove(seen->uuid, h);
    return KVP_OK;
}

int kvp_pool_remove(const char *uri, int force)
{
    struct kvp_mapping mapping;
    struct kvp_superblock *seen = calloc(1, sizeof *seen);
    int status = seen ? kvp_mapping_open(uri, &mapping) : kvp_fail(KVP_E_NOSPACE, "no memory for a superblock");

    if ((status == KVP_E_TRUNCATED || status == KVP_E_FOREIGN) && force) { /* perhaps a file of somebody's own */
        free(seen);
        return kvp_mapping_unlink(uri);
    }
    if (status) {
        free(seen);
        return status;
    }
    int whole = kvp_superblock_read((const struct kvp_superblock *)(const void *)mapping.base, mapping.bytes, seen);
    if (whole == KVP_OK)
        status = retire(&mapping, seen, uri, force);
    else if (!force && mapping.kind == KVP_MAP_DAX && (whole == KVP_E_OLDER || whole == KVP_E_NEWER || whole == KVP_E_LAYOUT))
        status = kvp_fail(whole, "%s: %s: it is left alone (force clears the device)", uri, kvp_strerror(whole));
    else if ((whole == KVP_E_FOREIGN && !force) || whole == KVP_E_MODE)
        status = kvp_fail(whole, "%s: %s: it is left alone%s", uri, kvp_strerror(whole),
                          whole == KVP_E_MODE ? "" : " (force removes it)");
    int kind = mapping.kind;
    if (kind == KVP_MAP_DAX && status == KVP_OK && /* there is no name to take away */
        (whole != KVP_OK || (force && kvp_device_content(mapping.base, mapping.bytes))))
        kvp_device_wipe(mapping.base, mapping.bytes);
    free(seen);
    kvp_mapping_close(&mapping);
    return status || kind == KVP_MAP_DAX ? status : kvp_mapping_unlink(uri);
}

int64_t kvp_pool_lose_host(const char *uri, uint32_t host)
{
    struct kvp_mapping mapping;
    uint8_t uuid[16];
    int64_t lost = kvp_sim_lose_host(uri, host);
    int status = lost < 0 ? (int)lost : kvp_mapping_open(uri, &mapping);

    if (status)
        return status;
    __builtin_memcpy(uuid, ((const struct kvp_superblock *)(const void *)mapping.base)->uuid, sizeof uuid);
    kvp_mapping_close(&mapping);
    status = kvp_host_memory_remove(uuid, host);
    return status && status != KVP_E_NOTFOUND ? status : lost;
}

/* The first host of a whole image that has a live worker here, or else memory; 0. */
static int find_here(const struct kvp_superblock *seen)
{
    int started = 0;

    for (uint32_t h = seen->layout.hosts; h-- > 0;) {
        struct kvp_mapping memory;
        if (kvp_host_memory_look(seen->uuid, h, seen->layout.host_bytes, &memory))
            continue;
        const uint8_t *slots = memory.base + seen->layout.slots_offset;
        int alive = count_alive((const struct kvp_slot *)(const void *)slots, seen->layout.workers) > 0;
        kvp_mapping_close(&memory);
        if (alive || started <= 0)
            started = alive ? (int)h + 1 : -(int)h - 1;
    }
    return started ? abs(started) - 1 : 0;
}

int kvp_pool_here(const char *uri)
{
    struct kvp_mapping mapping;
    struct kvp_superblock *seen = calloc(1, sizeof *seen);
    int status = seen ? kvp_mapping_open(uri, &mapping) : kvp_fail(KVP_E_NOSPACE, "no memory for a superblock");

    if (status == KVP_OK) {
        status = kvp_superblock_read((const struct kvp_superblock *)(const void *)mapping.base, mapping.bytes, seen);
        kvp_mapping_close(&mapping);
    }
    if (status == KVP_OK && KVP_MANY_HOSTS)
        status = find_here(seen);
    free(seen);
    return status;
}

int kvp_pool_mode(const char *uri)
{
    struct kvp_mapping mapping;
    struct kvp_superblock seen;
    int status = kvp_mapping_open(uri, &mapping);

    if (status)
        return status;
    status = kvp_superblock_read((const struct kvp_superblock *)(const void *)mapping.base, mapping.bytes, &seen);
    if (mapping.bytes >= KVP_PAGE) /* whoever opens it says what is wrong with it */
        status = seen.magic != KVP_MAGIC || seen.mode > KVP_SIM ? KVP_MODE : (int)seen.mode;
    kvp_mapping_close(&mapping);
    return status;
}
