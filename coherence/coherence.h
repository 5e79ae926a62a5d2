/* coherence.h -- the bottom layer: shared memory as a set of words, lines and participants.
 *
 * Caveats, first.
 *  - Nothing above this folder touches shared memory except through the words, copies and logs declared
 *    here (tests/test_tidy.py greps for anything else).
 *  - A process that forks must open the pool again in the child: the child owns no worker slot. Every
 *    entry point above answers KVP_E_FORKED there.
 *  - A mapping is fixed in place from open to unmap. Nothing that a reader can hold is moved or unmapped.
 *  - The core is compiled once per mode (words.h). A build of one mode refuses images of another.
 *
 * Glossary.
 *  host         a set of processes whose caches the hardware keeps coherent (here: the machine)
 *  worker       one opened pool handle: at most one writer thread at a time, one slot in the pool
 *  line         64 bytes, the unit that a cache writes back or drops
 *  owner        the one host that may write a line; only its workers may CAS words on it
 *  publish      make stores visible: write back, then fence
 *  refresh      make sure that later loads see what others published: invalidate, then fence
 *  incarnation  counts the uses of a slot; a record of an old incarnation means nothing
 *
 * Contract of every function here: pointers are non-NULL unless said; sizes and offsets are in bytes;
 * 0 or a count is success, a negative kvp_status is failure and kvp_error_detail() then says, for the
 * calling thread, what was wrong and what to do. No function waits for a live process; the keeper, and leaving,
 * may wait up to two seconds for the last threads of a dead one.
 */
#ifndef KVP_COHERENCE_H
#define KVP_COHERENCE_H
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "coherence/words.h"

/* cdef: begin */
enum kvp_status {
    KVP_OK = 0,
    /* the world outside */
    KVP_E_INVALID = -1,    /* an argument, a size or a URI is not usable */
    KVP_E_NOSPACE = -2,    /* the memory cannot be backed now */
    KVP_E_EXISTS = -3,     /* the name is taken */
    KVP_E_NOTFOUND = -4,   /* no pool of this name */
    KVP_E_PERMISSION = -5, /* the operating system refused */
    KVP_E_SYSTEM = -6,     /* a system call failed for another reason */
    /* the image */
    KVP_E_NOTREADY = -10,  /* created but not formatted to the end */
    KVP_E_FOREIGN = -11,   /* not a kvpool image */
    KVP_E_OLDER = -12,     /* written by an older format */
    KVP_E_NEWER = -13,     /* written by a newer format, or needs a feature unknown here */
    KVP_E_LAYOUT = -14,    /* built with other sizes or for another machine */
    KVP_E_CORRUPT = -15,   /* a checksum or an invariant is broken */
    KVP_E_TRUNCATED = -16, /* the memory is shorter than the image says */
    KVP_E_REPLACED = -17,  /* the pool was removed or made anew under this name */
    KVP_E_BUSY = -18,      /* live workers use it */
    KVP_E_MODE = -19,      /* made for another mode than this build's */
    /* the handle */
    KVP_E_CLOSED = -20,    /* the handle is closed */
    KVP_E_FORKED = -21,    /* the handle belongs to the parent process */
    KVP_E_NOSLOT = -22,    /* every worker slot is taken by a live process */
    KVP_E_HOST = -23,      /* no such host, or its identity is another machine's */
    KVP_E_FENCED = -24,    /* this host was declared lost: what it owned is another's */
    KVP_E_UNQUALIFIED = -25, /* nobody has shown that hosts may share this device without coherence */
    /* blocks */
    KVP_E_FULL = -30,      /* no block is free and nothing may be evicted */
    KVP_E_RANGE = -31,     /* no such class or block number */
    KVP_E_STALE = -32,     /* the block was freed or reused since the reference was made */
    KVP_E_NOTOWNED = -33,  /* this worker did not reserve the block: double free or publish, or foreign */
    KVP_E_PINS = -34,      /* every pin slot of this worker is in use */
};

/* One static sentence for a status; never NULL, also for an unknown one. */
const char *kvp_strerror(int status);
/* What the last failing call of this thread adds: numbers, names, what to do. "" if nothing. */
const char *kvp_error_detail(void);
/* cdef: end */

#define KVP_LINE 64u
#define KVP_PAGE 4096u
#define KVP_HUGE_PAGE (2u << 20)

/* Record the detail of a failure and return its status; printf-like. */
int kvp_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- words: words.h ---- */

/* cdef: begin */
/* What writes lines back and drops them here: "clwb+clflushopt", "clwb+clflush", "clflushopt", "clflush",
 * "dc cvac+dc civac"; in the modes without such instructions "none", "simulated" or "explored". */
const char *kvp_line_instructions(void);
/* For tests and benchmarks, before there are threads: use this set. INVALID if the CPU lacks it. */
int kvp_line_choose(const char *instructions);
/* For benchmarks: write lines back, or drop them, and wait until that is done. Whoever publishes or refreshes so many lines
 * cannot do with less. */
void kvp_lines_write_back(const void *p, uint64_t bytes);
void kvp_lines_invalidate(const void *p, uint64_t bytes);
/* The most that the hardware moves at once. Above 64 two hosts could write one unit: no place for mode noncoherent. */
uint32_t kvp_line_bytes(void);
/* cdef: end */

/* The empty asm is an effect: without it gcc takes a function that only prefetches for pure and drops its calls. */
#define kvp_prefetch(p) do { __builtin_prefetch((p), 0, 3); __asm__ volatile(""); } while (0)
/* The same of a line that will be written, so that nobody else has it then. The builtin asks for less on x86-64. */
#ifdef __x86_64__
#define kvp_prefetch_to_store(p) __asm__ volatile("prefetchw %0" : : "m"(*(const char *)(p)))
#else
#define kvp_prefetch_to_store(p) do { __builtin_prefetch((p), 1, 3); __asm__ volatile(""); } while (0)
#endif
/* In line however many callers it has: what a hot loop does for each block. */
#define kvp_inline inline __attribute__((always_inline))

/* Lines to write back, each once although several of its words were stored one by one: what is noted is written back when
 * another line is noted, or at the end. Nothing in mode coherent. */
struct kvp_lines {
    const uint8_t *line;
};
static inline void kvp_lines_end(struct kvp_lines *lines)
{
    if (lines->line)
        nc_write_back(lines->line, KVP_LINE);
    lines->line = NULL;
}
static inline void kvp_lines_note(struct kvp_lines *lines, const void *p)
{
    const uint8_t *line = (const uint8_t *)p - ((uintptr_t)p & (KVP_LINE - 1));

    if (lines->line != line)
        kvp_lines_end(lines);
    lines->line = line;
}

/* Copy `bytes` into / out of the pool, with non-temporal stores from 4 KiB on (a recycled block, and the buffer of an
 * engine, are cold: a cached copy would read the target first and push other things out). Complete before return; what is
 * copied in is also on its way to the device, and there once the caller's next nc_write_fence has passed. What is copied
 * out is what this host sees: the caller has invalidated it. Ranges must not overlap. */
void kvp_copy_in(void *pool, const void *from, uint64_t bytes);
/* cdef: begin */
void kvp_copy_out(void *to, const void *pool, uint64_t bytes);
/* cdef: end */

/* ---- crash points: named places where a test kills the process (tests/test_crash.py) ------------------
 * In ordinary builds they are nothing. With -DKVP_CRASH_POINTS, kvp_crash_arm(name, n) makes the n-th pass
 * through `name` a SIGKILL; name "" counts every point. kvp_crash_visit: call this at each pass, before it counts. */
#ifdef KVP_CRASH_POINTS
void kvp_crash_point(const char *name);
void kvp_crash_arm(const char *name, uint64_t nth);
void kvp_crash_visit(void (*visit)(const char *name));
uint64_t kvp_crash_passed(void);
#define KVP_CRASH_POINT(name) kvp_crash_point(name)
#else
#define KVP_CRASH_POINT(name) ((void)0)
#endif

/* ---- mapping -----------------------------------------------------------------------------------------
 * URI            memory                                               how another process opens it
 * shm:NAME       /dev/shm/kvpool.UID.NAME                             shm:NAME (?uid=N for another user's)
 * file:PATH      a file (a DAX file system included)                  file:PATH
 * memfd:         anonymous; lives as long as somebody has it open     memfd:FD (inherited), memfd:PID/FD?inode=N
 * hugetlb:SIZE   anonymous, huge pages of SIZE (2MiB, 1GiB)           as memfd:
 * dax:/dev/daxX.Y  the device                                         dax:/dev/daxX.Y
 * sim:NAME       /dev/shm/kvpool.UID.sim.NAME, mode sim only          sim:NAME, then kvp_mapping_attach
 * Options: ?mode=0660 permissions (default 0600), ?node=N bind to a NUMA node, ?interleave=0,1 spread;
 * ?hugepage=2M pages of 2 MiB or NOSPACE; of sim: ?seed=N, ?events=N. Nodes need memory that the kernel gives for the pool
 * (shm:, memfd:, hugetlb:, a file on tmpfs): INVALID for a device and for a file of another file system.
 *
 * Creating backs every byte (fallocate, then populate): memory that is not there is KVP_E_NOSPACE with the
 * missing byte count, never a SIGBUS later. shm: and file: get their name only in kvp_mapping_commit, so
 * that nobody opens a half-made pool and a creator that dies leaves nothing behind (on a file system without
 * O_TMPFILE: a file NAME.PID.new).
 */
enum kvp_mapping_kind { KVP_MAP_SHM, KVP_MAP_FILE, KVP_MAP_MEMFD, KVP_MAP_HUGETLB, KVP_MAP_DAX, KVP_MAP_SIM };

struct kvp_mapping {
    uint8_t *base;       /* 2 MiB-aligned, so that huge pages can be mapped; NULL: not mapped */
    uint64_t bytes;      /* mapped length */
    uint64_t page_bytes; /* unit of the backing: 4 KiB, or the huge page or device alignment */
    int fd;              /* close-on-exec; -1 once closed */
    int kind;            /* enum kvp_mapping_kind */
    struct kvp_sim *sim; /* of sim:, private to this folder; NULL else */
    int demands_huge;    /* hugepage=2M: 2 MiB pages or none */
    int is_spread;       /* interleave=: pages stay where they were put */
    int is_temporary;    /* it has another name until kvp_mapping_commit: no O_TMPFILE there */
    char uri[512];       /* what another process opens */
    char path[400];      /* of shm:, sim:, file: and dax:; "" else */
};

/* Make `bytes` (rounded up to page_bytes) of memory. Errors: INVALID (URI, size), EXISTS, NOSPACE,
 * PERMISSION, SYSTEM. On failure nothing is left. */
int kvp_mapping_create(const char *uri, uint64_t bytes, struct kvp_mapping *out);
/* Back [offset, offset+bytes) with memory now, with up to `threads` threads. NOSPACE, SYSTEM. */
int kvp_mapping_populate(const struct kvp_mapping *mapping, uint64_t offset, uint64_t bytes, unsigned threads);
/* Give shm:, sim: and file: their name. EXISTS if somebody else was first. */
int kvp_mapping_commit(struct kvp_mapping *mapping);
/* Map what exists. Errors: INVALID, NOTFOUND, PERMISSION, SYSTEM. */
int kvp_mapping_open(const char *uri, struct kvp_mapping *out);
/* Say which host this process belongs to: from here on the mapping is the memory as that host sees it. Nothing to do, and
 * OK, for all kinds but sim:. There, until then, it is the device itself (so that a superblock can be looked at, or a new
 * image be written before it is committed); then the image of the host's cache takes its place, at the same address.
 * Once for each mapping; several mappings of one process may be different hosts. INVALID; NOSPACE when /dev/shm
 * has no room for the image; BUSY when processes still use what an earlier pool of this name has left. */
int kvp_mapping_attach(struct kvp_mapping *mapping, uint32_t host);
/* Ask for 2 MiB pages behind the whole mapping, where its pages may move: best effort, or with hugepage= NOSPACE. */
int kvp_mapping_collapse(const struct kvp_mapping *mapping);
/* Private memory, all zeros, for a table that is looked at all over: on 2 MiB pages if it is large and they can be had. NULL. */
void *kvp_table_new(uint64_t bytes);
void kvp_table_free(void *table, uint64_t bytes);
/* Unmap and close. The memory itself stays. */
void kvp_mapping_close(struct kvp_mapping *mapping);
/* Remove the name of shm:, sim: (with all caches) or file:. NOTFOUND, PERMISSION; INVALID for kinds that have no name. */
int kvp_mapping_unlink(const char *uri);

/* ---- the simulator -----------------------------------------------------------------------------------
 * Mode sim: any number of hosts on one machine that see the pool only through caches of their own.
 *
 * Caveats.
 *  - The seed repeats a run only as far as the operating system does: with one process and one thread on each host.
 *    All processes of a host draw from one generator.
 *  - A write-back has arrived when nc_write_back returns and an invalidate has taken effect when it returns: what a missing
 *    fence breaks is not seen here but by the explorer, what a missing write-back or invalidate breaks is.
 *  - A process that is stopped (SIGSTOP) inside a store or a write-back holds a lock for a group of lines. Its own host
 *    waits for it there, and rarely another host. One that is killed holds nobody up.
 *  - Processes in different PID namespaces must not share a simulated pool: the dead would not be told from the living.
 *  - A forked child keeps its parent's host in use until it execs, closes the mapping or ends.
 *  - kvp_pool_remove and others that map the device without attaching store to it past all caches.
 *
 * The device is a file; each host's cache is a file, made by the first process that attaches as that host and shared by
 * all of them. It lives on when they are killed: a process is not a host. kvp_sim_lose_host ends it.
 *
 *  image        what a host sees; of each line it always has some content
 *  dirty        stored to since it was last written back, whatever the value: a silent store counts, and so does a CAS
 *               that fails. A dirty line reaches the device when it is written back or, at a moment of the generator's
 *               choice, evicted. A clean line is never written
 *  fetch        an invalidated line takes the device's content at once, the oldest that a machine may show after it
 *  conflict     a dirty line is written over something that another host has written since this one fetched it: two
 *               writers of one line, or a writer that never invalidated. Must stay 0
 */
/* cdef: begin */
struct kvp_sim_counts {
    /* of this handle's process and host, since it attached */
    uint64_t loads;                    /* words loaded */
    uint64_t stores;                   /* words stored, failed CAS included */
    uint64_t lines_written;            /* written back because asked */
    uint64_t lines_written_clean;      /* asked, but clean: nothing moved */
    uint64_t lines_invalidated;
    uint64_t fences;                   /* of threads whose last word or line was of this handle */
    uint64_t evicted, dropped;         /* dirty and clean lines that events met */
    /* of the pool, since it was made; an offset is that of the last one */
    uint64_t conflicts, conflict_offset;
    uint64_t dirty_invalidated, dirty_invalidated_offset; /* written back because an invalidate met them dirty */
    uint64_t flushed, lost;            /* dirty lines of lost hosts */
};

/* A host is reset: each of its dirty lines has reached the device in time or has not, as the generator says, and the
 * host's next process starts with a new cache. All its processes are dead, or BUSY. Returns how many lines were lost.
 * NOTFOUND: no pool of this name, or the host has never been there; INVALID. */
int64_t kvp_sim_lose_host(const char *uri, uint32_t host);
/* cdef: end */

/* INVALID, and zeros, unless it is a simulated pool. */
int kvp_sim_counts_read(const struct kvp_mapping *mapping, struct kvp_sim_counts *out);
#if KVP_MODE == KVP_SIM
/* What caches do by themselves: some lines of the generator's choice (events=N, 4 unless said otherwise; 0: none) are
 * evicted if dirty, fetched if clean. Called on entry to each call of the layers above. Nothing before attach. */
void kvp_sim_events(const struct kvp_mapping *mapping);
/* The first `bytes` of the pool are where events should look, for they are few and matter: words, not payload. */
void kvp_sim_hot(const struct kvp_mapping *mapping, uint64_t bytes);
void kvp_sim_copy_in(void *pool, const void *from, uint64_t bytes); /* of kvp_copy_in */
#else
#define kvp_sim_events(mapping) ((void)(mapping))
#define kvp_sim_hot(mapping, bytes) ((void)(mapping), (void)(bytes))
#endif

/* ---- host memory -------------------------------------------------------------------------------------
 * Modes with several hosts: memory that the processes of one host share and other hosts do not see. co_ words live here.
 * It is /dev/shm/kvpool.UID.host.UUID.HOST, found by the pool's identity and the number of the host.
 *
 * Caveats.
 *  - It belongs to a user: processes of two users on one machine would each have host memory of their own and so be two
 *    hosts that claim one identity. They must use different host numbers, or run as one user.
 *  - In mode sim it outlives kvp_sim_lose_host: who resets a host removes its memory too.
 */
/* Map `bytes` (rounded up to pages) of it, made if absent, and hold its lock until kvp_host_memory_unlock; a process
 * that dies holds it no more. *fresh is 1 if it was made by this call and is zero. One that was made before may still be
 * unfinished, if its maker died: keep a word in it that says that it is ready, and start over, under the lock, if it does
 * not. kvp_mapping_close unmaps it (and unlocks it). NOSPACE with the missing byte count; BUSY when somebody holds the
 * lock for ten seconds; INVALID (another size); PERMISSION (another user's); SYSTEM. */
int kvp_host_memory_open(const uint8_t uuid[16], uint32_t host, uint64_t bytes, struct kvp_mapping *out, int *fresh);
void kvp_host_memory_unlock(struct kvp_mapping *mapping);
/* Map what is there, to look at it, without its lock. NOTFOUND; INVALID (another size); SYSTEM. */
int kvp_host_memory_look(const uint8_t uuid[16], uint32_t host, uint64_t bytes, struct kvp_mapping *out);
/* Remove the name; who has it mapped keeps it. NOTFOUND, PERMISSION. */
int kvp_host_memory_remove(const uint8_t uuid[16], uint32_t host);

/* ---- membership --------------------------------------------------------------------------------------
 * One slot per worker. `lock` is a robust futex word that the worker's keeper thread holds from join to
 * leave: the kernel sets FUTEX_OWNER_DIED in it within microseconds of the death, whatever is mapped. That
 * breaks locks. Blocks are reused only after a pidfd confirms that no thread of the process runs any more, or
 * after a grace period where none can (another PID namespace: 1 s; a process that called exec, or hangs in the
 * kernel: 2 s).
 *
 * Recovery takes the dead worker's lock over by CAS, so there is one recoverer at a time, and one that dies
 * in turn is reported in the same word.
 *
 * Invariants: lock == 0  <=>  the slot is free, and then no word, pin or segment names it;
 *             incarnation grows with each claim;
 *             a slot whose lock says OWNER_DIED is not used again before its recovery has ended.
 */
#define KVP_WORKERS_MAX 64u
#define KVP_COUNTERS 32u
#define KVP_NO_WORKER 0xffffffffu

struct kvp_slot {
    co_u32 lock;         /* 0, or the keeper's thread id | FUTEX_WAITERS | FUTEX_OWNER_DIED */
    co_u32 reserved0;    /* zero */
    co_u64 incarnation;  /* low 32 bits name this use of the slot in pins */
    co_u64 pid;          /* in the worker's PID namespace */
    co_u64 start_time;   /* clock ticks since boot, field 22 of /proc/PID/stat: makes the PID unique */
    co_u64 boot;         /* hash of the kernel's boot id: after a reboot every slot is dead */
    co_u64 pid_space;    /* inode of the PID namespace */
    co_u64 reserved1;    /* zero */
    co_u64 joined;       /* CLOCK_REALTIME at join, nanoseconds */
    co_u64 busy;         /* odd while the worker, or who recovers it, may change words of blocks; many hosts only */
    co_u64 reserved2[7]; /* zero */
    co_u64 counter[KVP_COUNTERS]; /* statistics, written by this worker alone, never reset */
};
_Static_assert(offsetof(struct kvp_slot, counter) == 128, "counters start a line");
_Static_assert(sizeof(struct kvp_slot) == 128 + 8 * KVP_COUNTERS, "slot layout");

/* A keeper: the small thread that each handle carries. It holds the lock, sleeps on the locks of the
 * peers, and calls back when one dies. Callbacks run on the keeper's thread. */
struct kvp_keeper {
    struct kvp_slot *slots;
    uint32_t workers;                                   /* slots in the pool */
    uint32_t self;                                      /* my slot; KVP_NO_WORKER before join */
    void *context;
    void (*on_death)(void *context, uint32_t worker);   /* recover it: its lock is held, nobody else does */
    void (*on_tick)(void *context);                     /* at least every KVP_TICK_MS */
    int (*is_current)(void *context);                   /* 0: the slots are another image's now, touch them no more */
    pthread_t thread;
    co_u32 state;                                       /* private futex: starting, running, leaving, left */
    int status;                                         /* of the join */
    void *robust;                                       /* private to keeper.c */
};
#define KVP_TICK_MS 100

/* Claim a free slot, or the slot of a dead worker after recovering it, and start the keeper. NOSLOT when every
 * slot is held by a live process; SYSTEM. */
int kvp_keeper_start(struct kvp_keeper *keeper);
/* Leave: the slot is free afterwards. The caller has given back all that it owned. */
void kvp_keeper_stop(struct kvp_keeper *keeper);
/* Is the worker's death known? One load; no system call. */
int kvp_worker_dead(const struct kvp_slot *slot);
/* Is a worker that is known dead gone to its last thread? Waits up to timeout_ms for it. */
int kvp_worker_gone(const struct kvp_slot *slot, int timeout_ms);
/* Hashes of the kernel's boot id, and of what names this machine through reboots; never 0. */
uint64_t kvp_boot_id(void);
uint64_t kvp_machine_id(void);
/* Changes in a child after fork(); compare with the value at open. */
uint64_t kvp_fork_count(void);

/* ---- gate ---------------------------------------------------------------------------------------------
 * Processes of one host sleep at it until something is published. Who publishes looks whether anybody has said that he
 * sleeps: a load, and no system call if nobody has. Nothing rests on it: sleepers look again after a while.
 */
struct kvp_gate {
    co_u32 turn;         /* changes each time that sleepers are woken: what they sleep on */
    co_u32 sleepers;     /* 1: somebody sleeps, or is about to */
};

/* Say that we are about to sleep. Look after it, and then sleep on what this returns. */
uint32_t kvp_gate_enter(struct kvp_gate *gate);
/* Sleep until somebody publishes, at most so long. 0: a signal came. */
int kvp_gate_sleep(struct kvp_gate *gate, uint32_t turn, uint64_t ns);
void kvp_gate_wake(struct kvp_gate *gate);
/* Something was published. */
static inline void kvp_gate_open(struct kvp_gate *gate)
{
    co_known_fence(); /* Dekker with kvp_gate_enter: the publication is visible before we look who sleeps */
    if (co_load32(&gate->sleepers))
        kvp_gate_wake(gate);
}

/* ---- hosts -------------------------------------------------------------------------------------------
 * One slot per host, in the pool, written by that host alone. A host is present while its `beat` changes: each of its
 * workers' keepers sees to it. Others watch the beats and measure on their own CLOCK_MONOTONIC how long one has stood
 * still, so no clocks are compared, set or trusted: a step of a wall clock changes nothing, and an observer that was
 * suspended has not counted that time. A lease that is said to have lapsed has been silent for at least
 * lease_ms - KVP_TICK_MS by the observer's clock, and a silent one is noticed within lease_ms + 2 * KVP_TICK_MS.
 *
 * A lapsed lease proves nothing: the host may wake up. Its blocks stay readable, its pins count, and nothing of it is
 * reused. Only a *fence*, the word of a site's power or fabric control that the host has been reset and that its stores
 * reach the pool no more, ends that: it names one adopter, which writes the lost incarnation into its own row `adopted`.
 * A host whose own beat is late looks for its incarnation there before it publishes.
 *
 * Invariants: incarnation grows with each start of the host, and is in memory before anything else of that start;
 *             adopted[h] never names a later incarnation than host h has.
 */
#define KVP_HOSTS_MAX 64u

struct kvp_host {
    nc_u64 incarnation;  /* 0: never joined */
    nc_u64 beat;         /* changes while a worker of the host runs */
    nc_u64 machine;      /* hash of the machine's id; in mode sim, of the host's number */
    nc_u64 boot;         /* hash of its boot id: another one is a reset machine */
    nc_u64 left;         /* 1: its last worker left in order and wrote everything back */
    nc_u64 tables;       /* pins and logs of workers [0, tables) may be in use; only grows */
    nc_u64 wanted;       /* segments that it asks for */
    nc_u64 claim;        /* random: who won, should two machines claim this identity at once */
    nc_u64 adopted[KVP_HOSTS_MAX]; /* incarnation of each host that this one adopts << 2 | enum kvp_adoption; or 0 */
};
_Static_assert(offsetof(struct kvp_host, adopted) == KVP_LINE, "what is watched is one line");
_Static_assert(sizeof(struct kvp_host) == KVP_LINE + 8 * KVP_HOSTS_MAX, "host slot layout");

/* An adoption and a restart of the same host may come at one moment. The adopter writes its intent and then looks whether
 * the incarnation is still the fenced one; the host writes its new incarnation and then looks for intents. Who adopts withdraws
 * if the host is back; a host that finds an intent owns nothing of its former life until that is withdrawn or complete. */
enum kvp_adoption {
    KVP_ADOPTION_NONE,
    KVP_ADOPTION_INTENT,    /* it may yet be withdrawn */
    KVP_ADOPTION_DECIDED,   /* the host's segments are being taken */
    KVP_ADOPTION_COMPLETE,  /* none is left, and the adopter's row says so in memory */
};

/* What the workers of one host have seen of another; in their host's own memory. */
struct kvp_sight {
    co_u64 beat;         /* last seen */
    co_u64 since;        /* CLOCK_MONOTONIC when it was first seen, nanoseconds; 0: not looked at yet */
    co_u64 incarnation;  /* as last seen */
    co_u64 fenced;       /* highest incarnation that somebody has adopted */
};

/* cdef: begin */
enum kvp_host_state {
    KVP_HOST_FREE,       /* nobody has been this host yet */
    KVP_HOST_PRESENT,    /* its beat changes */
    KVP_HOST_LAPSED,     /* silent for longer than the lease: readable, not reusable */
    KVP_HOST_FENCED,     /* adopted: what it owned is the adopter's */
    KVP_HOST_LEFT,       /* its last worker left in order */
};
/* cdef: end */

/* A worker's view of the hosts. */
struct kvp_roster {
    struct kvp_host *hosts;     /* in the pool */
    struct kvp_sight *sights;   /* in host memory */
    co_u64 *beaten;             /* in host memory: CLOCK_BOOTTIME of the last beat, nanoseconds */
    uint64_t incarnation;       /* of our host */
    uint64_t lease_ns;
    uint32_t count, self;
    int yields;                 /* set by kvp_host_claim: an earlier life of ours is being adopted */
};

/* Become host `self` under a new incarnation. The caller holds the lock of the host's memory, which is new. HOST: the
 * identity belongs to another machine that is alive or has not been fenced. May wait for one lease to find out. */
int kvp_host_claim(struct kvp_roster *roster);
/* Beat, unless another worker of the host has just done so. */
void kvp_host_beat(struct kvp_roster *roster);
/* Look at the beats and adoptions of all. */
void kvp_host_watch(struct kvp_roster *roster);
enum kvp_host_state kvp_host_state(const struct kvp_roster *roster, uint32_t host);
/* May we still act as this host? One clock reading if our beat is on time, else a look at all adoptions. OK, FENCED. */
int kvp_host_assure(struct kvp_roster *roster);
/* The last worker leaves; everything is written back. */
void kvp_host_leave(struct kvp_roster *roster);
/* Is this incarnation of a host known to be fenced? Its pins count no more. */
int kvp_host_fenced(const struct kvp_roster *roster, uint32_t host, uint64_t incarnation);
/* Write down that we adopt an incarnation of a host: it was reset, and the site has named us. 1: what it owned may be taken;
 * 0: the host has come back meanwhile, and nothing has happened. */
int kvp_host_adopt(struct kvp_roster *roster, uint32_t host, uint64_t incarnation);
/* An adoption that we have written down and a death may have interrupted: 1 if it is decided and not complete. */
int kvp_host_adopting(struct kvp_roster *roster, uint32_t host);
/* Nothing is left to take. */
void kvp_host_adopted(struct kvp_roster *roster, uint32_t host);
/* Does a host that is not lost itself adopt an earlier life of ours at this moment? Refreshes. */
int kvp_host_yields(struct kvp_roster *roster);

/* ---- log ---------------------------------------------------------------------------------------------
 * One ring of 32-byte records per worker, written by that worker alone; a record never crosses a line.
 * Readers keep their own position and are told when they were lapped. A torn record is never returned:
 * the header is read before and after the words. What a reader has not refreshed reads as not written yet.
 */
struct kvp_record {
    nc_u64 header; /* sequence << 8 | kind << 1 | committed; the first record is sequence 1 */
    nc_u64 word[3];
};
_Static_assert(sizeof(struct kvp_record) == 32, "two records a line");

/* Append as record `sequence` (1, 2, 3, ...) of the ring of `records` (a power of two); kind is 0 to 127. */
void kvp_log_append(struct kvp_record *ring, uint64_t records, uint64_t sequence, unsigned kind, const uint64_t word[3]);
/* The same of many: the caller ends `lines`. Until then other hosts may not see it. */
void kvp_log_append_to(struct kvp_record *ring, uint64_t records, uint64_t sequence, unsigned kind, const uint64_t word[3],
                       struct kvp_lines *lines);
/* Invalidate the records from `sequence` on, n of them; a fence of the caller's follows before they are read. */
void kvp_log_refresh(const struct kvp_record *ring, uint64_t records, uint64_t sequence, uint64_t n);
/* Read record `sequence`: 1 read, 0 not written yet, -1 lapped (*newest gets the sequence that is there). */
int kvp_log_read(const struct kvp_record *ring, uint64_t records, uint64_t sequence, unsigned *kind, uint64_t word[3],
                 uint64_t *newest);
/* The sequence of the newest committed record, 0 for none: where a successor on this slot goes on. */
uint64_t kvp_log_newest(const struct kvp_record *ring, uint64_t records);

#endif
