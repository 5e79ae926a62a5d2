/* operations.c -- what each macro does: a step of the current thread, through its store buffer. */
#include "engine.h"

enum { RACY = 1, DEATHLY = 2 };

static int matters(uint32_t at)
{
    const struct line *line = &ex_line[at / EX_LINE];
    const struct use *use = line->remote ? &line->use : &ex_word[at / 8];

    return use->racy | use->deathly << 1;
}

/* Before a step on a word: may others come between? `locked` operations and fences empty the buffer, which others see. */
static int step(uint32_t at, int writes, int locked, struct ex_site *site)
{
    struct thread *thread = current();

    ex_touch(at, writes);
    int matter = matters(at);
    thread->history = mix(thread->history, site->id);
    if ((matter & RACY) || (locked && thread->buffered))
        ex_point(1, site);
    else if (matter & DEATHLY)
        ex_point(ex_host_may_die(thread->host) || ex.death_shows, site);
    return matter;
}

/* ---- store buffers ---- */

static uint32_t line_at(const struct entry *entry)
{
    return entry->at / EX_LINE;
}

/* Stores leave in order; a write-back or invalidate waits for older stores to its line; everything waits for fences. */
int ex_may_drain(const struct thread *thread, int at)
{
    const struct entry *entry = &thread->buffer[at];

    if (entry->kind == FENCE)
        return 0;
    for (int i = 0; i < at; i++) {
        const struct entry *older = &thread->buffer[i];
        if (older->kind == FENCE)
            return 0;
        if (older->kind == STORE && (entry->kind == STORE || line_at(older) == line_at(entry)))
            return 0;
    }
    return 1;
}

static void take_out(struct thread *thread, int at)
{
    thread->buffered--;
    memmove(thread->buffer + at, thread->buffer + at + 1, sizeof *thread->buffer * (size_t)(thread->buffered - at));
}

void ex_drain(struct thread *thread, int at)
{
    struct entry entry = thread->buffer[at];

    take_out(thread, at);
    while (thread->buffered && thread->buffer[0].kind == FENCE)
        take_out(thread, 0);
    if (entry.kind == FENCE)
        return;
    static const char *const what[] = {"store", "write-back", "invalidate"};
    ex_trace(NULL, "T%d's late %s of %s takes effect", (int)(thread - ex.thread), what[entry.kind], ex_name_of(entry.at));
    if (entry.kind == STORE)
        ex_write(thread->host, entry.at, entry.value, entry.bytes);
    else if (entry.kind == WRITE_BACK)
        ex_write_back_line(thread->host, line_at(&entry));
    else
        ex_invalidate_line(thread->host, line_at(&entry));
    ex_progress(1);
}

void ex_drain_all(struct thread *thread)
{
    while (thread->buffered)
        ex_drain(thread, 0);
}

static int must_wait(const struct thread *thread, enum entry_kind kind, uint32_t at)
{
    for (int i = 0; i < thread->buffered; i++) {
        const struct entry *older = &thread->buffer[i];
        if (older->kind == FENCE || (older->kind == STORE && (kind == STORE || line_at(older) == at / EX_LINE)))
            return 1;
    }
    return 0;
}

static void put_in(enum entry_kind kind, uint32_t at, uint64_t value, unsigned bytes)
{
    struct thread *thread = current();

    if (thread->buffered == BUFFER)
        ex_drain_all(thread);
    if (kind == FENCE && (!thread->buffered || thread->buffer[thread->buffered - 1].kind == FENCE))
        return; /* orders nothing that is not in order */
    thread->buffer[thread->buffered++] = (struct entry){at, (uint8_t)kind, (uint8_t)bytes, value};
    ex_trace(NULL, "... late");
}

/* ---- loads and stores ---- */

uint64_t ex_load(const void *p, unsigned bytes, struct ex_site *site)
{
    const char *from = "";
    uint64_t value = 0;

    if (!ex_is_shared(p)) /* a private copy of a shared structure */
        return memcpy(&value, p, bytes), value;
    uint32_t at = ex_offset(p);
    if (ex.phase != RUN) {
        if (ex.phase == CHECK)
            ex_touch(at, 0);
        return ex_read(ex.view, at, bytes);
    }
    site->passes++;
    step(at, 0, 0, site);
    struct thread *thread = current();
    int own = -1;
    for (int i = 0; i < thread->buffered; i++)
        if (thread->buffer[i].kind == STORE && thread->buffer[i].at == at)
            own = i;
    if (own >= 0)
        value = thread->buffer[own].value, from = " (own, late)";
    else
        value = ex_read(thread->host, at, bytes);
    thread->history = mix(thread->history, value + 1);
    ex_trace(site, "load  %s -> %#llx%s", ex_name_of(at), (unsigned long long)value, from);
    return value;
}

void ex_store(void *p, uint64_t value, unsigned bytes, struct ex_site *site)
{
    uint32_t at = ex_offset(p);

    if (ex.phase != RUN) {
        if (ex.phase == CHECK)
            ex_touch(at, 1);
        ex_write(ex.view, at, value, bytes);
        return;
    }
    site->passes++;
    int matter = step(at, 1, 0, site);
    struct thread *thread = current();
    ex_trace(site, "store %s <- %#llx", ex_name_of(at), (unsigned long long)value);
    int shows = (matter & RACY) || ((matter & DEATHLY) && ex_host_may_die(thread->host));
    if (shows && (must_wait(thread, STORE, at) || ex_event())) {
        put_in(STORE, at, value, bytes);
        return;
    }
    ex_write(thread->host, at, value, bytes);
    ex_progress(0);
}

/* ---- locked operations ---- */

/* The first entry of a kind, or the number of entries. */
static int first_of(const struct thread *thread, enum entry_kind kind)
{
    int at = 0;

    while (at < thread->buffered && thread->buffer[at].kind != kind)
        at++;
    return at;
}

/* Empty the buffer of all entries of a kind, and of what they wait for. */
static void drain_kind(struct thread *thread, enum entry_kind kind)
{
    for (int at; (at = first_of(thread, kind)) < thread->buffered;)
        ex_drain(thread, ex_may_drain(thread, at) ? at : 0);
}

/* A locked operation is one step, with all earlier stores before it; x86 waits for write-backs and invalidates as well, arm64
 * does not. Whose cache it acts in. */
static int begin_locked(uint32_t at, struct ex_site *site)
{
    if (ex.phase == RUN) {
        site->passes++;
        step(at, 1, 1, site);
        drain_kind(current(), STORE);
    } else if (ex.phase == CHECK) {
        ex_touch(at, 1);
    }
    return ex.phase == RUN ? current()->host : ex.view;
}

int ex_cas(void *p, uint64_t *seen, uint64_t value, unsigned bytes, struct ex_site *site)
{
    uint32_t at = ex_offset(p);

    if (ex.phase == RUN && site->mutation) { /* in two steps, and without the lock's order */
        uint64_t found = ex_load(p, bytes, site);
        if (found == *seen)
            ex_store(p, value, bytes, site);
        int same = found == *seen;
        *seen = found;
        return same;
    }
    int host = begin_locked(at, site);
    uint64_t found = ex_read(host, at, bytes), wanted = *seen;
    ex_write(host, at, found == wanted ? value : found, bytes); /* one that fails makes the line dirty, too */
    *seen = found;
    if (ex.phase != RUN)
        return found == wanted;
    current()->history = mix(current()->history, found + 3);
    ex_trace(site, "cas   %s: %#llx, wanted %#llx -> %#llx%s", ex_name_of(at), (unsigned long long)found,
             (unsigned long long)wanted, (unsigned long long)value, found == wanted ? "" : ": fails");
    if (found == wanted)
        ex_progress(0);
    return found == wanted;
}

static uint64_t changed(uint64_t old, enum ex_change how, uint64_t value)
{
    switch (how) {
    case EX_EXCHANGE:
        return value;
    case EX_ADD:
        return old + value;
    case EX_OR:
        return old | value;
    default:
        return old & value;
    }
}

uint64_t ex_change(void *p, enum ex_change how, uint64_t value, unsigned bytes, struct ex_site *site)
{
    uint32_t at = ex_offset(p);

    if (ex.phase == RUN && site->mutation) {
        uint64_t found = ex_load(p, bytes, site);
        ex_store(p, changed(found, how, value), bytes, site);
        return found;
    }
    int host = begin_locked(at, site);
    uint64_t old = ex_read(host, at, bytes);
    ex_write(host, at, changed(old, how, value), bytes);
    if (ex.phase != RUN)
        return old;
    current()->history = mix(current()->history, old + 5);
    ex_trace(site, "%s %s: %#llx -> %#llx", ((const char *const[]){"swap ", "add  ", "or   ", "and  "})[how], ex_name_of(at),
             (unsigned long long)old, (unsigned long long)changed(old, how, value));
    ex_progress(0);
    return old;
}

/* ---- lines ---- */

static void line_step(enum entry_kind kind, uint32_t line, struct ex_site *site)
{
    uint32_t at = line * EX_LINE;

    if (!ex_line[line].used)
        return;
    ex_touch(at, 0);
    if (!ex_line[line].remote)
        return; /* no other host looks: the caches of one host are coherent */
    int matter = step(at, 0, 0, site);
    struct thread *thread = current();
    struct copy *copy = &ex_cache[thread->host][line];
    int has_effect = kind == WRITE_BACK ? copy->dirty : copy->valid;
    ex_trace(site, "%s the line of %s%s", kind == WRITE_BACK ? "write back" : "invalidate", ex_name_of(at),
             has_effect ? "" : ": nothing to do");
    if (matter && (must_wait(thread, kind, at) || (has_effect && (ex.lazy || (ex_line[line].held && kind == WRITE_BACK) || ex_event()))))
        put_in(kind, at, 0, 0);
    else if (kind == WRITE_BACK)
        ex_write_back_line(thread->host, line);
    else
        ex_invalidate_line(thread->host, line);
}

static void for_lines(enum entry_kind kind, const void *p, uint64_t bytes, struct ex_site *site)
{
    if (ex.phase != RUN || bytes == 0)
        return;
    site->passes++;
    if (site->mutation)
        return;
    uint32_t last = ex_offset((const uint8_t *)p + bytes - 1) / EX_LINE;
    for (uint32_t line = ex_offset(p) / EX_LINE; line <= last; line++)
        line_step(kind, line, site);
}

void ex_write_back(const void *p, uint64_t bytes, struct ex_site *site)
{
    for_lines(WRITE_BACK, p, bytes, site);
}

void ex_invalidate(const void *p, uint64_t bytes, struct ex_site *site)
{
    for_lines(INVALIDATE, p, bytes, site);
}

/* ---- fences ---- */

/* Does the fence run? A fence on an empty buffer has no effect, and is no step. */
static int fence(struct ex_site *site)
{
    if (ex.phase != RUN)
        return 0;
    site->passes++;
    /* In the history either way: whether the buffer was empty must not tell equal states apart. */
    current()->history = mix(current()->history, site->id);
    return site->mutation != EX_REMOVED && current()->buffered;
}

void ex_write_fence(struct ex_site *site)
{
    if (!fence(site))
        return;
    ex_trace(site, "write fence");
    put_in(FENCE, 0, 0, 0);
}

/* Empty the buffer of all entries of a kind. */
static void fence_of(enum entry_kind kind, const char *name, struct ex_site *site)
{
    if (!fence(site) || first_of(current(), kind) == current()->buffered)
        return;
    ex_point(1, site);
    ex_trace(site, "%s fence", name);
    drain_kind(current(), kind);
}

void ex_read_fence(struct ex_site *site)
{
    fence_of(INVALIDATE, "read", site);
}

void ex_host_fence(struct ex_site *site)
{
    fence_of(STORE, "host", site);
}

void ex_full_fence(struct ex_site *site)
{
    if (!fence(site))
        return;
    if (site->mutation == EX_WEAK) {
        put_in(FENCE, 0, 0, 0);
        return;
    }
    ex_point(1, site);
    ex_trace(site, "full fence");
    ex_drain_all(current());
}
