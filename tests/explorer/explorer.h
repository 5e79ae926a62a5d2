/* explorer.h -- what the code under test and the scenarios see of the explorer.
 *
 * The explorer runs C code that is written against words.h and enumerates what may happen to it: which worker takes the
 * next step, which store or flush is late, which cache line is evicted, dropped or fetched early, which worker or host
 * dies. One thread of the operating system runs everything; every choice is recorded, so that each run can be repeated.
 *
 * What is modelled
 *  - Stores of each worker pass a buffer in order (x86-TSO). Write-backs and invalidates may be late: they wait for
 *    older stores to the same line and for an older write fence, and for nothing else. A write fence orders later
 *    stores, write-backs and invalidates; no load waits for it. A read fence completes invalidates; it does not wait
 *    for stores. A full fence empties the buffer; a host fence, and each locked operation, empties it of stores (x86
 *    waits for write-backs and invalidates there, too; arm64 does not).
 *  - Each host has a write-back cache of 64-byte lines over non-coherent memory. Any dirty line may be evicted, any
 *    clean line dropped, any line fetched early, at any moment where that makes a difference.
 *  - A worker dies at any step; its host's cache lives on. A host dies at any step; each dirty line is then flushed
 *    or lost. Both cost a crash of the budget.
 * What is not: reordering of loads, hosts other than x86, partial line writes, device DMA.
 *
 * Rules for scenarios
 *  - All that threads share is in a region (ex_region) or in the oracle's state (ex_ghost). What one thread has for
 *    itself and keeps from setup to run is declared with ex_private: it is put back before each run.
 *  - A run must depend on nothing but the choices: no clock, no random number, no address from malloc in a value.
 *  - Every loop that waits calls ex_spin.
 */
#ifndef EXPLORER_H
#define EXPLORER_H
#include <stdint.h>

enum {
    EX_LINE = 64,
    EX_LINES = 16384, /* of all regions together; a line that no run touches costs nothing */
    EX_HOSTS = 5,
    EX_THREADS = 14,
    EX_GHOST_BYTES = 512,
};

/* ---- call sites ---------------------------------------------------------------------------------------
 * Each use of a macro of words.h is a site with a name FILE:LINE:KIND. A site that is mutated does nothing (a locked
 * operation is done in two steps that others can come between; EX_WEAK makes a full fence a write fence). */
enum ex_kind {
    EX_LOAD, EX_STORE, EX_CAS, EX_CHANGE, EX_WRITE_BACK, EX_INVALIDATE, EX_WRITE_FENCE, EX_READ_FENCE, EX_FULL_FENCE,
    EX_HOST_FENCE, EX_LINES_END, EX_LINES_NOTE, EX_STEP, EX_KINDS
};
enum ex_mutation { EX_AS_WRITTEN, EX_REMOVED, EX_WEAK };

struct ex_site {
    const char *file;
    int line;
    int kind;      /* enum ex_kind */
    int mutation;  /* enum ex_mutation */
    uint32_t id;   /* from 1; the same for the same binary */
    uint64_t passes;
    uint64_t reserved[4];
} __attribute__((aligned(64)));

/* The sites lie in a section of their own, so that the linker makes the list of all that are compiled in. */
#define EX_SITE(of_kind) \
    ({ \
        static struct ex_site ex_here __attribute__((section("ex_sites"), used)) = \
            {.file = __FILE__, .line = __LINE__, .kind = (of_kind)}; \
        &ex_here; \
    })

/* ---- operations: what the macros of explore_words.h are made of ---- */

uint64_t ex_load(const void *p, unsigned bytes, struct ex_site *site);
void ex_store(void *p, uint64_t value, unsigned bytes, struct ex_site *site);
int ex_cas(void *p, uint64_t *seen, uint64_t value, unsigned bytes, struct ex_site *site);
enum ex_change { EX_EXCHANGE, EX_ADD, EX_OR, EX_AND };
uint64_t ex_change(void *p, enum ex_change how, uint64_t value, unsigned bytes, struct ex_site *site);
void ex_write_back(const void *p, uint64_t bytes, struct ex_site *site);
void ex_invalidate(const void *p, uint64_t bytes, struct ex_site *site);
void ex_write_fence(struct ex_site *site);
void ex_read_fence(struct ex_site *site);
void ex_full_fence(struct ex_site *site);
void ex_host_fence(struct ex_site *site);

/* ---- a scenario ---- */

struct ex_scenario {
    const char *name;
    const char *what;     /* one line: what it explores */
    void (*setup)(void);  /* once: regions, threads, first words, by production code if it likes */
    void (*check)(void);  /* after each run, when every thread has ended; may be NULL */
    void (*died)(int thread); /* what the kernel does at the death of a worker, with ex_poke; may be NULL */
    /* Budgets that an exhaustive, and a bounded, run takes by default. */
    int crashes;
    int preemptions, events;
    double seconds;       /* that the exhaustive search takes here, roughly; 0: it does not finish, bounded only */
};

/* In setup. EX_COHERENT memory is host memory: only threads of `host` may touch it. */
enum ex_region_kind { EX_COHERENT, EX_NONCOHERENT };
void *ex_region(uint64_t bytes, enum ex_region_kind kind, int host);
void ex_private(void *p, uint64_t bytes);
/* Names in listings of runs: p[i] of `unit` bytes each is called name[i]. The latest declaration counts. */
void ex_label(const void *p, uint64_t bytes, uint64_t unit, const char *name);
/* The host has the lines of [p, p+bytes) in its cache, clean, from the start. */
void ex_warm(int host, const void *p, uint64_t bytes);
/* Write-backs of [p, p+bytes) are late whenever they may be, and take effect only when something waits for them. */
void ex_hold(const void *p, uint64_t bytes);
enum ex_flag {
    EX_CRASHABLE = 1,     /* the worker may die at any step */
    EX_HOST_CRASHABLE = 2, /* its host may die at any step */
    EX_ON_CRASH = 4,      /* starts once something has died */
    EX_LAST = 8,          /* starts when all others have ended and all buffers are empty, one after the other */
};
int ex_spawn(int host, void (*run)(void *argument), void *argument, unsigned flags);
/* Oracles that are on unless switched off in setup: no line is dirty in two hosts; nobody invalidates a line that its
 * own host has dirty. */
void ex_allow_two_writers(void);
void ex_allow_dirty_invalidate(void);
/* Private memory that the code under test allocates: zeroed, put back before each run. */
void *ex_allocate(uint64_t bytes);

/* In threads; in setup the thread is 0. */
int ex_is_running(void);
int ex_me(void);
int ex_my_host(void);
/* A place where others may come between, for what the scenario itself does: "use the payload". */
#define ex_step() ex_step_at(EX_SITE(EX_STEP))
void ex_step_at(struct ex_site *site);
/* Nothing more to do until somebody has changed memory. */
#define ex_spin() ex_spin_at(EX_SITE(EX_STEP))
void ex_spin_at(struct ex_site *site);
/* Oracle state has changed for which others spin. */
void ex_wake(void);
/* The thread's private state is a function of its ex_private and ex_allocate memory and of `local`: histories that
 * lead to the same are one state from here on. `local` must tell apart the places where this is called. */
void ex_merge(uint64_t local);
/* Fencing: host dies now, by order; each of its dirty lines is flushed or lost. No crash of the budget. */
void ex_reset_host(int host);
unsigned ex_choose(unsigned n);
/* In `died`: store to memory of a thread's host at once. */
void ex_poke(int thread, void *p, uint64_t value, unsigned bytes);

/* Oracle state: hashed as a part of each state; at the start of each run as setup left it. Updates belong to the step before. */
extern uint8_t ex_ghost[EX_GHOST_BYTES];
/* Bits of threads, and of hosts << 16, that have died. For oracles only. */
uint32_t ex_died(void);

/* In check, and in oracles: memory as it is on the device, and as a host sees it. Setup and check also use the
 * operations; they act at once, in check through the cache of the host of ex_view. */
uint64_t ex_memory_word(const void *p);
uint64_t ex_host_word(int host, const void *p);
void ex_view(int host);
/* Every dirty line is written back: what is on the device now is what stays. */
void ex_settle(void);

void ex_fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
#define EX_CHECK(condition, ...) do { if (!(condition)) ex_fail(__VA_ARGS__); } while (0)

extern const struct ex_scenario *const ex_scenarios[];

#endif
