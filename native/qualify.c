/* qualify.c -- litmus tests between two hosts on the pool's own memory, and the digest that says that they passed. */
#include "native/handle.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { AREA_BYTES = 4096, AREA_WORDS = AREA_BYTES / 8, COPY_WORDS = 64, RECORDS = 32, LOOKS = 64 };
/* The longest pause between two steps of a side, in turns of an empty loop: as long as what it is to fall into. */
enum { PAUSE_PIN = 128, PAUSE_RECORDS = 4096, PAUSE_COPY = 16384 };
/* Words of a side's first block; each begins a line. The second block is payload. */
enum { HELLO = 0, STEP = 8, FLAG = 16, PIN = 24, SAW = 32, WORD = 40, PROBE = 48, TOTAL = 56, LOG = 128 };

/* One side at work. */
struct litmus {
    struct kvp_litmus_side *side;
    nc_u64 *mine, *my_payload;
    nc_u64 *theirs, *their_payload;      /* another host writes them: invalidated before each load */
    uint64_t failures, noted;
};

/* ---- pieces ---- */

/* A word of round r that no other round has, and that fits no other place. */
static uint64_t value(uint64_t r, uint64_t place)
{
    uint64_t x = r * 0x9e3779b97f4a7c15u + place;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    return x ^ x >> 27;
}

/* Neither side is to be always the first: a pause that is drawn anew each time. */
static void stagger(struct litmus *l, uint64_t most)
{
    l->side->random = value(l->side->random + 1, l->side->side);
    for (uint64_t n = l->side->random % most; n > 0; n--)
        __asm__ volatile("" : : : "memory");
}

static void tell(nc_u64 *word, uint64_t what)
{
    nc_store(word, what);
    nc_write_back(word, 8);
    nc_write_fence(); /* the other side can see it before it can see anything that we store later */
}

static uint64_t look(const nc_u64 *word)
{
    nc_invalidate(word, 8);
    nc_read_fence(); /* it is loaded from memory, not from what we had cached of it */
    return nc_load(word);
}

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Wait until a word of the other side is at least that: 0 if it is silent. */
static int await(const struct litmus *l, const nc_u64 *word, uint64_t least)
{
    uint64_t start = now_ms();

    for (uint64_t looks = 1; look(word) < least; looks++)
        if (looks % LOOKS == 0) {
            if (now_ms() - start > l->side->patience_ms)
                return 0;
            sched_yield(); /* the other side may want this processor */
        }
    return 1;
}

static int meet_again(struct litmus *l)
{
    tell(l->mine + STEP, ++l->side->step);
    return await(l, l->theirs + STEP, l->side->step);
}

static int writes_back(const struct litmus *l) { return !(l->side->defects & KVP_DEFECT_WRITE_BACK); }
static int invalidates(const struct litmus *l) { return !(l->side->defects & KVP_DEFECT_INVALIDATE); }

static void store_payload(struct litmus *l, uint64_t r, uint32_t words)
{
    for (uint32_t i = 0; i < words; i++)
        nc_store(&l->my_payload[i], value(r, i));
    if (writes_back(l))
        nc_write_back(l->my_payload, 8ull * words);
}

/* ---- the tests; each returns 0 if the other side was silent ---- */

static void send_message(struct litmus *l, uint64_t r, int stream)
{
    uint64_t buffer[AREA_WORDS];

    if (stream) {
        for (uint32_t i = 0; i < AREA_WORDS; i++)
            buffer[i] = value(r, i);
        kvp_copy_in(l->my_payload, buffer, sizeof buffer);
    } else {
        store_payload(l, r, AREA_WORDS);
    }
    nc_write_fence(); /* the payload is in memory before the flag: this is what is tested */
    tell(l->mine + FLAG, r);
}

static int take_message(struct litmus *l, uint64_t r)
{
    uint64_t wrong = 0;

    if (!await(l, l->theirs + FLAG, r))
        return 0;
    if (invalidates(l))
        nc_invalidate(l->their_payload, AREA_BYTES);
    nc_read_fence(); /* what we had cached of the last message is gone before this one is read */
    for (uint32_t i = 0; i < AREA_WORDS; i++)
        wrong |= nc_load(&l->their_payload[i]) ^ value(r, i);
    l->failures += wrong != 0;
    return 1;
}

/* The sides write in turn: who takes a message sends the next, so that none is overwritten too early. */
static int pass_messages(struct litmus *l, uint32_t rounds, int stream)
{
    uint64_t r = ++l->side->step, last = r + rounds;

    for (l->side->step = last; r < last; r++)
        if ((r & 1) == l->side->side)
            send_message(l, r, stream);
        else if (!take_message(l, r))
            return 0;
    return meet_again(l);
}

static int test_store(struct litmus *l, uint32_t rounds) { return pass_messages(l, rounds, 0); }
static int test_stream(struct litmus *l, uint32_t rounds) { return pass_messages(l, rounds, 1); }

static int announce_and_look(struct litmus *l, uint64_t r)
{
    nc_store(l->mine + PIN, r);
    if (writes_back(l))
        nc_write_back(l->mine + PIN, 8);
    nc_write_fence(); /* our word is in memory before theirs is dropped: else it could be read again too early */
    if (invalidates(l))
        nc_invalidate(l->theirs + PIN, 8);
    nc_full_fence(); /* and both before theirs is loaded: the Dekker of pin and evict */
    return nc_load(l->theirs + PIN) == r;
}

static int test_pin(struct litmus *l, uint32_t rounds)
{
    for (uint32_t i = 0; i < rounds; i++) {
        if (!meet_again(l))
            return 0;
        uint64_t r = l->side->step;
        stagger(l, PAUSE_PIN);
        int saw = announce_and_look(l, r);
        tell(l->mine + SAW, r << 1 | (uint64_t)saw);
        if (!meet_again(l))
            return 0;
        int they_saw = look(l->theirs + SAW) == (r << 1 | 1);
        l->failures += !saw && !they_saw;
        l->noted += !saw;
    }
    return 1;
}

static void overwrite(struct litmus *l, uint64_t first, uint32_t rounds)
{
    for (uint64_t r = first; r < first + rounds; r++) {
        tell(l->mine + WORD, 2 * r - 1);
        store_payload(l, r, COPY_WORDS);
        nc_write_fence(); /* the payload is in memory before the word that says it is whole */
        tell(l->mine + WORD, 2 * r);
        stagger(l, PAUSE_COPY);
    }
}

/* As kvp_read: copy, then look at the word again. Words before `first` are of an earlier test. */
static uint64_t copy_once(struct litmus *l, uint64_t first)
{
    uint64_t copy[COPY_WORDS], wrong = 0, word = look(l->theirs + WORD);

    if (word < 2 * first || word & 1)
        return word;
    if (invalidates(l))
        nc_invalidate(l->their_payload, sizeof copy);
    nc_read_fence(); /* no line is copied before it was dropped */
    for (uint32_t i = 0; i < COPY_WORDS; i++)
        copy[i] = nc_load(&l->their_payload[i]);
    if (look(l->theirs + WORD) != word)
        return word;
    for (uint32_t i = 0; i < COPY_WORDS; i++)
        wrong |= copy[i] ^ value(word / 2, i);
    l->failures += wrong != 0;
    l->noted++;
    return word;
}

static int copy_under(struct litmus *l, uint64_t first, uint64_t last)
{
    uint64_t start = now_ms();

    for (uint64_t copies = 1; copy_once(l, first) < 2 * last; copies++)
        if (copies % LOOKS == 0) {
            if (now_ms() - start > l->side->patience_ms)
                return 0;
            sched_yield(); /* the writer may want this processor */
        }
    return 1;
}

static int test_copy(struct litmus *l, uint32_t rounds)
{
    for (uint32_t turn = 0; turn < 2; turn++) {
        if (!meet_again(l))
            return 0;
        uint64_t first = l->side->step;
        l->side->step += rounds;
        if (turn == l->side->side)
            overwrite(l, first, rounds);
        else if (!copy_under(l, first, first + rounds - 1))
            return 0;
    }
    return meet_again(l);
}

static void append_records(struct litmus *l, uint32_t rounds)
{
    struct kvp_record *ring = (struct kvp_record *)(void *)(l->mine + LOG);

    for (uint64_t s = l->side->sequence + 1; s <= l->side->sequence + rounds; s++) {
        uint64_t word[3] = {value(s, 0), value(s, 1), value(s, 2)};
        kvp_log_append(ring, RECORDS, s, (unsigned)(s & 63), word);
        if (s % (RECORDS / 2) == 0)
            stagger(l, PAUSE_RECORDS);
    }
    nc_write_fence(); /* the last record is in memory before we tell of our next step */
}

/* Follow the other side's log to its end: records that were overwritten before we came may be missing, not torn. */
static int read_records(struct litmus *l, uint32_t rounds)
{
    const struct kvp_record *ring = (const struct kvp_record *)(const void *)(l->theirs + LOG);
    uint64_t at = l->side->sequence + 1, last = l->side->sequence + rounds, start = now_ms(), newest, word[3];
    unsigned kind;

    for (uint64_t reads = 1; at <= last; reads++) {
        if (invalidates(l) || reads % 2) /* who forgets it is late: never wrong */
            kvp_log_refresh(ring, RECORDS, at, 1);
        nc_read_fence(); /* the record is read after its line was dropped */
        int found = kvp_log_read(ring, RECORDS, at, &kind, word, &newest);
        if (found > 0) {
            l->failures += kind != (at & 63) || word[0] != value(at, 0) || word[1] != value(at, 1) || word[2] != value(at, 2);
            l->noted++, at++;
        } else if (found < 0) {
            at = newest >= at + RECORDS ? newest - RECORDS + 1 : at + 1;
        } else if (reads % LOOKS == 0) {
            if (now_ms() - start > l->side->patience_ms)
                return 0;
            sched_yield(); /* the writer may want this processor */
        }
    }
    return 1;
}

static int test_record(struct litmus *l, uint32_t rounds)
{
    for (uint32_t turn = 0; turn < 2; turn++) {
        if (!meet_again(l))
            return 0;
        if (turn == l->side->side)
            append_records(l, rounds);
        else if (!read_records(l, rounds))
            return 0;
    }
    l->side->sequence += rounds;
    return meet_again(l);
}

static void change_probe(struct litmus *l, uint64_t what)
{
    nc_store(l->mine + PROBE, what);
    if (writes_back(l))
        nc_write_back(l->mine + PROBE, 8);
    nc_write_fence(); /* it is in memory before we tell of our next step */
}

static void read_probe(struct litmus *l, uint64_t old)
{
    l->noted += nc_load(l->theirs + PROBE) == old;
    uint64_t seen = invalidates(l) ? look(l->theirs + PROBE) : nc_load(l->theirs + PROBE);
    l->failures += seen != old + 1;
}

static int test_stale(struct litmus *l, uint32_t rounds)
{
    for (uint32_t i = 0; i < rounds; i++) {
        int writes = (i & 1) == l->side->side;
        uint64_t old = l->side->step << 1; /* the same on both sides */
        if (writes)
            tell(l->mine + PROBE, old);
        if (!meet_again(l))
            return 0;
        if (!writes)
            l->failures += look(l->theirs + PROBE) != old;
        if (!meet_again(l))
            return 0;
        if (writes)
            change_probe(l, old + 1);
        if (!meet_again(l))
            return 0;
        if (!writes)
            read_probe(l, old);
    }
    return 1;
}

/* ---- running them ---- */

static nc_u64 *area(kvp_pool *pool, uint32_t c, uint32_t number)
{
    return (nc_u64 *)(void *)kvp_block_data(&pool->arena, kvp_block(c, number));
}

static int enter_side(kvp_pool *pool, const struct kvp_litmus_side *side, struct litmus *l)
{
    int status = kvp_enter_class(pool, side->class_);
    uint64_t ref;

    if (status)
        return status;
    if (pool->arena.class[side->class_].stride < AREA_BYTES || side->side > 1 || !side->nonce)
        return kvp_fail(KVP_E_INVALID, "a side of a litmus test is 0 or 1, and has a nonce and blocks of %d bytes at least",
                        AREA_BYTES);
    for (int i = 0; i < 2; i++)
        if ((status = kvp_future_ref(&pool->arena, side->class_, side->mine[i], &ref)))
            return status;
    l->mine = area(pool, side->class_, side->mine[0]), l->my_payload = area(pool, side->class_, side->mine[1]);
    l->theirs = area(pool, side->class_, side->theirs[0]), l->their_payload = area(pool, side->class_, side->theirs[1]);
    if (l->theirs && l->their_payload)
        return KVP_OK;
    return kvp_fail(KVP_E_RANGE, "the other side's blocks %u and %u do not exist", side->theirs[0], side->theirs[1]);
}

int kvp_litmus_begin(kvp_pool *pool, struct kvp_litmus_side *side)
{
    struct litmus l = {.side = side};
    int status = enter_side(pool, side, &l);

    if (status)
        return status;
    for (uint32_t i = 0; i < AREA_WORDS; i++) {
        nc_store(&l.mine[i], 0);
        nc_store(&l.my_payload[i], 0);
    }
    nc_write_back(l.mine, AREA_BYTES);
    nc_write_back(l.my_payload, AREA_BYTES);
    nc_write_fence(); /* zeros are in memory before anybody is told where */
    side->step = side->sequence = side->random = 0;
    return KVP_OK;
}

int kvp_litmus_meet(kvp_pool *pool, struct kvp_litmus_side *side, uint32_t wait_ms)
{
    struct timespec pause = {0, 1000000};
    struct litmus l = {.side = side};
    int status = enter_side(pool, side, &l);

    if (status)
        return status;
    nc_store(l.mine + HELLO + 1, side->their_nonce);
    tell(l.mine + HELLO, side->nonce);
    for (uint64_t start = now_ms(); now_ms() - start <= wait_ms; nanosleep(&pause, NULL))
        if (look(l.theirs + HELLO) == side->their_nonce && nc_load(l.theirs + HELLO + 1) == side->nonce)
            return 1;
    return 0;
}

/* Each side has counted what it saw itself. */
static int add_up(struct litmus *l, struct kvp_litmus_counts *out)
{
    nc_store(l->mine + TOTAL + 1, l->noted);
    tell(l->mine + TOTAL, l->failures);
    if (!meet_again(l))
        return 0;
    out->failures = l->failures + look(l->theirs + TOTAL);
    out->noted = l->noted + nc_load(l->theirs + TOTAL + 1);
    return meet_again(l); /* the words are free again */
}

int kvp_litmus_run(kvp_pool *pool, struct kvp_litmus_side *side, enum kvp_litmus test, uint32_t rounds,
                   struct kvp_litmus_counts *out)
{
    static int (*const tests[KVP_LITMUSES])(struct litmus *, uint32_t) = {
        [KVP_LITMUS_STORE] = test_store, [KVP_LITMUS_STREAM] = test_stream, [KVP_LITMUS_PIN] = test_pin,
        [KVP_LITMUS_COPY] = test_copy,   [KVP_LITMUS_RECORD] = test_record, [KVP_LITMUS_STALE] = test_stale,
    };
    struct litmus l = {.side = side};
    int status = enter_side(pool, side, &l);

    *out = (struct kvp_litmus_counts){.rounds = rounds};
    if (status)
        return status;
    if ((uint32_t)test >= KVP_LITMUSES || rounds == 0)
        return kvp_fail(KVP_E_INVALID, "no litmus test %d, or no round of it", (int)test);
    out->is_silent = !meet_again(&l) || !tests[test](&l, rounds) || !add_up(&l, out);
    if (out->is_silent)
        out->failures = l.failures + 1, out->noted = l.noted;
    return KVP_OK;
}

/* ---- the digest ---- */

static uint64_t checksum(const struct kvp_qualification *digest)
{
    const uint8_t *at = (const uint8_t *)digest;
    uint64_t hash = 0xcbf29ce484222325u;

    for (size_t i = 0; i < offsetof(struct kvp_qualification, checksum); i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

int kvp_pool_qualify(kvp_pool *pool, const struct kvp_qualification *digest)
{
    struct kvp_qualification made = {0};
    uint64_t words[KVP_QUALIFICATION_WORDS];
    int status = kvp_enter(pool);

    if (status)
        return status;
    if (digest && (!digest->hosts || !digest->tests))
        return kvp_fail(KVP_E_INVALID, "a qualification names the hosts that took part and the tests that passed");
    if (digest) {
        made = *digest;
        made.version = KVP_QUALIFICATION;
        made.mode = KVP_MODE;
        made.kind = (uint32_t)pool->mapping.kind;
        made.line_bytes = kvp_line_bytes();
        made.reserved = 0;
        memset(made.device, 0, sizeof made.device);
        memset(made.instructions, 0, sizeof made.instructions);
        memcpy(made.device, pool->mapping.uri, strnlen(pool->mapping.uri, sizeof made.device - 1));
        memcpy(made.instructions, kvp_line_instructions(), strnlen(kvp_line_instructions(), sizeof made.instructions - 1));
        made.checksum = checksum(&made);
    }
    memcpy(words, &made, sizeof words);
    kvp_lock(pool);
    nc_invalidate(pool->super->qualified, sizeof pool->super->qualified);
    nc_read_fence(); /* another host may have written the lines: they are ours from here on, whole */
    for (int i = 0; i < KVP_QUALIFICATION_WORDS; i++)
        nc_store(&pool->super->qualified[i], words[i]);
    nc_write_back(pool->super->qualified, sizeof pool->super->qualified);
    nc_write_fence(); /* recorded before we say so */
    kvp_unlock(pool);
    return KVP_OK;
}

static int read_digest(const kvp_pool *pool, struct kvp_qualification *out)
{
    uint64_t words[KVP_QUALIFICATION_WORDS];

    nc_invalidate(pool->super->qualified, sizeof pool->super->qualified);
    nc_read_fence(); /* what another host has recorded is read, not what we had cached */
    for (int i = 0; i < KVP_QUALIFICATION_WORDS; i++)
        words[i] = nc_load(&pool->super->qualified[i]);
    memcpy(out, words, sizeof *out);
    if (out->version == KVP_QUALIFICATION && out->checksum == checksum(out) && out->mode == KVP_MODE)
        return 1;
    memset(out, 0, sizeof *out);
    return 0;
}

int kvp_pool_qualification(kvp_pool *pool, struct kvp_qualification *out)
{
    int status = kvp_enter(pool);

    memset(out, 0, sizeof *out);
    return status ? status : read_digest(pool, out);
}

int kvp_qualification_demand(const kvp_pool *pool)
{
    struct kvp_qualification digest;
    const char *told = getenv("KVPOOL_UNQUALIFIED");
    int is_device = pool->mapping.kind == KVP_MAP_DAX || pool->mapping.kind == KVP_MAP_FILE;

    if (KVP_MODE != KVP_NONCOHERENT || !is_device || pool->unqualified || (told && strcmp(told, "1") == 0) ||
        read_digest(pool, &digest))
        return KVP_OK;
    return kvp_fail(KVP_E_UNQUALIFIED, "%s: nobody has tested that its memory keeps what hosts without coherence rely on: "
                    "run 'kvpool qualify' on it, or open it with unqualified=True (KVPOOL_UNQUALIFIED=1)", pool->mapping.uri);
}
