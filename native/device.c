/* device.c -- a pool on memory that was there before: what else may lie on it, who makes it anew, whose machine it is. */
#define _GNU_SOURCE
#include "native/handle.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>

enum { ELECTION_MS = 200 };

/* Marks of what may have been written to a device before. Those of file systems lie past the first page, too. */
static const struct mark {
    uint32_t offset, length;
    const char *bytes, *what;
} marks[] = {
    {0x438, 2, "\x53\xef", "an ext2, ext3 or ext4 file system"},
    {0, 4, "XFSB", "an XFS file system"},
    {0x10040, 8, "_BHRfS_M", "a btrfs file system"},
    {0, 4, "\xff\x82\xb2\x87", "a famfs file system"},
    {0, 6, "LUKS\xba\xbe", "an encrypted volume (LUKS)"},
    {0x218, 8, "LVM2 001", "a volume of LVM"},
    {0xff6, 10, "SWAPSPACE2", "swap space"},
    {0x200, 8, "EFI PART", "a partition table"},
    {0x1000, 15, "NVDIMM_PFN_INFO", "a namespace of mode fsdax"},
    {0x1000, 15, "NVDIMM_DAX_INFO", "a namespace of mode devdax"},
};
enum { MARKS = sizeof marks / sizeof *marks };

static int has_mark(const struct mark *mark, const uint8_t *base, uint64_t bytes)
{
    return mark->offset + mark->length <= bytes && memcmp(base + mark->offset, mark->bytes, mark->length) == 0;
}

const char *kvp_device_content(const uint8_t *base, uint64_t bytes)
{
    for (int i = 0; i < MARKS; i++)
        if (has_mark(&marks[i], base, bytes))
            return marks[i].what;
    return NULL;
}

void kvp_wipe(nc_u64 *word, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes / 8; i++)
        nc_store_relaxed(&word[i], 0);
    nc_write_back(word, bytes);
}

void kvp_device_wipe(uint8_t *base, uint64_t bytes)
{
    kvp_wipe((nc_u64 *)(void *)base, KVP_PAGE);
    for (int i = 0; i < MARKS; i++)
        if (has_mark(&marks[i], base, bytes))
            kvp_wipe((nc_u64 *)(void *)(base + marks[i].offset / KVP_LINE * KVP_LINE), KVP_LINE);
}

static void settle(void)
{
    struct timespec pause = {0, ELECTION_MS * 1000000L};

    nanosleep(&pause, NULL);
}

/* No instruction elects between machines that make a pool on one device at once. Of two writers of a line one is last, and
 * both read that one once the writes have settled. As with the claim of a host's number (kvp_host_claim) this is a safety
 * net, not a protocol: it fails if a machine stands still for longer than the pause between looking and writing. */
int kvp_device_elect(kvp_pool *pool)
{
    nc_u64 *maker = &pool->super->maker;
    uint64_t drawn = 0;

    if (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn)
        return kvp_fail(KVP_E_SYSTEM, "no random numbers to be had");
    pool->maker = drawn | 1;
    nc_store(maker, pool->maker);
    nc_write_back(maker, 8);
    nc_full_fence(); /* the word is in memory before the pause ends, and we look at who was last */
    settle();
    return kvp_device_elected(pool);
}

int kvp_device_elected(kvp_pool *pool)
{
    nc_invalidate(&pool->super->maker, 8);
    nc_read_fence(); /* who was last is read from memory, not from our cache, which has what we have written */
    if (nc_load(&pool->super->maker) == pool->maker)
        return KVP_OK;
    return kvp_fail(KVP_E_BUSY, "another machine makes a pool on %s at this moment: open that one", pool->mapping.uri);
}

/* A device can be seen by two machines; in mode coherent the second one would take the workers of the first for those of
 * an earlier boot, and recover them while they live. The words are compared as a safety net: caches may hide them. */
int kvp_device_demand_machine(kvp_pool *pool)
{
    struct kvp_host *host = &pool->arena.roster.hosts[0];
    uint64_t former = nc_load(&host->machine);

    if (KVP_MANY_HOSTS || pool->mapping.kind != KVP_MAP_DAX)
        return KVP_OK;
    for (uint32_t w = 0; former && former != kvp_machine_id() && w < pool->arena.layout.workers; w++) {
        struct kvp_slot *slot = &pool->arena.slots[w];
        if (co_load32(&slot->lock) != 0 && co_load(&slot->boot) != 0 && co_load(&slot->boot) != kvp_boot_id())
            return kvp_fail(KVP_E_HOST, "another machine uses %s, or was lost with it, and mode coherent is for one machine: "
                            "make the pool with mode noncoherent and --hosts; if that machine is gone, kvpool rm --force",
                            pool->mapping.uri);
    }
    nc_store(&host->machine, kvp_machine_id());
    return KVP_OK;
}
