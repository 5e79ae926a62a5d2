/* superblock.c -- what says that memory is a pool of ours, whole, and fit for this build. */
#include "native/handle.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

static uint64_t fnv(uint64_t hash, const void *data, size_t bytes)
{
    const uint8_t *at = data;

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

/* FNV-1a finds every single flipped bit (each step is a bijection) and needs no table; it guards against damage,
 * not against malice: what is malicious is caught by range checks. */
static uint64_t checksum(const struct kvp_superblock *super)
{
    uint64_t version = KVP_FORMAT;
    uint64_t hash = fnv(0xcbf29ce484222325u, &super->magic, 8);

    hash = fnv(hash, &version, 8);
    return fnv(hash, &super->fingerprint,
               offsetof(struct kvp_superblock, checksum) - offsetof(struct kvp_superblock, fingerprint));
}

uint64_t kvp_fingerprint(void)
{
    const uint32_t sizes[] = {sizeof(struct kvp_slot),  sizeof(struct kvp_record), sizeof(struct kvp_layout),
                              sizeof(struct kvp_entry), sizeof(struct kvp_tag),    sizeof(struct kvp_host),
                              sizeof(struct kvp_head),  sizeof(struct kvp_sight),  sizeof(size_t),
                              KVP_HOME_ENTRIES,         KVP_LINE,                  KVP_SEGMENTS_MAX,
                              KVP_COUNTERS,             (uint32_t)sysconf(_SC_PAGESIZE)};

    return fnv(0xcbf29ce484222325u, sizes, sizeof sizes); /* the bytes of the numbers: byte order shows too */
}

static uint64_t realtime_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

const char *kvp_mode_name(uint32_t mode)
{
    static const char *const names[] = {"coherent", "noncoherent", "sim"};

    return mode < sizeof names / sizeof *names ? names[mode] : "unknown";
}

static void store_words(struct kvp_superblock *super, const struct kvp_superblock *whole)
{
    const uint8_t *from = (const uint8_t *)whole;
    nc_u64 *to = (nc_u64 *)(void *)super;

    for (size_t i = 0; i < offsetof(struct kvp_superblock, life) / 8; i++) {
        uint64_t word;
        memcpy(&word, from + i * 8, sizeof word);
        nc_store_relaxed(&to[i], word);
    }
}

void kvp_superblock_write(struct kvp_superblock *super, const struct kvp_layout *layout, int policy, uint64_t incarnation)
{
    struct kvp_superblock whole;

    nc_store(&super->version, 0); /* not whole, whatever was here before. In the line of the magic, and so in memory with it */
    memset(&whole, 0, sizeof whole);
    whole.magic = KVP_MAGIC;
    whole.fingerprint = kvp_fingerprint();
    if (getrandom(whole.uuid, sizeof whole.uuid, 0) != sizeof whole.uuid)
        memset(whole.uuid, 0, sizeof whole.uuid);
    whole.created_ns = realtime_ns();
    whole.policy = (uint32_t)policy;
    whole.mode = KVP_MODE;
    whole.layout = *layout;
    whole.checksum = checksum(&whole);
    store_words(super, &whole);
    nc_store(&super->life, incarnation << 1);
    for (int i = 0; i < KVP_QUALIFICATION_WORDS; i++)
        nc_store(&super->qualified[i], 0); /* who used the device before has qualified nothing of ours */
}

void kvp_superblock_seal(struct kvp_superblock *super)
{
    nc_write_back(super, sizeof *super);
    nc_write_fence(); /* all of the pool is in memory before the version is */
    nc_store(&super->version, KVP_FORMAT);
    nc_write_back(&super->version, 8);
}

int kvp_superblock_verify(const struct kvp_superblock *super, uint64_t mapped)
{
    if (mapped < KVP_PAGE)
        return kvp_fail(KVP_E_TRUNCATED, "%llu bytes: less than a superblock", (unsigned long long)mapped);
    if (super->magic != KVP_MAGIC)
        return kvp_fail(KVP_E_FOREIGN, "the memory does not begin with the mark of a kvpool image");
    uint64_t version = nc_load(&super->version);
    if (version == 0)
        return kvp_fail(KVP_E_NOTREADY, "its creator has not finished, or died: create it anew");
    if (version < KVP_FORMAT)
        return kvp_fail(KVP_E_OLDER, "format %llu, this build reads %d: make the pool anew", (unsigned long long)version,
                        KVP_FORMAT);
    if (version > KVP_FORMAT)
        return kvp_fail(KVP_E_NEWER, "format %llu, this build reads %d: use a newer kvpool", (unsigned long long)version,
                        KVP_FORMAT);
    if (checksum(super) != super->checksum)
        return kvp_fail(KVP_E_CORRUPT, "the superblock's checksum does not fit: the image is damaged, make it anew");
    if (super->incompat || super->ro_compat)
        return kvp_fail(KVP_E_NEWER, "the image uses features (%#llx) that this build does not know",
                        (unsigned long long)(super->incompat | super->ro_compat));
    if (super->fingerprint != kvp_fingerprint())
        return kvp_fail(KVP_E_LAYOUT, "made by a build with other struct sizes, or on a machine of another word size, byte "
                        "order or page size");
    if (super->mode != KVP_MODE)
        return kvp_fail(KVP_E_MODE, "the pool was made for mode %s, this is mode %s: open it in its own mode",
                        kvp_mode_name(super->mode), kvp_mode_name(KVP_MODE));
    return kvp_layout_check(&super->layout, mapped);
}

/* Words [0, n) of an image into private memory, as they are there now. */
static void load_words(const nc_u64 *from, uint64_t *to, size_t n)
{
    nc_invalidate(from, n * 8);
    nc_read_fence(); /* what our cache kept of an earlier pool, or of this one half made, is no superblock */
    for (size_t i = 0; i < n; i++)
        to[i] = nc_load(&from[i]);
}

enum { LINE_WORDS = KVP_LINE / 8 };

int kvp_superblock_read(const struct kvp_superblock *super, uint64_t mapped, struct kvp_superblock *seen)
{
    const nc_u64 *from = (const nc_u64 *)(const void *)super;
    uint64_t before[LINE_WORDS], after[LINE_WORDS], words[offsetof(struct kvp_superblock, life) / 8 + LINE_WORDS];

    memset(seen, 0, sizeof *seen);
    if (mapped < KVP_PAGE)
        return kvp_superblock_verify(seen, mapped);
    load_words(from, before, LINE_WORDS);
    load_words(from, words, sizeof words / 8); /* dropped after the version was read, so not older than that, which came last */
    load_words(from, after, LINE_WORDS);
    memcpy(seen, words, offsetof(struct kvp_superblock, life) + 8);
    /* The line has the version and the identity, and goes first when a pool is made anew: if it stands, all is of one pool. */
    if (memcmp(before, after, sizeof before) != 0 || memcmp(before, words, sizeof before) != 0)
        memset(&seen->version, 0, sizeof seen->version);
    return kvp_superblock_verify(seen, mapped);
}
