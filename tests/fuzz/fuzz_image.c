/* fuzz_image.c -- every shared word is input: an image that is torn, foreign or hostile gives a status, never a crash.
 *
 * The input is a list of patches {where:24 | bits:8 | value:64} on a valid small image, after one byte of options.
 * The superblock's checksum is made right again unless an option says not to: the fuzzer must get past it.
 */
#define _GNU_SOURCE
#include "tests/native/common.h"

#include <sys/mman.h>

enum { IDS = 10, PATCH_BYTES = 12, WIDE = 1, TWO_CLASSES = 2, LEAVE_CHECKSUM = 4 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

struct specimen {
    uint8_t *image;
    uint64_t bytes;
};

/* Made once: a pool with some of everything, as its last worker left it. */
static struct specimen make_specimen(uint32_t classes)
{
    struct kvp_request request = {.workers = 3, .classes = classes, .stride = {256, 1024}};
    struct specimen made;
    kvp_pool *pool;

    if (classes == 1)
        request.blocks = 16;
    else
        request.bytes = 320 << 10;
    REQUIRE(kvp_pool_create("memfd:", &request, "lru", &pool) == KVP_OK, "create");
    for (uint64_t id = 0; id < IDS; id++)
        put_one(pool, (uint32_t)(id % classes), id);
    kvp_shrink(pool, 0, 2);
    kvp_pool_leave(pool);
    made.bytes = pool->mapping.bytes;
    made.image = malloc(made.bytes);
    memcpy(made.image, pool->mapping.base, made.bytes);
    kvp_pool_free(pool);
    return made;
}

static uint64_t fnv(uint64_t hash, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    return hash;
}

/* As the superblock says: everything above the checksum, the version taken as KVP_FORMAT. */
static void fix_checksum(struct kvp_superblock *super)
{
    uint64_t version = KVP_FORMAT, hash = fnv(0xcbf29ce484222325u, &super->magic, 8);

    hash = fnv(hash, &version, 8);
    super->checksum = fnv(hash, &super->fingerprint, offsetof(struct kvp_superblock, checksum) -
                                                         offsetof(struct kvp_superblock, fingerprint));
}

/* Metadata is where it hurts: three of four patches fall before the payload. */
static void patch(uint8_t *image, uint64_t bytes, uint64_t metadata, const uint8_t *data, size_t n)
{
    for (; n >= PATCH_BYTES; data += PATCH_BYTES, n -= PATCH_BYTES) {
        uint64_t where = 0, value;
        memcpy(&where, data, 3);
        memcpy(&value, data + 4, 8);
        if (data[3] & WIDE) {
            where = where % ((data[3] & 6 ? metadata : bytes) / 8) * 8;
            memcpy(image + where, &value, 8);
        } else {
            image[where % (data[3] & 6 ? metadata : bytes)] ^= (uint8_t)value;
        }
    }
}

static void use(kvp_pool *pool)
{
    uint32_t classes = pool->arena.layout.classes, numbers[4];
    struct kvp_event events[4];
    struct kvp_check check;
    struct kvp_info info;
    struct kvp_key keys[IDS];
    uint64_t refs[IDS], position = 0, lost = 0;
    uint8_t got[IDS], buffer[64];
    void *to[IDS];

    for (uint64_t id = 0; id < IDS; id++)
        keys[id] = key_of(id), to[id] = buffer;
    kvp_pool_info(pool, &info);
    kvp_pool_check(pool, &check);
    for (uint32_t c = 0; c < classes; c++) {
        kvp_lookup(pool, c, keys, IDS, refs);
        int64_t pinned = kvp_match(pool, c, keys, IDS, refs);
        kvp_read(pool, c, keys, IDS, to, pool->arena.class[c].stride < 64 ? 0 : 64, got);
        if (pinned > 0)
            kvp_unpin_refs(pool, refs, (uint32_t)pinned);
        kvp_touch(pool, c, keys, IDS);
        put_one(pool, c, 100 + c);
        if (kvp_reserve(pool, c, 4, numbers) == KVP_OK)
            kvp_publish(pool, c, numbers, keys + 2, 4, refs);
        kvp_remove(pool, c, keys, 3);
        kvp_shrink(pool, c, 2);
    }
    for (uint32_t w = 0; w < pool->arena.layout.workers; w++, position = 0)
        for (int i = 0; i < 100 && kvp_events(pool, w, &position, events, 4, &lost) > 0; i++)
            ;
    kvp_pool_check(pool, &check);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct specimen specimens[2];
    char uri[32];
    kvp_pool *pool;

    if (bytes < 1)
        return 0;
    struct specimen *from = &specimens[(data[0] & TWO_CLASSES) != 0];
    if (!from->image)
        *from = make_specimen(data[0] & TWO_CLASSES ? 2 : 1);
    int fd = memfd_create("specimen", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)from->bytes) == 0, "memfd");
    uint8_t *image = mmap(NULL, from->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(image != MAP_FAILED, "mmap");
    memcpy(image, from->image, from->bytes);
    struct kvp_superblock *super = (struct kvp_superblock *)(void *)image;
    patch(image, from->bytes, super->layout.payload_offset, data + 1, bytes - 1);
    if (!(data[0] & LEAVE_CHECKSUM))
        fix_checksum(super);
    snprintf(uri, sizeof uri, "memfd:%d", fd);
    if (kvp_pool_open(uri, 0, &pool) == KVP_OK) {
        use(pool);
        kvp_pool_free(pool);
    }
    kvp_pool_remove(uri, data[0] & 8); /* refused in the end, as memory without a name is, but it looks first */
    munmap(image, from->bytes);
    close(fd);
    return 0;
}
