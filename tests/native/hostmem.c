/* hostmem.c -- memory of one host: made once, backed whole, locked while somebody initialises it, removed, made again. */
#include "tests/native/bottom.h"

#include <sys/stat.h>

enum { BYTES = 3 * 4096 + 5, PROCESSES = 4, ROUNDS = 300 };

static uint8_t uuid[16];

/* What the layer above does: a word says that the rest is ready. */
struct content {
    co_u64 ready, maker, uses;
};

static struct content *content(const struct kvp_mapping *memory)
{
    return (struct content *)(void *)memory->base;
}

static void use(struct kvp_mapping *memory)
{
    int fresh;

    MUST(kvp_host_memory_open(uuid, 7, BYTES, memory, &fresh));
    struct content *it = content(memory);
    REQUIRE(!fresh || (!co_load(&it->ready) && !co_load(&it->maker)), "new memory is zero");
    if (!co_load(&it->ready)) {
        co_store(&it->maker, (uint64_t)getpid());
        REQUIRE(co_load(&it->maker) == (uint64_t)getpid(), "two makers");
        co_store(&it->ready, 1);
    }
    co_store(&it->uses, co_load(&it->uses) + 1); /* under the lock: none is lost */
}

static void test_made_once(void)
{
    struct kvp_mapping a, b;
    int fresh;

    REQUIRE(kvp_host_memory_remove(uuid, 7) == KVP_E_NOTFOUND, "nothing there");
    MUST(kvp_host_memory_open(uuid, 7, BYTES, &a, &fresh));
    REQUIRE(fresh == 1 && a.bytes == 4 * 4096, "made");
    pid_t child = fork();
    if (child == 0) {
        kvp_mapping_close(&a); /* the parent's lock stays */
        use(&b);
        REQUIRE(co_load(&content(&b)->ready) == 2, "came before the parent was ready");
        _exit(0);
    }
    usleep(20000);
    co_store(&content(&a)->ready, 2);
    kvp_host_memory_unlock(&a);
    wait_for(child);
    REQUIRE(co_load(&content(&a)->uses) == 1, "one memory");
    REQUIRE(kvp_host_memory_open(uuid, 7, BYTES + 4096, &b, &fresh) == KVP_E_INVALID, "another size");
    MUST(kvp_host_memory_open(uuid, 8, BYTES, &b, &fresh));
    REQUIRE(fresh == 1, "another host's is another");
    kvp_mapping_close(&b);
    MUST(kvp_host_memory_remove(uuid, 8));
    MUST(kvp_host_memory_remove(uuid, 7));
    MUST(kvp_host_memory_open(uuid, 7, BYTES + 4096, &b, &fresh));
    REQUIRE(fresh == 1, "made again");
    kvp_mapping_close(&b);
    kvp_mapping_close(&a);
    MUST(kvp_host_memory_remove(uuid, 7));
}

static void test_maker_dies(void)
{
    struct kvp_mapping memory;
    int fresh, status;
    pid_t child = fork();

    if (child == 0) {
        MUST(kvp_host_memory_open(uuid, 7, BYTES, &memory, &fresh));
        co_store(&content(&memory)->maker, 1);
        raise(SIGKILL);
    }
    REQUIRE(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "not killed");
    MUST(kvp_host_memory_open(uuid, 7, BYTES, &memory, &fresh)); /* the kernel has dropped the lock */
    REQUIRE(!fresh && !co_load(&content(&memory)->ready) && co_load(&content(&memory)->maker) == 1, "half made");
    kvp_mapping_close(&memory);
    MUST(kvp_host_memory_remove(uuid, 7));
}

static void test_no_room(void)
{
    struct kvp_mapping memory;
    int fresh;

    REQUIRE(kvp_host_memory_open(uuid, 9, 1ull << 50, &memory, &fresh) == KVP_E_NOSPACE, "a petabyte");
    REQUIRE(strstr(kvp_error_detail(), "bytes missing"), "no count");
    REQUIRE(memory.base == NULL && memory.fd == -1, "left open");
    REQUIRE(kvp_host_memory_remove(uuid, 9) == KVP_E_NOTFOUND, "left behind");
    REQUIRE(kvp_host_memory_open(uuid, 9, 0, &memory, &fresh) == KVP_E_INVALID, "no bytes");
}

/* Some make and use it, others remove it all the time: nobody uses what has lost its name before it was locked. */
static void test_race(void)
{
    pid_t child[PROCESSES];

    for (int i = 0; i < PROCESSES; i++)
        if ((child[i] = fork()) == 0) {
            for (int round = 0; round < ROUNDS; round++) {
                struct kvp_mapping memory;
                struct stat info;
                use(&memory);
                REQUIRE(fstat(memory.fd, &info) == 0 && info.st_nlink == 1, "locked what is gone");
                if (round % 3 == i % 3)
                    MUST(kvp_host_memory_remove(uuid, 7)); /* under the lock, so it is the one we have */
                kvp_host_memory_unlock(&memory);
                kvp_mapping_close(&memory);
            }
            _exit(0);
        }
    for (int i = 0; i < PROCESSES; i++)
        wait_for(child[i]);
    kvp_host_memory_remove(uuid, 7);
}

int main(void)
{
    for (int i = 0; i < 16; i++)
        uuid[i] = (uint8_t)mix((uint64_t)getpid() * 16 + (uint64_t)i);
    test_made_once();
    test_maker_dies();
    test_no_room();
    test_race();
    printf("4 tests passed\n");
    return 0;
}
