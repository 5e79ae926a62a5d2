/* arguments.c -- one worker by itself: each refusal that a caller is promised, and what every verb does alone. */
#include "scenarios.h"
#include "world.h"

#include <string.h>

static kvp_pool *first;
static struct kvp_key key[10];
static uint8_t bytes[8 * KVP_LINE];
static void *to[10];
static const void *from[10];

static void fill_tables(void)
{
    for (uint32_t k = 0; k < 10; k++) {
        key[k] = world_key(k);
        to[k] = bytes;
        from[k] = bytes;
    }
}

/* ---- verbs ---- */

static void no_such_class(kvp_pool *pool)
{
    uint64_t ref[1];
    uint32_t number[1] = {0};
    uint8_t got[1];

    IS(kvp_lookup(pool, 7, key, 1, ref), KVP_E_RANGE);
    IS(kvp_match(pool, 7, key, 1, ref), KVP_E_RANGE);
    IS(kvp_touch(pool, 7, key, 1), KVP_E_RANGE);
    IS(kvp_read(pool, 7, key, 1, to, KVP_LINE, got), KVP_E_RANGE);
    IS(kvp_put(pool, 7, key, 1, from, KVP_LINE), KVP_E_RANGE);
    IS(kvp_read_one(pool, 7, key, bytes, KVP_LINE), KVP_E_RANGE);
    IS(kvp_put_one(pool, 7, key, bytes, KVP_LINE), KVP_E_RANGE);
    IS(kvp_fill(pool, 7, 0, bytes, KVP_LINE), KVP_E_RANGE);
    IS(kvp_publish(pool, 7, number, key, 1, ref), KVP_E_RANGE);
    IS(kvp_withdraw(pool, 7, number, 1), KVP_E_RANGE);
    IS(kvp_remove(pool, 7, key, 1), KVP_E_RANGE);
    IS(kvp_shrink(pool, 7, 1), KVP_E_RANGE);
    IS(kvp_reserve(pool, 7, 1, number), KVP_E_RANGE);
}

/* Whatever is refused leaves what was reserved reserved, and everything else free. */
static void reservations(kvp_pool *pool)
{
    uint32_t number[99], twice[2], other = 9, none = 99;
    uint64_t ref[2];
    struct kvp_key zero[1] = {{0, 0}};

    IS(kvp_reserve(pool, 0, 99, number), KVP_E_FULL);
    IS(kvp_reserve(pool, 0, 8, number), KVP_OK);
    IS(kvp_reserve(pool, 0, 1, &other), KVP_E_FULL);
    IS(other, KVP_NO_BLOCK);
    IS(kvp_put(pool, 0, key, 1, from, KVP_LINE), KVP_E_FULL);
    IS(kvp_fill(pool, 0, number[0], bytes, 99), KVP_E_INVALID);
    IS(kvp_fill(pool, 0, 9, bytes, KVP_LINE), KVP_E_NOTOWNED);
    IS(kvp_publish(pool, 0, &number[0], zero, 1, ref), KVP_E_INVALID);
    twice[0] = twice[1] = number[0];
    IS(kvp_publish(pool, 0, twice, key, 2, ref), KVP_E_NOTOWNED);
    IS(kvp_publish(pool, 0, &none, key, 1, ref), KVP_E_RANGE);
    IS(kvp_withdraw(pool, 0, &none, 1), KVP_E_RANGE);
    IS(kvp_publish(pool, 0, number, key, 2, ref), 2);
    EX_CHECK(number[1] == KVP_NO_BLOCK, "a block that was published is still in the list");
    IS(kvp_withdraw(pool, 0, number, 8), KVP_OK);
    IS(kvp_withdraw(pool, 0, twice, 1), KVP_E_NOTOWNED);
    IS(kvp_remove(pool, 0, key, 2), 2);
    IS(kvp_remove(pool, 0, key, 2), 0);
    IS(kvp_reserve(pool, 0, 8, number), KVP_OK);
    uint32_t same[2] = {number[3], number[3]};
    IS(kvp_free(&pool->arena, 0, same, 2), KVP_E_NOTOWNED);
    number[3] = KVP_NO_BLOCK;
    IS(kvp_withdraw(pool, 0, number, 8), KVP_OK);
}

static void by_copy(kvp_pool *pool)
{
    struct kvp_key zero[1] = {{0, 0}};
    uint32_t number[8];
    uint8_t got[10];
    uint64_t ref[10];

    for (uint32_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)i;
    IS(kvp_read(pool, 0, key, 1, to, 99, got), KVP_E_INVALID);
    IS(kvp_put(pool, 0, key, 1, from, 99), KVP_E_INVALID);
    IS(kvp_put(pool, 0, zero, 1, from, KVP_LINE), KVP_E_INVALID);
    IS(kvp_reserve(pool, 0, 8, number), KVP_OK); /* of the zero key nothing has stayed reserved */
    IS(kvp_withdraw(pool, 0, number, 8), KVP_OK);
    IS(kvp_put(pool, 0, key, 3, from, KVP_LINE), 3);
    IS(kvp_put(pool, 0, key, 3, from, KVP_LINE), 0);
    IS(kvp_put(pool, 0, key, 4, from, KVP_LINE), 1);
    IS(kvp_read(pool, 0, key, 5, to, KVP_LINE, got), 4);
    EX_CHECK(got[3] == 1 && got[4] == 0, "got says %d and %d", got[3], got[4]);
    IS(kvp_lookup(pool, 0, key, 5, ref), 4);
    IS(ref[4], 0);
    IS(kvp_touch(pool, 0, key, 5), 4);
    IS(kvp_shrink(pool, 0, 3), 3);
    IS(kvp_shrink(pool, 0, 3), 1);
    IS(kvp_read_one(pool, 0, key, bytes, KVP_LINE), 0);
    IS(kvp_read_one(pool, 0, key, bytes, 99), KVP_E_INVALID);
    IS(kvp_put_one(pool, 0, key, bytes, 99), KVP_E_INVALID);
    IS(kvp_put_one(pool, 0, zero, bytes, KVP_LINE), KVP_E_INVALID);
    IS(kvp_put_one(pool, 0, key, bytes, KVP_LINE), 1);
    IS(kvp_put_one(pool, 0, key, bytes, KVP_LINE), 0);
    bytes[0]++;
    IS(kvp_read_one(pool, 0, key, bytes, KVP_LINE), 1);
    IS(bytes[0], 0);
    IS(kvp_shrink(pool, 0, 3), 1);
}

static void pins(kvp_pool *pool)
{
    struct kvp_hold *hold = kvp_hold_new(pool, 0, 2);
    uint64_t ref[3], wrong[2] = {7ull << 29 | 1ull << 32, 0}, old[2];
    uint32_t number[8];

    IS(world_put(pool, 0, 3), 3);
    IS(kvp_lookup(pool, 0, key, 3, ref), 3);
    IS(kvp_pin_refs(pool, wrong, 1), KVP_E_RANGE);
    old[0] = ref[0], old[1] = ref[1] + (1ull << 32);
    IS(kvp_hold_pin(hold, old, 2), KVP_E_STALE);
    IS(kvp_pin_refs(pool, old, 2), 1);
    IS(old[1], 0);
    IS(kvp_unpin_refs(pool, old, 2), KVP_OK);
    IS(kvp_unpin_refs(pool, old, 2), KVP_OK);
    uint64_t never[1] = {ref[2]};
    IS(kvp_unpin_refs(pool, never, 1), KVP_OK);
    IS(kvp_hold_match(hold, key, 3), KVP_E_INVALID);
    IS(kvp_hold_pin(hold, ref, 3), KVP_E_INVALID);
    IS(kvp_hold_match(hold, key, 2), 2);
    IS(hold->blocks[1], kvp_block_number((uint32_t)ref[1]));
    kvp_hold_clear(hold);
    IS(kvp_hold_get(hold, &key[4]), 0);
    IS(kvp_hold_get(hold, &key[2]), (int64_t)ref[2]);
    IS(hold->blocks[0], kvp_block_number((uint32_t)ref[2]));
    IS(kvp_reserve(pool, 0, 8, number), KVP_E_FULL);
    kvp_hold_clear(hold);
    IS(kvp_hold_pin(hold, ref, 2), 2);
    IS(hold->blocks[1], kvp_block_number((uint32_t)ref[1]));
    IS(kvp_reserve(pool, 0, 7, number), KVP_E_FULL);
    IS(kvp_reserve(pool, 0, 6, number), KVP_OK);
    IS(kvp_withdraw(pool, 0, number, 6), KVP_OK);
    IS(kvp_remove(pool, 0, key, 1), 1);
    IS(kvp_lookup(pool, 0, key, 1, old), 0);
    world_look(pool, hold->refs[0], 0); /* removed and pinned: its bytes stay */
    kvp_hold_clear(hold);
    IS(kvp_hold_reserve(hold), hold->numbers[0]);
    EX_CHECK(hold->numbers[1] != KVP_NO_BLOCK, "a hold of two has reserved one block");
    IS(kvp_reserve(pool, 0, 7, number), KVP_E_FULL);
    kvp_hold_end(hold);
    kvp_hold_end(NULL);
    hold = kvp_hold_new(pool, 0, 9);
    IS(kvp_hold_reserve(hold), KVP_E_FULL);
    kvp_hold_end(hold);
    hold = kvp_hold_new(pool, 0, 0);
    IS(kvp_hold_reserve(hold), 0);
    IS(kvp_hold_get(hold, key), KVP_E_INVALID);
    kvp_hold_end(hold);
    world_tick(pool);
    IS(kvp_reserve(pool, 0, 8, number), KVP_OK);
    IS(kvp_withdraw(pool, 0, number, 8), KVP_OK);
}

/* ---- looking ---- */

static struct kvp_digest a_hash(const void *data, size_t length, const void *secret, size_t secret_bytes)
{
    struct kvp_digest digest = {length + secret_bytes, *(const uint8_t *)secret};

    for (size_t i = 0; i < length; i++)
        digest.low = (digest.low ^ ((const uint8_t *)data)[i]) * 0x100000001b3u, digest.high += digest.low;
    return digest;
}

static void chains(void)
{
    const uint8_t secret[KVP_SECRET_BYTES] = {1};
    const uint32_t token[20] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20};
    struct kvp_chain whole = {0}, parts = {0};
    struct kvp_key once[10], again[10];

    IS(kvp_keys(a_hash, secret, token, 1, 0, &whole, once), KVP_E_INVALID);
    IS(kvp_keys(a_hash, secret, token, 1, 1025, &whole, once), KVP_E_INVALID);
    IS(kvp_keys(a_hash, secret, token, 10, 2, &whole, once), KVP_OK);
    IS(kvp_keys(a_hash, secret, token, 3, 2, &parts, again), KVP_OK);
    IS(kvp_keys(a_hash, secret, token + 6, 7, 2, &parts, again + 3), KVP_OK);
    IS(memcmp(once, again, sizeof once), 0);
    IS((uint32_t)once[0].low == (uint32_t)once[7].low, 1); /* a group of 8 has one hint */
    IS((uint32_t)once[7].low == (uint32_t)once[8].low, 0);
}

/* A request's tokens to its pins. */
static void tokens(kvp_pool *pool)
{
    const uint8_t secret[KVP_SECRET_BYTES] = {1};
    const uint32_t token[40] = {1, 2, 3};
    struct kvp_chain whole = {0}, again = {0};
    struct kvp_key made[20], found[20];
    uint32_t number[2];
    uint64_t ref[2];
    struct kvp_hold *hold = kvp_hold_new(pool, 0, 20);

    IS(kvp_keys(a_hash, secret, token, 20, 2, &whole, made), KVP_OK);
    IS(kvp_reserve(pool, 0, 2, number), KVP_OK);
    IS(kvp_publish(pool, 0, number, made, 2, ref), 2);
    IS(kvp_hold_match_tokens(hold, a_hash, secret, token, 20, 0, &again, found), KVP_E_INVALID);
    IS(kvp_hold_match_tokens(hold, a_hash, secret, token, 20, 2, &again, found), 2);
    IS(memcmp(made, found, sizeof made), 0);
    IS(memcmp(&whole, &again, sizeof whole), 0);
    IS(hold->refs[0] == ref[0] && hold->refs[1] == ref[1] && hold->refs[2] == 0, 1);
    kvp_hold_end(hold);
    IS(kvp_remove(pool, 0, made, 2), 2);
}

static void looking(kvp_pool *pool)
{
    struct kvp_info info;
    struct kvp_worker_info worker;
    struct kvp_host_info host;
    struct kvp_event event[64];
    struct kvp_sim_counts counts;
    struct kvp_check check;
    uint64_t states[64], position = 0, lost = 0;

    IS(kvp_pool_info(pool, &info), KVP_OK);
    IS(info.blocks[0], 10);
    IS(info.held[0], 1);
    IS(info.owned, 1);
    IS(kvp_pool_states(pool, states), KVP_OK);
    IS(states[KVP_FREE] + states[KVP_LIVE] + states[KVP_CACHED], 10);
    IS(kvp_pool_worker(pool, 99, &worker), KVP_E_RANGE);
    IS(kvp_pool_worker(pool, 0, &worker), KVP_OK);
    IS(worker.state, 1);
    EX_CHECK(worker.counter[KVP_COUNT_PUBLISHED], "a worker that has published says that it has not");
    IS(kvp_pool_worker(pool, 1, &worker), KVP_OK);
    IS(worker.state, 0);
    IS(kvp_pool_host(pool, 9, &host), KVP_E_RANGE);
    IS(kvp_pool_host(pool, 0, &host), KVP_OK);
    IS(host.state, KVP_HOST_PRESENT);
    IS(kvp_pool_host(pool, 1, &host), KVP_OK);
    IS(host.state, KVP_HOST_PRESENT);
    IS(host.segments, 1);
    IS(kvp_events(pool, 99, &position, event, 64, &lost), KVP_E_RANGE);
    int64_t events = kvp_events(pool, 0, &position, event, 64, &lost);
    EX_CHECK(events > 4 && lost == 0 && position == (uint64_t)events, "%lld events, %llu lost", (long long)events,
             (unsigned long long)lost);
    position = 99;
    IS(kvp_events(pool, 1, &position, event, 64, &lost), 0);
    IS(kvp_pool_line_counts(pool, &counts), KVP_E_INVALID);
    IS(kvp_pool_lose_host("explore:", 1), KVP_E_INVALID);
    IS(kvp_pool_check(pool, &check), KVP_OK);
    EX_CHECK(!check.problems, "check: %s", check.first);
    IS(kvp_pool_mapped(pool), info.bytes);
    IS(kvp_pool_fd(pool), -1);
    IS(kvp_pool_uri(pool)[0], 0);
    EX_CHECK(kvp_pool_base(pool) == pool->mapping.base, "the base is another");
}

/* ---- hosts, handles ---- */

static void hosts(kvp_pool *pool)
{
    uint64_t ref[1];

    IS(kvp_pool_give(pool, 0, 1), KVP_E_RANGE);
    IS(kvp_pool_give(pool, 9, 1), KVP_E_RANGE);
    IS(kvp_pool_fence(pool, 9, 1), KVP_E_RANGE);
    IS(kvp_pool_fence(pool, 1, 9), KVP_E_INVALID);
    IS(kvp_pool_fence(pool, 1, 1), KVP_E_BUSY);
    co_store32(&pool->arena.head->replayer, 2);
    world_sleep_ms(9000);
    IS(kvp_pool_fence(pool, 1, 1), KVP_E_BUSY); /* it is silent, but another worker has the turn */
    co_store32(&pool->arena.head->replayer, 0);
    standins_forks++;
    IS(kvp_lookup(pool, 0, key, 1, ref), KVP_E_FORKED);
    IS(kvp_unpin_refs(pool, ref, 1), KVP_OK);
    IS(kvp_pool_leave(pool), KVP_OK);
    standins_forks--;
    IS(kvp_pool_open("explore:none", 0, &pool), KVP_E_NOTFOUND);
    IS(kvp_pool_open("explore:", 9, &pool), KVP_E_HOST);
    IS(kvp_pool_here("explore:"), 0);
    IS(kvp_pool_here("explore:none"), KVP_E_NOTFOUND);
    IS(kvp_pool_here("explore:short"), KVP_E_TRUNCATED);
    IS(kvp_pool_mode("explore:"), KVP_MODE);
    IS(kvp_pool_mode("explore:none"), KVP_E_NOTFOUND);
    IS(kvp_pool_mode("explore:short"), KVP_E_TRUNCATED);
}

static void handles(kvp_pool *pool)
{
    kvp_pool *second, *third;
    uint64_t ref[1];

    IS(kvp_pool_share(pool, &second), KVP_OK);
    IS(kvp_pool_share(pool, &third), KVP_E_NOSLOT);
    IS(kvp_pool_open("explore:", 0, &third), KVP_E_NOSLOT);
    IS(world_use(second, 0, 1), 0);
    kvp_pool_free(second);
    kvp_pool_free(NULL);
    IS(kvp_pool_open("explore:", 0, &third), KVP_OK);
    IS(world_put(third, 0, 1), 1);
    IS(kvp_pool_leave(third), KVP_OK);
    IS(kvp_pool_leave(third), KVP_OK);
    IS(kvp_lookup(third, 0, key, 1, ref), KVP_E_CLOSED);
    IS(kvp_match(third, 0, key, 1, ref), KVP_E_CLOSED);
    IS(kvp_pin_refs(third, ref, 1), KVP_E_CLOSED);
    IS(kvp_unpin_refs(third, ref, 1), KVP_OK);
    world_tick(third);
    kvp_pool_free(third);
}

static void ask_wrongly(void *argument)
{
    kvp_pool *pool = argument;

    no_such_class(pool);
    reservations(pool);
    by_copy(pool);
    pins(pool);
    chains();
    tokens(pool);
    looking(pool);
    handles(pool);
    hosts(pool);
}

static void check(void)
{
    world_check(first);
}

static void setup(void)
{
    first = world_make(&(struct world_request){.blocks = 2, .hosts = 2, .workers = 2});
    world_join(1);
    fill_tables();
    ex_private(bytes, sizeof bytes);
    kvp_pool_follow(first);
    world_spawn(first, ask_wrongly, 0);
}
const struct ex_scenario scenario_arguments = {.name = "arguments", .what = "one worker: each verb, and each refusal that is documented",
                                               .setup = setup, .check = check, .seconds = 1};

/* ---- more blocks than pin slots ---- */

enum { MANY = 1040, SLOTS = 1024 };
static uint64_t many[MANY];

static void pin_all(void *argument)
{
    kvp_pool *pool = argument;
    struct kvp_hold *hold = kvp_hold_new(pool, 0, MANY);

    IS(kvp_hold_pin(hold, many, MANY), KVP_E_PINS);
    IS(kvp_pin_refs(pool, many, MANY), SLOTS);
    IS(many[SLOTS], 0);
    kvp_hold_end(hold);
    IS(kvp_unpin_refs(pool, many, MANY), KVP_OK);
    world_tick(pool);
    IS(nc_load(kvp_pin_high(&pool->arena, 0)), 0);
    IS(kvp_shrink(pool, 0, MANY), MANY); /* nothing is pinned any more */
}

static void pin_all_setup(void)
{
    first = world_make(&(struct world_request){.blocks = MANY, .hosts = 1, .workers = 1});
    for (uint32_t k = 0; k < MANY; k += 4)
        IS(world_put(first, k, 4), 4);
    for (uint32_t k = 0; k < MANY; k++) {
        struct kvp_key one = world_key(k);
        IS(kvp_lookup(first, 0, &one, 1, &many[k]), 1);
    }
    ex_private(many, sizeof many);
    world_spawn(first, pin_all, 0);
}
const struct ex_scenario scenario_pin_all = {.name = "pin-all", .what = "one worker: more blocks than it has pin slots",
                                             .setup = pin_all_setup, .check = check, .seconds = 1};

/* ---- policies ---- */

/* Eight blocks under keys 0 to 7, of which some are used; then one is evicted. */
static void expect_victim(kvp_pool *pool, uint32_t k)
{
    IS(world_put(pool, 9, 1), 1);
    for (uint32_t other = 0; other < 8; other++) {
        uint64_t ref;
        IS(kvp_lookup(pool, 0, &key[other], 1, &ref), other != k);
    }
}

static void use_some(kvp_pool *pool)
{
    for (uint32_t k = 0; k < 8; k++)
        IS(world_put(pool, k, 1), 1);
    IS(kvp_touch(pool, 0, &key[0], 1), 1);
    IS(kvp_touch(pool, 0, &key[0], 1), 1);
    IS(kvp_touch(pool, 0, &key[2], 6), 6);
}

static void run_lru(void *pool)
{
    use_some(pool);
    expect_victim(pool, 1);
}

static void run_fifo(void *pool)
{
    use_some(pool);
    expect_victim(pool, 0);
}

static void run_lfu(void *pool)
{
    use_some(pool);
    IS(kvp_touch(pool, 0, &key[1], 1), 1);
    IS(kvp_touch(pool, 0, &key[1], 1), 1);
    expect_victim(pool, 2);
}

/* Of one call on a chain the last key is the oldest. */
static void run_leaf(void *pool)
{
    use_some(pool);
    IS(kvp_touch(pool, 0, key, 8), 8);
    expect_victim(pool, 7);
}

static void policy_setup(const char *policy, void (*run)(void *))
{
    first = world_make(&(struct world_request){.blocks = 8, .hosts = 1, .workers = 1, .policy = policy});
    fill_tables();
    world_spawn(first, run, 0);
}
static void lru_setup(void) { policy_setup("lru", run_lru); }
static void fifo_setup(void) { policy_setup("fifo", run_fifo); }
static void lfu_setup(void) { policy_setup("lfu", run_lfu); }
static void leaf_setup(void) { policy_setup("leaf", run_leaf); }
const struct ex_scenario scenario_lru = {.name = "lru", .what = "one worker: the victim is what was not used for longest",
                                         .setup = lru_setup, .check = check, .seconds = 1};
const struct ex_scenario scenario_fifo = {.name = "fifo", .what = "one worker: the victim is what was published first",
                                          .setup = fifo_setup, .check = check, .seconds = 1};
const struct ex_scenario scenario_lfu = {.name = "lfu", .what = "one worker: the victim is what was used least",
                                         .setup = lfu_setup, .check = check, .seconds = 1};
const struct ex_scenario scenario_leaf = {.name = "leaf", .what = "one worker: the victim is the tail of a chain",
                                          .setup = leaf_setup, .check = check, .seconds = 1};
