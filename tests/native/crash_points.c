/* crash_points.c -- die at every crash point in turn; what is left must be whole.
 *
 *   crash_points                    every scenario, every point; prints the names that were passed
 *   crash_points SCENARIO N         one death again
 *
 * A child opens the pool, runs the scenario's script and kills itself at the n-th pass of a crash point, for
 * n = 1, 2, 3, ... until the script runs to its end. After each death a survivor recovers and looks at everything.
 */
#define _GNU_SOURCE
#include "tests/native/common.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { IDS = 96, NAMES = 64, WORKERS = 8, DEADLINE_MS = 5000, SAFE_DISTANCE = 12 };

/* What the child says about its keys, as far as it got; in memory that outlives it. */
enum promise { NEVER, MAYBE, MUST, GONE };
struct ledger {
    uint8_t promise[IDS];
    const char *name[NAMES]; /* literals: at the same address on both sides of a fork */
    uint64_t passes;
};
static struct ledger *ledger;
static char uri[64], path_uri[128];

static void note_name(const char *name)
{
    for (int i = 0; i < NAMES; i++) {
        if (!ledger->name[i])
            ledger->name[i] = name;
        if (strcmp(ledger->name[i], name) == 0)
            return;
    }
}

static kvp_pool *open_pool(void)
{
    kvp_pool *pool;
    int status = kvp_pool_open(uri, 0, &pool);

    REQUIRE(status == KVP_OK, "open: %s", kvp_strerror(status));
    return pool;
}

static void promise(uint64_t id, enum promise what) { ledger->promise[id] = (uint8_t)what; }

/* ---- what the child does ---- */

static void put(kvp_pool *pool, uint32_t class, uint64_t id)
{
    promise(id, MAYBE);
    REQUIRE(put_one(pool, class, id) >= 0, "put %llu", (unsigned long long)id);
    promise(id, MUST);
}

static void take_back(kvp_pool *pool, uint64_t id)
{
    struct kvp_key key = key_of(id);

    promise(id, MAYBE);
    REQUIRE(kvp_remove(pool, 0, &key, 1) == 1, "remove %llu", (unsigned long long)id);
    promise(id, GONE);
}

static void reserve_and_publish(kvp_pool *pool)
{
    struct kvp_key keys[2] = {key_of(0), key_of(1)};
    uint32_t numbers[3];
    uint64_t refs[2];

    REQUIRE(kvp_reserve(pool, 0, 3, numbers) == KVP_OK, "reserve 3");
    REQUIRE(kvp_withdraw(pool, 0, numbers, 1) == KVP_OK, "withdraw");
    for (int i = 0; i < 2; i++)
        payload_write(kvp_block_data(&pool->arena, numbers[i + 1]), &keys[i], pool->arena.class[0].stride);
    promise(0, MAYBE), promise(1, MAYBE);
    REQUIRE(kvp_publish(pool, 0, numbers + 1, keys, 2, refs) == 2, "publish");
    promise(0, MUST), promise(1, MUST);
    REQUIRE(publish_one(pool, 0, 0, refs) == 0, "a second block of a key must lose");
}

static void pin_and_remove(kvp_pool *pool)
{
    struct kvp_key keys[4] = {key_of(0), key_of(1), key_of(2), key_of(3)};
    uint64_t refs[4];
    uint8_t copy[4096], got;
    void *to[1] = {copy};

    REQUIRE(kvp_match(pool, 0, keys, 4, refs) == 4, "match");
    take_back(pool, 2); /* pinned */
    REQUIRE(kvp_read(pool, 0, &keys[3], 1, to, sizeof copy, &got) == 1, "read");
    REQUIRE(payload_is(copy, &keys[3], sizeof copy), "bytes");
    kvp_unpin_refs(pool, refs, 4);
    take_back(pool, 4); /* unpinned */
}

/* More keys than blocks: what is SAFE_DISTANCE back may go, what is nearer may not. */
static void overflow(kvp_pool *pool, uint32_t class, uint64_t first, uint64_t end)
{
    for (uint64_t id = 0; id < first; id++)
        if (ledger->promise[id] == MUST)
            promise(id, MAYBE);
    for (uint64_t id = first; id < end; id++) {
        if (id >= first + SAFE_DISTANCE)
            promise(id - SAFE_DISTANCE, MAYBE);
        put(pool, class, id);
    }
}

static void look(kvp_pool *pool)
{
    struct kvp_event events[8];
    uint64_t position = 0, lost = 0;
    int64_t n;

    while ((n = kvp_events(pool, pool->arena.self, &position, events, 8, &lost)) > 0)
        for (int64_t i = 0; i < n; i++)
            REQUIRE(events[i].kind >= 0 && events[i].kind <= 3, "kind %d", events[i].kind);
}

/* One class: every verb, a full pool, and a leave with things still held. */
static void script_verbs(void)
{
    kvp_pool *pool = open_pool();
    uint32_t numbers[4];
    uint64_t ref;
    struct kvp_key last = key_of(49);

    reserve_and_publish(pool);
    for (uint64_t id = 2; id < 8; id++)
        put(pool, 0, id);
    pin_and_remove(pool);
    overflow(pool, 0, 8, 50);
    REQUIRE(kvp_reserve(pool, 0, 4, numbers) == KVP_OK, "reserve from a full pool");
    REQUIRE(kvp_withdraw(pool, 0, numbers, 4) == KVP_OK, "withdraw");
    REQUIRE(kvp_shrink(pool, 0, 3) == 3, "shrink");
    look(pool);
    REQUIRE(kvp_match(pool, 0, &last, 1, &ref) == 1, "match the last");
    REQUIRE(kvp_reserve(pool, 0, 2, numbers) == KVP_OK, "reserve before leaving");
    kvp_pool_free(pool);
}

/* Two classes of different stride take segments from each other. */
static void script_segments(void)
{
    kvp_pool *pool = open_pool();
    uint32_t n[2] = {pool->arena.class[0].blocks, pool->arena.class[1].blocks};
    uint64_t id = 0;

    for (uint32_t round = 0; round < 4; round++) {
        uint32_t c = round & 1;
        for (uint64_t i = 0; i < id; i++)
            promise(i, MAYBE);
        for (uint32_t i = 0; i < n[c] && i < 20 && id < IDS; i++, id++) {
            promise(id, MAYBE);
            put_one(pool, c, id);
        }
        kvp_shrink(pool, c, 8);
    }
    uint32_t all[256];
    for (uint64_t i = 0; i < id; i++)
        promise(i, MAYBE);
    for (uint32_t c = 0; c < 2; c++) /* one class takes every segment, then the other */
        if (kvp_reserve(pool, c, n[c], all) == KVP_OK)
            kvp_withdraw(pool, c, all, n[c]);
    kvp_pool_free(pool);
}

/* Open, and be the one who recovers the victim that lies in the pool. */
static void script_recoverer(void)
{
    kvp_pool *pool = open_pool();

    for (int ms = 0; ms < DEADLINE_MS && co_load32(&pool->arena.slots[0].lock); ms++)
        usleep(1000);
    kvp_pool_free(pool);
}

/* Make a pool that has a name. */
static void script_creator(void)
{
    struct kvp_request request = {.blocks = 8, .workers = 2, .classes = 1, .stride = {4096}};
    kvp_pool *pool;
    int status = kvp_pool_create(path_uri, &request, "lru", &pool);

    REQUIRE(status == KVP_OK, "create %s: %s", path_uri, kvp_strerror(status));
    kvp_pool_free(pool);
}

/* ---- the parent ---- */

/* Run the script in a child that dies at its n-th point: 1 if it died, 0 if it came to the end. */
static int run_child(void (*script)(void), uint64_t n)
{
    int how;
    pid_t child = fork();

    if (child == 0) {
        kvp_crash_visit(note_name);
        kvp_crash_arm("", n);
        script();
        ledger->passes = kvp_crash_passed();
        _exit(0);
    }
    REQUIRE(child > 0 && waitpid(child, &how, 0) == child, "fork");
    if (WIFEXITED(how) && WEXITSTATUS(how) == 0)
        return 0;
    REQUIRE(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL, "the child ended with %#x", how);
    return 1;
}

static void await_recovery(kvp_pool *pool)
{
    for (int ms = 0; ms < DEADLINE_MS * 5; ms++) {
        int held = 0;
        for (uint32_t w = 0; w < pool->arena.layout.workers; w++)
            held += w != pool->arena.self && co_load32(&pool->arena.slots[w].lock) != 0;
        if (!held)
            return;
        /* It sleeps on the locks of those that were there at its last tick: thousands of deaths wait for no tick. */
        syscall(SYS_futex, &pool->keeper.state, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL, NULL, 0);
        usleep(200);
    }
    REQUIRE(0, "a dead worker's slot is not free after %d ms", DEADLINE_MS);
}

static void inspect(kvp_pool *pool)
{
    await_recovery(pool);
    require_clean(pool);
    for (uint64_t id = 0; id < IDS; id++) {
        int seen = 0;
        for (uint32_t c = 0; c < pool->arena.layout.classes; c++) {
            int found = probe(pool, c, id);
            REQUIRE(found >= 0, "key %llu has wrong bytes", (unsigned long long)id);
            seen += found;
        }
        enum promise what = ledger->promise[id];
        REQUIRE(what == MAYBE || seen == (what == MUST), "key %llu: found %d times, promise %d",
                (unsigned long long)id, seen, what);
    }
    look(pool);
    require_usable(pool);
    require_clean(pool);
}

static kvp_pool *make_pool(uint32_t classes)
{
    struct kvp_request request = {.workers = WORKERS, .classes = classes, .stride = {4096, 12288}};
    kvp_pool *pool;

    if (classes == 1)
        request.blocks = 24;
    else
        request.bytes = 416 << 10;
    int status = kvp_pool_create("memfd:", &request, "lru", &pool);
    REQUIRE(status == KVP_OK, "create: %s", kvp_strerror(status));
    snprintf(uri, sizeof uri, "memfd:%d", kvp_pool_fd(pool));
    memset(ledger->promise, 0, sizeof ledger->promise);
    return pool;
}

static int die_with_survivor(uint32_t classes, void (*script)(void), uint64_t n)
{
    kvp_pool *pool = make_pool(classes);
    int died = run_child(script, n);

    inspect(pool);
    kvp_pool_free(pool);
    return died;
}

static int die_in_verbs(uint64_t n) { return die_with_survivor(1, script_verbs, n); }
static int die_in_segments(uint64_t n) { return die_with_survivor(2, script_segments, n); }

/* A victim in slot 0 that holds some of everything; nobody else is in the pool when it dies. */
static void make_victim(void)
{
    pid_t child = fork();
    int how;

    if (child == 0) {
        kvp_pool *pool = open_pool();
        uint32_t numbers[3];
        uint64_t ref;
        struct kvp_key key = key_of(1);
        for (uint64_t id = 0; id < 4; id++)
            put(pool, 0, id);
        REQUIRE(kvp_reserve(pool, 0, 3, numbers) == KVP_OK && kvp_match(pool, 0, &key, 1, &ref) == 1, "victim");
        kvp_lock_block(&pool->arena, kvp_ref(kvp_block(0, 0), kvp_word_generation(nc_load(&pool->arena.class[0].words[0]))));
        if (pool->arena.layout.classes > 1)
            co_store(&pool->arena.segments[0], KVP_SEGMENT_DRAINING | (uint64_t)pool->arena.self << 16);
        kill(getpid(), SIGKILL);
    }
    waitpid(child, &how, 0);
    REQUIRE(WIFSIGNALED(how), "the victim failed");
}

/* The recoverer dies in recovery; a third process takes over both. */
static int die_in_recovery(uint32_t classes, uint64_t n)
{
    kvp_pool *pool = make_pool(classes), *third;

    kvp_pool_leave(pool);
    make_victim();
    int died = run_child(script_recoverer, n);
    third = open_pool();
    inspect(third);
    kvp_pool_free(third);
    kvp_pool_free(pool);
    return died;
}

static int die_in_recovery_of_blocks(uint64_t n) { return die_in_recovery(1, n); }
static int die_in_recovery_of_segments(uint64_t n) { return die_in_recovery(2, n); }

/* A pool that has its name is whole; one that has not leaves nothing behind. */
static int die_in_create(uint64_t n)
{
    char folder[] = "/tmp/kvpool-crash-XXXXXX", path[80];
    kvp_pool *pool;

    REQUIRE(mkdtemp(folder), "mkdtemp");
    snprintf(path, sizeof path, "%s/pool", folder);
    snprintf(path_uri, sizeof path_uri, "file:%s", path);
    int died = run_child(script_creator, n);
    if (access(path, F_OK) == 0) {
        REQUIRE(kvp_pool_open(path_uri, 0, &pool) == KVP_OK, "a named pool must open");
        await_recovery(pool);
        require_clean(pool);
        kvp_pool_free(pool);
        REQUIRE(kvp_pool_remove(path_uri, 0) == KVP_OK, "remove");
    }
    REQUIRE(rmdir(folder) == 0, "something was left in %s", folder);
    return died;
}

static const struct {
    const char *name;
    int (*die)(uint64_t n);
} scenarios[] = {
    {"create", die_in_create},
    {"verbs", die_in_verbs},
    {"recovery", die_in_recovery_of_blocks},
    {"recovery-segments", die_in_recovery_of_segments},
    {"segments", die_in_segments},
};

static void sweep(size_t s, uint64_t only)
{
    uint64_t n = only ? only : 1;
    double start = seconds();

    do
        snprintf(replay, sizeof replay, "crash_points %s %llu", scenarios[s].name, (unsigned long long)n);
    while (scenarios[s].die(n) && !only && ++n);
    printf("%-18s %4llu deaths, %.2f s\n", scenarios[s].name, (unsigned long long)(only ? 1 : n - 1), seconds() - start);
    fflush(stdout); /* or each child would print it again */
}

int main(int argc, char **argv)
{
    ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(ledger != MAP_FAILED, "mmap");
    alarm(280);
    for (size_t s = 0; s < sizeof scenarios / sizeof *scenarios; s++)
        if (argc < 2 || strcmp(argv[1], scenarios[s].name) == 0)
            sweep(s, argc > 2 ? strtoull(argv[2], NULL, 10) : 0);
    for (int i = 0; i < NAMES && ledger->name[i]; i++)
        printf("passed %s\n", ledger->name[i]);
    return 0;
}
