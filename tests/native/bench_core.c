/* bench_core.c -- the nanosecond rows of `kvpool bench core`, and operation counts for tests/test_bench.py.
 *
 *   bench_core rows SAMPLES   one row a line: name, unit, measured, bound, separated by tabs; `alloc`, `index`,
 *                             `handoff` or `recovery` instead of `rows`: a part of them
 *   bench_core growth         one count a line: operation, what grew, how many, basic blocks executed
 *
 * The bench compiles this with the C core when a source tree and a compiler are there. Every bound is sampled in turn
 * with what it bounds, and both are medians. Counts need the core compiled with -fsanitize-coverage=trace-pc.
 */
#define _GNU_SOURCE
#include "bench_handoff.h"
#include "bench_recovery.h"

/* ---- alloc and free ---- */

static double time_cas(void)
{
    static co_u64 word;
    uint64_t seen = co_load(&word);
    double start = now_ns();

    for (uint32_t i = 0; i < PAIRS; i++)
        if (co_cas(&word, &seen, seen + 1))
            seen++;
    return (now_ns() - start) / PAIRS;
}

static double time_hits(kvp_pool *pool)
{
    kvp_lock(pool); /* the arena belongs to the holder of the lock; the keeper uses it too */
    double start = now_ns();
    for (uint32_t i = 0; i < PAIRS; i++)
        kvp_free_one(&pool->arena, 0, kvp_alloc_one(&pool->arena, 0));
    double spent = now_ns() - start;
    kvp_unlock(pool);
    return spent / PAIRS;
}

static double time_burst(kvp_pool *pool)
{
    static uint32_t numbers[BURST];

    kvp_lock(pool);
    double start = now_ns();
    for (uint32_t i = 0; i < BURST; i++)
        numbers[i] = kvp_alloc_one(&pool->arena, 0);
    for (uint32_t i = 0; i < BURST; i++)
        kvp_free_one(&pool->arena, 0, numbers[i]);
    double spent = now_ns() - start;
    kvp_unlock(pool);
    return spent / BURST;
}

static double time_reserve(kvp_pool *pool)
{
    uint32_t number;
    double start = now_ns();

    for (uint32_t i = 0; i < PAIRS; i++) {
        kvp_reserve(pool, 0, 1, &number);
        kvp_withdraw(pool, 0, &number, 1);
    }
    return (now_ns() - start) / PAIRS;
}

static void alloc_rows(kvp_pool *pool, uint32_t samples)
{
    static double cas[SAMPLES_MAX], hit[SAMPLES_MAX], burst[SAMPLES_MAX], reserve[SAMPLES_MAX];

    for (uint32_t i = 0; i < samples; i++) {
        cas[i] = time_cas();
        hit[i] = time_hits(pool);
        burst[i] = time_burst(pool);
        reserve[i] = time_reserve(pool);
    }
    double bound = median(cas, samples);
    row("alloc+free, hit (C)", "ns/pair", hit, samples, bound, 1);
    row("alloc+free, burst of 2048 (C)", "ns/pair", burst, samples, bound, 1);
    row("reserve+withdraw, 1 block (C)", "ns/pair", reserve, samples, bound, 1);
}

/* ---- match and lookup ---- */

/* Memory of the directory's size, on the pages that a pool gets. */
struct table {
    struct kvp_mapping mapping;
    uint64_t lines;
};

static void make_table(struct table *table, const kvp_pool *pool)
{
    uint64_t bytes = pool->homes * KVP_HOME_ENTRIES * sizeof(struct kvp_entry);

    must(kvp_mapping_create("memfd:", bytes, &table->mapping), "kvp_mapping_create");
    must(kvp_mapping_populate(&table->mapping, 0, table->mapping.bytes, 1), "kvp_mapping_populate");
    kvp_mapping_collapse(&table->mapping);
    memset(table->mapping.base, 1, table->mapping.bytes);
    table->lines = bytes / KVP_LINE;
}

static void cool_caches(void)
{
    static uint64_t *other;
    uint64_t sum = 0;

    if (!other)
        other = memory(COLD_BYTES);
    for (uint64_t i = 0; i < COLD_BYTES / 8; i += 8)
        sum += other[i];
    sink += sum;
}

static void warm(const uint8_t *bytes, uint64_t n)
{
    for (uint64_t i = 0; i < n; i += KVP_LINE)
        sink += bytes[i];
}

static double time_raw(const struct table *table)
{
    uint64_t at[CHAIN + AHEAD], sum = 0;

    for (uint32_t i = 0; i < CHAIN + AHEAD; i++)
        at[i] = random_next() % table->lines * KVP_LINE;
    double start = now_ns();
    for (uint32_t i = 0; i < CHAIN; i++) {
        kvp_prefetch(table->mapping.base + at[i + AHEAD]);
        sum += table->mapping.base[at[i]];
    }
    double spent = now_ns() - start;
    sink += sum;
    return spent;
}

static double time_match(struct world *world, const uint8_t *keys)
{
    double start = now_ns();
    int64_t found = kvp_match(world->pool, 0, keys, CHAIN, world->refs);
    double spent = now_ns() - start;

    kvp_unpin_refs(world->pool, world->refs, CHAIN);
    if (found != CHAIN)
        fail("a chain is not whole");
    return spent;
}

static double time_lookup(struct world *world, const uint8_t *keys)
{
    double start = now_ns();
    int64_t found = kvp_lookup(world->pool, 0, keys, CHAIN, world->refs);
    double spent = now_ns() - start;

    if (found != CHAIN)
        fail("a chain is not whole");
    return spent;
}

enum kind { MATCH, LOOKUP, RAW, KINDS };

static double sample(struct world *world, const struct table *table, enum kind kind, int is_cold)
{
    const uint8_t *keys = chain_keys(world, world->whole[random_next() % world->whole_count]);

    if (is_cold)
        cool_caches();
    warm(keys, CHAIN * KVP_KEY_BYTES); /* the caller has just made them */
    warm((const uint8_t *)world->refs, sizeof world->refs);
    if (kind == RAW)
        return time_raw(table);
    return kind == MATCH ? time_match(world, keys) : time_lookup(world, keys);
}

static void find_rows(struct world *world, const char *what, uint32_t samples, int is_cold)
{
    static double spent[KINDS][SAMPLES_MAX];
    struct table table;
    char name[80];
    uint32_t turn = is_cold ? 1 : TURN;

    make_table(&table, world->pool);
    samples = samples / turn * turn;
    for (uint32_t start = 0; start < samples; start += turn)
        for (enum kind kind = MATCH; kind < KINDS; kind++)
            for (uint32_t i = start; i < start + turn; i++)
                spent[kind][i] = sample(world, &table, kind, is_cold);
    double bound = median(spent[RAW], samples);
    snprintf(name, sizeof name, "match 1024 of %s, %s (C)", what, is_cold ? "cold" : "hot");
    row(name, "us", spent[MATCH], samples, bound, 1e3);
    snprintf(name, sizeof name, "lookup 1024 of %s, %s (C)", what, is_cold ? "cold" : "hot");
    row(name, "us", spent[LOOKUP], samples, bound, 1e3);
    kvp_mapping_close(&table.mapping);
}

static void small_rows(uint64_t blocks, const char *what, uint32_t samples)
{
    struct world *world = make_world(blocks);

    fill(world, 0);
    find_rows(world, what, samples * TURN, 0);
    free_world(world);
}

static void million_rows(uint32_t samples)
{
    struct world *world = make_world(1000000);

    fill(world, 0);
    find_rows(world, "1e6", samples * TURN, 0);
    find_rows(world, "1e6", samples, 1);
    empty(world);
    fill(world, 1);
    find_rows(world, "1e6, scattered", samples * TURN, 0);
    find_rows(world, "1e6, scattered", samples, 1);
    free_world(world);
}

/* ---- growth: operations, not time ---- */

static __thread uint64_t operations;

/* Called by the compiler's instrumentation at every basic block of the core. */
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void)
{
    operations++;
}

static uint64_t count_match(struct world *world, uint32_t n)
{
    operations = 0;
    must(kvp_match(world->pool, 0, world->keys, n, world->refs), "kvp_match");
    must(kvp_unpin_refs(world->pool, world->refs, n), "kvp_unpin_refs");
    return operations;
}

static uint64_t count_misses(struct world *world, uint32_t n)
{
    static uint8_t keys[CHAIN * KVP_KEY_BYTES];

    make_chain(keys);
    operations = 0;
    must(kvp_lookup(world->pool, 0, keys, n, world->refs), "kvp_lookup");
    return operations;
}

static uint64_t count_reserve(struct world *world, uint32_t n)
{
    static uint32_t numbers[CHAIN];

    operations = 0;
    must(kvp_reserve(world->pool, 0, n, numbers), "kvp_reserve");
    must(kvp_withdraw(world->pool, 0, numbers, n), "kvp_withdraw");
    return operations;
}

static uint64_t publish_new(struct world *world, const uint8_t *keys, uint32_t n)
{
    static uint32_t numbers[CHAIN];

    must(kvp_reserve(world->pool, 0, n, numbers), "kvp_reserve");
    operations = 0;
    must(kvp_publish(world->pool, 0, numbers, keys, n, world->refs), "kvp_publish");
    uint64_t counted = operations;
    must(kvp_remove(world->pool, 0, keys, n), "kvp_remove");
    return counted;
}

static uint64_t count_publish(struct world *world, uint32_t n)
{
    static uint8_t keys[CHAIN * KVP_KEY_BYTES];

    make_chain(keys);
    return publish_new(world, keys, n);
}

/* Many children of one head: all keys of one group want the same homes. */
static uint64_t count_siblings(struct world *world, uint32_t n)
{
    static uint8_t keys[CHAIN * KVP_KEY_BYTES];

    make_chain(keys);
    for (uint32_t i = 1; i < n; i++)
        memcpy(keys + (size_t)i * KVP_KEY_BYTES, keys, 4);
    return publish_new(world, keys, n);
}

static uint64_t count_evict(struct world *world, uint32_t n)
{
    must(kvp_shrink(world->pool, 0, 1), "kvp_shrink"); /* builds the heap */
    operations = 0;
    must(kvp_shrink(world->pool, 0, n), "kvp_shrink");
    return operations;
}

/* Reserve one block while the n oldest are pinned. */
static uint64_t count_pinned(struct world *world, uint32_t n)
{
    static uint32_t number, *rest;
    uint64_t states[64];

    must(kvp_match(world->pool, 0, world->keys, n, world->refs), "kvp_match");
    for (uint32_t i = 1; i < world->chains; i++)
        must(kvp_touch(world->pool, 0, chain_keys(world, i), CHAIN), "kvp_touch");
    must(kvp_pool_states(world->pool, states), "kvp_pool_states");
    rest = memory((states[KVP_FREE] + states[KVP_CACHED] + 1) * sizeof *rest);
    uint32_t left = (uint32_t)(states[KVP_FREE] + states[KVP_CACHED]);
    must(kvp_reserve(world->pool, 0, left, rest), "kvp_reserve");
    operations = 0;
    must(kvp_reserve(world->pool, 0, 1, &number), "kvp_reserve");
    uint64_t counted = operations;
    must(kvp_withdraw(world->pool, 0, &number, 1), "kvp_withdraw");
    must(kvp_withdraw(world->pool, 0, rest, left), "kvp_withdraw");
    must(kvp_unpin_refs(world->pool, world->refs, n), "kvp_unpin_refs");
    free(rest);
    return counted;
}

static uint64_t count_recover(struct world *world, uint32_t n)
{
    (void)n;
    operations = 0;
    kvp_recover(&world->pool->arena, WORKERS - 1); /* a slot that nobody has: the scan alone */
    return operations;
}

static const struct {
    const char *name;
    uint64_t (*count)(struct world *world, uint32_t n);
} growths[] = {
    {"match", count_match},       {"misses", count_misses},     {"reserve", count_reserve},
    {"publish", count_publish},   {"siblings", count_siblings}, {"pinned", count_pinned},
    {"recover", count_recover},   {"evict", count_evict},
};

static void growth_lines(void)
{
    static const uint64_t sizes[] = {1 << 14, 1 << 17};
    static const uint32_t keys[] = {CHAIN / 8, CHAIN};

    for (int s = 0; s < 2; s++) {
        struct world *world = make_world(sizes[s]);
        fill(world, 1);
        for (size_t i = 0; i < sizeof growths / sizeof *growths; i++) {
            growths[i].count(world, CHAIN); /* first touches are over */
            for (int k = 0; k < 2; k++) {
                uint64_t counted = growths[i].count(world, keys[k]);
                printf("%s\t%llu\t%u\t%llu\n", growths[i].name, (unsigned long long)sizes[s], keys[k],
                       (unsigned long long)counted);
            }
        }
        free_world(world);
    }
}

static void index_rows(uint32_t samples)
{
    small_rows(10000, "1e4", samples);
    small_rows(100000, "1e5", samples);
    million_rows(samples);
}

/* Two processes at once, each with its own worker: how long both together take for a pair, beside one alone. */
static void pair_row(kvp_pool *pool, const char *name, double (*timed)(kvp_pool *pool), uint32_t samples)
{
    static double one[SAMPLES_MAX], two[SAMPLES_MAX];
    double *theirs = mmap(NULL, sizeof one, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct shared *shared = mmap(NULL, KVP_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (theirs == MAP_FAILED || shared == MAP_FAILED)
        fail("no shared page");
    for (uint32_t i = 0; i < samples; i++)
        one[i] = timed(pool);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        must(kvp_pool_open(kvp_pool_uri(pool), 0, &pool), "kvp_pool_open");
    __atomic_add_fetch(&shared->ready.co64, 1, __ATOMIC_ACQ_REL);
    while (co_load(&shared->ready) < 2)
        ;
    for (uint32_t i = 0; i < samples; i++)
        (child ? two : theirs)[i] = timed(pool);
    if (child == 0) {
        kvp_pool_free(pool);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    for (uint32_t i = 0; i < samples; i++)
        two[i] = 1 / (1 / two[i] + 1 / theirs[i]);
    row(name, "ns/pair", two, samples, median(one, samples), 1);
}

static const struct {
    const char *name;
    double (*timed)(kvp_pool *pool);
} pairs[] = {
    {"alloc+free, hit, two processes (C)", time_hits},
    {"alloc+free, burst of 2048, two processes (C)", time_burst},
};

static void alloc_suite(uint32_t samples)
{
    kvp_pool *pool = make_pool(1000000);

    alloc_rows(pool, samples);
    if (sysconf(_SC_NPROCESSORS_ONLN) > 1)
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
            pair_row(pool, pairs[i].name, pairs[i].timed, samples);
    kvp_pool_free(pool);
}

static const struct {
    const char *name;
    void (*rows)(uint32_t samples);
} suites[] = {{"alloc", alloc_suite}, {"index", index_rows}, {"handoff", handoff_suite},
            {"recovery", recovery_suite}};

int main(int argc, char **argv)
{
    uint32_t samples = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    int ran = 0;

    if (argc >= 2 && strcmp(argv[1], "victim") == 0)
        return victim(argv[2]);
    if (argc == 2 && strcmp(argv[1], "growth") == 0) {
        growth_lines();
        return 0;
    }
    for (size_t i = 0; samples && i < sizeof suites / sizeof *suites; i++)
        if (strcmp(argv[1], "rows") == 0 || strcmp(argv[1], suites[i].name) == 0) {
            suites[i].rows(samples < SAMPLES_MAX / TURN ? samples : SAMPLES_MAX / TURN);
            ran = 1;
        }
    if (!ran)
        fprintf(stderr, "usage: bench_core rows|alloc|index|handoff|recovery SAMPLES | growth\n");
    return ran ? 0 : 2;
}
