/* simhost.c -- mode sim: the files of the device and of each host's cache: made, found, lost, removed. */
#define _GNU_SOURCE
#include "coherence/mapping.h"
#include "coherence/sim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if KVP_MODE == KVP_SIM

#define DEVICE_MAGIC 0x4b56505349444556u
#define CACHE_MAGIC 0x4b56505349434148u
enum { TRIES = 4000, PAUSE_NS = 1000000 };

/* ---- where things lie in the two files ---- */

static uint64_t pages(uint64_t bytes)
{
    return (bytes + KVP_PAGE - 1) & ~(uint64_t)(KVP_PAGE - 1);
}

static uint64_t locks_bytes(void)
{
    return pages(SIM_LOCKS * sizeof(struct sim_lock));
}

/* Versions, locks, header. */
static uint64_t tail_bytes(uint64_t bytes)
{
    return pages(bytes / KVP_LINE * sizeof(co_u32)) + locks_bytes() + KVP_PAGE;
}

/* Marks, locks, header. */
static uint64_t cache_tail_bytes(uint64_t bytes)
{
    return pages(bytes / KVP_LINE * sizeof(co_u64)) + locks_bytes() + KVP_PAGE;
}

uint64_t kvp_sim_file_bytes(uint64_t bytes)
{
    return bytes + tail_bytes(bytes);
}

int kvp_sim_pool_bytes(int fd, const char *path, uint64_t *bytes)
{
    struct sim_device header;
    uint64_t all = *bytes;

    if (all < KVP_PAGE || pread(fd, &header, sizeof header, (off_t)(all - KVP_PAGE)) != sizeof header ||
        co_load(&header.magic) != DEVICE_MAGIC)
        return kvp_fail(KVP_E_FOREIGN, "%s is not a simulated device", path);
    *bytes = co_load(&header.bytes);
    if (*bytes < KVP_PAGE || *bytes > all || *bytes % KVP_PAGE || kvp_sim_file_bytes(*bytes) != all)
        return kvp_fail(KVP_E_CORRUPT, "%s says that it has %llu bytes in a file of %llu", path,
                        (unsigned long long)*bytes, (unsigned long long)all);
    return KVP_OK;
}

static void cache_path(const char *device, uint32_t host, char *out, size_t bytes)
{
    snprintf(out, bytes, "%.380s.cache%u", device, host);
}

/* ---- the device's tail ---- */

static uint64_t random_id(void)
{
    uint64_t id = 0;

    if (getrandom(&id, sizeof id, 0) != sizeof id)
        id = kvp_sim_mix((uint64_t)getpid() ^ (uint64_t)(uintptr_t)&id);
    return id | 1;
}

static int map_tail(struct kvp_sim *sim, int fd)
{
    uint64_t length = tail_bytes(sim->bytes);

    sim->tail = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)sim->bytes);
    if (sim->tail == MAP_FAILED) {
        sim->tail = NULL;
        return kvp_fail_errno("cannot map", sim->path);
    }
    sim->versions = (co_u32 *)(void *)sim->tail;
    sim->device_locks = (struct sim_lock *)(void *)(sim->tail + length - KVP_PAGE - locks_bytes());
    sim->header = (struct sim_device *)(void *)(sim->tail + length - KVP_PAGE);
    return KVP_OK;
}

int kvp_sim_open(const struct kvp_uri *uri, struct kvp_mapping *mapping, int is_new)
{
    struct kvp_sim *sim = calloc(1, sizeof *sim);

    if (!sim)
        return kvp_fail(KVP_E_NOSPACE, "no memory for a simulated host");
    *sim = (struct kvp_sim){.cache_fd = -1, .bytes = mapping->bytes, .lines = mapping->bytes / KVP_LINE,
                            .base = (uint64_t)(uintptr_t)mapping->base, .is_named = !is_new};
    sim->device = (co_u64 *)(void *)mapping->base;
    snprintf(sim->path, sizeof sim->path, "%s", mapping->path);
    mapping->sim = sim;
    int status = is_new ? kvp_back_file(mapping->fd, kvp_sim_file_bytes(sim->bytes), mapping->path) : KVP_OK;
    if (status || (status = map_tail(sim, mapping->fd)) || (status = kvp_sim_enlist(sim)))
        return status;
    if (is_new) {
        co_store(&sim->header->bytes, sim->bytes);
        co_store(&sim->header->id, random_id());
        co_store(&sim->header->seed, uri->seed);
        co_store(&sim->header->events, uri->has_events ? uri->events : SIM_EVENTS);
        co_store(&sim->header->magic, DEVICE_MAGIC);
    }
    sim->events = uri->has_events ? uri->events : co_load(&sim->header->events);
    return KVP_OK;
}

/* ---- a host's cache ---- */

static int map_cache(struct kvp_sim *sim)
{
    uint64_t length = cache_tail_bytes(sim->bytes);

    sim->cache_tail = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, sim->cache_fd, (off_t)sim->bytes);
    if (sim->cache_tail == MAP_FAILED) {
        sim->cache_tail = NULL;
        return kvp_fail_errno("cannot map the cache of", sim->path);
    }
    sim->marks = (co_u64 *)(void *)sim->cache_tail;
    sim->cache_locks = (struct sim_lock *)(void *)(sim->cache_tail + length - KVP_PAGE - locks_bytes());
    sim->cache = (struct sim_cache *)(void *)(sim->cache_tail + length - KVP_PAGE);
    return KVP_OK;
}

/* A new cache holds what the device holds now, as if every line had been prefetched: the oldest content that a host
 * that comes now may see. Pages that nobody has touched are zero in both and stay unwritten. */
static int copy_device(struct kvp_sim *sim, int device_fd)
{
    off_t from = 0, end = (off_t)sim->bytes;
    uint8_t *image = mmap(NULL, sim->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, sim->cache_fd, 0);

    if (image == MAP_FAILED)
        return kvp_fail_errno("cannot fill the cache of", sim->path);
    while ((from = lseek(device_fd, from, SEEK_DATA)) >= 0 && from < end) {
        off_t hole = lseek(device_fd, from, SEEK_HOLE);
        for (; from < (hole < 0 || hole > end ? end : hole); from += KVP_LINE) {
            uint64_t line = (uint64_t)from / KVP_LINE, data[LINE_WORDS];
            co_store(&sim->marks[line], (uint64_t)kvp_sim_read_line(sim, line, data) << 32);
            memcpy(image + from, data, sizeof data);
        }
    }
    int status = from < 0 && errno != ENXIO ? kvp_fail_errno("cannot read", sim->path) : KVP_OK;
    munmap(image, sim->bytes);
    return status;
}

/* A cache file of this host without a name yet, filled; it holds the shared lock. */
static int make_cache(struct kvp_sim *sim, int device_fd)
{
    struct stat info;
    int status;

    sim->cache_fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (sim->cache_fd < 0 || fstat(device_fd, &info) || fchmod(sim->cache_fd, info.st_mode & 0777) ||
        flock(sim->cache_fd, LOCK_SH | LOCK_NB))
        return kvp_fail_errno("cannot make a cache for", sim->path);
    if ((status = kvp_back_file(sim->cache_fd, sim->bytes + cache_tail_bytes(sim->bytes), sim->path)) ||
        (status = map_cache(sim)) || (status = copy_device(sim, device_fd)))
        return status;
    uint64_t life = co_add(&sim->header->lives[sim->host], 1);
    co_store(&sim->cache->bytes, sim->bytes);
    co_store(&sim->cache->id, co_load(&sim->header->id));
    co_store(&sim->cache->host, sim->host);
    co_store(&sim->cache->random, kvp_sim_mix(co_load(&sim->header->seed) ^ kvp_sim_mix(sim->host + 1) ^ life << 48));
    co_store(&sim->cache->magic, CACHE_MAGIC);
    return KVP_OK;
}

static void drop_cache(struct kvp_sim *sim)
{
    if (sim->cache_tail)
        munmap(sim->cache_tail, cache_tail_bytes(sim->bytes));
    if (sim->cache_fd >= 0)
        close(sim->cache_fd);
    sim->cache_tail = NULL;
    sim->cache_fd = -1;
}

static int link_cache(struct kvp_sim *sim)
{
    char path[420], from[40];

    cache_path(sim->path, sim->host, path, sizeof path);
    snprintf(from, sizeof from, "/proc/self/fd/%d", sim->cache_fd);
    return linkat(AT_FDCWD, from, AT_FDCWD, path, AT_SYMLINK_FOLLOW) ? errno : 0;
}

/* Is the open cache file one of this very device, and still the one that has the name? */
static int is_ours(const struct kvp_sim *sim, int fd, int *has_name)
{
    uint64_t all = sim->bytes + cache_tail_bytes(sim->bytes);
    struct sim_cache header;
    struct stat info;

    *has_name = fstat(fd, &info) == 0 && info.st_nlink > 0;
    return *has_name && (uint64_t)info.st_size == all &&
           pread(fd, &header, sizeof header, (off_t)(all - KVP_PAGE)) == sizeof header &&
           co_load(&header.magic) == CACHE_MAGIC && co_load(&header.id) == co_load(&sim->header->id);
}

/* One look at the named cache file: KVP_OK and locked (`how`), NOTFOUND, or BUSY: look again. A file that an earlier
 * device of this name has left is removed, unless somebody uses it. */
static int find_cache(struct kvp_sim *sim, int how)
{
    char path[420];
    int has_name, status = KVP_E_BUSY;

    cache_path(sim->path, sim->host, path, sizeof path);
    sim->cache_fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (sim->cache_fd < 0)
        return kvp_fail_errno("cannot open", path);
    if (flock(sim->cache_fd, how | LOCK_NB)) {
        kvp_fail(KVP_E_BUSY, "live processes use %s", path);
    } else if (is_ours(sim, sim->cache_fd, &has_name)) {
        if ((status = map_cache(sim)) == KVP_OK)
            return KVP_OK;
    } else if (has_name) {
        kvp_fail(KVP_E_BUSY, "live processes use %s, which belongs to an earlier pool of this name: end them", path);
        if (flock(sim->cache_fd, LOCK_EX | LOCK_NB) == 0 && !is_ours(sim, sim->cache_fd, &has_name) && has_name)
            unlink(path);
    }
    drop_cache(sim);
    return status;
}

static void pause_shortly(void)
{
    nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
}

/* Find the host's cache, or make it: of several that make one, the first to name it wins. */
static int join_cache(struct kvp_sim *sim, int device_fd)
{
    int status = KVP_E_BUSY;

    for (int tries = 0; tries < TRIES && status == KVP_E_BUSY; tries++) {
        if (tries)
            pause_shortly();
        status = find_cache(sim, LOCK_SH);
        if (status != KVP_E_NOTFOUND)
            continue;
        if ((status = make_cache(sim, device_fd)))
            return status;
        int error = link_cache(sim);
        if (error)
            drop_cache(sim);
        if (error == EEXIST)
            status = KVP_E_BUSY; /* somebody was faster */
        else if (error)
            return errno = error, kvp_fail_errno("cannot name a cache of", sim->path);
    }
    return status;
}

/* The device moves aside and the image takes its place: addresses in the mapping stay right. */
static int show_image(struct kvp_mapping *mapping)
{
    struct kvp_sim *sim = mapping->sim;
    void *device = mmap(NULL, sim->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, mapping->fd, 0);

    if (device == MAP_FAILED)
        return kvp_fail_errno("cannot map", sim->path);
    sim->device = device;
    void *image = mmap(mapping->base, sim->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, sim->cache_fd, 0);
    if (image == MAP_FAILED) /* what was there is gone or not: nobody may use the mapping any more */
        return kvp_fail_errno("cannot map the cache of", sim->path);
    sim->image = image;
    return KVP_OK;
}

int kvp_mapping_attach(struct kvp_mapping *mapping, uint32_t host)
{
    struct kvp_sim *sim = mapping->sim;
    int status;

    if (!sim)
        return KVP_OK;
    if (host >= SIM_HOSTS)
        return kvp_fail(KVP_E_INVALID, "host %u: a simulated pool has hosts 0 to %d", host, SIM_HOSTS - 1);
    if (sim->image)
        return kvp_fail(KVP_E_INVALID, "this mapping is host %u already", sim->host);
    sim->host = host;
    if ((status = sim->is_named ? join_cache(sim, mapping->fd) : make_cache(sim, mapping->fd)) == KVP_OK)
        status = show_image(mapping);
    return status;
}

/* ---- names ---- */

/* The creator's cache is named before the device, so that nobody of its host makes another one. If the creator dies
 * between the two, the next pool of this name removes what it left. */
int kvp_sim_name(struct kvp_mapping *mapping)
{
    struct kvp_sim *sim = mapping->sim;
    int error = EEXIST;

    if (!sim || sim->cache_fd < 0)
        return KVP_OK;
    for (int tries = 0; tries < TRIES && error == EEXIST; tries++) {
        struct kvp_sim other = *sim;
        other.cache_tail = NULL;
        if (tries)
            pause_shortly();
        if ((error = link_cache(sim)) == EEXIST && access(sim->path, F_OK) == 0)
            break; /* somebody was faster */
        if (error == EEXIST && find_cache(&other, LOCK_SH) == KVP_OK)
            drop_cache(&other);
    }
    sim->is_cache_named = !error;
    return error ? (errno = error, kvp_fail_errno("cannot name a cache of", sim->path)) : KVP_OK;
}

void kvp_sim_named(struct kvp_mapping *mapping, int status)
{
    struct kvp_sim *sim = mapping->sim;
    char path[420];

    if (!sim)
        return;
    sim->is_named = status == KVP_OK;
    if (status && sim->is_cache_named) {
        cache_path(sim->path, sim->host, path, sizeof path);
        unlink(path);
        sim->is_cache_named = 0;
    }
}

void kvp_sim_close(struct kvp_mapping *mapping)
{
    struct kvp_sim *sim = mapping->sim;

    if (!sim)
        return;
    kvp_sim_strike(sim);
    if (sim->device && (uint8_t *)sim->device != mapping->base)
        munmap(sim->device, sim->bytes);
    if (sim->tail)
        munmap(sim->tail, tail_bytes(sim->bytes));
    drop_cache(sim);
    free(sim);
    mapping->sim = NULL;
}

void kvp_sim_unlink(const char *path)
{
    char cache[420];

    for (uint32_t host = 0; host < SIM_HOSTS; host++) {
        cache_path(path, host, cache, sizeof cache);
        unlink(cache);
    }
}

/* ---- the death of a host ---- */

/* Each dirty line has left the cache in time, or has not. */
static int64_t lose_lines(struct kvp_sim *sim)
{
    int64_t lost = 0;

    kvp_sim_settle(sim);
    for (uint64_t line = 0; line < sim->lines; line++) {
        if (!(co_load(&sim->marks[line]) & MARK_DIRTY))
            continue;
        if (kvp_sim_random(sim) & 1) {
            kvp_sim_flush(sim, line);
            co_add(&sim->header->flushed, 1);
        } else {
            co_add(&sim->header->lost, 1);
            lost++;
        }
    }
    return lost;
}

int64_t kvp_sim_lose_host(const char *uri, uint32_t host)
{
    struct kvp_mapping mapping;
    char path[420];
    int status = kvp_mapping_open(uri, &mapping);
    int64_t lost = 0;

    if (status)
        return status;
    struct kvp_sim *sim = mapping.sim;
    if (!sim || host >= SIM_HOSTS) {
        status = kvp_fail(KVP_E_INVALID, "host %u of %s: only hosts 0 to %d of a sim: pool can be lost", host, uri,
                          SIM_HOSTS - 1);
    } else {
        sim->host = host;
        if ((status = find_cache(sim, LOCK_EX)) == KVP_OK) {
            /* Flushing reads the image where an attached process has it. */
            if ((status = show_image(&mapping)) == KVP_OK) {
                lost = lose_lines(sim);
                cache_path(sim->path, host, path, sizeof path);
                unlink(path);
            }
        }
    }
    kvp_mapping_close(&mapping);
    return status ? status : lost;
}

int kvp_sim_counts_read(const struct kvp_mapping *mapping, struct kvp_sim_counts *out)
{
    const struct kvp_sim *sim = mapping->sim;

    *out = (struct kvp_sim_counts){0};
    if (!sim)
        return kvp_fail(KVP_E_INVALID, "%s is not a simulated pool: nothing is counted", mapping->uri);
    const struct sim_device *header = sim->header;
    *out = (struct kvp_sim_counts){
        .loads = co_load(&sim->loads), .stores = co_load(&sim->stores), .lines_written = co_load(&sim->lines_written),
        .lines_written_clean = co_load(&sim->lines_written_clean),
        .lines_invalidated = co_load(&sim->lines_invalidated), .fences = co_load(&sim->fences),
        .evicted = co_load(&sim->evicted), .dropped = co_load(&sim->dropped), .conflicts = co_load(&header->conflicts),
        .conflict_offset = co_load(&header->conflict_offset),
        .dirty_invalidated = co_load(&header->dirty_invalidated),
        .dirty_invalidated_offset = co_load(&header->dirty_invalidated_offset), .flushed = co_load(&header->flushed),
        .lost = co_load(&header->lost)};
    return KVP_OK;
}

#else /* the other modes simulate nothing */

int kvp_mapping_attach(struct kvp_mapping *mapping, uint32_t host)
{
    (void)mapping, (void)host;
    return KVP_OK;
}

int64_t kvp_sim_lose_host(const char *uri, uint32_t host)
{
    return kvp_fail(KVP_E_INVALID, "host %u of %.200s is not simulated: that needs mode='sim'", host, uri);
}

int kvp_sim_counts_read(const struct kvp_mapping *mapping, struct kvp_sim_counts *out)
{
    *out = (struct kvp_sim_counts){0};
    return kvp_fail(KVP_E_INVALID, "%.200s is not simulated: that needs mode='sim'", mapping->uri);
}

#endif
