/* regress.c -- one small case for each fault that was found once. Built with crash points: a visitor at a named
 * point stops one thread there while another goes on, so that each interleaving is certain.
 *
 *   regress          every case          regress NAME     one of them
 */
#define _GNU_SOURCE
#include "tests/native/common.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

/* ---- stopping a thread at a point ---- */

static const char *stop_name;    /* the point; NULL: none */
static uint64_t stop_reached, stop_go;

static void stop_here(const char *name)
{
    if (!stop_name || strcmp(stop_name, name) != 0 || __atomic_exchange_n(&stop_reached, 1, __ATOMIC_ACQ_REL))
        return;
    while (!__atomic_load_n(&stop_go, __ATOMIC_ACQUIRE))
        usleep(100);
}

static void stop_at(const char *name)
{
    stop_reached = stop_go = 0;
    stop_name = name;
    kvp_crash_visit(stop_here);
}

static void await_stop(void)
{
    for (int i = 0; i < 50000 && !__atomic_load_n(&stop_reached, __ATOMIC_ACQUIRE); i++)
        usleep(100);
    REQUIRE(stop_reached, "point %s was never passed", stop_name);
}

static void let_go(void) { __atomic_store_n(&stop_go, 1, __ATOMIC_RELEASE); }

/* ---- pools ---- */

static kvp_pool *make(const char *uri, uint32_t classes, uint32_t workers)
{
    struct kvp_request request = {.workers = workers, .classes = classes, .stride = {4096, 12288}};
    kvp_pool *pool;

    if (classes == 1)
        request.blocks = 24;
    else
        request.bytes = 416 << 10;
    int status = kvp_pool_create(uri, &request, "lru", &pool);
    REQUIRE(status == KVP_OK, "create: %s", kvp_strerror(status));
    return pool;
}

static kvp_pool *share(kvp_pool *pool)
{
    kvp_pool *other;
    int status = kvp_pool_share(pool, &other);

    REQUIRE(status == KVP_OK, "share: %s", kvp_strerror(status));
    return other;
}

struct call {
    kvp_pool *pool;
    uint64_t id;
    int64_t result;
};

static void *put_thread(void *argument)
{
    struct call *call = argument;

    call->result = put_one(call->pool, 0, call->id);
    return NULL;
}

static void *shrink_thread(void *argument)
{
    struct call *call = argument;

    call->result = kvp_shrink(call->pool, 0, 1);
    return NULL;
}

/* ---- the cases ---- */

/* A refused publication inside put must give its blocks back. */
static void case_put_refused(void)
{
    kvp_pool *pool = make("memfd:", 1, 2);
    uint8_t zero[16] = {0}, payload[4096] = {1};
    const void *from[1] = {payload};

    for (int i = 0; i < 100; i++) {
        int64_t status = kvp_put(pool, 0, zero, 1, from, sizeof payload);
        REQUIRE(status == KVP_E_INVALID, "put %d answers %lld", i, (long long)status);
    }
    require_clean(pool);
    kvp_pool_free(pool);
}

/* A number that was given back is gone from the list, wherever else it stands. */
static void case_withdraw_twice(void)
{
    kvp_pool *pool = make("memfd:", 1, 2);
    uint32_t numbers[2];

    REQUIRE(kvp_reserve(pool, 0, 1, numbers) == KVP_OK, "reserve");
    numbers[1] = numbers[0];
    REQUIRE(kvp_withdraw(pool, 0, numbers, 2) == KVP_E_NOTOWNED, "a double free must be refused");
    numbers[0] = numbers[1];
    REQUIRE(kvp_withdraw(pool, 0, numbers, 1) == KVP_E_NOTOWNED, "and again");
    numbers[0] = KVP_NO_BLOCK;
    REQUIRE(kvp_withdraw(pool, 0, numbers, 1) == KVP_OK, "nothing to do is no error");
    require_clean(pool);
    kvp_pool_free(pool);
}

/* What others published in a second class is evicted too, though the first class was looked at since. */
static void case_renew_per_class(void)
{
    kvp_pool *pool = make("memfd:", 2, 4), *other = share(pool);
    uint32_t numbers[2];

    for (uint32_t c = 0; c < 2; c++) { /* our heaps exist, and are empty */
        REQUIRE(kvp_reserve(pool, c, 1, numbers) == KVP_OK && kvp_withdraw(pool, c, numbers, 1) == KVP_OK, "start");
        kvp_shrink(pool, c, 1);
    }
    kvp_lock(pool);
    kvp_spill(&pool->arena);
    kvp_unlock(pool);
    for (uint32_t c = 0; c < 2; c++)
        for (uint64_t id = 0; id < 3; id++)
            REQUIRE(put_one(other, c, 1000 * c + id) == 1, "put");
    for (uint32_t c = 0; c < 2; c++)
        REQUIRE(kvp_shrink(pool, c, 1) == 1, "class %u: another worker's blocks are not seen", c);
    kvp_pool_free(other);
    kvp_pool_free(pool);
}

/* A worker that reads the candidates between another's clock and its LIVE must still find that block later. */
static void case_renew_late_live(void)
{
    kvp_pool *pool = make("memfd:", 1, 4), *other = share(pool);
    struct call call = {other, 1, 0};
    pthread_t thread;

    put_one(pool, 0, 500);
    kvp_shrink(pool, 0, 2);
    stop_at("publish.tagged");
    pthread_create(&thread, NULL, put_thread, &call);
    await_stop();
    REQUIRE(kvp_shrink(pool, 0, 1) == 0, "nothing is LIVE yet");
    let_go();
    pthread_join(thread, NULL);
    REQUIRE(call.result == 1, "put");
    REQUIRE(kvp_shrink(pool, 0, 1) == 1, "the block that was published meanwhile is never a candidate");
    kvp_pool_free(other);
    kvp_pool_free(pool);
}

enum { GROUP_KEYS = 8 };

static void *group_thread(void *argument)
{
    struct call *call = argument;
    struct kvp_key keys[GROUP_KEYS];
    static const uint8_t payload[4096];
    const void *from[GROUP_KEYS];

    for (uint64_t i = 0; i < GROUP_KEYS; i++)
        keys[i] = key_of(i), from[i] = payload;
    call->result = kvp_put(call->pool, 0, keys, GROUP_KEYS, from, sizeof payload);
    return NULL;
}

/* All entries of a group stand before the first of its blocks is LIVE: until then nobody finds it by them. */
static void case_found_before_live(void)
{
    kvp_pool *pool = make("memfd:", 1, 4), *other = share(pool);
    struct call call = {other, 0, 0};
    struct kvp_key keys[GROUP_KEYS];
    uint64_t refs[GROUP_KEYS];
    pthread_t thread;

    for (uint64_t i = 0; i < GROUP_KEYS; i++)
        keys[i] = key_of(i);
    stop_at("publish.live"); /* the last is, the others are not yet */
    pthread_create(&thread, NULL, group_thread, &call);
    await_stop();
    REQUIRE(kvp_lookup(pool, 0, keys, GROUP_KEYS - 1, refs) == 0, "blocks that are not LIVE are found");
    REQUIRE(kvp_lookup(pool, 0, keys, GROUP_KEYS, refs) == 1 && refs[GROUP_KEYS - 1], "the one that is LIVE");
    REQUIRE(kvp_match(pool, 0, keys, GROUP_KEYS, refs) == 0, "no prefix is there");
    let_go();
    pthread_join(thread, NULL);
    REQUIRE(call.result == GROUP_KEYS && kvp_lookup(pool, 0, keys, GROUP_KEYS, refs) == GROUP_KEYS, "now all are");
    kvp_pool_free(other);
    kvp_pool_free(pool);
}

/* check says nothing of what a live worker is in the middle of. */
static void case_check_during_evict(void)
{
    kvp_pool *pool = make("memfd:", 1, 4), *other = share(pool);
    struct call call = {other, 0, 0};
    struct kvp_check check;
    pthread_t thread;

    put_one(other, 0, 1);
    stop_at("evict.decided");
    pthread_create(&thread, NULL, shrink_thread, &call);
    await_stop();
    REQUIRE(kvp_pool_check(pool, &check) == KVP_OK && check.problems == 0, "a false alarm: %s", check.first);
    let_go();
    pthread_join(thread, NULL);
    kvp_pool_free(other);
    kvp_pool_free(pool);
}

/* A child that opens the pool at `uri` and stays until it is killed. */
static pid_t inhabitant(const char *uri, uint64_t puts)
{
    int ready[2];
    char byte;
    REQUIRE(pipe(ready) == 0, "pipe");
    pid_t child = fork();

    if (child == 0) {
        kvp_pool *pool;
        REQUIRE(kvp_pool_open(uri, 0, &pool) == KVP_OK, "open in the child");
        for (uint64_t id = 0; id < puts; id++)
            put_one(pool, 0, id);
        REQUIRE(write(ready[1], "r", 1) == 1, "ready");
        for (;;)
            pause();
    }
    REQUIRE(read(ready[0], &byte, 1) == 1, "the child did not open");
    close(ready[0]);
    close(ready[1]);
    return child;
}

/* A worker that recovers another before open() has returned must not write into slot 0's log. */
static void recover_while_opening(void)
{
    kvp_pool *pool = make("memfd:", 1, 8), *third;
    const struct kvp_record *record = &pool->arena.logs[1];
    char uri[32];
    int how;

    snprintf(uri, sizeof uri, "memfd:%d", kvp_pool_fd(pool));
    kvp_pool_leave(pool);
    pid_t first = inhabitant(uri, 100), second = inhabitant(uri, 0);
    kill(first, SIGSTOP); /* alive, and recovers nobody */
    waitpid(first, &how, WUNTRACED);
    uint64_t before = nc_load(&record->header);
    kill(second, SIGKILL);
    waitpid(second, &how, 0);
    REQUIRE(kvp_pool_open(uri, 0, &third) == KVP_OK && third->arena.self == 2, "open");
    for (int i = 0; i < 20000 && co_load32(&third->arena.slots[1].lock); i++)
        usleep(100);
    uint64_t after = nc_load(&record->header);
    REQUIRE(after == before, "the log of worker 0 went from record %llu to %llu", (unsigned long long)(before >> 1),
            (unsigned long long)(after >> 1));
    kvp_pool_free(third);
    kill(first, SIGKILL);
    waitpid(first, &how, 0);
    kvp_pool_free(pool);
}

static void case_recover_while_opening(void)
{
    for (int round = 0; round < 20; round++)
        recover_while_opening();
}

static void *open_thread(void *argument)
{
    struct call *call = argument;

    call->result = kvp_pool_share(call->pool, &call->pool);
    return NULL;
}

/* After a reboot two processes claim the same dead slot: one of them gets it. */
static void case_reboot_two_claims(void)
{
    kvp_pool *pool = make("memfd:", 1, 1);
    struct call calls[2] = {{pool, 0, 0}, {pool, 0, 0}};
    pthread_t threads[2];

    kvp_pool_leave(pool);
    co_store32(&pool->arena.slots[0].lock, 77777);
    co_store(&pool->arena.slots[0].boot, 12345);
    stop_at("join.taken");
    pthread_create(&threads[0], NULL, open_thread, &calls[0]);
    await_stop();
    pthread_create(&threads[1], NULL, open_thread, &calls[1]);
    pthread_join(threads[1], NULL);
    let_go();
    pthread_join(threads[0], NULL);
    REQUIRE(calls[0].result == KVP_OK, "the first claims: %lld", (long long)calls[0].result);
    REQUIRE(calls[1].result == KVP_E_NOSLOT, "two workers in one slot: the second got %lld", (long long)calls[1].result);
    kvp_pool_free(calls[0].pool);
    kvp_pool_free(pool);
}

/* remove without force deletes pools only. */
static void case_remove_short_file(void)
{
    char path[] = "/tmp/kvpool-short-XXXXXX", uri[64];
    int fd = mkstemp(path);

    REQUIRE(fd >= 0 && write(fd, "precious", 8) == 8, "file");
    close(fd);
    snprintf(uri, sizeof uri, "file:%s", path);
    int status = kvp_pool_remove(uri, 0), there = access(path, F_OK) == 0;
    unlink(path);
    REQUIRE(there && status < 0, "a file of 8 bytes that is no pool was deleted (%d)", status);
}

static void count_events(kvp_pool *pool, uint64_t *position, uint64_t *published, uint64_t *evicted)
{
    struct kvp_event event;
    uint64_t lost = 0;

    while (kvp_events(pool, 0, position, &event, 1, &lost) > 0) {
        *published += event.kind == 0;
        *evicted += event.kind == 1;
    }
    REQUIRE(lost == 0, "%llu records lost", (unsigned long long)lost);
}

/* Blocks that go because their segment goes to another class are reported like any eviction. */
static void case_drain_reports(void)
{
    kvp_pool *pool = make("memfd:", 2, 2);
    uint64_t position = 0, published = 0, evicted = 0, present = 0, n = pool->arena.class[0].blocks;

    for (uint64_t id = 0; id < n; id++) {
        put_one(pool, 0, id);
        count_events(pool, &position, &published, &evicted);
    }
    for (uint64_t id = 0; id < 40; id++) {
        put_one(pool, 1, 5000 + id);
        count_events(pool, &position, &published, &evicted);
    }
    for (uint64_t id = 0; id < n; id++)
        present += probe(pool, 0, id) == 1;
    for (uint64_t id = 0; id < 40; id++)
        present += probe(pool, 1, 5000 + id) == 1;
    REQUIRE(published - evicted == present, "%llu published, %llu evicted, %llu there", (unsigned long long)published,
            (unsigned long long)evicted, (unsigned long long)present);
    kvp_pool_free(pool);
}

/* A damaged header in a log loses records, not the reader. */
static void case_damaged_log(void)
{
    kvp_pool *pool = make("memfd:", 1, 2);
    struct kvp_event event;
    uint64_t position = 0, lost = 0;

    for (uint64_t id = 0; id < 5; id++)
        put_one(pool, 0, id);
    nc_store(&pool->arena.logs[1].header, 3 << 1 | 1); /* record 1 claims to be record 3 */
    while (kvp_events(pool, 0, &position, &event, 1, &lost) > 0)
        ;
    REQUIRE(position <= 5 && lost <= 5, "the reader stands at %llu, %llu lost", (unsigned long long)position,
            (unsigned long long)lost);
    kvp_pool_free(pool);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"put_refused", case_put_refused},
    {"withdraw_twice", case_withdraw_twice},
    {"renew_per_class", case_renew_per_class},
    {"renew_late_live", case_renew_late_live},
    {"found_before_live", case_found_before_live},
    {"check_during_evict", case_check_during_evict},
    {"recover_while_opening", case_recover_while_opening},
    {"reboot_two_claims", case_reboot_two_claims},
    {"remove_short_file", case_remove_short_file},
    {"drain_reports", case_drain_reports},
    {"damaged_log", case_damaged_log},
};

/* Each case in a process of its own, so that one that fails hides no other. */
int main(int argc, char **argv)
{
    int failed = 0, how;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (argc > 1 && strcmp(argv[1], cases[i].name) != 0)
            continue;
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            snprintf(replay, sizeof replay, "regress %s", cases[i].name);
            cases[i].run();
            _exit(0);
        }
        waitpid(child, &how, 0);
        printf("%-24s %s\n", cases[i].name, how ? "FAILED" : "ok");
        fflush(stdout);
        failed += how != 0;
    }
    return failed != 0;
}
