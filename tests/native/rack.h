/* rack.h -- what the driver of a simulated rack (rack.c) and its worker processes (rack_worker.h) share. */
#ifndef KVP_TEST_RACK_H
#define KVP_TEST_RACK_H
#include "tests/native/common.h"

enum { HOSTS = 4, WORKERS = 4, SEATS = HOSTS * WORKERS, SLOTS = 8, LEASE_MS = 400 };
enum { BLOCKS = 512, BLOCKS_MAX = 4096, CLASSES = 2, STRIDE = 1024, STRIDE_MAX = 3072, BYTES = 2560 << 10 };
enum { IDS = 320, FEW_IDS = 48, COPIES = 64, SEGMENTS = 256, NAMES = 96 };

enum verb { PUT, FILL, MATCH, LET_GO, COPY_OUT, SHRINK, REMOVE, GIVE, REVOKE, FOLLOW, LOOK_UP, CHECK, VERBS };

/* What the driver may ask of one worker. */
enum order {
    ORDER_RUN,     /* go on with verbs at random */
    ORDER_QUIET,   /* let go of everything, and wait for orders */
    ORDER_EMPTY,   /* evict all that this host has */
    ORDER_GIVE,    /* give segments: count << 8 | host */
    ORDER_SETTLE,  /* follow, take offers back, and say which segments are ours */
    ORDER_LOOK,    /* check this host, and note its blocks */
    ORDER_FIND,    /* find every block that any host has noted */
    ORDER_USE,     /* have every block once */
    ORDER_FENCE,   /* adopt a lost host */
    ORDER_LEAVE,   /* leave in order */
};

/* One worker process and its successors. */
struct seat {
    int pid;               /* 0: nobody */
    uint32_t spawns;
    uint32_t armed;        /* it has drawn a crash point to die at */
    uint32_t doing;        /* verb, or VERBS + order */
    uint64_t progress;     /* verbs and orders done */
    uint32_t order, argument;
    uint32_t serial, done; /* order number `serial` is given; `done` the last that was carried out */
    int64_t answer;
    uint64_t count[VERBS];
    uint64_t verified;
};

/* A block as its owner sees it in a quiet moment. */
struct noted {
    uint64_t owners;       /* a bit per host that says it is its own */
    uint64_t ref;          /* of the publication that is LIVE, or 0 */
    struct kvp_key key;
};

/* How one host stands in a quiet moment. */
struct standing {
    uint8_t is_ours[SEGMENTS];
    uint32_t moving, dead;
    uint64_t states[8];
    struct kvp_sim_counts lines;
};

struct rack {
    uint64_t seed;
    uint32_t classes;          /* 1, or 2 that share their segments, and whose lines of words lie across them */
    uint32_t segments, blocks[CLASSES];
    uint32_t round;            /* grows; 0 is none */
    uint32_t is_quiet;         /* a worker that starts now waits for orders */
    uint32_t is_roomy;         /* nothing is removed or evicted on purpose, and there is room for all keys */
    uint32_t crash_odds;       /* one verb in so many arms a crash point; 0: none does */
    uint32_t weight[VERBS], weights;
    uint64_t evictions;        /* blocks locked for eviction, by all */
    uint32_t must[IDS];        /* round in which a publication of this key was confirmed */
    struct seat seats[SEATS];
    struct noted noted[CLASSES][BLOCKS_MAX];
    struct standing standing[HOSTS];
    const char *names[NAMES];  /* crash points that were passed: literals, at the same address in all forks */
    char uri[128];
};

static struct rack *rack;

#define shared_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define shared_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define shared_add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_ACQ_REL)

/* Each key belongs to one class. */
static inline uint32_t class_of(uint64_t id) { return (uint32_t)(id % rack->classes); }
static inline uint64_t stride_of(uint32_t c) { return c ? STRIDE_MAX : STRIDE; }

static inline uint64_t draw_from(uint64_t *state, uint64_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return mix(*state) % n;
}
#endif
