/* damage.c -- one flipped bit anywhere in the superblock, one wrong byte in each area: a status, or a pool that works. */
#define _GNU_SOURCE
#include "tests/native/common.h"

#include <sys/mman.h>

enum { IDS = 10, SUPERBLOCK_BITS = 1024 * 8 };

static uint8_t *specimen, *image;
static uint64_t bytes;
static char uri[32];
static uint64_t refused, worked, complained;

static void make_specimen(void)
{
    struct kvp_request request = {.workers = 3, .classes = 2, .stride = {256, 1024}, .bytes = 320 << 10};
    kvp_pool *pool;

    REQUIRE(kvp_pool_create("memfd:", &request, "lru", &pool) == KVP_OK, "create");
    for (uint64_t id = 0; id < IDS; id++)
        REQUIRE(put_one(pool, (uint32_t)(id % 2), id) == 1, "put");
    kvp_pool_leave(pool);
    bytes = pool->mapping.bytes;
    specimen = malloc(bytes);
    memcpy(specimen, pool->mapping.base, bytes);
    kvp_pool_free(pool);
    int fd = memfd_create("damaged", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "memfd");
    image = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(image != MAP_FAILED, "mmap");
    snprintf(uri, sizeof uri, "memfd:%d", fd);
}

/* Everything that a user would do next: each answer is one of those that the header lists. */
static void use(kvp_pool *pool)
{
    struct kvp_check check;
    uint32_t numbers[2];

    REQUIRE(kvp_pool_check(pool, &check) == KVP_OK, "check refused");
    REQUIRE(!check.problems || check.first[0], "a problem without a sentence");
    complained += check.problems != 0;
    for (uint64_t id = 0; id < IDS; id++)
        probe(pool, (uint32_t)(id % 2), id);
    for (uint32_t c = 0; c < 2; c++) {
        REQUIRE(put_one(pool, c, 50 + c) >= KVP_E_PINS, "put");
        if (kvp_reserve(pool, c, 2, numbers) == KVP_OK)
            kvp_withdraw(pool, c, numbers, 2);
        kvp_shrink(pool, c, 3);
    }
}

static void with_damage(uint64_t offset, uint8_t flip)
{
    kvp_pool *pool;

    snprintf(replay, sizeof replay, "damage: byte %llu ^ %#x", (unsigned long long)offset, flip);
    memcpy(image, specimen, bytes);
    image[offset] ^= flip;
    int status = kvp_pool_open(uri, 0, &pool);
    REQUIRE(status <= 0 && status >= KVP_E_PINS && strcmp(kvp_strerror(status), kvp_strerror(1)) != 0,
            "open answers %d", status);
    REQUIRE(status == KVP_OK || kvp_error_detail()[0], "status %d says nothing", status);
    if (status) {
        refused++;
        return;
    }
    worked++;
    use(pool);
    kvp_pool_free(pool);
}

int main(void)
{
    make_specimen();
    const struct kvp_superblock *super = (const struct kvp_superblock *)(const void *)specimen;
    const struct kvp_layout layout = super->layout;
    uint64_t covered = offsetof(struct kvp_superblock, checksum) + 8;

    for (uint64_t bit = 0; bit < SUPERBLOCK_BITS; bit++) {
        uint64_t before = refused;
        with_damage(bit / 8, (uint8_t)(1u << bit % 8));
        REQUIRE(refused > before || bit / 8 >= covered, "damage under the checksum goes unseen");
    }
    printf("superblock: %llu refused, %llu worked\n", (unsigned long long)refused, (unsigned long long)worked);
    const uint64_t areas[] = {super->layout.slots_offset, layout.pins_offset, layout.logs_offset, layout.segments_offset,
                              layout.class[0].words_offset, layout.class[0].scores_offset, layout.class[0].tags_offset,
                              layout.class[0].hints_offset, layout.class[1].words_offset, layout.directory_offset};
    for (size_t i = 0; i < sizeof areas / sizeof *areas; i++)
        for (uint64_t byte = 0; byte < 16; byte++)
            with_damage(areas[i] + byte, 0xff);
    printf("metadata: %llu images opened, the check complained of %llu\n", (unsigned long long)worked,
           (unsigned long long)complained);
    return 0;
}
