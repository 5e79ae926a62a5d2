/* sim.c -- mode sim: words and lines of hosts that see the device through a cache image of their own.
 *
 * An image always holds some content of each line. Stores mark their line dirty; a dirty line reaches the device when it
 * is written back or, at a moment of the generator's choice, evicted; a clean line is never written. Invalidating a
 * line fetches it at once: the oldest content that a real machine may show after it. A fetched line is exchanged as a
 * whole before any load sees a word of it (`sequence` in its mark), as in a cache. */
#include "coherence/sim.h"

#include <string.h>

#if KVP_MODE == KVP_SIM

/* ---- the device: lines are replaced whole, under a lock with a journal ---- */

static uint64_t lock_number(uint64_t line)
{
    return line / GROUP_LINES % SIM_LOCKS;
}

/* Store what the journal says. Also done again by a successor: it ends in the same state. */
static void finish_device(struct kvp_sim *sim, struct sim_lock *lock)
{
    uint64_t line = co_load(&lock->line);
    uint32_t version = co_load32(&lock->version);

    if (co_load32(&lock->doing) != WRITING_LINE || line >= sim->lines)
        return;
    co_store32(&sim->versions[line], version | VERSION_BUSY);
    /* Readers that see a new word see BUSY as well: the stores below are not made before it. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (int i = 0; i < LINE_WORDS; i++)
        co_store_relaxed(&sim->device[line * LINE_WORDS + i], co_load_relaxed(&lock->data[i]));
    co_store32(&sim->versions[line], version);
    co_store32(&lock->doing, NOTHING);
}

static struct sim_lock *lock_device(struct kvp_sim *sim, uint64_t line)
{
    struct sim_lock *lock = &sim->device_locks[lock_number(line)];

    if (kvp_sim_lock(lock))
        finish_device(sim, lock);
    return lock;
}

uint32_t kvp_sim_read_line(struct kvp_sim *sim, uint64_t line, uint64_t data[LINE_WORDS])
{
    for (;;) {
        uint32_t version = co_load32(&sim->versions[line]);
        if (version & VERSION_BUSY) { /* its writer may be dead: the lock knows */
            kvp_sim_unlock(lock_device(sim, line));
            continue;
        }
        for (int i = 0; i < LINE_WORDS; i++)
            data[i] = co_load_relaxed(&sim->device[line * LINE_WORDS + i]);
        /* The version is loaded again after the words: a writer that came between is seen. */
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (co_load32(&sim->versions[line]) == version)
            return version;
    }
}

/* The version after one more write by `host`. */
static uint32_t next_version(uint32_t version, uint32_t host)
{
    return ((version >> 8) + 1) << 8 | host << 1;
}

static void replace_line(struct kvp_sim *sim, struct sim_lock *lock, uint64_t line, const uint64_t data[LINE_WORDS],
                         uint32_t version)
{
    for (int i = 0; i < LINE_WORDS; i++)
        co_store_relaxed(&lock->data[i], data[i]);
    co_store(&lock->line, line);
    co_store32(&lock->version, version);
    co_store32(&lock->doing, WRITING_LINE); /* a release: a successor that sees it sees all of the above */
    finish_device(sim, lock);
}

/* ---- one line of an image; its cache lock is held ---- */

static void install(struct kvp_sim *sim, uint64_t line, const uint64_t data[LINE_WORDS], uint32_t version)
{
    co_u64 *words = &sim->image[line * LINE_WORDS], *mark = &sim->marks[line];
    uint64_t sequence = (co_load(mark) + MARK_SEQUENCE) & MARK_SEQUENCE_MASK;

    co_store(mark, co_load(mark) | MARK_FETCHING);
    /* A load that sees a new word sees FETCHING as well, and waits until the line is whole. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (int i = 0; i < LINE_WORDS; i++)
        co_store_relaxed(&words[i], data[i]);
    co_store(mark, (uint64_t)version << 32 | sequence);
}

/* A clean line is read from the device. */
static void fetch(struct kvp_sim *sim, struct sim_lock *lock, uint64_t line)
{
    uint64_t data[LINE_WORDS], different = co_load(&sim->marks[line]) & MARK_FETCHING;
    uint32_t version = kvp_sim_read_line(sim, line, data);

    for (int i = 0; i < LINE_WORDS; i++)
        different |= data[i] ^ co_load_relaxed(&sim->image[line * LINE_WORDS + i]);
    if (!different) { /* the usual case, which need not hold up loads */
        co_store(&sim->marks[line], (uint64_t)version << 32 | (co_load(&sim->marks[line]) & UINT32_MAX));
        return;
    }
    co_store(&lock->line, line);
    co_store32(&lock->doing, FETCHING_LINE);
    install(sim, line, data, version);
    co_store32(&lock->doing, NOTHING);
}

static void note_conflict(struct kvp_sim *sim, uint64_t line)
{
    co_store(&sim->header->conflict_offset, line * KVP_LINE);
    co_add(&sim->header->conflicts, 1);
}

/* A dirty line is written to the device, whose lock is held too. It stays dirty if plain stores may still come. */
static void write_line(struct kvp_sim *sim, struct sim_lock *lock, struct sim_lock *device, uint64_t line, uint64_t keep)
{
    uint64_t data[LINE_WORDS], mark = co_load(&sim->marks[line]);
    uint32_t seen = co_load32(&sim->versions[line]), version = next_version(seen, sim->host);

    if (seen != (uint32_t)(mark >> 32))
        note_conflict(sim, line);
    for (int i = 0; i < LINE_WORDS; i++)
        data[i] = co_load(&sim->image[line * LINE_WORDS + i]);
    co_store(&lock->line, line);
    co_store32(&lock->version, version);
    co_store32(&lock->doing, WRITING_LINE);
    replace_line(sim, device, line, data, version);
    if (!(keep & mark & MARK_OPEN))
        mark &= ~(MARK_DIRTY | MARK_OPEN);
    co_store(&sim->marks[line], (uint64_t)version << 32 | (mark & UINT32_MAX));
    co_store32(&lock->doing, NOTHING);
}

/* The holder of a cache lock died. A half-fetched line is fetched again. A line that it was writing is on the device or
 * not: the version, which names the writer, says which. In both cases it stays dirty, which costs a write at most. */
static void finish_cache(struct kvp_sim *sim, struct sim_lock *lock)
{
    uint64_t line = co_load(&lock->line);
    uint32_t doing = co_load32(&lock->doing), version = co_load32(&lock->version);

    if (line >= sim->lines)
        return;
    if (doing == FETCHING_LINE) {
        fetch(sim, lock, line);
    } else if (doing == WRITING_LINE) {
        struct sim_lock *device = lock_device(sim, line);
        if (co_load32(&sim->versions[line]) == version)
            co_store(&sim->marks[line], (uint64_t)version << 32 | (co_load(&sim->marks[line]) & UINT32_MAX));
        kvp_sim_unlock(device);
    }
    co_store32(&lock->doing, NOTHING);
}

static struct sim_lock *lock_cache(struct kvp_sim *sim, uint64_t line)
{
    struct sim_lock *lock = &sim->cache_locks[lock_number(line)];

    if (kvp_sim_lock(lock))
        finish_cache(sim, lock);
    return lock;
}

static void mark_dirty(struct kvp_sim *sim, uint64_t line, uint64_t how)
{
    co_store(&sim->marks[line], co_load_relaxed(&sim->marks[line]) | how);
}

/* The dirty ones of lines [line, end) of one group; returns how many. */
static uint64_t write_group(struct kvp_sim *sim, struct sim_lock *lock, uint64_t line, uint64_t end, uint64_t keep)
{
    struct sim_lock *device = NULL;
    uint64_t written = 0;

    for (; line < end; line++) {
        if (!(co_load_relaxed(&sim->marks[line]) & MARK_DIRTY))
            continue;
        if (!device)
            device = lock_device(sim, line);
        write_line(sim, lock, device, line, keep);
        written++;
    }
    if (device)
        kvp_sim_unlock(device);
    return written;
}

void kvp_sim_flush(struct kvp_sim *sim, uint64_t line)
{
    struct sim_lock *lock = lock_cache(sim, line);

    write_group(sim, lock, line, line + 1, 0);
    kvp_sim_unlock(lock);
}

void kvp_sim_settle(struct kvp_sim *sim)
{
    for (uint64_t i = 0; i < SIM_LOCKS; i++)
        kvp_sim_unlock(lock_cache(sim, i * GROUP_LINES));
}

/* ---- words ---- */

static uint64_t line_of(const struct kvp_sim *sim, const void *p)
{
    return ((uint64_t)(uintptr_t)p - sim->base) / KVP_LINE;
}

static void note_recent(struct kvp_sim *sim, uint64_t line)
{
    co_store_relaxed(&sim->recent[co_add(&sim->recent_count, 1) % RECENT], line + 1);
}

/* Before a host is attached the mapping is the device itself. Until that has its name nobody else is there, and a store
 * is just a store; later one replaces its line, so that the hosts' oracle sees it. */
static int exchange_uncached(struct kvp_sim *sim, co_u64 *word, uint64_t *seen, uint64_t value)
{
    uint64_t line = line_of(sim, word), at = (uint64_t)(word - &sim->device[line * LINE_WORDS]), data[LINE_WORDS];
    struct sim_lock *lock = lock_device(sim, line);
    uint32_t version = kvp_sim_read_line(sim, line, data);
    int done = !seen || *seen == data[at];

    if (seen)
        *seen = data[at];
    if (done) {
        data[at] = value;
        replace_line(sim, lock, line, data, next_version(version, NO_HOST));
    }
    kvp_sim_unlock(lock);
    return done;
}

uint64_t kvp_sim_load(const nc_u64 *p)
{
    struct kvp_sim *sim = kvp_sim_find(p);
    const co_u64 *word = (const co_u64 *)(const void *)p;

    if (!sim || !sim->image)
        return co_load(word);
    uint64_t line = line_of(sim, p);
    co_add(&sim->loads, 1);
    for (;;) {
        uint64_t before = co_load(&sim->marks[line]);
        if (before & MARK_FETCHING) { /* its fetcher may be dead: the lock knows */
            kvp_sim_unlock(lock_cache(sim, line));
            continue;
        }
        uint64_t value = co_load(word);
        if (!((before ^ co_load(&sim->marks[line])) & (MARK_SEQUENCE_MASK | MARK_FETCHING)))
            return value;
    }
}

void kvp_sim_store(nc_u64 *p, uint64_t value)
{
    struct kvp_sim *sim = kvp_sim_find(p);
    co_u64 *word = (co_u64 *)(void *)p;

    if (!sim || (!sim->image && !sim->is_named)) {
        co_store(word, value);
    } else if (!sim->image) {
        exchange_uncached(sim, word, NULL, value);
    } else {
        uint64_t line = line_of(sim, p);
        struct sim_lock *lock = lock_cache(sim, line);
        mark_dirty(sim, line, MARK_DIRTY); /* first: a death between the two must not lose the store */
        co_store(word, value);
        kvp_sim_unlock(lock);
        co_add(&sim->stores, 1);
        note_recent(sim, line);
    }
}

/* One that fails makes its line dirty all the same: so does the instruction. */
int kvp_sim_cas(nc_u64 *p, uint64_t *seen, uint64_t value)
{
    struct kvp_sim *sim = kvp_sim_find(p);
    co_u64 *word = (co_u64 *)(void *)p;

    if (!sim || (!sim->image && !sim->is_named))
        return co_cas(word, seen, value);
    if (!sim->image)
        return exchange_uncached(sim, word, seen, value);
    uint64_t line = line_of(sim, p);
    struct sim_lock *lock = lock_cache(sim, line);
    mark_dirty(sim, line, MARK_DIRTY);
    int done = co_cas(word, seen, value);
    kvp_sim_unlock(lock);
    co_add(&sim->stores, 1);
    note_recent(sim, line);
    return done;
}

/* ---- lines ---- */

/* A range of lines, walked by groups: [line, group_end) is what one lock stands for. */
struct walk {
    struct kvp_sim *sim;
    uint64_t line, end, group_end;
};

static struct walk walk_begin(const void *p, uint64_t bytes)
{
    struct kvp_sim *sim = kvp_sim_find(p);

    if (!sim || !sim->image || !bytes)
        return (struct walk){.sim = NULL};
    uint64_t end = ((uint64_t)(uintptr_t)p + bytes - 1 - sim->base) / KVP_LINE + 1;
    return (struct walk){.sim = sim, .line = line_of(sim, p), .end = end < sim->lines ? end : sim->lines};
}

static int walk_on(struct walk *walk)
{
    if (walk->group_end)
        walk->line = walk->group_end;
    if (walk->line >= walk->end)
        return 0;
    uint64_t next = (walk->line / GROUP_LINES + 1) * GROUP_LINES;
    walk->group_end = next < walk->end ? next : walk->end;
    return 1;
}

void kvp_sim_write_back(const void *p, uint64_t bytes)
{
    struct walk walk = walk_begin(p, bytes);

    while (walk.sim && walk_on(&walk)) {
        uint64_t dirty = 0, written = 0;
        /* Without the lock: a mark is cleared only after its line has arrived, and our own stores are marked. */
        for (uint64_t line = walk.line; line < walk.group_end; line++)
            dirty |= co_load(&walk.sim->marks[line]) & MARK_DIRTY;
        if (dirty) {
            struct sim_lock *lock = lock_cache(walk.sim, walk.line);
            written = write_group(walk.sim, lock, walk.line, walk.group_end, 0);
            kvp_sim_unlock(lock);
            co_add(&walk.sim->lines_written, written);
        }
        co_add(&walk.sim->lines_written_clean, walk.group_end - walk.line - written);
    }
}

void kvp_sim_invalidate(const void *p, uint64_t bytes)
{
    struct walk walk = walk_begin(p, bytes);

    while (walk.sim && walk_on(&walk)) {
        struct sim_lock *lock = lock_cache(walk.sim, walk.line);
        for (uint64_t line = walk.line; line < walk.group_end; line++) {
            if (!(co_load_relaxed(&walk.sim->marks[line]) & MARK_DIRTY)) {
                fetch(walk.sim, lock, line);
                continue;
            }
            co_store(&walk.sim->header->dirty_invalidated_offset, line * KVP_LINE);
            co_add(&walk.sim->header->dirty_invalidated, 1);
            write_group(walk.sim, lock, line, line + 1, MARK_OPEN);
        }
        kvp_sim_unlock(lock);
        co_add(&walk.sim->lines_invalidated, walk.group_end - walk.line);
    }
}

void kvp_sim_will_store(void *p, uint64_t bytes)
{
    struct walk walk = walk_begin(p, bytes);

    while (walk.sim && walk_on(&walk)) {
        struct sim_lock *lock = lock_cache(walk.sim, walk.line);
        for (uint64_t line = walk.line; line < walk.group_end; line++)
            mark_dirty(walk.sim, line, MARK_DIRTY | MARK_OPEN);
        kvp_sim_unlock(lock);
    }
}

void kvp_sim_fence(void)
{
    struct kvp_sim *sim = kvp_sim_last();

    /* Stores to host memory and to images before it, loads after it: what nc_full_fence says, and so all of them. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (sim)
        co_add(&sim->fences, 1);
}

void kvp_sim_copy_in(void *pool, const void *from, uint64_t bytes)
{
    struct walk walk = walk_begin(pool, bytes);
    uint8_t *to = pool;
    const uint8_t *source = from;

    if (!walk.sim)
        memcpy(pool, from, bytes);
    while (walk.sim && walk_on(&walk)) {
        struct sim_lock *lock = lock_cache(walk.sim, walk.line);
        uint64_t group = walk.sim->base + walk.group_end * KVP_LINE - (uint64_t)(uintptr_t)to;
        uint64_t part = group < bytes ? group : bytes;
        for (uint64_t line = walk.line; line < walk.group_end; line++)
            mark_dirty(walk.sim, line, MARK_DIRTY);
        memcpy(to, source, part);
        uint64_t written = write_group(walk.sim, lock, walk.line, walk.group_end, 0);
        kvp_sim_unlock(lock);
        co_add(&walk.sim->lines_written, written);
        to += part, source += part, bytes -= part;
    }
}

/* ---- what a cache does by itself ---- */

uint64_t kvp_sim_random(struct kvp_sim *sim)
{
    return kvp_sim_mix(co_add(&sim->cache->random, 0x9e3779b97f4a7c15u));
}

/* Half of the events meet lines that this process has just stored to, and a quarter the front of the device, where the
 * words are: a line of payload, drawn evenly, would hardly ever be one on which something depends. */
static uint64_t choose_line(struct kvp_sim *sim, uint64_t random)
{
    uint64_t choice = random & 3, draw = random >> 2;
    uint64_t recent = co_load_relaxed(&sim->recent[draw % RECENT]);

    if (choice < 2 && recent)
        return recent - 1;
    return draw % (choice == 3 || !sim->hot_lines ? sim->lines : sim->hot_lines);
}

void kvp_sim_events(const struct kvp_mapping *mapping)
{
    struct kvp_sim *sim = mapping->sim;

    for (uint64_t i = 0; sim && sim->image && i < sim->events; i++) {
        uint64_t line = choose_line(sim, kvp_sim_random(sim));
        struct sim_lock *lock = lock_cache(sim, line);
        if (write_group(sim, lock, line, line + 1, MARK_OPEN)) {
            co_add(&sim->evicted, 1);
        } else {
            fetch(sim, lock, line);
            co_add(&sim->dropped, 1);
        }
        kvp_sim_unlock(lock);
    }
}

void kvp_sim_hot(const struct kvp_mapping *mapping, uint64_t bytes)
{
    struct kvp_sim *sim = mapping->sim;
    uint64_t lines = bytes / KVP_LINE;

    if (sim)
        sim->hot_lines = lines < sim->lines ? lines : sim->lines;
}

#else
typedef int kvp_no_sim; /* a translation unit is never empty */
#endif
