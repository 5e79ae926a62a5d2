/* sim_lines.c -- mode sim, line by line: what is stale, what is written, what is counted, what a lost host leaves. */
#include "tests/native/bottom.h"

#include <fcntl.h>
#include <sys/stat.h>

enum { PAGES = 16, BYTES = PAGES * 4096 };

static char uri[80], quiet[96];

/* A pool without events: what moves is moved by the test. */
static void make(struct kvp_mapping *first, unsigned seed)
{
    char text[120];

    snprintf(text, sizeof text, "%s?seed=%u&events=0", uri, seed);
    kvp_mapping_unlink(uri);
    MUST(kvp_mapping_create(text, BYTES, first));
    MUST(kvp_mapping_populate(first, 0, BYTES, 1));
    memset(first->base, 0x5a, 4096);
    MUST(kvp_mapping_attach(first, 0));
    MUST(kvp_mapping_commit(first));
}

static void join(struct kvp_mapping *mapping, uint32_t host)
{
    MUST(kvp_mapping_open(uri, mapping));
    REQUIRE(mapping->bytes == BYTES, "%llu bytes", (unsigned long long)mapping->bytes);
    MUST(kvp_mapping_attach(mapping, host));
}

static struct kvp_sim_counts counts(const struct kvp_mapping *mapping)
{
    struct kvp_sim_counts out;

    MUST(kvp_sim_counts_read(mapping, &out));
    return out;
}

#define GREW(before, after, field, n)                                                                  \
    REQUIRE((after).field - (before).field == (n), #field " grew by %llu",                             \
            (unsigned long long)((after).field - (before).field))

static void test_stale_until_invalidated(void)
{
    struct kvp_mapping a, b;

    make(&a, 1);
    join(&b, 1);
    nc_u64 *wa = word_at(&a, 64), *wb = word_at(&b, 64);
    REQUIRE(nc_load(wb) == 0x5a5a5a5a5a5a5a5au, "what the creator wrote before attaching");
    nc_store(wa, 7);
    REQUIRE(nc_load(wa) == 7 && nc_load(wb) != 7, "another host sees a store that was not written back");
    nc_invalidate(wb, 8);
    REQUIRE(nc_load(wb) != 7, "the store has not been written back");
    nc_write_back(wa, 8);
    REQUIRE(nc_load(wb) != 7, "a read without invalidate is stale");
    nc_invalidate(wb, 8);
    REQUIRE(nc_load(wb) == 7, "a read after invalidate is right");
    REQUIRE(counts(&a).conflicts == 0 && counts(&a).dirty_invalidated == 0, "nobody did wrong");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
}

static void test_message(void)
{
    struct kvp_mapping a, b;

    make(&a, 2);
    join(&b, 1);
    for (uint64_t round = 1; round < 100; round++) {
        nc_store(word_at(&a, 4096), round);
        nc_write_back(word_at(&a, 4096), 8);
        nc_write_fence(); /* the data before the flag */
        nc_store(word_at(&a, 8192), round);
        nc_write_back(word_at(&a, 8192), 8);
        nc_invalidate(word_at(&b, 8192), 8);
        nc_full_fence(); /* the flag's load after its invalidate */
        REQUIRE(nc_load(word_at(&b, 8192)) == round, "the flag");
        nc_invalidate(word_at(&b, 4096), 8);
        nc_full_fence(); /* the data's load after its invalidate */
        REQUIRE(nc_load(word_at(&b, 4096)) == round, "the data");
    }
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
}

static void test_silent_and_clean(void)
{
    struct kvp_mapping a, b;

    make(&a, 3);
    join(&b, 1);
    nc_u64 *wa = word_at(&a, 128), *wb = word_at(&b, 128);
    struct kvp_sim_counts before = counts(&a);
    nc_store(wa, nc_load(wa));
    nc_write_back(wa, 64);
    struct kvp_sim_counts after = counts(&a);
    GREW(before, after, lines_written, 1);
    GREW(before, after, stores, 1);
    nc_write_back(wa, 64);
    before = after, after = counts(&a);
    GREW(before, after, lines_written, 0);
    GREW(before, after, lines_written_clean, 1);
    uint64_t seen = 1;
    REQUIRE(!nc_cas(wa, &seen, 2), "the word is not 1");
    nc_write_back(wa, 64);
    before = after, after = counts(&a);
    GREW(before, after, lines_written, 1); /* a CAS that fails dirties its line */

    /* B's line is clean and old: writing it back moves nothing, so A's value stays. */
    nc_store(wa, 5);
    nc_write_back(wa, 8);
    nc_write_back(wb, 8);
    nc_invalidate(wa, 8);
    REQUIRE(nc_load(wa) == 5, "a clean line was written back");
    REQUIRE(counts(&a).conflicts == 0, "no conflict");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
}

static void test_conflict_and_dirty_invalidate(void)
{
    struct kvp_mapping a, b;

    make(&a, 4);
    join(&b, 1);
    nc_store(word_at(&a, 192), 1);
    nc_store(word_at(&b, 200), 2);
    nc_write_back(word_at(&a, 192), 8);
    REQUIRE(counts(&a).conflicts == 0, "the first writer is right");
    nc_write_back(word_at(&b, 200), 8);
    REQUIRE(counts(&a).conflicts == 1 && counts(&a).conflict_offset == 192, "two hosts wrote one line");
    nc_invalidate(word_at(&a, 192), 8);
    REQUIRE(nc_load(word_at(&a, 192)) == 0x5a5a5a5a5a5a5a5au, "the second writer's line is over the first's");

    nc_store(word_at(&a, 320), 3);
    nc_invalidate(word_at(&a, 320), 8);
    REQUIRE(counts(&b).dirty_invalidated == 1 && counts(&b).dirty_invalidated_offset == 320, "counted for the pool");
    nc_invalidate(word_at(&b, 320), 8);
    REQUIRE(nc_load(word_at(&b, 320)) == 3, "an invalidate writes a dirty line back");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
}

static void test_payload(void)
{
    struct kvp_mapping a, b;
    enum { AT = 5 * 4096 + 24, LENGTH = 3 * 4096 + 77 };
    uint8_t from[LENGTH], to[LENGTH];

    make(&a, 5);
    join(&b, 1);
    for (int i = 0; i < LENGTH; i++)
        from[i] = (uint8_t)(i * 7);
    kvp_copy_in(a.base + AT, from, LENGTH);
    memset(to, 0, LENGTH);
    kvp_copy_out(to, b.base + AT, LENGTH);
    REQUIRE(memcmp(from, to, LENGTH) != 0, "read without invalidate");
    nc_invalidate(b.base + AT, LENGTH);
    kvp_copy_out(to, b.base + AT, LENGTH);
    REQUIRE(memcmp(from, to, LENGTH) == 0, "payload");
    REQUIRE(b.base[AT - 1] == 0 && b.base[AT + LENGTH] == 0, "around it");

    /* Plain stores into what was announced. Evictions do not end the announcement, a write-back does. */
    struct kvp_sim_counts before = counts(&a);
    nc_will_store(a.base + AT, 4096);
    memset(a.base + AT, 1, 4096);
    nc_write_back(a.base + AT, 4096);
    struct kvp_sim_counts after = counts(&a);
    GREW(before, after, lines_written, 65); /* 64 lines' worth, not aligned */
    memset(a.base + AT, 2, 4096);
    nc_write_back(a.base + AT, 4096);
    before = after, after = counts(&a);
    GREW(before, after, lines_written, 0); /* stored without saying so */
    nc_invalidate(b.base + AT, 4096);
    REQUIRE(b.base[AT] == 1, "B sees the announced store only");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
}

static void test_events(void)
{
    struct kvp_mapping a, b;
    char text[120];
    int seen = 0;

    make(&a, 6);
    kvp_mapping_close(&a);
    snprintf(text, sizeof text, "%s?events=64", uri);
    MUST(kvp_mapping_open(text, &a));
    kvp_sim_events(&a); /* before attach: nothing */
    MUST(kvp_mapping_attach(&a, 0));
    join(&b, 1);
    kvp_sim_hot(&a, 4096);
    nc_store(word_at(&a, 64), 9);
    nc_will_store(a.base + 4096, 64);
    for (int i = 0; i < 10000 && (!seen || b.base[4096] != 2); i++) {
        kvp_sim_events(&a);
        a.base[4096] = 2; /* after an eviction, perhaps: it must be evicted again */
        nc_invalidate(word_at(&b, 64), 8);
        nc_invalidate(b.base + 4096, 64);
        seen |= nc_load(word_at(&b, 64)) == 9;
    }
    REQUIRE(seen, "a dirty line was never evicted");
    REQUIRE(b.base[4096] == 2, "an open line was not evicted again");
    REQUIRE(counts(&a).evicted > 0 && counts(&a).dropped > 0, "both kinds");
    nc_store(word_at(&b, 128), 4);
    nc_write_back(word_at(&b, 128), 8);
    for (int i = 0; i < 10000 && nc_load(word_at(&a, 128)) != 4; i++)
        kvp_sim_events(&a);
    REQUIRE(nc_load(word_at(&a, 128)) == 4, "a clean line was never dropped");
    REQUIRE(counts(&a).conflicts == 0, "no conflict");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
}

/* Which of the 64 lines that host 1 had dirty reached the device, as bits. */
static uint64_t lose(unsigned seed)
{
    struct kvp_mapping a, b;
    uint64_t arrived = 0;

    make(&a, seed);
    join(&b, 1);
    for (uint64_t line = 0; line < 64; line++)
        nc_store(word_at(&b, 4096 + 64 * line), line + 1);
    REQUIRE(kvp_sim_lose_host(uri, 1) == KVP_E_BUSY, "a live host cannot be lost");
    kvp_mapping_close(&b); /* as a kill would: nothing is written back */
    join(&b, 1);
    REQUIRE(nc_load(word_at(&b, 4096)) == 1, "a host's cache outlives its processes");
    kvp_mapping_close(&b);
    int64_t lost = kvp_sim_lose_host(uri, 1);
    join(&b, 1);
    for (uint64_t line = 0; line < 64; line++) {
        nc_invalidate(word_at(&a, 4096 + 64 * line), 8);
        uint64_t value = nc_load(word_at(&a, 4096 + 64 * line));
        REQUIRE(value == 0 || value == line + 1, "line %llu", (unsigned long long)line);
        REQUIRE(nc_load(word_at(&b, 4096 + 64 * line)) == value, "the new cache starts from the device");
        arrived |= (uint64_t)(value != 0) << line;
    }
    struct kvp_sim_counts now = counts(&a);
    REQUIRE(lost == 64 - __builtin_popcountll(arrived), "%lld lost", (long long)lost);
    REQUIRE(now.lost == (uint64_t)lost && now.flushed == 64 - now.lost, "counted");
    REQUIRE(now.conflicts == 0, "no conflict");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
    return arrived;
}

static void test_lost_host(void)
{
    uint64_t first = lose(11), second = lose(12);

    REQUIRE(first != 0 && first != UINT64_MAX && first != second, "chosen by the seed");
    REQUIRE(lose(11) == first && lose(12) == second, "the same seed makes the same choice");
    REQUIRE(kvp_sim_lose_host(uri, 9) == KVP_E_NOTFOUND, "a host that never was");
    REQUIRE(kvp_sim_lose_host(uri, 64) == KVP_E_INVALID, "no such host");
    REQUIRE(kvp_sim_lose_host("shm:nothing", 0) == KVP_E_NOTFOUND, "no such pool");
}

static void test_names(void)
{
    struct kvp_mapping a, b;
    char path[200];

    make(&a, 20);
    join(&b, 1);
    REQUIRE(kvp_mapping_attach(&b, 2) == KVP_E_INVALID, "attached twice");
    REQUIRE(kvp_mapping_create(uri, BYTES, &b) == KVP_E_EXISTS, "the name is taken");
    struct kvp_mapping late;
    MUST(kvp_mapping_open(uri, &late));
    REQUIRE(kvp_mapping_attach(&late, 64) == KVP_E_INVALID, "hosts 0 to 63");
    MUST(kvp_mapping_unlink(uri));
    snprintf(path, sizeof path, "/dev/shm/kvpool.%u.sim.%s.cache0", getuid(), uri + 4);
    REQUIRE(access(path, F_OK) != 0, "unlink removes the caches");
    MUST(kvp_mapping_attach(&late, 0)); /* of the removed device: leaves a cache file behind */
    REQUIRE(access(path, F_OK) == 0, "made");
    REQUIRE(kvp_mapping_create(uri, BYTES, &b) == KVP_OK && kvp_mapping_attach(&b, 1) == KVP_OK, "a new one");
    MUST(kvp_mapping_commit(&b));
    kvp_mapping_close(&late);
    MUST(kvp_mapping_open(uri, &late));
    MUST(kvp_mapping_attach(&late, 0)); /* the old file is not taken for this device's cache */
    REQUIRE(nc_load(word_at(&late, 0)) == 0, "the new device's content");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
    kvp_mapping_close(&late);
    for (int i = 0; i < 2; i++) { /* an unnamed one leaves nothing */
        kvp_mapping_unlink(uri);
        MUST(kvp_mapping_create(uri, BYTES, &a));
        MUST(kvp_mapping_attach(&a, 0));
        kvp_mapping_close(&a);
        REQUIRE(access(path, F_OK) != 0, "a creator that gives up leaves nothing");
    }
    REQUIRE(kvp_mapping_create("sim:a.cache1", BYTES, &a) == KVP_E_INVALID, "a name like a cache's");
    REQUIRE(kvp_mapping_create("shm:a?seed=1", BYTES, &a) == KVP_E_INVALID, "an option of sim: only");
    REQUIRE(kvp_mapping_open("sim:there-is-none", &a) == KVP_E_NOTFOUND, "no such pool");
}

static void test_before_attach(void)
{
    struct kvp_mapping a, b;

    make(&a, 21);
    MUST(kvp_mapping_open(uri, &b));
    nc_store(word_at(&b, 256), 77);
    uint64_t seen = 77;
    REQUIRE(nc_cas(word_at(&b, 256), &seen, 78), "on the device itself");
    REQUIRE(nc_load(word_at(&a, 256)) != 78, "past A's cache");
    nc_invalidate(word_at(&a, 256), 8);
    REQUIRE(nc_load(word_at(&a, 256)) == 78, "after A invalidates");
    const uint8_t *where = b.base;
    MUST(kvp_mapping_attach(&b, 3));
    REQUIRE(b.base == where, "addresses stay");
    nc_store(word_at(&b, 256), 79);
    nc_invalidate(word_at(&a, 256), 8);
    REQUIRE(nc_load(word_at(&a, 256)) == 78, "cached from now on");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
}

static void test_fork(void)
{
    struct kvp_mapping a, b;

    make(&a, 22);
    join(&b, 1);
    pid_t child = fork();
    if (child == 0) {
        nc_store(word_at(&b, 64), 5); /* of the same host: its parent sees it */
        kvp_mapping_close(&b);
        kvp_mapping_close(&a);
        _exit(0);
    }
    wait_for(child);
    REQUIRE(nc_load(word_at(&b, 64)) == 5 && nc_load(word_at(&a, 64)) != 5, "one host, two processes");
    kvp_mapping_close(&a);
    kvp_mapping_close(&b);
}

enum { TURNS = 30000, READERS = 2, WORDS = 8 };
static co_u32 over;

/* The words of a line are stored from the last to the first, so no snapshot of it falls from the first to the last. */
static void *write_line(void *argument)
{
    const struct kvp_mapping *mapping = argument;

    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        for (int i = WORDS - 1; i >= 0; i--)
            nc_store(word_at(mapping, 4096 + 8 * (uint64_t)i), turn);
        nc_write_back(word_at(mapping, 4096), 8 * WORDS);
        nc_write_fence(); /* the line before the flag */
        nc_store(word_at(mapping, 8192), turn);
        nc_write_back(word_at(mapping, 8192), 8);
    }
    co_store32(&over, 1);
    return NULL;
}

/* Each reader fetches the line while the other, of the same host, is loading its words. */
static void *read_line(void *argument)
{
    const struct kvp_mapping *mapping = argument;

    while (!co_load32(&over)) {
        nc_invalidate(word_at(mapping, 8192), 8);
        nc_full_fence(); /* the flag's load after its invalidate */
        uint64_t flag = nc_load(word_at(mapping, 8192)), last = flag;
        nc_invalidate(word_at(mapping, 4096), 8 * WORDS);
        nc_full_fence(); /* the line's loads after its invalidate */
        for (int i = 0; i < WORDS; i++) {
            uint64_t value = nc_load(word_at(mapping, 4096 + 8 * (uint64_t)i));
            REQUIRE(value >= last, "word %d is %llu after %llu", i, (unsigned long long)value, (unsigned long long)last);
            last = value;
        }
    }
    return NULL;
}

static void test_threads(void)
{
    struct kvp_mapping mapping[1 + READERS];
    pthread_t thread[1 + READERS];

    make(&mapping[0], 23);
    nc_store(word_at(&mapping[0], 4096), 0);
    for (int i = 1; i <= READERS; i++)
        join(&mapping[i], 1);
    for (int i = 0; i <= READERS; i++)
        REQUIRE(pthread_create(&thread[i], NULL, i ? read_line : write_line, &mapping[i]) == 0, "no thread");
    for (int i = 0; i <= READERS; i++)
        pthread_join(thread[i], NULL);
    REQUIRE(counts(&mapping[0]).conflicts == 0, "no conflict");
    for (int i = 0; i <= READERS; i++)
        kvp_mapping_close(&mapping[i]);
}

static void speed(void)
{
    enum { BLOCK = 128 << 10, ROUNDS = 2000, SLOTS = 64 };
    struct kvp_mapping a;
    uint8_t *from = malloc(BLOCK);

    kvp_mapping_unlink(uri);
    MUST(kvp_mapping_create(quiet, (uint64_t)BLOCK * SLOTS, &a));
    MUST(kvp_mapping_attach(&a, 0));
    memset(from, 3, BLOCK);
    for (int pass = 0; pass < 2; pass++) {
        double start = seconds();
        for (int i = 0; i < ROUNDS; i++)
            kvp_copy_in(a.base + (size_t)BLOCK * (i % SLOTS), from, BLOCK);
        double copied = seconds();
        for (int i = 0; i < ROUNDS; i++)
            nc_invalidate(a.base + (size_t)BLOCK * (i % SLOTS), BLOCK);
        double dropped = seconds();
        for (int i = 0; i < ROUNDS * 1000; i++)
            nc_store(word_at(&a, (uint64_t)i % 64 * 8), 1);
        double stored = seconds();
        for (int i = 0; i < ROUNDS * 1000; i++)
            nc_load(word_at(&a, (uint64_t)i % 64 * 8));
        double loaded = seconds(), megabytes = (double)BLOCK * ROUNDS / 1e6;
        if (pass)
            printf("copy in %.0f MB/s, invalidate %.0f MB/s, store %.0f ns, load %.0f ns\n",
                   megabytes / (copied - start), megabytes / (dropped - copied), (stored - dropped) / ROUNDS * 1e6,
                   (loaded - stored) / ROUNDS * 1e6);
    }
    kvp_mapping_close(&a);
    free(from);
}

int main(void)
{
    snprintf(uri, sizeof uri, "sim:lines-%d", (int)getpid());
    snprintf(quiet, sizeof quiet, "%s?events=0", uri);
    test_stale_until_invalidated();
    test_message();
    test_silent_and_clean();
    test_conflict_and_dirty_invalidate();
    test_payload();
    test_events();
    test_lost_host();
    test_names();
    test_before_attach();
    test_fork();
    test_threads();
    speed();
    kvp_mapping_unlink(uri);
    printf("%s: 11 tests passed\n", kvp_line_instructions());
    return 0;
}
