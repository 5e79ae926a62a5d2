/* world.h -- pools for the scenarios: hosts and workers, what they store, what they must find. */
#ifndef WORLD_H
#define WORLD_H
#include "explorer.h"
#include "native/handle.h"

/* Of all workers; scenarios set it before the threads run. */
extern uint64_t world_time_ns;

struct world_request {
    uint32_t blocks, hosts, workers, lines; /* lines of 64 bytes a block; 0: 1 */
};
/* A new pool; host 0 makes it and is its first worker. */
kvp_pool *world_make(const struct world_request *request);
/* One more worker of a host. */
kvp_pool *world_join(uint32_t host);
/* The worker that thread `thread` is: for its death. Spawn it and say so in one. */
int world_spawn(kvp_pool *pool, void (*run)(void *pool), unsigned flags);
/* ex_scenario.died: the kernel marks the lock of the worker. */
void world_died(int thread);
/* The thread keeps nothing but what its handle holds, and is at `place`: see ex_merge. */
void world_merge(const kvp_pool *pool, uint64_t place);

/* ---- keys and what belongs to them ---- */

struct kvp_key world_key(uint32_t k);
/* What line `line` of a block under key k holds. */
uint64_t world_content(uint32_t k, uint32_t line);
/* Reserve, fill and publish one block under key k: its reference, or 0. */
uint64_t world_put(kvp_pool *pool, uint32_t k);
/* Match key k, look at every byte under the pin, unpin. 1 if it was there. */
int world_use(kvp_pool *pool, uint32_t k);
/* Read key k by copy: 1 if it was there. */
int world_read(kvp_pool *pool, uint32_t k);
/* The payload of a block must be that of key k, as this thread's host sees it. */
void world_look(const kvp_pool *pool, uint64_t ref, uint32_t k);

/* ---- afterwards ---- */

/* Recover whoever died, as the keepers of the host do. */
int world_recover(kvp_pool *pool);
/* The pool's own check finds nothing, as the host of the pool sees it; in ex_scenario.check. */
void world_check(kvp_pool *pool);

/* For standins.c. */
void standins_reset(void);
void standins_mark_dead(int thread, const struct kvp_keeper *keeper);
int standins_look_around(struct kvp_keeper *keeper);

#endif
