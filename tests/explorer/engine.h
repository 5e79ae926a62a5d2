/* engine.h -- private to the explorer: the simulated machine, its threads, and the choices of a run. */
#ifndef ENGINE_H
#define ENGINE_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "explorer.h"

enum {
    WORDS = EX_LINES * EX_LINE / 8,
    BUFFER = 64,            /* entries of a store buffer; a full one empties itself */
    STACK_BYTES = 64 << 10,
    STEPS_MAX = 100000,     /* of a run: beyond it something does not end */
    TRAIL_MAX = 1 << 16,
    UNBOUNDED = 99,         /* as a budget of preemptions or events: they are not counted, so that more states are equal */
    CHECKER = 15,           /* what reads memory after the run, as if it were a thread */
};

/* ---- threads ---- */

enum entry_kind { STORE, WRITE_BACK, INVALIDATE, FENCE };
struct entry {
    uint32_t at;            /* byte in ex_memory */
    uint8_t kind, bytes;
    uint64_t value;
};

enum thread_state { WAITS_FOR_CRASH, WAITS_FOR_ALL, READY, DONE, DEAD };
struct thread {
    void *context;          /* where it stopped: a stack pointer, or a ucontext_t */
    enum thread_state state, first_state;
    int host;
    int spinning;
    unsigned flags;
    uint16_t before;        /* threads all of whose steps precede any of this one's */
    int buffered;
    struct entry buffer[BUFFER];
    uint64_t history;       /* hash of all it has read, and where it is: its private state follows from that */
    void (*run)(void *argument);
    void *argument;
    uint32_t heap_used;     /* of its own part of the private heap */
};

/* ---- memory ---- */

/* Who has touched a word or a line in this run, and what is known from all runs so far: is the order of touches by
 * different threads open (racy), or fixed by a death between them (deathly)? Steps on words that are neither need no
 * choice: every order of them leads to the same. A run that finds a new one is void, and the search starts again. */
struct use {
    uint16_t readers, writers;
    uint8_t racy, deathly;
};
struct line {
    struct use use;
    uint8_t touched;        /* in this run */
    uint8_t held;           /* by ex_hold */
    uint8_t remote;         /* known: more than one host touches it and somebody writes it. Others need no cache */
    uint8_t hosts;          /* that touched it in this run */
    uint8_t used;           /* known: somebody loads or stores a word of it. Elsewhere write-backs have nothing to do */
    int8_t home;            /* the host whose memory it is; -1: non-coherent memory; -2: no region */
};
struct copy {               /* of a line, in the cache of a host */
    uint8_t valid, dirty;
    uint64_t hash;
    uint64_t word[8];
};

extern uint8_t ex_memory[EX_LINES * EX_LINE];
extern struct line ex_line[EX_LINES];
extern struct use ex_word[WORDS];
extern struct copy ex_cache[EX_HOSTS][EX_LINES];

/* ---- the machine ---- */

enum phase { SETUP, RUN, CHECK };
struct budgets {
    int preemptions, events, crashes;
};
struct engine {
    enum phase phase;
    struct thread thread[EX_THREADS];
    int threads;
    int current;
    int view;               /* host of the checker */
    uint32_t died;          /* threads, and hosts << 16 */
    int steps;
    int idle;               /* every spinner has looked again since memory last changed */
    struct budgets limit, left;
    int two_writers, dirty_invalidate; /* allowed */
    int lazy;               /* as in the request */
    void (*died_hook)(int thread);
    uint8_t resets;         /* known: hosts that are reset by order, as bits */
    uint8_t death_shows;    /* known: a living thread may see whether another one is dead */
    int learned;            /* this run is void */
    int pruned, failed;
    int verbose;
    int hashing;
    uint64_t hash;          /* of memory and caches, kept up to date */
    uint32_t lines;         /* in regions */
    uint32_t pristine_bytes;
    uint32_t touched[EX_LINES];
    uint32_t touched_count;
    char message[240];
};
extern struct engine ex;

static inline uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
    return hash ^ hash >> 29;
}

/* A hash of "value at place" such that the sum over all places is a hash of the whole. */
static inline uint64_t placed(uint64_t place, uint64_t value)
{
    uint64_t hash = mix(place * 0xbf58476d1ce4e5b9ull + 1, value);

    hash *= 0x94d049bb133111ebull;
    return hash ^ hash >> 32;
}

static inline struct thread *current(void) { return &ex.thread[ex.current]; }
static inline int bounded(void) { return ex.limit.preemptions < UNBOUNDED; }

/* memory.c: how lines move between memory and caches */
uint32_t ex_offset(const void *p);
int ex_is_shared(const void *p);
void ex_touch(uint32_t at, int writes);
void ex_touch_as(int thread, uint32_t at, int writes);
uint64_t ex_read(int host, uint32_t at, unsigned bytes);
void ex_write(int host, uint32_t at, uint64_t value, unsigned bytes);
void ex_write_back_line(int host, uint32_t line);
void ex_invalidate_line(int host, uint32_t line);
void ex_lose_cache(int host);
void ex_memory_restore(void);
void ex_memory_keep(void);
void ex_memory_forget(void);
const char *ex_name_of(uint32_t at);
void ex_known_print(FILE *out);
void ex_known_parse(const char *text);
/* One of the cache events that the budget allows: does it happen? */
int ex_event(void);
/* Somebody may find something new: spinners look again. */
void ex_progress(int to_all);

/* operations.c: store buffers */
int ex_may_drain(const struct thread *thread, int at);
void ex_drain(struct thread *thread, int at);
void ex_drain_all(struct thread *thread);

/* schedule.c: who goes on */
/* A place where others may come between (`full`), or where only a death of the current worker matters. */
void ex_point(int full, const struct ex_site *site);
int ex_host_may_die(int host);
void ex_start(void);
void ex_threads_restore(void);
void ex_tell(const struct ex_site *site, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define ex_trace(...) do { if (ex.verbose) ex_tell(__VA_ARGS__); } while (0) /* its arguments take longer than the step */

/* choices.c: the trail of a run, and states seen before */
extern const char *const ex_kind_name[EX_KINDS];
void ex_trail_start(const char *replay, uint64_t seed, int greed);
void ex_trail_rewind(void);
/* Go on to the next run of the search: 0 when there is none. */
int ex_trail_next(void);
int ex_trail_new(void); /* look up the state here? */
int ex_trail_depth(void); /* choices made in this run */
void ex_trail_print(FILE *out);
void ex_states_forget(void);
uint64_t ex_states_count(void);
int ex_states_full(void);
/* Was the state seen before? Else it is now. */
int ex_state_seen(uint64_t hash);

/* private.c: memory of single threads */
void ex_private_keep(void);
void ex_private_restore(void);
void ex_private_forget(void);

/* search.c */
struct request {
    struct budgets limit;
    double seconds;         /* stop after about this long; 0: do not */
    uint64_t runs;          /* stop after so many; 0: do not */
    uint64_t random;        /* runs with random choices, instead of a search */
    uint64_t seed;
    int lazy;               /* write-backs and invalidates are late whenever they may be */
    int prune;              /* skip states seen before */
    int ladder;             /* fewer preemptions first: the shortest counterexample */
    const char *replay;     /* a trail, and what was known when it was recorded */
    const char *known;
};
struct result {
    uint64_t runs, pruned, steps, states;
    double seconds;
    int complete;           /* everything within the budgets was explored */
    int failed;
    int preemptions;        /* rung of the ladder */
    int restarts;           /* because of newly learned conflicts */
    uint32_t racy;          /* words and lines where the order of steps matters */
};
struct result ex_search(const struct ex_scenario *scenario, const struct request *request);
/* Leave a run, from inside one. */
void ex_leave_run(void) __attribute__((noreturn));

#endif
