/* explore_words.h -- the macros of words.h in the mode KVP_EXPLORE: each is a step that the explorer schedules. */
#ifndef EXPLORE_WORDS_H
#define EXPLORE_WORDS_H
#include "explorer.h"

#define co_load32(p) ((uint32_t)ex_load(&(p)->co32, 4, EX_SITE(EX_LOAD)))
#define co_store32(p, v) ex_store(&(p)->co32, (uint32_t)(v), 4, EX_SITE(EX_STORE))
#define co_exchange32(p, v) ((uint32_t)ex_change(&(p)->co32, EX_EXCHANGE, (uint32_t)(v), 4, EX_SITE(EX_CHANGE)))
#define co_cas32(p, seen, v) \
    ({ \
        uint32_t *ex_seen32 = (seen); \
        uint64_t ex_seen = *ex_seen32; \
        int ex_done = ex_cas(&(p)->co32, &ex_seen, (uint32_t)(v), 4, EX_SITE(EX_CAS)); \
        *ex_seen32 = (uint32_t)ex_seen; \
        ex_done; \
    })
#define co_load(p) ex_load(&(p)->co64, 8, EX_SITE(EX_LOAD))
#define co_load_relaxed(p) ex_load(&(p)->co64, 8, EX_SITE(EX_LOAD))
#define co_store(p, v) ex_store(&(p)->co64, (v), 8, EX_SITE(EX_STORE))
#define co_store_relaxed(p, v) ex_store(&(p)->co64, (v), 8, EX_SITE(EX_STORE))
#define co_exchange(p, v) ex_change(&(p)->co64, EX_EXCHANGE, (v), 8, EX_SITE(EX_CHANGE))
#define co_add(p, v) ex_change(&(p)->co64, EX_ADD, (v), 8, EX_SITE(EX_CHANGE))
#define co_or(p, v) ex_change(&(p)->co64, EX_OR, (v), 8, EX_SITE(EX_CHANGE))
#define co_and(p, v) ex_change(&(p)->co64, EX_AND, (v), 8, EX_SITE(EX_CHANGE))
#define co_cas(p, seen, v) ex_cas(&(p)->co64, (seen), (v), 8, EX_SITE(EX_CAS))

#define co_full_fence() ex_host_fence(EX_SITE(EX_HOST_FENCE))

#define nc_load(p) ex_load(&(p)->nc64, 8, EX_SITE(EX_LOAD))
#define nc_load_relaxed(p) ex_load(&(p)->nc64, 8, EX_SITE(EX_LOAD))
#define nc_store(p, v) ex_store(&(p)->nc64, (v), 8, EX_SITE(EX_STORE))
#define nc_store_relaxed(p, v) ex_store(&(p)->nc64, (v), 8, EX_SITE(EX_STORE))
#define nc_cas(p, seen, v) ex_cas(&(p)->nc64, (seen), (v), 8, EX_SITE(EX_CAS))

#define nc_write_back(p, n) ex_write_back((p), (n), EX_SITE(EX_WRITE_BACK))
#define nc_invalidate(p, n) ex_invalidate((p), (n), EX_SITE(EX_INVALIDATE))
#define nc_will_store(p, n) ((void)(p), (void)(n)) /* payload is stored through kvp_copy_in here, which is simulated */
#define nc_write_fence() ex_write_fence(EX_SITE(EX_WRITE_FENCE))
#define nc_read_fence() ex_read_fence(EX_SITE(EX_READ_FENCE))
#define nc_full_fence() ex_full_fence(EX_SITE(EX_FULL_FENCE))

#endif
