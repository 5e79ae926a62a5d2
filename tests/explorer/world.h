/* world.h -- pools for the scenarios: hosts and workers, what they store, what they must find. */
#ifndef WORLD_H
#define WORLD_H
#include "explorer.h"
#include "native/handle.h"

#define IS(call, expected) \
    do { \
        int64_t is_what = (int64_t)(call); \
        EX_CHECK(is_what == (int64_t)(expected), #call " is %lld, not " #expected, (long long)is_what); \
    } while (0)

/* Of all workers; scenarios set it before the threads run. */
extern uint64_t world_time_ns;
extern int world_same_boot;      /* machines that come in a run say that they have not been reset: their memory is new */
extern int world_other_machines; /* they say that they have not been there before */
extern void (*world_slept)(void); /* what else happens while a thread sleeps */

struct world_request {
    uint32_t hosts, workers; /* workers: of each host */
    uint32_t blocks;         /* of the last host, at most 8; the others have 8 each, because a line of words has one owner */
    uint32_t lines;          /* of 64 bytes a block; 0: 1 */
    uint32_t stride[2];      /* instead of blocks and lines: two classes, of blocks of so many bytes, of which one line is used */
    uint32_t segments;       /* then: of 64 KiB each */
    const char *policy;      /* NULL: lru */
};
/* A new pool; host 0 makes it and is its first worker. */
kvp_pool *world_make(const struct world_request *request);
/* Or only the memory for it, with `regions` (1 or 2) of host memory on each machine: then a run makes it, as host 0, by
 * world_create. */
void world_prepare(const struct world_request *request, int regions);
kvp_pool *world_create(void);
/* Another region of host memory, in setup, for a host that begins anew. */
void world_add_memory(int machine);
/* The thread's own clock goes on. */
void world_sleep_ms(uint64_t ms);
/* Reserve every block of a host, for a worker of it that never does anything. */
void world_hoard(uint32_t host);
/* One more worker of a host. */
kvp_pool *world_join(uint32_t host);
/* In a run: a process that opens the pool as a worker of `host`; NULL if it is refused. Its thread is spawned by
 * world_spawn_machine: it runs on `machine`, and has no handle before. */
kvp_pool *world_open(uint32_t host);
int world_spawn_machine(int machine, void (*run)(void *none), unsigned flags);
/* A thread that is the worker `pool`. */
int world_spawn(kvp_pool *pool, void (*run)(void *pool), unsigned flags);
/* ex_scenario.died: the kernel marks the lock of the worker. */
void world_died(int thread);
/* The thread keeps nothing but what its handle holds, and is at `place`: see ex_merge. */
void world_merge(const kvp_pool *pool, uint64_t place);

/* ---- keys and what belongs to them ---- */

struct kvp_key world_key(uint32_t k);
/* What line `line` of a block under key k holds. */
uint64_t world_content(uint32_t k, uint32_t line);
/* Reserve, fill and publish a block under each of the keys k to k + n - 1: how many were published. */
int world_put(kvp_pool *pool, uint32_t k, uint32_t n);
int world_put_in(kvp_pool *pool, uint32_t c, uint32_t k, uint32_t n);
/* As world_put of one key, but kept: 1 published and pinned, 0 still reserved (`number`), -1 there was no room. */
int world_keep(kvp_pool *pool, uint32_t k, uint32_t *number, uint64_t *ref);
/* Match keys k to k + n - 1, look at every byte under the pins, unpin. Returns how many were there. */
int world_use(kvp_pool *pool, uint32_t k, uint32_t n);
int world_use_in(kvp_pool *pool, uint32_t c, uint32_t k, uint32_t n);
/* Read key k by copy: 1 if it was there. */
int world_read(kvp_pool *pool, uint32_t k);
/* The payload of a block must be that of key k, as this thread's host sees it. */
void world_look(const kvp_pool *pool, uint64_t ref, uint32_t k);

/* ---- afterwards ---- */

/* For threads that are EX_LAST: what one host has, by itself, of keys 0 to n - 1, is what another host, that has caught
 * up, finds; every byte is looked at. */
void world_remember(kvp_pool *pool, uint32_t keys);
void world_compare(kvp_pool *pool, uint32_t keys);

/* Recover whoever died, as the keepers of the host do. */
int world_recover(kvp_pool *pool);
/* The pool's own check finds nothing, as the host of the pool sees it; in ex_scenario.check. */
void world_check(kvp_pool *pool);
/* The same in a thread, for a host that has moved to another machine. */
void world_check_here(kvp_pool *pool);

/* ---- threads that many scenarios have ---- */

/* What a keeper does every 100 ms. */
void world_tick(void *pool);
void world_follow(void *pool);
/* Recover whoever died, and at the next tick make known what they had published. */
void world_mend(void *pool);
/* At the end world_remember by the one and world_compare by the other. */
void world_spawn_compare(kvp_pool *has, kvp_pool *finds, uint32_t keys);

/* In a run: world_open, which must succeed; later threads of the machine, and checks, find the handle. */
kvp_pool *world_come(uint32_t host);
kvp_pool *world_there(int machine);
void world_follow_there(void *none);
/* At the end, after all have looked around, world_spawn_compare of what has come to a machine. */
void world_spawn_compare_there(int machine, kvp_pool *finds, uint32_t keys);

/* For standins.c. */
void standins_reset(void);
void standins_add_machine(int machine, int regions, uint64_t bytes);
uint8_t *standins_add_device(uint64_t bytes);
void standins_mark_dead(int thread, const struct kvp_keeper *keeper);
int standins_look_around(struct kvp_keeper *keeper);
void standins_pass(uint64_t ns);

/* Called, where a scenario sets them after its pool is made, when a worker yields, or removes the pool's name. */
extern void (*standins_yielding)(void), (*standins_unlinking)(void);
extern uint64_t standins_forks; /* as if this process were the child of so many forks */
extern int standins_kind;       /* enum kvp_mapping_kind */

#endif
