/* owners.c -- which host a segment belongs to, and how it moves: empty, by offer and taking, revocable.
 *
 * Nothing elects: each host writes its own row, and the states form a chain in which at any moment one host at most may
 * use the segment. The epoch grows with each transfer, so that a row that was not looked at for long is never mistaken.
 */
#include "allocator/allocator.h"

#include <time.h>

enum { PASS_TRIES = KVP_MODE == KVP_EXPLORE ? 2 : 50, PASS_PAUSE_NS = 1000000 };

uint32_t kvp_owner(const struct kvp_arena *arena, uint32_t segment)
{
    uint64_t best = 0;
    uint32_t owner = KVP_HOSTS_MAX;

    for (uint32_t h = 0; h < arena->layout.hosts; h++) {
        uint64_t word = nc_load(&kvp_owners(arena, h)[segment]), epoch = kvp_owner_epoch(word);
        enum kvp_owner_state state = kvp_owner_state(word);
        /* TAKING and ABORTED own nothing yet; of an offer and its taking, both of one epoch, the taking counts. */
        if (state != KVP_OWNER_TAKEN && state != KVP_OWNER_OFFER && state != KVP_OWNER_REVOKING)
            continue;
        if (epoch > best || (epoch == best && state == KVP_OWNER_TAKEN)) {
            best = epoch;
            owner = h;
        }
    }
    return owner;
}

void kvp_owners_refresh(const struct kvp_arena *arena)
{
    for (uint32_t h = 0; h < arena->layout.hosts; h++)
        if (h != arena->host)
            nc_invalidate(kvp_owners(arena, h), arena->layout.segments * 8);
    nc_full_fence(); /* the rows of others are read after they were dropped, and after what we wrote to our own */
}

uint32_t kvp_owned(const struct kvp_arena *arena)
{
    uint32_t owned = 0;

    for (uint32_t s = 0; s < arena->layout.segments; s++)
        owned += (uint32_t)kvp_segment_ours(co_load(&arena->segments[s]));
    return owned;
}

void kvp_owner_write(struct kvp_arena *arena, uint32_t segment, uint64_t epoch, uint32_t peer, enum kvp_owner_state state)
{
    nc_u64 *own = &kvp_owners(arena, arena->host)[segment];

    nc_store(own, kvp_owner_word(epoch, peer, state));
    KVP_CRASH_POINT("owner.written");
    nc_write_back(own, 8);
}

/* The lines of a segment that our cache may still hold: its words, and pins of ours that nobody else has seen. Its bytes and
 * labels were written back, and fenced, when they were published or when that came to nothing. */
static void write_all_back(struct kvp_arena *arena, uint32_t segment)
{
    uint32_t first, end;

    for (uint32_t c = 0; c < arena->layout.classes; c++) {
        kvp_segment_blocks(arena, c, segment, &first, &end);
        nc_write_back(&arena->class[c].words[first], (end - first) * 8ull);
    }
    for (uint32_t w = 0; w < arena->layout.workers; w++)
        nc_write_back(kvp_pins(arena, arena->host, w), nc_load(kvp_pin_high(arena, arena->host) + w) * 8);
}

void kvp_segment_refresh(struct kvp_arena *arena, uint32_t segment)
{
    uint64_t start = segment * arena->layout.segment_bytes, left = arena->layout.payload_bytes - start;
    uint32_t first, end;

    for (uint32_t c = 0; c < arena->layout.classes; c++) {
        kvp_segment_blocks(arena, c, segment, &first, &end);
        nc_invalidate(&arena->class[c].words[first], (end - first) * 8ull);
        nc_invalidate(&arena->class[c].labels[first], (end - first) * sizeof(struct kvp_label));
    }
    nc_invalidate(arena->class[0].data + start, left < arena->layout.segment_bytes ? left : arena->layout.segment_bytes);
    nc_full_fence(); /* what the former owner wrote back is read after our old copies were dropped */
}

/* ---- giving ---- */

/* Later than whatever a host has written of the segment: also what one that is lost, or gave up, had begun. */
static uint64_t next_epoch(const struct kvp_arena *arena, uint32_t segment)
{
    uint64_t latest = 0;

    for (uint32_t h = 0; h < arena->layout.hosts; h++) {
        uint64_t epoch = kvp_owner_epoch(nc_load(&kvp_owners(arena, h)[segment]));
        latest = epoch > latest ? epoch : latest;
    }
    return latest + 1;
}

static uint64_t own_epoch(const struct kvp_arena *arena, uint32_t segment)
{
    return kvp_owner_epoch(nc_load(&kvp_owners(arena, arena->host)[segment]));
}

/* Has every other worker of ours ended what it was doing when the segment stopped being ours to use? One that saw it before
 * might still CAS a word in it; that fails, but makes the line dirty in our cache, and later it would fall on what the taker
 * has written. Who is slow is waited for a little; then the segment is not given now. */
static int others_have_passed(const struct kvp_arena *arena)
{
    struct timespec pause = {0, PASS_PAUSE_NS};

    /* Dekker with whoever locks a pool handle and looks at a word. It needs no fence here: after the words were closed came
     * the release of FREE and the acquire of the locked step to MOVING. */
    for (uint32_t w = 0; w < arena->layout.workers; w++) {
        uint64_t busy = co_load(&arena->slots[w].busy);
        if (w == arena->self || !(busy & 1))
            continue;
        for (int tries = 0; co_load32(&arena->slots[w].lock) != 0 && co_load(&arena->slots[w].busy) == busy; tries++) {
            if (tries == PASS_TRIES)
                return 0;
            nanosleep(&pause, NULL);
        }
    }
    return 1;
}

int kvp_owner_offer(struct kvp_arena *arena, uint32_t segment, uint32_t to)
{
    uint64_t seen = kvp_segment_word(KVP_SEGMENT_FREE, 0, 0);

    if (to >= arena->layout.hosts || to == arena->host ||
        !co_cas(&arena->segments[segment], &seen, kvp_segment_word(KVP_SEGMENT_MOVING, 0, arena->self)))
        return 0;
    KVP_CRASH_POINT("owner.giving");
    if (!others_have_passed(arena)) {
        co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_FREE, 0, 0));
        return 0;
    }
    write_all_back(arena, segment);
    nc_write_fence(); /* the segment is in memory before the offer is: the taker refreshes it when it has seen that */
    kvp_owner_write(arena, segment, next_epoch(arena, segment), to, KVP_OWNER_OFFER);
    co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_OFFERED, 0, 0));
    return 1;
}

int kvp_offer_fate(const struct kvp_arena *arena, uint32_t segment, uint32_t to, uint64_t epoch)
{
    uint64_t theirs = nc_load(&kvp_owners(arena, to)[segment]);

    if (kvp_owner_epoch(theirs) < epoch || (kvp_owner_epoch(theirs) == epoch && kvp_owner_state(theirs) == KVP_OWNER_ABORTED))
        return 0;
    return kvp_owner_epoch(theirs) == epoch && kvp_owner_state(theirs) == KVP_OWNER_TAKING ? -1 : 1;
}

int kvp_taker_is_gone(const struct kvp_arena *arena, uint32_t to)
{
    struct kvp_host *host = &arena->roster.hosts[to];

    nc_invalidate(host, KVP_LINE);
    nc_read_fence(); /* the incarnation is read after the row was: a life that is not over was in memory before its row */
    return kvp_host_fenced(&arena->roster, to, nc_load(&host->incarnation));
}

/* Also one that we had begun to take back, too late. */
static void see_offer(struct kvp_arena *arena, uint32_t segment)
{
    uint64_t own = nc_load(&kvp_owners(arena, arena->host)[segment]), seen = kvp_segment_word(KVP_SEGMENT_OFFERED, 0, 0);
    enum kvp_owner_state state = kvp_owner_state(own);

    if ((state == KVP_OWNER_OFFER || state == KVP_OWNER_REVOKING) && kvp_owner_peer(own) < arena->layout.hosts &&
        kvp_offer_fate(arena, segment, kvp_owner_peer(own), kvp_owner_epoch(own)) == 1 &&
        co_cas(&arena->segments[segment], &seen, kvp_segment_word(KVP_SEGMENT_FOREIGN, 0, 0)))
        co_store32(&arena->head->stale, 1); /* what the taker has published there until now was not learned */
}

void kvp_owners_see_offers(struct kvp_arena *arena)
{
    int refreshed = 0;

    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        if (kvp_segment_state(co_load(&arena->segments[s])) != KVP_SEGMENT_OFFERED)
            continue;
        if (!refreshed++)
            kvp_owners_refresh(arena);
        see_offer(arena, s);
    }
}

int kvp_owner_revoke(struct kvp_arena *arena, uint32_t segment)
{
    nc_u64 *own = &kvp_owners(arena, arena->host)[segment];
    uint64_t seen = kvp_segment_word(KVP_SEGMENT_OFFERED, 0, 0), word = nc_load(own), epoch = kvp_owner_epoch(word);
    uint32_t to = kvp_owner_peer(word);

    if ((kvp_owner_state(word) != KVP_OWNER_OFFER && kvp_owner_state(word) != KVP_OWNER_REVOKING) ||
        to >= arena->layout.hosts ||
        !co_cas(&arena->segments[segment], &seen, kvp_segment_word(KVP_SEGMENT_MOVING, 0, arena->self)))
        return 0;
    kvp_owner_write(arena, segment, epoch, to, KVP_OWNER_REVOKING);
    nc_write_fence(); /* REVOKING is in memory before the taker's word is dropped: Dekker with take() */
    nc_invalidate(&kvp_owners(arena, to)[segment], 8);
    nc_full_fence(); /* and the taker's word is read after that */
    int taken = kvp_offer_fate(arena, segment, to, epoch);
    if (taken < 0 && kvp_taker_is_gone(arena, to))
        taken = 0;
    if (taken == 0) {
        kvp_owner_write(arena, segment, epoch + 1, arena->host, KVP_OWNER_TAKEN);
        co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_FREE, 0, 0));
        return 1;
    }
    co_store(&arena->segments[segment], kvp_segment_word(taken < 0 ? KVP_SEGMENT_OFFERED : KVP_SEGMENT_FOREIGN, 0, 0));
    co_store32(&arena->head->stale, 1); /* as in see_offer */
    return 0;
}

/* ---- taking ---- */

/* Does the offer stand? The giver may be taking it back; if it is lost, its adopter. */
static int offer_stands(const struct kvp_arena *arena, uint32_t segment, uint32_t from, uint64_t epoch)
{
    for (uint32_t h = 0; h < arena->layout.hosts; h++) {
        uint64_t word = nc_load(&kvp_owners(arena, h)[segment]);
        enum kvp_owner_state state = kvp_owner_state(word);
        if (kvp_owner_epoch(word) > epoch && (state == KVP_OWNER_TAKING || state == KVP_OWNER_TAKEN))
            return 0;
    }
    return nc_load(&kvp_owners(arena, from)[segment]) == kvp_owner_word(epoch, arena->host, KVP_OWNER_OFFER);
}

/* Take one segment that `from` offers in `epoch`: 1 taken. */
static int take(struct kvp_arena *arena, uint32_t segment, uint32_t from, uint64_t epoch)
{
    uint64_t seen = kvp_segment_word(KVP_SEGMENT_FOREIGN, 0, 0);

    if (!co_cas(&arena->segments[segment], &seen, kvp_segment_word(KVP_SEGMENT_MOVING, 0, arena->self)))
        return 0;
    KVP_CRASH_POINT("owner.taking");
    kvp_owner_write(arena, segment, epoch, from, KVP_OWNER_TAKING);
    /* TAKING is in memory before the rows are dropped and read again: Dekker with kvp_owner_revoke, and with contest() of an adopter */
    nc_write_fence();
    for (uint32_t h = 0; h < arena->layout.hosts; h++)
        if (h != arena->host)
            nc_invalidate(&kvp_owners(arena, h)[segment], 8);
    nc_full_fence(); /* and the rows are read after that */
    if (!offer_stands(arena, segment, from, epoch)) {
        kvp_owner_write(arena, segment, epoch, from, KVP_OWNER_ABORTED);
        co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_FOREIGN, 0, 0));
        return 0;
    }
    kvp_segment_refresh(arena, segment);
    kvp_forget_former(arena, segment);
    kvp_owner_write(arena, segment, epoch, arena->host, KVP_OWNER_TAKEN);
    co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_FREE, 0, 0));
    return 1;
}

/* Is an offer of ours to be taken back? We had begun that; or a worker, or a life, of the taker ended in the middle of taking
 * it, and does not try again. */
static int is_coming_back(const struct kvp_arena *arena, uint32_t segment)
{
    uint64_t own = nc_load(&kvp_owners(arena, arena->host)[segment]);
    uint32_t to = kvp_owner_peer(own);

    return kvp_owner_state(own) == KVP_OWNER_REVOKING ||
           (kvp_owner_state(own) == KVP_OWNER_OFFER && to < arena->layout.hosts &&
            nc_load(&kvp_owners(arena, to)[segment]) == kvp_owner_word(kvp_owner_epoch(own), arena->host, KVP_OWNER_ABORTED));
}

uint32_t kvp_owners_tick(struct kvp_arena *arena)
{
    uint32_t taken = 0, owned = kvp_owned(arena), quota = arena->layout.quota;

    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        enum kvp_segment_state state = kvp_segment_state(co_load(&arena->segments[s]));
        if (state == KVP_SEGMENT_OFFERED) {
            see_offer(arena, s);
            if (is_coming_back(arena, s))
                kvp_owner_revoke(arena, s);
        }
        if (state != KVP_SEGMENT_FOREIGN || (quota && owned + taken >= quota) || co_load32(&arena->head->yields))
            continue;
        for (uint32_t h = 0; h < arena->layout.hosts; h++) {
            uint64_t word = nc_load(&kvp_owners(arena, h)[s]);
            if (h != arena->host && kvp_owner_state(word) == KVP_OWNER_OFFER && kvp_owner_peer(word) == arena->host &&
                kvp_owner_epoch(word) > own_epoch(arena, s))
                taken += (uint32_t)take(arena, s, h, kvp_owner_epoch(word));
        }
    }
    return taken;
}

/* ---- a worker that died while it moved one ---- */

/* While it was moving, what its owner published in it was not learned. */
static void make_foreign(struct kvp_arena *arena, uint32_t segment)
{
    co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_FOREIGN, 0, 0));
    co_store32(&arena->head->stale, 1);
}

/* The dead worker's segment is ours in MOVING: offered, not yet taken, or taken. */
static void recover_moving(struct kvp_arena *arena, uint32_t segment)
{
    nc_u64 *own = &kvp_owners(arena, arena->host)[segment];
    uint64_t word = nc_load(own);

    switch (kvp_owner_state(word)) {
    case KVP_OWNER_OFFER:
    case KVP_OWNER_REVOKING:
        nc_write_back(own, 8); /* perhaps it was not yet */
        co_store(&arena->segments[segment], kvp_segment_word(KVP_SEGMENT_OFFERED, 0, 0));
        break;
    case KVP_OWNER_TAKING: /* the giver takes it back */
        kvp_owner_write(arena, segment, kvp_owner_epoch(word), kvp_owner_peer(word), KVP_OWNER_ABORTED);
        make_foreign(arena, segment);
        break;
    default:
        nc_write_back(own, 8);
        if (kvp_owner(arena, segment) == arena->host)
            kvp_segment_settle(arena, segment); /* empty, or adopted */
        else
            make_foreign(arena, segment);
    }
}

void kvp_recover_owners(struct kvp_arena *arena, uint32_t dead)
{
    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        uint64_t seen = co_load(&arena->segments[s]);
        if (kvp_segment_state(seen) == KVP_SEGMENT_MOVING && kvp_segment_who(seen) == dead)
            co_cas(&arena->segments[s], &seen, kvp_segment_word(KVP_SEGMENT_MOVING, 0, arena->self));
    }
}

/* Nobody else moves a segment at this moment: it is put down to us, or to a slot that is free, by a recovery. */
void kvp_finish_moving(struct kvp_arena *arena)
{
    for (uint32_t s = 0; s < arena->layout.segments; s++) {
        uint64_t seen = co_load(&arena->segments[s]);
        uint32_t who = kvp_segment_who(seen);
        if (kvp_segment_state(seen) != KVP_SEGMENT_MOVING || who >= arena->layout.workers ||
            (who != arena->self && co_load32(&arena->slots[who].lock) != 0))
            continue;
        if (co_cas(&arena->segments[s], &seen, kvp_segment_word(KVP_SEGMENT_MOVING, 0, arena->self)))
            recover_moving(arena, s);
    }
}
