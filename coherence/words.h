/* words.h -- the only way to touch memory that workers or hosts share: typed words, and lines to write back or drop.
 *
 * The same text is compiled once per mode (KVP_MODE). What differs is here and nowhere else:
 *
 *   KVP_COHERENT     one host, or hardware that keeps the hosts coherent: write-backs and invalidates are nothing,
 *                    the atomics carry the order
 *   KVP_NONCOHERENT  hosts that nothing keeps coherent: the CPU's cache instructions (lines.c chooses them once)
 *   KVP_SIM          simulated hosts: every store marks its line in the host's cache image (sim.c)
 *   KVP_EXPLORE      a scheduler that enumerates what may happen stands behind every macro (tests/explorer)
 *
 * co_* words are coherent among the workers of one host and may be read-modify-written by any of them.
 * nc_* words may be read by other hosts as well: one writer host at any time; only its workers may CAS them; others
 * invalidate, fence, load, and check what they loaded. Two wrapper types, so that mixing them does not compile.
 *
 * The discipline of lines:
 *   nc_write_back(p, n)   start writing the lines of [p, p+n) back to the device
 *   nc_write_fence()      earlier write-backs and stores are in memory before later stores; orders no later load
 *   nc_invalidate(p, n)   drop the lines of [p, p+n), so that the next load reads the device. Never of a line that the
 *                         own host may have written: the CPU would write it back over what another host wrote
 *   nc_read_fence()       later loads are not satisfied by what was read, or cached, before this point
 *   nc_full_fence()       both, and no later load overtakes an earlier store: the Dekker of pin and evict
 *   nc_will_store(p, n)   [p, p+n) may be written by plain stores from now on, until a write-back. Free on hardware
 *
 * nc_write_back is not ordered against a following nc_invalidate: where the one must reach memory before the other
 * reads it, nc_write_fence stands between, and nc_full_fence before the load.
 */
#ifndef KVP_WORDS_H
#define KVP_WORDS_H
#include <stddef.h>
#include <stdint.h>

#define KVP_COHERENT 0
#define KVP_NONCOHERENT 1
#define KVP_SIM 2
#define KVP_EXPLORE 3
#ifndef KVP_MODE
#define KVP_MODE KVP_COHERENT
#endif
/* Is the memory shared by hosts that do not see each other's caches? A constant: the compiler drops the other branch. */
#define KVP_MANY_HOSTS (KVP_MODE != KVP_COHERENT)

typedef struct { uint32_t co32; } co_u32;
typedef struct { uint64_t co64; } co_u64;
typedef struct { uint64_t nc64; } nc_u64;
_Static_assert(__GCC_ATOMIC_LLONG_LOCK_FREE == 2, "a lock table would be private to each process");

#if KVP_MODE == KVP_EXPLORE
#include <explore_words.h>
#else

#define co_load32(p) __atomic_load_n(&(p)->co32, __ATOMIC_ACQUIRE)
#define co_store32(p, v) __atomic_store_n(&(p)->co32, (v), __ATOMIC_RELEASE)
#define co_exchange32(p, v) __atomic_exchange_n(&(p)->co32, (v), __ATOMIC_ACQ_REL)
#define co_cas32(p, seen, v) \
    __atomic_compare_exchange_n(&(p)->co32, (seen), (v), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
#define co_load(p) __atomic_load_n(&(p)->co64, __ATOMIC_ACQUIRE)
#define co_load_relaxed(p) __atomic_load_n(&(p)->co64, __ATOMIC_RELAXED)
#define co_store(p, v) __atomic_store_n(&(p)->co64, (v), __ATOMIC_RELEASE)
#define co_store_relaxed(p, v) __atomic_store_n(&(p)->co64, (v), __ATOMIC_RELAXED)
#define co_exchange(p, v) __atomic_exchange_n(&(p)->co64, (v), __ATOMIC_ACQ_REL)
#define co_add(p, v) __atomic_fetch_add(&(p)->co64, (v), __ATOMIC_RELAXED)
#define co_or(p, v) __atomic_fetch_or(&(p)->co64, (v), __ATOMIC_RELEASE)
#define co_and(p, v) __atomic_fetch_and(&(p)->co64, (v), __ATOMIC_ACQ_REL)
#define co_cas(p, seen, v) \
    __atomic_compare_exchange_n(&(p)->co64, (seen), (v), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

#if KVP_MODE == KVP_SIM

uint64_t kvp_sim_load(const nc_u64 *p);
void kvp_sim_store(nc_u64 *p, uint64_t value);
int kvp_sim_cas(nc_u64 *p, uint64_t *seen, uint64_t value);
void kvp_sim_write_back(const void *p, uint64_t bytes);
void kvp_sim_invalidate(const void *p, uint64_t bytes);
void kvp_sim_will_store(void *p, uint64_t bytes);
void kvp_sim_fence(void);
#define nc_load(p) kvp_sim_load(p)
#define nc_load_relaxed(p) kvp_sim_load(p)
#define nc_store(p, v) kvp_sim_store((p), (v))
#define nc_store_relaxed(p, v) kvp_sim_store((p), (v))
#define nc_cas(p, seen, v) kvp_sim_cas((p), (seen), (v))
#define nc_write_back(p, n) kvp_sim_write_back((p), (n))
#define nc_invalidate(p, n) kvp_sim_invalidate((p), (n))
#define nc_will_store(p, n) kvp_sim_will_store((p), (n))
#define nc_write_fence() kvp_sim_fence()
#define nc_read_fence() kvp_sim_fence()
#define nc_full_fence() kvp_sim_fence()

#else

#define nc_load(p) __atomic_load_n(&(p)->nc64, __ATOMIC_ACQUIRE)
#define nc_load_relaxed(p) __atomic_load_n(&(p)->nc64, __ATOMIC_RELAXED)
#define nc_store(p, v) __atomic_store_n(&(p)->nc64, (v), __ATOMIC_RELEASE)
#define nc_store_relaxed(p, v) __atomic_store_n(&(p)->nc64, (v), __ATOMIC_RELAXED)
#define nc_cas(p, seen, v) \
    __atomic_compare_exchange_n(&(p)->nc64, (seen), (v), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
#define nc_will_store(p, n) ((void)(p), (void)(n))

#if KVP_MODE == KVP_NONCOHERENT

/* In lines.c: clwb, clflushopt or clflush and sfence, mfence; dc cvac, dc civac and dsb on arm64. */
void kvp_write_back(const void *p, uint64_t bytes);
void kvp_invalidate(const void *p, uint64_t bytes);
void kvp_write_fence(void);
void kvp_full_fence(void);
#define nc_write_back(p, n) kvp_write_back((p), (n))
#define nc_invalidate(p, n) kvp_invalidate((p), (n))
#define nc_write_fence() kvp_write_fence()
#define nc_read_fence() kvp_full_fence() /* clflushopt is ordered by mfence alone */
#define nc_full_fence() kvp_full_fence()

#else

#define nc_write_back(p, n) ((void)(p), (void)(n))
#define nc_invalidate(p, n) ((void)(p), (void)(n))
#if defined(__SANITIZE_THREAD__)
#define KVP_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVP_TSAN 1
#endif
#endif
#ifdef KVP_TSAN
/* The sanitizer does not see stand-alone fences; the words' own acquire and release carry the order it
 * checks. A read-modify-write of a dummy keeps the machine order of the full fence. */
void kvp_fence_rmw(void);
#define nc_write_fence() __atomic_signal_fence(__ATOMIC_SEQ_CST)
#define nc_read_fence() __atomic_signal_fence(__ATOMIC_SEQ_CST)
#define nc_full_fence() kvp_fence_rmw()
#else
#define nc_write_fence() __atomic_thread_fence(__ATOMIC_RELEASE)
#define nc_read_fence() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define nc_full_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#endif

#endif
#endif
#endif /* not KVP_EXPLORE */

/* Orders stores to and loads from host memory; says nothing about lines of the pool. */
#ifndef co_full_fence
#if KVP_MODE == KVP_SIM
#define co_full_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#else
#define co_full_fence() nc_full_fence()
#endif
#endif

/* Between what makes a publication known on its host and a look who sleeps there. With many hosts the former is a locked
 * operation (kvp_know), which on x86-64 is a full fence by itself. */
#if KVP_MANY_HOSTS && defined(__x86_64__)
#define co_known_fence() ((void)0)
#else
#define co_known_fence() co_full_fence()
#endif

#endif
