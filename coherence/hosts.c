/* hosts.c -- which hosts are there: claiming an identity, beating, watching, and being told that one is lost. */
#define _GNU_SOURCE
#include "coherence/coherence.h"

#include <sys/random.h>
#include <time.h>

enum { BEAT_NS = KVP_TICK_MS * 500000, CLAIM_MS = 20 };

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;

    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_ms(uint64_t ms)
{
    struct timespec pause = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000L};

    nanosleep(&pause, NULL);
}

/* Simulated hosts are machines of their own. */
static uint64_t machine_id(const struct kvp_roster *roster)
{
    return kvp_machine_id() ^ (KVP_MODE == KVP_SIM ? (roster->self + 1) * 0x9e3779b97f4a7c15u << 1 : 0);
}

/* ---- seeing the others ---- */

static void see(struct kvp_roster *roster, uint32_t h, uint64_t now)
{
    const struct kvp_host *host = &roster->hosts[h];
    struct kvp_sight *sight = &roster->sights[h];
    uint64_t beat = nc_load(&host->beat), incarnation = nc_load(&host->incarnation);

    if (co_load(&sight->since) == 0 || co_load(&sight->beat) != beat || co_load(&sight->incarnation) != incarnation) {
        co_store(&sight->beat, beat);
        co_store(&sight->incarnation, incarnation);
        co_store(&sight->since, now);
    }
    for (uint32_t lost = 0; lost < roster->count; lost++) {
        uint64_t adopted = nc_load(&host->adopted[lost]) >> 2, seen = co_load(&roster->sights[lost].fenced);
        while (adopted > seen && !co_cas(&roster->sights[lost].fenced, &seen, adopted))
            ;
    }
}

void kvp_host_watch(struct kvp_roster *roster)
{
    uint64_t now = clock_ns(CLOCK_MONOTONIC);

    for (uint32_t h = 0; h < roster->count; h++)
        if (h != roster->self)
            nc_invalidate(&roster->hosts[h], sizeof *roster->hosts);
    nc_read_fence(); /* the beats and adoptions of the other hosts are read after they were dropped */
    for (uint32_t h = 0; h < roster->count; h++)
        see(roster, h, now);
}

int kvp_host_fenced(const struct kvp_roster *roster, uint32_t h, uint64_t incarnation)
{
    return incarnation != 0 && co_load(&roster->sights[h].fenced) >= incarnation;
}

enum kvp_host_state kvp_host_state(const struct kvp_roster *roster, uint32_t h)
{
    const struct kvp_sight *sight = &roster->sights[h];
    uint64_t incarnation = co_load(&sight->incarnation);

    if (h == roster->self)
        return KVP_HOST_PRESENT;
    if (incarnation == 0)
        return KVP_HOST_FREE;
    if (kvp_host_fenced(roster, h, incarnation))
        return KVP_HOST_FENCED;
    if (nc_load(&roster->hosts[h].left))
        return KVP_HOST_LEFT;
    return clock_ns(CLOCK_MONOTONIC) - co_load(&sight->since) > roster->lease_ns ? KVP_HOST_LAPSED : KVP_HOST_PRESENT;
}

/* ---- being one ---- */

/* Has our incarnation been adopted, or has the identity been claimed anew? */
static int is_lost(struct kvp_roster *roster)
{
    if (nc_load(&roster->hosts[roster->self].incarnation) != roster->incarnation)
        return 1;
    for (uint32_t h = 0; h < roster->count; h++)
        if (h != roster->self)
            nc_invalidate(&roster->hosts[h].adopted[roster->self], 8);
    nc_read_fence(); /* what adopters have written about us is read after the lines were dropped */
    for (uint32_t h = 0; h < roster->count; h++)
        if (h != roster->self && nc_load(&roster->hosts[h].adopted[roster->self]) >> 2 >= roster->incarnation)
            return 1;
    return 0;
}

/* CLOCK_BOOTTIME runs on while the machine is suspended, so a host that slept finds itself late. */
static int is_late(const struct kvp_roster *roster, uint64_t now)
{
    return now - co_load(roster->beaten) > roster->lease_ns / 2;
}

void kvp_host_beat(struct kvp_roster *roster)
{
    uint64_t now = clock_ns(CLOCK_BOOTTIME), last = co_load(roster->beaten);
    struct kvp_host *host = &roster->hosts[roster->self];

    if (now - last < BEAT_NS || (is_late(roster, now) && is_lost(roster)) || !co_cas(roster->beaten, &last, now))
        return;
    nc_store(&host->beat, nc_load(&host->beat) + 1);
    nc_write_back(&host->beat, 8);
}

int kvp_host_assure(struct kvp_roster *roster)
{
    if (!is_late(roster, clock_ns(CLOCK_BOOTTIME)) || !is_lost(roster))
        return KVP_OK;
    return kvp_fail(KVP_E_FENCED, "host %u was silent for too long and was declared lost: what it owned belongs to another "
                    "host now; close the pool and open it again", roster->self);
}

/* ---- becoming one ---- */

/* Does the host keep silent for a whole lease? */
static int is_silent(struct kvp_roster *roster, const struct kvp_host *host)
{
    uint64_t start = clock_ns(CLOCK_MONOTONIC), beat = nc_load(&host->beat);

    while (clock_ns(CLOCK_MONOTONIC) - start < roster->lease_ns) {
        sleep_ms(KVP_TICK_MS);
        nc_invalidate(host, KVP_LINE);
        nc_read_fence(); /* the beat is read after it was dropped */
        if (nc_load(&host->beat) != beat)
            return 0;
    }
    return 1;
}

/* May an identity that was used before be taken? */
static int check_former(struct kvp_roster *roster, uint64_t machine, uint64_t incarnation)
{
    const struct kvp_host *host = &roster->hosts[roster->self];
    int same = nc_load(&host->machine) == machine;

    if (nc_load(&host->left) || kvp_host_fenced(roster, roster->self, incarnation))
        return KVP_OK;
    if (same && (nc_load(&host->boot) != kvp_boot_id() || KVP_MODE == KVP_SIM))
        return KVP_OK; /* this machine was reset: what its caches held is gone, and nobody acts for it */
    if (!is_silent(roster, host))
        return kvp_fail(KVP_E_HOST, "host %u is present %s: give this one another number", roster->self,
                        same ? "under a host memory that was removed" : "on another machine");
    if (same)
        return KVP_OK; /* its processes are gone; its cache is ours */
    return kvp_fail(KVP_E_HOST, "host %u is silent, but it is another machine and may wake up: have it fenced and adopted "
                    "first, or give this one another number", roster->self);
}

static uint64_t draw(void)
{
    uint64_t drawn = 0;

    return getrandom(&drawn, sizeof drawn, 0) == sizeof drawn ? drawn | 1 : clock_ns(CLOCK_BOOTTIME) | 1;
}

static void write_adoption(struct kvp_roster *roster, uint32_t lost, uint64_t word)
{
    nc_u64 *adopted = &roster->hosts[roster->self].adopted[lost];

    nc_store(adopted, word);
    nc_write_back(adopted, 8);
    nc_write_fence(); /* in memory before we look at the lost host, or touch a word of it: who wakes up sees it */
}

/* The second half of the Dekker with kvp_host_claim. */
static int decide(struct kvp_roster *roster, uint32_t lost, uint64_t incarnation)
{
    nc_invalidate(&roster->hosts[lost], KVP_LINE);
    nc_full_fence(); /* the incarnation is read after our intent was written and its line dropped */
    int same = nc_load(&roster->hosts[lost].incarnation) == incarnation;
    write_adoption(roster, lost, same ? incarnation << 2 | KVP_ADOPTION_DECIDED : 0);
    return same;
}

/* Adoptions of our former life go on, unless their host has come back: it may have stopped to yield to us when we were
 * lost. The other half of this Dekker is in kvp_host_yields. */
static void decide_anew(struct kvp_roster *roster)
{
    for (uint32_t lost = 0; lost < roster->count; lost++) {
        uint64_t word = nc_load(&roster->hosts[roster->self].adopted[lost]);
        if ((word & 3) == KVP_ADOPTION_INTENT || (word & 3) == KVP_ADOPTION_DECIDED)
            decide(roster, lost, word >> 2);
    }
}

int kvp_host_claim(struct kvp_roster *roster)
{
    struct kvp_host *host = &roster->hosts[roster->self];
    uint64_t machine = machine_id(roster), drawn = draw();

    nc_invalidate(host, sizeof *host); /* adoptions too: on a device our cache may hold those of an earlier pool */
    kvp_host_watch(roster); /* with the fence that lets us read our own former slot */
    uint64_t incarnation = nc_load(&host->incarnation);
    int status = incarnation ? check_former(roster, machine, incarnation) : KVP_OK;
    if (status)
        return status;
    roster->incarnation = incarnation + 1;
    nc_store(&host->incarnation, incarnation + 1);
    nc_store(&host->machine, machine);
    nc_store(&host->boot, kvp_boot_id());
    nc_store(&host->left, 0);
    nc_store(&host->wanted, 0);
    nc_store(&host->claim, drawn);
    nc_store(&host->beat, nc_load(&host->beat) + 1);
    nc_write_back(host, KVP_LINE);
    nc_write_fence(); /* the incarnation is in memory before anything else of this start: owners and evictors compare it */
    co_store(roster->beaten, clock_ns(CLOCK_BOOTTIME));
    roster->yields = kvp_host_yields(roster); /* Dekker with kvp_host_adopt: after our incarnation */
    decide_anew(roster);
    if (KVP_MODE == KVP_SIM)
        return KVP_OK; /* all that simulate one host are in one cache */
    /* No instruction elects between machines that claim one number at once. Of two writers of a line one is last, and
     * both read that one once the writes have settled: a safety net for a misconfigured rack, not a protocol. */
    sleep_ms(CLAIM_MS);
    nc_invalidate(host, KVP_LINE);
    nc_read_fence(); /* the claim is read from memory, not from our cache */
    if (nc_load(&host->claim) == drawn)
        return KVP_OK;
    return kvp_fail(KVP_E_HOST, "another machine claims to be host %u at this moment: give each its own number",
                    roster->self);
}

void kvp_host_leave(struct kvp_roster *roster)
{
    struct kvp_host *host = &roster->hosts[roster->self];

    nc_write_fence(); /* all that this host wrote is in memory before it says that it has left */
    nc_store(&host->left, 1);
    nc_write_back(host, KVP_LINE);
}

/* ---- adopting one ---- */

int kvp_host_adopt(struct kvp_roster *roster, uint32_t lost, uint64_t incarnation)
{
    uint64_t word = nc_load(&roster->hosts[roster->self].adopted[lost]), seen = co_load(&roster->sights[lost].fenced);

    if (word >> 2 == incarnation && (word & 3) >= KVP_ADOPTION_DECIDED)
        return 1;
    write_adoption(roster, lost, incarnation << 2 | KVP_ADOPTION_INTENT);
    KVP_CRASH_POINT("adopt.intended");
    if (!decide(roster, lost, incarnation))
        return 0;
    while (incarnation > seen && !co_cas(&roster->sights[lost].fenced, &seen, incarnation))
        ;
    return 1;
}

int kvp_host_adopting(struct kvp_roster *roster, uint32_t lost)
{
    uint64_t word = nc_load(&roster->hosts[roster->self].adopted[lost]);

    if ((word & 3) == KVP_ADOPTION_INTENT)
        return decide(roster, lost, word >> 2);
    return (word & 3) == KVP_ADOPTION_DECIDED;
}

void kvp_host_adopted(struct kvp_roster *roster, uint32_t lost)
{
    write_adoption(roster, lost, nc_load(&roster->hosts[roster->self].adopted[lost]) | KVP_ADOPTION_COMPLETE);
}

int kvp_host_yields(struct kvp_roster *roster)
{
    for (uint32_t h = 0; h < roster->count; h++)
        if (h != roster->self) {
            nc_invalidate(&roster->hosts[h].adopted[roster->self], 8);
            nc_invalidate(&roster->hosts[h], KVP_LINE);
        }
    nc_full_fence(); /* what adopters have written is read after our incarnation was, and after the lines were dropped */
    for (uint32_t h = 0; h < roster->count; h++) {
        uint64_t word = h == roster->self ? 0 : nc_load(&roster->hosts[h].adopted[roster->self]);
        if (word && word >> 2 < roster->incarnation && (word & 3) != KVP_ADOPTION_COMPLETE &&
            !kvp_host_fenced(roster, h, nc_load(&roster->hosts[h].incarnation)))
            return 1;
    }
    return 0;
}
