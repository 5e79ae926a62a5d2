/* host.c -- this host's part in a pool of many: starting, ticking, giving and taking segments, adopting. */
#include "native/handle.h"

#include <string.h>
#include <time.h>

enum { TURN_MS = KVP_MODE == KVP_EXPLORE ? 2 : 2000 };

/* ---- start ---- */

/* Where the logs of the others stand: fixed before the words are scanned. Old copies would do, we should read more records; but
 * on a device those may be of an earlier pool, and the new one's logs reach so far only much later. */
static void fix_positions(kvp_pool *pool)
{
    const struct kvp_layout *layout = &pool->arena.layout;

    for (uint32_t h = 0; h < layout->hosts; h++)
        for (uint32_t w = 0; h != pool->host && w < layout->workers; w++) {
            kvp_log_refresh(kvp_ring(&pool->arena, h, w), layout->log_records, 0, layout->log_records);
            nc_read_fence(); /* the headers are read after they were dropped */
            uint64_t newest = kvp_log_newest(kvp_ring(&pool->arena, h, w), layout->log_records);
            co_store(&pool->arena.read[(uint64_t)h * layout->workers + w], newest ? newest - 1 : 0);
        }
}

/* Published blocks of our own that nobody has used yet in this life of the host are the first to go. */
static int start(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;
    int status = kvp_host_claim(&arena->roster);

    if (status)
        return status;
    co_store(&arena->head->incarnation, arena->roster.incarnation);
    co_store32(&arena->head->yields, (uint32_t)arena->roster.yields);
    co_store(&arena->head->clock, 1);
    co_store(&arena->head->unannounced, 1);
    kvp_arena_start(arena);
    fix_positions(pool);
    kvp_replica_scan(pool);
    co_store(&arena->head->ready, KVP_HEAD_READY);
    return KVP_OK;
}

static void refresh_life(kvp_pool *pool)
{
    nc_invalidate(&pool->super->life, 8);
    nc_read_fence(); /* the life is read after it was dropped: who removes a pool is perhaps another host */
    co_store(&pool->arena.head->life, nc_load(&pool->super->life));
}

/* Under the lock of the host's memory: is it whole, and still ours to use? Else it is wiped for a new start. */
static int is_started(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;

    if (co_load(&arena->head->ready) != KVP_HEAD_READY)
        return 0;
    arena->roster.incarnation = co_load(&arena->head->incarnation);
    kvp_host_watch(&arena->roster);
    return !co_load32(&arena->head->fenced) && kvp_host_assure(&arena->roster) == KVP_OK;
}

static int look_at(kvp_pool *pool, uint8_t *host_base, const struct kvp_layout *layout)
{
    int status = kvp_arena_init(&pool->arena, pool->mapping.base, host_base, layout, pool->host);

    pool->directory = (struct kvp_entry *)(void *)(host_base + layout->directory_offset);
    pool->homes = layout->directory_homes;
    kvp_sim_hot(&pool->mapping, layout->payload_offset); /* lines of metadata are few: events are to hit them all the same */
    pool->spilled = (co_u64 *)(void *)(pool->directory + pool->homes * KVP_HOME_ENTRIES);
    return status;
}

/* Map the memory of our host; whole and current, or `fresh` and zero. */
static int map_host(kvp_pool *pool, const uint8_t uuid[16], const struct kvp_layout *layout)
{
    for (int again = 0;; again++) {
        int fresh = 0, status = kvp_host_memory_open(uuid, pool->host, layout->host_bytes, &pool->host_mapping, &fresh);
        if (status || (status = look_at(pool, pool->host_mapping.base, layout)))
            return status;
        if (!fresh && is_started(pool))
            return KVP_OK;
        if (fresh || again || co_load(&pool->arena.head->ready) != KVP_HEAD_READY) {
            memset(pool->host_mapping.base, 0, layout->host_bytes); /* its starter died, or we are it */
            return start(pool);
        }
        /* Its host was fenced: those that still have it mapped keep it; we begin anew. */
        kvp_arena_free(&pool->arena);
        kvp_host_memory_remove(uuid, pool->host);
        kvp_mapping_close(&pool->host_mapping);
    }
}

int kvp_host_enter(kvp_pool *pool, const uint8_t uuid[16], const struct kvp_layout *layout)
{
    if (!KVP_MANY_HOSTS)
        return look_at(pool, pool->mapping.base + layout->host_offset, layout);
    int status = map_host(pool, uuid, layout);
    if (status == KVP_OK)
        refresh_life(pool);
    kvp_host_memory_unlock(&pool->host_mapping);
    return status;
}

/* ---- joining and parting of workers ---- */

void kvp_host_joined(kvp_pool *pool)
{
    struct kvp_host *host = &pool->arena.roster.hosts[pool->host];
    uint64_t seen = KVP_MANY_HOSTS ? nc_load(&host->tables) : 0, mine = pool->arena.self + 1;

    if (!KVP_MANY_HOSTS)
        return;
    while (seen < mine && !nc_cas(&host->tables, &seen, mine))
        ;
    nc_store(&host->left, 0);
    nc_write_back(host, KVP_LINE);
    kvp_host_beat(&pool->arena.roster);
    if (co_load(&pool->arena.head->unannounced))
        kvp_log_event(pool, KVP_EVENT_STARTED, pool->host, &(struct kvp_key){0, 0});
    co_store(&pool->arena.head->unannounced, 0);
}

void kvp_host_part(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;

    if (!KVP_MANY_HOSTS)
        return;
    nc_store(kvp_pin_high(arena, arena->host) + arena->self, 0);
    nc_write_back(kvp_pin_high(arena, arena->host) + arena->self, 8);
    for (uint32_t w = 0; w < arena->layout.workers; w++)
        if (w != arena->self && co_load32(&arena->slots[w].lock) != 0)
            return;
    kvp_host_leave(&arena->roster);
}

/* ---- segments ---- */

void kvp_host_want(kvp_pool *pool, uint64_t segments)
{
    nc_u64 *wanted = &pool->arena.roster.hosts[pool->host].wanted;

    if (!KVP_MANY_HOSTS || nc_load(wanted) == segments)
        return;
    nc_store(wanted, segments);
    nc_write_back(wanted, 8);
}

/* Does a segment hold anything that is published or reserved? */
static int is_idle(const kvp_pool *pool, uint32_t c, uint32_t segment)
{
    uint32_t number, end;

    for (kvp_segment_blocks(&pool->arena, c, segment, &number, &end); number < end; number++) {
        enum kvp_state state = kvp_word_state(nc_load(&pool->arena.class[c].words[number]));
        if (state != KVP_FREE && state != KVP_ABSENT)
            return 0;
    }
    return 1;
}

/* The highest score in a segment of ours; UINT64_MAX if it cannot be emptied. */
static uint64_t heat(const kvp_pool *pool, uint64_t word, uint32_t segment)
{
    uint32_t c = kvp_segment_class(word);

    if (kvp_segment_state(word) == KVP_SEGMENT_FREE || is_idle(pool, c, segment))
        return 0;
    return kvp_segment_state(word) == KVP_SEGMENT_HELD ? kvp_newest_score(pool, c, segment) : UINT64_MAX;
}

/* Offer the segment that is used least, if that is at most `most`: 1 if one was offered. Under the lock. */
static int give_coldest(kvp_pool *pool, uint32_t to, uint64_t most)
{
    uint64_t best = UINT64_MAX;
    uint32_t segment = 0;

    kvp_spill(&pool->arena);
    for (uint32_t s = pool->arena.layout.segments; s-- > 0;) {
        uint64_t word = co_load(&pool->arena.segments[s]), score = kvp_segment_ours(word) ? heat(pool, word, s) : UINT64_MAX;
        if (score < best)
            best = score, segment = s;
    }
    if (best == UINT64_MAX || best > most)
        return 0;
    uint64_t word = co_load(&pool->arena.segments[segment]);
    if (kvp_segment_state(word) == KVP_SEGMENT_HELD && !kvp_segment_drain(&pool->arena, kvp_segment_class(word), segment))
        return 0;
    return kvp_owner_offer(&pool->arena, segment, to);
}

static uint32_t owned_by(const kvp_pool *pool, uint32_t host)
{
    uint32_t owned = 0;

    for (uint32_t s = 0; s < pool->arena.layout.segments; s++)
        owned += kvp_owner(&pool->arena, s) == host;
    return owned;
}

/* Idle segments go to a host that asks and has fewer than we. */
static void answer_wants(kvp_pool *pool)
{
    const struct kvp_roster *roster = &pool->arena.roster;

    for (uint32_t h = 0; h < roster->count; h++)
        if (h != pool->host && nc_load(&roster->hosts[h].wanted) && kvp_host_state(roster, h) == KVP_HOST_PRESENT &&
            kvp_owned(&pool->arena) > owned_by(pool, h) + 1)
            kvp_count(pool, KVP_COUNT_MOVED, (uint64_t)give_coldest(pool, h, 0));
}

/* ---- ticks ---- */

static void tell_uses(kvp_pool *pool)
{
    uint32_t n = __atomic_exchange_n(&pool->used_count, 0, __ATOMIC_ACQ_REL);

    n = n < KVP_USED ? n : KVP_USED;
    for (uint32_t i = 0; i < n; i += 3) {
        struct kvp_key rest = {i + 1 < n ? pool->used[i + 1] : 0, i + 2 < n ? pool->used[i + 2] : 0};
        kvp_log_event(pool, KVP_EVENT_USED, pool->used[i], &rest);
    }
}

/* An adoption of ours that a death has interrupted goes on. */
static uint32_t finish_adoptions(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;
    uint32_t adopted = 0;

    for (uint32_t h = 0; h < arena->roster.count; h++) {
        if (h == pool->host || !kvp_host_adopting(&arena->roster, h))
            continue;
        adopted += kvp_owners_adopt(arena, h);
        if (owned_by(pool, h) == 0)
            kvp_host_adopted(&arena->roster, h); /* and then it may own again */
    }
    return adopted;
}

/* We are back from a life that somebody adopts. Once that is complete, or withdrawn because the adopter saw us come back, or
 * the adopter is lost itself, what the rows leave us of it is ours. */
static uint32_t end_yielding(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;

    if (!co_load32(&arena->head->yields) || kvp_host_yields(&arena->roster))
        return 0;
    kvp_owners_refresh(arena); /* the adopter's row is read after its COMPLETE was */
    uint32_t back = kvp_owners_reclaim(arena);
    co_store32(&arena->head->yields, 0);
    return back;
}

/* With the turn and the lock: segments become ours. */
static void gain_segments(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;

    kvp_finish_moving(arena);
    uint32_t adopted = end_yielding(pool) + finish_adoptions(pool), taken = kvp_owners_tick(arena);
    if (taken)
        kvp_host_want(pool, 0);
    if (adopted)
        co_store32(&arena->head->stale, 1);
    if (taken || adopted)
        co_add(&arena->head->clock, 1); /* all workers of the host look for candidates afresh: blocks have become ours */
    kvp_count(pool, KVP_COUNT_MOVED, taken + adopted);
}

/* With the lock: what changes segments or writes our log. */
static void tick_locked(kvp_pool *pool, int have_turn)
{
    tell_uses(pool);
    kvp_settle_asked(pool);
    kvp_owners_refresh(&pool->arena);
    if (have_turn)
        gain_segments(pool);
    answer_wants(pool);
}

/* Follow the others, then all that a tick does. Returns how many records were applied. Without `patient` it leaves out what
 * needs a lock that is taken. */
static uint32_t follow(kvp_pool *pool, int patient)
{
    int have_turn = kvp_turn_take(pool, patient ? KVP_PATIENCE : 0);
    uint32_t applied = have_turn ? kvp_follow_logs(pool) : 0;

    if (patient)
        kvp_lock(pool);
    if (patient || kvp_trylock(pool)) {
        if (pool->joined && !pool->closed)
            tick_locked(pool, have_turn);
        kvp_unlock(pool);
    }
    if (have_turn && co_load32(&pool->arena.head->stale))
        applied += kvp_follow_logs(pool);
    if (have_turn)
        kvp_turn_end(pool);
    return applied;
}

void kvp_host_recovered(kvp_pool *pool, uint32_t dead)
{
    uint32_t replayer = dead + 1;

    if (!KVP_MANY_HOSTS)
        return;
    co_store32(&pool->arena.head->stale, 1); /* what it had published and not yet made known, or was about to compare */
    co_store(&pool->arena.head->asked, 1);
    co_cas32(&pool->arena.head->replayer, &replayer, 0); /* it is gone to its last thread, and its turn is over */
}

void kvp_host_tick(kvp_pool *pool)
{
    struct kvp_arena *arena = &pool->arena;

    if (!KVP_MANY_HOSTS)
        return;
    kvp_host_beat(&arena->roster);
    kvp_host_watch(&arena->roster);
    refresh_life(pool);
    if (kvp_host_assure(&arena->roster) != KVP_OK)
        co_store32(&arena->head->fenced, 1);
    if (co_load32(&arena->head->fenced) || kvp_life(pool) != pool->life)
        return;
    follow(pool, 0);
}

/* ---- what a program asks for ---- */

static int enter_for(kvp_pool *pool, uint32_t host)
{
    int status = kvp_enter(pool);

    if (status)
        return status;
    if (!KVP_MANY_HOSTS || host >= pool->arena.layout.hosts || host == pool->host)
        return kvp_fail(KVP_E_RANGE, "host %u: another one of the pool's %u hosts was expected", host, pool->arena.layout.hosts);
    return KVP_OK;
}

int64_t kvp_pool_follow(kvp_pool *pool)
{
    int status = kvp_enter(pool);

    if (status || !KVP_MANY_HOSTS)
        return status;
    kvp_host_watch(&pool->arena.roster);
    return follow(pool, 1);
}

int64_t kvp_pool_give(kvp_pool *pool, uint32_t host, uint32_t n)
{
    int status = enter_for(pool, host);
    uint32_t given = 0;

    if (status)
        return status;
    kvp_lock(pool);
    while (!pool->closed && given < n && give_coldest(pool, host, UINT64_MAX - 1))
        given++;
    kvp_count(pool, KVP_COUNT_MOVED, given);
    kvp_unlock(pool);
    return given;
}

int64_t kvp_pool_revoke(kvp_pool *pool)
{
    int status = kvp_enter(pool);
    int64_t revoked = 0;

    if (status || !KVP_MANY_HOSTS)
        return status;
    kvp_lock(pool);
    for (uint32_t s = 0; s < pool->arena.layout.segments && !pool->closed; s++)
        if (kvp_segment_state(co_load(&pool->arena.segments[s])) == KVP_SEGMENT_OFFERED)
            revoked += kvp_owner_revoke(&pool->arena, s);
    kvp_unlock(pool);
    return revoked;
}

static int check_fence(kvp_pool *pool, uint32_t host, uint64_t incarnation)
{
    struct kvp_roster *roster = &pool->arena.roster;

    kvp_host_watch(roster);
    uint64_t seen = co_load(&roster->sights[host].incarnation);
    enum kvp_host_state state = kvp_host_state(roster, host);
    if (seen != incarnation)
        return kvp_fail(KVP_E_INVALID, "host %u is in incarnation %llu, and %llu was fenced: what is reset is not what is there",
                        host, (unsigned long long)seen, (unsigned long long)incarnation);
    if (state == KVP_HOST_PRESENT)
        return kvp_fail(KVP_E_BUSY, "host %u shows signs of life: wait until its lease of %u ms has lapsed", host,
                        pool->arena.layout.lease_ms);
    return KVP_OK;
}

int64_t kvp_pool_fence(kvp_pool *pool, uint32_t host, uint64_t incarnation)
{
    int64_t status = enter_for(pool, host);

    if (status || (status = check_fence(pool, host, incarnation)) || (status = kvp_turn_await(pool, TURN_MS)))
        return status;
    kvp_lock(pool);
    if (pool->closed)
        status = kvp_fail(KVP_E_CLOSED, "closed");
    else if (!kvp_host_adopt(&pool->arena.roster, host, incarnation))
        status = kvp_fail(KVP_E_INVALID, "host %u has come back while it was to be adopted: what it owns is its own", host);
    KVP_CRASH_POINT("adopt.named");
    if (status == 0) {
        status = kvp_owners_adopt(&pool->arena, host);
        if (owned_by(pool, host) == 0)
            kvp_host_adopted(&pool->arena.roster, host);
    }
    co_add(&pool->arena.head->clock, 1); /* as in gain_segments */
    kvp_count(pool, KVP_COUNT_MOVED, status > 0 ? (uint64_t)status : 0);
    kvp_unlock(pool);
    kvp_replica_scan(pool);
    kvp_turn_end(pool);
    return status;
}

int kvp_pool_host(kvp_pool *pool, uint32_t host, struct kvp_host_info *out)
{
    const struct kvp_roster *roster = &pool->arena.roster;
    struct timespec now;

    memset(out, 0, sizeof *out);
    if (host >= pool->arena.layout.hosts)
        return kvp_fail(KVP_E_RANGE, "host %u does not exist: the pool has %u", host, pool->arena.layout.hosts);
    out->state = KVP_HOST_PRESENT;
    out->segments = pool->arena.layout.segments;
    if (!KVP_MANY_HOSTS)
        return KVP_OK;
    const struct kvp_sight *sight = &roster->sights[host];
    clock_gettime(CLOCK_MONOTONIC, &now);
    out->state = kvp_host_state(roster, host);
    out->incarnation = host == pool->host ? roster->incarnation : co_load(&sight->incarnation);
    out->fenced = co_load(&sight->fenced);
    out->wanted = nc_load(&roster->hosts[host].wanted);
    if (host != pool->host && co_load(&sight->since))
        out->silent_ms = ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec - co_load(&sight->since)) / 1000000;
    kvp_owners_refresh(&pool->arena);
    out->segments = owned_by(pool, host);
    return KVP_OK;
}
