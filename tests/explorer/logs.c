/* logs.c -- a ring of records from one host to another: lapped readers, writers that die, successors. */
#include "scenarios.h"
#include "world.h"

/* ---- the ring by itself ---- */

static uint64_t records, written, first_read;
static struct kvp_record *ring;

static void append(void *argument)
{
    (void)argument;
    for (uint64_t n = 1; n <= written; n++) {
        const uint64_t word[3] = {n * 16, n * 16 + 1, n * 16 + 2};
        kvp_log_append(ring, records, n, (unsigned)n, word);
    }
}

/* Read once what is there: never a record that is torn, or another one than was asked for. */
static void follow(void *argument)
{
    uint64_t word[3], newest = 0, refreshed = 0;
    unsigned kind;

    for (uint64_t n = first_read; n <= written;) {
        if (n >= refreshed) {
            kvp_log_refresh(ring, records, n, records);
            nc_read_fence();
            refreshed = n + records;
        }
        int read = kvp_log_read(ring, records, n, &kind, word, &newest);
        if (read == 0 && !argument)
            return;
        EX_CHECK(read != 0, "record %llu of %llu never arrives", (unsigned long long)n,
                 (unsigned long long)written);
        if (read < 0) {
            EX_CHECK(newest > n && newest <= written, "lapped at %llu by %llu", (unsigned long long)n, (unsigned long long)newest);
            n = newest;
            continue;
        }
        for (uint64_t i = 0; i < 3; i++)
            EX_CHECK(word[i] == n * 16 + i && kind == n, "record %llu: word %llu is %#llx, kind %u", (unsigned long long)n,
                     (unsigned long long)i, (unsigned long long)word[i], kind);
        ex_merge(++n << 8 | refreshed);
    }
}

static void make_ring(uint64_t size, uint64_t from, uint64_t to)
{
    records = size, first_read = from, written = to;
    ring = ex_region(records * sizeof *ring, EX_NONCOHERENT, 0);
    ex_label(ring, records * sizeof *ring, sizeof *ring, "record");
    ex_warm(2, ring, records * sizeof *ring);
    ex_spawn(0, append, NULL, 0);
    ex_spawn(1, follow, NULL, 0);
    ex_spawn(2, follow, ring, EX_LAST); /* afterwards everything that still stands must be there */
}

static void lapped_setup(void)
{
    make_ring(2, 1, 3);
}
const struct ex_scenario scenario_log_lapped = {.name = "log-lapped", .what = "a ring written over while another host reads it",
                                       .setup = lapped_setup, .seconds = 1};

/* Records at the end of the ring and at its beginning, which lie in two lines. */
static void wrapped_setup(void)
{
    make_ring(4, 3, 4);
}
const struct ex_scenario scenario_log_wrapped = {.name = "log-wrapped", .what = "records over the end of a ring",
                                        .setup = wrapped_setup, .seconds = 1};

/* ---- a writer dies ---- */

static kvp_pool *writer, *successor, *reader;

static void write_events(void *pool)
{
    for (uint32_t k = 0; k < 2; k++)
        kvp_log_event(pool, KVP_EVENT_USED, 0, &(struct kvp_key){0, 0});
}

/* Recovers the dead writer and, as whoever gets its slot, goes on with its log. */
static void succeed(void *argument)
{
    kvp_pool *pool = argument;
    const struct kvp_record *log = kvp_ring(&pool->arena, 0, writer->arena.self);

    world_recover(pool);
    pool->arena.self = writer->arena.self;
    pool->log_sequence = kvp_log_newest(log, pool->arena.layout.log_records);
    write_events(pool);
}

static void replay(void *pool)
{
    kvp_replay(pool, 0);
}

static void log_crash_check(void)
{
    uint64_t newest = kvp_log_newest(kvp_ring(&writer->arena, 0, writer->arena.self), writer->arena.layout.log_records);

    ex_view(1);
    uint64_t at = co_load(&reader->arena.read[writer->arena.self]);
    EX_CHECK(at == newest, "the log has %llu records, and another host sees %llu", (unsigned long long)newest, (unsigned long long)at);
}

static void log_crash_setup(void)
{
    writer = world_make(&(struct world_request){.blocks = 1, .hosts = 2, .workers = 2});
    successor = world_join(0);
    reader = world_join(1);
    kvp_pool_follow(reader);
    world_spawn(writer, write_events, EX_CRASHABLE);
    world_spawn(successor, succeed, EX_ON_CRASH);
    world_spawn(reader, replay, 0);
    world_spawn(world_join(1), replay, EX_LAST);
}
const struct ex_scenario scenario_log_crash = {.name = "log-crash", .what = "a writer dies while it appends; its successor goes on",
                                      .setup = log_crash_setup, .check = log_crash_check, .died = world_died, .crashes = 1,
                                      .seconds = 5};
