/* sim.h -- private to this folder: the files behind simulated hosts, and what mapping.c calls for them.
 *
 * The device is one file: the pool's bytes, then a tail that no host can address: a version per line, locks with a
 * journal each, and a header in the last page. Each host has a cache file: the image of the device that the host sees, a
 * mark per line, locks, and a header in the last page. Both exist for as long as the pool: processes come and go.
 *
 *   version (of a line of the device)  {count:24 | writer:7 | busy:1}; odd while a line is being replaced
 *   mark (of a line of an image)       {version:32 | sequence:29 | open:1 | dirty:1 | fetching:1}; version is that of the
 *                                      device when this host last fetched or wrote the line; sequence counts fetches
 *   open                               plain stores may come at any time: dirty until it is written back on purpose
 *
 * Locks stand for GROUP_LINES neighbouring lines. Order: a cache's lock, then the device's. A mark changes only under its
 * cache lock, a line and a version of the device only under its device lock. Loads take no lock.
 */
#ifndef KVP_SIM_H
#define KVP_SIM_H
#include "coherence/coherence.h"
#include "coherence/uri.h"

#if KVP_MODE == KVP_SIM

enum { SIM_HOSTS = 64, SIM_LOCKS = 4096, GROUP_LINES = 8, LINE_WORDS = 8, RECENT = 64, SIM_EVENTS = 4 };
enum { NO_HOST = 127 }; /* writer of what is stored without a cache: before a host is attached */
enum sim_doing { NOTHING, FETCHING_LINE, WRITING_LINE };

#define MARK_FETCHING 1ull
#define MARK_DIRTY 2ull
#define MARK_OPEN 4ull
#define MARK_SEQUENCE 8ull /* one of it */
#define MARK_SEQUENCE_MASK 0xfffffff8ull
#define VERSION_BUSY 1u

/* The journal is what a successor needs to finish what a dead holder has begun. */
struct sim_lock {
    co_u64 holder;           /* {thread id:32 | its start time:32}; 0: free */
    co_u64 line;
    co_u32 doing;            /* enum sim_doing: the rest is valid unless NOTHING */
    co_u32 version;          /* that the device's line gets */
    uint8_t pad[40];
    co_u64 data[LINE_WORDS]; /* that the device's line gets */
};
_Static_assert(sizeof(struct sim_lock) == 128, "holder and journal on lines of their own");

struct sim_device {
    co_u64 magic;
    co_u64 bytes;            /* of the pool */
    co_u64 id;               /* random: tells this device from an earlier one of its name */
    co_u64 seed;
    co_u64 events;           /* lines a call, unless the opener says otherwise */
    co_u64 conflicts, conflict_offset;
    co_u64 dirty_invalidated, dirty_invalidated_offset;
    co_u64 flushed, lost;
    co_u64 lives[SIM_HOSTS]; /* caches that each host has had */
};
_Static_assert(sizeof(struct sim_device) <= KVP_PAGE, "one page");

struct sim_cache {
    co_u64 magic;
    co_u64 bytes;            /* of the pool */
    co_u64 id;               /* of the device */
    co_u64 host;
    co_u64 random;           /* state of the generator of events */
};

/* One process's view of one host's cache. */
struct kvp_sim {
    co_u64 *device;          /* the pool's bytes; where the mapping is, until a host is attached */
    co_u64 *image;           /* what the host sees; NULL until attached */
    co_u64 *marks;
    co_u32 *versions;
    struct sim_lock *cache_locks, *device_locks;
    struct sim_device *header;
    struct sim_cache *cache;
    uint8_t *tail, *cache_tail;
    uint64_t bytes, lines;
    uint64_t hot_lines;      /* lines at the front that events prefer */
    uint64_t events;
    uint32_t host;
    int cache_fd;            /* holds a shared flock while the host is in use */
    int is_named;            /* the device has its name; before that nobody else can be there */
    int is_cache_named;
    uint64_t base;           /* where the mapping is */
    char path[400];          /* of the device */
    co_u64 recent[RECENT];   /* lines last stored to, +1 */
    co_u64 recent_count;
    co_u64 loads, stores, lines_written, lines_written_clean, lines_invalidated, fences, evicted, dropped;
};

/* ---- simlock.c ---- */

/* Take a lock: 1 if its holder was found dead, so that the journal must be finished first; else 0. */
int kvp_sim_lock(struct sim_lock *lock);
static inline void kvp_sim_unlock(struct sim_lock *lock) { co_store(&lock->holder, 0); }
/* The table of what is mapped where. FULL: NOSPACE. */
int kvp_sim_enlist(struct kvp_sim *sim);
void kvp_sim_strike(struct kvp_sim *sim);
/* Whose memory is this? NULL: not simulated. */
struct kvp_sim *kvp_sim_find(const void *p);
/* Whose did this thread last find? For counting fences. */
struct kvp_sim *kvp_sim_last(void);

/* ---- sim.c ---- */

static inline uint64_t kvp_sim_mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}
/* The next number of the host's generator: all its processes draw from one sequence. */
uint64_t kvp_sim_random(struct kvp_sim *sim);
/* Read one line of the device, whole, and its version. */
uint32_t kvp_sim_read_line(struct kvp_sim *sim, uint64_t line, uint64_t data[LINE_WORDS]);
/* Finish what the dead have left in the locks of a cache that nobody uses. */
void kvp_sim_settle(struct kvp_sim *sim);
/* Write one dirty line to the device. */
void kvp_sim_flush(struct kvp_sim *sim, uint64_t line);

/* ---- simhost.c ---- */

/* Length of the file of a device of so many bytes. */
uint64_t kvp_sim_file_bytes(uint64_t bytes);
/* Length of the pool in a device's file. FOREIGN, TRUNCATED. */
int kvp_sim_pool_bytes(int fd, const char *path, uint64_t *bytes);
/* After the pool's bytes are mapped: the tail, new or found. */
int kvp_sim_open(const struct kvp_uri *uri, struct kvp_mapping *mapping, int is_new);
/* Before and after the device gets its name, or does not: the creator's cache shares its fate. */
int kvp_sim_name(struct kvp_mapping *mapping);
void kvp_sim_named(struct kvp_mapping *mapping, int status);
/* Before the mapping goes. */
void kvp_sim_close(struct kvp_mapping *mapping);
/* Remove the cache file of every host. */
void kvp_sim_unlink(const char *path);

#else

static inline uint64_t kvp_sim_file_bytes(uint64_t bytes) { return bytes; }
static inline int kvp_sim_pool_bytes(int fd, const char *path, uint64_t *bytes)
{
    (void)fd, (void)path, (void)bytes;
    return KVP_OK;
}
static inline int kvp_sim_open(const struct kvp_uri *uri, struct kvp_mapping *mapping, int is_new)
{
    (void)uri, (void)mapping, (void)is_new;
    return KVP_OK;
}
static inline int kvp_sim_name(struct kvp_mapping *mapping) { return (void)mapping, KVP_OK; }
static inline void kvp_sim_named(struct kvp_mapping *mapping, int status) { (void)mapping, (void)status; }
static inline void kvp_sim_close(struct kvp_mapping *mapping) { (void)mapping; }
static inline void kvp_sim_unlink(const char *path) { (void)path; }

#endif
#endif
