/* memory.c -- device memory, the write-back cache of each host, and which words matter to more than one thread. */
#include "engine.h"

uint8_t ex_memory[EX_LINES * EX_LINE] __attribute__((aligned(4096)));
static uint8_t pristine[EX_LINES * EX_LINE];
struct line ex_line[EX_LINES];
struct use ex_word[WORDS];
struct copy ex_cache[EX_HOSTS][EX_LINES];

static struct warm {
    int host;
    uint32_t line;
} warm[256];
static int warm_count;

static struct label {
    uint32_t at, bytes, unit;
    const char *name;
} label[256];
static int label_count;

/* ---- setup ---- */

void *ex_region(uint64_t bytes, enum ex_region_kind kind, int host)
{
    uint32_t lines = (uint32_t)((bytes + 4095) / 4096 * 4096 / EX_LINE), first = ex.lines;

    if (first + lines > EX_LINES)
        ex_fail("%llu bytes do not fit: raise EX_LINES", (unsigned long long)bytes);
    for (uint32_t i = first; i < first + lines; i++)
        ex_line[i].home = kind == EX_COHERENT ? (int8_t)host : -1;
    ex.lines += lines;
    return ex_memory + (uint64_t)first * EX_LINE;
}

void ex_label(const void *p, uint64_t bytes, uint64_t unit, const char *name)
{
    if (label_count < (int)(sizeof label / sizeof *label))
        label[label_count++] = (struct label){ex_offset(p), (uint32_t)bytes, (uint32_t)unit, name};
}

void ex_warm(int host, const void *p, uint64_t bytes)
{
    uint32_t last = ex_offset((const uint8_t *)p + bytes - 1) / EX_LINE;

    for (uint32_t line = ex_offset(p) / EX_LINE; line <= last && warm_count < 256; line++)
        warm[warm_count++] = (struct warm){host, line};
}

void ex_hold(const void *p, uint64_t bytes)
{
    uint32_t last = ex_offset((const uint8_t *)p + bytes - 1) / EX_LINE;

    for (uint32_t line = ex_offset(p) / EX_LINE; line <= last; line++)
        ex_line[line].held = 1;
}

/* "words[3]+8", for listings. */
const char *ex_name_of(uint32_t at)
{
    static char text[80];

    for (int i = label_count; i-- > 0;) {
        uint32_t inside = at - label[i].at;
        if (at < label[i].at || inside >= label[i].bytes)
            continue;
        int length = snprintf(text, sizeof text, "%s[%u]", label[i].name, inside / label[i].unit);
        if (inside % label[i].unit)
            snprintf(text + length, sizeof text - (size_t)length, "+%u", inside % label[i].unit);
        return text;
    }
    snprintf(text, sizeof text, "byte %u", at);
    return text;
}

int ex_is_shared(const void *p)
{
    return (uint64_t)((const uint8_t *)p - ex_memory) < (uint64_t)ex.lines * EX_LINE;
}

uint32_t ex_offset(const void *p)
{
    uint64_t at = (uint64_t)((const uint8_t *)p - ex_memory);

    if (at >= (uint64_t)ex.lines * EX_LINE)
        ex_fail("%p is in no region", p);
    return (uint32_t)at;
}

void ex_memory_keep(void)
{
    ex.pristine_bytes = ex.lines * EX_LINE;
    memcpy(pristine, ex_memory, ex.pristine_bytes);
}

static void mark_touched(uint32_t line)
{
    if (!ex_line[line].touched) {
        ex_line[line].touched = 1;
        ex.touched[ex.touched_count++] = line;
    }
}

static uint64_t copy_hash(int host, uint32_t line, const struct copy *copy)
{
    uint64_t place = ((uint64_t)host + 1) << 32 | line << 4, hash = placed(place + 8, copy->dirty);

    for (int i = 0; i < 8; i++)
        hash += placed(place + (uint64_t)i, copy->word[i]);
    return hash;
}

/* The copy has changed: its share of the state's hash too. */
static void rehash(int host, uint32_t line)
{
    struct copy *copy = &ex_cache[host][line];

    if (!ex.hashing)
        return;
    ex.hash -= copy->hash;
    copy->hash = copy->valid ? copy_hash(host, line, copy) : 0;
    ex.hash += copy->hash;
}

static void fill(int host, uint32_t line)
{
    struct copy *copy = &ex_cache[host][line];

    memcpy(copy->word, ex_memory + line * EX_LINE, EX_LINE);
    copy->valid = 1;
    copy->dirty = 0;
    rehash(host, line);
}

static void drop(int host, uint32_t line)
{
    ex_cache[host][line].valid = ex_cache[host][line].dirty = 0;
    rehash(host, line);
}

void ex_memory_restore(void)
{
    for (uint32_t i = 0; i < ex.touched_count; i++) {
        uint32_t line = ex.touched[i];
        memcpy(ex_memory + line * EX_LINE, pristine + line * EX_LINE, EX_LINE);
        ex_line[line].touched = ex_line[line].hosts = 0;
        ex_line[line].use.readers = ex_line[line].use.writers = 0;
        for (int w = 0; w < 8; w++)
            ex_word[line * 8 + w].readers = ex_word[line * 8 + w].writers = 0;
        for (int host = 0; host < EX_HOSTS; host++)
            ex_cache[host][line].valid = ex_cache[host][line].dirty = 0, ex_cache[host][line].hash = 0;
    }
    ex.touched_count = 0;
    ex.hash = 0;
    for (int i = 0; i < warm_count; i++) {
        mark_touched(warm[i].line);
        ex_line[warm[i].line].hosts |= (uint8_t)(1 << warm[i].host);
        fill(warm[i].host, warm[i].line);
    }
}

/* Of the last scenario nothing stays. */
void ex_memory_forget(void)
{
    memset(ex_memory, 0, ex.lines * EX_LINE);
    memset(ex_line, 0, sizeof ex_line);
    memset(ex_word, 0, sizeof ex_word);
    for (int host = 0; host < EX_HOSTS; host++)
        memset(ex_cache[host], 0, sizeof ex_cache[host]);
    for (uint32_t i = 0; i < EX_LINES; i++)
        ex_line[i].home = -2;
    ex.touched_count = 0;
    ex.lines = 0;
    ex.hash = 0;
    warm_count = label_count = 0;
}

/* ---- who touches what ---- */

static void learn(uint8_t *fact)
{
    if (!*fact) {
        *fact = 1;
        ex.learned = 1;
    }
}

static void note(struct use *use, uint16_t bit, uint16_t before, int writes)
{
    uint16_t others = (uint16_t)((writes ? use->readers | use->writers : use->writers) & ~bit);

    if (others & ~before)
        learn(&use->racy);
    if (others & before)
        learn(&use->deathly);
    if (writes)
        use->writers |= bit;
    else
        use->readers |= bit;
}

/* A word is loaded or stored. */
void ex_touch_as(int thread, uint32_t at, int writes)
{
    uint32_t number = at / EX_LINE;
    struct line *line = &ex_line[number];
    int checks = thread == CHECKER;
    int host = checks ? ex.view : ex.thread[thread].host;
    uint16_t bit = (uint16_t)(1u << thread), before = checks ? 0xffff : ex.thread[thread].before;

    mark_touched(number);
    learn(&line->used);
    line->hosts |= (uint8_t)(1 << host);
    note(&line->use, bit, before, writes);
    note(&ex_word[at / 8], bit, before, writes);
    if (line->home < 0 && line->use.writers && (line->hosts & (line->hosts - 1)))
        learn(&line->remote);
    if (line->home >= 0 && line->home != host && !checks)
        ex_fail("host %d touches %s, memory of host %d", host, ex_name_of(at), line->home);
}

void ex_touch(uint32_t at, int writes)
{
    ex_touch_as(ex.phase == CHECK ? CHECKER : ex.current, at, writes);
}

/* What is known: whether deaths show, and which hosts are reset; of each line, LINE.FLAGS.RACY.DEATHLY in hexadecimal, the last two by word: a trail fits only with it. */
void ex_known_print(FILE *out)
{
    const char *comma = "";

    fprintf(out, "%x;", (unsigned)(ex.death_shows | ex.resets << 1));
    for (uint32_t i = 0; i < ex.lines; i++) {
        const struct line *line = &ex_line[i];
        unsigned flags = line->remote | line->use.racy << 1 | line->use.deathly << 2, racy = 0, deathly = 0;
        for (uint32_t w = 0; w < 8; w++) {
            racy |= (unsigned)ex_word[i * 8 + w].racy << w;
            deathly |= (unsigned)ex_word[i * 8 + w].deathly << w;
        }
        if (!flags && !racy && !deathly)
            continue;
        fprintf(out, "%s%x.%x.%x.%x", comma, i, flags, racy, deathly);
        comma = ",";
    }
}

void ex_known_parse(const char *text)
{
    unsigned i, flags, racy, deathly;
    int used;

    for (i = 0; i < ex.lines; i++)
        ex_line[i].used = 1; /* makes no choice differ */
    flags = (unsigned)strtoul(text, NULL, 16);
    ex.death_shows = flags & 1;
    ex.resets = (uint8_t)(flags >> 1);
    text += strcspn(text, ";");
    text += *text == ';';
    while (sscanf(text, "%x.%x.%x.%x%n", &i, &flags, &racy, &deathly, &used) == 4 && i < ex.lines) {
        ex_line[i].remote = flags & 1;
        ex_line[i].use.racy = flags >> 1 & 1;
        ex_line[i].use.deathly = flags >> 2 & 1;
        for (uint32_t w = 0; w < 8; w++) {
            ex_word[i * 8 + w].racy = racy >> w & 1;
            ex_word[i * 8 + w].deathly = deathly >> w & 1;
        }
        text += used;
        text += *text == ',';
    }
}

/* ---- lines ---- */

int ex_event(void)
{
    if (ex.phase != RUN || !ex.left.events || !ex_choose(2))
        return 0;
    if (ex.limit.events < UNBOUNDED)
        ex.left.events--;
    return 1;
}

void ex_progress(int to_all)
{
    ex.idle = 0;
    for (int i = 0; i < ex.threads; i++)
        if (to_all || i != ex.current)
            ex.thread[i].spinning = 0;
}

static uint64_t *memory_word(uint32_t at)
{
    return (uint64_t *)(void *)(ex_memory + (at & ~7u));
}

static void set_memory(uint32_t at, uint64_t word)
{
    uint64_t *old = memory_word(at);

    if (*old == word)
        return;
    if (ex.hashing)
        ex.hash += placed(at / 8, word) - placed(at / 8, *old);
    *old = word;
}

static int differs(int host, uint32_t line)
{
    return memcmp(ex_cache[host][line].word, ex_memory + line * EX_LINE, EX_LINE) != 0;
}

static void store_line(int host, uint32_t line, const uint64_t word[8]);

/* A dirty line leaves the cache, unasked or because it is invalidated. */
static void evict(int host, uint32_t line, const char *why)
{
    uint64_t word[8];

    memcpy(word, ex_cache[host][line].word, EX_LINE);
    ex_trace(NULL, "host %d: line of %s goes to memory (%s)", host, ex_name_of(line * EX_LINE), why);
    drop(host, line);
    store_line(host, line, word);
}

static int has_life(int host)
{
    for (int i = 0; i < ex.threads; i++)
        if (ex.thread[i].host == host && ex.thread[i].state != DEAD && ex.thread[i].state != DONE)
            return 1;
    return 0;
}

/* A line arrives in memory. What other caches may have done with it shortly before shows only now: they may have
 * written their own version back, or have fetched the old one. */
static void store_line(int host, uint32_t line, const uint64_t word[8])
{
    if (!memcmp(ex_memory + line * EX_LINE, word, EX_LINE))
        return;
    for (int other = 0; other < EX_HOSTS && ex.left.events && ex.phase == RUN; other++) {
        struct copy *copy = &ex_cache[other][line];
        if (other == host)
            continue;
        if (copy->dirty && differs(other, line)) {
            if (ex_event())
                evict(other, line, "evicted before the other host's");
        } else if (!copy->valid && has_life(other) && ex_event()) {
            fill(other, line);
            ex_trace(NULL, "host %d prefetches the line of %s, as it is before this", other, ex_name_of(line * EX_LINE));
        }
    }
    for (uint32_t i = 0; i < 8; i++)
        set_memory(line * EX_LINE + i * 8, word[i]);
    ex_progress(1);
}

/* Other hosts' dirty versions may have been evicted by now: 1 if one was. */
static int late_evictions(int host, uint32_t line)
{
    int any = 0;

    for (int other = 0; other < EX_HOSTS; other++)
        if (other != host && ex_cache[other][line].dirty && differs(other, line) && ex_event()) {
            evict(other, line, "evicted in the meantime");
            any = 1;
        }
    return any;
}

static int others_dirty(int host, uint32_t line)
{
    for (int other = 0; other < EX_HOSTS; other++)
        if (other != host && ex_cache[other][line].dirty && differs(other, line))
            return 1;
    return 0;
}

/* The line in the host's cache: what was there, or, if that is clean, perhaps dropped and fetched again by now. */
static struct copy *fetch(int host, uint32_t line)
{
    struct copy *copy = &ex_cache[host][line];

    if (copy->valid && copy->dirty)
        return copy;
    if (copy->valid && !differs(host, line)) {
        if (others_dirty(host, line) && late_evictions(host, line))
            fill(host, line);
        return copy;
    }
    if (copy->valid && !ex_event())
        return copy; /* stale */
    late_evictions(host, line);
    fill(host, line);
    return copy;
}

static uint64_t part(uint64_t word, uint32_t at, unsigned bytes)
{
    return bytes == 8 ? word : word >> (at & 4) * 8 & 0xffffffffu;
}

static uint64_t replaced(uint64_t word, uint32_t at, uint64_t value, unsigned bytes)
{
    uint64_t mask = bytes == 8 ? UINT64_MAX : 0xffffffffull << (at & 4) * 8;

    return (word & ~mask) | (value << (bytes == 8 ? 0 : (at & 4) * 8) & mask);
}

uint64_t ex_read(int host, uint32_t at, unsigned bytes)
{
    if (!ex_line[at / EX_LINE].remote)
        return part(*memory_word(at), at, bytes);
    if (ex.phase == CHECK)
        return part(ex_host_word(host, ex_memory + (at & ~7u)), at, bytes);
    return part(fetch(host, at / EX_LINE)->word[at / 8 % 8], at, bytes);
}

static void check_writers(int host, uint32_t line)
{
    for (int other = 0; other < EX_HOSTS && !ex.two_writers; other++)
        if (other != host && ex_cache[other][line].dirty)
            ex_fail("the line of %s is dirty in hosts %d and %d: a line has one writer host", ex_name_of(line * EX_LINE),
                    other, host);
}

void ex_write(int host, uint32_t at, uint64_t value, unsigned bytes)
{
    uint32_t line = at / EX_LINE;

    if (!ex_line[line].remote) {
        set_memory(at, replaced(*memory_word(at), at, value, bytes));
        return;
    }
    struct copy *copy = fetch(host, line);
    /* What is overwritten here is lost with the host unless it was evicted before. */
    if (copy->dirty && ex_host_may_die(host) && differs(host, line) && ex_event()) {
        evict(host, line, "evicted before it changes again");
        copy = fetch(host, line);
    }
    copy->word[at / 8 % 8] = replaced(copy->word[at / 8 % 8], at, value, bytes);
    copy->dirty = 1;
    rehash(host, line);
    check_writers(host, line);
}

void ex_write_back_line(int host, uint32_t line)
{
    struct copy *copy = &ex_cache[host][line];
    uint64_t word[8];

    if (!copy->dirty)
        return;
    copy->dirty = 0; /* clwb keeps the line */
    rehash(host, line);
    memcpy(word, copy->word, EX_LINE);
    store_line(host, line, word);
}

void ex_invalidate_line(int host, uint32_t line)
{
    if (ex_cache[host][line].dirty && !ex.dirty_invalidate)
        ex_fail("host %d invalidates the line of %s, which it has dirty itself", host, ex_name_of(line * EX_LINE));
    if (ex_cache[host][line].dirty)
        evict(host, line, "invalidated while dirty");
    else
        drop(host, line);
}

void ex_lose_cache(int host)
{
    for (uint32_t i = 0; i < ex.touched_count; i++) {
        uint32_t line = ex.touched[i];
        if (ex_cache[host][line].dirty && ex_choose(2))
            evict(host, line, "flushed as the host dies");
        else if (ex_cache[host][line].valid)
            drop(host, line);
    }
}

void ex_settle(void)
{
    for (uint32_t i = 0; i < ex.touched_count; i++)
        for (int host = 0; host < EX_HOSTS; host++)
            if (ex_cache[host][ex.touched[i]].dirty)
                evict(host, ex.touched[i], "in the end");
}

/* ---- for oracles ---- */

static void look(const void *p)
{
    if (ex.phase == SETUP)
        return;
    uint32_t at = ex_offset(p);
    ex_touch(at, 0);
    if (ex_line[at / EX_LINE].use.writers && ex_line[at / EX_LINE].home < 0)
        learn(&ex_line[at / EX_LINE].remote);
}

uint64_t ex_memory_word(const void *p)
{
    look(p);
    return *memory_word(ex_offset(p));
}

uint64_t ex_host_word(int host, const void *p)
{
    uint32_t at = ex_offset(p);
    const struct copy *copy = &ex_cache[host][at / EX_LINE];

    return copy->valid ? copy->word[at / 8 % 8] : *memory_word(at);
}

void ex_view(int host)
{
    ex.view = host;
}
