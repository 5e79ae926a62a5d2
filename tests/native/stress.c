/* stress.c -- several workers in one process, each with its own slot, all on one mapping: the form in which the
 * sanitizers see every access. Mixed verbs at random; every payload read is compared with what its key says.
 *
 *   stress [SECONDS] [SEED] [THREADS]
 *
 * Under ThreadSanitizer payloads are plain stores and loads: that they never race is what the words must bring
 * about. The one read that may race is the copy that is thrown away afterwards (kvp_read): argued below.
 */
#define _GNU_SOURCE
#include "tests/native/common.h"

#include <pthread.h>

enum { THREADS_MAX = 8, IDS = 160, HELD_MAX = 8 };

struct host {
    kvp_pool *pool;
    uint64_t random;
    uint64_t operations, hits, stored, evicted;
    uint64_t refs[HELD_MAX];   /* pinned for a while */
    uint64_t ids[HELD_MAX];
    uint32_t held;
    pthread_t thread;
};

static volatile int stop;
static uint64_t seed;

#ifdef KVP_TSAN
/* kvp_read copies a block that may be reused meanwhile, then looks at its word and drops what it copied: the only
 * place where bytes are read that somebody may be writing. Its result is checked below like any other. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void) { return "race:kvp_copy_out\n"; }
#endif

static uint64_t draw(struct host *host, uint64_t n)
{
    host->random = host->random * 6364136223846793005u + 1442695040888963407u;
    return (host->random >> 33) % n;
}

static uint64_t stride(const struct host *host, uint32_t c) { return host->pool->arena.class[c].stride; }

/* Ids choose their class, so that every id has one home. */
static uint32_t class_of(const struct host *host, uint64_t id)
{
    return (uint32_t)(id % host->pool->arena.layout.classes);
}

static void verify(struct host *host, uint64_t ref, uint64_t id)
{
    struct kvp_key key = key_of(id);
    const void *data = kvp_block_data(&host->pool->arena, (uint32_t)ref);

    REQUIRE(payload_is(data, &key, stride(host, class_of(host, id))), "key %llu has wrong bytes while pinned",
            (unsigned long long)id);
    host->hits++;
}

static void match_and_verify(struct host *host)
{
    uint64_t id = draw(host, IDS), ref;
    struct kvp_key key = key_of(id);
    int64_t n = kvp_match(host->pool, class_of(host, id), &key, 1, &ref);

    REQUIRE(n >= 0 || n == KVP_E_PINS, "match answers %lld", (long long)n);
    if (n != 1)
        return;
    verify(host, ref, id);
    if (host->held < HELD_MAX && draw(host, 4) == 0) {
        host->refs[host->held] = ref, host->ids[host->held++] = id;
        return;
    }
    kvp_unpin_refs(host->pool, &ref, 1);
}

static void let_one_go(struct host *host)
{
    if (!host->held)
        return;
    uint32_t i = (uint32_t)draw(host, host->held);
    verify(host, host->refs[i], host->ids[i]); /* still what it was when it was pinned */
    kvp_unpin_refs(host->pool, &host->refs[i], 1);
    host->held--;
    host->refs[i] = host->refs[host->held], host->ids[i] = host->ids[host->held];
}

static void put_chain(struct host *host)
{
    uint64_t id = draw(host, IDS);
    int64_t n = put_one(host->pool, class_of(host, id), id);

    REQUIRE(n >= 0 || n == KVP_E_FULL, "put answers %lld", (long long)n);
    host->stored += n > 0;
}

static void fill_in_place(struct host *host)
{
    uint64_t id = draw(host, IDS), refs[3];
    uint32_t c = class_of(host, id), n = 1 + (uint32_t)draw(host, 3), step = host->pool->arena.layout.classes, numbers[3];
    struct kvp_key keys[3];
    int status = kvp_reserve(host->pool, c, n, numbers);

    REQUIRE(status == KVP_OK || status == KVP_E_FULL, "reserve answers %d", status);
    if (status)
        return;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = key_of(id + i * step);
        payload_write(kvp_block_data(&host->pool->arena, kvp_block(c, numbers[i])), &keys[i], stride(host, c));
    }
    if (draw(host, 5) == 0) {
        REQUIRE(kvp_withdraw(host->pool, c, numbers, n) == KVP_OK, "withdraw");
        return;
    }
    int64_t published = kvp_publish(host->pool, c, numbers, keys, n, refs);
    REQUIRE(published >= 0, "publish answers %lld", (long long)published);
    host->stored += (uint64_t)published;
}

static void copy_out(struct host *host)
{
    uint64_t id = draw(host, IDS);
    struct kvp_key key = key_of(id);
    uint32_t c = class_of(host, id);
    void *to[1] = {malloc(stride(host, c))};
    uint8_t got = 0;

    REQUIRE(kvp_read(host->pool, c, &key, 1, to, stride(host, c), &got) >= 0, "read");
    REQUIRE(!got || payload_is(to[0], &key, stride(host, c)), "key %llu was copied wrong", (unsigned long long)id);
    free(to[0]);
}

static void drop_some(struct host *host)
{
    uint64_t id = draw(host, IDS);
    struct kvp_key key = key_of(id);

    if (draw(host, 2))
        REQUIRE(kvp_remove(host->pool, class_of(host, id), &key, 1) >= 0, "remove");
    else
        host->evicted += (uint64_t)kvp_shrink(host->pool, class_of(host, id), 1 + (uint32_t)draw(host, 3));
}

static void watch(struct host *host)
{
    struct kvp_event events[16];
    struct kvp_key keys[4];
    struct kvp_check check;
    uint64_t position = 0, lost = 0, id = draw(host, IDS);

    for (uint64_t i = 0; i < 4; i++)
        keys[i] = key_of(id + i);
    REQUIRE(kvp_touch(host->pool, 0, keys, 4) >= 0, "touch");
    uint32_t worker = (uint32_t)draw(host, host->pool->arena.layout.workers);
    while (kvp_events(host->pool, worker, &position, events, 16, &lost) > 0)
        ;
    if (draw(host, 8))
        return;
    REQUIRE(kvp_pool_check(host->pool, &check) == KVP_OK && check.problems == 0, "check on a pool in use: %s",
            check.first);
}

static void *be_host(void *argument)
{
    static void (*const verbs[])(struct host *) = {match_and_verify, match_and_verify, match_and_verify, let_one_go,
                                                   put_chain, put_chain, fill_in_place, copy_out, drop_some, watch};
    struct host *host = argument;

    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        verbs[draw(host, sizeof verbs / sizeof *verbs)](host);
        host->operations++;
    }
    while (host->held)
        let_one_go(host);
    return NULL;
}

static void stress(uint32_t classes, int threads, double duration)
{
    struct kvp_request request = {.workers = THREADS_MAX + 1, .classes = classes, .stride = {512, 4096}};
    struct host hosts[THREADS_MAX] = {0};
    uint64_t operations = 0, hits = 0, stored = 0;
    kvp_pool *pool;

    if (classes == 1)
        request.blocks = 64;
    else
        request.bytes = 400 << 10;
    int status = kvp_pool_create("memfd:", &request, "lru", &pool);
    REQUIRE(status == KVP_OK, "create: %s", kvp_strerror(status));
    stop = 0;
    for (int i = 0; i < threads; i++) {
        hosts[i].random = mix(seed + (uint64_t)i * 1000 + classes);
        REQUIRE(kvp_pool_share(pool, &hosts[i].pool) == KVP_OK, "share");
        pthread_create(&hosts[i].thread, NULL, be_host, &hosts[i]);
    }
    usleep((useconds_t)(duration * 1e6));
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < threads; i++) {
        pthread_join(hosts[i].thread, NULL);
        operations += hosts[i].operations, hits += hosts[i].hits, stored += hosts[i].stored;
    }
    for (int i = 0; i < threads; i++)
        kvp_pool_free(hosts[i].pool);
    require_clean(pool);
    require_usable(pool);
    require_clean(pool);
    kvp_pool_free(pool);
    printf("seed %llu, %u class%s, %d workers: %llu operations, %llu payloads verified, %llu stored\n",
           (unsigned long long)seed, classes, classes > 1 ? "es" : "", threads, (unsigned long long)operations,
           (unsigned long long)hits, (unsigned long long)stored);
    REQUIRE(hits > 0 && stored > 0, "nothing happened");
}

int main(int argc, char **argv)
{
    double duration = argc > 1 ? strtod(argv[1], NULL) : 4;
    int threads = argc > 3 ? atoi(argv[3]) : 4;

    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
    snprintf(replay, sizeof replay, "stress %g %llu %d", duration, (unsigned long long)seed, threads);
    alarm((unsigned)duration * 4 + 120);
    stress(1, threads, duration / 2);
    stress(2, threads, duration / 2);
    return 0;
}
